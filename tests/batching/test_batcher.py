"""The micro-batcher over a double that runs windows when it is told to."""

import asyncio
import random
import time
from typing import Any

import pytest

from app.errors import (
    EngineDead,
    GenerationFailed,
    NotReady,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
    ServiceError,
    ShuttingDown,
)
from app.request import Outcome, Window
from tests.batching.doubles import House, generation, house, label, make_request, outcomes, settle, within

LONG_S = 60.0


# --- filling windows: written to be read from the top ---


async def test_a_full_window_goes_at_once() -> None:
    async with house(batch_size=4, max_wait_s=LONG_S) as it:
        answers = await settle(it.send("a", "b", "c", "d"))

        assert answers == ["a", "b", "c", "d"]
        assert it.backend.windows == [["a", "b", "c", "d"]]


async def test_a_window_that_does_not_fill_goes_when_its_oldest_has_waited_long_enough() -> None:
    async with house(batch_size=4, max_wait_s=0.05) as it:
        started = time.monotonic()
        first = it.send("a")
        await asyncio.sleep(0.03)
        answers = await settle([*first, *it.send("b")])

        assert answers == ["a", "b"]
        assert it.backend.windows == [["a", "b"]]  # counted from a, so b waited for less
        assert 0.05 <= time.monotonic() - started < 1


async def test_the_next_window_fills_while_one_runs_until_the_moment_of_dispatch() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        busy = await it.busy()
        futures = it.send("a", "b")
        await asyncio.sleep(0.02)  # long due, and still open
        futures += it.send("c")
        it.backend.gate.set()

        await settle([busy, *futures])
        assert it.backend.windows == [["busy"], ["a", "b", "c"]]


async def test_a_window_never_holds_more_than_batch_size() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        busy = await it.busy()
        futures = it.send(*"abcdefghij")
        it.backend.gate.set()

        await settle([busy, *futures])
        assert it.backend.windows == [["busy"], list("abcd"), list("efgh"), list("ij")]
        assert it.backend.most_inside == 1


async def test_a_large_batch_is_spread_over_windows_and_shares_them_with_others() -> None:
    async with house(batch_size=4, max_wait_s=0.01) as it:
        batch = it.admit(*(make_request(label=f"batch {i}") for i in range(6)))
        single = it.send("single")

        assert await settle([*batch, *single]) == [*(f"batch {i}" for i in range(6)), "single"]
        assert it.backend.windows[1] == ["batch 4", "batch 5", "single"]


async def test_an_answer_tells_its_window() -> None:
    async with house(batch_size=2, max_wait_s=0.01) as it:
        first, second, third = it.send("a", "b", "c")
        await settle([first, second, third])

        assert [f.result().window.describe(f.result().position) for f in (first, second, third)] == [  # type: ignore[union-attr]
            {"id": 1, "size": 2, "position": 0, "release": "full"},
            {"id": 1, "size": 2, "position": 1, "release": "full"},
            {"id": 2, "size": 1, "position": 0, "release": "max_wait"},
        ]


async def test_stamps_are_in_order() -> None:
    async with house() as it:
        (future,) = it.send("a")
        await settle([future])

        stamps = future.result().request.stamps
        assert 0 < stamps.received <= stamps.admitted <= stamps.dispatched <= stamps.completed


async def test_windows_and_waits_are_counted() -> None:
    async with house(batch_size=2, max_wait_s=0.01) as it:
        await settle(it.send("a", "b", "c"))

        assert it.count("batchserve_window_releases_total", reason="full") == 1
        assert it.count("batchserve_window_releases_total", reason="max_wait") == 1
        assert it.count("batchserve_window_size_sum") == 3
        assert it.count("batchserve_window_fill_ratio_sum") == 1.5
        assert it.count("batchserve_window_wait_seconds_count") == 3


# --- priorities ---


async def test_lower_priority_numbers_go_first_and_equal_ones_by_age() -> None:
    async with house(batch_size=2, max_wait_s=0) as it:
        busy = await it.busy()
        futures = [it.send(name, priority=value)[0] for name, value in zip("abcd", (5, 0, -7, 0), strict=True)]
        it.backend.gate.set()

        await settle([busy, *futures])
        assert [set(window) for window in it.backend.windows[1:]] == [{"c", "a"}, {"b", "d"}]


async def test_the_least_urgent_request_is_served_under_a_stream_of_urgent_ones() -> None:
    async with house(batch_size=2, max_wait_s=0) as it:
        busy = await it.busy()
        urgent = it.send(*"abcdef", priority=-100)
        (patient,) = it.send("patient", priority=100)
        patient.add_done_callback(lambda _: stop.set())
        stop = asyncio.Event()
        it.backend.gate.set()
        while not stop.is_set():
            urgent += it.send("late", "late", priority=-100)
            await asyncio.sleep(0)
            assert len(it.backend.windows) < 20
        await settle([busy, patient, *urgent])

        place = next(number for number, window in enumerate(it.backend.windows) if "patient" in window)
        assert place <= 1 + 6  # at the latest when the six ahead of it are gone


# --- places and limits ---


async def test_more_than_an_empty_queue_holds_is_too_large_not_full() -> None:
    async with house(max_queue_requests=8) as it:
        with pytest.raises(RequestTooLarge) as caught:
            it.batcher.reserve(9)

        assert caught.value.extra == {"limit": 8}


async def test_a_full_queue_tells_its_depth_and_limit() -> None:
    async with house(max_queue_requests=8, max_wait_s=0) as it:
        busy = await it.busy()
        futures = it.admit(*(make_request(label=str(i)) for i in range(6)))
        with pytest.raises(QueueFull) as caught:
            it.batcher.reserve(3)

        assert caught.value.extra == {"queue_depth": 6, "limit": 8}
        it.backend.gate.set()
        await settle([busy, *futures])
        assert it.batcher.queue_requests == 0


async def test_a_request_takes_a_place_for_each_of_its_outputs() -> None:
    async with house(max_queue_requests=8, max_wait_s=LONG_S) as it:
        futures = it.admit(make_request(places=5))
        assert it.batcher.queue_requests == 5
        with pytest.raises(QueueFull):
            it.batcher.reserve(4)
        futures[0].cancel()
        await asyncio.sleep(0)

        assert it.batcher.queue_requests == 0


async def test_what_is_being_resolved_counts() -> None:
    async with house(max_queue_requests=8) as it:
        with it.batcher.reserve(5):
            assert it.batcher.queue_requests == 5
            with pytest.raises(QueueFull):
                it.batcher.reserve(4)

        assert it.batcher.queue_requests == 0


@pytest.mark.parametrize("error", [ValueError("resolving failed"), asyncio.CancelledError()])
async def test_places_are_given_back_when_resolving_fails_or_is_cancelled(error: BaseException) -> None:
    async with house() as it:
        with pytest.raises(type(error)), it.batcher.reserve(5):
            raise error

        assert it.batcher.queue_requests == 0


async def test_places_of_rows_that_could_not_be_resolved_are_given_back() -> None:
    async with house(max_wait_s=LONG_S) as it:
        with it.batcher.reserve(5) as reservation:
            it.batcher.admit(reservation, [make_request(), make_request(places=2)])

        assert it.batcher.queue_requests == 3


async def test_more_tokens_than_an_empty_queue_takes_is_too_large() -> None:
    async with house(max_queue_tokens=100) as it:
        with pytest.raises(RequestTooLarge) as caught:
            it.admit(make_request(tokens=60), make_request(tokens=41))

        assert caught.value.extra == {"limit": 100}
        assert (it.batcher.queue_requests, it.batcher.queue_tokens) == (0, 0)


async def test_a_queue_full_of_tokens_takes_none_of_a_batch() -> None:
    async with house(max_queue_tokens=100, max_wait_s=LONG_S) as it:
        it.admit(make_request(tokens=60))
        with pytest.raises(QueueFull) as caught:
            it.admit(make_request(tokens=30), make_request(tokens=11))

        assert caught.value.extra == {"queue_depth": 60, "limit": 100}
        assert (it.batcher.queue_requests, it.batcher.queue_tokens) == (1, 60)
        it.admit(make_request(tokens=40))


async def test_a_batch_whose_rows_are_all_wrong_takes_no_place() -> None:
    async with house() as it:
        assert it.admit() == []
        assert it.batcher.queue_requests == 0


async def test_nothing_is_taken_before_the_model_has_loaded() -> None:
    with pytest.raises(NotReady):
        not_ready().batcher.reserve(1)


def not_ready() -> House:
    it = House(4, 0.01)
    it.lifecycle.state = type(it.lifecycle)().state
    return it


async def test_what_was_being_resolved_when_the_drain_began_is_refused_and_gives_its_places_back() -> None:
    async with house() as it:
        with it.batcher.reserve(2) as reservation:
            it.lifecycle.drain()
            with pytest.raises(ShuttingDown):
                it.batcher.admit(reservation, [make_request(), make_request()])

        assert it.batcher.queue_requests == 0


# --- callers that wait too long, or go ---


async def test_a_request_waits_no_longer_than_its_timeout() -> None:
    async with house(max_wait_s=LONG_S) as it:
        slow, patient = it.send("slow", queue_timeout_s=0.02) + it.send("patient")
        (answer,) = await settle([slow])

        assert isinstance(answer, QueueTimeout)
        assert not patient.done()
        assert it.batcher.queue_requests == 1


async def test_the_timeout_passes_while_the_engine_is_busy_and_the_request_is_not_run() -> None:
    async with house(max_wait_s=0) as it:
        busy = await it.busy()
        late, patient = it.send("late", queue_timeout_s=0.02) + it.send("patient")
        (answer,) = await settle([late])  # while the engine is still in its window
        it.backend.gate.set()
        await settle([busy, patient])

        assert isinstance(answer, QueueTimeout)
        assert it.backend.windows == [["busy"], ["patient"]]


async def test_a_timeout_does_not_hit_a_request_that_runs() -> None:
    async with house(max_wait_s=0) as it:
        it.backend.gate.clear()
        (future,) = it.send("a", queue_timeout_s=0.02)
        await within(it.backend.entered.acquire())
        await asyncio.sleep(0.05)
        it.backend.gate.set()

        assert await settle([future]) == ["a"]


async def test_a_caller_that_goes_before_dispatch_is_dropped_and_counted_once() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        busy = await it.busy()
        futures = it.send("a", "b", "c")
        futures[1].cancel()
        futures[1].cancel()
        await asyncio.sleep(0)
        assert it.batcher.queue_requests == 2
        it.backend.gate.set()

        assert await settle([busy, *futures]) == ["busy", "a", "cancelled", "c"]
        assert it.backend.windows == [["busy"], ["a", "c"]]
        assert it.count("batchserve_client_disconnected_total") == 1


async def test_a_caller_that_goes_in_the_very_moment_of_dispatch_is_not_run() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        held, entered = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def generate(window: Window) -> list[Outcome]:
            it.backend.windows.append([label(request) for request in window.requests])
            entered.set()
            await held
            return outcomes(window)

        it.backend.generate = generate  # type: ignore[method-assign]
        first = it.send("busy")
        await within(entered.wait())
        futures = it.send("a", "b")
        held.set_result(None)  # the batcher is woken first,
        futures[0].cancel()  # and the caller goes before its turn comes

        assert await settle([*first, *futures]) == ["busy", "cancelled", "b"]
        assert it.backend.windows == [["busy"], ["b"]]
        assert it.count("batchserve_client_disconnected_total") == 1


async def test_a_caller_that_goes_during_the_run_harms_nobody() -> None:
    async with house(batch_size=4, max_wait_s=LONG_S) as it:
        it.backend.gate.clear()
        futures = it.send("a", "b", "c", "d")
        await within(it.backend.entered.acquire())
        futures[1].cancel()
        it.backend.gate.set()

        assert await settle(futures) == ["a", "cancelled", "c", "d"]
        assert await settle(it.send("e", "f", "g", "h")) == ["e", "f", "g", "h"]
        assert it.count("batchserve_client_disconnected_total") == 1


async def test_when_all_have_gone_no_window_is_run() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        busy = await it.busy()
        for future in it.send("a", "b"):
            future.cancel()
        await asyncio.sleep(0)
        it.backend.gate.set()
        await settle([busy])
        await asyncio.sleep(0.02)

        assert it.backend.windows == [["busy"]]


# --- failures ---


async def test_after_failing_windows_a_good_one_is_served() -> None:
    async with house(batch_size=2, max_wait_s=0.01) as it:

        def fail(window: Window) -> list[Outcome]:
            raise RuntimeError("broken")

        it.backend.act = fail
        for _ in range(3):
            answers = await settle(it.send("a", "b"))
            assert all(isinstance(answer, GenerationFailed) for answer in answers)
            assert "broken" in answers[0].message
            assert answers[0] is not answers[1]
        it.backend.act = outcomes

        assert await settle(it.send("a", "b")) == ["a", "b"]


async def test_one_requests_error_reaches_it_alone() -> None:
    async with house(batch_size=4, max_wait_s=LONG_S) as it:

        def fail_one(window: Window) -> list[Outcome]:
            found = outcomes(window)
            found[2] = Outcome(window.requests[2], window, 2, GenerationFailed("only this one"))
            return found

        it.backend.act = fail_one
        answers = await settle(it.send("a", "b", "c", "d"))

        assert answers[:2] + answers[3:] == ["a", "b", "d"]
        assert isinstance(answers[2], GenerationFailed)


async def test_a_request_the_backend_says_nothing_about_is_not_left_waiting() -> None:
    async with house(batch_size=4, max_wait_s=LONG_S) as it:
        it.backend.act = lambda window: outcomes(window)[:3]
        answers = await settle(it.send("a", "b", "c", "d"), seconds=1)

        assert answers[:3] == ["a", "b", "c"]
        assert isinstance(answers[3], ServiceError)


async def test_outcomes_are_told_apart_by_their_request_not_by_their_place() -> None:
    async with house(batch_size=3, max_wait_s=LONG_S) as it:
        it.backend.act = lambda window: outcomes(window)[::-1]

        assert await settle(it.send("a", "b", "c")) == ["a", "b", "c"]


async def test_the_run_that_gave_the_text_stamps_the_request() -> None:
    async with house(batch_size=2, max_wait_s=LONG_S) as it:
        later: list[Window] = []

        def run_again(window: Window) -> list[Outcome]:
            later.extend(window.split())
            for half in later:
                half.dispatched = time.monotonic()
            return [Outcome(half.requests[0], half, 0, generation("x")) for half in later]

        it.backend.act = run_again
        futures = it.send("a", "b")
        await settle(futures)

        for future, half in zip(futures, later, strict=True):
            assert future.result().window is half
            assert future.result().request.stamps.dispatched == half.dispatched


async def test_every_waiting_caller_hears_of_a_dead_engine_at_once() -> None:
    async with house(batch_size=2, max_wait_s=0) as it:
        busy = await it.busy()  # its call never returns
        futures = it.send(*"abcde")
        it.lifecycle.die("the engine core has died")
        it.batcher.abandon(EngineDead("the engine core has died"))

        answers = await settle([busy, *futures], seconds=0.5)
        assert all(isinstance(answer, EngineDead) for answer in answers)
        assert len({id(answer) for answer in answers}) == len(answers)  # no traceback is shared
        assert it.batcher.queue_requests == 0
        with pytest.raises(EngineDead):
            it.batcher.reserve(1)


async def test_a_window_that_meets_a_dead_engine_is_told_so() -> None:
    async with house(batch_size=2, max_wait_s=LONG_S) as it:

        def die(window: Window) -> list[Outcome]:
            raise EngineDead("it died")

        it.backend.act = die

        assert [type(answer) for answer in await settle(it.send("a", "b"))] == [EngineDead, EngineDead]


# --- drain ---


async def test_a_drain_sends_what_waits_at_once_and_ends_when_all_are_answered() -> None:
    async with house(batch_size=4, max_wait_s=LONG_S) as it:
        futures = it.send("a", "b")
        it.lifecycle.drain()

        assert await within(it.batcher.drain(LONG_S)) is True
        assert await settle(futures) == ["a", "b"]
        assert it.count("batchserve_window_releases_total", reason="drain") == 1


async def test_a_drain_answers_the_window_that_runs_and_those_that_wait() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        busy = await it.busy()
        futures = it.send(*"abcdefg")
        it.lifecycle.drain()
        drained = asyncio.create_task(it.batcher.drain(LONG_S))
        await asyncio.sleep(0.01)
        assert not drained.done()
        it.backend.gate.set()

        assert await within(drained) is True
        assert await settle([busy, *futures]) == ["busy", *"abcdefg"]


async def test_what_a_drain_cannot_wait_for_is_told_that_the_service_stops() -> None:
    async with house(batch_size=4, max_wait_s=0) as it:
        busy = await it.busy()
        futures = it.send("a", "b")
        it.lifecycle.drain()

        assert await within(it.batcher.drain(0.02)) is False
        answers = await settle([busy, *futures], seconds=0.5)
        assert all(isinstance(answer, ShuttingDown) for answer in answers)


async def test_a_drain_of_an_idle_service_is_over_at_once_and_may_be_repeated() -> None:
    async with house() as it:
        it.lifecycle.drain()

        assert await within(it.batcher.drain(LONG_S), 0.5) is True
        assert await within(it.batcher.drain(LONG_S), 0.5) is True


async def test_a_drain_waits_for_what_is_being_resolved() -> None:
    async with house() as it:
        reservation = it.batcher.reserve(1)
        drained = asyncio.create_task(it.batcher.drain(LONG_S))
        await asyncio.sleep(0.01)
        assert not drained.done()
        with reservation:
            pass

        assert await within(drained) is True


async def test_a_drain_is_not_over_between_admission_and_dispatch() -> None:
    """Also when the reservation's block has not been left yet."""
    async with house(batch_size=4, max_wait_s=LONG_S) as it:
        with it.batcher.reserve(1) as reservation:
            request = make_request(label="a")
            it.batcher.admit(reservation, [request])
            assert await within(it.batcher.drain(LONG_S)) is True

        assert await settle([request.future], seconds=0.5) == ["a"]


# --- many at once ---


@pytest.mark.parametrize("seed", range(4))
async def test_of_a_thousand_submissions_racing_a_drain_none_is_left_pending(seed: int) -> None:
    chance = random.Random(seed)
    answers: list[Any] = []

    async def submit(it: House, name: str) -> None:
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        timeout = chance.choice([None, None, 0.001, LONG_S])
        try:
            (future,) = it.send(name, queue_timeout_s=timeout, priority=chance.randint(-2, 2))
        except ServiceError as error:
            answers.append(error)
            return
        if chance.random() < 0.1:
            asyncio.get_running_loop().call_soon(future.cancel)
        answers.extend(await settle([future]))

    async with house(batch_size=16, max_wait_s=0.001) as it:
        tasks = [asyncio.create_task(submit(it, str(number))) for number in range(1000)]
        for _ in range(chance.randrange(10)):
            await asyncio.sleep(0)
        it.lifecycle.drain()
        await within(it.batcher.drain(chance.choice([0.0, 0.01, 5.0])))
        it.batcher.abandon(ShuttingDown("over"))
        await within(asyncio.gather(*tasks))

        assert len(answers) == 1000
        assert all(isinstance(answer, str | QueueTimeout | ShuttingDown) for answer in answers)
        assert (it.batcher.queue_requests, it.batcher.queue_tokens) == (0, 0)
        assert it.backend.most_inside <= 1


@pytest.mark.parametrize("wait", range(6))
async def test_a_batcher_ends_when_it_is_cancelled_whatever_it_was_doing(wait: int) -> None:
    async with house(batch_size=2, max_wait_s=0.0005) as it:
        futures = it.send("a")
        for _ in range(wait):
            await asyncio.sleep(0)
        it.batcher.abandon(ShuttingDown("over"))
    await settle(futures, seconds=0.5)


async def test_ten_thousand_requests_leave_nothing_behind() -> None:
    async with house(batch_size=64, max_wait_s=0) as it:
        futures = [
            future for start in range(0, 10_000, 500) for future in it.send(*map(str, range(start, start + 500)))
        ]

        assert await settle(futures) == [str(number) for number in range(10_000)]
        assert (it.batcher.queue_requests, it.batcher.queue_tokens) == (0, 0)
        assert not it.batcher._waiting
