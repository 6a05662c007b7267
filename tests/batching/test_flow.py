"""The batcher over a backend that takes each request by itself, as many at once as it says."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.errors import EngineDead, GenerationFailed, QueueFull, QueueTimeout, ShuttingDown
from app.request import Outcome, Window
from tests.batching.doubles import House, house, label, make_request, outcomes, settle, within

ROOM = 4
LONG_S = 60.0


@contextlib.asynccontextmanager
async def flow(**limits: Any) -> AsyncIterator[House]:
    """A batcher at work, whose backend has room for four places."""
    async with house(batch_size=2, max_wait_s=LONG_S, **limits) as it:
        it.backend.takes_windows = False
        it.backend.max_in_flight = ROOM
        yield it


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 -- what is waited for has no event
            await asyncio.sleep(0)


async def test_a_request_goes_at_once_and_alone() -> None:
    async with flow() as it:
        started = time.monotonic()
        assert await settle(it.send("a", "b", "c")) == ["a", "b", "c"]

        assert it.backend.windows == [["a"], ["b"], ["c"]]
        assert time.monotonic() - started < LONG_S / 10


async def test_an_answer_has_no_window_and_none_is_counted() -> None:
    async with flow() as it:
        (future,) = it.send("a")
        await settle([future])

        assert future.result().window is None
        assert it.count("batchserve_window_size_count") == 0
        assert it.count("batchserve_window_releases_total", reason="direct") == 0
        assert it.count("batchserve_window_wait_seconds_count") == 1


async def test_stamps_are_in_order_and_dispatch_is_the_handing_over() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        held = it.send(*"abcd")
        await until(lambda: it.backend.inside == ROOM)
        (late,) = it.send("late")
        await asyncio.sleep(0.05)
        it.backend.gate.set()
        await settle([*held, late])

        stamps = late.result().request.stamps
        assert 0 < stamps.received <= stamps.admitted <= stamps.dispatched <= stamps.completed
        assert stamps.dispatched - stamps.admitted >= 0.05


async def test_no_more_places_than_there_is_room_for_are_in_the_engine() -> None:
    async with flow() as it:
        futures = it.send(*(f"{n}" for n in range(50)))
        assert await settle(futures) == [f"{n}" for n in range(50)]
        assert it.backend.most_inside == ROOM


async def test_a_place_that_gets_free_is_taken_at_once() -> None:
    async with flow() as it:
        gates = {name: asyncio.Event() for name in "abcdef"}

        async def generate(window: Window) -> list[Outcome]:
            it.backend.windows.append([label(window.requests[0])])
            await gates[label(window.requests[0])].wait()
            return outcomes(window)

        it.backend.generate = generate  # type: ignore[method-assign]
        futures = it.send(*"abcdef")
        await until(lambda: len(it.backend.windows) == ROOM)
        gates["c"].set()
        assert await settle([futures[2]]) == ["c"]
        await until(lambda: len(it.backend.windows) == ROOM + 1)
        for gate in gates.values():
            gate.set()
        await settle(futures)

        assert it.backend.windows[ROOM] == ["e"]


@pytest.mark.parametrize(("places", "at_once"), [(1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
async def test_a_request_counts_as_often_as_it_has_places_and_one_too_large_goes_alone(
    places: int, at_once: int
) -> None:
    async with flow() as it:
        futures = [it.admit(make_request(label=f"{n}", places=places))[0] for n in range(6)]
        assert await settle(futures) == [f"{n}" for n in range(6)]
        assert it.backend.most_inside == at_once


async def test_those_that_wait_go_by_priority_then_age_and_the_oldest_is_never_left_out() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        held = it.send(*"wxyz")
        await until(lambda: it.backend.inside == ROOM)
        futures = [it.send(name, priority=value)[0] for name, value in zip("abcde", (9, 0, -7, 0, -7), strict=True)]
        it.backend.gate.set()
        await settle([*held, *futures])

        in_turn = [name for window in it.backend.windows[ROOM:] for name in window]
        assert in_turn == ["a", "c", "e", "b", "d"]  # it was the turn of the oldest, then rank and age decide


async def test_a_caller_who_goes_while_waiting_leaves_the_queue() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        held = it.send(*"wxyz")
        await until(lambda: it.backend.inside == ROOM)
        gone, stays = it.send("gone", "stays")
        gone.cancel()
        it.backend.gate.set()

        assert await settle([*held, stays]) == [*"wxyz", "stays"]
        assert ["gone"] not in it.backend.windows
        assert it.count("batchserve_client_disconnected_total") == 1
        assert it.batcher.queue_requests == 0


async def test_a_caller_who_goes_while_running_frees_its_place_and_harms_nobody() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        futures = it.send(*"wxyz")
        await until(lambda: it.backend.inside == ROOM)
        (waiting,) = it.send("waiting")
        futures[1].cancel()
        await until(lambda: len(it.backend.windows) == ROOM + 1)
        it.backend.gate.set()

        assert await settle([*futures, waiting]) == ["w", "cancelled", "y", "z", "waiting"]
        assert it.backend.inside == 0
        assert it.count("batchserve_client_disconnected_total") == 1


async def test_a_failure_is_that_of_its_own_request() -> None:
    async with flow() as it:

        def act(window: Window) -> list[Outcome]:
            if label(window.requests[0]) == "bad":
                raise RuntimeError("broken")
            return outcomes(window)

        it.backend.act = act
        a, bad, b = await settle(it.send("a", "bad", "b"))
        assert (a, b) == ("a", "b")
        assert isinstance(bad, GenerationFailed)
        assert await settle(it.send("next")) == ["next"]


async def test_who_has_waited_too_long_gets_a_timeout_and_who_runs_goes_on() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        held = it.send(*"wxyz", queue_timeout_s=0.05)
        await until(lambda: it.backend.inside == ROOM)
        (late,) = it.send("late", queue_timeout_s=0.05)
        (error,) = await settle([late])
        it.backend.gate.set()

        assert isinstance(error, QueueTimeout)
        assert await settle(held) == list("wxyz")


async def test_a_full_queue_counts_those_that_wait_and_not_those_that_run() -> None:
    async with flow(max_queue_requests=2) as it:
        it.backend.gate.clear()
        held = it.send("w", "x")
        await until(lambda: it.backend.inside == 2)
        held += it.send("y", "z")
        await until(lambda: it.backend.inside == ROOM)
        waiting = it.send("a", "b")
        with pytest.raises(QueueFull):
            it.send("c")
        it.backend.gate.set()
        await settle([*held, *waiting])


async def test_a_drain_waits_for_all_that_runs_and_waits() -> None:
    async with flow() as it:
        futures = it.send(*(f"{n}" for n in range(20)))
        assert await within(it.batcher.drain(5))
        assert all(future.done() and not future.exception() for future in futures)


async def test_a_drain_that_takes_too_long_cuts_the_rest_and_ends_it_in_the_engine() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        futures = it.send(*(f"{n}" for n in range(10)))
        await until(lambda: it.backend.inside == ROOM)
        assert not await within(it.batcher.drain(0.05))

        assert all(isinstance(found, ShuttingDown) for found in await settle(futures))
        await until(lambda: it.backend.inside == 0)


async def test_a_dead_engine_leaves_nobody_waiting() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        futures = it.send(*(f"{n}" for n in range(10)))
        await until(lambda: it.backend.inside == ROOM)
        assert it.batcher.abandon(EngineDead("gone")) == 10
        assert all(isinstance(found, EngineDead) for found in await settle(futures))


async def test_a_batcher_that_is_stopped_ends_what_it_has_begun() -> None:
    async with flow() as it:
        it.backend.gate.clear()
        it.send(*"abcd")
        await until(lambda: it.backend.inside == ROOM)
    await until(lambda: it.backend.inside == 0)


async def test_a_thousand_submissions_race_a_drain_and_none_is_left() -> None:
    async with flow() as it:
        futures: list[asyncio.Future[Any]] = []

        async def send() -> None:
            await asyncio.sleep(random.random() * 0.1)
            with contextlib.suppress(ShuttingDown):
                futures.extend(it.send("x"))

        senders = [asyncio.ensure_future(send()) for _ in range(1000)]
        await asyncio.sleep(0.05)
        it.lifecycle.drain()
        assert await within(it.batcher.drain(5))
        await asyncio.gather(*senders)
        assert set(await settle(futures)) <= {"x"}
        assert it.batcher.queue_requests == 0


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_long_queue_costs_no_more_for_each_request(ranks: int) -> None:
    """Twice the requests take about twice as long: an order of magnitude more would be another law."""

    async def seconds(count: int) -> float:
        async with flow() as it:
            started = time.perf_counter()
            await settle([it.send(f"{n}", priority=n % ranks)[0] for n in range(count)], 60)
            return (time.perf_counter() - started) / count

    few, many = await seconds(500), await seconds(8000)
    assert many < 10 * few, (few, many)
