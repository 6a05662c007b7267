"""Answers on the wire: complete, strict, and equal to the documented shapes."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from app.api import render
from app.api.schemas import BatchResponse, BatchRow, GenerateResponse
from app.errors import QueueFull
from app.metrics import Metrics
from app.prompts.spec import GenerateRequest
from app.request import Answer, Generation, Output, Request, Resolved, Window
from app.timings import EngineStats, Stamps

RAW = {"arrival_time": 1.8e9, "queued_ts": 100.012}
STATS = EngineStats(100.012, 100.02, 100.1, 100.9, 0.09, 3, 0, RAW)


def logprobs(count: int, top: int = 1) -> list[dict[str, Any]]:
    entry = {"token_id": 7, "token": "a", "logprob": -0.5, "rank": 1}
    return [{**entry, "top": [entry] * top} for _ in range(count)]


def make_answer(
    *, outputs: int = 1, with_window: bool = True, stats: EngineStats | None = STATS, **more: Any
) -> Answer:
    unused: Any = object()
    stamps = Stamps(100.0, 100.002, 100.01, 101.0)
    request = Request(Resolved([1, 2, 3], None, {"temperature": 0.0}), outputs, 0, None, stamps, unused)
    ids = itertools.count(17)
    window = Window(next(ids), "full", [request], 100.01, 1.7e9, ids) if with_window else None
    given = [Output(index, "añ", [7, 8, 9], "stop", None, more.get("logprobs")) for index in range(outputs)]
    generation = Generation(given, more.get("prompt_logprobs"), 2, stats)
    return Answer(request, generation, window, 0 if with_window else None)


def rendered(answer: Answer, metrics: Metrics | None = None, **body: Any) -> dict[str, Any]:
    return render.generate_answer(answer, GenerateRequest(prompt="x", **body), "served", metrics or Metrics())


def test_an_answer_is_of_the_documented_shape() -> None:
    answer = make_answer()
    found = rendered(answer, request_id="mine")

    GenerateResponse.model_validate(found, strict=True)
    assert found["id"] == answer.request.id
    assert (found["request_id"], found["model"], found["created"]) == ("mine", "served", int(1.7e9 + 100))
    assert found["outputs"] == [
        {
            "index": 0,
            "text": "añ",
            "token_ids": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "cached_tokens": 2}
    assert found["sampling"] == {"temperature": 0.0}
    assert found["window"] == {"id": 17, "size": 1, "position": 0, "release": "full"}
    assert found["timings"]["received_at"] == 1.7e9 + 100
    assert found["timings"]["request_state_stats"] == RAW


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(make_answer(outputs=3), id="several outputs"),
        pytest.param(make_answer(with_window=False), id="no window"),
        pytest.param(make_answer(stats=None), id="no statistics"),
        pytest.param(make_answer(logprobs=logprobs(3), prompt_logprobs=[None, *logprobs(2)]), id="logprobs"),
    ],
)
def test_answers_of_every_kind_are_of_the_documented_shape(answer: Answer) -> None:
    GenerateResponse.model_validate(rendered(answer), strict=True)


def test_token_ids_are_given_when_asked_for() -> None:
    assert rendered(make_answer(), return_token_ids=True)["outputs"][0]["token_ids"] == [7, 8, 9]


def test_tokens_of_all_outputs_are_counted() -> None:
    metrics = Metrics()
    usage = rendered(make_answer(outputs=4), metrics)["usage"]

    assert usage["completion_tokens"] == 12
    counted = {
        kind: metrics.registry.get_sample_value("batchserve_tokens_total", {"kind": kind})
        for kind in ("prompt", "completion", "cached")
    }
    assert counted == {"prompt": 3, "completion": 12, "cached": 2}
    assert metrics.registry.get_sample_value("batchserve_e2e_seconds_sum") == pytest.approx(1.0)
    assert metrics.registry.get_sample_value("batchserve_ttft_seconds_sum") == pytest.approx(0.1)


def test_an_unknown_first_token_is_not_observed_as_zero() -> None:
    metrics = Metrics()
    rendered(make_answer(stats=None), metrics)

    assert metrics.registry.get_sample_value("batchserve_ttft_seconds_count") == 0


# --- the metrics of OpenAI's answers ---


def test_vllms_names_say_what_the_timings_say() -> None:
    found = render.openai_metrics([make_answer()], Metrics())

    times = found["timings"]
    assert found["time_to_first_token_ms"] == times["prefill_ms"] == pytest.approx(80)
    assert found["queue_time_ms"] == times["engine_queue_ms"] == pytest.approx(8)
    assert found["generation_time_ms"] == times["decode_ms"] == pytest.approx(800)
    assert found["mean_itl_ms"] == times["itl_ms"] == pytest.approx(400)
    assert found["tokens_per_second"] == times["tokens_per_s"] == pytest.approx(3 / 0.88)
    assert found["window"] == {"id": 17, "size": 1, "position": 0, "release": "full"}
    assert "requests" not in found


def test_of_several_outputs_vllm_says_nothing_and_the_timings_stay() -> None:
    found = render.openai_metrics([make_answer(outputs=2)], Metrics())

    assert all(found[name] is None for name in render.VLLM_METRICS)
    assert found["timings"]["e2e_ms"] == pytest.approx(1000)


def test_of_several_prompts_the_first_is_on_top_and_all_are_in_order() -> None:
    late = EngineStats(100.012, 100.02, 100.5, 100.9, 0.09, 3, 0, RAW)
    metrics = Metrics()
    found = render.openai_metrics([make_answer(), make_answer(stats=late)], metrics)

    first, second = found["requests"]
    assert {name: value for name, value in found.items() if name != "requests"} == first
    assert (first["time_to_first_token_ms"], second["time_to_first_token_ms"]) == pytest.approx((80, 480))
    assert metrics.registry.get_sample_value("batchserve_tokens_total", {"kind": "completion"}) == 6


def test_without_statistics_vllms_numbers_are_unknown_not_zero() -> None:
    found = render.openai_metrics([make_answer(stats=None)], Metrics())
    assert all(found[name] is None for name in render.VLLM_METRICS)


# --- rows of a batch ---


def test_a_row_holds_a_response_or_an_error() -> None:
    good = render.batch_row(0, rendered(make_answer()), None)
    bad = render.batch_row(1, None, QueueFull("full", queue_depth=3, limit=4))

    for row in (good, bad):
        BatchRow.model_validate(row, strict=True)
    assert (good["index"], good["status"], good["error"]) == (0, 200, None)
    assert (bad["index"], bad["status"], bad["response"]) == (1, 429, None)
    assert bad["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "code": "queue_full",
        "param": None,
        "queue_depth": 3,
        "limit": 4,
    }


def test_the_end_of_a_batch_sums_up_its_rows() -> None:
    rows = [
        render.batch_row(0, rendered(make_answer()), None),
        render.batch_row(1, None, QueueFull("full")),
        render.batch_row(2, rendered(make_answer(outputs=2)), None),
        render.batch_row(3, rendered(make_answer(with_window=False)), None),
    ]

    rest = render.batch_rest("batch-1", "mine", "served", 100.0, rows)

    BatchResponse.model_validate({**rest, "results": rows}, strict=True)
    assert rest["counts"] == {"total": 4, "succeeded": 3, "failed": 1}
    assert rest["windows"] == [{"id": 17, "size": 1, "release": "full"}]
    assert (rest["timings"]["prompt_tokens"], rest["timings"]["completion_tokens"]) == (9, 12)
    assert rest["request_id"] == "mine"


def test_a_batch_whose_rows_have_all_failed_is_summed_up_too() -> None:
    rows = [render.batch_row(0, None, QueueFull("full"))]
    rest = render.batch_rest("batch-1", None, "served", 100.0, rows)

    assert rest["counts"] == {"total": 1, "succeeded": 0, "failed": 1}
    assert rest["windows"] == []


# --- bytes ---


def test_texts_are_written_as_utf8_and_strictly() -> None:
    assert render.encode({"a": "ñ日😀"}) == '{"a":"ñ日😀"}'.encode()
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            render.encode({"a": number})


def test_large_and_small_answers_are_written_alike() -> None:
    large = rendered(make_answer(logprobs=logprobs(300, top=20), prompt_logprobs=[None, *logprobs(50)]))

    async def both() -> tuple[bytes, bytes]:
        row = render.batch_row(0, large, None)
        return await render.encode_answer(large), await render.encode_answer(row)

    answer, row = asyncio.run(both())
    assert answer == render.encode(large)
    assert json.loads(row)["response"] == json.loads(answer)


async def test_a_row_without_a_response_is_written() -> None:
    row = render.batch_row(0, None, QueueFull("full"))

    assert json.loads(await render.encode_answer(row)) == row


async def test_a_large_answer_does_not_hold_the_event_loop() -> None:
    large = rendered(make_answer(logprobs=logprobs(8_000, top=20)))
    longest, over = 0.0, False
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        nonlocal longest
        while not over:
            before = loop.time()
            await asyncio.sleep(0.001)
            longest = max(longest, loop.time() - before)

    watcher = asyncio.create_task(watch())
    written = await render.encode_answer(large)
    over = True
    await watcher

    print(f"{len(written)} bytes; the loop was held for {longest * 1000:.0f} ms at most")
    assert longest < 2.5
