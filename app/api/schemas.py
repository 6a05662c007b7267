"""The shapes of answers, for the OpenAPI file and for tests; bodies are in ``app.prompts.spec``."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.prompts.spec import BatchDefaults, GenerateRequest


class Wire(BaseModel):
    """An answer: no field beyond those documented."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(BaseModel):
    """What went wrong. Some codes carry more: `limit`, `queue_depth`, `prompt_tokens`."""

    model_config = ConfigDict(extra="allow")

    message: str = Field(description="For a person.")
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    code: str = Field(description="For a program.", examples=["invalid_request"])
    param: str | None = Field(description="Path of the field at fault.", examples=["messages.0.content"])
    limit: int | None = Field(None, description="The bound that was passed, in the unit the message names.")
    queue_depth: int | None = Field(None, description="What the queue held, in the unit of `limit`.")
    prompt_tokens: int | None = Field(None, description="Length of the prompt in tokens.")


class ErrorBody(Wire):
    """The body of every error, on every route."""

    error: ErrorObject


class TopLogprob(Wire):
    """One of the likeliest tokens at a position."""

    token_id: int
    token: str | None
    logprob: float | None = Field(description="Natural logarithm; `null` is minus infinity.")
    rank: int | None = Field(description="1 is the likeliest.")


class TokenLogprob(TopLogprob):
    """A token that was generated, or stood in the prompt, and the likeliest ones beside it."""

    top: list[TopLogprob]


class GeneratedOutput(Wire):
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int] | None = Field(description="With `return_token_ids`.")
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = Field(description="The stop string or stop token id that ended it.")
    logprobs: list[TokenLogprob] | None = Field(description="One entry a token, with `logprobs`.")


class Usage(Wire):
    """Tokens, counted from the engine's ids."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None = Field(description="Prompt tokens taken from the prefix cache.")


class Timings(Wire):
    """`…_at`: Unix seconds. `…_ms`: milliseconds. `null`: unknown. See the README for the formulas."""

    received_at: float
    admitted_at: float
    dispatched_at: float
    queued_at: float | None
    scheduled_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    completed_at: float
    resolve_ms: float = Field(description="admitted - received")
    window_wait_ms: float = Field(description="dispatched - admitted")
    submit_ms: float | None = Field(description="queued - dispatched")
    engine_queue_ms: float | None = Field(description="scheduled - queued")
    prefill_ms: float | None = Field(description="first_token - scheduled")
    decode_ms: float | None = Field(description="last_token - first_token")
    window_tail_ms: float | None = Field(description="completed - last_token: what longer neighbours cost")
    e2e_ms: float = Field(description="completed - received: the sum of the seven above")
    inference_ms: float | None = Field(description="last_token - scheduled")
    ttft_ms: float | None = Field(description="first_token - received")
    engine_ttft_ms: float | None = Field(description="vLLM's first_token_latency")
    itl_ms: float | None = Field(description="decode / (tokens - 1); null for fewer than two tokens")
    tokens_per_s: float | None = Field(description="generated tokens of all outputs / inference, per second")
    num_preemptions: int | None
    clock_anomaly: bool = Field(description="A stamp was out of order and was clamped to its neighbour.")
    request_state_stats: dict[str, Any] | None = Field(description="vLLM's own values, untouched.")


class WindowInfo(Wire):
    """The window that a request ran in."""

    id: int
    size: int = Field(description="Requests in it.")
    position: int | None = Field(description="Place within it, from 0.")
    release: Literal["full", "max_wait", "drain"] = Field(description="Why it went.")


class GenerateResponse(Wire):
    """The answer to one request."""

    id: str = Field(examples=["gen-5d1c…"])
    request_id: str | None = Field(description="The caller's label.")
    model: str
    created: int = Field(description="Unix seconds.")
    outputs: list[GeneratedOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = Field(description="One entry a token; the first is null.")
    usage: Usage
    sampling: dict[str, Any] = Field(description="The settings that were in effect.")
    timings: Timings
    window: WindowInfo | None


class BatchRequest(Wire):
    """A list of requests."""

    requests: list[GenerateRequest] = Field(min_length=1, description="Each is validated by itself.")
    defaults: BatchDefaults | None = Field(None, description="Fields for all of them; an item's own win.")
    request_id: str | None = Field(None, max_length=256, description="The caller's own label, echoed.")


class BatchRow(Wire):
    """One row, in the order of the requests."""

    index: int
    status: int = Field(description="The HTTP status that the request alone would have got.")
    response: GenerateResponse | None
    error: ErrorObject | None


class BatchCounts(Wire):
    """How the rows went."""

    total: int
    succeeded: int
    failed: int


class BatchWindow(Wire):
    """A window that rows of this batch ran in."""

    id: int
    size: int
    release: Literal["full", "max_wait", "drain"]


class BatchTimings(Wire):
    """Times of the whole batch."""

    received_at: float = Field(description="Unix seconds.")
    completed_at: float = Field(description="Unix seconds.")
    e2e_ms: float
    prompt_tokens: int = Field(description="Of the rows that succeeded.")
    completion_tokens: int
    completion_tokens_per_s: float | None = Field(description="completion_tokens / e2e.")


class BatchResponse(Wire):
    """The answer to a batch; 200 even when every row has failed."""

    id: str = Field(examples=["batch-8f02…"])
    request_id: str | None
    model: str
    created: int = Field(description="Unix seconds.")
    results: list[BatchRow]
    counts: BatchCounts
    windows: list[BatchWindow]
    timings: BatchTimings


class Health(Wire):
    """State of the service."""

    status: Literal["loading", "ready", "draining", "dead", "failed"]


class Info(Wire):
    """What runs here, and with which settings."""

    version: str
    model: str
    state: str
    backend: dict[str, Any] = Field(
        description="Kind, engine settings with their sources, versions, threads, warnings."
    )
    settings: dict[str, Any] = Field(description="The service's settings; no secrets.")
    limits: dict[str, int | float | None]
    versions: dict[str, str | None]
