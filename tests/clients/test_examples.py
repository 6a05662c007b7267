"""The examples of the document are true: the generated Python client gets them from the embedded model."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.support import DOCUMENT, LOCAL
from tests.engine.process import ServiceProcess, service_process

pytestmark = pytest.mark.engine

PATHS = json.loads(DOCUMENT.read_text())["paths"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """The embedded model, as a user starts it."""
    with service_process(tmp_path_factory.mktemp("embedded"), "embedded:smollm2-135m", "inline") as service:
        yield service.wait_ready()


@pytest.fixture
def client(generated: Any, embedded: ServiceProcess) -> Iterator[Any]:
    with generated.Client(base_url=embedded.url, timeout=120, **LOCAL) as client:
        yield client


def examples(path: str, part: str) -> dict[str, Any]:
    """The values of an operation's examples by name: of its body, or of its 200."""
    (operation,) = PATHS[path].values()
    holder = operation["requestBody"] if part == "body" else operation["responses"]["200"]
    return {name: one["value"] for name, one in holder["content"]["application/json"]["examples"].items()}


def events(path: str) -> list[dict[str, Any]]:
    """The values of the examples of an operation's stream, in order."""
    content = PATHS[path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    return [one["value"] for one in content["examples"].values()]


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not change from run to run."""
    return {name: answer[name] for name in ("request_id", "model", "outputs", "usage", "sampling")}


def lasting_of_openai(answer: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer in OpenAI's shape; a chunk need not have all of it."""
    names = ("object", "model", "choices", "usage", "system_fingerprint")
    return {name: answer[name] for name in names if name in answer} | {"system_fingerprint": None}


def same_values(left: Any, right: Any) -> bool:
    """Whether two values are the same, logprobs to what another machine's arithmetic makes of them."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_values, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, abs_tol=0.2)
    return bool(left == right)


def same_fields(left: Any, right: Any) -> bool:
    """Whether two values have the same fields at every depth."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_fields(left[name], right[name]) for name in left)
    return True


@pytest.mark.parametrize("name", examples("/generate", "body"))
def test_each_body_of_generate_is_good(client: Any, api: Any, models: Any, name: str) -> None:
    body = models.GenerateRequest.from_dict(examples("/generate", "body")[name])
    answer = api("generate").sync(client=client, body=body)
    assert isinstance(answer, models.GenerateResponse)
    assert answer.outputs[0].text
    if shown := examples("/generate", "answer").get(name):
        assert lasting(answer.to_dict()) == lasting(shown)
        assert same_fields(answer.to_dict(), shown)


def test_the_batch_is_answered_as_shown(client: Any, api: Any, models: Any) -> None:
    (body,), (shown,) = examples("/batch", "body").values(), examples("/batch", "answer").values()
    answer = api("batch").sync(client=client, body=models.BatchRequest.from_dict(body)).to_dict()
    assert same_fields(answer, shown)
    assert answer["counts"] == shown["counts"]
    good, bad = answer["results"]
    assert lasting(good["response"]) == lasting(shown["results"][0]["response"])
    assert bad == shown["results"][1]


def test_info_has_the_fields_shown(client: Any, api: Any) -> None:
    (shown,) = examples("/info", "answer").values()
    answer = api("info").sync(client=client).to_dict()
    assert answer.keys() == shown.keys()
    for part in ("backend", "limits", "settings", "versions"):
        assert answer[part].keys() == shown[part].keys()
    assert answer["backend"]["engine_args"].keys() >= shown["backend"]["engine_args"].keys()


def test_the_models_are_those_shown(client: Any, api: Any, models: Any) -> None:
    ((shown,),) = [one["data"] for one in examples("/v1/models", "answer").values()]
    (listed,) = api("models").sync(client=client).to_dict()["data"]
    assert listed == shown | {"created": listed["created"]}
    (alone,) = examples("/v1/models/{model}", "answer").values()
    assert alone == shown
    found = api("model").sync(shown["id"], client=client)
    assert isinstance(found, models.Model)
    assert found.to_dict() == listed


@pytest.mark.parametrize("name", examples("/v1/completions", "body"))
def test_each_completion_is_answered_as_shown(client: Any, api: Any, models: Any, name: str) -> None:
    body = models.CompletionRequest.from_dict(examples("/v1/completions", "body")[name])
    check_as_shown(api("completions").sync(client=client, body=body), examples("/v1/completions", "answer")[name])


@pytest.mark.parametrize("name", examples("/v1/chat/completions", "body"))
def test_each_chat_is_answered_as_shown(client: Any, api: Any, models: Any, name: str) -> None:
    body = models.ChatCompletionRequest.from_dict(examples("/v1/chat/completions", "body")[name])
    answer = api("chat_completions").sync(client=client, body=body)
    check_as_shown(answer, examples("/v1/chat/completions", "answer")[name])


def check_as_shown(answer: Any, shown: dict[str, Any]) -> None:
    """An answer in OpenAI's shape is the example, but for what changes from run to run."""
    given = answer.to_dict()
    assert same_values(lasting_of_openai(given), lasting_of_openai(shown)), given
    assert same_fields(given, shown)
    parts = ("resolve", "window_wait", "submit", "engine_queue", "prefill", "decode", "window_tail")
    times = answer.metrics.timings
    assert sum(getattr(times, f"{part}_ms") for part in parts) == pytest.approx(times.e2e_ms)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", "text"), ("/v1/chat/completions", "question")])
def test_a_stream_has_the_events_shown(embedded: ServiceProcess, path: str, body: str) -> None:
    asked = {**examples(path, "body")[body], "stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=embedded.url, timeout=120, trust_env=False) as http:
        text = http.post(path, json=asked).text
    *data, end = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    given = [json.loads(one) for one in data]
    assert end == "[DONE]"
    assert [lasting_of_openai(one) for one in given] == [lasting_of_openai(one) for one in events(path)]
    assert all(map(same_fields, given, events(path)))
