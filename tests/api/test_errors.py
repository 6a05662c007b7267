"""Errors on the wire and in the OpenAPI file: one shape, one place."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from app import errors as tree
from app.api import errors
from app.api.schemas import ErrorBody
from app.errors import (
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    QueueFull,
    ServiceError,
    ShuttingDown,
)
from app.metrics import Metrics


def incoming(metrics: Metrics) -> Request:
    app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(metrics=metrics)))
    return Request(
        {
            "type": "http",
            "method": "PUT",
            "path": "/generate",
            "query_string": b"",
            "headers": [],
            "server": ("h", 80),
            "app": app,
        }
    )


def counted(metrics: Metrics, code: str) -> float | None:
    return metrics.registry.get_sample_value("batchserve_errors_total", {"code": code})


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("wrong", param="prompt"),
        InvalidApiKey("no key"),
        MethodNotAllowed("not so", allow="POST"),
        QueueFull("full", queue_depth=3, limit=4),
        ShuttingDown("over"),
        InternalError("\ud800" * 1000),
    ],
    ids=lambda error: error.code,
)
def test_an_answer_has_the_errors_status_headers_and_shape(error: ServiceError) -> None:
    response = errors.error_response(error)

    assert response.status_code == error.status
    assert response.headers["content-type"] == "application/json"
    assert all(response.headers[name] == value for name, value in error.headers().items())
    body = json.loads(bytes(response.body))
    ErrorBody.model_validate(body, strict=True)
    assert body["error"]["code"] == error.code


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (HTTPException(404), 404, "not_found"),
        (HTTPException(405, headers={"Allow": "POST"}), 405, "method_not_allowed"),
        (HTTPException(405), 405, "method_not_allowed"),
        (HTTPException(418, "teapot"), 500, "internal_error"),
    ],
    ids=str,
)
async def test_starlettes_own_errors_get_our_shape(raised: HTTPException, status: int, code: str) -> None:
    metrics = Metrics()
    response = await errors._on_http_exception(incoming(metrics), raised)

    assert response.status_code == status
    assert json.loads(bytes(response.body))["error"]["code"] == code
    assert counted(metrics, code) == 1
    if raised.headers:
        assert response.headers["allow"] == "POST"


async def test_an_error_of_the_service_is_counted_by_its_code() -> None:
    metrics = Metrics()
    await errors._on_service_error(incoming(metrics), QueueFull("full"))

    assert counted(metrics, "queue_full") == 1


async def test_what_fastapi_would_call_422_is_a_400() -> None:
    response = await errors._on_validation_error(incoming(Metrics()), RequestValidationError([]))

    assert response.status_code == 400
    ErrorBody.model_validate_json(bytes(response.body))


async def test_a_caller_that_is_gone_gets_no_body_and_no_error_is_counted() -> None:
    metrics = Metrics()
    response = await errors._on_disconnect(incoming(metrics), ClientDisconnect())

    assert response.body == b""
    assert counted(metrics, "internal_error") is None


# --- OpenAPI ---


def test_each_status_is_documented_with_its_codes() -> None:
    documented: dict[Any, Any] = errors.documented(*errors.ON_GENERATE)

    assert set(documented) == {400, 401, 404, 413, 429, 500, 503, 504}
    for status, entry in documented.items():
        codes = {kind.code for kind in (*errors.ON_GENERATE, *errors.ANYWHERE) if kind.status == status}
        assert all(f"`{code}`: " in entry["description"] for code in codes)
        assert entry["model"] is ErrorBody


def test_every_error_of_the_tree_is_documented_for_some_route() -> None:
    kinds = [kind for kind in vars(tree).values() if isinstance(kind, type) and issubclass(kind, ServiceError)]
    codes = {kind.code for kind in kinds}
    documented = {kind.code for kind in (*errors.ON_GENERATE, *errors.ANYWHERE)}

    assert codes - documented == {"not_found", "method_not_allowed"}  # of no route
