"""The examples of the document are true: the generated Python client gets them from the embedded model."""

import json
from collections.abc import Iterator
from typing import Any

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


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not change from run to run."""
    return {name: answer[name] for name in ("request_id", "model", "outputs", "usage", "sampling")}


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
