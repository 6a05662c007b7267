"""Which differences between two OpenAPI documents break clients, as docs/clients.md has it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.openapi_diff import differences, main

DOCUMENT = json.loads((Path(__file__).parent.parent / "openapi" / "openapi.json").read_text())
Change = Callable[[dict[str, Any]], Any]


def operation(document: dict[str, Any], path: str) -> Any:
    (found,) = document["paths"][path].values()
    return found


def schema(document: dict[str, Any], name: str) -> Any:
    return document["components"]["schemas"][name]


def field(document: dict[str, Any], name: str, of: str) -> Any:
    return schema(document, of)["properties"][name]


def answer(document: dict[str, Any], path: str, status: str) -> Any:
    return operation(document, path)["responses"][status]


TEXT, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
LISTS = [{"type": "array", "items": TEXT}, {"type": "array", "items": NUMBER}]
X = {"in": "query", "name": "x", "schema": NUMBER | {"maximum": 1}, "description": "one"}
BEARER: list[Any] = [{"bearer": []}]
BREAKING: dict[str, Change] = {
    "a path is gone": lambda d: d["paths"].pop("/health"),
    "an operation is gone": lambda d: d["paths"]["/batch"].pop("post"),
    "an operation has another name": lambda d: operation(d, "/batch").update(operationId="run"),
    "an operation stands under another tag": lambda d: operation(d, "/info").update(tags=["other"]),
    "a success is gone": lambda d: operation(d, "/info")["responses"].pop("200"),
    "a media type is gone": lambda d: operation(d, "/batch")["responses"]["200"]["content"].pop("application/json"),
    "an answer is another schema": lambda d: operation(d, "/info")["responses"]["200"]["content"].update(
        {"application/json": {"schema": {"$ref": "#/components/schemas/Health"}}}
    ),
    "a key is needed where none was": lambda d: operation(d, "/livez").update(security=[{"bearer": []}]),
    "a header is needed": lambda d: operation(d, "/info").update(
        parameters=[{"in": "header", "name": "x", "required": True, "schema": {"type": "string"}}]
    ),
    "a key is sent another way": lambda d: d["components"]["securitySchemes"]["bearer"].update(scheme="basic"),
    "a schema is gone": lambda d: d["components"]["schemas"].pop("BatchLine"),
    "a request's field is gone": lambda d: schema(d, "GenerateRequest")["properties"].pop("seed"),
    "a request's field is needed": lambda d: schema(d, "GenerateRequest").update(required=["model"]),
    "a new field of a request is needed": lambda d: schema(d, "Columns").update(
        properties={**schema(d, "Columns")["properties"], "new": {"type": "string"}}, required=["new"]
    ),
    "a request's upper bound is lower": lambda d: field(d, "n", "GenerateRequest")["anyOf"][0].update(maximum=64),
    "a request's lower bound is higher": lambda d: field(d, "top_k", "GenerateRequest")["anyOf"][0].update(minimum=0),
    "a request's bound is new": lambda d: field(d, "name", "ChatMessage")["anyOf"][0].update(maxLength=9),
    "a request's field has another type": lambda d: field(d, "n", "GenerateRequest")["anyOf"][0].update(type="string"),
    "a request's field may not be null": lambda d: field(d, "n", "GenerateRequest")["anyOf"].pop(),
    "a request's list may hold less": lambda d: field(d, "stop_token_ids", "BatchDefaults")["anyOf"][0].update(
        maxItems=1
    ),
    "a request's value is gone": lambda d: field(d, "type", "TextPart").update(const="words"),
    "a request's free object is closed": lambda d: field(d, "chat_template_kwargs", "GenerateRequest")["anyOf"][
        0
    ].update(additionalProperties=False),
    "an answer's field is gone": lambda d: schema(d, "Usage")["properties"].pop("cached_tokens"),
    "an answer's field may be missing": lambda d: schema(d, "Usage")["required"].remove("prompt_tokens"),
    "an answer's field may be null": lambda d: schema(d, "Usage")["properties"].update(
        prompt_tokens={"anyOf": [{"type": "integer", "format": "int64"}, {"type": "null"}]}
    ),
    "an answer's field has another type": lambda d: field(d, "id", "WindowInfo").update(type="string"),
    "an answer's field has another format": lambda d: field(d, "id", "WindowInfo").update(format="int32"),
    "an answer has a value that clients do not know": lambda d: field(d, "finish_reason", "GeneratedOutput")[
        "enum"
    ].append("abort"),
    "all need a key": lambda d: d.update(security=BEARER),
    "another server": lambda d: d.update(servers=[{"url": "/v9"}]),
    "a header of an error is gone": lambda d: answer(d, "/generate", "429")["headers"].pop("retry-after"),
    "a shared header has another type": lambda d: d["components"]["headers"]["retry-after"].update(schema=LISTS[0]),
    "an error has no body": lambda d: answer(d, "/generate", "429").pop("content"),
    "an answer has no schema": lambda d: answer(d, "/info", "200")["content"]["application/json"].pop("schema"),
    "a path needs a header": lambda d: d["paths"]["/livez"].update(parameters=[X | {"required": True}]),
    "another OpenAPI": lambda d: d.update(openapi="3.2.0"),
    "no document": lambda d: d.clear(),
    "paths that cannot be read": lambda d: d.update(paths=[]),
}
FINE: dict[str, Change] = {
    "a path is new": lambda d: d["paths"].update({"/new": d["paths"]["/livez"]}),
    "an operation is new": lambda d: d["paths"]["/batch"].update(get=operation(d, "/livez")),
    "an error is documented": lambda d: operation(d, "/info")["responses"].update(
        {"503": operation(d, "/readyz")["responses"]["503"]}
    ),
    "an error does not come any more": lambda d: operation(d, "/generate")["responses"].pop("504"),
    "a media type is new": lambda d: operation(d, "/info")["responses"]["200"]["content"].update({"text/plain": {}}),
    "a header is taken": lambda d: operation(d, "/info").update(
        parameters=[{"in": "header", "name": "x", "schema": {"type": "string"}}]
    ),
    "no key is needed any more": lambda d: operation(d, "/info").pop("security"),
    "a schema is new": lambda d: d["components"]["schemas"].update(New={"type": "string"}),
    "a request's field is new": lambda d: schema(d, "GenerateRequest")["properties"].update(new={"type": "string"}),
    "a request's field need not be given": lambda d: schema(d, "ChatMessage").pop("required"),
    "a request's bounds are wider": lambda d: field(d, "n", "GenerateRequest")["anyOf"][0].update(
        maximum=999, minimum=0
    ),
    "a request's bound is gone": lambda d: field(d, "n", "GenerateRequest")["anyOf"][0].pop("maximum"),
    "a request's field takes more types": lambda d: field(d, "n", "GenerateRequest")["anyOf"].append(
        {"type": "string"}
    ),
    "an answer's field is new": lambda d: schema(d, "Usage")["properties"].update(new={"type": "integer"}),
    "an answer's field is always there": lambda d: schema(d, "ErrorObject")["required"].append("limit"),
    "an answer's field is never null": lambda d: field(d, "window", "GenerateResponse")["anyOf"].pop(),
    "an answer does not have a value any more": lambda d: field(d, "release", "WindowInfo")["enum"].pop(),
    "words": lambda d: field(d, "n", "GenerateRequest").update(description="other words"),
    "the version": lambda d: d["info"].update(version="9.9.9"),
    "one more server": lambda d: d["servers"].append({"url": "/v9"}),
    "a path's words": lambda d: d["paths"]["/livez"].update(title="words"),
    "a path takes a parameter": lambda d: d["paths"]["/livez"].update(parameters=[X]),
    "an answer's other header": lambda d: answer(d, "/info", "200")["headers"].update(x={"schema": TEXT}),
}


@pytest.mark.parametrize("name", BREAKING)
def test_it_breaks_clients_when(name: str) -> None:
    changed = copy.deepcopy(DOCUMENT)
    BREAKING[name](changed)
    assert any(one.is_breaking for one in differences(DOCUMENT, changed)), name


@pytest.mark.parametrize("name", FINE)
def test_it_breaks_no_client_when(name: str) -> None:
    changed = copy.deepcopy(DOCUMENT)
    FINE[name](changed)
    found = differences(DOCUMENT, changed)
    assert found
    assert not [one for one in found if one.is_breaking], name


FIELDS: dict[str, tuple[Any, Any, str]] = {
    "an enum is there": (TEXT, TEXT | {"enum": ["a"]}, "requests"),
    "an enum is gone": (TEXT | {"enum": ["a"]}, TEXT, "answers"),
    "one of two lists is gone": ({"anyOf": LISTS}, {"anyOf": LISTS[1:]}, "requests"),
    "a bound stands beside a choice": ({"anyOf": [TEXT, NULL]}, {"anyOf": [TEXT, NULL], "maxLength": 3}, "requests"),
    "a choice comes with a bound": (TEXT, {"anyOf": [TEXT, NULL], "maxLength": 3}, "both"),
    "a field beside a choice is gone": (
        {"anyOf": [{"required": ["a"]}], "properties": {"a": TEXT}},
        {"anyOf": [{"required": ["a"]}]},
        "both",
    ),
    "a map of texts holds anything": (
        {"type": "object", "additionalProperties": TEXT},
        {"type": "object", "additionalProperties": True},
        "answers",
    ),
    "a free object is closed": ({"type": "object"}, {"type": "object", "additionalProperties": False}, "both"),
    "a closed object is opened": ({"type": "object", "additionalProperties": False}, {"type": "object"}, "none"),
    "it is deprecated": (TEXT, TEXT | {"deprecated": True}, "none"),
    "another default": (TEXT | {"default": "a"}, TEXT | {"default": "b"}, "none"),
    "a pattern is gone": (TEXT | {"pattern": "a"}, TEXT, "answers"),
    "another pattern": (TEXT | {"pattern": "a"}, TEXT | {"pattern": "b"}, "both"),
    "null in a list of types": (TEXT, {"type": ["string", "null"]}, "answers"),
    "a list of types for a choice": ({"anyOf": [TEXT, NULL]}, {"type": ["string", "null"]}, "none"),
    "the order of types": ({"type": ["string", "null"]}, {"type": ["null", "string"]}, "none"),
    "anything is a text": (True, TEXT, "requests"),
    "a text is anything": (TEXT, {}, "answers"),
    "nothing fits": (TEXT, False, "both"),
    "items of any kind": (LISTS[0], {"type": "array"}, "answers"),
    "items of one kind": ({"type": "array"}, LISTS[0], "requests"),
    "a const is a number": ({"const": True}, {"const": 1}, "both"),
    "a const is an enum with more": ({"const": "a"}, {"enum": ["a", "b"]}, "answers"),
    "a bound is written another way": (NUMBER | {"minimum": 1}, NUMBER | {"minimum": 1.0}, "none"),
    "a part of allOf is wider": ({"allOf": [NUMBER | {"maximum": 1}]}, {"allOf": [NUMBER]}, "none"),
    "another discriminator": (
        {"anyOf": [TEXT], "discriminator": {"propertyName": "a"}},
        {"anyOf": [TEXT], "discriminator": {"propertyName": "b"}},
        "both",
    ),
    "a keyword that the rule does not know": (TEXT, TEXT | {"not": {"const": "a"}}, "both"),
    "what is no schema": (TEXT, ["string"], "both"),
}
"""A field before, after, and where that breaks clients."""


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("use", "of"), [("requests", "GenerateRequest"), ("answers", "Usage")])
def test_a_field_breaks_clients_by_its_use(name: str, use: str, of: str) -> None:
    *fields, breaks = FIELDS[name]
    documents = [copy.deepcopy(DOCUMENT) for _ in fields]
    for document, one in zip(documents, fields, strict=True):
        schema(document, of)["properties"]["new"] = one
    found = differences(*documents)
    assert any(one.is_breaking for one in found) is (breaks in (use, "both")), found


OPERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "no way to sign in is asked for": ({"security": []}, {"security": BEARER}, True),
    "none is, any more": ({"security": BEARER}, {"security": []}, False),
    "one more way to sign in": ({"security": BEARER}, {"security": [*BEARER, {"other": []}]}, False),
    "other words of a parameter": ({"parameters": [X]}, {"parameters": [X | {"description": "two"}]}, False),
    "a parameter's wider bound": ({"parameters": [X]}, {"parameters": [X | {"schema": NUMBER}]}, False),
    "a parameter's other type": ({"parameters": [X]}, {"parameters": [X | {"schema": TEXT}]}, True),
    "a parameter's other style": ({"parameters": [X]}, {"parameters": [X | {"style": "form"}]}, True),
    "a parameter that refers to nothing": ({}, {"parameters": [{"$ref": "#/components/parameters/x"}]}, True),
    "a body that is needed": ({}, {"requestBody": {"required": True, "content": {}}}, True),
    "a body that is not needed": ({}, {"requestBody": {"content": {"text/plain": {}}}}, False),
    "a body is gone": ({"requestBody": {"content": {}}}, {}, True),
    "callbacks": ({}, {"callbacks": {"a": {}}}, True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_breaks_clients_by_its_keys(name: str) -> None:
    *changes, breaks = OPERATIONS[name]
    documents = [copy.deepcopy(DOCUMENT) for _ in changes]
    for document, change in zip(documents, changes, strict=True):
        operation(document, "/livez").update(change)
    found = differences(*documents)
    assert found
    assert any(one.is_breaking for one in found) is breaks, found


def test_a_parameter_is_the_same_where_it_is_referred_to() -> None:
    shared = copy.deepcopy(DOCUMENT)
    shared["components"]["parameters"] = {"x": X}
    operation(shared, "/livez")["parameters"] = [{"$ref": "#/components/parameters/x"}]
    inline = copy.deepcopy(DOCUMENT)
    operation(inline, "/livez")["parameters"] = [X]
    assert not [one for one in differences(inline, shared) if one.is_breaking]
    shared["components"]["parameters"] = {"x": X | {"schema": TEXT}}
    assert [one for one in differences(inline, shared) if one.is_breaking]


@pytest.mark.parametrize("part", [None, True, 1, "a", [], [1], {}, {"$ref": "#/paths"}, {"a": None}])
@pytest.mark.parametrize("place", ["paths", "components", "servers", "security"])
def test_no_document_is_too_odd(place: str, part: Any) -> None:
    odd = DOCUMENT | {place: part}
    assert differences(odd, odd) == []
    assert place == "security" or differences(DOCUMENT, odd)
    differences(odd, DOCUMENT)


def test_equal_documents_have_no_difference() -> None:
    assert differences(DOCUMENT, copy.deepcopy(DOCUMENT)) == []


def test_the_command_names_each_difference_and_its_status_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, wider, broken = (tmp_path / f"{name}.json" for name in ("old", "wider", "broken"))
    for file, changes in ((old, []), (wider, [FINE["a path is new"]]), (broken, [BREAKING["a path is gone"]])):
        document = copy.deepcopy(DOCUMENT)
        for change in changes:
            change(document)
        file.write_text(json.dumps(document))
    assert main([str(old), str(old)]) == 0
    assert main([str(old), str(wider)]) == 0
    assert main([str(old), str(broken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no difference"
    assert lines[1] == "fine      paths./new.get: the operation is new"
    assert lines[-1] == "BREAKING  paths./health.get: the operation is gone"
