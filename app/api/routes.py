"""The routes. Each is a few lines: parse, submit, render."""

from importlib import metadata
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from app.api import batch, docs, examples, render
from app.api.errors import ANYWHERE, ON_BATCH, ON_GENERATE, UNAVAILABLE, WITH_KEY, documented
from app.api.jsonbody import read_body
from app.api.schemas import BatchRequest, BatchResponse, GenerateResponse, Health, Info
from app.api.service import Service
from app.api.submit import submit, unless_gone
from app.api.validation import batch_body, generate_body
from app.errors import ServiceError
from app.lifecycle import State
from app.prompts.spec import GenerateRequest
from app.request import Call

router = APIRouter()

BATCH_ANSWER = """A row for each request, failed ones included, in their order. Where `Accept` prefers
`application/x-ndjson` (JSON is not named, or named later, or with a smaller `q`), each row comes as one line as soon as
it is finished (its `index` says which it is), an empty line after 10 seconds of silence, and last a line with the rest
of the answer (`BatchSummary`)."""


async def get_service(request: Request) -> Service:
    """The running service."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


async def read(request: Request, service: Service) -> bytes:
    """The body; read even when the service takes no work, so that the caller gets to see the refusal."""
    body = await read_body(request, service.settings.max_body_bytes)
    if (refusal := service.lifecycle.refusal()) is not None:
        raise refusal
    return body


@router.post(
    "/generate",
    tags=["work"],
    summary="Run one request",
    response_class=Response,
    responses={
        200: docs.answer(GenerateResponse, "The texts, with this request's own timings.", examples.GENERATE_ANSWERS),
        **documented(*ON_GENERATE),
    },
    openapi_extra=docs.body_of(GenerateRequest, examples.GENERATE_BODIES),
)
async def generate(request: Request, service: ServiceDep) -> Response:
    """One prompt; waits for a window, and answers with the texts and with this request's own timings."""
    body = await service.parser.parse(await read(request, service), generate_body)
    answer = await unless_gone(_generate(service, body, request.state.call), request.receive)
    return render.JsonResponse(answer)


async def _generate(service: Service, body: GenerateRequest, call: Call) -> bytes:
    (entry,) = await submit(service, [body], call)
    if isinstance(entry, ServiceError):
        raise entry
    answer = render.generate_answer(
        await entry.future, body, body.model or service.settings.model_name, service.metrics
    )
    return await render.encode_answer(answer)


@router.post(
    "/batch",
    tags=["work"],
    summary="Run a list of requests",
    response_class=Response,
    responses={
        200: docs.answer(BatchResponse, BATCH_ANSWER, examples.BATCH_ANSWERS, **{batch.NDJSON: docs.BATCH_LINES}),
        **documented(*ON_BATCH),
    },
    openapi_extra=docs.body_of(BatchRequest, examples.BATCH_BODIES),
)
async def run_batch(request: Request, service: ServiceDep) -> Response:
    """Admitted whole or refused whole; a wrong or failing row costs the others nothing.

    Only what is no batch at all is refused whole. Once it is admitted, every failure is a row's: 404, 504 and
    `generation_failed` then stand in that row's `status` and `error`, and the answer is a 200.
    """
    raw, settings = await read(request, service), service.settings
    limits = settings.max_batch_requests, settings.max_body_bytes
    body = await service.parser.parse(raw, lambda value: batch_body(value, *limits))
    started = await unless_gone(batch.start(service, body, request.state.call), request.receive)
    if batch.wants_lines(",".join(request.headers.getlist("accept"))):
        return batch.LinesResponse(started)
    return render.JsonResponse(await unless_gone(batch.as_json(started), request.receive))


@router.get(
    "/livez",
    tags=["state"],
    summary="Is the process up",
    responses={
        200: docs.answer(Health, "The process answers.", examples.STATES["ready"] | examples.STATES["loading"]),
        **documented(*ANYWHERE),
    },
)
async def livez(service: ServiceDep) -> Response:
    """200 as long as the process answers, while the model loads too."""
    return render.JsonResponse(render.encode({"status": service.lifecycle.state.value}))


READY_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: docs.answer(Health, "Work is taken.", examples.STATES["ready"]),
    **documented(*ANYWHERE, *UNAVAILABLE),
}


@router.get("/readyz", tags=["state"], summary="Does the service take work", responses=READY_RESPONSES)
@router.get("/health", tags=["state"], summary="The same, under another common name", responses=READY_RESPONSES)
async def readyz(service: ServiceDep) -> Response:
    """200 once a generation has succeeded and while the engine lives; else 503 with the reason."""
    if (refusal := service.lifecycle.refusal()) is not None:
        raise refusal
    return render.JsonResponse(render.encode({"status": State.READY.value}))


@router.get(
    "/info",
    tags=["state"],
    summary="What runs here",
    responses={
        200: docs.answer(Info, "What runs here, and with which settings.", examples.INFO),
        **documented(*WITH_KEY),
    },
    response_class=Response,
)
async def info(service: ServiceDep) -> Response:
    """Backend, engine settings with their sources, versions, thread binding, limits; no secrets."""
    settings = service.settings.public()
    backend = service.backend.info()
    limits = (
        "batch_size",
        "max_wait_ms",
        "max_queue_requests",
        "max_queue_tokens",
        "max_queue_media_bytes",
        "max_media_bytes",
        "max_image_pixels",
        "max_audio_s",
        "max_batch_requests",
        "max_body_bytes",
    )
    shown = {
        "version": metadata.version("batchserve"),
        "model": service.settings.model_name,
        "state": service.lifecycle.state.value,
        "backend": backend,
        "settings": settings,
        "limits": {name: settings[name] for name in limits}
        | {"max_model_len": service.backend.max_model_len if service.lifecycle.has_loaded.is_set() else None},
        "versions": {"batchserve": metadata.version("batchserve"), **backend["versions"]},
    }
    return render.JsonResponse(render.encode(shown))


@router.get(
    "/metrics",
    tags=["state"],
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus text format. The names say the units: seconds, tokens, requests.",
            "content": {"text/plain": {"schema": {"type": "string"}, "examples": examples.METRICS}},
        },
        **documented(*WITH_KEY),
    },
)
async def metrics(service: ServiceDep) -> Response:
    """The service's own, then those of the process and of vLLM."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/docs", include_in_schema=False)
async def documentation(request: Request) -> HTMLResponse:
    """Swagger UI; its assets come from this service, so it works without the internet."""
    return docs.page(request.scope.get("root_path", ""))
