"""vLLM's outputs as plain values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from app import timings
from app.errors import GenerationFailed
from app.request import Generation, Output, Request

FINISH_REASONS = ("stop", "length")


def to_generation(output: Any, request: Request) -> Generation | Exception:
    """The plain values of vLLM's ``RequestOutput``; an undocumented end is an error of this request."""
    is_shaped_later = request.resolved.origin is not None
    good = (*FINISH_REASONS, "repetition") if is_shaped_later else FINISH_REASONS
    bad = [part.finish_reason for part in output.outputs if part.finish_reason not in good]
    if bad or len(output.outputs) != request.places or not output.finished:
        return GenerationFailed(f"generation ended as {bad[0] if bad else 'incomplete'!r}")
    output.outputs.sort(key=lambda part: part.index)
    params = request.resolved.params
    logprobs, prompt_logprobs = (None, None) if is_shaped_later else (params.logprobs, params.prompt_logprobs)
    return Generation(
        outputs=[_to_output(part, logprobs) for part in output.outputs],
        prompt_logprobs=_logprob_list(output.prompt_logprobs, output.prompt_token_ids, prompt_logprobs),
        cached_tokens=output.num_cached_tokens,
        stats=None if output.metrics is None else to_stats(output.metrics),
        raw=output if is_shaped_later else None,
    )


def _to_output(part: Any, logprobs: int | None) -> Output:
    ids = list(part.token_ids)
    return Output(
        part.index,
        part.text,
        ids,
        part.finish_reason,
        part.stop_reason,
        _logprob_list(part.logprobs, ids, logprobs),
    )


def to_stats(stats: Any) -> timings.EngineStats:
    """What the timings need of vLLM's ``RequestStateStats``."""
    return timings.EngineStats(
        queued=stats.queued_ts,
        scheduled=stats.scheduled_ts,
        first_token=stats.first_token_ts,
        last_token=stats.last_token_ts,
        first_token_latency=stats.first_token_latency,
        num_generation_tokens=stats.num_generation_tokens,
        num_preemptions=stats.num_preemptions,
        raw=dataclasses.asdict(stats),
    )


def _logprob_list(positions: Any, ids: Sequence[int], count: int | None) -> list[Any] | None:
    """One entry a token: the token itself, and the ``count`` likeliest ones beside it by rank."""
    if positions is None or count is None:
        return None
    return [
        _logprob_entry(position, token, count) if position else None
        for position, token in zip(positions, ids, strict=False)
    ]


def _logprob_entry(position: dict[int, Any], token: int, count: int) -> dict[str, Any]:
    ranked = sorted(position.items(), key=lambda item: math.inf if item[1].rank is None else item[1].rank)
    return {**_logprob(token, position[token]), "top": [_logprob(*item) for item in ranked[:count]]}


def _logprob(token: int, logprob: Any) -> dict[str, Any]:
    value = logprob.logprob
    return {
        "token_id": token,
        "token": logprob.decoded_token,
        "logprob": value if math.isfinite(value) else None,
        "rank": logprob.rank,
    }
