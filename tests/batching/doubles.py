"""What stands in for the backend under a batcher: runs at once, when told to, or as a test wants."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

from app.backends.registry import Backend
from app.batching.batcher import Batcher
from app.batching.window import WindowLimits
from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.request import Answer, Generation, Outcome, Output, Release, Request, Resolved, Window
from app.timings import Stamps, now

BOUND_S = 5.0
"""How long a test waits for what should come at once."""


def make_request(
    *,
    label: str = "",
    tokens: int = 1,
    places: int = 1,
    priority: int = 0,
    queue_timeout_s: float | None = None,
    admitted: float = 0.0,
    future: Any = None,
) -> Request:
    """A request; outside of an event loop give a ``future``."""
    if future is None:
        future = asyncio.get_running_loop().create_future()
    resolved = Resolved([0] * tokens, None, {"label": label})
    return Request(resolved, places, priority, queue_timeout_s, Stamps(now(), admitted), future)


def label(request: Request) -> str:
    return str(request.resolved.sampling["label"])


def generation(text: str) -> Generation:
    return Generation([Output(0, text, [0], "stop", None, None)], None, 0, None)


def outcomes(window: Window) -> list[Outcome]:
    """Each request gets its own label as text."""
    return [Outcome(request, window, i, generation(label(request))) for i, request in enumerate(window.requests)]


class BackendDouble:
    """Notes the windows it gets and answers with ``outcomes``.

    Attributes:
        windows: labels of the requests of each window.
        entered: released once for each window that arrives.
        gate: a window waits here; open unless a test closes it.
        act: makes of a window what ``generate`` returns, or raises.
    """

    takes_windows = True
    release: Release = "direct"
    max_in_flight = 4

    def __init__(self) -> None:
        self.windows: list[list[str]] = []
        self.entered = asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.act: Callable[[Window], list[Outcome]] = outcomes
        self.inside = 0
        self.most_inside = 0

    def has_room(self, request: Request, running_requests: int, running_places: int) -> bool:
        return running_places + request.places <= self.max_in_flight

    async def generate(self, window: Window) -> list[Outcome]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.windows.append([label(request) for request in window.requests])
        self.entered.release()
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            return self.act(window)
        finally:
            self.inside -= 1


class House:
    """A batcher at work over a ``BackendDouble``, with short words for what tests do."""

    def __init__(
        self, batch_size: int, max_wait_s: float, max_queue_requests: int = 10_000, max_queue_tokens: int = 10**6
    ) -> None:
        self.backend = BackendDouble()
        self.lifecycle = Lifecycle()
        self.lifecycle.ready()
        self.metrics = Metrics()
        self.batcher = Batcher(
            cast(Backend, self.backend),
            WindowLimits(batch_size, max_wait_s),
            max_queue_requests=max_queue_requests,
            max_queue_tokens=max_queue_tokens,
            lifecycle=self.lifecycle,
            metrics=self.metrics,
        )

    def admit(self, *requests: Request) -> "list[asyncio.Future[Answer]]":
        """As one call would: all of them or none."""
        with self.batcher.reserve(sum(request.places for request in requests)) as reservation:
            self.batcher.admit(reservation, requests)
        return [request.future for request in requests]

    def send(self, *labels: str, **options: Any) -> "list[asyncio.Future[Answer]]":
        """One request for each label, each a call of its own."""
        return [self.admit(make_request(label=name, **options))[0] for name in labels]

    async def busy(self) -> "asyncio.Future[Answer]":
        """The engine is in a window of one until the gate opens."""
        self.backend.gate.clear()
        (future,) = self.send("busy")
        if self.batcher._limits.batch_size > 1 and self.batcher._limits.max_wait_s > 1:
            raise AssertionError("a window of one would wait for long")
        await within(self.backend.entered.acquire())
        return future

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def house(batch_size: int = 4, max_wait_s: float = 0.01, **limits: Any) -> AsyncIterator[House]:
    """A batcher that runs for the length of the block."""
    it = House(batch_size, max_wait_s, **limits)
    task = asyncio.create_task(it.batcher.run())
    try:
        yield it
    finally:
        task.cancel()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), BOUND_S)


async def within(work: Awaitable[Any], seconds: float = BOUND_S) -> Any:
    return await asyncio.wait_for(work, seconds)


async def settle(futures: "Sequence[asyncio.Future[Answer]]", seconds: float = BOUND_S) -> list[Any]:
    """Texts and exceptions of the futures; fails when one is still pending in the end."""
    _, pending = await asyncio.wait(futures, timeout=seconds)
    assert not pending, f"{len(pending)} of {len(futures)} futures are pending"
    return [_what(future) for future in futures]


def _what(future: "asyncio.Future[Answer]") -> Any:
    if future.cancelled():
        return "cancelled"
    return future.exception() or future.result().generation.outputs[0].text
