"""Server-sent events: a stream that begins once there is something to say, or after ten seconds with a comment."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import render
from app.api.submit import unless_gone
from app.errors import InternalError, ServiceError

QUIET_S = 10.0
"""Gateways cut a connection on which nothing comes; a comment after so much silence keeps it."""
MEDIA_TYPE = "text/event-stream"
COMMENT = b": the text is not there yet\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; JSON has no line breaks of its own."""
    return b"data: " + data + b"\n\n"


class Events:
    """The data of events as they come, the next one awaited ahead of its asking.

    Args:
        source: gives the data of each event. Closed in the end, wherever it stands.
    """

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        self._source = source
        self._next = self._ask()

    def _ask(self) -> "asyncio.Task[bytes | None]":
        return asyncio.ensure_future(anext(self._source, None))

    async def within_quiet(self, receive: Receive) -> None:
        """Wait for the first, for ten seconds at most: what fails until then is an error with a status of its own.

        Raises:
            ClientDisconnect: the caller has gone; the source is closed.
            ServiceError: what the source raised.
        """
        try:
            await unless_gone(asyncio.wait((self._next,), timeout=QUIET_S), receive)
            if self._next.done():
                self._next.result()
        except BaseException:
            await self.aclose()
            raise

    async def next_within_quiet(self) -> bytes | None:
        """The next, or a failure of the source; None after ten seconds of silence.

        Raises:
            StopAsyncIteration: there are no more.
        """
        await asyncio.wait((self._next,), timeout=QUIET_S)
        if not self._next.done():
            return None
        data = self._next.result()
        if data is None:
            raise StopAsyncIteration
        self._next = self._ask()
        return data

    async def aclose(self) -> None:
        """End the source; it lets go of what it holds."""
        self._next.cancel()
        await asyncio.wait((self._next,))
        if not self._next.cancelled():
            self._next.exception()  # has been looked at, whether or not anybody was left to tell
        await self._source.aclose()


class EventStream(StreamingResponse):
    """Events as they come, comments in between; a failure of their source is an event, and no end mark follows.

    Args:
        events: what to tell.
        on_error: told of a failure.
        headers: further headers.
    """

    def __init__(self, events: Events, on_error: Callable[[ServiceError], None], headers: dict[str, str]) -> None:
        super().__init__(self._lines(), media_type=MEDIA_TYPE, headers={"cache-control": "no-store", **headers})
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; a caller that hangs up, at whatever point, leaves nothing behind."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            while True:
                data = await self._events.next_within_quiet()
                yield COMMENT if data is None else event(data)
        except StopAsyncIteration:
            pass
        except Exception as error:
            failure = error if isinstance(error, ServiceError) else InternalError("the service failed; see its log")
            self._on_error(failure)
            yield event(render.encode({"error": failure.body()}))
            return
        yield DONE
