"""The comparison of the backends: what is measured, what is kept of a run, and what its page says of a report."""

from typing import Any

import pytest

from benchmarks import backends, backends_tables, client, guidellm_runs
from benchmarks import versus_vllm_serve as versus

SIDES = ("vllm", "offline_64", "python")


def run_of(side: str, kind: str) -> dict[str, Any]:
    """vLLM's server needs a second; the offline backend two, and sends its text at the end; the other half a second."""
    seconds = {"vllm": 1.0, "offline_64": 2.0, "python": 0.5}[side]
    times = {"median": 100 * seconds, "p95": 200 * seconds, "p99": 300 * seconds}
    is_streamed = kind == "streamed"
    return {
        "requests": 10,
        "completion_tokens": 1000,
        "seconds": seconds,
        "e2e_ms": times,
        "ttft_ms": times if is_streamed else None,
        "itl_ms": times if is_streamed and side != "offline_64" else None,
    }


def cell_of(kind: str, callers: int, lengths: str = "mixed") -> dict[str, Any]:
    runs = {side: [run_of(side, kind)] * 3 for side in SIDES}
    return {"kind": kind, "callers": callers, "lengths": lengths, "runs": runs}


@pytest.fixture
def result() -> dict[str, Any]:
    guidellm = {side: [run_of(side, "streamed")] * 3 for side in SIDES}
    for run in guidellm["offline_64"]:
        run["itl_ms"] = {"median": 0.0, "p95": 0.0, "p99": 0.0}
    case = {
        "name": "made up",
        "tokens": 16,
        "cells": [cell_of("plain", 1, "fixed"), cell_of("plain", 64), cell_of("streamed", 64), cell_of("batch", 256)],
        "costs": {side: {"start_s": [10.0, 11.0, 12.0], "memory_mib": [1000, 1100, 1200]} for side in SIDES},
        "guidellm": {"version": "0.8.1", "streams": 32, "runs": guidellm},
    }
    machine = {
        **{"commit": "0" * 40, "date": "2026-01-01 00:00 UTC", "cpu": "cpu", "cores": 2, "memory_gib": 1.0},
        **{"python": "3.11", "versions": {"vllm": "0.32.0"}},
    }
    return {"vllm_config": {"max_num_seqs": 64}, "repeats": 3, "cases": [case], "machine": machine}


def test_throughput_is_a_share_of_vllms_servers(result: dict[str, Any]) -> None:
    lines = backends_tables.render(result).splitlines()
    shares = "| 10 | 1,000 (1,000 – 1,000) | 10.0 | 0.50 (0.50 – 0.50) | 2.00 (2.00 – 2.00) |"
    for where in ("fixed | 1", "mixed | 64", "mixed | 256 at once, ours as one `/batch`"):
        assert f"| made up | {where} {shares}" in lines


def test_streams_have_first_text_and_times_between_texts_with_their_shares(result: dict[str, Any]) -> None:
    lines = backends_tables.render(result).splitlines()
    row = "| made up | 64 | `vllm_python`, 64 | 50.0 | 100 | 0.50 | 0.50 | 50.0 | 100 | 0.50 | 0.50 | 2,000 | 2.00 |"
    assert row in lines
    assert "| made up | 64 | vLLM's server | 100 | 200 | 1 | 1 | 100 | 200 | 1 | 1 | 1,000 | 1 |" in lines


def test_a_text_in_one_piece_has_nothing_between(result: dict[str, Any]) -> None:
    lines = backends_tables.render(result).splitlines()
    assert "| made up | 64 | `vllm_offline`, 64 | 200 | 400 | 2.00 | 2.00 | – | – | – | – | 500 | 0.50 |" in lines
    guidellm = "| made up | `vllm_offline`, 64 | 200 | 400 | 2.00 | 2.00 | – | – | – | – | 200 | 400 | 2.00 | 2.00 |"
    assert guidellm in lines


def test_start_and_memory_are_told_of_every_side(result: dict[str, Any]) -> None:
    lines = backends_tables.render(result).splitlines()
    for side in SIDES:
        costs = "11.0 (10.0 – 12.0) | 1,100 (1,000 – 1,200)"
        assert f"| made up | {backends_tables.SIDES[side]} | {costs} |" in lines


def test_findings_leave_out_what_a_side_does_not_have(result: dict[str, Any]) -> None:
    lines = backends_tables.findings(result)
    at = lines.index("- made up, `vllm_python`, 64")
    assert lines[:at] == [
        "- made up, `vllm_offline`, 64",
        "  - tokens/s: **worse** with 1 caller fixed × 0.50, 64 callers mixed × 0.50, a batch of 256 × 0.50.",
        "  - first text, median: **worse** with 64 callers × 2.00.",
    ]
    assert lines[at + 2 :] == [
        "  - first text, median: better with 64 callers × 0.50.",
        "  - between texts, median: better with 64 callers × 0.50.",
        "  - between texts, p95: better with 64 callers × 0.50.",
    ]


def test_without_guidellm_the_page_has_the_rest(result: dict[str, Any]) -> None:
    assert "GuideLLM" in backends_tables.render(result)
    result["cases"][0]["guidellm"] = None
    assert "GuideLLM" not in backends_tables.render(result)


def test_every_throughput_is_drawn_with_the_same_bytes_each_time(result: dict[str, Any]) -> None:
    drawn = backends_tables.draw(result)
    assert drawn == backends_tables.draw(result)
    for name in ("1 caller fixed", "64 callers mixed", "a batch of 256"):
        assert f"made up, {name}" in drawn


def test_a_case_is_measured_plain_streamed_and_as_a_batch_with_room_for_every_side() -> None:
    for case in (*backends.CASES, *backends.QUICK):
        cells = list(backends.cells_of(case))
        assert {cell["kind"] for cell in cells} == {"plain", "streamed", "batch"}
        assert all(tuple(cell["runs"]) == case.sides and case.sides[0] == "vllm" for cell in cells)
        assert {cell["callers"] for cell in cells} == case.requests.keys()
        assert set(case.guidellm_sides) <= set(case.sides)


def test_each_round_begins_with_another_side() -> None:
    turns = [versus.order(backends.CASES[0].sides, turn)[0] for turn in range(8)]
    assert set(turns) == set(backends.CASES[0].sides)


def test_all_sides_have_as_many_sequences_in_the_engine() -> None:
    assert backends.VLLM_CONFIG["max_num_seqs"] == backends.MAX_NUM_SEQS == 64
    assert backends.OPTIONS["python"][-1] == "64"


def test_times_between_texts_are_those_of_all_requests_together() -> None:
    answers = [client.Answer(50.0, 10.0, 4, None, (1.0, 2.0, 3.0)), client.Answer(60.0, 10.0, 2, None, (6.0,))]
    kept = backends.summary(client.Run(1.0, answers))
    assert kept["itl_ms"]["median"] == 2.5
    assert (kept["chunks"], kept["completion_tokens"], kept["ttft_ms"]["median"]) == (6, 6, 10.0)


def test_guidellms_records_are_kept_under_the_same_names() -> None:
    record = {"output_tokens": 8, "request_start_time": 1.0, "request_end_time": 3.0, "request_latency": 2.0}
    records = [{**record, "time_to_first_token_ms": 20.0, "inter_token_latency_ms": 5.0}]
    kept = backends.guidellm_summary(records)
    assert (kept["e2e_ms"]["median"], kept["ttft_ms"]["p95"], kept["itl_ms"]["median"]) == (2000.0, 20.0, 5.0)
    assert kept["seconds"] == 2.0


def test_no_answer_of_a_case_is_as_long_as_guidellms_warm_up() -> None:
    for case in backends.CASES:
        lengths = {body["max_tokens"] for body in versus.bodies(case, backends.STREAMS, "mixed", is_streamed=False)}
        assert guidellm_runs.WARM_UP_TOKENS not in lengths
