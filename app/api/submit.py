"""From bodies to futures: reserve, resolve, admit; and back, unless the caller has gone."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from app.api.live import Live
from app.api.service import Service
from app.errors import ServiceError
from app.prompts.openai import Work
from app.request import Call, Request, Resolved
from app.timings import Stamps

RESOLVE_CHUNK = 32
RESOLVE_CHUNK_CHARS = 64 << 10
"""Bodies, and characters of them, resolved in one go: between two chunks other callers get their turn."""
T = TypeVar("T")


async def submit(
    service: Service, bodies: Sequence[Work], call: Call, *, is_whole: bool = False, live: Live | None = None
) -> list[Request | ServiceError]:
    """Admit all bodies that can be resolved; for each its request, or the error it gets.

    Args:
        service: the running service.
        bodies: validated bodies.
        call: what they came with.
        is_whole: one that cannot be resolved is the failure of all: none is admitted.
        live: told of the outputs as they come, by a backend that streams; with a whole.

    Raises:
        ServiceError: none of them is taken: the queue is full, the service takes no work, or one of a whole is wrong.
    """
    with service.batcher.reserve(sum(body.places for body in bodies)) as reservation:
        try:
            resolved = await _resolve(service, bodies)
        except asyncio.CancelledError:
            service.metrics.disconnected.inc(len(bodies))
            raise
        if is_whole and (error := next((item for item in resolved if isinstance(item, ServiceError)), None)):
            raise error
        entries = [
            item if isinstance(item, ServiceError) else _request(service, body, item, call.received)
            for body, item in zip(bodies, resolved, strict=True)
        ]
        for index, entry in enumerate(entries):
            if live is not None and isinstance(entry, Request):
                entry.listener = live.listener(index)
        service.batcher.admit(reservation, [entry for entry in entries if isinstance(entry, Request)])
        service.lifecycle.owe(call)
    return entries


async def _resolve(service: Service, bodies: Sequence[Work]) -> list[Resolved | ServiceError]:
    resolved: list[Resolved | ServiceError] = []
    media_bytes = 0
    for chunk in _chunks(bodies):
        items = await service.backend.resolve(chunk)
        media_bytes += sum(item.media_bytes for item in items if isinstance(item, Resolved))
        service.batcher.check_media(media_bytes)  # a batch must not fill the memory before it is seen to be too large
        resolved += items
    return resolved


def _chunks(bodies: Sequence[Work]) -> Iterator[list[Work]]:
    chunk: list[Work] = []
    chars = 0
    for body in bodies:
        if len(chunk) == RESOLVE_CHUNK or (chunk and chars + body.chars > RESOLVE_CHUNK_CHARS):
            yield chunk
            chunk, chars = [], 0
        chunk.append(body)
        chars += body.chars
    if chunk:
        yield chunk


def _request(service: Service, body: Work, resolved: Resolved, received: float) -> Request:
    return Request(
        resolved=resolved,
        places=body.places,
        priority=body.priority or 0,
        queue_timeout_s=_shorter(body.queue_timeout_s, service.settings.queue_timeout_s),
        request_timeout_s=_shorter(body.request_timeout_s, service.settings.request_timeout_s),
        stamps=Stamps(received),
        future=asyncio.get_running_loop().create_future(),
    )


def _shorter(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """The result of ``work``, which is cancelled should the caller hang up first.

    Raises:
        ClientDisconnect: the caller has gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watch.cancel()
        task.cancel()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
