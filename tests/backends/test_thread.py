"""The engine thread: one thread, in order, and nobody is left waiting."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.backends.thread import EngineThread
from app.errors import EngineDead

BOUND_S = 5.0


class Deaths(list[str]):
    """The reasons that ``on_death`` has heard."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def __call__(self, reason: str) -> None:
        self.append(reason)
        self.heard.set()


def nothing() -> None:
    """A close with nothing to close."""


@pytest.fixture
def deaths() -> Deaths:
    return Deaths()


@pytest.fixture
async def thread(deaths: Deaths) -> AsyncIterator[EngineThread]:
    thread = EngineThread("engine", on_death=deaths)
    thread.start()
    yield thread
    await thread.close(nothing, BOUND_S)
    assert not thread.is_alive


def die() -> None:
    raise SystemExit("told to")


async def within(work: Any, seconds: float = BOUND_S) -> Any:
    return await asyncio.wait_for(work, seconds)


async def test_calls_run_in_the_order_of_their_arrival_on_one_named_thread(thread: EngineThread) -> None:
    seen: list[tuple[int, int]] = []
    await within(
        asyncio.gather(*(thread.call(lambda n=n: seen.append((n, threading.get_ident()))) for n in range(100)))
    )

    assert [number for number, _ in seen] == list(range(100))
    assert len({ident for _, ident in seen}) == 1
    assert await thread.call(lambda: threading.current_thread().name) == "engine"
    assert await thread.call(threading.get_native_id) == thread.native_id
    assert await thread.call(threading.get_ident) != threading.get_ident()


async def test_results_and_arguments_go_through(thread: EngineThread) -> None:
    assert await thread.call(divmod, 17, 5) == (3, 2)


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), TimeoutError(), EngineDead("x")], ids=repr)
async def test_an_exception_reaches_its_caller_and_the_thread_goes_on(
    thread: EngineThread, deaths: Deaths, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await within(thread.call(fail))
    assert caught.value is error
    assert await thread.call(int, "7") == 7
    assert not deaths


async def test_even_an_exception_that_futures_do_not_take_reaches_its_caller(thread: EngineThread) -> None:
    """A future refuses ``StopIteration``, which a bare ``next()`` raises."""
    with pytest.raises(Exception, match="StopIteration"):
        await within(thread.call(lambda: next(iter(()))), 1)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=repr)
async def test_a_call_that_ends_the_thread_fails_with_those_queued_behind_it(
    thread: EngineThread, deaths: Deaths, error: BaseException
) -> None:
    holds, go_on = threading.Event(), threading.Event()

    def hold_and_die() -> None:
        holds.set()
        go_on.wait(BOUND_S)
        raise error

    calls = [asyncio.create_task(thread.call(hold_and_die))]
    assert await asyncio.to_thread(holds.wait, BOUND_S)
    calls += [asyncio.create_task(thread.call(nothing)) for _ in range(5)]
    await asyncio.sleep(0)
    go_on.set()
    results = await within(asyncio.gather(*calls, return_exceptions=True))

    assert [type(result) for result in results] == [EngineDead] * 6
    assert await asyncio.to_thread(deaths.heard.wait, BOUND_S)
    assert len(deaths) == 1
    assert type(error).__name__ in deaths[0]
    with pytest.raises(EngineDead):
        await within(thread.call(nothing))


async def test_a_close_is_no_death(thread: EngineThread, deaths: Deaths) -> None:
    assert await within(thread.close(nothing, BOUND_S)) is True

    assert not deaths
    with pytest.raises(EngineDead):
        await within(thread.call(nothing))


async def test_the_closing_call_runs_behind_what_is_queued_and_on_the_same_thread(thread: EngineThread) -> None:
    seen: list[str] = []
    idents: set[int] = set()

    def note(word: str) -> None:
        seen.append(word)
        idents.add(threading.get_ident())

    calls = [asyncio.create_task(thread.call(note, word)) for word in ("a", "b", "c")]
    await asyncio.sleep(0)
    await within(thread.close(lambda: note("close"), BOUND_S))
    await within(asyncio.gather(*calls))

    assert seen == ["a", "b", "c", "close"]
    assert len(idents) == 1


async def test_a_close_may_be_repeated(thread: EngineThread) -> None:
    calls: list[int] = []

    assert await within(thread.close(lambda: calls.append(1), BOUND_S)) is True
    assert await within(thread.close(lambda: calls.append(2), BOUND_S)) is True
    assert calls == [1]


async def test_two_closes_at_once_both_end(thread: EngineThread) -> None:
    results = await within(asyncio.gather(thread.close(nothing, BOUND_S), thread.close(nothing, BOUND_S)))

    assert results == [True, True]
    assert not thread.is_alive


async def test_a_thread_that_never_ran_is_closed_already() -> None:
    thread = EngineThread("engine", on_death=lambda _: None)

    assert await within(thread.close(nothing, BOUND_S)) is True
    with pytest.raises(EngineDead):
        await within(thread.call(nothing))


async def test_a_close_does_not_wait_longer_than_it_may(thread: EngineThread) -> None:
    go_on = threading.Event()
    hang = asyncio.create_task(thread.call(go_on.wait, BOUND_S))
    await asyncio.sleep(0)
    started = time.monotonic()

    assert await thread.close(nothing, 0.05) is False
    assert time.monotonic() - started < 1
    go_on.set()
    assert await within(hang) is True


@pytest.mark.parametrize("error", [RuntimeError("broken"), TimeoutError("a shutdown of its own")], ids=repr)
async def test_a_close_that_fails_still_ends_the_thread(thread: EngineThread, error: Exception) -> None:
    def fail() -> None:
        raise error

    await within(thread.close(fail, BOUND_S))
    await asyncio.to_thread(thread._thread.join, 0.5)

    assert not thread.is_alive


async def test_a_dead_thread_is_closed_in_no_time(thread: EngineThread, deaths: Deaths) -> None:
    with pytest.raises(EngineDead):
        await within(thread.call(die))
    assert await asyncio.to_thread(deaths.heard.wait, BOUND_S)

    assert await within(thread.close(nothing, BOUND_S)) is True


async def test_start_close_start_in_one_process(deaths: Deaths) -> None:
    idents = set()
    for _ in range(3):
        thread = EngineThread("engine", on_death=deaths)
        thread.start()
        idents.add(await within(thread.call(threading.get_native_id)))
        assert await within(thread.close(nothing, BOUND_S)) is True

    assert not deaths
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


async def test_a_caller_that_goes_does_not_stop_its_call_nor_the_next(thread: EngineThread) -> None:
    holds, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        go_on.wait(BOUND_S)
        ended.set()

    call = asyncio.create_task(thread.call(hold))
    assert await asyncio.to_thread(holds.wait, BOUND_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()

    assert await within(thread.call(int, "7")) == 7
    assert ended.is_set()


def test_a_loop_that_ends_before_its_call_harms_nothing(deaths: Deaths) -> None:
    thread = EngineThread("engine", on_death=deaths)
    thread.start()
    holds, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        go_on.wait(BOUND_S)

    async def leave_in_the_middle() -> None:
        call = asyncio.create_task(thread.call(hold))
        await asyncio.to_thread(holds.wait, BOUND_S)
        call.cancel()

    asyncio.run(leave_in_the_middle())
    go_on.set()

    async def come_back() -> None:
        assert await within(thread.call(int, "7")) == 7
        assert await within(thread.close(nothing, BOUND_S)) is True

    asyncio.run(come_back())
    assert not deaths


async def test_a_thread_does_not_keep_the_process(thread: EngineThread) -> None:
    assert thread._thread.daemon


@pytest.mark.parametrize("seed", range(3))
async def test_of_a_thousand_calls_racing_a_close_none_is_left_pending(seed: int) -> None:
    chance = random.Random(seed)
    thread = EngineThread("engine", on_death=lambda _: None)
    thread.start()

    async def call(number: int) -> Any:
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        return await thread.call(lambda: number)

    calls = [asyncio.create_task(call(number)) for number in range(1000)]
    for _ in range(chance.randrange(20)):
        await asyncio.sleep(0)
    assert await within(thread.close(nothing, BOUND_S)) is True
    results = await within(asyncio.gather(*calls, return_exceptions=True))

    for number, result in enumerate(results):
        assert result == number or isinstance(result, EngineDead)


@pytest.mark.parametrize("seed", range(3))
async def test_of_a_thousand_calls_racing_a_death_none_is_left_pending(seed: int, deaths: Deaths) -> None:
    chance = random.Random(seed)
    thread = EngineThread("engine", on_death=deaths)
    thread.start()
    death = chance.randrange(1000)

    async def call(number: int) -> Any:
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        return await thread.call(die if number == death else lambda: number)

    results = await within(asyncio.gather(*map(call, range(1000)), return_exceptions=True))

    assert isinstance(results[death], EngineDead)
    assert all(result == number or isinstance(result, EngineDead) for number, result in enumerate(results))
    assert await asyncio.to_thread(deaths.heard.wait, BOUND_S)
    assert len(deaths) == 1
    gc.collect()
