"""Processes that are killed: nobody waits for ever, nothing is left running. Each test starts services of its own."""

import asyncio
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.engine.inline import strict_json
from tests.engine.process import GONE_S, ServiceProcess, service_process, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLD_S = 10.0
"""By when every caller must have heard; the service promises two seconds, a busy machine gets more."""
DEAD_S = 5.0
"""How long a service with a dead engine answers before it ends."""
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}


async def waiting_callers(client: httpx.AsyncClient) -> "list[asyncio.Task[httpx.Response]]":
    """One batch and ten single callers, more than one window of work that takes much longer than the test."""
    rows = {"requests": [{"prompt": f"{number} bears"} for number in range(40)], "defaults": ENDLESS}
    calls = [client.post("/batch", json=rows)]
    calls += [client.post("/generate", json={"prompt": f"{number} wolves", **ENDLESS}) for number in range(10)]
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(2)
    assert not any(task.done() for task in tasks)
    return tasks


def codes(answer: httpx.Response) -> set[str]:
    """The error codes that a caller was given."""
    body = strict_json(answer.content)
    if "results" in body:
        return {row["error"]["code"] for row in body["results"]}
    return {body["error"]["code"]}


async def heard_within(tasks: "list[asyncio.Task[httpx.Response]]", timeout_s: float) -> list[httpx.Response]:
    done, pending = await asyncio.wait(tasks, timeout=timeout_s)
    assert not pending, f"{len(pending)} callers still wait"
    assert len(done) == len(tasks)
    return [task.result() for task in tasks]


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
async def test_when_a_process_of_the_engine_is_killed_every_caller_hears_of_it(
    tmp_path: Path, tiny_model: Path, victim: str
) -> None:
    with service_process(tmp_path, tiny_model, "separate") as service:
        service.wait_ready()
        async with service.client() as client:
            tasks = await waiting_callers(client)
            service.member(victim).kill()
            killed = time.monotonic()
            answers = await heard_within(tasks, TOLD_S)
            assert set().union(*map(codes, answers)) == {"engine_dead"}
            assert [answer.status_code for answer in answers] == [200] + [503] * 10
            assert all("retry-after" in answer.headers for answer in answers[1:])
            for route in ("/readyz", "/health"):
                assert (await client.get(route)).status_code == 503
            refused = await client.post("/generate", json={"prompt": "Hi"})
            assert (refused.status_code, codes(refused)) == (503, {"engine_dead"})
            assert (await client.get("/livez")).status_code == 200
        assert await asyncio.to_thread(service.wait_exit, TOLD_S + DEAD_S) == 70
        assert time.monotonic() - killed > DEAD_S - 1
        service.wait_gone()


async def test_when_the_service_is_killed_its_engine_goes_too(tmp_path: Path, tiny_model: Path) -> None:
    with service_process(tmp_path, tiny_model, "separate") as service:
        service.wait_ready()
        async with service.client() as client:
            tasks = await waiting_callers(client)
            assert len(service.family()) >= 3
            service.send(signal.SIGKILL)
            await asyncio.wait(tasks, timeout=TOLD_S)
            assert all(isinstance(task.exception(), httpx.HTTPError) for task in tasks)
        assert service.wait_exit(1) == -signal.SIGKILL
        service.wait_gone()


def stop_while_loading(service: ServiceProcess, number: signal.Signals, at_s: float) -> int:
    """The exit code of a service that gets a signal so long after its start, while its model loads."""
    wait_until(lambda: time.monotonic() >= service.started + at_s, at_s + 1, "time stands still")
    service.family()
    code = httpx.get(f"{service.url}/readyz", timeout=30).status_code
    assert code == 503, "it is ready already: choose an earlier moment"
    service.send(number)
    return service.wait_exit(GONE_S)


@pytest.mark.parametrize("at_s", [3, 10])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_service_that_is_stopped_while_it_loads_leaves_nothing(
    tmp_path: Path, tiny_model: Path, number: signal.Signals, at_s: float
) -> None:
    with service_process(tmp_path, tiny_model, "separate") as service:
        code = stop_while_loading(service, number, at_s)
        assert code == (0 if number is signal.SIGTERM else -number)
        service.wait_gone()
        assert "Traceback" not in service.err


async def test_sigterm_with_a_queue_ends_with_0_when_all_was_answered(tmp_path: Path, tiny_model: Path) -> None:
    with service_process(tmp_path, tiny_model, "separate") as service:
        service.wait_ready()
        async with service.client() as client:
            requests = [{"prompt": f"{number} bears", "max_tokens": 60} for number in range(100)]
            body = {"requests": requests, "defaults": {"ignore_eos": True, "temperature": 0}}
            work = asyncio.create_task(client.post("/batch", json=body))
            await asyncio.sleep(0.5)
            service.send(signal.SIGTERM)
            assert strict_json((await work).content)["counts"]["succeeded"] == 100
        assert await asyncio.to_thread(service.wait_exit, GONE_S) == 0
        service.wait_gone()
        assert "Traceback" not in service.err


async def test_a_second_signal_ends_at_once_and_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    """And what is too long for ``drain_timeout_s`` would be cut with exit code 1: see the service's own tests."""
    with service_process(tmp_path, tiny_model, "inline") as service:
        service.wait_ready()
        async with service.client() as client:
            tasks = await waiting_callers(client)
            service.send(signal.SIGTERM)
            await asyncio.sleep(0.5)
            begun = time.monotonic()
            service.send(signal.SIGTERM)
            assert await asyncio.to_thread(service.wait_exit, 3) not in (0, None)
            assert time.monotonic() - begun < 2
            await asyncio.wait(tasks, timeout=3)
        service.wait_gone()


async def test_work_that_outlasts_the_drain_is_answered_503_and_the_process_ends_with_1(
    tmp_path: Path, tiny_model: Path
) -> None:
    with service_process(tmp_path, tiny_model, "inline", "--drain-timeout-s", "1") as service:
        service.wait_ready()
        async with service.client() as client:
            tasks = await waiting_callers(client)
            service.send(signal.SIGTERM)
            answers = await heard_within(tasks, TOLD_S)
            assert set().union(*map(codes, answers)) == {"shutting_down"}
        assert await asyncio.to_thread(service.wait_exit, GONE_S) == 1
        service.wait_gone()
