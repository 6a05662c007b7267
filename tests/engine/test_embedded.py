"""The embedded model in a service as a user starts it: `batchserve serve`, nothing set but the port."""

import asyncio
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.checks import check_answer, check_batch, check_between
from tests.engine.inline import strict_json
from tests.engine.process import GONE_S, ServiceProcess

pytestmark = pytest.mark.engine

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
}


def asked(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


async def test_it_knows_the_capital_of_france(embedded_service: ServiceProcess) -> None:
    async with embedded_service.client() as client:
        before = time.time()
        body = {"messages": asked("What is the capital of France?"), "temperature": 0}
        answer = await client.post("/generate", json=body)
        after = time.time()
    assert answer.status_code == 200
    body = strict_json(answer.content)
    assert "Paris" in body["outputs"][0]["text"]
    assert body["outputs"][0]["finish_reason"] == "stop"  # by its end-of-turn token, within default_max_tokens
    assert body["sampling"]["max_tokens"] == 256
    assert body["model"] == "embedded:smollm2-135m"
    check_answer(body)
    check_between(body["timings"], before, after)


def test_the_readmes_quickstart_gives_what_it_shows(embedded_service: ServiceProcess) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    quickstart = readme[readme.index("## Quickstart") : readme.index("## Routes")]
    command, shown = re.findall(r"```(?:bash|json)\n(.*?)```", quickstart, re.DOTALL)
    command = command.replace("http://127.0.0.1:8000", embedded_service.url)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, check=True).stdout
    answer = strict_json(printed)
    texts = [row["response"]["outputs"][0]["text"] for row in answer["results"]]
    assert f'"text": "{texts[0]}", "finish_reason": "stop"' in shown
    assert json.dumps(answer["counts"]) in shown
    assert [row["response"]["usage"]["completion_tokens"] for row in answer["results"]] == [8, 12]
    assert answer["results"][0]["response"]["timings"]["window_tail_ms"] > 0


async def test_a_batch_of_real_prompts_is_answered_in_order(embedded_service: ServiceProcess) -> None:
    requests = [{"messages": asked(question), "request_id": capital} for question, capital in QUESTIONS.items()]
    async with embedded_service.client() as client:
        answer = await client.post(
            "/batch", json={"requests": requests * 12, "defaults": {"temperature": 0, "max_tokens": 24}}
        )
    responses = check_batch(strict_json(answer.content), 36)
    for response in responses:
        assert response["request_id"] in response["outputs"][0]["text"]
    assert sorted(window["size"] for window in strict_json(answer.content)["windows"]) == [4, 32]


async def test_a_batch_comes_line_by_line_when_asked_for(embedded_service: ServiceProcess) -> None:
    requests = [{"prompt": "The capital of France is", "max_tokens": length} for length in (1, 40)]
    async with embedded_service.client() as client:
        answer = await client.post("/batch", json={"requests": requests}, headers={"accept": "application/x-ndjson"})
    *rows, rest = [strict_json(line) for line in answer.content.splitlines() if line]
    assert sorted(row["index"] for row in rows) == [0, 1]
    check_batch({**rest, "results": sorted(rows, key=lambda row: row["index"])}, 2)


async def test_the_models_generation_defaults_are_in_effect_and_shown(embedded_service: ServiceProcess) -> None:
    async with embedded_service.client() as client:
        own = (await client.post("/generate", json={"prompt": "Hello", "max_tokens": 1})).json()["sampling"]
        given = {"prompt": "Hello", "max_tokens": 1, "temperature": 0.7, "top_p": 0.5}
        over = (await client.post("/generate", json=given)).json()["sampling"]
    assert (own["temperature"], own["top_p"]) == (pytest.approx(0.2), 1.0)
    assert (over["temperature"], over["top_p"]) == (0.7, 0.5)


async def test_info_shows_what_the_service_filled_in(embedded_service: ServiceProcess) -> None:
    async with embedded_service.client() as client:
        info = strict_json((await client.get("/info")).content)
    backend = info["backend"]
    assert backend["engine_process"] == "inline"
    arguments = backend["engine_args"]
    assert arguments["max_num_seqs"] == {"value": 64, "source": "vllm_config"}
    for name, value in {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 2048}.items():
        assert arguments[name] == {"value": value, "source": "service"}
    assert arguments["kv_cache_memory_bytes"]["value"] > 0
    assert info["limits"]["max_model_len"] == 2048
    assert info["versions"]["vllm"].startswith("0.32")


async def test_vllms_own_metrics_stand_beside_the_services(embedded_service: ServiceProcess) -> None:
    async with embedded_service.client() as client:
        await client.post("/generate", json={"prompt": "Hello", "max_tokens": 2})
        text = (await client.get("/metrics")).text
    assert "batchserve_window_size_count" in text
    assert "vllm:generation_tokens_total" in text


async def test_the_service_answers_livez_quickly_while_a_window_runs(embedded_service: ServiceProcess) -> None:
    async with embedded_service.client() as client, httpx.AsyncClient(base_url=embedded_service.url) as other:
        requests = [{"prompt": f"{number}. Once upon a time", "max_tokens": 20} for number in range(32)]
        work = asyncio.create_task(client.post("/batch", json={"requests": requests, "defaults": {"ignore_eos": True}}))
        waits = []
        while not work.done():
            begun = time.monotonic()
            assert (await other.get("/livez")).status_code == 200
            waits.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)
        assert (await work).json()["counts"]["succeeded"] == 32
    assert len(waits) > 10
    assert sorted(waits)[int(len(waits) * 0.95)] < 0.1


async def test_the_curl_lines_it_prints_are_good_bodies(embedded_service: ServiceProcess) -> None:
    lines = [line for line in embedded_service.out.splitlines() if line.startswith("curl ")]
    assert len(lines) == 2
    async with embedded_service.client() as client:
        for line in lines:
            url, _, body = line.partition(" -d ")
            answer = await client.post(url.split()[-1], json=json.loads(body.strip("'")))
            assert answer.status_code == 200


async def test_ctrl_c_lets_accepted_work_finish_and_ends_with_0(embedded_service: ServiceProcess) -> None:
    """The last one here: it ends the service."""
    async with embedded_service.client() as client:
        body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}
        work = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.sleep(0.4)
        embedded_service.send_group(signal.SIGINT)
        assert (await work).json()["usage"]["completion_tokens"] == 60
    assert embedded_service.wait_exit(GONE_S) == 0
    embedded_service.wait_gone()
    assert "Traceback" not in embedded_service.err
