"""Python: the client that openapi-python-client makes from the document drives the running service."""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.clients.support import DOCUMENT, KEY, LOCAL
from tests.service.support import Process, check_timings, strict_json


@pytest.fixture
def client(generated: ModuleType, service: Process) -> Iterator[Any]:
    with generated.AuthenticatedClient(
        base_url=service.url, token=KEY, raise_on_unexpected_status=True, **LOCAL
    ) as client:
        yield client


def test_each_operation_of_the_document_has_its_function(api: Any) -> None:
    for operations in strict_json(DOCUMENT.read_bytes())["paths"].values():
        for operation in operations.values():
            assert callable(api(operation["operationId"]).sync_detailed)


def test_a_prompt_is_answered_with_text_usage_and_timings(client: Any, api: Any, models: Any) -> None:
    body = models.GenerateRequest(prompt="hello ", max_tokens=9, request_id="mine", return_token_ids=True)
    answer = api("generate").sync(client=client, body=body)
    assert isinstance(answer, models.GenerateResponse)
    (output,) = answer.outputs
    assert (output.text, output.token_ids) == ("HELLO HEL", list(b"HELLO HEL"))
    assert output.finish_reason is models.GeneratedOutputFinishReason.LENGTH
    assert (answer.request_id, answer.usage.completion_tokens, answer.sampling["max_tokens"]) == ("mine", 9, 9)
    assert 0 < answer.timings.ttft_ms <= answer.timings.e2e_ms
    assert answer.window.release is models.WindowInfoRelease.MAX_WAIT


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_conversation_is_answered(client: Any, api: Any, models: Any, as_parts: bool) -> None:
    content = [models.TextPart(type_="text", text="abc")] if as_parts else "abc"
    messages = [models.ChatMessage(role="user", content=content)]
    answer = api("generate").sync(client=client, body=models.GenerateRequest(messages=messages, max_tokens=21))
    assert answer.outputs[0].text == "<USER>ABC\n<ASSISTANT>"


def test_every_sampling_setting_arrives_as_it_was_given(client: Any, api: Any, models: Any) -> None:
    bias = models.GenerateRequestLogitBiasType0.from_dict({"65": 1.5})
    given = {"temperature": 0.5, "top_k": 3, "seed": -(2**62), "stop": ["Z"], "logprobs": 2, "bad_words": ["x"]}
    body = models.GenerateRequest(prompt="ab", max_tokens=2, logit_bias=bias, **given)
    answer = api("generate").sync(client=client, body=body)
    assert {name: answer.sampling[name] for name in given} == given
    assert answer.sampling["logit_bias"] == {"65": 1.5}
    assert [len(entry.top) for entry in answer.outputs[0].logprobs] == [1, 1]


def test_a_batch_with_failing_rows_gives_each_row_its_own_status(client: Any, api: Any, models: Any) -> None:
    prompts: list[dict[str, Any]] = [
        {"prompt": "one"},
        {"prompt": "x", "top_p": 7.0},
        {"prompt": "BOOM"},
        {"prompt": "two"},
    ]
    requests = [models.GenerateRequest(**fields) for fields in prompts]
    body = models.BatchRequest(requests=requests, defaults=models.BatchDefaults(max_tokens=3))
    answer = api("batch").sync(client=client, body=body)
    assert isinstance(answer, models.BatchResponse)
    assert [row.status for row in answer.results] == [200, 400, 500, 200]
    assert [row.response and row.response.outputs[0].text for row in answer.results] == ["ONE", None, None, "TWO"]
    assert [row.error and row.error.code for row in answer.results] == [
        None,
        "invalid_request",
        "generation_failed",
        None,
    ]
    assert answer.results[1].error.param == "top_p"
    assert answer.counts.to_dict() == {"total": 4, "succeeded": 2, "failed": 2}


def test_a_field_left_out_of_a_request_leaves_the_batchs_default_in_force(client: Any, api: Any, models: Any) -> None:
    """A client that sent each field's own default would override what the batch says for all."""
    defaults = models.BatchDefaults(return_token_ids=True, max_tokens=2)
    body = models.BatchRequest(requests=[models.GenerateRequest(prompt="ab")], defaults=defaults)
    (row,) = api("batch").sync(client=client, body=body).results
    assert row.response.outputs[0].token_ids == list(b"AB")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": "x", "temperature": -1.0}, "invalid_request", "temperature"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": "x" * 5000}, "context_length_exceeded", None),
    ],
)
def test_a_refusal_is_parsed_as_an_error_body(
    client: Any, api: Any, models: Any, fields: dict[str, Any], code: str, param: str | None
) -> None:
    answer = api("generate").sync_detailed(client=client, body=models.GenerateRequest(**fields))
    assert answer.status_code == 400
    assert isinstance(answer.parsed, models.ErrorBody)
    assert (answer.parsed.error.code, answer.parsed.error.param) == (code, param)
    assert answer.parsed.error.message
    assert answer.headers["x-request-id"]


def test_other_errors_are_parsed_too(client: Any, api: Any, models: Any) -> None:
    for fields, status, code in (
        ({"prompt": "x", "model": "another"}, 404, "model_not_found"),
        ({"prompt": "BOOM"}, 500, "generation_failed"),
    ):
        answer = api("generate").sync_detailed(client=client, body=models.GenerateRequest(**fields))
        assert (answer.status_code, answer.parsed.error.code) == (status, code)


def test_a_wrong_key_is_401_and_probes_need_none(
    generated: ModuleType, service: Process, api: Any, models: Any
) -> None:
    stranger = generated.AuthenticatedClient(base_url=service.url, token="wrong", **LOCAL)
    with stranger as client:
        answer = api("info").sync_detailed(client=client)
        assert (answer.status_code, answer.parsed.error.code) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    with generated.Client(base_url=service.url, **LOCAL) as client:
        for name in ("livez", "readyz", "health"):
            assert api(name).sync(client=client).status is models.HealthStatus.READY


def test_what_runs_here_is_typed(client: Any, api: Any, service: Process) -> None:
    info = api("info").sync(client=client)
    assert (info.model, info.backend.kind, info.limits.max_model_len) == (info.settings["model"], "fake", 2048)
    assert "batchserve_tokens_total" in api("metrics").sync_detailed(client=client).content.decode()


async def test_it_works_with_asyncio(generated: ModuleType, service: Process, api: Any, models: Any) -> None:
    async with generated.AuthenticatedClient(base_url=service.url, token=KEY, **LOCAL) as client:
        body = models.GenerateRequest(prompt="ab", max_tokens=2)
        answer = await api("generate").asyncio(client=client, body=body)
    assert answer.outputs[0].text == "AB"


def test_descriptions_reach_the_reader_of_the_client(models: Any) -> None:
    assert "in milliseconds" in (inspect.getdoc(models.Timings) or "")
    assert "`default_max_tokens`" in (inspect.getdoc(models.GenerateRequest) or "")


# --- OpenAI's routes ------------------------------------------------------------------------------------------------


def test_the_models_are_typed(client: Any, api: Any, models: Any) -> None:
    (listed,) = api("models").sync(client=client).data
    assert isinstance(listed, models.Model)
    assert (listed.id, listed.max_model_len) == (api("info").sync(client=client).model, 2048)
    assert api("model").sync(listed.id, client=client) == listed
    missing = api("model").sync_detailed("another/one", client=client)
    assert (missing.status_code, missing.parsed.error.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["AB"]), (["ab", "cd"], ["AB", "CD"]), ([97, 98], ["AB"]), ([[97, 98], [99, 100]], ["AB", "CD"])],
    ids=str,
)
def test_prompts_of_each_form_are_completed(client: Any, api: Any, models: Any, prompt: Any, texts: list[str]) -> None:
    body = models.CompletionRequest(prompt=prompt, max_tokens=2)
    answer = api("completions").sync(client=client, body=body)
    assert isinstance(answer, models.Completion)
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage.completion_tokens == 2 * len(texts)
    check_timings(answer.metrics.timings.to_dict())
    if len(texts) > 1:
        assert [request.window.position for request in answer.metrics.requests] == [0, 1]
    else:
        assert not answer.metrics.requests


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_chat_is_answered(client: Any, api: Any, models: Any, as_parts: bool) -> None:
    content = [models.TextPart(type_="text", text="abc")] if as_parts else "abc"
    messages = [models.ChatMessage(role="user", content=content)]
    body = models.ChatCompletionRequest(messages=messages, max_completion_tokens=21, logprobs=True, top_logprobs=1)
    answer = api("chat_completions").sync(client=client, body=body)
    assert isinstance(answer, models.ChatCompletion)
    (choice,) = answer.choices
    assert choice.message.content == "<USER>ABC\n<ASSISTANT>"
    assert len(choice.logprobs.content) == 21
    check_timings(answer.metrics.timings.to_dict())


def test_a_refusal_of_openais_routes_is_parsed_as_an_error_body(client: Any, api: Any, models: Any) -> None:
    body = models.CompletionRequest(prompt="x")
    body["best_of"] = 2
    answer = api("completions").sync_detailed(client=client, body=body)
    assert (answer.status_code, answer.parsed.error.param) == (400, "best_of")
    body = models.ChatCompletionRequest(messages=[])
    answer = api("chat_completions").sync_detailed(client=client, body=body)
    assert (answer.status_code, answer.parsed.error.param) == (400, "messages")
