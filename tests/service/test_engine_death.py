"""An engine that dies or hangs: nobody is left waiting, and the process ends with a code that says so."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from app.batching.batcher import Batcher
from tests.service.support import Json, check_error, service, serving, strict_json, text_of

ANSWERED_S = 2.0
CALLERS = 20


async def test_a_dead_engine_answers_everybody_turns_unready_and_ends_the_process(folder: Path) -> None:
    fake = {"step_ms": 10, "faults": {"die_text": "DIE"}}
    with serving(folder, fake, batch_size=2, max_wait_ms=1) as process:
        async with process.caller() as caller:
            assert text_of(await caller.generate(prompt="before", max_tokens=6)) == "BEFORE"
            ends: list[float] = []

            async def waits(body: Json) -> Json:
                error = await caller.generate(body, status=503)
                ends.append(time.monotonic())
                return error

            busy = asyncio.create_task(caller.generate(prompt="busy", max_tokens=100))
            await caller.wait_for_metric("batchserve_window_size_count", 2)
            dies = asyncio.create_task(waits({"prompt": "DIE", "priority": -1}))
            others = [asyncio.create_task(waits({"prompt": "w"})) for _ in range(CALLERS)]
            whole = asyncio.create_task(caller.batch([{"prompt": "b"}] * CALLERS))
            lines = asyncio.create_task(caller.lines([{"prompt": "l"}] * CALLERS))
            await caller.wait_for_metric("batchserve_queue_requests", 1 + 3 * CALLERS)
            assert text_of(await busy).startswith("BUSY")
            dispatched = time.monotonic()
            errors = await asyncio.gather(dies, *others)
            answer, *got = await asyncio.gather(whole, lines)
            assert {error["code"] for error in errors} == {"engine_dead"}
            assert {row["error"]["code"] for row in answer["results"]} == {"engine_dead"}
            *rows, rest = filter(None, got[0])
            assert {row["status"] for row in rows} == {503}
            assert rest["counts"] == {"total": CALLERS, "succeeded": 0, "failed": CALLERS}
            assert max(ends) < dispatched + ANSWERED_S
            died = time.monotonic()

            for path in ("/readyz", "/health"):
                assert check_error(await caller.get(path))["code"] == "engine_dead"
            assert strict_json((await caller.get("/livez")).content)["status"] == "dead"
            assert (await caller.generate(prompt="late", status=503))["code"] == "engine_dead"
            assert (await caller.batch([{"prompt": "late"}], status=503))["code"] == "engine_dead"
            assert await caller.metric("batchserve_errors_total", code="engine_dead") >= CALLERS
            assert await caller.metric("batchserve_client_disconnected_total") == 0
            assert await process.ended(12) == 70
            print(f"the process ended {time.monotonic() - died:.1f} s after the last answer")
            assert 3 < time.monotonic() - died < 9
        assert "Traceback" not in process.log


async def test_a_call_that_hangs_holds_up_neither_limits_of_waiting_nor_health_nor_the_end(folder: Path) -> None:
    drain_timeout_s = 1.0
    fake = {"faults": {"hang_text": "HANG", "hang_s": 120}}
    with serving(folder, fake, batch_size=2, max_wait_ms=1, drain_timeout_s=drain_timeout_s) as process:
        async with process.caller() as caller:
            hangs = asyncio.create_task(caller.generate(prompt="HANG", status=503))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            assert (await caller.generate(prompt="w", queue_timeout_s=0.1, status=504))["code"] == "queue_timeout"
            assert (await caller.get("/livez")).status_code == 200
            behind = [asyncio.create_task(caller.generate(prompt="b", status=503)) for _ in range(5)]
            rows = asyncio.create_task(caller.batch([{"prompt": "r"}] * 5))
            await caller.wait_for_metric("batchserve_queue_requests", 10)
            process.signal(signal.SIGTERM)
            signalled = time.monotonic()
            errors = await asyncio.gather(hangs, *behind)
            answer = await rows
            answered = time.monotonic() - signalled
            assert {error["code"] for error in errors} == {"shutting_down"}
            assert {row["status"] for row in answer["results"]} == {503}
            assert drain_timeout_s - 0.1 < answered < drain_timeout_s + 1
            assert await process.ended(15) == 1
            ended = time.monotonic() - signalled
            print(f"answered {answered:.2f} s and ended {ended:.2f} s after the signal")
            assert ended < drain_timeout_s + 5, "what comes after the drain is bounded, and there is one drain"


async def test_a_batcher_that_fails_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a fault in the batcher")

    async with service() as caller:
        monkeypatch.setattr(Batcher, "_window", fails)
        async with asyncio.timeout(ANSWERED_S):
            errors = await asyncio.gather(*[caller.generate(prompt=f"{n}", status=503) for n in range(5)])
            assert {error["code"] for error in errors} == {"engine_dead"}
            assert "a fault in the batcher" in errors[0]["message"]
            assert check_error(await caller.get("/readyz"))["code"] == "engine_dead"
