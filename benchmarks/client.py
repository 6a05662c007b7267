"""One client for all servers: callers that each have one ``POST /v1/completions`` at a time, over kept connections."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

Body = dict[str, Any]
DATA, END = b"data: ", b"[DONE]"


@dataclass(frozen=True)
class Answer:
    """What one caller saw of one request.

    Attributes:
        e2e_ms: from before the request was sent until its answer was complete.
        ttft_ms: until the first chunk with text had come; None unless it was streamed.
        completion_tokens: as the answer's ``usage`` has it.
        own_ttft_ms: ``metrics.timings.ttft_ms``, which this service alone gives: until the engine had the first token.
        itl_ms: between each chunk with text and the next; empty unless it was streamed in several.
    """

    e2e_ms: float
    ttft_ms: float | None
    completion_tokens: int
    own_ttft_ms: float | None
    itl_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Run:
    """All requests of a list.

    Attributes:
        seconds: from the first request sent to the last answer complete.
        answers: in no particular order.
    """

    seconds: float
    answers: list[Answer]


@dataclass(frozen=True)
class _Reply:
    """What came, as it came: it is looked at when all clocks have stopped, so that no side pays for it.

    Attributes:
        body: of the request.
        begun: when it was sent, in seconds; and the other times by the same clock.
        parts: what each read gave, with its time.
        ended: when the answer was complete.
    """

    body: Body
    begun: float
    parts: list[tuple[float, bytes]]
    ended: float


def drive(url: str, bodies: Sequence[Body], callers: int) -> Run:
    """Send all of them; the connections are open before the clock starts.

    Raises:
        RuntimeError: an answer is an error, or has not as many tokens as were asked for.
    """
    seconds, replies = asyncio.run(_drive(url, "/v1/completions", bodies, callers))
    return Run(seconds, [_answer(reply) for reply in replies])


def batch(url: str, bodies: Sequence[Body]) -> Run:
    """All of them as one ``POST /batch``: every answer is complete when the whole is.

    Raises:
        RuntimeError: as ``drive``.
    """
    seconds, (reply,) = asyncio.run(_drive(url, "/batch", [{"requests": bodies}], 1))
    rows = json.loads(b"".join(data for _, data in reply.parts))["results"]
    for body, row in zip(bodies, rows, strict=True):
        if row["status"] != 200:
            raise RuntimeError(f"status {row['status']}: {row['error']['message'][:500]}")
        _check_length(row["response"]["usage"]["completion_tokens"], body)
    e2e_ms = (reply.ended - reply.begun) * 1000
    return Run(
        seconds,
        [
            Answer(
                e2e_ms,
                None,
                row["response"]["usage"]["completion_tokens"],
                row["response"]["timings"]["ttft_ms"],
            )
            for row in rows
        ],
    )


async def _drive(url: str, path: str, bodies: Sequence[Body], callers: int) -> tuple[float, list[_Reply]]:
    # Not httpx: with 64 connections it takes several times a server's own processor time for each request.
    connector, timeout = aiohttp.TCPConnector(limit=callers), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:
        await asyncio.gather(*(_connect(client) for _ in range(callers)))
        left, replies = iter(bodies), []

        async def call() -> None:
            for body in left:
                replies.append(await _ask(client, path, body))

        begun = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        return time.perf_counter() - begun, replies


async def _connect(client: aiohttp.ClientSession) -> None:
    async with client.get("/health") as response:
        await response.read()


async def _ask(client: aiohttp.ClientSession, path: str, body: Body) -> _Reply:
    begun = time.perf_counter()
    async with client.post(path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:500]}")
        parts = [(time.perf_counter(), data) async for data in response.content.iter_any()]
        return _Reply(body, begun, parts, time.perf_counter())


def _answer(reply: _Reply) -> Answer:
    if reply.body.get("stream"):
        chunks = list(_chunks(reply))
        answer, texts = chunks[-1][1], [at for at, chunk in chunks if _has_text(chunk)]
    else:
        answer, texts = json.loads(b"".join(data for _, data in reply.parts)), []
    tokens = answer["usage"]["completion_tokens"]
    _check_length(tokens, reply.body)
    return Answer(
        e2e_ms=(reply.ended - reply.begun) * 1000,
        ttft_ms=(texts[0] - reply.begun) * 1000 if texts else None,
        completion_tokens=tokens,
        own_ttft_ms=(answer.get("metrics") or {}).get("timings", {}).get("ttft_ms"),
        itl_ms=tuple((after - before) * 1000 for before, after in pairwise(texts)),
    )


def _check_length(tokens: int, body: Body) -> None:
    if tokens != body["max_tokens"]:
        raise RuntimeError(f"{tokens} tokens came, {body['max_tokens']} were asked for")


def _chunks(reply: _Reply) -> Iterator[tuple[float, dict[str, Any]]]:
    """The chunks of a stream, each with the time at which all of it had come; the last one has the usage.

    Raises:
        RuntimeError: the stream ended without its end mark.
    """
    buffer = last = b""
    for at, part in reply.parts:
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            if (data := line.removeprefix(DATA)) != line and data != END:
                yield at, json.loads(data)
            last = data or last
    if last != END:
        raise RuntimeError(f"the stream broke off; its last chunk: {last.decode(errors='replace')[:500]}")


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("text") for choice in chunk.get("choices", ()))
