"""Percentiles, ratios, and when a difference is called one."""

import pytest

from benchmarks.comparison import Measure, in_words, latency, percentiles, ratios, speed, verdict

CELL = {
    "runs": {
        "theirs": [
            {"completion_tokens": 100, "seconds": 1.0, "e2e_ms": {"p99": 200.0}},
            {"completion_tokens": 100, "seconds": 2.0, "e2e_ms": {"p99": 400.0}},
        ],
        "ours": [
            {"completion_tokens": 100, "seconds": 2.0, "e2e_ms": {"p99": 100.0}},
            {"completion_tokens": 100, "seconds": 2.5, "e2e_ms": {"p99": 300.0}},
        ],
    }
}


def test_percentiles_lie_between_neighbours_in_proportion() -> None:
    assert percentiles(range(101)) == {"median": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([10.0, 20.0]) == {"median": 15.0, "p95": 19.5, "p99": 19.9}
    assert percentiles([7.0]) == {"median": 7.0, "p95": 7.0, "p99": 7.0}


def test_there_are_no_percentiles_of_nothing() -> None:
    assert percentiles([]) is None


def test_ratios_compare_runs_of_the_same_repeat_with_the_first_side() -> None:
    assert ratios(CELL, "ours", speed) == [0.5, 0.8]
    assert ratios(CELL, "ours", latency("e2e_ms", "p99")) == [0.5, 0.75]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.2, 1.1, 1.3], 1),
        ([0.8, 0.7, 0.9], -1),
        ([1.04, 1.03, 1.02], 0),  # all agree, on too little
        ([0.99, 1.2, 1.3], 0),  # much, but the repeats do not agree
        ([0.5, 0.6, 1.01], 0),
        ([1.0], 0),
    ],
)
def test_a_difference_is_one_when_it_is_large_and_all_repeats_agree(values: list[float], expected: int) -> None:
    assert verdict(values) == expected


def test_fewer_tokens_a_second_are_worse_and_shorter_times_are_better() -> None:
    cells = [("2 callers", CELL)]
    assert in_words(cells, "ours", Measure("tokens/s", speed, is_more_better=True)) == "**worse** with 2 callers × 0.65"
    shorter = Measure("p99", latency("e2e_ms", "p99"))
    assert in_words(cells, "ours", shorter) == "better with 2 callers × 0.62"


def test_losses_come_first_and_nothing_is_left_out() -> None:
    def cell(seconds: float) -> dict:
        return {"runs": {"theirs": [{"seconds": 1.0}], "ours": [{"seconds": seconds}]}}

    cells = [("level", cell(1.0)), ("won", cell(0.5)), ("lost", cell(2.0)), ("lost too", cell(3.0))]
    said = in_words(cells, "ours", Measure("seconds", lambda run: float(run["seconds"])))
    assert said == (
        "**worse** with lost × 2.00, lost too × 3.00; better with won × 0.50; "
        "no difference that lasts with level × 1.00"
    )
