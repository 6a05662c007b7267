"""Plain values to and from vLLM: a request as its prompt, its outputs as a generation."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from app import timings
from app.errors import GenerationFailed
from app.request import Generation, Output, Request, Resolved

FINISH_REASONS = ("stop", "length")


def to_prompt(resolved: Resolved) -> dict[str, Any]:
    """The prompt as vLLM's engines take it, rendered: vLLM's ``EngineInput``."""
    salt = {} if resolved.cache_salt is None else {"cache_salt": resolved.cache_salt}
    rendered = resolved.rendered or {"type": "token", "prompt_token_ids": resolved.prompt_token_ids}
    return {**rendered, **salt}


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


class Parts:
    """The parts of a streamed output put together; they have gone out already."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._ends: dict[int, tuple[Any, Any]] = {}
        self._last: Any = None
        self._cached_tokens: int | None = None

    def add(self, output: Any) -> None:
        """One more of vLLM's ``RequestOutput``, with what is new in it."""
        if self._last is None:
            self._cached_tokens = output.num_cached_tokens
        self._last = output
        for part in output.outputs:
            self._ids.setdefault(part.index, []).extend(part.token_ids)
            self._texts[part.index] = self._texts.get(part.index, "") + part.text
            if part.finish_reason is not None:
                self._ends[part.index] = (part.finish_reason, part.stop_reason)

    def rest(self, output: Any) -> Any:
        """Of the whole output of a second run: what has not gone out yet; None when it says something else."""
        output.outputs = [part for part in output.outputs if part.index not in self._ends]
        for part in output.outputs:
            ids, text = self._ids.get(part.index, []), self._texts.get(part.index, "")
            if list(part.token_ids[: len(ids)]) != ids or not part.text.startswith(text):
                return None
            part.token_ids, part.text = part.token_ids[len(ids) :], part.text[len(text) :]
            part.logprobs = part.logprobs and part.logprobs[len(ids) :]
        return output

    def generation(self, request: Request) -> Generation | Exception:
        """What they were the parts of; an undocumented end is an error of this request."""
        bad = [reason for reason, _ in self._ends.values() if reason not in (*FINISH_REASONS, "repetition")]
        if bad or len(self._ends) != request.places:
            return GenerationFailed(f"generation ended as {bad[0] if bad else 'incomplete'!r}")
        outputs = [Output(index, "", self._ids[index], *ends, None) for index, ends in sorted(self._ends.items())]
        stats = None if self._last.metrics is None else to_stats(self._last.metrics)
        return Generation(outputs, None, self._cached_tokens, stats)


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
