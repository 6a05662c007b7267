"""Answers: from what the engine gave to the bytes on the wire."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app import timings
from app.errors import ServiceError
from app.metrics import Metrics
from app.prompts.spec import GenerateRequest
from app.request import Answer

PIECE_BYTES = 64 << 10
LARGE_LOGPROBS = 4000
"""Entries of logprobs in one answer, from which it is written on another thread."""


class JsonResponse(Response):
    """Encoded JSON, sent in pieces, so that a slow reader slows the sending down and "sent" means nearly received.

    Args:
        parts: the body, whole or in parts that are not put together: it may be large.
        status: the HTTP status.
        headers: further headers.
    """

    media_type = "application/json"

    def __init__(self, parts: bytes | list[bytes], status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._parts = [parts] if isinstance(parts, bytes) else parts
        length = sum(len(part) for part in self._parts)
        whole = self._parts[0] if len(self._parts) == 1 else b""
        super().__init__(whole, status, {**(headers or {}), "content-length": str(length)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and the body. uvicorn waits for the reader at the start of a send: the last one is empty."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        is_short = sum(map(len, self._parts)) <= PIECE_BYTES
        for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": not is_short})
        if not is_short:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self) -> Iterator[bytes]:
        """The body in pieces of about ``PIECE_BYTES``: short parts together, long ones cut."""
        gathered = b""
        for part in self._parts:
            if len(gathered) + len(part) > PIECE_BYTES:
                yield gathered
                gathered = b""
            if len(part) <= PIECE_BYTES:
                gathered += part
                continue
            for start in range(0, len(part), PIECE_BYTES):
                yield part[start : start + PIECE_BYTES]
        yield gathered


def generate_answer(answer: Answer, body: GenerateRequest, model: str, metrics: Metrics) -> dict[str, Any]:
    """The `/generate` answer as plain values; counts tokens and times on the way."""
    request, generation = answer.request, answer.generation
    completion_tokens = generation.completion_tokens
    times = _times(answer, metrics)
    return {
        "id": request.id,
        "request_id": body.request_id,
        "model": model,
        "created": int(times["received_at"]),
        "outputs": [
            {
                "index": output.index,
                "text": output.text,
                "token_ids": output.token_ids if body.return_token_ids else None,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "logprobs": output.logprobs,
            }
            for output in generation.outputs
        ],
        "prompt_logprobs": generation.prompt_logprobs,
        "usage": {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": request.prompt_tokens + completion_tokens,
            "cached_tokens": generation.cached_tokens,
        },
        "sampling": request.resolved.sampling,
        "timings": times,
        "window": _window(answer),
    }


VLLM_METRICS = {
    "time_to_first_token_ms": "prefill_ms",
    "queue_time_ms": "engine_queue_ms",
    "generation_time_ms": "decode_ms",
    "mean_itl_ms": "itl_ms",
    "tokens_per_second": "tokens_per_s",
}
"""What vLLM's server says of a request, under its names, and which timing that is; its TTFT begins with scheduling."""


def openai_metrics(answers: Sequence[Answer], metrics: Metrics) -> dict[str, Any]:
    """The `metrics` of an OpenAI answer: the first prompt's; with several, all of them under `requests`."""
    each = [_openai_metrics(answer, metrics) for answer in answers]
    return each[0] if len(each) == 1 else {**each[0], "requests": each}


def _openai_metrics(answer: Answer, metrics: Metrics) -> dict[str, Any]:
    """vLLM's, which say nothing of several outputs; and the service's own."""
    times, is_one = _times(answer, metrics), len(answer.generation.outputs) == 1
    vllm = {name: times[timing] if is_one else None for name, timing in VLLM_METRICS.items()}
    return {**vllm, "timings": times, "window": _window(answer)}


def _window(answer: Answer) -> dict[str, Any] | None:
    return None if answer.window is None else answer.window.describe(answer.position)


def _times(answer: Answer, metrics: Metrics) -> dict[str, Any]:
    """The timings of a request, which is counted with them."""
    request, generation, window = answer.request, answer.generation, answer.window
    times = timings.render(
        request.stamps,
        generation.stats,
        offset=timings.wall_offset() if window is None else window.offset,
        total_tokens=generation.completion_tokens,
    )
    _count(metrics, times, request.prompt_tokens, generation.completion_tokens, generation.cached_tokens)
    return times


def _count(metrics: Metrics, times: dict[str, Any], prompt: int, completion: int, cached: int | None) -> None:
    metrics.e2e.observe(times["e2e_ms"] / 1000)
    if times["ttft_ms"] is not None:
        metrics.ttft.observe(times["ttft_ms"] / 1000)
    for kind, count in (("prompt", prompt), ("completion", completion), ("cached", cached or 0)):
        metrics.tokens.labels(kind).inc(count)


def batch_row(index: int, response: dict[str, Any] | None, error: ServiceError | None) -> dict[str, Any]:
    """One row of a `/batch` answer."""
    status = 200 if error is None else error.status
    return {
        "index": index,
        "status": status,
        "response": response,
        "error": None if error is None else error.body(),
    }


def batch_rest(
    batch_id: str, label: str | None, model: str, received: float, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What a `/batch` answer holds beside its rows."""
    responses = [row["response"] for row in rows if row["response"] is not None]
    shown = [response["window"] for response in responses if response["window"]]
    windows = {window["id"]: window for window in shown if window["release"] != "rolling"}  # there each row has its own
    times = timings.render_batch(
        received,
        timings.now(),
        prompt_tokens=sum(response["usage"]["prompt_tokens"] for response in responses),
        completion_tokens=sum(response["usage"]["completion_tokens"] for response in responses),
    )
    return {
        "id": batch_id,
        "request_id": label,
        "model": model,
        "created": int(times["received_at"]),
        "counts": {"total": len(rows), "succeeded": len(responses), "failed": len(rows) - len(responses)},
        "windows": [
            {key: windows[window_id][key] for key in ("id", "size", "release")} for window_id in sorted(windows)
        ],
        "timings": times,
    }


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Any) -> bytes:
    """Strict JSON: no NaN, no infinity."""
    return _ENCODER.encode(value).encode()


async def encode_answer(value: dict[str, Any]) -> bytes:
    """The same for a `/generate` answer or a row of a batch, which may be large."""
    return await encode_off_loop(value, _logprob_entries(value))


async def encode_off_loop(value: dict[str, Any], logprob_entries: int) -> bytes:
    """The same without holding the event loop over a large answer.

    ``iterencode`` is the standard library's encoder in Python, in which other threads get their turn.
    """
    if logprob_entries < LARGE_LOGPROBS:
        return encode(value)
    return await asyncio.to_thread(lambda: "".join(_ENCODER.iterencode(value)).encode())


def _logprob_entries(value: dict[str, Any]) -> int:
    response = value.get("response", value)
    if response is None:
        return 0
    lists = [response["prompt_logprobs"], *(output["logprobs"] for output in response["outputs"])]
    return sum(len(entries) * (1 + len(entries[-1]["top"])) for entries in lists if entries and entries[-1])
