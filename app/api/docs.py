"""The OpenAPI document and the page that shows it, both without the internet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from app.api import examples
from app.api.edge import OPEN_PATHS
from app.api.schemas import (
    BatchLine,
    BatchRequest,
    BatchResponse,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorBody,
    GenerateResponse,
    Health,
    Info,
    Model,
    ModelList,
)
from app.prompts.openai import ChatCompletionRequest, CompletionRequest
from app.prompts.sampling import MAX_SEED, MAX_TOKENS
from app.prompts.spec import GenerateRequest

ASSETS = "/docs/assets"
REF = "#/components/schemas/{model}"
HEADER_REF = "#/components/headers/{name}"
BODIES: tuple[type[BaseModel], ...] = (GenerateRequest, BatchRequest)
OPEN_BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatCompletionRequest)
"""Those whose unknown fields are ignored."""
ANSWERS: tuple[type[BaseModel], ...] = (
    GenerateResponse,
    BatchResponse,
    BatchLine,
    Health,
    Info,
    ErrorBody,
    ModelList,
    Model,
    Completion,
    CompletionChunk,
    ChatCompletion,
    ChatCompletionChunk,
)

DESCRIPTION = """{summary}

Every error, on every route, is an `ErrorBody`. A path that is not listed here is a 404 (`not_found`), a method that is
not listed a 405 (`method_not_allowed`, with `Allow`). Every answer carries `x-request-id`: the caller's own when it is
sane (1 to 128 letters, digits and `._:/+=@-`), else a new one. Answers may gain fields, and errors codes: ignore what
you do not know.
"""
TAGS = [
    {"name": "openai", "description": "OpenAI's routes, over the same windows: for clients that know these."},
    {"name": "work", "description": "Generation: one request, or a list of them."},
    {"name": "state", "description": "What the service is, and how it does."},
]
OPENAI_ANSWER = """One choice for each prompt and output. With `stream` the same comes as server-sent events (chunks,
then `[DONE]`) once the text is there, with a comment line after each 10 seconds until then. What fails in the first 10
seconds has its status; what fails later is an event with an `ErrorBody`, after which no `[DONE]` comes."""
HEADERS = {
    "x-request-id": ("Id of this call; the lines of the service's log carry it.", {"type": "string"}),
    "retry-after": ("Seconds after which it is worth trying again.", {"type": "integer"}),
    "x-ignored-fields": ("Fields of the body that nothing here knows.", {"type": "string"}),
    "www-authenticate": ("The scheme that is asked for: `Bearer`.", {"type": "string"}),
}
HEADERS_OF = {401: ("www-authenticate",), 429: ("retry-after",), 503: ("retry-after",)}
"""Beside `x-request-id`, which every answer carries."""
BEARER = {"type": "http", "scheme": "bearer", "description": "One of the keys of the setting `api_key`."}

BATCH_LINES: dict[str, Any] = {
    "schema": {"$ref": REF.format(model=BatchLine.__name__)},
    "examples": examples.BATCH_LINES,
}
"""An answer in lines: the schema is that of one line."""


class PlainSchema(GenerateJsonSchema):
    """JSON schemas in the words that generators of clients understand best.

    No titles of fields, which would become names of types; no `default`, which clients would send, over the
    `defaults` of a batch; a union that may be null in one level.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never: the name says it."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """What the field takes; its description says what holds when it is left out."""
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """`anyOf` of the alternatives and null."""
        inner = self.generate_inner(schema["schema"])
        return {"anyOf": [*(inner.get("oneOf") or inner.get("anyOf") or [inner]), {"type": "null"}]}

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        """With its width: Java's plain integer ends at 31 bits."""
        plain = super().int_schema(schema)
        return plain if plain.get("maximum", MAX_SEED) <= MAX_TOKENS else plain | {"format": "int64"}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Values typed for every key, and the keys' pattern beside them: `patternProperties` few generators know."""
        plain = super().dict_schema(schema)
        if patterns := plain.pop("patternProperties", None):
            ((pattern, values),) = patterns.items()
            plain |= {"additionalProperties": values, "propertyNames": {"pattern": pattern}}
        return plain


def body_of(model: type[BaseModel], named: dict[str, examples.Example]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that parses its body itself."""
    content = {"schema": {"$ref": REF.format(model=model.__name__)}, "examples": named}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def answer(
    model: type[BaseModel], description: str, named: dict[str, examples.Example], **other: Any
) -> dict[str, Any]:
    """A 200 of a route: JSON, and its further media types."""
    content = {"application/json": {"examples": named}, **other}
    return {"model": model, "description": description, "content": content}


def openai_answer(
    model: type[BaseModel], named: dict[str, examples.Example], chunk: type[BaseModel], events: dict[str, Any]
) -> dict[str, Any]:
    """A 200 of a route that streams as well: the schema of a stream is that of one event's data."""
    stream = {"schema": {"$ref": REF.format(model=chunk.__name__)}, "examples": events}
    return answer(model, OPENAI_ANSWER, named, **{"text/event-stream": stream}) | {"headers": {"x-ignored-fields": {}}}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads a part of its path itself."""
    schema = {"type": "string"}
    parameter = {"name": name, "in": "path", "required": True, "description": description, "schema": schema}
    return {"parameters": [parameter]}


def install(app: FastAPI) -> None:
    """Serve the page's assets and write the document."""
    folder = Path(fastapi_offline.__file__).parent / "static"
    app.mount(ASSETS, StaticFiles(directory=folder), name="docs-assets")
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]


def page(root_path: str) -> HTMLResponse:
    """Swagger UI over ``/openapi.json``."""
    return get_swagger_ui_html(
        openapi_url=f"{root_path}/openapi.json",
        title="Batchserve",
        swagger_js_url=f"{root_path}{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{root_path}{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{root_path}{ASSETS}/favicon.png",
    )


def _document(app: FastAPI) -> dict[str, Any]:
    """The document, written once."""
    if app.openapi_schema is None:
        app.openapi_schema = _written(app)
    return app.openapi_schema


def _written(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with our own schemas, headers and security."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=DESCRIPTION.format(summary=app.description),
        routes=app.routes,
        tags=TAGS,
        servers=[{"url": app.root_path or "/", "description": "This service."}],
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    document["components"] = {
        "schemas": _schemas(),
        "headers": {name: {"description": text, "schema": schema} for name, (text, schema) in HEADERS.items()},
        "securitySchemes": {"bearer": BEARER},
    }
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods:
                _complete(document["paths"][route.path_format][method.lower()], route)
    return document


def _schemas() -> dict[str, Any]:
    """Bodies closed, where unknown fields are refused; answers open, as they may gain fields."""
    bodies, answers = _schemas_of(BODIES + OPEN_BODIES), _schemas_of(ANSWERS)
    for schema in (*answers.values(), *(bodies[model.__name__] for model in OPEN_BODIES)):
        if schema.get("additionalProperties") in (False, True):
            del schema["additionalProperties"]
    return dict(sorted({**bodies, **answers}.items()))


def _schemas_of(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    named = [(model, "validation") for model in models]
    _, written = models_json_schema(named, ref_template=REF, schema_generator=PlainSchema)  # type: ignore[arg-type]
    schemas: dict[str, Any] = written["$defs"]
    return schemas


def _complete(operation: dict[str, Any], route: APIRoute) -> None:
    """The key, the headers of the answers, and the examples as they are: FastAPI leaves out what is null in them."""
    if route.path not in OPEN_PATHS:
        operation["security"] = [{"bearer": []}, {}]  # the empty one: a service without keys asks for none
    operation |= {"operationId": _operation_id(route.path_format), **(route.openapi_extra or {})}
    for status, given in route.responses.items():
        response = operation["responses"][str(status)]
        names = ("x-request-id", *given.get("headers", ()), *HEADERS_OF.get(int(status), ()))
        response["headers"] = {name: {"$ref": HEADER_REF.format(name=name)} for name in names}
        for media_type, content in given["content"].items():
            response["content"][media_type]["examples"] = content["examples"]


def _operation_id(path: str) -> str:
    """The function's name in clients: `chat_completions` of `/v1/chat/completions`, `model` of `/v1/models/{model}`."""
    *folders, last = path.removeprefix("/v1").strip("/").split("/")
    return last.strip("{}") if last.startswith("{") else "_".join((*folders, last))
