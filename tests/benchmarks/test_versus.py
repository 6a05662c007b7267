"""The comparison with vLLM's server: its requests, its orders, and what its page says of a report."""

from typing import Any

import pytest

from app.prompts.openai import CompletionRequest
from benchmarks import guidellm_runs, versus_tables
from benchmarks import versus_vllm_serve as versus


def run_of(seconds: float, is_streamed: bool, is_ours: bool) -> dict[str, Any]:
    times = {"median": 100 * seconds, "p95": 200 * seconds, "p99": 300 * seconds}
    return {
        "requests": 10,
        "completion_tokens": 1000,
        "seconds": seconds,
        "e2e_ms": times,
        "ttft_ms": times if is_streamed else None,
        "own_ttft_ms": {"median": 11.0, "p95": 12.0, "p99": 13.0} if is_ours else None,
    }


def cell_of(callers: int, lengths: str, is_streamed: bool, seconds: float) -> dict[str, Any]:
    return {
        "callers": callers,
        "lengths": lengths,
        "is_streamed": is_streamed,
        "runs": {
            "vllm": [run_of(1.0, is_streamed, is_ours=False)] * 3,
            "service_32": [run_of(seconds, is_streamed, is_ours=True)] * 3,
        },
    }


@pytest.fixture
def result() -> dict[str, Any]:
    """Half as fast as vLLM's server with one caller, twice as fast with 64, and as fast when streamed."""
    cells = [
        cell_of(callers, lengths, is_streamed, 1.0 if is_streamed else seconds)
        for lengths, is_streamed in versus_tables.KINDS
        for callers, seconds in ((1, 2.0), (64, 0.5))
    ]
    guidellm = {
        "version": "0.8.1",
        "streams": 64,
        "batch_size": 64,
        "runs": {side: [run_of(1.0, False, is_ours=False)] * 3 for side in versus_tables.GUIDELLM_SIDES},
    }
    machine = {
        **{"commit": "0" * 40, "date": "2026-01-01 00:00 UTC", "cpu": "cpu", "cores": 2, "memory_gib": 1.0},
        **{"python": "3.11", "versions": {"vllm": "0.32.0"}},
    }
    case = {"name": "made up", "tokens": 16, "cells": cells, "guidellm": guidellm}
    return {"vllm_config": {"max_num_seqs": 128}, "repeats": 3, "cases": [case], "machine": machine}


def test_a_row_shows_rates_times_and_their_ratios_to_vllms_server(result: dict[str, Any]) -> None:
    lines = versus_tables.render(result).splitlines()
    assert "| 64 | vLLM's server | 1,000 (1,000 – 1,000) | 1 | 10.0 | 100 | 200 | 300 | 1 | 1 | 1 |" in lines
    ours = "| 64 | `batch_size` 32 | 2,000 (2,000 – 2,000) | 2.00 | 20.0 | 50 | 100 | 150 | 0.50 | 0.50 | 0.50 |"
    assert lines.count(ours) == 2


def test_the_engines_first_token_stands_beside_the_callers_and_has_no_ratio(result: dict[str, Any]) -> None:
    lines = versus_tables.render(result).splitlines()
    ours = "| 1 | `batch_size` 32 | 100 | 200 | 300 | 1.00 | 1.00 | 1.00 | 11 | 12 | 13 | 100 | 200 | 300 |"
    assert ours in lines
    assert "| 1 | vLLM's server | 100 | 200 | 300 | 1 | 1 | 1 |  |  |  | 100 | 200 | 300 |" in lines


def test_losses_are_told_for_every_measure_and_before_wins(result: dict[str, Any]) -> None:
    lines = versus_tables.findings(result)
    assert len(lines) == 1 + len(versus_tables.MEASURES) + len(versus_tables.STREAMED_MEASURES)
    assert lines[0] == "- made up, `batch_size` 32"
    assert lines[1] == (
        "  - tokens/s: **worse** with 1 caller fixed × 0.50, 1 caller mixed × 0.50; "
        "better with 64 callers fixed × 2.00, 64 callers mixed × 2.00."
    )
    assert "median: **worse** with 1 caller fixed × 2.00" in lines[2]
    assert "first text at the caller, median: no difference that lasts with" in lines[4]


def test_without_guidellm_the_page_has_the_rest(result: dict[str, Any]) -> None:
    assert "GuideLLM 0.8.1" in versus_tables.render(result)
    del result["cases"][0]["guidellm"]
    assert "GuideLLM 0.8.1" not in versus_tables.render(result)


def test_every_case_is_drawn_for_every_number_of_callers(result: dict[str, Any]) -> None:
    drawn = versus_tables.draw(result)
    assert drawn == versus_tables.draw(result)
    for callers in ("1 caller", "64 callers"):
        for lengths in ("fixed", "mixed"):
            assert f"made up, {callers}, {lengths}" in drawn


def test_all_sides_are_asked_the_same_and_each_request_is_one_that_the_service_takes() -> None:
    case = versus.CASES[0]
    fixed = versus.bodies(case, 32, "fixed", is_streamed=False)
    mixed = versus.bodies(case, 32, "mixed", is_streamed=True)
    assert {body["max_tokens"] for body in fixed} == {case.tokens}
    assert len({body["max_tokens"] for body in mixed}) > 3
    assert [body["prompt"] for body in fixed] == [body["prompt"] for body in mixed]
    assert mixed == versus.bodies(case, 32, "mixed", is_streamed=True)
    for body in (*fixed, *mixed):
        assert CompletionRequest.model_validate(body).ignore_eos


def test_the_first_order_begins_with_a_service_and_no_side_is_always_first() -> None:
    names = list(versus_tables.SIDES)
    orders = [versus.order(names, repeat) for repeat in range(4)]
    assert orders[0][0] != versus_tables.VLLM
    assert all(sorted(turn) == sorted(names) for turn in orders)
    assert len({turn[0] for turn in orders}) >= 3
    assert orders[1] == orders[0][::-1]


def test_a_service_with_another_engine_is_refused() -> None:
    class Service:
        info: dict[str, Any] = {"versions": {}, "settings": {}}  # noqa: RUF012
        engine_environment: dict[str, str] = {}  # noqa: RUF012

        def __init__(self, dtype: str) -> None:
            self.engine_args = {"dtype": dtype}

    engine = versus.Engine()
    engine.learn(versus.QUICK[0], "service_32", Service("bfloat16"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="two engines"):
        engine.learn(versus.QUICK[0], "service_64", Service("float32"))  # type: ignore[arg-type]


def test_no_answer_of_a_case_is_as_long_as_guidellms_warm_up() -> None:
    for case in versus.CASES:
        lengths = {body["max_tokens"] for body in versus.bodies(case, versus.STREAMS, "mixed", is_streamed=False)}
        assert guidellm_runs.WARM_UP_TOKENS not in lengths


def test_a_case_streams_only_what_it_measures_without_streams_too() -> None:
    for case in (*versus.CASES, *versus.QUICK):
        assert set(case.streamed) <= case.requests.keys()
