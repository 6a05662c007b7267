"""Where the service stands, and what the process ends with."""

from collections.abc import Callable

import pytest

from app.errors import EngineDead, NotReady, ShuttingDown, Unavailable
from app.lifecycle import Lifecycle, State

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
    ids=str,
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


async def test_who_waits_for_the_model_is_woken_when_it_has_loaded() -> None:
    it = Lifecycle()
    assert not it.has_loaded.is_set()
    it.ready()

    assert it.has_loaded.is_set()
    assert not it.is_over.is_set()
