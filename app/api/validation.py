"""JSON values to typed bodies; what pydantic says becomes one error with the path of the field."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from app.errors import InvalidRequest, RequestTooLarge
from app.prompts.openai import OpenAIBody, ignored, refusal
from app.prompts.spec import MAX_LABEL_CHARS, BatchDefaults, GenerateRequest
from app.prompts.strict import unknown

BATCH_FIELDS = ("requests", "defaults", "request_id")
IN_JSON = {
    "missing": "is needed",
    "model_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "list_type": "must be an array",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
}
"""What pydantic says in Python's words, in JSON's."""
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BatchBody:
    """A `/batch` body whose rows have been validated one by one.

    Attributes:
        rows: a body, or the error that this row gets, in input order.
        request_id: the caller's label.
    """

    rows: list[GenerateRequest | InvalidRequest]
    request_id: str | None


def generate_body(value: Any) -> GenerateRequest:
    """A `/generate` body.

    Raises:
        InvalidRequest: with the path of the field at fault.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    return _validate(GenerateRequest, value)


def batch_body(value: Any, max_requests: int, max_bytes: int) -> BatchBody:
    """A `/batch` body: its frame must be right as a whole, its rows each for itself.

    Raises:
        InvalidRequest: the frame is wrong.
        RequestTooLarge: more than ``max_requests`` rows, or more than ``max_bytes`` were the defaults
            written into each of them: a short body must not make an endless answer.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    for name in value:
        if name not in BATCH_FIELDS:
            belongs = "; it belongs into an item or into defaults" if name in GenerateRequest.model_fields else ""
            raise InvalidRequest(unknown(name, BATCH_FIELDS) + belongs, param=name)
    requests, label = value.get("requests"), value.get("request_id")
    if not isinstance(requests, list) or not requests:
        raise InvalidRequest("must be a list of at least one /generate body", param="requests")
    if len(requests) > max_requests:
        raise RequestTooLarge(f"{len(requests)} requests; at most {max_requests} go into one batch", limit=max_requests)
    if label is not None and (not isinstance(label, str) or len(label) > MAX_LABEL_CHARS):
        raise InvalidRequest(f"must be a string of at most {MAX_LABEL_CHARS} characters", param="request_id")
    defaults = _defaults(value.get("defaults"))
    if len(requests) * len(json.dumps(defaults)) > max_bytes:
        raise RequestTooLarge(
            f"defaults times {len(requests)} requests are more than {max_bytes} bytes", limit=max_bytes
        )
    for index, item in enumerate(requests):
        if not isinstance(item, dict):
            raise InvalidRequest(f"must be a JSON object, not {_kind(item)}", param=f"requests.{index}")
    return BatchBody([_row(defaults, item) for item in requests], label)


@dataclass(frozen=True, slots=True)
class OpenAIParsed:
    """A body of one of OpenAI's routes.

    Attributes:
        ignored: names of fields that nothing here knows.
    """

    body: OpenAIBody
    ignored: list[str]


def openai_body(value: Any, model: type[OpenAIBody]) -> OpenAIParsed:
    """A body of one of OpenAI's routes, without the fields that have no effect.

    Raises:
        InvalidRequest: with the path of the field at fault, or the name of one that cannot be honoured.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    for name, item in value.items():
        if (reason := refusal(name, item)) is not None:
            raise InvalidRequest(reason, param=name)
    known = {name: item for name, item in value.items() if name in model.field_names()}
    try:
        body = _validate(model, known)
    except InvalidRequest as error:  # OpenAI's SDK shows its user the message alone
        raise InvalidRequest(
            f"{error.param}: {error.message}" if error.param else error.message, param=error.param
        ) from None
    return OpenAIParsed(body, ignored(value, body))


def _defaults(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"must be a JSON object, not {_kind(value)}", param="defaults")
    try:
        _validate(BatchDefaults, value)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=".".join(filter(None, ("defaults", error.param)))) from error
    return value


def _row(defaults: dict[str, Any], item: dict[str, Any]) -> GenerateRequest | InvalidRequest:
    try:
        return _validate(GenerateRequest, {**defaults, **item})
    except InvalidRequest as error:
        return error


def _validate(model: type[M], value: dict[str, Any]) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _to_error(error) from None


def _to_error(error: ValidationError) -> InvalidRequest:
    """The first complaint, with the path of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = list(_path(first["loc"]))
    if "param" in first.get("ctx", {}):
        path.append(str(first["ctx"]["param"]))
    return InvalidRequest(IN_JSON.get(first["type"], first["msg"]), param=".".join(path) or None)


def _path(loc: Iterable[int | str]) -> Iterable[str]:
    """The path without the names that pydantic gives to the branches of a union."""
    return (str(part) for part in loc if not isinstance(part, str) or (part[:1] != "~" and part.isidentifier()))


def _kind(value: Any) -> str:
    names = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), "something else")
