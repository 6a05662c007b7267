"""The examples of the OpenAPI document: bodies, and what the service with the embedded model answered to them.

The answers were taken from a running service; ``tests/clients`` sends the bodies to one and compares.
"""

from typing import Any

from app.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    QueueFull,
    QueueTimeout,
    RequestTimeout,
    RequestTooLarge,
    ServiceError,
    ShuttingDown,
)

Example = dict[str, Any]
"""An example object of OpenAPI: ``summary`` and ``value``."""


def named(**values: tuple[str, Any]) -> dict[str, Example]:
    """Examples by name, of summary and value each."""
    return {name: {"summary": summary, "value": value} for name, (summary, value) in values.items()}


GENERATE_BODIES = named(
    messages=(
        "A conversation; the model's chat template makes it text.",
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "request_id": "question-1",
        },
    ),
    prompt=("A text, as it is.", {"prompt": "The three primary colors are", "max_tokens": 12, "temperature": 0}),
    columns=(
        "A row of a data set.",
        {
            "columns": {"prefix_column": ["Answer with one word."], "text_column": ["What is the capital of Italy?"]},
            "max_tokens": 8,
            "temperature": 0,
        },
    ),
    prompt_token_ids=(
        "Token ids, as they are.",
        {"prompt_token_ids": [504, 3575, 282, 4649, 314], "max_tokens": 8, "temperature": 0},
    ),
)

BATCH_BODIES = named(
    two_rows=(
        "Two requests, the second of which is wrong.",
        {
            "requests": [
                {"prompt": "The three primary colors are", "max_tokens": 12},
                {"prompt": "", "request_id": "empty"},
            ],
            "defaults": {"temperature": 0},
            "request_id": "colors",
        },
    ),
)

_ANSWER = {
    "id": "gen-1b2018368e3e4523ba65eded63b26df7",
    "request_id": "question-1",
    "model": "embedded:smollm2-135m",
    "created": 1796063470,
    "outputs": [
        {
            "index": 0,
            "text": "The capital of France is Paris.",
            "token_ids": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
        }
    ],
    "prompt_logprobs": None,
    "usage": {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45, "cached_tokens": 0},
    "sampling": {
        "max_tokens": 256,
        "min_tokens": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "n": 1,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "bad_words": [],
    },
    "timings": {
        "received_at": 1796063470.5245802,
        "admitted_at": 1796063470.527444,
        "dispatched_at": 1796063470.537769,
        "queued_at": 1796063470.5385253,
        "scheduled_at": 1796063470.5385525,
        "first_token_at": 1796063470.6079922,
        "last_token_at": 1796063470.8599126,
        "completed_at": 1796063470.8607779,
        "resolve_ms": 2.8636450006160885,
        "window_wait_ms": 10.325215000193566,
        "submit_ms": 0.7563009985460667,
        "engine_queue_ms": 0.027291000151308253,
        "prefill_ms": 69.43962500008638,
        "decode_ms": 251.92043000060949,
        "window_tail_ms": 0.8652329997858033,
        "e2e_ms": 336.1977399999887,
        "inference_ms": 321.36005500069587,
        "ttft_ms": 83.41207699959341,
        "engine_ttft_ms": 70.04046440124512,
        "itl_ms": 35.98863285722992,
        "tokens_per_s": 24.894195390844942,
        "num_preemptions": 0,
        "clock_anomaly": False,
        "request_state_stats": {
            "num_generation_tokens": 8,
            "num_preemptions": 0,
            "arrival_time": 1796063470.53799,
            "queued_ts": 11604.489163346,
            "scheduled_ts": 11604.489190637,
            "first_token_ts": 11604.558630262,
            "last_token_ts": 11604.810550692,
            "first_token_latency": 0.07004046440124512,
            "is_corrupted": False,
            "is_watermarked": False,
            "is_watermark_skipped": False,
        },
    },
    "window": {"id": 2, "size": 1, "position": 0, "release": "max_wait"},
}

_BATCH: dict[str, Any] = {
    "id": "batch-4d3d24b5316d4cf8bfa8f5c03cad6221",
    "request_id": "colors",
    "model": "embedded:smollm2-135m",
    "created": 1796063471,
    "counts": {"total": 2, "succeeded": 1, "failed": 1},
    "windows": [{"id": 3, "size": 1, "release": "max_wait"}],
    "timings": {
        "received_at": 1796063470.8835216,
        "completed_at": 1796063471.2848737,
        "e2e_ms": 401.3522429995646,
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "completion_tokens_per_s": 29.898923475090726,
    },
    "results": [
        {
            "index": 0,
            "status": 200,
            "response": {
                "id": "gen-143ba7dfebf44e6ebb9fad4d4c7fbf5b",
                "request_id": None,
                "model": "embedded:smollm2-135m",
                "created": 1796063470,
                "outputs": [
                    {
                        "index": 0,
                        "text": " the primary colors of the RGB color model, which are:",
                        "token_ids": None,
                        "finish_reason": "length",
                        "stop_reason": None,
                        "logprobs": None,
                    }
                ],
                "prompt_logprobs": None,
                "usage": {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17, "cached_tokens": 0},
                "sampling": {
                    "max_tokens": 12,
                    "min_tokens": 0,
                    "temperature": 0.0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "min_p": 0.0,
                    "n": 1,
                    "seed": None,
                    "stop": [],
                    "stop_token_ids": [],
                    "ignore_eos": False,
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "repetition_penalty": 1.0,
                    "logit_bias": None,
                    "logprobs": None,
                    "prompt_logprobs": None,
                    "skip_special_tokens": True,
                    "include_stop_str_in_output": False,
                    "bad_words": [],
                },
                "timings": {
                    "received_at": 1796063470.8835218,
                    "admitted_at": 1796063470.8864894,
                    "dispatched_at": 1796063470.8969848,
                    "queued_at": 1796063470.8977947,
                    "scheduled_at": 1796063470.8978229,
                    "first_token_at": 1796063470.9439173,
                    "last_token_at": 1796063471.284065,
                    "completed_at": 1796063471.2845898,
                    "resolve_ms": 2.9676289996132255,
                    "window_wait_ms": 10.495407999769668,
                    "submit_ms": 0.8099810002022423,
                    "engine_queue_ms": 0.02796099943225272,
                    "prefill_ms": 46.09458900085883,
                    "decode_ms": 340.14758599914785,
                    "window_tail_ms": 0.5248980014584959,
                    "e2e_ms": 401.06805200048257,
                    "inference_ms": 386.2421750000067,
                    "ttft_ms": 60.39556799987622,
                    "engine_ttft_ms": 46.72551155090332,
                    "itl_ms": 30.92250781810435,
                    "tokens_per_s": 31.068590580507664,
                    "num_preemptions": 0,
                    "clock_anomaly": False,
                    "request_state_stats": {
                        "num_generation_tokens": 12,
                        "num_preemptions": 0,
                        "arrival_time": 1796063470.8972342,
                        "queued_ts": 11604.848432838,
                        "scheduled_ts": 11604.848460799,
                        "first_token_ts": 11604.894555388,
                        "last_token_ts": 11605.234702974,
                        "first_token_latency": 0.04672551155090332,
                        "is_corrupted": False,
                        "is_watermarked": False,
                        "is_watermark_skipped": False,
                    },
                },
                "window": {"id": 3, "size": 1, "position": 0, "release": "max_wait"},
            },
            "error": None,
        },
        {
            "index": 1,
            "status": 400,
            "response": None,
            "error": {
                "message": "must not be empty",
                "type": "invalid_request_error",
                "code": "invalid_request",
                "param": "prompt",
            },
        },
    ],
}

GENERATE_ANSWERS = named(messages=("What the first body got.", _ANSWER))

BATCH_ANSWERS = named(two_rows=("The first row succeeded, the second failed.", _BATCH))

BATCH_LINES = named(
    row=("A line for each row, as soon as it is finished.", _BATCH["results"][0]),
    failed_row=("A row that failed.", _BATCH["results"][1]),
    last_line=("The last line: the rest of the answer.", {k: v for k, v in _BATCH.items() if k != "results"}),
)
"""Of the answer in lines: each example is one line."""

STATES = {
    state: named(**{state: (summary, {"status": state})})
    for state, summary in (("ready", "Work is taken."), ("loading", "The model still loads."))
}

_INFO = {
    "version": "0.1.0",
    "model": "embedded:smollm2-135m",
    "state": "ready",
    "backend": {
        "kind": "vllm_offline",
        "engine_process": "inline",
        "engine_args": {
            "structured_outputs_config": {"value": {"backend": "xgrammar"}, "source": "service"},
            "dtype": {"value": "bfloat16", "source": "service"},
            "enforce_eager": {"value": True, "source": "service"},
            "max_model_len": {"value": 2048, "source": "service"},
            "kv_cache_memory_bytes": {"value": 1604321280, "source": "service"},
            "OMP_NUM_THREADS": {"value": "1", "source": "service"},
            "TORCH_COMPILE_DISABLE": {"value": "1", "source": "service"},
            "VLLM_ENABLE_V1_MULTIPROCESSING": {"value": "0", "source": "service"},
            "VLLM_NO_USAGE_STATS": {"value": "1", "source": "service"},
            "VLLM_MAX_STOP_STRINGS": {"value": "64", "source": "service"},
            "VLLM_CONFIGURE_LOGGING": {"value": "0", "source": "service"},
            "HF_HUB_OFFLINE": {"value": "1", "source": "service"},
        },
        "generation_defaults": {"temperature": 0.2},
        "request_format": "default-template",
        "versions": {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"},
        "threads": {
            "engine_thread_cores": [0, 1],
            "cores": 2,
            "compute_threads": 1,
            "load_average_1min": 11.28759765625,
        },
        "media": [],
        "adapters": [],
        "warnings": [],
    },
    "settings": {
        "model": "embedded:smollm2-135m",
        "served_model_name": None,
        "backend": "vllm_offline",
        "scheduling": "window",
        "batch_size": 32,
        "max_wait_ms": 10.0,
        "engine_process": "auto",
        "vllm_config": {},
        "fake_config": {},
        "request_format": "default-template",
        "tool_call_parser": None,
        "reasoning_parser": None,
        "lora_modules": [],
        "image_placeholder": "<image>",
        "audio_placeholder": "<|audio|>",
        "allowed_media_domains": [],
        "allowed_media_networks": [],
        "max_media_bytes": 16777216,
        "max_image_pixels": 33554432,
        "max_audio_s": 600.0,
        "media_timeout_s": 1.5,
        "default_max_tokens": 256,
        "max_queue_requests": 8192,
        "max_queue_tokens": 8388608,
        "max_queue_media_bytes": 1073741824,
        "max_batch_requests": 4096,
        "max_body_bytes": 33554432,
        "queue_timeout_s": None,
        "request_timeout_s": None,
        "drain_timeout_s": 25.0,
        "keep_alive_s": 75,
        "root_path": "",
        "host": "127.0.0.1",
        "port": 8000,
        "log_level": "info",
        "log_format": "text",
    },
    "limits": {
        "batch_size": 32,
        "max_wait_ms": 10.0,
        "max_queue_requests": 8192,
        "max_queue_tokens": 8388608,
        "max_queue_media_bytes": 1073741824,
        "max_media_bytes": 16777216,
        "max_image_pixels": 33554432,
        "max_audio_s": 600.0,
        "max_batch_requests": 4096,
        "max_body_bytes": 33554432,
        "max_model_len": 2048,
    },
    "versions": {"batchserve": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"},
}

INFO = named(embedded=("The embedded model on a CPU, with default settings.", _INFO))

METRICS = named(
    tokens=(
        "A few lines of many.",
        """# HELP batchserve_tokens_total Tokens of answered requests, by kind.
# TYPE batchserve_tokens_total counter
batchserve_tokens_total{kind="prompt"} 79.0
batchserve_tokens_total{kind="completion"} 28.0
batchserve_tokens_total{kind="cached"} 0.0
""",
    )
)


ERRORS: dict[type[ServiceError], ServiceError] = {
    type(error): error
    for error in (
        InvalidRequest("unknown field 'max_token'; did you mean max_tokens?", param="max_token"),
        ContextLengthExceeded(
            "the prompt has 3001 tokens; this model's context is 2048 and one token must be left to generate",
            prompt_tokens=3001,
            limit=2048,
        ),
        InvalidApiKey("an API key is needed; it is sent as Authorization: Bearer <key>"),
        ModelNotFound(
            "model 'llama' is not served here; this service has 'embedded:smollm2-135m'",
            param="model",
        ),
        RequestTooLarge("4097 requests; at most 4096 go into one batch", limit=4096),
        QueueFull("the queue holds 3 of 4 requests", queue_depth=3, limit=4),
        GenerationFailed("the engine failed: the fake engine was told to fail"),
        InternalError("the service failed; its log has the details"),
        NotReady("the model is loading"),
        ShuttingDown("the service is shutting down"),
        EngineDead("the engine thread has ended: SystemExit"),
        QueueTimeout("waited 0.5 s for a window"),
        RequestTimeout("not done within 30.0 s"),
    )
}
"""One of each kind that a documented route answers with."""
