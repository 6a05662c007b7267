"""One client for all servers: callers that each have one ``POST /v1/completions`` at a time, over kept connections."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

Body = dict[str, Any]
DATA = b"data: "


@dataclass(frozen=True)
class Answer:
    """What one caller saw of one request.

    Attributes:
        e2e_ms: from before the request was sent until its answer was complete.
        ttft_ms: until the first chunk with text had come; None unless it was streamed.
        completion_tokens: as the answer's ``usage`` has it.
        own_ttft_ms: ``metrics.timings.ttft_ms``, which this service alone gives: until the engine had the first token.
    """

    e2e_ms: float
    ttft_ms: float | None
    completion_tokens: int
    own_ttft_ms: float | None


@dataclass(frozen=True)
class Run:
    """All requests of a list.

    Attributes:
        seconds: from the first request sent to the last answer complete.
        answers: in no particular order.
    """

    seconds: float
    answers: list[Answer]


def drive(url: str, bodies: Sequence[Body], callers: int) -> Run:
    """Send all of them; the connections are open before the clock starts.

    Raises:
        RuntimeError: an answer is an error, or has not as many tokens as were asked for.
    """
    return asyncio.run(_drive(url, bodies, callers))


async def _drive(url: str, bodies: Sequence[Body], callers: int) -> Run:
    # Not httpx: with 64 connections it takes several times a server's own processor time for each request.
    connector, timeout = aiohttp.TCPConnector(limit=callers), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:
        await asyncio.gather(*(_connect(client) for _ in range(callers)))
        left, answers = iter(bodies), []

        async def call() -> None:
            for body in left:
                answers.append(await _ask(client, body))

        begun = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        return Run(time.perf_counter() - begun, answers)


async def _connect(client: aiohttp.ClientSession) -> None:
    async with client.get("/health") as response:
        await response.read()


async def _ask(client: aiohttp.ClientSession, body: Body) -> Answer:
    begun = time.perf_counter()
    async with client.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:500]}")
        first_text = None
        if body.get("stream"):
            first_text, last = await _read_stream(response.content)
        else:
            last = await response.read()
        ended = time.perf_counter()
    # The answer is parsed when the clock has stopped, but for streams: no side pays for what the client makes of it.
    answer = json.loads(last)
    tokens = answer["usage"]["completion_tokens"]
    if tokens != body["max_tokens"]:
        raise RuntimeError(f"{tokens} tokens came, {body['max_tokens']} were asked for")
    return Answer(
        e2e_ms=(ended - begun) * 1000,
        ttft_ms=None if first_text is None else (first_text - begun) * 1000,
        completion_tokens=tokens,
        own_ttft_ms=(answer.get("metrics") or {}).get("timings", {}).get("ttft_ms"),
    )


async def _read_stream(content: aiohttp.StreamReader) -> tuple[float | None, bytes]:
    """When the first chunk with text came, and the last chunk, which has the usage.

    Raises:
        RuntimeError: the stream ended without its end mark.
    """
    first_text, last, is_ended = None, b"", False
    async for line in content:
        if not line.startswith(DATA):
            continue
        if data := line.removeprefix(DATA).strip():
            if data == b"[DONE]":
                is_ended = True
                continue
            if first_text is None and _has_text(data):
                first_text = time.perf_counter()
            last = data
    if not is_ended:
        raise RuntimeError(f"the stream broke off; its last chunk: {last.decode(errors='replace')[:500]}")
    return first_text, last


def _has_text(data: bytes) -> bool:
    return any(choice.get("text") for choice in json.loads(data).get("choices", ()))
