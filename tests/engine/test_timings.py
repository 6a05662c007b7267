"""Timings over real results: every answer keeps to the formulas, whatever its window was made of."""

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.checks import check_answer, check_batch, check_between
from tests.engine.inline import Inline

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = [f"Once upon a time there were {number} bears, who" for number in range(32)]
LONG_PROMPT = "The bears went over the mountain to see what they could see. " * 3


async def timed(inline: Inline, **body: Any) -> Any:
    """An answer whose stamps lie between our own readings of the clock, and keep to all formulas."""
    before = time.time()
    answer = await inline.generate(**body)
    check_between(answer["timings"], before, time.time())
    check_answer(answer)
    assert not answer["timings"]["clock_anomaly"]
    return answer


async def test_a_request_alone_has_all_its_stamps_in_order(inline: Inline) -> None:
    answer = await timed(inline, prompt="Once upon a time", max_tokens=12, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["window"] == {**answer["window"], "size": 1, "position": 0, "release": "max_wait"}
    assert answer["timings"]["window_wait_ms"] >= 10
    assert answer["timings"]["engine_ttft_ms"] is not None


async def test_one_token_has_no_inter_token_latency(inline: Inline) -> None:
    timings = (await timed(inline, prompt="Once upon a time", max_tokens=1))["timings"]
    assert timings["itl_ms"] is None
    assert timings["first_token_at"] == timings["last_token_at"]


async def test_with_several_outputs_the_rate_counts_all_tokens(inline: Inline) -> None:
    answer = await timed(inline, prompt="Once upon a time", max_tokens=9, n=3, temperature=1, seed=1, ignore_eos=True)
    assert len(answer["outputs"]) == 3
    assert answer["usage"]["completion_tokens"] == 27
    assert answer["timings"]["request_state_stats"]["num_generation_tokens"] == 9
    assert answer["timings"]["tokens_per_s"] == pytest.approx(27 / answer["timings"]["inference_ms"] * 1000)


async def test_the_tail_is_what_longer_neighbours_cost(inline: Inline) -> None:
    lengths = [1, 5, 20, 60]
    rows = await inline.batch([{"prompt": PROMPTS[0], "max_tokens": length, "ignore_eos": True} for length in lengths])
    timings = [row["response"]["timings"] for row in rows]
    assert len({row["response"]["window"]["id"] for row in rows}) == 1
    tails = [times["window_tail_ms"] for times in timings]
    assert tails == sorted(tails, reverse=True)
    assert min(tails[:-1]) > 0
    # A member waits for the longest one, no longer.
    for times in timings:
        assert times["last_token_at"] + times["window_tail_ms"] / 1000 == pytest.approx(times["completed_at"], abs=1e-5)
        assert times["window_tail_ms"] >= (timings[-1]["last_token_at"] - times["last_token_at"]) * 1000 - 0.01


async def test_a_batch_over_several_windows_keeps_the_formulas(inline: Inline) -> None:
    body = {
        "requests": [{"prompt": text, "max_tokens": 2 + number % 5} for number, text in enumerate(PROMPTS * 2)],
        "defaults": {"ignore_eos": True, "temperature": 0},
    }
    before = time.time()
    status, answer = await inline.post("/batch", body)
    assert status == 200
    responses = check_batch(answer, 64)
    assert [window["size"] for window in answer["windows"]] == [32, 32]
    for response in responses:
        check_between(response["timings"], before, time.time())
        assert not response["timings"]["clock_anomaly"]
    later = [response for response in responses if response["window"]["id"] == answer["windows"][1]["id"]]
    first_done = max(r["timings"]["completed_at"] for r in responses if r not in later)
    assert min(r["timings"]["dispatched_at"] for r in later) >= first_done - 0.005


async def test_a_preempted_request_says_so_and_its_durations_stay_sane(inline: Inline) -> None:
    requests = [{"prompt": f"{number}. {LONG_PROMPT}", "max_tokens": 110} for number in range(12)]
    before = time.time()
    status, answer = await inline.post(
        "/batch", {"requests": requests, "defaults": {"ignore_eos": True, "temperature": 0}}
    )
    after = time.time()
    assert status == 200
    responses = check_batch(answer, 12)
    preempted = [r for r in responses if r["timings"]["num_preemptions"] > 0]
    assert 0 < len(preempted) < 12
    for response in responses:
        check_between(response["timings"], before, after)
        assert response["usage"]["completion_tokens"] == 110
    # They ran again what the others did once.
    assert min(r["timings"]["decode_ms"] for r in preempted) > max(
        r["timings"]["decode_ms"] for r in responses if r not in preempted
    )
    alone = await inline.text(**requests[11], ignore_eos=True)
    assert responses[11]["outputs"][0]["text"] == alone
    inline.assert_idle()


async def test_vllms_own_statistics_come_untouched(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    generate = inline.llm.generate

    def record(*args: Any, **kwargs: Any) -> list[Any]:
        outputs: list[Any] = generate(*args, **kwargs)
        seen.extend(dataclasses.asdict(output.metrics) for output in outputs)
        return outputs

    monkeypatch.setattr(inline.llm, "generate", record)
    rows = await inline.batch([{"prompt": text, "max_tokens": 4} for text in PROMPTS[:5]])
    assert [row["response"]["timings"]["request_state_stats"] for row in rows] == seen


async def test_a_step_of_the_wall_clock_harms_no_duration(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, begun = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall() - 3600 * (time.monotonic() > begun + 0.05))
    answer = await inline.generate(prompt=PROMPTS[0], max_tokens=60, ignore_eos=True)
    elapsed_ms = (time.monotonic() - begun) * 1000
    timings = answer["timings"]
    assert not timings["clock_anomaly"]
    assert 0 < timings["e2e_ms"] <= elapsed_ms
    for name in ("decode_ms", "inference_ms", "ttft_ms", "window_tail_ms"):
        assert 0 <= timings[name] <= elapsed_ms


REQUESTS = st.fixed_dictionaries(
    {"prompt": st.sampled_from(PROMPTS), "max_tokens": st.integers(1, 24), "ignore_eos": st.just(True)},
    optional={
        "n": st.integers(1, 3),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.floats(0.1, 2),
        "priority": st.integers(-100, 100),
        "logprobs": st.integers(0, 3),
        "return_token_ids": st.booleans(),
    },
)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUESTS, min_size=1, max_size=40))
async def test_any_window_keeps_the_formulas(inline: Inline, requests: list[dict[str, Any]]) -> None:
    for request in requests:
        request.setdefault("temperature", 1.0 if request.get("n", 1) > 1 else 0.0)
    before = time.time()
    status, answer = await inline.post("/batch", {"requests": requests})
    assert status == 200
    for request, response in zip(requests, check_batch(answer, len(requests)), strict=True):
        check_between(response["timings"], before, time.time())
        assert response["usage"]["completion_tokens"] == request["max_tokens"] * request.get("n", 1)
    inline.assert_idle()
