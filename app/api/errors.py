"""Errors as answers: one shape on every route."""

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.api import render
from app.api.examples import ERRORS
from app.api.schemas import ErrorBody
from app.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotReady,
    QueueFull,
    QueueTimeout,
    RequestTimeout,
    RequestTooLarge,
    ServiceError,
    ShuttingDown,
)

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What gateways log for a caller that hung up; nobody reads it."""

ANYWHERE: tuple[type[ServiceError], ...] = (InternalError,)
WITH_KEY: tuple[type[ServiceError], ...] = (InvalidApiKey, *ANYWHERE)
UNAVAILABLE: tuple[type[ServiceError], ...] = (NotReady, ShuttingDown, EngineDead)
ON_BATCH: tuple[type[ServiceError], ...] = (*WITH_KEY, InvalidRequest, RequestTooLarge, QueueFull, *UNAVAILABLE)
ON_GENERATE: tuple[type[ServiceError], ...] = (
    *ON_BATCH,
    ContextLengthExceeded,
    ModelNotFound,
    GenerationFailed,
    QueueTimeout,
    RequestTimeout,
)
ON_MODEL: tuple[type[ServiceError], ...] = (*WITH_KEY, ModelNotFound)


def error_response(error: ServiceError) -> Response:
    """The answer that an error becomes."""
    body = render.encode({"error": error.body()})
    return render.JsonResponse(body, error.status, error.headers())


def documented(*errors: type[ServiceError]) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route for the OpenAPI document: each status with its codes, and an example of each."""
    by_status: dict[int | str, list[type[ServiceError]]] = {}
    for error in sorted(errors, key=lambda kind: kind.status):
        by_status.setdefault(error.status, []).append(error)
    return {
        status: {
            "model": ErrorBody,
            "description": "; ".join(f"`{kind.code}`: {_first_line(kind)}" for kind in kinds) + ".",
            "content": {"application/json": {"examples": {kind.code: _example(kind) for kind in kinds}}},
        }
        for status, kinds in by_status.items()
    }


def _example(kind: type[ServiceError]) -> dict[str, Any]:
    return {"summary": f"{_first_line(kind)}.", "value": {"error": ERRORS[kind].body()}}


def _first_line(kind: type[ServiceError]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].rstrip(".").replace("``", "`")


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


def _answer(request: Request, error: ServiceError) -> Response:
    request.app.state.service.metrics.errors.labels(error.code).inc()
    return error_response(error)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _answer(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, no such method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return _answer(request, MethodNotAllowed(f"{request.method} is not allowed here; {allow} is", allow=allow))
    if error.status_code == 404:
        return _answer(request, NotFound(f"there is no {request.url.path}"))
    return _answer(request, InternalError(str(error.detail)))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """No route declares parameters that FastAPI validates; should one ever, it is a 400."""
    return _answer(request, InvalidRequest(str(error)))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
