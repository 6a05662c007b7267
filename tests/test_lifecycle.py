"""Where the service stands, and what the process ends with."""

import asyncio
from collections.abc import Callable

import pytest

from app.errors import EngineDead, NotReady, ShuttingDown, Unavailable
from app.lifecycle import Lifecycle, State
from app.request import Call

Step = Callable[[Lifecycle], None]


def ready(it: Lifecycle) -> None:
    it.ready()


def drain(it: Lifecycle) -> None:
    it.drain()


def cut(it: Lifecycle) -> None:
    it.cut_short()


def fail(it: Lifecycle) -> None:
    it.fail("no such model")


def die(it: Lifecycle) -> None:
    it.die("the engine core has died")


@pytest.mark.parametrize(
    ("steps", "state", "refusal", "exit_code"),
    [
        ([], State.LOADING, NotReady, 0),
        ([ready], State.READY, None, 0),
        ([ready, drain], State.DRAINING, ShuttingDown, 0),
        ([ready, drain, drain], State.DRAINING, ShuttingDown, 0),
        ([ready, drain, ready], State.DRAINING, ShuttingDown, 0),
        ([drain], State.DRAINING, ShuttingDown, 0),
        ([drain, ready], State.DRAINING, ShuttingDown, 0),
        ([ready, drain, cut], State.DRAINING, ShuttingDown, 1),
        ([fail], State.FAILED, NotReady, 1),
        ([fail, ready], State.FAILED, NotReady, 1),
        ([fail, drain], State.FAILED, NotReady, 1),
        ([fail, die], State.FAILED, NotReady, 1),
        ([drain, fail], State.FAILED, NotReady, 1),
        ([ready, die], State.DEAD, EngineDead, 70),
        ([ready, die, drain], State.DEAD, EngineDead, 70),
        ([ready, die, ready], State.DEAD, EngineDead, 70),
        ([ready, drain, die], State.DEAD, EngineDead, 70),
        ([ready, die, cut], State.DEAD, EngineDead, 70),
        ([ready, die, fail], State.DEAD, EngineDead, 70),
        ([die], State.DEAD, EngineDead, 70),
    ],
    ids=lambda value: " ".join(step.__name__ for step in value) or "nothing" if isinstance(value, list) else "",
)
async def test_states_move_forward_only(
    steps: list[Step], state: State, refusal: type[Unavailable] | None, exit_code: int
) -> None:
    it = Lifecycle()
    for step in steps:
        step(it)

    refused = it.refusal()
    assert it.state is state
    assert refused is None if refusal is None else type(refused) is refusal
    assert it.exit_code == exit_code


async def test_a_refusal_tells_the_reason() -> None:
    it = Lifecycle()
    assert "loading" in str(it.refusal())
    it.fail("no such model")

    assert str(it.refusal()) == "no such model"
    assert it.is_over.is_set()


async def test_each_caller_gets_an_error_of_its_own() -> None:
    it = Lifecycle()

    assert it.refusal() is not it.refusal()


async def test_a_stop_waits_for_the_answers_of_accepted_calls_alone() -> None:
    it = Lifecycle()
    first, second, refused = Call(1.0), Call(2.0), Call(3.0)
    await asyncio.wait_for(it.all_answered(), 1)
    it.owe(first)
    it.owe(second)
    it.call_ended(refused)
    it.call_ended(first)
    waiting = asyncio.create_task(it.all_answered())
    await asyncio.sleep(0)
    assert not waiting.done()
    it.call_ended(second)

    await asyncio.wait_for(waiting, 1)
    assert it.answers_owed == 0


async def test_an_end_is_known_from_its_first_moment() -> None:
    for step, is_ending in ((ready, False), (drain, True), (fail, True), (die, True)):
        it = Lifecycle()
        assert not it.is_ending
        step(it)
        assert it.is_ending is is_ending


async def test_who_waits_for_the_model_is_woken_when_it_has_loaded() -> None:
    it = Lifecycle()
    assert not it.has_loaded.is_set()
    it.ready()

    assert it.has_loaded.is_set()
    assert not it.is_over.is_set()
