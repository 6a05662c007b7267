"""The streaming backend on real vLLM: tokens as they come, callers that hang up, a dead engine, a stop amid streams."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.inline import Inline
from tests.engine.process import GONE_S, Remote, python_service, service_process
from tests.engine.test_openai import ALL, CHAT, COMPLETIONS, STREAMED, body_for, counted, flat, joined, names_of
from tests.engine.test_openai_tools import CASES
from tests.engine.test_openai_tools import body as tool_body
from tests.engine.vllm_server import VLLMServer, differences, the_server
from tests.service.support import check_error_object, check_events, check_openai, events_of, strict_json

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

Json = dict[str, Any]
SOON_S = 1.0
"""Within so long after its caller has gone the engine is free."""
DEAD_S = 5.0
"""How long a service with a dead engine answers."""
WORK: Json = {"max_tokens": 900, "ignore_eos": True, "n": 16, "temperature": 1, "seed": 1}
LONG: Json = {"prompt": "x", **WORK}
"""Many seconds of work."""


@pytest.fixture(scope="module")
def vllm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> VLLMServer:
    return the_server(pytestconfig, tmp_path_factory.mktemp("vllm-server"), tiny_model)


# --- what streams say ---

CANNOT_STREAM = {"prompt_logprobs", "stream"}
"""vLLM has no streams with the first; the second is what is tested."""
STREAMS = [(route, fields) for route, fields in ALL if not CANNOT_STREAM & fields.keys()]
MORE = [(route, fields) for route, fields in STREAMED if (route, fields) not in STREAMS]


async def streamed(python: Remote, route: str, body: Json) -> list[Json]:
    """The data of a stream that ends well."""
    answer = await python.client.post(route, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events, is_ended = events_of(answer.content)
    assert is_ended
    check_events(events, prompts=prompts_in(body), n=body.get("n") or 1)
    assert events[-1]["metrics"]["window"] is None
    return events


def prompts_in(body: Json) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def whole_of(answer: Json) -> dict[int, Json]:
    """An answer in one piece, in the form in which ``joined`` has a stream."""
    return {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"] or "",
            "ids": choice["token_ids"] or [],
            "logprobs": flat(choice["logprobs"]),
            "end": choice["finish_reason"],
            "stop": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }


@pytest.mark.parametrize(("route", "fields"), [*STREAMS, *MORE], ids=lambda value: str(value)[:80])
async def test_a_stream_says_what_the_whole_answer_and_vllms_own_stream_say(
    python: Remote, vllm: VLLMServer, route: str, fields: Json
) -> None:
    body = body_for(route, {**fields, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    body = {name: value for name, value in body.items() if (name, value) != ("model", None)}
    status, text = await asyncio.to_thread(vllm.post, route, {**body, "stream": True})
    assert status == 200, text
    theirs, _ = events_of(text)
    ours = await streamed(python, route, body)
    del body["stream_options"]
    _, whole = await python.post(route, body)

    assert differences(whole_of(whole), joined(ours)) == []
    if fields.get("echo") and fields.get("n") and fields.get("logprobs"):
        assert "error" in theirs[-1]  # vLLM's stream has the scores of the prompt for the first choice alone
        return
    assert differences(joined(theirs), joined(ours)) == []
    assert differences(counted(theirs[-1]), counted(ours[-1])) == []
    assert differences(counted(whole), counted(ours[-1])) == []
    assert names_of(ours) <= names_of(theirs) | {"metrics", "usage"}
    assert ours[0].get("prompt_text") == theirs[0].get("prompt_text") == whole.get("prompt_text")


@pytest.mark.parametrize("fields", CASES, ids=lambda value: str(value)[:70])
async def test_streamed_tool_calls_are_those_of_vllms_server(python: Remote, vllm: VLLMServer, fields: Json) -> None:
    body = tool_body(**fields)
    _, text = await asyncio.to_thread(vllm.post, CHAT, {**body, "stream": True})
    theirs, _ = events_of(text)
    ours = await streamed(python, CHAT, body)
    _, whole = await python.post(CHAT, body)

    check_openai(whole, n=fields.get("n", 1))
    assert differences(calls_in(theirs), calls_in(ours)) == []
    assert names_of(ours) <= names_of(theirs) | {"metrics", "usage"}
    assert differences(joined(theirs), joined(ours)) == []
    for choice in whole["choices"]:
        if choice["finish_reason"] != "length":  # a call that was cut is one only to vLLM's streams
            called = [call["function"] for call in choice["message"].get("tool_calls", [])]
            assert calls_in(ours)[choice["index"]] == called


def calls_in(events: list[Json]) -> dict[int, list[Json]]:
    """The functions that each choice of a stream calls, put together from its deltas."""
    found: dict[int, dict[int, Json]] = {}
    for part in (choice for event in events for choice in event["choices"]):
        calls = found.setdefault(part["index"], {})
        for call in part["delta"].get("tool_calls") or []:
            whole = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            function = call.get("function") or {}
            whole["name"] += function.get("name") or ""
            whole["arguments"] += function.get("arguments") or ""
    return {index: [calls[number] for number in sorted(calls)] for index, calls in found.items()}


async def test_both_backends_stream_the_same_text(inline: Inline, python: Remote) -> None:
    for route in (COMPLETIONS, CHAT):
        body = body_for(route, {"max_tokens": 40, "repetition_penalty": 2.0, "n": 3, "temperature": 1, "seed": 4})
        answer = await inline.client.post(route, json={**body, "stream": True})
        theirs, _ = events_of(answer.content)
        assert joined(theirs) == joined(await streamed(python, route, body))


# --- tokens as they come ---


class Stream:
    """A stream that is being read.

    Attributes:
        text: what it has said so far.
        failure: the error that it ended with.
        is_done: whether its end mark has come.
        moments: when each piece of text came, in seconds of the monotonic clock.
    """

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()
        self.text = ""
        self.failure: Json | None = None
        self.is_done = False
        self.moments: list[float] = []

    async def read(self, pieces: int = 10**9) -> "Stream":
        """Until so many pieces of text have come, or the end."""
        while pieces > 0 and (line := await anext(self._lines, None)) is not None:
            pieces -= self._take(line)
        return self

    def _take(self, line: str) -> bool:
        data = line.removeprefix("data: ")
        if data == line:
            return False
        if data == "[DONE]":
            self.is_done = True
            return False
        event = strict_json(data)
        self.failure = event.get("error", self.failure)
        said = "".join(choice["text"] for choice in event.get("choices", []))
        self.text += said
        self.moments += [time.monotonic()] * bool(said)
        return bool(said)


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[Stream]:
    """A completion as a stream; leaving it before its end hangs up."""
    body = {"temperature": 0, "ignore_eos": True, "stream": True, "repetition_penalty": 2.0, **fields}
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        yield Stream(answer)


async def gauges(python: Remote) -> tuple[float, float]:
    """How many requests vLLM says are running in its engine, and waiting."""
    lines = (await python.client.get("/metrics")).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    running, waiting = (sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names)
    return running, waiting


async def wait_for_running(python: Remote, count: int, timeout_s: float) -> None:
    """Until so many run in the engine, and none waits."""
    deadline = time.monotonic() + timeout_s
    while (now := await gauges(python)) != (count, 0):
        assert time.monotonic() < deadline, f"running and waiting are {now}"
        await asyncio.sleep(0.02)


def engine_cpu_s(python: Remote) -> float:
    """Processor time that the engine core has taken so far."""
    times = python.process.member("EngineCore").cpu_times()
    return float(times.user + times.system)


async def assert_engine_is_free(python: Remote) -> None:
    """Within a second; by what vLLM says, and by what its process does: it would compute on."""
    await wait_for_running(python, 0, SOON_S)
    before = engine_cpu_s(python)
    await asyncio.sleep(0.5)
    assert engine_cpu_s(python) - before < 0.15


async def test_a_caller_that_hangs_up_amid_a_stream_frees_the_engine(python: Remote) -> None:
    async with streaming(python.client, **LONG) as stream:
        await stream.read(20)
        await wait_for_running(python, 16, SOON_S)
    await assert_engine_is_free(python)


@pytest.mark.parametrize(
    ("route", "body", "running"),
    [
        ("/generate", LONG, 16),
        ("/batch", {"requests": [{"prompt": f"{number} bears"} for number in range(8)], "defaults": WORK}, 64),
        (COMPLETIONS, {**LONG, "prompt": ["a", "b", "c"]}, 48),
        (CHAT, {**LONG, "prompt": None, "messages": [{"role": "user", "content": "x"}]}, 16),
    ],
    ids=["generate", "batch", "completions", "chat"],
)
async def test_a_caller_that_hangs_up_while_it_waits_frees_the_engine(
    python: Remote, route: str, body: Json, running: int
) -> None:
    sent = {name: value for name, value in body.items() if value is not None}
    call = asyncio.create_task(python.client.post(route, json=sent))
    await wait_for_running(python, running, 10)
    call.cancel()
    await assert_engine_is_free(python)


async def test_rows_in_the_engine_and_rows_that_wait_go_with_their_caller(python: Remote) -> None:
    sent = {"requests": [{"prompt": f"{number} bears"} for number in range(20)], "defaults": WORK}
    headers = {"accept": "application/x-ndjson"}
    async with python.client.stream("POST", "/batch", json=sent, headers=headers) as answer:
        assert answer.status_code == 200
        await wait_for_running(python, 64, 10)
    await assert_engine_is_free(python)
    assert (await python.generate(prompt="x", max_tokens=1))["timings"]["window_wait_ms"] < 1000


async def test_many_streams_at_once_get_their_own_text_while_neighbours_hang_up(python: Remote) -> None:
    """Half of the 32 go away in the middle, each at another moment."""

    def asked(number: int) -> Json:
        return {"prompt": f"{number} bears", "max_tokens": 100, "temperature": 1, "seed": number}

    async def one(number: int) -> str:
        async with streaming(python.client, **asked(number)) as stream:
            await stream.read(1 + number if number % 2 else 10**9)
            assert stream.is_done is not bool(number % 2)
            return stream.text

    texts = await asyncio.gather(*map(one, range(32)))
    assert len(set(texts)) == 32
    for number in range(32):
        _, alone = await python.post(COMPLETIONS, {"ignore_eos": True, "repetition_penalty": 2.0, **asked(number)})
        whole = alone["choices"][0]["text"]
        assert whole.startswith(texts[number])
        assert (whole == texts[number]) is not bool(number % 2)
    await assert_engine_is_free(python)


async def test_tokens_come_one_by_one(python: Remote) -> None:
    async with streaming(python.client, prompt="x", max_tokens=200) as stream:
        begun = time.monotonic()
        await stream.read()
    seconds = [moment - begun for moment in stream.moments]
    assert len(seconds) > 50
    assert seconds[0] < seconds[-1] / 4
    assert len({round(moment, 3) for moment in seconds}) > 20


async def test_a_wait_for_a_place_in_the_engine_ends_with_its_limit(python: Remote) -> None:
    body = {**LONG, "prompt": ["a", "b", "c", "d"]}
    busy = asyncio.create_task(python.client.post(COMPLETIONS, json=body))
    await wait_for_running(python, 64, 10)
    sent = {"prompt": "x", "max_tokens": 1, "queue_timeout_s": 0.3}
    status, answer = await python.post("/generate", sent)
    busy.cancel()
    assert (status, answer["error"]["code"]) == (504, "queue_timeout")
    await assert_engine_is_free(python)


# --- prompts that are read in several steps ---


async def test_seeded_requests_with_long_prompts_get_the_texts_that_they_get_alone(python: Remote) -> None:
    """Together they have more tokens than one step takes: some prompts are read in two."""
    rows: list[Json] = [
        {"prompt_token_ids": [9 + (number * 31 + at) % 900 for at in range(900)], "seed": number}
        for number in range(16)
    ]
    alone = [(await python.batch_texts([row], temperature=1, max_tokens=8))[0] for row in rows]
    assert len({text for (text,) in alone}) > 8
    assert await python.batch_texts(rows, temperature=1, max_tokens=8) == alone


async def test_several_seeded_texts_of_one_long_prompt_with_its_scores(python: Remote) -> None:
    sent = {"prompt_token_ids": [9 + at % 900 for at in range(700)], "temperature": 1, "seed": 5, "max_tokens": 4}
    answer = await python.generate(**sent, n=8, prompt_logprobs=0)
    again = await python.generate(**sent, n=8, prompt_logprobs=0)
    texts = [output["text"] for output in answer["outputs"]]
    assert texts == [output["text"] for output in again["outputs"]]
    assert len(set(texts)) > 1


# --- the end ---


async def test_when_the_engine_is_killed_streams_end_with_an_error(tmp_path: Path, tiny_model: Path) -> None:
    with python_service(tmp_path, tiny_model) as service:
        service.wait_ready()
        async with service.client() as client:
            prompts = [f"{number} bears" for number in range(4)]
            calls = [asyncio.create_task(stream_to_the_end(client, prompt=one, max_tokens=900)) for one in prompts]
            whole = asyncio.create_task(client.post("/generate", json=LONG))
            rows = asyncio.create_task(client.post("/batch", json={"requests": [LONG] * 10}))
            await until_running(client, 4)
            await asyncio.sleep(0.3)
            service.member("EngineCore").kill()
            killed = time.monotonic()
            streams = await asyncio.wait_for(asyncio.gather(*calls), SOON_S * 5)
            for stream in streams:
                assert stream.text
                assert not stream.is_done
                assert stream.failure is not None
                check_error_object(stream.failure)
                assert stream.failure["code"] == "engine_dead"
            assert (await whole).status_code == 503
            assert {row["error"]["code"] for row in (await rows).json()["results"]} == {"engine_dead"}
            assert (await client.get("/health")).status_code == 503
            assert time.monotonic() - killed < 2
            refused = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
            assert (await client.get("/livez")).status_code == 200
        assert await asyncio.to_thread(service.wait_exit, DEAD_S + GONE_S) == 70
        service.wait_gone()


async def until_running(client: httpx.AsyncClient, count: int) -> None:
    """Until so many requests are in the engine."""
    deadline = time.monotonic() + DEAD_S
    while True:
        lines = (await client.get("/metrics")).text.splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith("batchserve_running_requests ")]
        if float(value) >= count:
            return
        assert time.monotonic() < deadline, f"{value} of {count} are running"
        await asyncio.sleep(0.01)


async def stream_to_the_end(client: httpx.AsyncClient, **fields: Any) -> Stream:
    async with streaming(client, **fields) as stream:
        return await stream.read()


async def test_a_stop_amid_streams_drains_them(tmp_path: Path, tiny_model: Path) -> None:
    with python_service(tmp_path, tiny_model) as service:
        service.wait_ready()
        async with service.client() as client, streaming(client, prompt="x", max_tokens=900) as first:
            await first.read(5)
            others = [
                asyncio.create_task(stream_to_the_end(client, prompt=f"{number} bears", max_tokens=200))
                for number in range(40)
            ]
            await until_running(client, 32)
            assert not any(call.done() for call in others)
            service.send(signal.SIGTERM)
            await asyncio.sleep(0.1)
            refused = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            streams = [await first.read(), *(await asyncio.gather(*others))]
            assert all(stream.is_done and stream.failure is None for stream in streams)
        assert await asyncio.to_thread(service.wait_exit, GONE_S) == 0
        service.wait_gone()
        assert "Traceback" not in service.err


# --- starts that fail ---


@pytest.mark.parametrize(
    ("engine_process", "options", "config", "word"),
    [
        ("inline", (), {}, "engine_process"),
        ("auto", (), {"max_model_length": 5}, "max_model_len"),
        ("auto", (), {"disable_log_stats": True}, "disable_log_stats"),
        ("auto", ("--tool-call-parser", "no-such-parser"), {}, "no-such-parser"),
        ("separate", (), {"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
    ],
    ids=[
        "inline",
        "unknown key",
        "a key of the service",
        "unknown parser",
        "too little memory, which the engine finds",
    ],
)
async def test_a_start_that_fails_ends_with_one_line_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path, engine_process: str, options: tuple[str, ...], config: Json, word: str
) -> None:
    with service_process(
        tmp_path, tiny_model, engine_process, "--backend", "vllm_python", *options, **config
    ) as service:
        assert await asyncio.to_thread(service.wait_exit, 120) == 1
        service.wait_gone()
        (line,) = [line for line in service.err.splitlines() if word in line and line.startswith("batchserve: ")]
        assert len(line) < 900
