"""The window rule as a table, and what holds for any queue."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.batching.window import WindowLimits, members, release
from app.request import Request
from tests.batching.doubles import make_request

LIMITS = WindowLimits(batch_size=4, max_wait_s=0.010)
ADMITTED = 100.0


@pytest.mark.parametrize(
    ("waiting", "now", "is_draining", "expected"),
    [
        pytest.param(1, 100.000, False, None, id="one has just come: it waits for others"),
        pytest.param(3, 100.009, False, None, id="not full, not due"),
        pytest.param(3, 100.010, False, "max_wait", id="due to the moment"),
        pytest.param(1, 100.500, False, "max_wait", id="long due"),
        pytest.param(4, 100.000, False, "full", id="full at once"),
        pytest.param(9, 100.000, False, "full", id="more than full"),
        pytest.param(4, 100.500, False, "full", id="full and due: full"),
        pytest.param(1, 100.000, True, "drain", id="draining does not wait"),
        pytest.param(3, 100.500, True, "drain", id="draining and due"),
        pytest.param(4, 100.000, True, "full", id="full while draining is full"),
        pytest.param(1, 99.0, False, None, id="a clock behind the stamp releases nothing"),
    ],
)
def test_why_a_window_goes(waiting: int, now: float, is_draining: bool, expected: str | None) -> None:
    assert release(waiting, ADMITTED, LIMITS, now, is_draining=is_draining) == expected


def test_without_a_wait_a_window_goes_with_what_is_there() -> None:
    assert release(1, ADMITTED, WindowLimits(4, 0.0), ADMITTED, is_draining=False) == "max_wait"


def test_a_window_of_one_is_always_full() -> None:
    assert release(1, ADMITTED, WindowLimits(1, 60.0), ADMITTED, is_draining=False) == "full"


def queue(priorities: list[int]) -> list[Request]:
    unused: Any = object()
    return [make_request(label=str(age), priority=priority, future=unused) for age, priority in enumerate(priorities)]


@pytest.mark.parametrize(
    ("priorities", "batch_size", "expected"),
    [
        pytest.param([0, 0, 0], 2, {0, 1}, id="by age"),
        pytest.param([0, 0, 0], 5, {0, 1, 2}, id="all, when there is room"),
        pytest.param([0, 5, -5, 0], 2, {0, 2}, id="lower goes first"),
        pytest.param([9, 0, 0, 0], 2, {0, 1}, id="the oldest has a place whatever its priority"),
        pytest.param([9, 0, 0], 1, {0}, id="and in a window of one, the only place"),
        pytest.param([0, 3, 3, 2, 3], 3, {0, 3, 1}, id="equal ones by age"),
    ],
)
def test_who_goes(priorities: list[int], batch_size: int, expected: set[int]) -> None:
    waiting = queue(priorities)

    assert {waiting.index(request) for request in members(waiting, batch_size)} == expected


at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine with other work to do is no reason to fail."""


@at_leisure
@given(st.lists(st.integers(-100, 100), min_size=1, max_size=60), st.integers(1, 40))
def test_a_window_holds_the_oldest_and_else_the_most_urgent(priorities: list[int], batch_size: int) -> None:
    waiting = queue(priorities)

    chosen = [waiting.index(request) for request in members(waiting, batch_size)]

    assert len(chosen) == len(set(chosen)) == min(batch_size, len(waiting))
    assert 0 in chosen
    ranked = sorted(range(len(waiting)), key=lambda age: (priorities[age], age))
    assert set(chosen) - {0} <= set(ranked[:batch_size])


@at_leisure
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_window_after_window_everybody_goes_once(priorities: list[int], batch_size: int) -> None:
    waiting, gone = queue(priorities), []
    while waiting:
        oldest, chosen = waiting[0], members(waiting, batch_size)
        assert oldest in chosen
        gone += chosen
        waiting = [request for request in waiting if request not in chosen]

    assert len(gone) == len(set(gone)) == len(priorities)


def test_any_iterable_of_requests_is_taken() -> None:
    waiting = queue([1, 0, 0])

    assert members(dict.fromkeys(waiting), 2) == [waiting[1], waiting[0]]
