"""The shapes of answers, for the OpenAPI document and for tests; bodies are in ``app.prompts.spec``."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel
from typing_extensions import TypedDict

from app.prompts.spec import MAX_LABEL_CHARS, BatchDefaults, GenerateRequest
from app.prompts.strict import StrictModel

MODEL_NAME = "Name of the model that is served: the setting `served_model_name`, or else `model`."
LABEL = "The caller's own label, or `null`."
RELEASE = (
    "Why the window went: it held `batch_size` requests (`full`), its oldest request had waited `max_wait_ms` "
    "(`max_wait`), or the service was shutting down (`drain`); `rolling`: the request went by itself, as soon as there "
    "was room for it in the engine."
)
CREATED = "When the request came, in Unix seconds."


class Wire(BaseModel):
    """An answer: no field beyond those documented."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(BaseModel):
    """What went wrong. Some codes carry more: `limit`, `queue_depth`, `prompt_tokens`."""

    model_config = ConfigDict(extra="allow")

    message: str = Field(description="What is wrong and what would be right, for a person.")
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ] = Field(description="The kind of error, as in OpenAI's API.")
    code: str = Field(
        description="The error, for a program: one of those that the answer's description names. More may come.",
        examples=["invalid_request"],
    )
    param: str | None = Field(
        description="Path of the field at fault within the body, or `null`.", examples=["messages.0.content"]
    )
    limit: int | None = Field(
        None, description="The bound that was passed, in the unit that the message names: bytes, requests or tokens."
    )
    queue_depth: int | None = Field(
        None, description="What the queue held, in the unit of `limit`: requests (each output is one) or tokens."
    )
    prompt_tokens: int | None = Field(
        None, description="Length of the prompt in tokens; of a text far too long to count, a lower bound."
    )


class ErrorBody(Wire):
    """The body of every error, on every route."""

    error: ErrorObject = Field(description="What went wrong, for a person and for a program.")


class TopLogprob(Wire):
    """One of the likeliest tokens at a position."""

    token_id: int = Field(description="Id of the token.")
    token: str | None = Field(description="Text of the token, or `null` where it has none.")
    logprob: float | None = Field(description="Natural logarithm of the probability; `null` is minus infinity.")
    rank: int | None = Field(description="Rank among all tokens; 1 is the likeliest.")


class TokenLogprob(TopLogprob):
    """A token that was generated, or stood in the prompt, and the likeliest ones beside it."""

    top: list[TopLogprob] = Field(description="The likeliest tokens at this position, as many as were asked for.")


class GeneratedOutput(Wire):
    """One generated sequence."""

    index: int = Field(description="Place among the outputs, from 0.")
    text: str = Field(description="The generated text.")
    token_ids: list[int] | None = Field(description="Ids of the generated tokens; `null` without `return_token_ids`.")
    finish_reason: Literal["stop", "length"] = Field(
        description="Why it ended: `stop` for end-of-sequence, a stop string or a stop token; `length` for "
        "`max_tokens` or the end of the context."
    )
    stop_reason: int | str | None = Field(
        description="The stop string or stop token id that ended it; `null` for end-of-sequence and `length`."
    )
    logprobs: list[TokenLogprob] | None = Field(
        description="One entry for each generated token; `null` without `logprobs`."
    )


class Usage(Wire):
    """Tokens, counted from the engine's ids."""

    prompt_tokens: int = Field(description="Length of the prompt in tokens.")
    completion_tokens: int = Field(description="Generated tokens, of all outputs.")
    total_tokens: int = Field(description="`prompt_tokens` + `completion_tokens`, in tokens.")
    cached_tokens: int | None = Field(description="Prompt tokens taken from the prefix cache; `null`: unknown.")


class Timings(Wire):
    """When one request passed which point, and how long each part took.

    `…_at`: Unix seconds. `…_ms`: milliseconds. `null`: unknown. With `n` above 1 the engine gives the stamps of one
    output: `first_token_at`, `last_token_at`, `decode_ms` and `itl_ms` are that one's.
    """

    received_at: float = Field(description="The first line of the call had come, in Unix seconds.")
    admitted_at: float = Field(description="The request stood in the queue, in Unix seconds.")
    dispatched_at: float = Field(description="Its window went to the engine's thread, in Unix seconds.")
    queued_at: float | None = Field(description="vLLM had it in its own queue, in Unix seconds.")
    scheduled_at: float | None = Field(description="vLLM took it out of that queue, in Unix seconds.")
    first_token_at: float | None = Field(description="vLLM had its first token, in Unix seconds.")
    last_token_at: float | None = Field(description="vLLM had its last token, in Unix seconds.")
    completed_at: float = Field(description="Its window had ended and the answer was complete, in Unix seconds.")
    resolve_ms: float = Field(description="admitted - received, in milliseconds: templates, tokens, checks.")
    window_wait_ms: float = Field(description="dispatched - admitted, in milliseconds: the wait for a window.")
    submit_ms: float | None = Field(description="queued - dispatched, in milliseconds.")
    engine_queue_ms: float | None = Field(description="scheduled - queued, in milliseconds.")
    prefill_ms: float | None = Field(description="first_token - scheduled, in milliseconds.")
    decode_ms: float | None = Field(description="last_token - first_token, in milliseconds.")
    window_tail_ms: float | None = Field(
        description="completed - last_token, in milliseconds: what longer neighbours in the window cost."
    )
    e2e_ms: float = Field(description="completed - received, in milliseconds: the sum of the seven above.")
    inference_ms: float | None = Field(description="last_token - scheduled, in milliseconds.")
    ttft_ms: float | None = Field(
        description="first_token - received, in milliseconds: what the caller would have felt had the answer been "
        "streamed."
    )
    engine_ttft_ms: float | None = Field(description="vLLM's `first_token_latency`, in milliseconds.")
    itl_ms: float | None = Field(
        description="decode / (tokens - 1), in milliseconds a token; `null` for fewer than two tokens."
    )
    tokens_per_s: float | None = Field(description="Generated tokens of all outputs / inference, in tokens per second.")
    num_preemptions: int | None = Field(
        description="How often vLLM took the request out of the engine to make room for others."
    )
    clock_anomaly: bool = Field(description="A stamp was out of order and was clamped to its neighbour.")
    request_state_stats: dict[str, Any] | None = Field(
        description="vLLM's `RequestStateStats`, untouched: `arrival_time` in Unix seconds; `queued_ts`, "
        "`scheduled_ts`, `first_token_ts`, `last_token_ts` in seconds of the host's monotonic clock; "
        "`first_token_latency` in seconds; and counts. Its fields change with vLLM's version."
    )


class WindowInfo(Wire):
    """The window that a request ran in; with `scheduling` `rolling` its own way through the engine."""

    id: int = Field(description="Number of the window since the service started, from 1.")
    size: int = Field(
        description="How many requests ran in it; with `rolling` how many were in the engine when it was taken in, "
        "itself included."
    )
    position: int | None = Field(description="Place of this request within it, from 0; `null` where there is none.")
    release: Literal["full", "max_wait", "drain", "rolling"] = Field(description=RELEASE)


class GenerateResponse(Wire):
    """The answer to one request."""

    id: str = Field(description="Id of this request, made by the service.", examples=["gen-5d1c0b6e"])
    request_id: str | None = Field(description=LABEL)
    model: str = Field(description=MODEL_NAME)
    created: int = Field(description=CREATED)
    outputs: list[GeneratedOutput] = Field(description="The generated sequences: `n` of them.")
    prompt_logprobs: list[TokenLogprob | None] | None = Field(
        description="One entry for each token of the prompt, the first of which is `null`; `null` without "
        "`prompt_logprobs`."
    )
    usage: Usage = Field(description="How many tokens it took.")
    sampling: dict[str, Any] = Field(
        description="The sampling settings that were in effect, under the names of the request: what was given, the "
        "model's own defaults, and vLLM's."
    )
    timings: Timings = Field(description="When it passed which point, and how long each part took.")
    window: WindowInfo | None = Field(description="The window that it ran in; `null` where there is none.")


class BatchRequest(StrictModel):
    """A list of requests, admitted whole or refused whole."""

    requests: list[GenerateRequest] = Field(
        min_length=1,
        description="The requests: at least one, at most `limits.max_batch_requests` of `GET /info`. Each is validated "
        "by itself: what is wrong with one fails its row alone.",
    )
    defaults: BatchDefaults | None = Field(None, description="Fields for all of the requests; a request's own win.")
    request_id: str | None = Field(
        None,
        max_length=MAX_LABEL_CHARS,
        description="The caller's own label in characters, echoed in the answer; need not be unique.",
    )


class BatchRow(Wire):
    """What one of the requests got: either `response` or `error`, the other is `null`."""

    index: int = Field(description="Place of the request in `requests`, from 0.")
    status: int = Field(description="The HTTP status that the request alone would have got.")
    response: GenerateResponse | None = Field(description="The answer of a request that succeeded (status 200).")
    error: ErrorObject | None = Field(
        description="What went wrong with a request that failed; `param` is relative to the request."
    )


class BatchCounts(Wire):
    """How the rows went."""

    total: int = Field(description="Rows in all.")
    succeeded: int = Field(description="Rows with status 200.")
    failed: int = Field(description="Rows with another status.")


class BatchWindow(Wire):
    """A window that rows of this batch ran in."""

    id: int = Field(description="Number of the window since the service started, from 1.")
    size: int = Field(description="How many requests ran in it, those of other callers included.")
    release: Literal["full", "max_wait", "drain"] = Field(description=RELEASE)


class BatchTimings(Wire):
    """Times of the whole batch. `…_at`: Unix seconds. `…_ms`: milliseconds."""

    received_at: float = Field(description="The first line of the call had come, in Unix seconds.")
    completed_at: float = Field(description="The last row was finished, in Unix seconds.")
    e2e_ms: float = Field(description="completed - received, in milliseconds.")
    prompt_tokens: int = Field(description="Prompt tokens of the rows that succeeded.")
    completion_tokens: int = Field(description="Generated tokens of the rows that succeeded.")
    completion_tokens_per_s: float | None = Field(description="completion_tokens / e2e, in tokens per second.")


class BatchSummary(Wire):
    """What a batch's answer holds beside its rows: the last line of an answer in lines."""

    id: str = Field(description="Id of this batch, made by the service.", examples=["batch-8f02a0c4"])
    request_id: str | None = Field(description=LABEL)
    model: str = Field(description=MODEL_NAME)
    created: int = Field(description=CREATED)
    counts: BatchCounts = Field(description="How the rows went.")
    windows: list[BatchWindow] = Field(description="The windows that rows of this batch ran in, oldest first.")
    timings: BatchTimings = Field(description="Times of the whole batch.")


class BatchResponse(BatchSummary):
    """The answer to a batch; 200 even when every row has failed."""

    results: list[BatchRow] = Field(description="A row for each request, in the order of the requests.")


class BatchLine(RootModel[BatchRow | BatchSummary]):
    """One line of a batch's answer in lines: a row (it has `index`), or the last line (it has `counts`)."""


class Health(Wire):
    """State of the service."""

    status: Literal["loading", "ready", "draining", "dead", "failed"] = Field(
        description="`loading` until a generation has succeeded, then `ready`; `draining` after a stop signal; `dead` "
        "when the engine has died, `failed` when it could not start: the process ends shortly."
    )


class EngineArgument(TypedDict):
    """A setting of the engine."""

    value: Annotated[Any, Field(description="The value in force.")]
    source: Annotated[str, Field(description="Where it came from: `vllm_config`, `service` or `environment`.")]


class AdapterInfo(TypedDict):
    """A LoRA adapter of the setting `lora_modules`."""

    name: Annotated[str, Field(description="What a request gives as its `model`.")]
    folder: Annotated[str, Field(description="Where it is.")]
    rank: Annotated[int | None, Field(description="The largest rank of its modules; `null` when it cannot be told.")]
    unusable: Annotated[str | None, Field(description="Why it cannot be used; `null`: it can.")]


class BackendInfo(TypedDict):
    """What generates, and how it is set."""

    kind: Annotated[str, Field(description="The setting `backend`.")]
    engine_process: Annotated[
        str | None,
        Field(description="Where the engine core runs: `inline` or `separate`; `null` before it has been decided."),
    ]
    engine_args: Annotated[
        dict[str, EngineArgument],
        Field(
            description="vLLM's `EngineArgs` and environment variables by name, under vLLM's names and in its units."
        ),
    ]
    generation_defaults: Annotated[dict[str, Any], Field(description="The model's own sampling defaults.")]
    request_format: Annotated[
        str | None, Field(description="How messages become text: `plain`, `default-template`, or where a template is.")
    ]
    versions: Annotated[dict[str, str | None], Field(description="Versions of the packages it uses, by name.")]
    threads: Annotated[
        dict[str, Any],
        Field(
            description="`engine_thread_cores`: ids of the cores that the engine may use; `cores`: cores of the host; "
            "`compute_threads`: threads it computes with; `load_average_1min`: the host's load."
        ),
    ]
    media: Annotated[list[str], Field(description="What the model takes beside text: `image`, `audio`.")]
    adapters: Annotated[list[AdapterInfo], Field(description="LoRA adapters, those that cannot be used included.")]
    warnings: Annotated[list[str], Field(description="What is not as it should be, a sentence each.")]


class Limits(TypedDict):
    """What the service takes."""

    batch_size: Annotated[int, Field(description="Most requests in one window.")]
    max_wait_ms: Annotated[
        float, Field(description="Longest wait of a window's oldest request for others, in milliseconds.")
    ]
    max_queue_requests: Annotated[int, Field(description="Places in the queue; a request takes `n` of them.")]
    max_queue_tokens: Annotated[int, Field(description="Prompt tokens in the queue.")]
    max_queue_media_bytes: Annotated[
        int, Field(description="Images and audio in the queue, in bytes as the model takes them.")
    ]
    max_media_bytes: Annotated[int, Field(description="Images and audio of one request in bytes, as they come.")]
    max_image_pixels: Annotated[int, Field(description="Images of one request in pixels.")]
    max_audio_s: Annotated[float, Field(description="Audio of one request in seconds.")]
    max_batch_requests: Annotated[int, Field(description="Most requests in one `/batch`.")]
    max_body_bytes: Annotated[int, Field(description="Largest body in bytes.")]
    max_model_len: Annotated[
        int | None,
        Field(description="Context of the model in tokens, prompt and answer together; `null` until loaded."),
    ]


class Info(Wire):
    """What runs here, and with which settings."""

    version: str = Field(description="Version of the service, and of its OpenAPI document.")
    model: str = Field(description=MODEL_NAME)
    state: str = Field(description="State of the service, as `GET /livez` tells it.")
    backend: BackendInfo = Field(description="What generates the texts, with its settings and versions.")
    settings: dict[str, Any] = Field(
        description="The service's settings by name, without secrets; units as in `--help`."
    )
    limits: Limits = Field(description="How much the service takes, in requests, tokens, bytes and milliseconds.")
    versions: dict[str, str | None] = Field(description="Versions by package; `null` for one that is not installed.")


class OpenWire(BaseModel):
    """An answer in OpenAI's shape: vLLM may add fields to it."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Model(OpenWire):
    """A model that is served."""

    id: str = Field(description=MODEL_NAME)
    object: Literal["model"] = Field(description="Always `model`.")
    created: int = Field(description="When the service was started, in Unix seconds.")
    owned_by: str = Field(description="Always `batchserve`.")
    root: str | None = Field(None, description="What the model was loaded from: the setting `model`.")
    parent: str | None = Field(None, description="Always `null`.")
    max_model_len: int | None = Field(
        None, description="Context of the model in tokens, prompt and answer together; `null` until loaded."
    )


class ModelList(OpenWire):
    """The models that are served: one."""

    object: Literal["list"] = Field(description="Always `list`.")
    data: list[Model] = Field(description="The models.")


class OneMetrics(OpenWire):
    """How one prompt went. The first five are vLLM's, with its meanings; `null` with `n` above 1."""

    time_to_first_token_ms: float | None = Field(
        description="first_token - scheduled, in milliseconds: `timings.prefill_ms`. What the caller would have felt "
        "is `timings.ttft_ms`."
    )
    queue_time_ms: float | None = Field(
        description="scheduled - queued in vLLM, in milliseconds: `timings.engine_queue_ms`."
    )
    generation_time_ms: float | None = Field(
        description="last_token - first_token, in milliseconds: `timings.decode_ms`."
    )
    mean_itl_ms: float | None = Field(description="The same for each token but the first, in milliseconds a token.")
    tokens_per_second: float | None = Field(
        description="Generated tokens / (last_token - scheduled), in tokens per second."
    )
    timings: Timings = Field(description="When the prompt passed which point, and how long each part took.")
    window: WindowInfo | None = Field(description="The window that it ran in; `null` where there is none.")


class Metrics(OneMetrics):
    """How the call went: of several prompts the first, and all of them under `requests`."""

    requests: list[OneMetrics] | None = Field(None, description="One for each prompt, where there are several.")


class TokensDetails(OpenWire):
    """Of the prompt's tokens."""

    cached_tokens: int | None = Field(None, description="Prompt tokens taken from the prefix cache.")


class OpenAIUsage(OpenWire):
    """Tokens, counted from the engine's ids."""

    prompt_tokens: int = Field(description="Length of all prompts in tokens.")
    completion_tokens: int = Field(description="Generated tokens, of all choices.")
    total_tokens: int = Field(description="`prompt_tokens` + `completion_tokens`, in tokens.")
    prompt_tokens_details: TokensDetails | None = Field(None, description="Of the prompt's tokens.")


STOP_REASON = "The stop string or stop token id that ended it; `null` for end-of-sequence and `length`."
FINISH_REASON = "Why it ended: `stop`, `length`, `tool_calls` or `repetition`; `null` in a chunk before the last one."
TOKEN_IDS = "Ids of the generated tokens; `null` without `return_token_ids`."
PROMPT_LOGPROBS = (
    "For each token of the prompt it and the likeliest ones there, by token id, the first one `null`; `null` without "
    "`prompt_logprobs`, and without `echo` with `logprobs`."
)


class CompletionLogprobs(OpenWire):
    """Logprobs of a text's tokens, an entry each in every list; minus infinity is -9999."""

    tokens: list[str] = Field(description="The tokens.")
    token_logprobs: list[float | None] = Field(description="Natural logarithm of each one's probability.")
    top_logprobs: list[dict[str, float] | None] = Field(description="The likeliest tokens there, and the token itself.")
    text_offset: list[int] = Field(description="Where each token begins, in characters.")


class PromptLogprob(OpenWire):
    """A token at a position of the prompt."""

    logprob: float = Field(description="Natural logarithm of its probability; minus infinity is -9999.")
    rank: int | None = Field(None, description="Rank among all tokens; 1 is the likeliest.")
    decoded_token: str | None = Field(None, description="Text of the token.")


class CompletionChoice(OpenWire):
    """One generated text."""

    index: int = Field(description="Place among the choices, from 0: the first prompt's `n`, then the second's.")
    text: str = Field(description="The generated text; behind the prompt with `echo`.")
    finish_reason: str | None = Field(description=FINISH_REASON)
    stop_reason: int | str | None = Field(None, description=STOP_REASON)
    logprobs: CompletionLogprobs | None = Field(None, description="Its logprobs; `null` without `logprobs`.")
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS)
    prompt_token_ids: list[int] | None = Field(
        None, description="Ids of the prompt's tokens; `null` without `return_token_ids`."
    )
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(None, description=PROMPT_LOGPROBS)


class OpenAIAnswer(OpenWire):
    """What all answers have."""

    id: str = Field(description="Id of this answer: the caller's label, or the call's `x-request-id`, in it.")
    created: int = Field(description=CREATED)
    model: str = Field(description=MODEL_NAME)
    system_fingerprint: str | None = Field(None, description="vLLM's version, and a digest of its configuration.")


class Completion(OpenAIAnswer):
    """The answer to prompts."""

    object: Literal["text_completion"] = Field(description="Always `text_completion`.")
    choices: list[CompletionChoice] = Field(description="The texts.")
    usage: OpenAIUsage = Field(description="How many tokens it took.")
    metrics: Metrics = Field(description="How the call went.")


class CompletionChunk(OpenAIAnswer):
    """The data of one event: a part of a `Completion`. The last event's data is `[DONE]`, or an `ErrorBody`."""

    object: Literal["text_completion"] = Field(description="Always `text_completion`.")
    choices: list[CompletionChoice] = Field(description="Parts of the texts; none in a chunk of usage.")
    usage: OpenAIUsage | None = Field(None, description="Tokens, where they were asked for.")
    metrics: Metrics | None = Field(None, description="How the call went; in the last chunk.")


class TokenOfChat(OpenWire):
    """A token with its logprob; minus infinity is -9999."""

    token: str = Field(description="The token.")
    logprob: float | None = Field(description="Natural logarithm of its probability.")
    bytes: list[int] | None = Field(None, description="Its bytes in UTF-8.")


class GeneratedTokenOfChat(TokenOfChat):
    """A token that was generated, and the likeliest ones there."""

    top_logprobs: list[TokenOfChat] = Field(description="The likeliest tokens at this position.")


class ChatLogprobs(OpenWire):
    """Logprobs of a message's tokens."""

    content: list[GeneratedTokenOfChat] | None = Field(description="One entry for each generated token.")


class CalledFunction(OpenWire):
    """The call of a function."""

    name: str | None = Field(None, description="Its name.")
    arguments: str | None = Field(None, description="Its arguments, as JSON text.")


class ToolCall(OpenWire):
    """The use of a tool."""

    index: int | None = Field(None, description="Place among the calls; in chunks alone.")
    id: str | None = Field(None, description="Id of the call.")
    type: Literal["function"] | None = Field(None, description="Always `function`.")
    function: CalledFunction | None = Field(None, description="The call.")


class AnswerMessage(OpenWire):
    """The message that the model gave, or a part of it."""

    role: str | None = Field(None, description="Always `assistant`, but for a message that was gone on with.")
    content: str | None = Field(None, description="The text.")
    reasoning: str | None = Field(None, description="The reasoning, where the setting `reasoning_parser` finds it.")
    tool_calls: list[ToolCall] | None = Field(None, description="The tools it uses.")


class ChatChoice(OpenWire):
    """One generated message."""

    index: int = Field(description="Place among the choices, from 0.")
    message: AnswerMessage = Field(description="The message.")
    finish_reason: str | None = Field(description=FINISH_REASON)
    stop_reason: int | str | None = Field(None, description=STOP_REASON)
    logprobs: ChatLogprobs | None = Field(None, description="Its logprobs; `null` without `logprobs`.")
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS)


class ChatChunkChoice(OpenWire):
    """A part of a message."""

    index: int = Field(description="Place among the choices, from 0.")
    delta: AnswerMessage = Field(description="What comes to the message.")
    finish_reason: str | None = Field(description=FINISH_REASON)
    stop_reason: int | str | None = Field(None, description=STOP_REASON)
    logprobs: ChatLogprobs | None = Field(None, description="Its logprobs; `null` without `logprobs`.")
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS)


class ChatCompletion(OpenAIAnswer):
    """The answer to a conversation."""

    object: Literal["chat.completion"] = Field(description="Always `chat.completion`.")
    choices: list[ChatChoice] = Field(description="The messages.")
    usage: OpenAIUsage = Field(description="How many tokens it took.")
    metrics: Metrics = Field(description="How the call went.")
    prompt_token_ids: list[int] | None = Field(
        None, description="Ids of the prompt's tokens; `null` without `return_token_ids`."
    )
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(None, description=PROMPT_LOGPROBS)
    prompt_text: str | None = Field(None, description="The rendered conversation; `null` without `return_prompt_text`.")


class ChatCompletionChunk(OpenAIAnswer):
    """The data of one event: a part of a `ChatCompletion`. The last event's data is `[DONE]`, or an `ErrorBody`."""

    object: Literal["chat.completion.chunk"] = Field(description="Always `chat.completion.chunk`.")
    choices: list[ChatChunkChoice] = Field(description="Parts of the messages; none in a chunk of usage.")
    usage: OpenAIUsage | None = Field(None, description="Tokens, where they were asked for.")
    metrics: Metrics | None = Field(None, description="How the call went; in the last chunk.")
