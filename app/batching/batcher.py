"""The micro-batcher: reserve, admit, gather, settle, drain. Lives on the event loop.

Invariants: a place is held from ``reserve`` until dispatch or refusal; a future is settled once and only
if it is not done; what waits is ordered by admission. One window is in the engine at a time; or, with a backend
that takes none, each request by itself, as many at once as it says.
"""

import asyncio
import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial

from app import timings
from app.backends.registry import Backend
from app.batching import window as window_rule
from app.batching.window import WindowLimits
from app.errors import (
    GenerationFailed,
    QueueFull,
    QueueTimeout,
    RequestTimeout,
    RequestTooLarge,
    ServiceError,
    ShuttingDown,
)
from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.request import Answer, Outcome, Release, Request, Window

logger = logging.getLogger(__name__)


class Reservation:
    """Places held for requests that are being resolved. Give back what was not admitted."""

    def __init__(self, batcher: "Batcher", places: int) -> None:
        self._batcher = batcher
        self.places = places

    def shrink(self, places: int) -> None:
        """Give some places back."""
        self.places -= places
        self._batcher.give_back(places)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(self.places)


class Batcher:
    """Gathers requests into windows and runs them one after the other.

    Args:
        backend: what runs a window.
        limits: when a window goes.
        max_queue_requests: places in the queue.
        max_queue_tokens: prompt tokens in the queue.
        max_queue_media_bytes: images and audio in the queue, in bytes as the model takes them.
        lifecycle: says whether work is taken.
        metrics: where windows and waits are counted.
    """

    def __init__(
        self,
        backend: Backend,
        limits: WindowLimits,
        *,
        max_queue_requests: int,
        max_queue_tokens: int,
        max_queue_media_bytes: int = 2**30,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        self.reserved = 0
        self._backend = backend
        self._limits = limits
        self._max_requests = max_queue_requests
        self._max_tokens = max_queue_tokens
        self._max_media_bytes = max_queue_media_bytes
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._waiting: dict[Request, asyncio.TimerHandle | None] = {}
        self._waiting_places = 0
        self._waiting_tokens = 0
        self._waiting_media_bytes = 0
        self._running: dict[Request, None] = {}
        self._running_places = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._handed_over = 0
        self._by_priority: dict[int, dict[Request, None]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._window_ids: Iterator[int] = itertools.count(1)

    @property
    def queue_requests(self) -> int:
        """Places taken: waiting, or being resolved."""
        return self._waiting_places + self.reserved

    def give_back(self, places: int) -> None:
        """Reserved places that are needed no more."""
        self.reserved -= places
        self._note_idle()

    @property
    def queue_tokens(self) -> int:
        """Prompt tokens waiting."""
        return self._waiting_tokens

    @property
    def queue_media_bytes(self) -> int:
        """What images and audio that wait take."""
        return self._waiting_media_bytes

    @property
    def running_requests(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    def reserve(self, places: int) -> Reservation:
        """Hold places before any work is done for a request.

        Raises:
            Unavailable: the service takes no work now.
            RequestTooLarge: more places than an empty queue has.
            QueueFull: not so many now.
        """
        if (refusal := self._lifecycle.refusal()) is not None:
            raise refusal
        if places > self._max_requests:
            raise RequestTooLarge(
                f"{places} places are asked for and the queue has {self._max_requests}",
                limit=self._max_requests,
            )
        if self.queue_requests + places > self._max_requests:
            raise QueueFull(
                f"the queue holds {self.queue_requests} of {self._max_requests} requests",
                queue_depth=self.queue_requests,
                limit=self._max_requests,
            )
        self.reserved += places
        self._note_idle()
        return Reservation(self, places)

    def admit(self, reservation: Reservation, requests: Sequence[Request]) -> None:
        """Take all of the requests into the queue, or none.

        Raises:
            Unavailable: the service has stopped taking work since the reservation.
            RequestTooLarge: more prompt tokens, or bytes of media, than an empty queue takes.
            QueueFull: more than it takes now.
        """
        if (refusal := self._lifecycle.refusal()) is not None:
            raise refusal
        tokens = sum(request.prompt_tokens for request in requests)
        _check_room("prompt tokens", tokens, self._waiting_tokens, self._max_tokens)
        self.check_media(sum(request.resolved.media_bytes for request in requests))
        admitted = timings.now()
        for request in requests:
            reservation.shrink(request.places)
            request.stamps.admitted = admitted
            self._add(request)
        self._note_idle()
        self._wake.set()

    def check_media(self, media_bytes: int) -> None:
        """Whether images and audio of so many bytes may wait beside those that do.

        Raises:
            RequestTooLarge: more than an empty queue takes.
            QueueFull: more than it takes now.
        """
        _check_room("bytes of images and audio", media_bytes, self._waiting_media_bytes, self._max_media_bytes)

    def _add(self, request: Request) -> None:
        timer = None
        if request.request_timeout_s is not None:
            _limit_time(request, request.request_timeout_s)
        if request.queue_timeout_s is not None:
            left_s = timings.remaining(request.stamps.received, request.queue_timeout_s)
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, request)
        self._waiting[request] = timer
        self._waiting_places += request.places
        self._waiting_tokens += request.prompt_tokens
        self._waiting_media_bytes += request.resolved.media_bytes
        self._by_priority.setdefault(request.priority, {})[request] = None
        request.future.add_done_callback(lambda future: self._done(request, future.cancelled()))

    def _done(self, request: Request, caller_has_gone: bool) -> None:
        if caller_has_gone:
            self._metrics.disconnected.inc()
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Take a request out of the queue, whatever the reason; harmless when it is not there."""
        if request not in self._waiting:
            return
        timer = self._waiting.pop(request)
        if timer is not None:
            timer.cancel()
        self._waiting_places -= request.places
        self._waiting_tokens -= request.prompt_tokens
        self._waiting_media_bytes -= request.resolved.media_bytes
        del self._by_priority[request.priority][request]
        if not self._by_priority[request.priority]:
            del self._by_priority[request.priority]
        self._note_idle()
        self._wake.set()

    def _note_idle(self) -> None:
        """Keep the event that ``drain`` waits for in step with what is held."""
        if self.reserved or self._waiting or self._running:
            self._idle.clear()
        else:
            self._idle.set()

    def _expire(self, request: Request) -> None:
        _refuse(request, QueueTimeout(f"waited {request.queue_timeout_s} s for a window"))

    async def run(self) -> None:
        """Gather and run windows, until cancelled. A failure in here is the end of the service."""
        try:
            while True:
                if self._backend.takes_windows:
                    reason = await self._next_release()
                    chosen = window_rule.members(self._waiting, self._limits.batch_size)
                    await self._run_window(self._window(reason, chosen))
                else:
                    self._hand_over(await self._next_request())
        finally:
            for task in self._tasks:
                task.cancel()

    async def _next_request(self) -> Request:
        """Wait until a request waits and the engine has room; one that is too large for it goes when it is empty."""
        while True:
            self._wake.clear()
            while self._waiting:
                request = self._next_by_rank()
                if request.future.done():
                    self._remove(request)  # its caller has gone within this turn of the loop
                elif self._running and not self._has_room(request):
                    break
                else:
                    return request
            await self._wake.wait()

    def _has_room(self, request: Request) -> bool:
        return self._backend.has_room(request, len(self._running), self._running_places)

    def _next_by_rank(self) -> Request:
        """By (priority, age); once in a round of the engine's places age alone decides, so that none starves."""
        if self._handed_over % self._backend.max_in_flight == 0:
            return next(iter(self._waiting))
        return next(iter(self._by_priority[min(self._by_priority)]))

    def _hand_over(self, request: Request) -> None:
        """Run a request by itself; should its caller go, it is aborted."""
        self._handed_over += 1
        task = asyncio.create_task(self._run_window(self._window(self._backend.release, [request])))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        request.future.add_done_callback(partial(_cancel, task))

    async def _next_release(self) -> Release:
        """Wait until a window is due. Blocks without a clock while nothing waits."""
        while True:
            self._wake.clear()
            self._drop_done()
            if not self._waiting:
                await self._wake.wait()
                continue
            oldest = next(iter(self._waiting)).stamps.admitted
            now = timings.now()
            reason = window_rule.release(len(self._waiting), oldest, self._limits, now, is_draining=self._is_draining)
            if reason is not None:
                return reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timings.remaining(oldest, self._limits.max_wait_s)):
                    await self._wake.wait()

    def _drop_done(self) -> None:
        """Callers that have gone within this turn of the loop: their callbacks come only with the next."""
        for request in [request for request in self._waiting if request.future.done()]:
            self._remove(request)

    def _window(self, reason: Release, chosen: list[Request]) -> Window:
        """The next window: its members out of the queue and stamped."""
        self._running.update(dict.fromkeys(chosen))
        self._running_places += sum(request.places for request in chosen)
        for request in chosen:
            self._remove(request)
        dispatched = timings.now()
        self._count_window(reason, chosen, dispatched)
        return Window(next(self._window_ids), reason, chosen, dispatched, timings.wall_offset(), self._window_ids)

    def _count_window(self, reason: Release, chosen: Sequence[Request], dispatched: float) -> None:
        if reason != "direct":
            self._metrics.releases.labels(reason).inc()
        if self._backend.takes_windows:
            self._metrics.window_size.observe(len(chosen))
            self._metrics.window_fill.observe(len(chosen) / self._limits.batch_size)
        for request in chosen:
            self._metrics.window_wait.observe(timings.elapsed(request.stamps.admitted, dispatched))

    async def _run_window(self, window: Window) -> None:
        """One hop to the engine thread and one back; then every future of the window is done."""
        try:
            outcomes = await self._backend.generate(window)
        except ServiceError as error:
            self._refuse_all(window.requests, error)
        except Exception as error:
            logger.exception("window %d failed as a whole", window.id)
            self._refuse_all(window.requests, GenerationFailed(f"the window failed: {type(error).__name__}: {error}"))
        else:
            self._settle(outcomes)
            self._refuse_all(window.requests, GenerationFailed("the backend gave no result for this request"))
        finally:
            for request in window.requests:
                del self._running[request]
            self._running_places -= sum(request.places for request in window.requests)
            self._note_idle()
            self._wake.set()

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        completed = timings.now()
        for outcome in outcomes:
            request = outcome.request
            if request.future.done():
                continue
            request.stamps.dispatched, request.stamps.completed = outcome.window.dispatched, completed
            if isinstance(outcome.result, Exception):
                request.future.set_exception(outcome.result)
            else:
                shown = None if outcome.window.release == "direct" else outcome.window
                request.future.set_result(Answer(request, outcome.result, shown, outcome.position))

    @staticmethod
    def _refuse_all(requests: Sequence[Request], error: ServiceError) -> None:
        for request in requests:
            _refuse(request, error)

    async def drain(self, timeout_s: float) -> bool:
        """Send what waits at once; what is not answered within ``timeout_s`` seconds gets ``ShuttingDown``.

        Returns:
            Whether all accepted work got its result.
        """
        self._is_draining = True
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        left = self.abandon(ShuttingDown("the service stopped before this request was done"))
        if left:
            logger.warning("drain_timeout_s has passed: %d requests were cut", left)
        return left == 0

    def abandon(self, error: ServiceError) -> int:
        """Fail all that waits and runs, at once; how many requests that were."""
        left = [request for request in (*self._waiting, *self._running) if not request.future.done()]
        self._refuse_all(left, error)
        return len(left)


def _check_room(unit: str, asked: int, held: int, limit: int) -> None:
    if asked > limit:
        raise RequestTooLarge(f"{asked} {unit} are asked for and the queue takes {limit}", limit=limit)
    if held + asked > limit:
        raise QueueFull(f"the queue holds {held} of {limit} {unit}", queue_depth=held, limit=limit)


def _limit_time(request: Request, limit_s: float) -> None:
    """End a request that is not done in time; what runs by itself is then aborted in the engine."""
    late = RequestTimeout(f"not done within {limit_s} s")
    left_s = timings.remaining(request.stamps.received, limit_s)
    timer = asyncio.get_running_loop().call_later(left_s, _refuse, request, late)
    request.future.add_done_callback(lambda _: timer.cancel())


def _cancel(task: "asyncio.Task[None]", _: object) -> None:
    task.cancel()


def _refuse(request: Request, error: ServiceError) -> None:
    """An error object of its own for each request: a traceback must not be shared."""
    if not request.future.done():
        request.future.set_exception(copy.copy(error))
