"""OpenAI's routes, over the same windows as ``/generate``."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response

from app import timings
from app.api import docs, render, sse
from app.api import openai_examples as examples
from app.api.chunks import chunks_of, with_member
from app.api.errors import ON_GENERATE, ON_MODEL, WITH_KEY, documented
from app.api.live import Live
from app.api.routes import ServiceDep, read
from app.api.schemas import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Model, ModelList
from app.api.service import Service
from app.api.submit import submit, unless_gone
from app.api.validation import OpenAIParsed, openai_body
from app.errors import RequestTooLarge, ServiceError
from app.log import request_id_var
from app.prompts.openai import ChatCompletionRequest, CompletionRequest, OpenAIBody, prompts_of
from app.request import Answer, AnswerHead, Call, ServedModel
from app.request import Request as WorkRequest

router = APIRouter(prefix="/v1", tags=["openai"])

IGNORED = "x-ignored-fields"
MAX_IGNORED = 32
"""So many names of ignored fields are told of, each cut to so many characters: headers are short."""


@router.get(
    "/models",
    summary="The models that are served",
    responses={
        200: docs.answer(ModelList, "The model of this service, then its adapters.", examples.MODELS),
        **documented(*WITH_KEY),
    },
)
async def models(service: ServiceDep) -> Response:
    """The model, then its LoRA adapters, whose `parent` it is; `max_model_len` is `null` until it is loaded."""
    served = [_model(service, model) for model in service.backend.models()]
    return render.JsonResponse(render.encode({"object": "list", "data": served}))


@router.get(
    "/models/{model:path}",
    summary="One model",
    responses={200: docs.answer(Model, "The model of this name.", examples.MODEL), **documented(*ON_MODEL)},
    openapi_extra=docs.path_parameter("model", "Name of the model, as `GET /v1/models` has it."),
)
async def model(request: Request, service: ServiceDep) -> Response:
    """The model of this name, which may hold slashes."""
    model = service.backend.find_model(request.path_params["model"])
    return render.JsonResponse(render.encode(_model(service, model)))


def _model(service: Service, model: ServedModel) -> dict[str, Any]:
    """A model, under vLLM's names."""
    is_loaded = service.lifecycle.has_loaded.is_set()
    return {
        "id": model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "batchserve",
        "root": service.settings.model if model.parent is None else model.root,
        "parent": model.parent,
        "max_model_len": service.backend.max_model_len if is_loaded else None,
    }


@router.post(
    "/completions",
    summary="Run prompts, as OpenAI's completions",
    response_class=Response,
    responses={
        200: docs.openai_answer(Completion, examples.COMPLETION_ANSWERS, CompletionChunk, examples.COMPLETION_EVENTS),
        **documented(*ON_GENERATE),
    },
    openapi_extra=docs.body_of(CompletionRequest, examples.COMPLETION_BODIES),
)
async def completions(request: Request, service: ServiceDep) -> Response:
    """A choice for each prompt, `n` times; each prompt is a request of its own in the windows."""
    return await _answer(request, service, CompletionRequest, "cmpl")


@router.post(
    "/chat/completions",
    summary="Go on with a conversation, as OpenAI's chat",
    response_class=Response,
    responses={
        200: docs.openai_answer(ChatCompletion, examples.CHAT_ANSWERS, ChatCompletionChunk, examples.CHAT_EVENTS),
        **documented(*ON_GENERATE),
    },
    openapi_extra=docs.body_of(ChatCompletionRequest, examples.CHAT_BODIES),
)
async def chat_completions(request: Request, service: ServiceDep) -> Response:
    """`n` choices; the setting `request_format` says how the conversation becomes text."""
    return await _answer(request, service, ChatCompletionRequest, "chatcmpl")


async def _answer(request: Request, service: Service, model: type[OpenAIBody], prefix: str) -> Response:
    """One piece, or a stream of events."""
    raw = await read(request, service)
    parsed: OpenAIParsed = await service.parser.parse(raw, lambda value: openai_body(value, model))
    body, headers = parsed.body, _told(parsed.ignored)
    work = _Work(service, body, request.state.call, f"{prefix}-{body.request_id or request_id_var.get()}")
    if not body.stream:
        return render.JsonResponse(await unless_gone(work.whole(), request.receive), headers=headers)
    events = sse.Events(work.events())
    await events.within_quiet(request.receive)
    return sse.EventStream(events, lambda error: service.metrics.errors.labels(error.code).inc(), headers)


def _told(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names the fields that were ignored."""
    names = [quote(name[:64], safe="") or '""' for name in ignored[:MAX_IGNORED]]
    return {IGNORED: ", ".join(names)} if names else {}


@dataclass(frozen=True, slots=True)
class _Work:
    """One body on its way.

    Attributes:
        id: of the answer.
    """

    service: Service
    body: OpenAIBody
    call: Call
    id: str

    async def whole(self) -> bytes:
        """The answer in one piece."""
        answer, answers = await self._answer()
        return await render.encode_off_loop(answer, self._logprob_entries(answers))

    def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event."""
        return self._whole_events() if self.service.backend.takes_windows else self._live_events()

    async def _whole_events(self) -> AsyncGenerator[bytes, None]:
        """Those of an answer that is there as a whole."""
        answer, answers = await self._answer()
        entries = self._logprob_entries(answers)
        for chunk in chunks_of(answer, answers, self.body.stream_options):
            yield await render.encode_off_loop(chunk, entries)

    async def _live_events(self) -> AsyncGenerator[bytes, None]:
        """Those of an answer that is being made; what may be the last one waits for the metrics."""
        live, held = Live(len(prompts_of(self.body))), []
        async with self._submitted(live) as requests:
            futures = [request.future for request in requests]
            resolved = [request.resolved for request in requests]
            async with aclosing(self.service.backend.stream(resolved, live.outputs(futures), self._head())) as chunks:
                async for chunk in chunks:
                    if live.is_last:
                        held.append(chunk)
                    else:
                        yield chunk
            metrics = render.openai_metrics([future.result() for future in futures], self.service.metrics)
        for chunk in held[:-1]:
            yield chunk
        yield with_member(held[-1], "metrics", render.encode(metrics))

    async def _answer(self) -> tuple[dict[str, Any], list[Answer]]:
        """The answer as plain values, and what it was made of."""
        async with self._submitted() as requests:
            answers = list(await asyncio.gather(*(request.future for request in requests)))
        metrics = render.openai_metrics(answers, self.service.metrics)
        return {**await self.service.backend.shape(answers, self._head()), "metrics": metrics}, answers

    @asynccontextmanager
    async def _submitted(self, live: Live | None = None) -> AsyncIterator[list[WorkRequest]]:
        """A request for each prompt; one that fails is the failure of all, and in the end none is left."""
        prompts, limit = prompts_of(self.body), self.service.settings.max_batch_requests
        if len(prompts) > limit:
            raise RequestTooLarge(f"{len(prompts)} prompts; at most {limit} go into one call", limit=limit)
        entries = await submit(self.service, prompts, self.call, is_whole=True, live=live)
        requests = [entry for entry in entries if not isinstance(entry, ServiceError)]
        try:
            yield requests
        finally:
            for request in requests:
                request.future.cancel()

    def _head(self) -> AnswerHead:
        created = int(self.call.received + timings.wall_offset())
        return AnswerHead(self.id, created, self.body.model or self.service.settings.model_name)

    def _logprob_entries(self, answers: Sequence[Answer]) -> int:
        """About how many entries of logprobs the answer holds."""
        if self.body.logprobs is None and self.body.prompt_logprobs is None:
            return 0
        tokens = sum(answer.request.prompt_tokens + answer.generation.completion_tokens for answer in answers)
        return tokens * (1 + self.body.top_count)
