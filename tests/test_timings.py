"""Stamps in, durations out: what holds for any stamps, and a table of what engines have been seen to report."""

import itertools
import json
import math
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import timings
from app.timings import EngineStats, Stamps, render

SERVICE_AT = ("received_at", "admitted_at", "dispatched_at", "completed_at")
ALL_AT = (*SERVICE_AT[:3], "queued_at", "scheduled_at", "first_token_at", "last_token_at", "completed_at")
SEVEN = ("resolve_ms", "window_wait_ms", "submit_ms", "engine_queue_ms", "prefill_ms", "decode_ms", "window_tail_ms")
DURATIONS = (*SEVEN, "e2e_ms", "inference_ms", "ttft_ms", "engine_ttft_ms", "itl_ms", "tokens_per_s")
STAMPS = Stamps(received=100.0, admitted=100.002, dispatched=100.010, completed=101.0)


def stats(
    queued: float = 100.012,
    scheduled: float = 100.020,
    first_token: float = 100.1,
    last_token: float = 100.9,
    **more: Any,
) -> EngineStats:
    others = {"first_token_latency": 0.09, "num_generation_tokens": 5, "num_preemptions": 0}
    return EngineStats(queued, scheduled, first_token, last_token, **{**others, **more})


def timed(engine: EngineStats | None, *, stamps: Stamps = STAMPS, offset: float = 1.7e9, total: int = 5) -> dict:
    return render(stamps, engine, offset=offset, total_tokens=total)


def known(times: dict[str, Any], names: tuple[str, ...]) -> list[float]:
    return [times[name] for name in names if times[name] is not None]


# --- the reading example ---


def test_a_request_is_told_where_its_second_went() -> None:
    times = timed(stats())

    assert {name: round(times[name], 3) for name in SEVEN} == {
        "resolve_ms": 2.0,  # received → admitted
        "window_wait_ms": 8.0,  # → dispatched
        "submit_ms": 2.0,  # → queued
        "engine_queue_ms": 8.0,  # → scheduled
        "prefill_ms": 80.0,  # → first token
        "decode_ms": 800.0,  # → last token
        "window_tail_ms": 100.0,  # → completed
    }
    assert times["e2e_ms"] == pytest.approx(1000)
    assert times["ttft_ms"] == pytest.approx(100)
    assert times["inference_ms"] == pytest.approx(880)
    assert times["engine_ttft_ms"] == pytest.approx(90)
    assert times["itl_ms"] == pytest.approx(800 / 4)
    assert times["tokens_per_s"] == pytest.approx(5 / 0.88)
    assert times["received_at"] == 1.7e9 + 100.0
    assert times["clock_anomaly"] is False


# --- what always holds ---

moments = st.floats(0, 100_000, allow_subnormal=False)
wild = st.one_of(
    moments,
    st.sampled_from([0.0, -0.0, -1.0, 1.8e9, -1.8e9, math.nan, math.inf, -math.inf, 1e308, 5e-324]),
    st.floats(),
)
any_stamps = st.builds(Stamps, moments, moments, moments, moments)
any_stats = st.builds(
    EngineStats, wild, wild, wild, wild, wild, st.integers(0, 10_000), st.integers(0, 9), st.just({"queued_ts": 1.5})
)


at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine with other work to do is no reason to fail."""


@at_leisure
@given(any_stamps, st.none() | any_stats, st.floats(-1e9, 2e9), st.integers(0, 10**6))
def test_whatever_is_stamped_the_answer_is_strict_json_ordered_and_never_negative(
    stamps: Stamps, engine: EngineStats | None, offset: float, total: int
) -> None:
    times = render(stamps, engine, offset=offset, total_tokens=total)

    assert json.loads(json.dumps(times, allow_nan=False)) == times
    ordered = known(times, ALL_AT)
    assert ordered == sorted(ordered)
    assert all(value >= 0 for value in known(times, DURATIONS))
    assert all(times[name] is not None for name in SERVICE_AT)


@at_leisure
@given(any_stamps, any_stats)
def test_durations_between_two_moments_never_pass_the_whole(stamps: Stamps, engine: EngineStats) -> None:
    times = render(stamps, engine, offset=0, total_tokens=1)

    longest = times["e2e_ms"] + 1e-3
    assert all(value <= longest for value in known(times, (*SEVEN, "inference_ms", "ttft_ms")))


@at_leisure
@given(any_stamps, st.lists(moments.filter(bool), min_size=4, max_size=4))
def test_the_seven_durations_sum_to_the_whole_when_all_are_known(stamps: Stamps, engine: list[float]) -> None:
    times = render(stamps, stats(*engine), offset=0, total_tokens=5)

    assert math.fsum(times[name] for name in SEVEN) == pytest.approx(times["e2e_ms"], abs=1e-3)


@at_leisure
@given(st.lists(st.floats(1e-3, 100_000), min_size=8, max_size=8).map(sorted))
def test_stamps_in_order_are_no_anomaly_and_are_told_as_they_are(moments: list[float]) -> None:
    received, admitted, dispatched, queued, scheduled, first, last, completed = moments
    times = render(
        Stamps(received, admitted, dispatched, completed),
        stats(queued, scheduled, first, last),
        offset=1e9,
        total_tokens=5,
    )

    assert times["clock_anomaly"] is False
    assert [times[name] for name in ALL_AT] == [moment + 1e9 for moment in moments]
    assert times["ttft_ms"] == (first - received) * 1000


@at_leisure
@given(any_stamps, any_stats, st.floats(-2e9, 2e9), st.floats(-2e9, 2e9))
def test_a_step_of_the_wall_clock_changes_no_duration(
    stamps: Stamps, engine: EngineStats, before: float, after: float
) -> None:
    one, two = (render(stamps, engine, offset=offset, total_tokens=9) for offset in (before, after))

    assert {name: one[name] for name in DURATIONS} == {name: two[name] for name in DURATIONS}
    assert one["clock_anomaly"] == two["clock_anomaly"]


# --- what engines have been seen to report ---


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        pytest.param(
            stats(queued=100.5, scheduled=100.02, num_preemptions=1),
            {"engine_queue_ms": 0, "num_preemptions": 1, "clock_anomaly": True},
            id="queued again after a preemption",
        ),
        pytest.param(
            stats(queued=0, scheduled=0, first_token=0, last_token=0, first_token_latency=0, num_generation_tokens=0),
            dict.fromkeys([*SEVEN[2:], "ttft_ms", "inference_ms", "engine_ttft_ms", "itl_ms", "tokens_per_s"]),
            id="never stamped: unknown, not zero",
        ),
        pytest.param(
            stats(queued=0),
            {"queued_at": None, "submit_ms": None, "engine_queue_ms": None, "clock_anomaly": False},
            id="one stamp unknown",
        ),
        pytest.param(
            stats(first_token=0),
            {"first_token_at": None, "prefill_ms": None, "decode_ms": None, "ttft_ms": None, "itl_ms": None},
            id="no first token",
        ),
        pytest.param(stats(queued=-3.0), {"clock_anomaly": True}, id="a negative stamp"),
        pytest.param(
            stats(queued=50.0), {"submit_ms": 0, "clock_anomaly": True}, id="queued before it was sent to the engine"
        ),
        pytest.param(
            stats(last_token=200.0), {"window_tail_ms": 0, "clock_anomaly": True}, id="a last token after the end"
        ),
        pytest.param(
            stats(first_token=100.95, last_token=100.9),
            {"decode_ms": 0, "itl_ms": 0, "clock_anomaly": True},
            id="first and last token in the wrong order",
        ),
        pytest.param(
            stats(first_token=100.1, last_token=100.1, num_generation_tokens=1),
            {"itl_ms": None, "decode_ms": 0, "clock_anomaly": False},
            id="one token has no latency between tokens",
        ),
        pytest.param(
            stats(first_token=100.02, last_token=100.02),
            {"inference_ms": 0, "tokens_per_s": None},
            id="a rate over no time is unknown",
        ),
        pytest.param(
            stats(first_token_latency=-5.0), {"engine_ttft_ms": None}, id="a latency across a step of the wall clock"
        ),
        pytest.param(stats(first_token_latency=math.nan), {"engine_ttft_ms": None}, id="a latency that is no number"),
    ],
)
def test_odd_statistics(engine: EngineStats, expected: dict[str, Any]) -> None:
    times = timed(engine)

    assert {name: times[name] for name in expected} == expected
    assert times["e2e_ms"] == pytest.approx(1000)


@pytest.mark.parametrize("field", ["queued", "scheduled", "first_token", "last_token"])
def test_a_wall_clock_among_monotonic_stamps_gives_no_absurd_number(field: str) -> None:
    times = timed(stats(**{field: 1.8e9}))

    assert times["clock_anomaly"] is True
    assert all(0 <= value <= 1000 + 1e-6 for value in known(times, (*SEVEN, "inference_ms", "ttft_ms", "itl_ms")))


def test_the_engines_own_values_are_handed_on_untouched() -> None:
    raw = {"arrival_time": 1.8e9, "queued_ts": 505.75, "num_generation_tokens": 5}

    assert timed(stats(queued=505.75, raw=raw))["request_state_stats"] == raw


def test_without_statistics_nothing_about_the_engine_is_known() -> None:
    times = timed(None)

    service = {*SERVICE_AT, "resolve_ms", "window_wait_ms", "e2e_ms", "clock_anomaly"}
    assert {name for name, value in times.items() if value is not None} == service


def test_with_several_outputs_the_rate_counts_all_tokens_and_the_latency_one_childs() -> None:
    times = timed(stats(num_generation_tokens=5), total=20)

    assert times["itl_ms"] == pytest.approx(800 / 4)
    assert times["tokens_per_s"] == pytest.approx(20 / 0.88)


def test_what_the_caller_felt_is_not_less_than_what_the_engine_measured() -> None:
    times = timed(stats(first_token_latency=100.1 - 100.012))

    assert times["ttft_ms"] >= times["engine_ttft_ms"]


@pytest.mark.parametrize("name", ["admitted", "dispatched", "completed"])
def test_a_stamp_of_the_service_out_of_order_is_clamped_and_flagged(name: str) -> None:
    stamps = Stamps(100.0, 100.002, 100.01, 101.0)
    setattr(stamps, name, 99.0)

    times = timed(stats(), stamps=stamps)

    assert times["clock_anomaly"] is True
    assert all(value >= 0 for value in known(times, SEVEN))


# --- the clocks themselves ---


def test_the_offset_brings_a_monotonic_stamp_to_the_wall_clock() -> None:
    before = time.time()
    moment = timings.now() + timings.wall_offset()

    assert before - 0.05 <= moment <= time.time() + 0.05


@pytest.mark.parametrize("reading", range(10))
def test_an_interruption_between_two_readings_does_not_spoil_the_offset(
    monkeypatch: pytest.MonkeyPatch, reading: int
) -> None:
    true_time = itertools.accumulate(3.0 if count == reading else 0.0 for count in range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(true_time))
    monkeypatch.setattr(time, "time", lambda: next(true_time) + 1000)

    offset = timings.wall_offset()
    monkeypatch.undo()

    assert offset == 1000


def test_a_batch_is_timed_as_a_whole() -> None:
    received = timings.now() - 2

    times = timings.render_batch(received, received + 2, prompt_tokens=30, completion_tokens=100)

    assert times["e2e_ms"] == pytest.approx(2000)
    assert times["completion_tokens_per_s"] == pytest.approx(50)
    assert times["completed_at"] == pytest.approx(time.time(), abs=0.5)


def test_a_batch_that_took_no_time_has_no_rate() -> None:
    times = timings.render_batch(5.0, 5.0, prompt_tokens=1, completion_tokens=1)

    assert times["completion_tokens_per_s"] is None
