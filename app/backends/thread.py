"""The one thread that builds, uses and closes an engine."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from app import timings
from app.errors import EngineDead

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    """One call, and the future on the event loop that waits for it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: "asyncio.Future[Any]"

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Hand the result over to the event loop; a loop that has ended wants none."""
        if isinstance(error, StopIteration):  # a future does not take this one
            error = RuntimeError(f"the call ended in a StopIteration: {error}")
        try:
            self.future.get_loop().call_soon_threadsafe(self._set, result, error)
        except RuntimeError:
            logger.debug("the event loop has ended before the engine's call")

    def _set(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class EngineThread:
    """Runs calls one after the other, in the order of their arrival.

    A daemon thread: a call that never returns must not keep the process. Should the thread end in
    any other way than by ``close``, the call it was in and those queued behind it get
    ``EngineDead`` and ``on_death`` hears the reason.

    Args:
        name: of the thread.
        on_death: told why the thread has ended, when nobody closed it.
        advance: work that goes on between calls: called over and over, until it returns False (there is nothing to
            do before the next call) or a call comes.
    """

    def __init__(self, name: str, on_death: Callable[[str], None], advance: Callable[[], bool] = lambda: False) -> None:
        self._advance = advance
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._on_death = on_death
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def native_id(self) -> int | None:
        """The operating system's id of the thread."""
        return self._thread.native_id

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` on the thread.

        A caller that is cancelled does not stop the call: it runs to its end and its result is dropped.

        Raises:
            EngineDead: the thread has ended, or ends within the call.
        """
        result: T = await self.post(function, *args)
        return result

    def post(self, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        """As ``call``; for who need not wait for the result.

        Raises:
            EngineDead: the thread has ended.
        """
        job = _Job(function, args, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._is_over:
                raise EngineDead("the engine thread has ended")
            self._jobs.put(job)
        return job.future

    def end(self) -> None:
        """End the thread behind the queued calls, without waiting for it."""
        self._jobs.put(None)

    async def close(self, function: Callable[[], None], timeout_s: float) -> bool:
        """Run ``function`` behind the queued calls, then end the thread.

        Returns:
            Whether the thread has ended within ``timeout_s`` seconds.
        """
        if not self.is_alive:
            self._is_over = True
            return True
        started = timings.now()
        closing = asyncio.ensure_future(self.call(function))
        await asyncio.wait((closing,), timeout=timeout_s)
        if not closing.done():
            closing.cancel()
            return False
        if (error := closing.exception()) is not None:
            logger.warning("the engine did not close cleanly: %s: %s", type(error).__name__, error)
        self.end()
        await asyncio.to_thread(self._thread.join, max(0.1, timings.remaining(started, timeout_s)))
        return not self.is_alive

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._run(job)
            reason = None
        except BaseException as error:
            reason = f"the engine thread has ended: {type(error).__name__}: {error}"
        self._end(reason)

    def _next_job(self) -> _Job | None:
        while self._jobs.empty() and self._advance():
            pass
        return self._jobs.get()

    def _run(self, job: _Job) -> None:
        """One call. What is no ``Exception`` (SystemExit and the like) ends the thread."""
        try:
            job.settle(job.function(*job.args))
        except Exception as error:
            job.settle(error=error)
        except BaseException as error:
            job.settle(error=EngineDead(f"the engine thread has ended: {type(error).__name__}"))
            raise

    def _end(self, reason: str | None) -> None:
        """Refuse further calls and fail those that wait."""
        with self._lock:
            self._is_over = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.settle(error=EngineDead("the engine thread has ended"))
        if reason is not None:
            self._on_death(reason)
