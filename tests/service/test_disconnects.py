"""Callers that hang up: dropped before dispatch, counted once, at no cost to their neighbours. Over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.service.support import Caller, Json, Process, metric, post_bytes, serving, strict_json, text_of

GONE = "batchserve_client_disconnected_total"
WINDOWS = "batchserve_window_size_count"
MEMBERS = "batchserve_window_size_sum"
SLOW: Json = {"prompt": "slow", "max_tokens": 50}
"""Runs for half a second and longer."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Windows of 2, 10 ms a token."""
    with serving(tmp_path_factory.mktemp("disconnects"), {"step_ms": 10}, batch_size=2) as process:
        yield process


@pytest.fixture
async def there(process: Process) -> AsyncIterator[Caller]:
    """A caller that stays; nothing is left in the service when the test ends."""
    async with process.caller() as caller:
        await caller.wait_for_metric("batchserve_queue_requests", 0)
        yield caller
        await caller.wait_for_metric("batchserve_queue_requests", 0)
        await caller.wait_for_metric("batchserve_queue_tokens", 0)
        assert text_of(await caller.generate(prompt="well", max_tokens=4)) == "WELL"


async def counts(caller: Caller) -> tuple[float, float, float]:
    """Callers gone, windows run, members of those windows."""
    text = (await caller.get("/metrics")).text
    return metric(text, GONE), metric(text, WINDOWS), metric(text, MEMBERS)


async def occupy(caller: Caller) -> "asyncio.Task[Json]":
    """A window that runs for half a second; returns once it is on its way."""
    windows = await caller.metric(WINDOWS)
    task = asyncio.create_task(caller.generate(SLOW))
    await caller.wait_for_metric(WINDOWS, windows + 1)
    return task


async def test_gone_while_queued_is_dropped_before_dispatch_and_counted_once(process: Process, there: Caller) -> None:
    busy = await occupy(there)
    gone, windows, members = await counts(there)
    async with await process.connect() as connection:
        await connection.post("/generate", {"prompt": "never", "max_tokens": 1})
        await there.wait_for_metric("batchserve_queue_requests", 1)
        await connection.hang_up()
        await there.wait_for_metric("batchserve_queue_requests", 0)
    assert not busy.done()
    await busy
    await asyncio.sleep(0.05)
    assert await counts(there) == (gone + 1, windows, members)


async def test_neighbours_in_the_queue_are_served_as_if_nothing_were(process: Process, there: Caller) -> None:
    busy = await occupy(there)
    gone, windows, members = await counts(there)
    async with await process.connect() as connection:
        first = asyncio.create_task(there.generate(prompt="first", max_tokens=5))
        await there.wait_for_metric("batchserve_queue_requests", 1)
        await connection.post("/generate", {"prompt": "never", "max_tokens": 1})
        await there.wait_for_metric("batchserve_queue_requests", 2)
        last = asyncio.create_task(there.generate(prompt="last", max_tokens=4))
        await there.wait_for_metric("batchserve_queue_requests", 3)
        await connection.hang_up()
        answers = await asyncio.gather(busy, first, last)
    assert [text_of(answer) for answer in answers[1:]] == ["FIRST", "LAST"]
    assert await counts(there) == (gone + 1, windows + 1, members + 2)


async def test_gone_while_its_window_runs_costs_its_neighbour_nothing(process: Process, there: Caller) -> None:
    busy = await occupy(there)
    gone, _, members = await counts(there)
    async with await process.connect() as connection:
        neighbour = asyncio.create_task(there.generate(SLOW))
        await connection.post("/generate", {"prompt": "leaves", "max_tokens": 100})
        await there.wait_for_metric("batchserve_queue_requests", 2)
        await busy
        await there.wait_for_metric(MEMBERS, members + 2)
        await connection.hang_up()
        await there.wait_for_metric(GONE, gone + 1)
        assert text_of(await neighbour).startswith("SLOWSLOW")
    next_one = await there.generate(prompt="next", max_tokens=4)
    assert text_of(next_one) == "NEXT"
    now = await counts(there)
    assert (now[0], now[2]) == (gone + 1, members + 3)


async def test_a_batch_whose_caller_has_gone_is_dropped_row_by_row(process: Process, there: Caller) -> None:
    busy = await occupy(there)
    gone, windows, members = await counts(there)
    async with await process.connect() as connection:
        await connection.post("/batch", {"requests": [{"prompt": "x", "max_tokens": 1}] * 30 + [{"prompt": ""}]})
        await there.wait_for_metric("batchserve_queue_requests", 30)
        await connection.hang_up()
        await there.wait_for_metric("batchserve_queue_requests", 0)
    await busy
    assert await counts(there) == (gone + 30, windows, members)


async def test_gone_within_a_stream_of_rows(process: Process, there: Caller) -> None:
    gone, _, members = await counts(there)
    wanted = [{"prompt": "x", "max_tokens": 10}] * 40
    async with there.http.stream(
        "POST", "/batch", json={"requests": wanted}, headers={"accept": "application/x-ndjson"}
    ) as response:
        assert strict_json(await anext(response.aiter_lines()))["status"] == 200
    await there.wait_for_metric("batchserve_queue_requests", 0)
    await asyncio.sleep(0.2)
    gone_now, _, members_now = await counts(there)
    answered = 40 - (gone_now - gone)
    assert 2 <= answered <= 8
    assert 2 <= members_now - members <= 8
    assert await there.metric(GONE) == gone_now


async def test_gone_within_an_upload(process: Process, there: Caller) -> None:
    before = await counts(there)
    for path in ("/generate", "/batch"):
        for body in ({"prompt": "x" * 1000}, {"prompt": "x" * (4 << 20)}):
            async with await process.connect() as connection:
                data = post_bytes(path, body)
                await connection.send(data[: len(data) // 2])
                await asyncio.sleep(0.02)
                await connection.hang_up()
    await there.wait_ready()
    assert (await counts(there))[1:] == before[1:]


async def test_many_at_once_are_each_counted_once(process: Process, there: Caller) -> None:
    busy = await occupy(there)
    gone, windows, members = await counts(there)
    connections = [await process.connect() for _ in range(25)]
    for connection in connections:
        await connection.post("/generate", {"prompt": "never", "max_tokens": 1})
    stays = asyncio.create_task(there.generate(prompt="stays", max_tokens=5))
    await there.wait_for_metric("batchserve_queue_requests", 26)
    await asyncio.gather(*(connection.hang_up() for connection in connections))
    await there.wait_for_metric("batchserve_queue_requests", 1)
    await busy
    assert text_of(await stays) == "STAYS"
    assert await counts(there) == (gone + 25, windows + 1, members + 1)


async def test_a_caller_that_gives_up_by_a_time_limit_of_its_own_counts_too(process: Process, there: Caller) -> None:
    busy = await occupy(there)
    gone, _, members = await counts(there)
    with pytest.raises(httpx.ReadTimeout):
        await there.http.post("/generate", json={"prompt": "never"}, timeout=0.1)
    await there.wait_for_metric(GONE, gone + 1)
    await busy
    assert (await counts(there))[2] == members


async def test_who_sends_the_next_request_early_has_not_gone(process: Process) -> None:
    """Two requests on one connection at once: both are answered, in order, with a close behind them."""
    async with await process.connect() as connection:
        one = post_bytes("/generate", {"prompt": "one", "max_tokens": 3})
        two = post_bytes("/generate", {"prompt": "two", "max_tokens": 3}, headers="connection: close\r\n")
        await connection.send(one + two)
        for text in ("ONE", "TWO"):
            status, _, body = await connection.answer()
            assert status == 200
            assert text_of(strict_json(body)) == text
        assert await connection.reader.read() == b""


async def test_the_log_has_no_traceback_for_any_of_them(process: Process, there: Caller) -> None:
    assert "Traceback" not in process.log
