"""One failing request costs its neighbours nothing."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import timings
from app.backends.isolation import WindowMismatch, run_isolated
from app.errors import EngineDead, GenerationFailed, InvalidRequest
from app.request import Generation, Outcome, Window
from tests.batching.doubles import generation, label, make_request

Results = list[Generation | Exception]


def make_window(size: int = 8) -> Window:
    ids = itertools.count(1)
    unused: Any = object()
    requests = [make_request(label=str(number), future=unused) for number in range(size)]
    return Window(next(ids), "full", requests, timings.now(), 0.0, ids)


class Engine:
    """Raises for a window that holds one of ``culprits``.

    Attributes:
        runs: labels of each run.
        left: what a failed run has left in it, until ``recover`` is called.
    """

    def __init__(self, culprits: set[int] | frozenset[int] = frozenset(), error: Callable[[], Exception] | None = None):
        self.culprits = {str(number) for number in culprits}
        self.error = error or (lambda: RuntimeError("broken"))
        self.runs: list[list[str]] = []
        self.ids: list[int] = []
        self.left: list[str] = []
        self.recoveries = 0

    def run(self, window: Window) -> Results:
        assert not self.left, "a run over leftovers would hand out somebody else's text"
        labels = [label(request) for request in window.requests]
        self.runs.append(labels)
        self.ids.append(window.id)
        if self.culprits & set(labels):
            self.left = labels
            raise self.error()
        return [generation(name) for name in labels]

    def recover(self) -> None:
        self.recoveries += 1
        self.left = []


def isolate(engine: Engine, window: Window | None = None) -> list[Outcome]:
    return run_isolated(window or make_window(), engine.run, engine.recover)


def text(outcome: Outcome) -> Any:
    result = outcome.result
    return result.outputs[0].text if isinstance(result, Generation) else type(result)


# --- the reading example ---


def test_a_good_window_is_run_once() -> None:
    engine = Engine()

    outcomes = isolate(engine)

    assert [text(outcome) for outcome in outcomes] == list("01234567")
    assert engine.runs == [list("01234567")]
    assert engine.recoveries == 0


def test_halves_are_run_again_until_the_culprit_stands_alone() -> None:
    engine = Engine({3})

    outcomes = isolate(engine)

    assert [text(outcome) for outcome in outcomes] == ["0", "1", "2", GenerationFailed, "4", "5", "6", "7"]
    assert engine.runs == [list("01234567"), list("0123"), list("01"), list("23"), ["2"], ["3"], list("4567")]
    assert engine.recoveries == 4  # once after each run that raised: no leftovers in the next


@pytest.mark.parametrize("culprits", [{0}, {3}, {7}, {0, 7}, {2, 3}, {1, 4, 6}, set(range(7)), set(range(8))], ids=str)
def test_only_the_culprits_get_an_error(culprits: set[int]) -> None:
    outcomes = isolate(Engine(culprits))

    assert [label(outcome.request) for outcome in outcomes] == list("01234567")
    expected = [GenerationFailed if number in culprits else str(number) for number in range(8)]
    assert [text(outcome) for outcome in outcomes] == expected


at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine with other work to do is no reason to fail."""


@at_leisure
@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_whoever_fails_everybody_gets_one_outcome_of_their_own(case: tuple[int, set[int]]) -> None:
    size, culprits = case
    window = make_window(size)
    engine = Engine(culprits)

    outcomes = isolate(engine, window)

    assert [outcome.request for outcome in outcomes] == window.requests
    assert [text(o) for o in outcomes] == [GenerationFailed if n in culprits else str(n) for n in range(size)]
    assert len(set(engine.ids)) == len(engine.ids)
    assert len(engine.runs) <= 2 * size
    for outcome in outcomes:
        assert outcome.window.requests[outcome.position or 0] is outcome.request


def test_a_failure_that_passes_leaves_everybody_with_a_result() -> None:
    engine = Engine({5})
    runs = itertools.count()

    def run(window: Window) -> Results:
        if next(runs) > 0:
            engine.culprits.clear()
        return engine.run(window)

    outcomes = run_isolated(make_window(), run, engine.recover)

    assert [text(outcome) for outcome in outcomes] == list("01234567")
    assert [len(labels) for labels in engine.runs] == [8, 4, 4]


def test_stamps_and_window_are_those_of_the_run_that_gave_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1000)
    monkeypatch.setattr(timings, "now", lambda: float(next(clock)))
    window = make_window(4)

    outcomes = isolate(Engine({3}), window)

    assert [(outcome.window.id, len(outcome.window.requests), outcome.position) for outcome in outcomes] == [
        (2, 2, 0),
        (2, 2, 1),
        (4, 1, 0),
        (5, 1, 0),
    ]
    dispatched = [outcome.window.dispatched for outcome in outcomes]
    assert dispatched == sorted(dispatched)
    assert dispatched[0] > window.dispatched


def test_errors_for_single_requests_cause_no_run_again() -> None:
    engine = Engine()

    def run(window: Window) -> Results:
        results = engine.run(window)
        results[2] = GenerationFailed("ended as abort")
        return results

    outcomes = run_isolated(make_window(), run, engine.recover)

    assert [text(outcome) for outcome in outcomes] == ["0", "1", GenerationFailed, "3", "4", "5", "6", "7"]
    assert len(engine.runs) == 1


def test_what_the_engine_calls_the_callers_fault_stays_that() -> None:
    outcomes = isolate(Engine({2}, lambda: InvalidRequest("bad_words: too long")))

    assert [text(outcome) for outcome in outcomes] == ["0", "1", InvalidRequest, "3", "4", "5", "6", "7"]
    assert str(outcomes[2].result) == "bad_words: too long"


def test_the_error_of_a_culprit_names_the_engines_reason() -> None:
    outcomes = isolate(Engine({2}))

    assert "broken" in str(outcomes[2].result)


def test_outputs_that_do_not_belong_to_the_window_are_handed_to_nobody() -> None:
    engine = Engine({0}, lambda: WindowMismatch("9 outputs for 8 requests"))

    outcomes = isolate(engine)

    assert [text(outcome) for outcome in outcomes] == [GenerationFailed] * 8
    assert len({id(outcome.result) for outcome in outcomes}) == 8  # no traceback is shared
    assert engine.runs == [list("01234567")]
    assert engine.recoveries == 1


def test_a_mismatch_in_one_half_costs_the_other_nothing() -> None:
    engine = Engine({1})
    engine.error = lambda: RuntimeError("broken") if len(engine.runs) == 1 else WindowMismatch("3 outputs for 4")

    outcomes = isolate(engine)

    assert [text(outcome) for outcome in outcomes] == [GenerationFailed] * 4 + list("4567")


def test_nothing_is_run_again_on_a_dead_engine() -> None:
    engine = Engine({4}, lambda: EngineDead("the engine core has died"))

    with pytest.raises(EngineDead):
        isolate(engine)
    assert len(engine.runs) == 1
    assert engine.recoveries == 0


def test_an_engine_that_cannot_be_emptied_ends_the_runs() -> None:
    engine = Engine({4})

    def recover() -> None:
        raise EngineDead("requests stay in it")

    with pytest.raises(EngineDead):
        run_isolated(make_window(), engine.run, recover)
    assert len(engine.runs) == 1


def test_what_is_no_exception_ends_the_thread_and_is_not_caught() -> None:
    with pytest.raises(SystemExit):
        isolate(Engine({4}, lambda: SystemExit(1)))  # type: ignore[arg-type,return-value]
