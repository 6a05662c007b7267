"""uvicorn's server with a stop of our own: the socket stays open until the last accepted request is answered."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.api.service import Service
from app.lifecycle import State
from app.main import stop

logger = logging.getLogger("batchserve")

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers of one request."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that computes may keep the event loop waiting for the interpreter; Python's own is 5 ms."""
STRAGGLERS_S = 1
"""How long connections without accepted work may still hold up the end."""


class Protocol(H11Protocol):
    """uvicorn's protocol, which waits without end for a caller that sends nothing, or stops half-way.

    Here ``timeout_keep_alive`` bounds three more things: the time until a connection's first request has a
    whole head, the time of each later head, and each silence within a body.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first request."""
        super().connection_made(transport)
        self._rearm()

    def data_received(self, data: bytes) -> None:
        """Go on waiting as long as the request is not whole."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
            if self.cycle.more_body:
                self._rearm()
        elif self._timer is None:
            self._rearm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._disarm()
        super().connection_lost(exc)

    def _rearm(self) -> None:
        self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """Serves until a signal comes or the lifecycle is over.

    Args:
        app: from ``create_app``.
        greeting: printed when the service turns ready.
    """

    def __init__(self, app: FastAPI, greeting: str) -> None:
        service: Service = app.state.service
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_keep_alive=service.settings.keep_alive_s,
                timeout_graceful_shutdown=STRAGGLERS_S,
                server_header=False,
                ws="none",
                http=Protocol,  # h11: bounds the head of a request and ignores upgrades that nobody asked for
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                lifespan="on",
            )
        )
        self._service = service
        self._greeting = greeting
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def run_on(self, listener: socket.socket) -> None:
        """Serve on a listening socket, on the event loop that uvicorn would choose; blocks."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets=[listener]))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, say when it is ready, and end when the lifecycle does."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._greet())
        self._spawn(self._end_when_over())
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our handlers instead of uvicorn's, which raise the signal again after a clean stop."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._service.backend.kill()
            os._exit(128 + number)
        begin = partial(self._begin_stop, number)
        self._loop.call_soon_threadsafe(begin, context=Context())  # not that of the call which the signal interrupts

    def _begin_stop(self, number: int) -> None:
        self._spawn(self._stop(number))

    async def _stop(self, number: int) -> None:
        logger.info("%s: finishing accepted work; a second signal ends at once", signal.Signals(number).name)
        await stop(self._service)
        self.should_exit = True

    async def _greet(self) -> None:
        await self._service.lifecycle.has_loaded.wait()
        if self._service.lifecycle.state is State.READY:
            print(self._greeting, flush=True)

    async def _end_when_over(self) -> None:
        await self._service.lifecycle.is_over.wait()
        self.should_exit = True
