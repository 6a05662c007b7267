"""The engine core in a process of its own: the same answers and timings, and a clean end."""

import asyncio
import signal
import time
from typing import Any

import pytest

from tests.engine.checks import check_answer, check_batch, check_between
from tests.engine.inline import strict_json
from tests.engine.process import GONE_S, ServiceProcess

pytestmark = pytest.mark.engine


async def test_it_has_an_engine_core_and_a_worker_of_its_own(separate_service: ServiceProcess) -> None:
    async with separate_service.client() as client:
        info = strict_json((await client.get("/info")).content)
    assert info["backend"]["engine_process"] == "separate"
    core, worker = separate_service.member("EngineCore"), separate_service.member("Worker")
    assert core.ppid() == separate_service.pid
    assert worker.ppid() == core.pid


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 1},
        {"max_tokens": 12},
        {"max_tokens": 12, "n": 3, "temperature": 1, "seed": 5},
        {"max_tokens": 3, "logprobs": 5, "prompt_logprobs": 2},
    ],
    ids=str,
)
async def test_timings_keep_to_the_formulas_across_two_processes(
    separate_service: ServiceProcess, body: dict[str, Any]
) -> None:
    async with separate_service.client() as client:
        before = time.time()
        content = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0, **body}
        answer = strict_json((await client.post("/generate", json=content)).content)
        after = time.time()
    check_answer(answer)
    check_between(answer["timings"], before, after)
    assert not answer["timings"]["clock_anomaly"]
    assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1)


async def test_windows_of_mixed_lengths_keep_to_the_formulas(separate_service: ServiceProcess) -> None:
    requests = [{"prompt": f"{number}. Once upon a time", "max_tokens": 1 + number % 20} for number in range(70)]
    defaults = {"ignore_eos": True, "temperature": 0}
    async with separate_service.client() as client:
        before = time.time()
        answer = await client.post("/batch", json={"requests": requests, "defaults": defaults})
        after = time.time()
    body = strict_json(answer.content)
    responses = check_batch(body, 70)
    assert [window["size"] for window in body["windows"]] == [32, 32, 6]
    for response, request in zip(responses, requests, strict=True):
        check_between(response["timings"], before, after)
        assert response["usage"]["completion_tokens"] == request["max_tokens"]
        if response["usage"]["completion_tokens"] < 20:
            assert response["timings"]["window_tail_ms"] > 0


async def test_bad_requests_cost_their_neighbours_nothing(separate_service: ServiceProcess) -> None:
    wrong: list[dict[str, Any]] = [{"prompt_token_ids": [10**9]}, {"prompt": "Hi", "seed": 2**64}, {"prompt": ""}]
    good = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with separate_service.client() as client:
        answer = await client.post("/batch", json={"requests": [good, *wrong, good]})
        rows = strict_json(answer.content)["results"]
    assert [row["status"] for row in rows] == [200, 400, 400, 400, 200]
    assert rows[0]["response"]["outputs"][0]["text"] == rows[4]["response"]["outputs"][0]["text"]


async def test_ctrl_c_reaches_the_service_alone_and_accepted_work_finishes(separate_service: ServiceProcess) -> None:
    """The last one here: it ends the service. A terminal sends Ctrl-C to the whole process group."""
    url = separate_service.url
    async with separate_service.client() as client:
        requests = [{"prompt": f"{number}. Once upon a time", "max_tokens": 200} for number in range(80)]
        body = {"requests": requests, "defaults": {"ignore_eos": True, "temperature": 0}}
        work = asyncio.create_task(client.post(f"{url}/batch", json=body))
        await asyncio.sleep(1)
        assert not work.done()
        separate_service.send_group(signal.SIGINT)
        await asyncio.sleep(0.3)
        late = await client.post("/generate", json={"prompt": "Hi"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert late.headers["connection"] == "close"
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        answer = strict_json((await work).content)
    check_batch(answer, 80)
    assert separate_service.wait_exit(GONE_S) == 0
    separate_service.wait_gone()
