"""`POST /batch`: rows in, rows out, in one piece or one a line as they finish."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import render
from app.api.service import Service
from app.api.submit import submit
from app.api.validation import BatchBody
from app.errors import GenerationFailed, ServiceError
from app.prompts.spec import GenerateRequest
from app.request import Answer, Call, Request, new_id

NDJSON = "application/x-ndjson"
QUIET_S = 10.0
"""Gateways cut a connection on which nothing comes; an empty line after so much silence keeps it."""
NOT_NAMED = (0.0, 0)
"""Rank of a media type that ``Accept`` does not name."""


def wants_lines(accept: str) -> bool:
    """Whether a caller with this ``Accept`` would rather have rows by the line than one JSON object.

    The one with the larger ``q``, else the one named first: generated clients name all that the document lists.
    """
    ranks: dict[str, tuple[float, int]] = {}
    for order, item in enumerate(accept.lower().split(",")):
        media_type, *parameters = ("".join(part.split()) for part in item.split(";"))
        ranks.setdefault(media_type, (_quality(parameters), -order))
    lines = ranks.get(NDJSON, NOT_NAMED)
    if "application/json" in ranks:
        return lines[0] > 0 and lines > ranks["application/json"]
    unnamed = ranks.get("application/*", ranks.get("*/*", NOT_NAMED))
    return lines[0] > 0 and lines[0] >= unnamed[0]


def _quality(parameters: list[str]) -> float:
    """The value of ``q``; 1 without one, or with one that is no number."""
    try:
        return next((float(value[2:]) for value in parameters if value.startswith("q=")), 1.0)
    except ValueError:
        return 1.0


@dataclass(slots=True)
class Batch:
    """One `/batch` on its way.

    Attributes:
        received: when the call arrived, in monotonic seconds.
        entries: for each row its future, or the error it has got already; None once it is encoded, so that
            what the engine gave for it can be freed.
        rows: finished rows by index, with their outputs left out: only what the end of the answer needs.
    """

    service: Service
    body: BatchBody
    received: float
    entries: "list[asyncio.Future[Answer] | ServiceError | None]"
    id: str = field(default_factory=lambda: new_id("batch"))
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Each row as (index, JSON) as it finishes; a row that waits for nothing comes first."""
        finished: asyncio.Queue[int] = asyncio.Queue()
        waiting = 0
        for index, entry in enumerate(self.entries):
            if isinstance(entry, asyncio.Future):
                waiting += 1
                entry.add_done_callback(partial(_put, finished, index))
            else:
                yield index, await self._encode(index)
        while waiting:
            try:
                async with asyncio.timeout(QUIET_S):
                    index = await finished.get()
            except TimeoutError:
                yield -1, b""
                continue
            waiting -= 1
            yield index, await self._encode(index)

    async def _encode(self, index: int) -> bytes:
        row = self._row(index)
        self.entries[index] = None
        encoded = await render.encode_answer(row)
        response = row["response"]
        kept = response and {key: response[key] for key in ("window", "usage")}
        self.rows[index] = {"response": kept}
        await asyncio.sleep(0)  # a window of thousands ends in one moment: others get their turn between two rows
        return encoded

    def _row(self, index: int) -> dict[str, Any]:
        entry = self.entries[index]
        assert entry is not None
        error = entry if isinstance(entry, ServiceError) else _error_of(entry)
        if error is not None:
            self.service.metrics.errors.labels(error.code).inc()
            return render.batch_row(index, None, error)
        assert isinstance(entry, asyncio.Future)
        body = self.body.rows[index]
        assert isinstance(body, GenerateRequest)
        model = body.model or self.service.settings.model_name
        return render.batch_row(index, render.generate_answer(entry.result(), body, model, self.service.metrics), None)

    def rest(self) -> dict[str, Any]:
        """The answer without its rows; to be asked for when all are done."""
        rows = [self.rows[index] for index in range(len(self.entries))]
        return render.batch_rest(self.id, self.body.request_id, self.service.settings.model_name, self.received, rows)

    def cancel(self) -> None:
        """The caller has gone: what has not been dispatched is dropped."""
        for entry in self.entries:
            if isinstance(entry, asyncio.Future):
                entry.cancel()


def _put(finished: "asyncio.Queue[int]", index: int, _: object) -> None:
    finished.put_nowait(index)


def _error_of(future: "asyncio.Future[Answer]") -> ServiceError | None:
    error = future.exception()
    if error is None or isinstance(error, ServiceError):
        return error
    return GenerationFailed(f"{type(error).__name__}: {error}")


async def start(service: Service, body: BatchBody, call: Call) -> Batch:
    """Admit the rows that are right, all of them or none.

    Raises:
        ServiceError: they are not taken: the queue is full, or the service takes no work.
    """
    good = [row for row in body.rows if isinstance(row, GenerateRequest)]
    submitted = iter(await submit(service, good, call))
    entries: list[asyncio.Future[Answer] | ServiceError | None] = [
        _future(next(submitted)) if isinstance(row, GenerateRequest) else row for row in body.rows
    ]
    return Batch(service, body, call.received, entries)


def _future(entry: Request | ServiceError) -> "asyncio.Future[Answer] | ServiceError":
    return entry.future if isinstance(entry, Request) else entry


async def as_json(batch: Batch) -> list[bytes]:
    """The parts of the whole answer, rows in input order."""
    try:
        rows = {index: line async for index, line in batch.lines() if line}
        rest = render.encode(batch.rest())
        results = [part for index in range(len(rows)) for part in (b",", rows.pop(index))]
        return [rest[:-1], b',"results":[', *results[1:], b"]}"]
    finally:
        batch.cancel()


class LinesResponse(StreamingResponse):
    """One row a line as they finish, an empty line after silence, the rest of the answer last."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(self._lines(batch), media_type=NDJSON)
        self._batch = batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; a caller that hangs up, at whatever point, leaves nothing behind."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._batch.cancel()

    @staticmethod
    async def _lines(batch: Batch) -> AsyncIterator[bytes]:
        async for _, line in batch.lines():
            yield line + b"\n"
        yield render.encode(batch.rest()) + b"\n"
