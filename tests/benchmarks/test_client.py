"""The client of a comparison: what it takes for an answer, and when it takes a time."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import client

BODY = {"prompt": "x", "max_tokens": 2}
STREAMED = {**BODY, "stream": True}
USAGE = {"usage": {"completion_tokens": 2}}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, path: str = "/v1/completions") -> AsyncIterator[str]:
    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post(path, handler)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


async def drive(handler: Handler, bodies: list[client.Body], callers: int = 1) -> client.Run:
    async with serving(handler) as url:
        return await asyncio.to_thread(client.drive, url, bodies, callers)


def stream_of(*events: tuple[float, object]) -> Handler:
    """Chunks, each after so many seconds; text is sent as it stands."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for seconds, event in events:
            await asyncio.sleep(seconds)
            data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            await response.write(data.encode())
        return response

    return handler


def chunk(text: str) -> dict[str, object]:
    return {"choices": [{"text": text}]}


async def test_first_text_is_the_first_chunk_with_text_not_a_comment_or_an_empty_one() -> None:
    events = (
        (0.0, ": still working\n\n"),
        (0.0, chunk("")),
        (0.2, chunk("one")),
        (0.2, {**USAGE, "choices": []}),
        (0.0, "data: [DONE]\n\n"),
    )
    answer = (await drive(stream_of(*events), [STREAMED])).answers[0]
    assert answer.ttft_ms is not None
    assert 190 < answer.ttft_ms < answer.e2e_ms - 190
    assert answer.completion_tokens == 2


async def test_each_chunk_with_text_has_its_own_time_however_its_bytes_arrive() -> None:
    halves = (f"data: {json.dumps(chunk('two'))}\n\n", f"data: {json.dumps({**USAGE, 'choices': []})}\n\n")
    events = (
        (0.0, chunk("one")),
        (0.1, halves[0][:9]),
        (0.1, halves[0][9:] + halves[1]),
        (0.1, "data: [DONE]\n\n"),
    )
    answer = (await drive(stream_of(*events), [STREAMED])).answers[0]
    (gap,) = answer.itl_ms
    assert 190 < gap < 290


async def test_texts_that_come_together_have_no_time_between_them() -> None:
    together = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunk("one"), chunk("two"), USAGE))
    answer = (await drive(stream_of((0.0, together), (0.0, "data: [DONE]\n\n")), [STREAMED])).answers[0]
    assert answer.itl_ms == (0.0,)


async def test_an_answer_in_one_piece_has_no_first_text() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(USAGE)

    answer = (await drive(handler, [BODY])).answers[0]
    assert (answer.ttft_ms, answer.itl_ms) == (None, ())


async def test_a_batch_is_one_call_whose_rows_are_its_answers() -> None:
    row = {"status": 200, "response": {**USAGE, "timings": {"ttft_ms": 5.0}}}
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"results": [row, row]})

    async with serving(handler, "/batch") as url:
        run = await asyncio.to_thread(client.batch, url, [BODY, BODY])
    assert asked == [{"requests": [BODY, BODY]}]
    assert [(answer.completion_tokens, answer.own_ttft_ms) for answer in run.answers] == [(2, 5.0)] * 2


async def test_a_row_that_failed_is_told() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"results": [{"status": 400, "error": {"message": "too long"}}]})

    async with serving(handler, "/batch") as url:
        with pytest.raises(RuntimeError, match="status 400: too long"):
            await asyncio.to_thread(client.batch, url, [BODY])


async def test_a_stream_without_its_end_mark_is_no_answer() -> None:
    with pytest.raises(RuntimeError, match="broke off"):
        await drive(stream_of((0.0, chunk("one")), (0.0, USAGE)), [STREAMED])


async def test_an_answer_of_another_length_is_no_answer() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"usage": {"completion_tokens": 1}})

    with pytest.raises(RuntimeError, match="1 tokens came, 2 were asked for"):
        await drive(handler, [BODY])


async def test_an_error_is_told_with_what_the_server_said() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=429, text="queue is full")

    with pytest.raises(RuntimeError, match="status 429: queue is full"):
        await drive(handler, [BODY])


async def test_the_services_own_time_is_kept_beside_and_others_have_none() -> None:
    answers = iter(({**USAGE, "metrics": {"timings": {"ttft_ms": 12.5}}}, {**USAGE, "metrics": None}))

    async def handler(_: web.Request) -> web.Response:
        return web.json_response(next(answers))

    ours, theirs = (await drive(handler, [BODY, BODY])).answers
    assert (ours.own_ttft_ms, ours.ttft_ms) == (12.5, None)
    assert theirs.own_ttft_ms is None


async def test_so_many_callers_have_one_request_each_at_a_time() -> None:
    now, most = 0, 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response(USAGE)

    run = await drive(handler, [BODY] * 12, callers=4)
    assert (len(run.answers), most) == (12, 4)
    assert run.seconds >= 3 * 0.02
