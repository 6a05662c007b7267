"""`scheduling: rolling` on a real engine: faults, callers that hang up or run out of time, drain, a dead engine."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from app.main import stop
from app.settings import Settings
from tests.engine import faults
from tests.engine.checks import CLOCKS_MS, check_timings
from tests.engine.conftest import ENGINE_CONFIG
from tests.engine.inline import Inline, TheEngine, running
from tests.engine.process import GONE_S, Remote, rolling_service
from tests.engine.test_isolation import BREAKING, check_rows, row, texts_alone, window_of
from tests.engine.test_openai import COMPLETIONS, joined
from tests.service.support import events_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SOON_S = 1.0
"""Within so long after its caller has gone, or its time has passed, the engine is free."""
SIZE = 4
Fault = Callable[[Inline, pytest.MonkeyPatch], None]
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "n": 8, "temperature": 1, "seed": 1}
"""Seconds of work."""


def settings_of(model: Path, **values: Any) -> Settings:
    own = {"model": str(model), "served_model_name": "tiny", "engine_process": "inline", "scheduling": "rolling"}
    return Settings.model_validate({**own, "vllm_config": ENGINE_CONFIG, "batch_size": SIZE, **values})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rolled(the_engine: TheEngine, tiny_model: Path) -> AsyncIterator[Inline]:
    """In the test process, with up to four requests in the engine."""
    await the_engine.close()
    async with running(settings_of(tiny_model)) as service:
        yield service


async def until(condition: Callable[[], Any], seconds: float = SOON_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.002)


async def until_idle(service: Inline) -> None:
    """Until nothing is left in the engine, which must be soon."""
    await until(lambda: not service.engine.output_processor.request_states)
    service.assert_idle()


# --- who runs when ---


async def test_a_request_is_taken_in_when_another_has_ended_and_answered_at_once(rolled: Inline) -> None:
    lengths = [3 + 4 * (number % 5) for number in range(24)]
    rows = [
        {"prompt": f"{number} bears", "max_tokens": length, "ignore_eos": True} for number, length in enumerate(lengths)
    ]
    answers = [row["response"] for row in await rolled.batch(rows)]

    windows = [answer["window"] for answer in answers]
    assert len({window["id"] for window in windows}) == len(rows)
    assert {(window["position"], window["release"]) for window in windows} == {(None, "rolling")}
    sizes = [window["size"] for window in windows]
    assert max(sizes) == SIZE
    assert sizes.count(SIZE) > len(sizes) / 2
    for answer, length in zip(answers, lengths, strict=True):
        check_timings(answer["timings"], length, outputs=1)
    spans = [(answer["timings"]["dispatched_at"], answer["timings"]["last_token_at"]) for answer in answers]
    for moment, _ in spans:
        assert sum(begin <= moment < end - CLOCKS_MS / 1000 for begin, end in spans) <= SIZE
    tails = sorted(answer["timings"]["window_tail_ms"] for answer in answers)
    steps = sorted(answer["timings"]["itl_ms"] for answer in answers)
    assert tails[len(tails) // 2] < 10 * steps[len(steps) // 2] + 10  # nobody waits for a longer neighbour
    rolled.assert_idle()


async def test_texts_are_those_of_each_request_alone(rolled: Inline) -> None:
    alone = await texts_alone(rolled, window_of(set()))
    for _ in range(3):
        check_rows(await rolled.batch(window_of(set())), set(), alone)
    await rolled.assert_serves()


# --- one failing request costs its neighbours nothing ---


@pytest.mark.parametrize("position", [0, 3, 7])
@pytest.mark.parametrize("fault", BREAKING, ids=lambda fault: fault.__name__)
async def test_a_culprit_gets_its_error_and_the_others_their_text(
    rolled: Inline, monkeypatch: pytest.MonkeyPatch, fault: Fault, position: int
) -> None:
    alone = await texts_alone(rolled, window_of(set()))
    with monkeypatch.context() as patch:
        fault(rolled, patch)
        rows = await rolled.batch(window_of({position}))
    check_rows(rows, {position}, alone)
    await until_idle(rolled)
    check_rows(await rolled.batch(window_of(set())), set(), alone)
    await rolled.assert_serves()


@pytest.mark.parametrize("culprits", [{1, 6}, {0, 1, 2, 3}, set(range(8))], ids=str)
@pytest.mark.parametrize("fault", [faults.step_after, faults.add_after], ids=lambda fault: fault.__name__)
async def test_each_of_several_culprits_gets_its_error(
    rolled: Inline, monkeypatch: pytest.MonkeyPatch, fault: Fault, culprits: set[int]
) -> None:
    alone = await texts_alone(rolled, window_of(set(), n=2, temperature=1, seed=5))
    with monkeypatch.context() as patch:
        fault(rolled, patch)
        rows = await rolled.batch(window_of(culprits, n=2, temperature=1, seed=5))
    check_rows(rows, culprits, alone)
    await rolled.assert_serves()


async def test_what_vllm_refuses_of_a_request_is_its_own_error(rolled: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = await texts_alone(rolled, window_of(set()))
    with monkeypatch.context() as patch:
        faults.add_refuses(rolled, patch)
        rows = await rolled.batch(window_of({2}))
    check_rows(rows, {2}, alone, "invalid_request")
    await rolled.assert_serves()


async def test_a_stream_goes_on_when_a_neighbour_makes_a_step_fail(
    rolled: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens of before the failure have gone out; those of the second run are the same, and are not told twice."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": 3}
    _, whole = await rolled.post(COMPLETIONS, body)
    streaming = asyncio.create_task(rolled.client.post(COMPLETIONS, json={**body, "stream": True}))
    with monkeypatch.context() as patch:
        faults.step_late(rolled, patch)
        await until(lambda: rolled.core.scheduler.running)
        await asyncio.sleep(0.02)
        status, _ = await rolled.post("/generate", row(0, poisoned=True))
        answer = await streaming
    assert status == 500
    events, is_ended = events_of(answer.content)
    assert is_ended, events[-1]
    text, chunks = whole["choices"][0]["text"], [event for event in events if event["choices"]]
    assert joined(events)[0]["text"] == text
    assert len(chunks) > 3
    await rolled.assert_serves()


# --- callers that do not wait ---


async def test_a_caller_that_hangs_up_frees_the_engine(rolled: Inline) -> None:
    neighbour = asyncio.create_task(rolled.generate(prompt="Hi", max_tokens=200, ignore_eos=True))
    calls = [asyncio.create_task(rolled.client.post("/generate", json=LONG)) for _ in range(6)]
    await until(lambda: len(rolled.engine.output_processor.parent_requests) == SIZE - 1)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: not rolled.engine.output_processor.parent_requests)

    answer = await neighbour
    assert answer["usage"]["completion_tokens"] == 200
    await until_idle(rolled)
    await rolled.assert_serves()


async def test_a_request_that_is_not_done_in_time_is_aborted_in_the_engine(rolled: Inline) -> None:
    neighbour = asyncio.create_task(rolled.generate(prompt="Hi", max_tokens=200, ignore_eos=True))
    begun = time.monotonic()
    status, answer = await rolled.post("/generate", {**LONG, "request_timeout_s": 0.3})
    assert 0.29 < time.monotonic() - begun < 3
    assert (status, answer["error"]["code"]) == (504, "request_timeout")
    assert (await neighbour)["usage"]["completion_tokens"] == 200
    await until_idle(rolled)


async def test_in_a_batch_only_the_row_that_is_late_fails(rolled: Inline) -> None:
    rows = [{"prompt": "Hi", "max_tokens": 3, "ignore_eos": True} for _ in range(10)]
    rows[4] = {**LONG, "request_timeout_s": 0.3}
    found = await rolled.batch(rows)
    assert [row["status"] for row in found] == [200] * 4 + [504] + [200] * 5
    await until_idle(rolled)


async def test_vllms_own_gauge_sees_that_the_engine_is_free(rolling: Remote) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await rolling.client.post("/generate", json={**LONG, "max_tokens": 1000}, timeout=0.5)
    deadline = time.monotonic() + SOON_S
    while True:
        lines = (await rolling.client.get("/metrics")).text.splitlines()
        values = [
            line.split()[-1]
            for line in lines
            if line.startswith(("vllm:num_requests_running{", "batchserve_running_requests "))
        ]
        if values == ["0.0", "0.0"]:
            return
        assert time.monotonic() < deadline, values
        await asyncio.sleep(0.02)


# --- the end ---


async def test_a_drain_finishes_what_was_accepted(the_engine: TheEngine, rolled: Inline, tiny_model: Path) -> None:
    sent = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
    accepted = [asyncio.create_task(rolled.post("/batch", {"requests": [sent] * 20}))]
    accepted += [asyncio.create_task(rolled.post("/generate", sent)) for _ in range(4)]
    await asyncio.sleep(0.1)
    stopping = asyncio.create_task(stop(rolled.service))
    await asyncio.sleep(0)
    status, refused = await rolled.post("/generate", sent)
    assert (status, refused["error"]["code"]) == (503, "shutting_down")
    await stopping
    answers = [await task for task in accepted]
    assert [status for status, _ in answers] == [200] * 5
    assert answers[0][1]["counts"] == {"total": 20, "succeeded": 20, "failed": 0}
    rolled.assert_idle()


@pytest.mark.parametrize("culprit", ["VLLM::EngineCore", "VLLM::Worker"])
async def test_a_dead_engine_ends_every_request_and_the_service(tmp_path: Path, tiny_model: Path, culprit: str) -> None:
    with rolling_service(tmp_path, tiny_model, "--engine-process", "separate") as service:
        service.wait_ready()
        async with service.client() as client:
            calls = [asyncio.create_task(client.post("/generate", json=LONG)) for _ in range(6)]
            stream = asyncio.create_task(client.post(COMPLETIONS, json={**LONG, "model": "tiny", "stream": True}))
            await asyncio.sleep(1.5)
            family = psutil.Process(service.process.pid).children(recursive=True)
            for process in family:
                if process.name() == culprit:
                    process.send_signal(signal.SIGKILL)
            answers = await asyncio.wait_for(asyncio.gather(*calls), 10)
            assert {answer.status_code for answer in answers} == {503}
            assert {answer.json()["error"]["code"] for answer in answers} == {"engine_dead"}
            events, is_ended = events_of((await stream).content)
            assert not is_ended
            assert events[-1]["error"]["code"] == "engine_dead"
        assert service.process.wait(GONE_S) == 70
