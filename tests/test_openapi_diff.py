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
