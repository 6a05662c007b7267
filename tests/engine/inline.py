"""The service with a real engine inside the test process, and what tests ask of it."""

import asyncio
import itertools
import json
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from app import timings
from app.api.service import Service
from app.backends.offline import VLLMOfflineBackend
from app.backends.registry import Backend
from app.main import create_app
from app.prompts.spec import GenerateRequest
from app.request import Request, Resolved, Window
from app.settings import Settings
from app.timings import Stamps

START_S = 120.0
ANSWER_S = 60.0
_window_ids = itertools.count(1_000_000)


def strict_json(content: bytes) -> Any:
    """JSON as the standard has it: no NaN, no infinity."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(content, parse_constant=refuse)


class Caller:
    """What tests ask of a service with a real engine, wherever it runs."""

    client: httpx.AsyncClient

    async def post(self, route: str, body: Any) -> tuple[int, Any]:
        """Status and body of a POST; both sides are strict JSON unless ``body`` is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with asyncio.timeout(ANSWER_S):
            answer = await self.client.post(route, content=content, headers={"content-type": "application/json"})
        return answer.status_code, strict_json(answer.content)

    async def generate(self, **body: Any) -> Any:
        """The answer to a request that must succeed; greedy unless told otherwise."""
        status, answer = await self.post("/generate", {"temperature": 0, **body})
        assert status == 200, answer
        return answer

    async def text(self, **body: Any) -> str:
        """The one text of a request that must succeed."""
        (output,) = (await self.generate(**body))["outputs"]
        text: str = output["text"]
        return text

    async def refused(self, **body: Any) -> Any:
        """The error of a request that must get 400."""
        status, answer = await self.post("/generate", body)
        assert status == 400, (status, str(answer)[:500])
        assert answer["error"]["type"] == "invalid_request_error"
        return answer["error"]

    async def batch(self, requests: Sequence[dict[str, Any]], **defaults: Any) -> list[Any]:
        """The rows of a batch, which went in one window when it fits one."""
        status, answer = await self.post("/batch", {"requests": requests, "defaults": {"temperature": 0, **defaults}})
        assert status == 200, answer
        assert [row["index"] for row in answer["results"]] == list(range(len(requests)))
        return list(answer["results"])

    async def batch_texts(self, requests: Sequence[dict[str, Any]], **defaults: Any) -> list[list[str]]:
        """The texts of each row of a batch that must succeed."""
        rows = await self.batch(requests, **defaults)
        return [[output["text"] for output in row["response"]["outputs"]] for row in rows]


@dataclass
class Inline(Caller):
    """A running service with its parts laid open."""

    app: FastAPI
    client: httpx.AsyncClient

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    @property
    def backend(self) -> VLLMOfflineBackend:
        backend = self.service.backend
        assert isinstance(backend, VLLMOfflineBackend)
        return backend

    @property
    def llm(self) -> Any:
        """vLLM's ``LLM``; to be touched only while no window runs."""
        return self.backend._llm

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        """The engine core, which is an object of this process."""
        return self.engine.engine_core.engine_core

    @property
    def max_model_len(self) -> int:
        return self.backend.max_model_len

    @property
    def vocab_size(self) -> int:
        return int(self.backend.resolution._vocab_size)

    @property
    def tokenizer(self) -> Any:
        return self.backend.resolution.tokenizer

    async def resolve(self, **body: Any) -> Resolved:
        """What a body becomes; it must be a good one."""
        (resolved,) = await self.backend.resolve([GenerateRequest.model_validate(body)])
        assert isinstance(resolved, Resolved), resolved
        return resolved

    def assert_idle(self) -> None:
        """Nothing is unfinished in the engine, its processor or its scheduler."""
        processor, scheduler = self.engine.output_processor, self.core.scheduler
        assert not self.engine.has_unfinished_requests()
        assert not processor.request_states
        assert not processor.parent_requests
        assert not processor.external_req_ids
        assert not scheduler.has_unfinished_requests()
        assert not scheduler.requests

    async def assert_serves(self) -> None:
        """Idle, ready, and a normal request works."""
        self.assert_idle()
        answer = await self.generate(prompt="The quick brown fox", max_tokens=3, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 3
        assert (await self.client.get("/readyz")).status_code == 200
        self.assert_idle()


async def window_of(backend: Backend, bodies: Sequence[dict[str, Any]]) -> Window:
    """A window of exactly these, without a batcher."""
    resolved = await backend.resolve([GenerateRequest.model_validate(body) for body in bodies])
    requests, now = [], timings.now()
    for item in resolved:
        assert isinstance(item, Resolved), item
        future = asyncio.get_running_loop().create_future()
        requests.append(Request(item, item.params.n, 0, None, Stamps(now, now), future))
    return Window(next(_window_ids), "full", requests, timings.now(), timings.wall_offset(), _window_ids)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Inline]:
    """A service in this process, ready; closed at the end."""
    app = create_app(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM and torch, on being imported
        lifespan = app.router.lifespan_context(app)
        await lifespan.__aenter__()
        await _until_ready(app.state.service)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=None) as client:
            yield Inline(app, client)
    finally:
        await lifespan.__aexit__(None, None, None)


class TheEngine:
    """The one engine of the test process: vLLM has room for one at a time, so tests that bring their own close it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._service: Inline | None = None

    async def service(self) -> Inline:
        """The running service; started when there is none."""
        if self._service is None:
            self._service = await self._stack.enter_async_context(running(self._settings))
        return self._service

    async def close(self) -> None:
        self._service = None
        await self._stack.aclose()


async def _until_ready(service: Service) -> None:
    lifecycle, deadline = service.lifecycle, time.monotonic() + START_S
    while not lifecycle.has_loaded.is_set():
        assert not lifecycle.is_over.is_set(), lifecycle.reason
        assert time.monotonic() < deadline, "the engine does not start"
        await asyncio.sleep(0.05)
