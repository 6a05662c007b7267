"""What must hold for every real answer."""

from itertools import pairwise
from typing import Any

import pytest

from app.api.schemas import BatchResponse, GenerateResponse

STAMPS = (
    "received_at",
    "admitted_at",
    "dispatched_at",
    "queued_at",
    "scheduled_at",
    "first_token_at",
    "last_token_at",
    "completed_at",
)
NEIGHBOURS = (
    "resolve_ms",
    "window_wait_ms",
    "submit_ms",
    "engine_queue_ms",
    "prefill_ms",
    "decode_ms",
    "window_tail_ms",
)
SPANS = {
    **dict(zip(NEIGHBOURS, pairwise(STAMPS), strict=True)),
    "e2e_ms": ("received_at", "completed_at"),
    "inference_ms": ("scheduled_at", "last_token_at"),
    "ttft_ms": ("received_at", "first_token_at"),
}
SAME_MS = 0.002
"""A Unix time as a float is good to a quarter of a microsecond; two of them and their rounding."""
CLOCKS_MS = 5.0
"""How far the wall clock and the monotonic clock may be taken apart, on a busy machine."""


def same_ms(value: float) -> Any:
    return pytest.approx(value, abs=SAME_MS)


def check_answer(answer: dict[str, Any]) -> None:
    """Shape, usage and timings of a ``/generate`` answer."""
    GenerateResponse.model_validate(answer)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["cached_tokens"] < usage["prompt_tokens"]
    assert [output["index"] for output in answer["outputs"]] == list(range(len(answer["outputs"])))
    if answer["window"]["release"] == "rolling":
        assert answer["window"]["position"] is None
    else:
        assert 0 <= answer["window"]["position"] < answer["window"]["size"]
    assert answer["created"] == int(answer["timings"]["received_at"])
    check_timings(answer["timings"], usage["completion_tokens"], outputs=len(answer["outputs"]))


def check_timings(timings: dict[str, Any], tokens: int, *, outputs: int = 1) -> None:
    """Every formula and order that the service promises, for an answer of ``tokens`` tokens in all."""
    stamps = [timings[name] for name in STAMPS]
    assert None not in stamps
    assert stamps == sorted(stamps)
    for name, (start, end) in SPANS.items():
        assert timings[name] >= 0, name
        assert timings[name] == same_ms((timings[end] - timings[start]) * 1000), name
    assert timings["e2e_ms"] == same_ms(sum(timings[name] for name in NEIGHBOURS))
    assert timings["tokens_per_s"] == pytest.approx(tokens / timings["inference_ms"] * 1000)
    raw = timings["request_state_stats"]
    own = raw["num_generation_tokens"]
    assert own == tokens if outputs == 1 else 0 < own <= tokens
    if own > 1:
        assert timings["itl_ms"] == pytest.approx(timings["decode_ms"] / (own - 1))
    else:
        assert timings["itl_ms"] is None
        assert timings["decode_ms"] == 0
    check_raw(timings, raw)


def check_raw(timings: dict[str, Any], raw: dict[str, Any]) -> None:
    """vLLM's own values against ours."""
    assert timings["engine_ttft_ms"] == pytest.approx(raw["first_token_latency"] * 1000)
    assert timings["num_preemptions"] == raw["num_preemptions"]
    assert timings["decode_ms"] == same_ms((raw["last_token_ts"] - raw["first_token_ts"]) * 1000)
    assert timings["prefill_ms"] == same_ms((raw["first_token_ts"] - raw["scheduled_ts"]) * 1000)
    assert timings["inference_ms"] == same_ms((raw["last_token_ts"] - raw["scheduled_ts"]) * 1000)
    # vLLM's wall clock at the start of rendering, after dispatch and before its queue.
    assert timings["dispatched_at"] - CLOCKS_MS / 1000 <= raw["arrival_time"]
    is_in_order = 0 < raw["queued_ts"] <= raw["scheduled_ts"] <= raw["first_token_ts"] <= raw["last_token_ts"]
    assert timings["clock_anomaly"] is not is_in_order
    if is_in_order:
        assert timings["engine_queue_ms"] == same_ms((raw["scheduled_ts"] - raw["queued_ts"]) * 1000)
        assert raw["arrival_time"] <= timings["queued_at"] + CLOCKS_MS / 1000


def check_between(timings: dict[str, Any], before: float, after: float) -> None:
    """The caller's own readings of the wall clock enclose all stamps."""
    assert before - CLOCKS_MS / 1000 <= timings["received_at"]
    assert timings["completed_at"] <= after + CLOCKS_MS / 1000
    assert timings["e2e_ms"] <= (after - before) * 1000 + CLOCKS_MS


def check_batch(answer: dict[str, Any], total: int) -> list[dict[str, Any]]:
    """Shape, counts and windows of a ``/batch`` answer whose rows have all succeeded; the rows' answers."""
    BatchResponse.model_validate(answer)
    assert [row["index"] for row in answer["results"]] == list(range(total))
    assert answer["counts"] == {"total": total, "succeeded": total, "failed": 0}
    responses = [row["response"] for row in answer["results"]]
    for response in responses:
        check_answer(response)
        assert answer["timings"]["received_at"] <= response["timings"]["received_at"] + CLOCKS_MS / 1000
        assert response["timings"]["completed_at"] <= answer["timings"]["completed_at"] + CLOCKS_MS / 1000
    windows = {response["window"]["id"]: response["window"] for response in responses}
    assert answer["windows"] == [
        {key: windows[number][key] for key in ("id", "size", "release")} for number in sorted(windows)
    ]
    places = [(response["window"]["id"], response["window"]["position"]) for response in responses]
    assert len(set(places)) == total
    for kind in ("prompt_tokens", "completion_tokens"):
        assert answer["timings"][kind] == sum(response["usage"][kind] for response in responses)
    return responses
