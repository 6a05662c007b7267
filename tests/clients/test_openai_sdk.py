"""OpenAI's own SDK against the service with a real engine: what people already have works by its base URL alone."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.clients.support import KEY
from tests.engine.process import ServiceProcess
from tests.service.support import LOCAL, Caller, check_timings

pytestmark = pytest.mark.engine

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
IGNORE_END = {"ignore_eos": True}
VLLMS = ("time_to_first_token_ms", "queue_time_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second")


def metrics_of(answer: Any) -> dict[str, Any]:
    """The service's own part of an answer, checked: the seven durations add up to what the caller waited."""
    metrics: dict[str, Any] = answer.model_extra["metrics"]
    check_timings(metrics["timings"])
    window = metrics["window"]
    assert window is None or window["position"] < window["size"] <= 4
    return metrics


def counted(usage: Any) -> list[int]:
    """Its numbers of tokens; a stream leaves out what is null."""
    cached: int = usage.prompt_tokens_details.cached_tokens
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, cached]


def test_the_model_is_listed_and_found_by_its_name(sdk: openai.OpenAI) -> None:
    (listed,) = sdk.models.list().data
    assert (listed.id, listed.object) == ("tiny", "model")
    assert sdk.models.retrieve("tiny") == listed
    assert listed.model_extra
    assert listed.model_extra["max_model_len"] == 2048


def test_a_completion_has_its_text_usage_and_timings(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="tiny", prompt="The capital of France", max_tokens=5, temperature=0)
    (choice,) = answer.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)
    metrics = metrics_of(answer)
    times = metrics["timings"]
    expected = [times[name] for name in ("prefill_ms", "engine_queue_ms", "decode_ms", "itl_ms", "tokens_per_s")]
    assert [metrics[name] for name in VLLMS] == expected
    assert 0 < times["prefill_ms"] < times["ttft_ms"] < times["e2e_ms"]


def test_the_defaults_are_those_of_vllms_server(sdk: openai.OpenAI) -> None:
    short = sdk.completions.create(model="tiny", prompt="x", extra_body={"ignore_eos": True})
    most: Any = [{"role": "user", "content": "one " * 1900}]  # leaves little of the context
    long = sdk.chat.completions.create(model="tiny", messages=most, extra_body={"ignore_eos": True})
    assert short.usage
    assert short.usage.completion_tokens == 16
    assert long.usage
    assert long.usage.total_tokens == 2048


@pytest.mark.parametrize(
    ("prompt", "alike"),
    [
        (["one two", "three"], ["one two", "three"]),
        ([504, 3575], [[504, 3575]]),
        ([[504, 3575], [282]], [[504, 3575], [282]]),
    ],
    ids=["texts", "ids", "lists of ids"],
)
def test_prompts_in_a_list_get_the_choices_that_each_gets_alone(sdk: openai.OpenAI, prompt: Any, alike: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    answer = sdk.completions.create(prompt=prompt, **asked)
    alone = [sdk.completions.create(prompt=one, **asked).choices[0].text for one in alike]
    assert [choice.text for choice in answer.choices] == alone
    assert [choice.index for choice in answer.choices] == list(range(len(alike)))


def test_each_prompt_of_a_list_has_timings_of_its_own(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="tiny", prompt=["a", "b b", "c c c"], max_tokens=3, n=2, temperature=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    metrics = metrics_of(answer)
    requests = metrics["requests"]
    assert len(requests) == 3
    assert requests[0] == {name: value for name, value in metrics.items() if name != "requests"}
    for request in requests:
        check_timings(request["timings"])
        assert [request[name] for name in VLLMS] == [None] * 5  # of several outputs vLLM has no statistics
    stamps = {request["timings"]["request_state_stats"]["queued_ts"] for request in requests}
    assert len(stamps) == 3


def test_a_conversation_may_have_its_content_as_parts(sdk: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Say something."}]}]
    asked: dict[str, Any] = {"model": "tiny", "max_completion_tokens": 4, "temperature": 0}
    first, second = (sdk.chat.completions.create(messages=messages, **asked) for messages in (MESSAGES, parts))
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].message.content
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage
    assert second.usage
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    metrics_of(first)


def test_an_answer_can_be_sent_back_as_a_part_of_the_conversation(sdk: openai.OpenAI) -> None:
    said = sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).choices[0].message
    messages = [*MESSAGES, said, {"role": "user", "content": "More."}]
    again = sdk.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"return_prompt_text": True}
    )
    assert again.model_extra
    assert again.model_extra["prompt_text"].endswith(f"assistant: {said.content}\nuser: More.\nassistant: ")


def test_variables_of_the_template_arrive(sdk: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"shout": True}, "return_prompt_text": True, "add_generation_prompt": False}
    answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body=body)
    assert answer.model_extra
    assert answer.model_extra["prompt_text"] == "user: SAY SOMETHING.\n"


def test_seeds_and_temperatures_do_what_they_say(sdk: openai.OpenAI) -> None:
    def text(**asked: Any) -> str | None:
        answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, **asked)
        return answer.choices[0].message.content

    assert text(seed=1, temperature=1) == text(seed=1, temperature=1) != text(seed=2, temperature=1)
    assert text(temperature=0) == text(temperature=0) != text(seed=1, temperature=1)


def test_n_gives_several_choices_that_differ(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, n=3, temperature=1)
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage
    assert answer.usage.completion_tokens <= 18
    assert metrics_of(answer)["time_to_first_token_ms"] is None


def test_a_stop_string_ends_the_text_before_it(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 8, "temperature": 0}
    whole = sdk.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    choice = sdk.completions.create(**asked, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra
    assert choice.model_extra["stop_reason"] == stop


def test_min_tokens_and_ignore_eos_set_the_length(sdk: openai.OpenAI) -> None:
    for extra in ({"min_tokens": 40}, {"ignore_eos": True}):
        answer = sdk.completions.create(model="tiny", prompt="x", max_tokens=40, extra_body=extra)
        assert answer.usage
        assert answer.usage.completion_tokens == 40


def test_logprobs_of_a_chat_list_the_likeliest_tokens(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs
    assert choice.logprobs.content
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 4
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) < 0  # greedy takes the likeliest
        assert entry.bytes == list(entry.token.encode())


def test_echo_scores_a_given_text(sdk: openai.OpenAI) -> None:
    text = "Water boils at 100 degrees"
    answer = sdk.completions.create(model="tiny", prompt=text, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == text
    scores = choice.logprobs
    assert scores
    assert scores.tokens
    assert scores.token_logprobs
    assert scores.text_offset
    assert scores.top_logprobs
    assert "".join(scores.tokens) == text
    assert scores.token_logprobs[0] is None
    assert all(score < 0 for score in scores.token_logprobs[1:])
    assert [text[start:end] for start, end in pairwise([*scores.text_offset, len(text)])] == scores.tokens
    assert all(2 <= len(top) <= 3 for top in scores.top_logprobs[1:])


def test_a_text_is_scored_as_it_was_when_it_was_generated(sdk: openai.OpenAI) -> None:
    body = {"return_token_ids": True}
    made = sdk.completions.create(
        model="tiny", prompt=[504, 3575, 282], max_tokens=5, logprobs=1, temperature=1, extra_body=body
    ).choices[0]
    assert made.model_extra
    assert made.logprobs
    assert made.logprobs.token_logprobs
    ids = made.model_extra["prompt_token_ids"] + made.model_extra["token_ids"]
    assert ids[:3] == [504, 3575, 282]
    scored = sdk.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.logprobs
    assert scored.logprobs.token_logprobs
    assert scored.logprobs.token_logprobs[-5:] == pytest.approx(made.logprobs.token_logprobs, abs=0.1)


def test_ids_and_ignored_fields_are_in_the_headers(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=1,
        user="me",
        store=False,
        metadata={"run": "7"},
        extra_body={"no_such_field": 1},
        extra_headers={"x-request-id": "mine-1"},
    )
    answer = raw.parse()
    assert raw.headers["x-request-id"] == answer._request_id == "mine-1"
    assert answer.id == "chatcmpl-mine-1"
    assert raw.headers["x-ignored-fields"] == "no_such_field"  # user, store and metadata change nothing anywhere


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_streamed_completion_is_the_same_in_chunks(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["a b", "c"], "max_tokens": 4, "temperature": 0}
    whole = sdk.completions.create(**asked)
    *chunks, last = sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in chunks:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert last.choices == []
    assert counted(last.usage) == counted(whole.usage)
    assert len(metrics_of(last)["requests"]) == 2


def test_a_streamed_chat_is_the_same_in_chunks(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    whole = sdk.chat.completions.create(**asked)
    first, *chunks, last = sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert first.choices[0].delta.role == "assistant"
    said = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in said) == whole.choices[0].message.content
    assert said[-1].finish_reason == "length"
    assert last.choices == []
    assert counted(last.usage) == counted(whole.usage)
    metrics_of(last)


def test_without_usage_the_last_chunk_has_the_metrics(sdk: openai.OpenAI) -> None:
    *_, last = sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, stream=True)
    assert last.choices[0].finish_reason == "length"
    assert last.usage is None
    metrics_of(last)


def test_usage_can_be_had_in_every_chunk(sdk: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=3, n=2, temperature=1, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts[0] == 0
    assert counts[-1] == 6


def test_tokens_come_as_they_are_made_where_the_backend_streams(sdk: openai.OpenAI, backend: str) -> None:
    stream = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=120, temperature=1, seed=1, stream=True, extra_body=IGNORE_END
    )
    timed = [(time.time(), chunk) for chunk in stream]
    moments = [moment for moment, chunk in timed if chunk.choices and chunk.choices[0].delta.content]
    times = metrics_of(timed[-1][1])["timings"]
    if backend == "vllm_python":
        assert len(moments) > 20
        assert moments[0] < times["last_token_at"]
    else:
        assert moments[0] > times["last_token_at"]


async def test_async_calls_share_windows_where_there_are_any(async_sdk: openai.AsyncOpenAI, backend: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    chats = [async_sdk.chat.completions.create(messages=MESSAGES, **asked) for _ in range(4)]
    texts = [async_sdk.completions.create(prompt="x", **asked) for _ in range(4)]
    answers: list[Any] = await asyncio.gather(*chats, *texts)
    windows = [metrics_of(answer)["window"] for answer in answers]
    if backend == "vllm_offline":
        assert len({window["id"] for window in windows}) < 8
    else:
        assert windows == [None] * 8
    assert all(answer.usage.completion_tokens == 20 for answer in answers)


async def test_async_streams_of_both_kinds_end_as_they_should(async_sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "stream": True, "stream_options": options}
    chat, text = await asyncio.gather(
        async_sdk.chat.completions.create(messages=MESSAGES, **asked),
        async_sdk.completions.create(prompt="x", **asked),
    )
    for stream in (chat, text):
        chunks = [chunk async for chunk in stream]
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] in ("length", "stop")
        assert 1 <= chunks[-1].usage.completion_tokens <= 3
        metrics_of(chunks[-1])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 7}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.image_url"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_a_bad_request_with_the_fields_name(
    sdk: openai.OpenAI, fields: Any, param: str, stream: bool
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "stream": stream, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**body)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]


def test_a_prompt_that_is_too_long_says_by_how_much(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="tiny", prompt=[504] * 3000)
    assert caught.value.code == "context_length_exceeded"
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["prompt_tokens"], caught.value.body["limit"]) == (3000, 2048)


def test_another_model_is_not_found(sdk: openai.OpenAI) -> None:
    for ask in (
        lambda: sdk.models.retrieve("another/model"),
        lambda: sdk.completions.create(model="another/model", prompt="x"),
        lambda: sdk.chat.completions.create(model="another/model", messages=MESSAGES),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"
        assert "tiny" in caught.value.message


def test_a_wrong_key_is_an_authentication_error(sdk: openai.OpenAI) -> None:
    for ask in (
        lambda: sdk.with_options(api_key="wrong").models.list(),
        lambda: sdk.with_options(api_key="wrong").completions.create(model="tiny", prompt="x"),
    ):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask()
        assert caught.value.code == "invalid_api_key"


def test_more_prompts_than_the_service_takes_are_too_large(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        sdk.completions.create(model="tiny", prompt=["x"] * 9)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")


async def test_a_full_queue_is_a_rate_limit_error_and_the_sdks_retries_get_past_it(
    async_sdk: openai.AsyncOpenAI, engine_service: ServiceProcess
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=engine_service.url, headers=headers, **LOCAL) as http:
        caller = Caller(http)
        dispatched = await caller.metric("batchserve_window_wait_seconds_count")
        running = asyncio.create_task(async_sdk.completions.create(prompt=["x"] * 4, max_tokens=500, **asked))
        await caller.wait_for_metric("batchserve_window_wait_seconds_count", dispatched + 4)
        waiting = asyncio.create_task(async_sdk.completions.create(prompt=["x"] * 8, max_tokens=1, **asked))
        await caller.wait_for_metric("batchserve_queue_requests", 8)
    with pytest.raises(openai.RateLimitError) as caught:
        await async_sdk.completions.create(prompt="x", max_tokens=1, **asked)
    patient = await async_sdk.with_options(max_retries=8).completions.create(prompt="x", max_tokens=1, **asked)
    assert caught.value.code == "queue_full"
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["queue_depth"], caught.value.body["limit"]) == (8, 8)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert patient.usage
    assert patient.usage.completion_tokens == 1
    await asyncio.gather(running, waiting)
