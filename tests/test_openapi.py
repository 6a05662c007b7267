"""The OpenAPI document: equal to the live one, complete in its words, its examples valid."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

from app import errors
from app.api import schemas
from app.api.batch import NDJSON
from app.api.sse import MEDIA_TYPE as EVENTS
from app.main import create_app
from app.settings import Settings
from tests.openapi_diff import differences
from tests.service.support import fake_settings, running, service

COMMITTED = Path(__file__).parent.parent / "openapi" / "openapi.json"
DOCUMENT = json.loads(COMMITTED.read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
OPEN = ("/livez", "/readyz", "/health")
OPENAI = ("/v1/completions", "/v1/chat/completions")
OF_ONE = {"400", "401", "404", "413", "429", "500", "503", "504"}
ERRORS_OF = {
    "/generate": OF_ONE,
    "/v1/completions": OF_ONE,
    "/v1/chat/completions": OF_ONE,
    "/v1/models": {"401", "500"},
    "/v1/models/{model}": {"401", "404", "500"},
    "/batch": {"400", "401", "413", "429", "500", "503"},  # all else is a row's
    "/livez": {"500"},
    "/readyz": {"500", "503"},
    "/health": {"500", "503"},
    "/info": {"401", "500"},
    "/metrics": {"401", "500"},
}
UNITS = {
    r"_ms$": r"\bmilliseconds\b",
    r"_at$|^created$": r"\bUnix seconds\b",
    r"_per_s$": r"\bper second\b",
    r"(?<!_per)_s$": r"\bseconds\b",
    r"_bytes$": r"\bbytes\b",
    r"_tokens$|_tokens_|^max_model_len$": r"\b[Tt]okens?\b",
    r"^(queue_depth|limit)$": r"\brequests\b.*\btokens\b",
}
"""By the end of a field's name what its description must name."""


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            yield path, operation


def fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each field of each schema: of which, its name, its schema."""
    for name, schema in SCHEMAS.items():
        for field, described in schema.get("properties", {}).items():
            yield name, field, described


def description(field: dict[str, Any]) -> str:
    """A field's own words, or those of the schema it refers to."""
    words = field.get("description") or SCHEMAS[field["$ref"].rsplit("/", 1)[1]]["description"]
    return str(words)


def contents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each body and each answer of each operation: where it stands, and its media type object."""
    for path, operation in operations():
        holders = {"body": operation.get("requestBody", {"content": {}}), **operation["responses"]}
        for name, holder in holders.items():
            for media_type, content in holder["content"].items():
                yield f"{path} {name} {media_type}", content


def examples() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each example: where it stands, the schema it must fit, its value."""
    for place, content in contents():
        for name, example in content["examples"].items():
            yield f"{place} {name}", content["schema"], example["value"]
    for of, field, schema in fields():
        for number, value in enumerate(schema.get("examples", ())):
            yield f"{of}.{field} {number}", schema, value


def complaints(schema: dict[str, Any], value: Any) -> list[str]:
    """Why a value does not fit a schema of the document, after JSON Schema 2020-12."""
    whole = {**schema, "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(whole)
    return [error.message for error in validator.iter_errors(value)]


def how_to_mend(live: dict[str, Any]) -> str:
    found = differences(json.loads(COMMITTED.read_text()), live)
    lines = "\n".join(map(str, found))
    return (
        f"openapi/openapi.json is not what the service serves:\n{lines}\n"
        "Write it again: .venv/bin/batchserve openapi > openapi/openapi.json\n"
        "A difference that is BREAKING breaks clients: docs/clients.md says what that asks for."
    )


def test_the_committed_document_is_the_live_one() -> None:
    live = create_app(Settings(backend="fake")).openapi()
    assert live == DOCUMENT, how_to_mend(live)


def test_it_does_not_depend_on_settings_but_for_the_prefix() -> None:
    live = create_app(Settings(backend="fake", batch_size=7, api_key=("k",), root_path="/llm")).openapi()
    assert live.pop("servers")[0]["url"] == "/llm"
    assert live == {name: part for name, part in DOCUMENT.items() if name != "servers"}


def test_what_a_changed_document_asks_for_is_said_and_its_breaking_parts_are_named() -> None:
    live = json.loads(json.dumps(DOCUMENT))
    del live["paths"]["/health"]
    live["info"]["version"] = "9"
    message = how_to_mend(live)
    assert "batchserve openapi > openapi/openapi.json" in message
    assert "BREAKING  paths./health.get: the operation is gone" in message
    assert "fine      info: changed" in message


def test_it_is_openapi_3_1_and_says_what_it_is() -> None:
    assert re.fullmatch(r"3\.1\.\d", DOCUMENT["openapi"])
    info = DOCUMENT["info"]
    assert info["title"] == "Batchserve"
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["version"])
    assert info["license"]["identifier"] == "Apache-2.0"
    assert len(info["description"]) > 200
    assert [server["url"] for server in DOCUMENT["servers"]] == ["/"]
    assert {tag["name"] for tag in DOCUMENT["tags"]} == {tag for _, one in operations() for tag in one["tags"]}


def test_operations_are_named_for_their_routes() -> None:
    names = {operation["operationId"] for _, operation in operations()}
    openai = {"models", "model", "completions", "chat_completions"}
    assert names == openai | {"generate", "batch", "livez", "readyz", "health", "info", "metrics"}


def test_every_operation_schema_and_field_is_described() -> None:
    bare = [path for path, one in operations() if not one.get("summary") or not one.get("description")]
    bare += [name for name, schema in SCHEMAS.items() if not schema.get("description")]
    bare += [f"{of}.{field}" for of, field, schema in fields() if "$ref" not in schema and "description" not in schema]
    assert not bare


def test_descriptions_are_sentences_of_this_service() -> None:
    for of, field, schema in fields():
        text = description(schema)
        assert text[0].isupper() or text[0] in "`…" or re.match(r"[a-z_]+ [-/(]|vLLM", text), (of, field, text)
        assert text.rstrip().endswith("."), (of, field, text)


@pytest.mark.parametrize("pattern", UNITS)
def test_fields_with_a_unit_name_it(pattern: str) -> None:
    named = [(of, field, description(schema)) for of, field, schema in fields() if re.search(pattern, field)]
    assert named
    for of, field, text in named:
        if not field.startswith("skip_"):
            assert re.search(UNITS[pattern], text), (of, field, text)


def test_each_route_documents_the_errors_that_it_answers_with_the_one_model_and_no_other() -> None:
    for path, operation in operations():
        found = {status for status in operation["responses"] if status != "200"}
        assert found == ERRORS_OF[path], path
        for status in found:
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert '"422"' not in COMMITTED.read_text()


def test_each_error_of_an_answer_is_named_with_an_example_of_its_status_and_type() -> None:
    bases = (errors.ServiceError, errors.Unavailable)
    kinds = {kind.code: kind for kind in vars(errors).values() if hasattr(kind, "code") and kind not in bases}
    shown = set()
    for _, operation in operations():
        for status in operation["responses"].keys() - {"200"}:
            response = operation["responses"][status]
            for code, example in response["content"]["application/json"]["examples"].items():
                error = example["value"]["error"]
                assert f"`{code}`" in response["description"]
                assert (error["code"], error["type"]) == (code, kinds[code].type)
                assert kinds[code].status == int(status)
                shown.add(code)
    assert shown == kinds.keys() - {"not_found", "method_not_allowed"}


def test_headers_are_documented_where_they_are_sent() -> None:
    expected = {"401": {"www-authenticate"}, "429": {"retry-after"}, "503": {"retry-after"}}
    for path, operation in operations():
        for status, response in operation["responses"].items():
            told = {"x-ignored-fields"} if path in OPENAI and status == "200" else set()
            headers = {"x-request-id"} | told | expected.get(status, set())
            assert response["headers"].keys() == headers, (path, status)
            for name, header in response["headers"].items():
                assert header == {"$ref": f"#/components/headers/{name}"}
                assert DOCUMENT["components"]["headers"][name]["description"]


def test_every_body_and_every_answer_has_an_example() -> None:
    assert not [place for place, content in contents() if not content.get("examples")]


@pytest.mark.parametrize(("place", "schema", "value"), [pytest.param(*one, id=one[0]) for one in examples()])
def test_an_example_is_valid(place: str, schema: dict[str, Any], value: Any) -> None:
    assert complaints(schema, value) == []


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/generate", schemas.GenerateResponse),
        ("/batch", schemas.BatchResponse),
        ("/info", schemas.Info),
        ("/v1/models", schemas.ModelList),
        ("/v1/models/{model}", schemas.Model),
        ("/v1/completions", schemas.Completion),
        ("/v1/chat/completions", schemas.ChatCompletion),
    ],
)
def test_an_example_of_an_answer_has_no_field_that_is_not_documented(path: str, model: type[BaseModel]) -> None:
    (operation,) = DOCUMENT["paths"][path].values()
    for example in operation["responses"]["200"]["content"]["application/json"]["examples"].values():
        model.model_validate(example["value"], strict=True)


def test_a_wrong_example_would_be_found() -> None:
    ref = {"$ref": "#/components/schemas/GenerateRequest"}
    assert complaints(ref, {"prompt": "x", "max_tokens": 0})
    assert complaints(ref, {"prompt": "x", "max_token": 5})
    assert complaints({"$ref": "#/components/schemas/BatchLine"}, {"index": 1})


def test_bodies_refuse_unknown_fields_and_answers_may_gain_some() -> None:
    closed = {name for name, schema in SCHEMAS.items() if schema.get("additionalProperties") is False}
    bodies = {"GenerateRequest", "BatchRequest", "BatchDefaults", "ChatMessage", "TextPart", "Columns"}
    media = {"ImagePart", "ImageUrl", "InputAudioPart", "InputAudio", "AudioUrlPart", "AudioUrl"}
    assert closed == bodies | media | {"StructuredOutputs"}
    assert not {"CompletionRequest", "ChatCompletionRequest"} & closed  # what they do not know is ignored


def test_no_construct_that_generators_trip_over() -> None:
    text = COMMITTED.read_text()
    for word in ("patternProperties", "discriminator", '"default"', "prefixItems", '"not"'):
        assert word not in text, word
    for of, field, schema in fields():
        assert "title" not in schema, (of, field)
        assert not any("anyOf" in one or "oneOf" in one for one in schema.get("anyOf", ())), (of, field)


def test_whole_numbers_beyond_31_bits_say_so() -> None:
    for of, field, schema in fields():
        for one in schema.get("anyOf", [schema]):
            is_small = one.get("maximum", 2**63) < 2**31
            assert one.get("type") != "integer" or is_small or one.get("format") == "int64", (of, field)


def test_a_client_learns_how_to_send_a_key_and_where_none_is_asked_for() -> None:
    bearer = DOCUMENT["components"]["securitySchemes"]["bearer"]
    assert (bearer["type"], bearer["scheme"]) == ("http", "bearer")
    for path, operation in operations():
        assert ("security" in operation) != (path in OPEN), path


def test_rows_by_the_line_are_documented_with_the_last_line() -> None:
    content = DOCUMENT["paths"]["/batch"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/x-ndjson"}
    lines = content["application/x-ndjson"]
    assert lines["schema"] == {"$ref": "#/components/schemas/BatchLine"}
    assert {one["$ref"].rsplit("/", 1)[1] for one in SCHEMAS["BatchLine"]["anyOf"]} == {"BatchRow", "BatchSummary"}
    last = lines["examples"]["last_line"]["value"]
    assert SCHEMAS["BatchSummary"]["properties"].keys() == last.keys()


# --- what the service really answers ---------------------------------------------------------------------------------


def check_documented(method: str, path: str, response: httpx.Response) -> None:
    """The status is documented for the route, its headers are sent, and the body fits the schema."""
    documented = DOCUMENT["paths"][path][method.lower()]["responses"][str(response.status_code)]
    assert all(name in response.headers for name in documented["headers"] if name != "x-ignored-fields")
    media_type = response.headers["content-type"].partition(";")[0]
    schema = documented["content"][media_type]["schema"]
    if media_type == "text/plain":
        return
    for part in filter(None, PARTS.get(media_type, lambda text: [text])(response.text)):
        assert complaints(schema, json.loads(part)) == []


def data_of_events(text: str) -> list[str]:
    """What a stream holds, but for its end mark."""
    *data, last = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert last == "[DONE]"
    return data


PARTS: dict[str, Callable[[str], list[str]]] = {NDJSON: str.splitlines, EVENTS: data_of_events}
"""How an answer of several parts is taken apart."""


GOOD = {"prompt": "ab", "max_tokens": 2, "n": 2, "temperature": 1, "logprobs": 2, "return_token_ids": True}
COMPLETION = {"prompt": ["ab", "cd"], "max_tokens": 2, "n": 2, "temperature": 1, "logprobs": 2, "echo": True}
CHAT = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
}
CALLS: list[tuple[str, str, Any, int]] = [
    ("POST", "/generate", GOOD, 200),
    ("POST", "/generate", {"prompt": ""}, 400),
    ("POST", "/generate", {"prompt": "x" * 5000}, 400),
    ("POST", "/generate", {"prompt": "x", "model": "another"}, 404),
    ("POST", "/generate", {"prompt": "x", "n": 9, "temperature": 1}, 413),
    ("POST", "/generate", {"prompt": "BOOM"}, 500),
    ("POST", "/batch", {"requests": [GOOD, {}, {"prompt": "BOOM"}, {"prompt": "x", "model": "y"}]}, 200),
    ("POST", "/batch", {"requests": []}, 400),
    ("POST", "/batch", {"requests": [GOOD] * 9}, 413),
    ("GET", "/v1/models", None, 200),
    ("GET", "/v1/models/{model}", "fake-model", 200),
    ("GET", "/v1/models/{model}", "another/one", 404),
    ("POST", "/v1/completions", COMPLETION, 200),
    ("POST", "/v1/completions", {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}, 200),
    ("POST", "/v1/completions", {"prompt": [[97, 98], [99]], "unheard_of": 1}, 200),
    ("POST", "/v1/completions", {"prompt": []}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "best_of": 2}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("POST", "/v1/completions", {"prompt": ["x"] * 9}, 413),
    ("POST", "/v1/completions", {"prompt": "BOOM"}, 500),
    ("POST", "/v1/chat/completions", CHAT, 200),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, 200),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "another"}, 404),
    ("GET", "/livez", None, 200),
    ("GET", "/readyz", None, 200),
    ("GET", "/health", None, 200),
    ("GET", "/info", None, 200),
    ("GET", "/metrics", None, 200),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), CALLS, ids=str)
async def test_an_answer_is_as_documented(method: str, path: str, body: Any, status: int) -> None:
    limits = {"max_queue_requests": 8, "max_batch_requests": 8}
    async with service(**limits, fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
        is_named = isinstance(body, str)  # the part of the path that the document has as {model}
        url = path.replace("{model}", body) if is_named else path
        response = await caller.call(method, url, json=None if is_named else body)
        assert response.status_code == status
        check_documented(method, path, response)


async def test_each_line_of_an_answer_in_lines_is_as_documented() -> None:
    async with service(fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
        body = {"requests": [GOOD, {"prompt": "BOOM"}, {"prompt": ""}]}
        response = await caller.call("POST", "/batch", json=body, headers={"accept": NDJSON})
        assert len(response.text.splitlines()) == 4
        check_documented("POST", "/batch", response)


@pytest.mark.parametrize(
    "path", ["/generate", "/batch", "/info", "/metrics", "/v1/models", "/v1/models/{model}", *OPENAI]
)
async def test_an_answer_to_a_caller_without_a_key_is_as_documented(path: str) -> None:
    async with service(api_key=("k",)) as caller:
        (method,) = DOCUMENT["paths"][path]
        response = await caller.call(method.upper(), path)
        assert response.status_code == 401
        check_documented(method, path, response)


@pytest.mark.parametrize("path", ["/generate", "/batch", "/readyz", "/health", "/livez", *OPENAI])
async def test_an_answer_before_the_service_is_ready_is_as_documented(path: str) -> None:
    async with running(create_app(fake_settings(fake_config={"open_s": 0.5})), is_awaited=False) as caller:
        (method,) = DOCUMENT["paths"][path]
        response = await caller.call(method.upper(), path, json={"prompt": "x"} if method == "post" else None)
        assert response.status_code == (200 if path == "/livez" else 503)
        check_documented(method, path, response)


async def test_answers_of_a_full_queue_and_of_a_wait_too_long_are_as_documented() -> None:
    limits = {"batch_size": 1, "max_queue_requests": 2, "max_batch_requests": 2}
    async with service(**limits, fake_config={"step_ms": 10}) as caller:
        slow = asyncio.create_task(caller.generate(prompt="slow", max_tokens=60))
        await caller.wait_for_metric("batchserve_window_size_count", 1)
        late = await caller.call("POST", "/generate", json={"prompt": "x", "queue_timeout_s": 0.05})
        waiting = asyncio.create_task(caller.batch([{"prompt": "x", "max_tokens": 1}] * 2))
        await caller.wait_for_metric("batchserve_queue_requests", 2)
        refused = await caller.call("POST", "/batch", json={"requests": [{"prompt": "x"}]})
        refused_too = await caller.call("POST", "/v1/completions", json={"prompt": "x"})
        await asyncio.gather(slow, waiting)
    assert (late.status_code, refused.status_code) == (504, 429)
    check_documented("POST", "/generate", late)
    check_documented("POST", "/batch", refused)
    assert refused_too.status_code == 429
    check_documented("POST", "/v1/completions", refused_too)
