"""Server-sent events: a stream that begins once there is something to say, or after ten seconds with a comment."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

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


class EventStream(StreamingResponse):
    """The events of ``work`` when it is done, comments until then; its failure is an event, and no end mark follows.

    Args:
        work: gives the data of all events.
        on_error: told of a failure.
        headers: further headers.
    """

    def __init__(
        self,
        work: "asyncio.Task[Sequence[bytes]]",
        on_error: Callable[[ServiceError], None],
        headers: dict[str, str],
    ) -> None:
        super().__init__(self._events(), media_type=MEDIA_TYPE, headers={"cache-control": "no-store", **headers})
        self._work = work
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; a caller that hangs up, at whatever point, leaves nothing behind."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._work.cancel() and not self._work.cancelled():
                self._work.exception()  # has been looked at, whether or not anybody was left to tell

    async def _events(self) -> AsyncIterator[bytes]:
        while not self._work.done():
            yield COMMENT
            await asyncio.wait((self._work,), timeout=QUIET_S)
        try:
            events = self._work.result()
        except Exception as error:
            failure = error if isinstance(error, ServiceError) else InternalError("the service failed; see its log")
            self._on_error(failure)
            yield event(render.encode({"error": failure.body()}))
            return
        for data in events:
            yield event(data)
        yield DONE


async def within_quiet(work: "asyncio.Task[Sequence[bytes]]", receive: Receive) -> None:
    """Wait for ``work``, for ten seconds at most: what fails until then is an error with a status of its own.

    Raises:
        ClientDisconnect: the caller has gone; ``work`` is cancelled.
        ServiceError: what ``work`` raised.
    """
    try:
        await unless_gone(asyncio.wait((work,), timeout=QUIET_S), receive)
        if work.done():
            work.result()
    except BaseException:
        work.cancel()
        raise
