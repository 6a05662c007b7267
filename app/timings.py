"""Stamps in, durations out: the only place that subtracts one time from another.

Two clocks meet here. The service and vLLM's engine core stamp with the monotonic clock
(``time.monotonic``, shared by all processes of a host); vLLM's ``arrival_time`` is wall clock.
Every duration is a difference within the monotonic clock; every ``…_at`` is a monotonic stamp
plus one offset (wall minus monotonic), measured once for each window.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

OFFSET_SAMPLES = 5


def now() -> float:
    """The monotonic clock that all stamps of the service use, in seconds."""
    return time.monotonic()


def elapsed(since: float, until: float | None = None) -> float:
    """Seconds from ``since`` to ``until``, both monotonic; to now when it is None. Never negative."""
    return max(0.0, (now() if until is None else until) - since)


def remaining(since: float, limit_s: float) -> float:
    """Seconds left of ``limit_s`` that began at ``since`` (monotonic seconds); 0 when there are none."""
    return max(0.0, since + limit_s - now())


def wall_offset() -> float:
    """Wall clock minus monotonic clock, in seconds.

    A thread that is interrupted between the two readings reads the monotonic clock too late, which makes
    the difference too small: the largest of a few samples is the best.
    """
    return max(time.time() - time.monotonic() for _ in range(OFFSET_SAMPLES))


@dataclass(slots=True)
class Stamps:
    """When a request passed the service's own points, in seconds of the monotonic clock."""

    received: float
    admitted: float = 0.0
    dispatched: float = 0.0
    completed: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What vLLM's ``RequestStateStats`` says of one request; a stamp of 0 is unknown.

    ``queued`` … ``last_token`` are seconds of the monotonic clock, ``first_token_latency`` is
    in seconds, ``raw`` holds vLLM's own values untouched.
    """

    queued: float
    scheduled: float
    first_token: float
    last_token: float
    first_token_latency: float
    num_generation_tokens: int
    num_preemptions: int
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Engine:
    """vLLM's stamps put in order between dispatch and completion; None is unknown."""

    queued: float | None
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    anomaly: bool


def _in_order(stats: EngineStats, dispatched: float, completed: float) -> _Engine:
    """Clamp each stamp between its neighbours.

    From the end towards the start: vLLM has been known to stamp ``queued`` again after a preemption,
    so of two stamps in the wrong order the earlier event's is the one that is wrong.
    """
    raw = [stats.queued, stats.scheduled, stats.first_token, stats.last_token]
    known: list[float | None] = [stamp if stamp > 0 else None for stamp in raw]
    bound = completed
    for i in reversed(range(len(known))):
        if (stamp := known[i]) is not None:
            bound = known[i] = max(min(stamp, bound), dispatched)
    anomaly = any(k is not None and k != r for k, r in zip(known, raw, strict=True)) or min(raw) < 0
    queued, scheduled, first_token, last_token = known
    return _Engine(queued, scheduled, first_token, last_token, anomaly)


def _ms(start: float | None, end: float | None) -> float | None:
    """The duration from start to end in milliseconds; None where one of them is unknown."""
    return None if start is None or end is None else (end - start) * 1000


def _finite(value: Any) -> Any:
    """The value as it is, unless JSON has no way to write it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(stamps: Stamps, stats: EngineStats | None, *, offset: float, total_tokens: int) -> dict[str, Any]:
    """The ``timings`` object of one answer.

    Args:
        stamps: the service's four stamps.
        stats: vLLM's statistics of the request (with n > 1 those of one child), or None.
        offset: wall clock minus monotonic clock in seconds, that of the window.
        total_tokens: generated tokens of all outputs.

    Returns:
        ``…_at`` in Unix seconds, ``…_ms`` in milliseconds, None for what is unknown.
    """
    preemptions = None if stats is None else stats.num_preemptions
    stats = stats or EngineStats(0, 0, 0, 0, 0, 0, 0)
    received, admitted, dispatched, completed, disorder = _service_in_order(stamps)
    engine = _in_order(stats, dispatched, completed)
    queued, scheduled, first, last = engine.queued, engine.scheduled, engine.first_token, engine.last_token
    decode_ms, inference_ms = _ms(first, last), _ms(scheduled, last)
    tokens = stats.num_generation_tokens
    at = {
        "received_at": received,
        "admitted_at": admitted,
        "dispatched_at": dispatched,
        "queued_at": queued,
        "scheduled_at": scheduled,
        "first_token_at": first,
        "last_token_at": last,
        "completed_at": completed,
    }
    return {
        **{name: None if stamp is None else stamp + offset for name, stamp in at.items()},
        "resolve_ms": _ms(received, admitted),
        "window_wait_ms": _ms(admitted, dispatched),
        "submit_ms": _ms(dispatched, queued),
        "engine_queue_ms": _ms(queued, scheduled),
        "prefill_ms": _ms(scheduled, first),
        "decode_ms": decode_ms,
        "window_tail_ms": _ms(last, completed),
        "e2e_ms": _ms(received, completed),
        "inference_ms": inference_ms,
        "ttft_ms": _ms(received, first),
        "engine_ttft_ms": _finite(stats.first_token_latency * 1000) if stats.first_token_latency > 0 else None,
        "itl_ms": decode_ms / (tokens - 1) if decode_ms is not None and tokens > 1 else None,
        "tokens_per_s": total_tokens / inference_ms * 1000 if inference_ms else None,
        "num_preemptions": preemptions,
        "clock_anomaly": disorder or engine.anomaly,
        "request_state_stats": {name: _finite(value) for name, value in stats.raw.items()} or None,
    }


def _service_in_order(stamps: Stamps) -> tuple[float, float, float, float, bool]:
    """The service's own stamps, each not before the one ahead of it, and whether one had to move."""
    received = stamps.received
    admitted = max(stamps.admitted, received)
    dispatched = max(stamps.dispatched, admitted)
    completed = max(stamps.completed, dispatched)
    moved = (admitted, dispatched, completed) != (stamps.admitted, stamps.dispatched, stamps.completed)
    return received, admitted, dispatched, completed, moved


def render_batch(received: float, completed: float, *, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The ``timings`` object of a whole ``/batch``: stamps in monotonic seconds in, Unix seconds out."""
    offset = wall_offset()
    e2e_ms = (completed - received) * 1000
    return {
        "received_at": received + offset,
        "completed_at": completed + offset,
        "e2e_ms": e2e_ms,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "completion_tokens_per_s": completion_tokens / e2e_ms * 1000 if e2e_ms > 0 else None,
    }
