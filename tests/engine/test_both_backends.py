"""One table of behaviour, to which both backends on vLLM and both ways of scheduling are held.

With the real tiny model, in float32. `vllm_offline` with its windows runs in the test process; `vllm_python`, and
`vllm_offline` with `scheduling: rolling`, each in a process of its own. What the first does is shown elsewhere; here
the same body gets the same answer from another, and only `window` differs.
"""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from app.errors import EngineDead
from app.main import stop
from app.settings import Settings
from tests.engine.checks import CLOCKS_MS, check_between, check_timings
from tests.engine.conftest import ENGINE_CONFIG
from tests.engine.inline import Caller, Inline, running, window_of
from tests.engine.models import variant
from tests.engine.process import Remote
from tests.engine.test_bad_input import STRANGE, WRONG_SAMPLING, short
from tests.engine.test_openai import ALL, CHAT, COMPLETIONS, body_for, wrong_bodies
from tests.engine.test_templates import BOS, BOS_TEMPLATE, HELLO, OWN, TALK, _writes_bos
from tests.engine.vllm_server import differences
from tests.service.support import check_error_object, strict_json

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    # Raised inside vLLM, of its own use of xgrammar and of its own fields.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

Json = dict[str, Any]
VARIED = {"repetition_penalty": 2.0}
"""A model of random weights repeats itself, and a text of one word over and over would hide much."""
BASE: Json = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, **VARIED}
PROMPT = "Once upon a time there was a bear"
FORMS = ("prompt", "prompt_token_ids", "messages", "columns")


def body(**fields: Any) -> Json:
    """A `/generate` body over the usual prompt, unless it has one of its own."""
    prompt = {} if any(form in fields for form in FORMS) else {"prompt": PROMPT}
    return {**prompt, **BASE, **fields}


# --- what two answers must share ---

OWN_OF_EACH = {"id", "created", "cached_tokens", "prompt_tokens_details", "window", "windows", "system_fingerprint"}
"""Of an answer: what no two services share, or what the prefix cache happens to hold."""
MEASURED = {"timings", "metrics"}


def shared(value: Any) -> Any:
    """An answer without what is each service's own; of what is measured its names, and what of it is null."""
    if isinstance(value, list):
        return [shared(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: None if name in OWN_OF_EACH else shape(one) if name in MEASURED else shared(one)
        for name, one in value.items()
    }


def shape(value: Any) -> Any:
    """Names and kinds, without the numbers; of windows not even these."""
    if isinstance(value, dict):
        return {name: None if name in OWN_OF_EACH else shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number" if is_number else value


def windows_in(value: Any) -> list[Any]:
    """What stands under `window`, at any depth."""
    if isinstance(value, list):
        return [window for one in value for window in windows_in(one)]
    if not isinstance(value, dict):
        return []
    return [w for name, one in value.items() for w in ([one] if name == "window" else windows_in(one))]


@pytest_asyncio.fixture(loop_scope="session", params=["vllm_python", "rolling"])
async def other(request: pytest.FixtureRequest, python: Remote, rolling: Remote) -> Remote:
    """Who is compared with the windows of `vllm_offline`."""
    return python if request.param == "vllm_python" else rolling


async def same(windows: Caller, other: Remote, route: str, sent: Any) -> tuple[int, Any]:
    """Status and answer of a body that both must answer alike; those of the second."""
    (one_status, one), (other_status, answer) = [await caller.post(route, sent) for caller in (windows, other)]

    assert one_status == other_status, (one, answer)
    assert differences(shared(one), shared(answer)) == []
    assert None not in windows_in(one)
    assert len(windows_in(one)) == len(windows_in(answer))
    for window in windows_in(answer):
        assert window is None or (window["release"], window["position"]) == ("rolling", None)
        assert (window is None) == (other.kind == "vllm_python")
    return other_status, answer


# --- /generate ---

PROMPTS: dict[str, Json] = {
    "a text": {"prompt": PROMPT},
    "ids": {"prompt_token_ids": [5, 6, 7, 8]},
    "ids as they are": {"prompt_token_ids": [1, 1, 0, 0, 5]},
    "a text with special tokens": {"prompt": "<|im_start|>user\nHi<|im_end|>"},
    "a text that begins with a special token": {"prompt": "<|endoftext|><|endoftext|>Hi"},
    "a message": {"messages": HELLO},
    "a conversation": {"messages": TALK},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Hel", "lo")]}]},
    "no head for the answer": {"messages": TALK, "add_generation_prompt": False},
    "a begun answer": {
        "messages": [*HELLO, {"role": "assistant", "content": "I am"}],
        "continue_final_message": True,
    },
    "a variable of the template": {"messages": HELLO, "chat_template_kwargs": {"zebra": 1}},
    "a row": {"columns": {"prefix_column": ["Be a bear."], "text_column": ["Who", " are you?"]}},
    "truncated": {"prompt": PROMPT, "truncate_prompt_tokens": 3},
    "a truncated conversation": {"messages": TALK, "truncate_prompt_tokens": 7},
    "up to the end of the context": {"prompt_token_ids": [5] * 1019, "max_tokens": 500, "ignore_eos": True},
    "one token of room": {"prompt_token_ids": [5] * 1023, "max_tokens": 500},
    **{f"strange: {ascii(text)[:20]}": {"prompt": text} for text in STRANGE},
}
SAMPLING: dict[str, Json] = {
    "greedy": {},
    "a seed": {"temperature": 1, "seed": 7},
    "another seed": {"temperature": 1, "seed": -(2**63)},
    "several with a seed": {"temperature": 1.2, "seed": 3, "n": 4},
    "many": {"temperature": 1.5, "seed": 3, "n": 40, "max_tokens": 3},
    "top_p, top_k, min_p": {"temperature": 1, "seed": 11, "top_p": 0.6, "top_k": 20, "min_p": 0.01},
    "top_k of one": {"temperature": 2, "top_k": 1},
    "penalties": {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.7},
    "a stop string": {"stop": "e"},
    "stop strings": {"stop": ["zzz", "o", "e"]},
    "a stop string in the text": {"stop": ["e", "o"], "include_stop_str_in_output": True},
    "64 stop strings": {"stop": [f"{number} bears" for number in range(64)]},
    "stop tokens": {"stop_token_ids": list(range(3, 1027)), "max_tokens": 30},
    "min_tokens": {"stop_token_ids": list(range(3, 1027)), "min_tokens": 12, "max_tokens": 30},
    "an end at once": {"logit_bias": {"2": 100}, "repetition_penalty": 1},
    "an end that is ignored": {"logit_bias": {"2": 100}, "ignore_eos": True, "skip_special_tokens": False},
    "an end put off": {"logit_bias": {"2": 100}, "min_tokens": 3},
    "a bias": {"logit_bias": {"500": 100, "501": -100}},
    "bad words": {"bad_words": ["bear", " the", "wolf"]},
    "logprobs": {"logprobs": 5},
    "logprobs of the tokens alone": {"logprobs": 0},
    "logprobs of several": {"logprobs": 2, "n": 3, "temperature": 1, "seed": 5},
    "logprobs of the prompt": {"prompt_logprobs": 3},
    "logprobs of both": {"logprobs": 20, "prompt_logprobs": 20, "max_tokens": 3},
    "one token": {"max_tokens": 1},
    "without ids": {"return_token_ids": False},
    "a label": {"request_id": "mine"},
    "a priority": {"priority": -100},
    "a limit of waiting": {"queue_timeout_s": 30},
    "the model's name": {"model": "tiny"},
    "the model's own defaults": {"max_tokens": 4, "temperature": None, "repetition_penalty": None, "seed": 1},
    "all at once": {
        "temperature": 2, "n": 5, "seed": 9, "top_k": -1, "logprobs": 3, "prompt_logprobs": 2, "stop": ["xyz"],
        "stop_token_ids": [77], "bad_words": ["bear"], "presence_penalty": 2, "frequency_penalty": -2, "min_tokens": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*PROMPTS, *SAMPLING])
async def test_a_request_gets_the_same_text(inline: Inline, other: Remote, name: str) -> None:
    fields = {**PROMPTS, **SAMPLING}[name]
    sent = {key: value for key, value in body(**fields).items() if value is not None}
    status, answer = await same(inline, other, "/generate", sent)

    assert status == 200, answer
    assert len(answer["outputs"]) == fields.get("n", 1)
    tokens = answer["usage"]["completion_tokens"]
    check_timings(answer["timings"], tokens, outputs=len(answer["outputs"]))
    if fields.get("return_token_ids", True):
        assert tokens == sum(len(output["token_ids"]) for output in answer["outputs"]) > 0


async def test_texts_of_the_table_are_worth_comparing(python: Remote) -> None:
    """They differ from each other, and within themselves."""
    texts = [await python.text(**{**BASE, "prompt": PROMPT, "max_tokens": 20, "seed": seed}) for seed in (1, 2)]
    other = await python.text(**BASE, prompt="A wolf")
    assert texts[0] == texts[1] != other
    ids = (await python.generate(**body(max_tokens=20)))["outputs"][0]["token_ids"]
    assert len(set(ids)) > 5


WRONG_PROMPTS: list[tuple[Json, str, str | None]] = [
    ({}, "invalid_request", None),
    ({"prompt": "Hi", "messages": HELLO}, "invalid_request", None),
    ({"prompt": ""}, "invalid_request", "prompt"),
    ({"prompt": 5}, "invalid_request", "prompt"),
    ({"prompt": None}, "invalid_request", "prompt"),
    ({"prompt_token_ids": []}, "invalid_request", "prompt_token_ids"),
    ({"prompt_token_ids": [5, -1]}, "invalid_request", "prompt_token_ids.1"),
    ({"prompt_token_ids": [5, 10**9]}, "invalid_request", "prompt_token_ids.1"),
    ({"prompt_token_ids": [True]}, "invalid_request", "prompt_token_ids.0"),
    ({"prompt_token_ids": [5] * 1024}, "context_length_exceeded", None),
    ({"prompt": "bear " * 3000}, "context_length_exceeded", None),
    ({"prompt": "bear " * 1_000_000}, "context_length_exceeded", None),
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": [{"content": "x"}]}, "invalid_request", "messages.0.role"),
    ({"messages": [{"role": "user", "content": "bear " * 3000}]}, "context_length_exceeded", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_request", "messages.0.content.0"),
    (
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "invalid_request",
        "continue_final_message",
    ),
    ({"messages": HELLO, "chat_template_kwargs": {"tokenize": 1}}, "invalid_request", "chat_template_kwargs.tokenize"),
    ({"columns": {}}, "invalid_request", "columns"),
    ({"columns": {"text_column": ["x"], "zebra": []}}, "invalid_request", "columns.zebra"),
    ({"prompt": "Hi", "model": "other"}, "model_not_found", "model"),
]


@pytest.mark.parametrize(("fields", "code", "param"), WRONG_PROMPTS, ids=lambda value: str(value)[:60])
async def test_a_wrong_prompt_gets_the_same_refusal(
    inline: Inline, other: Remote, fields: Json, code: str, param: str | None
) -> None:
    _, answer = await same(inline, other, "/generate", fields)
    check_error_object(answer["error"])
    assert answer["error"]["code"] == code
    assert param is None or answer["error"]["param"].startswith(param)


@pytest.mark.parametrize(("fields", "param"), WRONG_SAMPLING, ids=lambda value: short(value))
async def test_a_setting_out_of_its_bounds_gets_the_same_refusal(
    inline: Inline, other: Remote, fields: Json, param: str
) -> None:
    status, answer = await same(inline, other, "/generate", {"prompt": "Hi", "max_tokens": 2, **fields})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert answer["error"]["param"].split(".")[0] == param


NO_BODIES = [b"", b"{", b"[]", b"5", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff", b'{"a": ' * 100, b"null"]


@pytest.mark.parametrize("route", ["/generate", "/batch", COMPLETIONS, CHAT])
@pytest.mark.parametrize("raw", NO_BODIES, ids=str)
async def test_what_is_no_body_gets_the_same_refusal(inline: Inline, other: Remote, route: str, raw: bytes) -> None:
    status, answer = await same(inline, other, route, raw)
    assert status == 400
    check_error_object(answer["error"])


# --- /batch ---

ROWS: list[Json] = [
    {"prompt": "One bear"},
    {"prompt_token_ids": [5, 6, 7], "max_tokens": 3},
    {"prompt": ""},
    {"messages": TALK, "seed": 4, "temperature": 1, "n": 2},
    {"prompt_token_ids": [5] * 5000},
    {"prompt": "Two", "zebra": 1},
    {"prompt": "Three", "model": "other"},
    {"prompt": "Four", "logit_bias": {"999999999": 1}},
    {"prompt": "Five", "stop": "e", "logprobs": 1},
    {"prompt": "Six", "temperature": 7},
]
BATCHES: dict[str, Json] = {
    "rows of all kinds": {"requests": ROWS, "defaults": BASE, "request_id": "mine"},
    "all rows wrong": {"requests": [{"prompt": ""}, {"zebra": 1}]},
    "more rows than fit": {"requests": [{"prompt": f"{number} bears"} for number in range(100)], "defaults": BASE},
    "no rows": {"requests": []},
    "no list": {"requests": 5},
    "an item that is none": {"requests": [{"prompt": "x"}, 5]},
    "an unknown field": {"requests": [{"prompt": "x"}], "zebra": 1},
    "a prompt among the defaults": {"requests": [{"prompt": "x"}], "defaults": {"prompt": "y"}},
    "a wrong default": {"requests": [{"prompt": "x"}], "defaults": {"temperature": -1}},
    "too many rows": {"requests": [{"prompt": "x"}] * 4097},
}


@pytest.mark.parametrize("name", list(BATCHES))
async def test_a_batch_gets_the_same_rows(inline: Inline, other: Remote, name: str) -> None:
    status, answer = await same(inline, other, "/batch", BATCHES[name])
    if name == "rows of all kinds":
        statuses = [200, 200, 400, 200, 400, 400, 404, 400, 200, 400]
        assert [row["status"] for row in answer["results"]] == statuses
        assert answer["windows"] == []
    assert (status == 200) == ("results" in answer)


async def test_rows_that_come_as_they_finish_are_the_same(inline: Inline, other: Remote) -> None:
    found = []
    for caller in (inline, other):
        headers = {"accept": "application/x-ndjson"}
        answer = await caller.client.post("/batch", json=BATCHES["rows of all kinds"], headers=headers)
        lines = [strict_json(line) for line in answer.content.splitlines() if line]
        rows = sorted((line for line in lines if "index" in line), key=lambda line: line["index"])
        found.append([answer.status_code, shared(rows), shared(lines[-1])])
    assert differences(found[0], found[1]) == []
    assert len(found[0][1]) == len(ROWS)


# --- OpenAI's routes ---


@pytest.mark.parametrize(("route", "fields"), ALL, ids=lambda value: str(value)[:80])
async def test_openais_routes_give_the_same_answer(inline: Inline, other: Remote, route: str, fields: Json) -> None:
    status, answer = await same(inline, other, route, body_for(route, fields))
    assert status == 200, answer


def _is_of_tools(fields: Json) -> bool:
    """The one of the two that takes tools says something else about them."""
    return bool(fields.keys() & {"tools", "tool_choice"})


WRONG = [(route, fields) for route, fields in wrong_bodies() if not _is_of_tools(fields)]


@pytest.mark.parametrize(("route", "fields"), WRONG, ids=lambda value: str(value)[:80])
async def test_openais_routes_refuse_alike_streamed_or_not(
    inline: Inline, other: Remote, route: str, fields: Json
) -> None:
    sent = body_for(route, fields)
    status, answer = await same(inline, other, route, sent)
    assert status >= 400
    check_error_object(answer["error"])
    if "stream" not in fields and "stream_options" not in fields:
        streamed = await other.client.post(route, json={**sent, "stream": True})
        assert streamed.headers["content-type"].startswith("application/json")
        assert (streamed.status_code, strict_json(streamed.content)) == (status, answer)


# --- what they tell of themselves ---


@pytest.mark.parametrize("route", ["/v1/models", "/v1/models/tiny", "/v1/models/other", "/nothing", "/generate"])
async def test_other_routes_answer_alike(inline: Inline, other: Remote, route: str) -> None:
    one, another = [await caller.client.get(route) for caller in (inline, other)]
    assert one.status_code == another.status_code
    assert differences(shared(one.json()), shared(another.json())) == []


@pytest.mark.parametrize("route", ["/livez", "/readyz", "/health"])
async def test_both_are_ready(inline: Inline, other: Remote, route: str) -> None:
    assert [(await caller.client.get(route)).status_code for caller in (inline, other)] == [200, 200]


async def test_both_tell_the_same_of_themselves(inline: Inline, other: Remote) -> None:
    one, another = [(await caller.client.get("/info")).json() for caller in (inline, other)]
    for part in (*one, *another):
        assert type(one[part]) is type(another[part]), part
    for part in ("backend", "limits", "settings", "versions"):
        assert one[part].keys() == another[part].keys(), part
    is_python = other.kind == "vllm_python"
    assert [info["backend"]["kind"] for info in (one, another)] == ["vllm_offline", other.kind]
    assert [info["settings"]["scheduling"] for info in (one, another)] == [
        "window",
        "window" if is_python else "rolling",
    ]
    assert another["backend"]["engine_process"] == ("separate" if is_python else "inline")


async def test_both_have_the_same_metrics(inline: Inline, other: Remote) -> None:
    await same(inline, other, "/generate", body())
    found = []
    for caller in (inline, other):
        lines = (await caller.client.get("/metrics")).text.splitlines()
        names = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
        found.append({name for name in names if name.startswith(("batchserve_", "vllm:"))})
    assert {name for name in found[0] ^ found[1] if name.startswith("batchserve_")} == set()
    for names in found:
        assert {"vllm:num_requests_running", "vllm:generation_tokens"} <= {
            name.removesuffix("_total") for name in names
        }


# --- timings ---

LOAD = [{"prompt": f"{number} bears. " * (1 + number % 7), "max_tokens": 4 + 5 * (number % 6)} for number in range(24)]


async def timed(caller: Caller, sent: Json) -> Json:
    """The answer to a request, whose timings keep every formula and lie within the caller's own readings."""
    before = time.time()
    answer: Json = await caller.generate(ignore_eos=True, **sent)
    check_between(answer["timings"], before, time.time())
    check_timings(answer["timings"], answer["usage"]["completion_tokens"], outputs=len(answer["outputs"]))
    assert not answer["timings"]["clock_anomaly"]
    return answer


async def test_under_the_same_load_both_keep_every_formula(inline: Inline, other: Remote) -> None:
    found = [await asyncio.gather(*(timed(caller, sent) for sent in LOAD)) for caller in (inline, other)]
    for one, another in zip(*found, strict=True):
        assert differences(shape(one["timings"]), shape(another["timings"])) == []
        assert one["outputs"] == another["outputs"]
        stats = [answer["timings"]["request_state_stats"] for answer in (one, another)]
        assert stats[0]["num_generation_tokens"] == stats[1]["num_generation_tokens"]
    # A member of a window waits for its longest neighbour; with the other backend for nobody.
    tails = [[answer["timings"]["window_tail_ms"] for answer in answers] for answers in found]
    assert sorted(tails[0])[len(LOAD) // 2] > sorted(tails[1])[len(LOAD) // 2]


async def test_with_both_more_tokens_take_a_longer_decode_and_a_longer_prompt_a_longer_prefill(
    inline: Inline, other: Remote
) -> None:
    for caller in (inline, other):
        short, long = [(await timed(caller, {"prompt": "x", "max_tokens": n}))["timings"] for n in (4, 120)]
        assert long["decode_ms"] > 3 * short["decode_ms"]
        assert long["itl_ms"] < 10 * short["itl_ms"]
        small, large = [
            (await timed(caller, {"prompt_token_ids": list(range(9, 9 + n)), "max_tokens": 1}))["timings"]
            for n in (2, 1000)
        ]
        assert large["prefill_ms"] > small["prefill_ms"]


async def test_what_the_engine_has_no_room_for_waits_in_the_service(python: Remote) -> None:
    """With `dispatched_at` the moment at which the engine got it, so that the wait is `window_wait_ms`."""
    sent = {"prompt": "x", "max_tokens": 25}
    answers = await asyncio.gather(*(timed(python, sent) for _ in range(64 + 16)))
    times = sorted((answer["timings"] for answer in answers), key=lambda one: one["dispatched_at"])
    first, late = times[:64], times[64:]
    first_end = min(one["completed_at"] for one in first)
    assert min(one["dispatched_at"] for one in late) >= first_end - CLOCKS_MS / 1000
    for one in late:
        assert one["clock_anomaly"] is False
    waited_ms = sum(one["window_wait_ms"] for one in late)
    assert waited_ms > sum(one["submit_ms"] + one["engine_queue_ms"] for one in late)


async def chunks(client: httpx.AsyncClient, route: str, sent: Json) -> AsyncIterator[tuple[float, Json]]:
    """The events of a stream, each with the moment (Unix seconds) at which it came."""
    async with client.stream("POST", route, json={**sent, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield time.time(), json.loads(line.removeprefix("data: "))


def said(event: Json) -> str:
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_what_timings_say_of_a_stream_is_what_its_caller_sees(other: Remote, route: str) -> None:
    begun = time.time()
    events = [event async for event in chunks(other.client, route, body_for(route, {"max_tokens": 200, **VARIED}))]
    times = events[-1][1]["metrics"]["timings"]
    arrivals = [moment for moment, event in events if said(event)]

    seen_ms = (arrivals[0] - begun) * 1000
    assert times["ttft_ms"] - CLOCKS_MS <= seen_ms <= 10 * times["ttft_ms"] + 100
    assert times["first_token_at"] <= arrivals[0] + CLOCKS_MS / 1000
    assert times["last_token_at"] <= arrivals[-1] + CLOCKS_MS / 1000
    assert arrivals[0] < times["last_token_at"]
    seen_itl_ms = (arrivals[-1] - arrivals[0]) / (times["request_state_stats"]["num_generation_tokens"] - 1) * 1000
    assert times["itl_ms"] / 10 < seen_itl_ms < times["itl_ms"] * 10
    assert len(set(arrivals)) > 20


# --- formats of conversations, drain and close: a service of each for each format ---


@pytest.fixture(scope="module")
def bos_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template writes a BOS, and its tokenizer adds one."""
    target = tmp_path_factory.mktemp("bos") / "model"
    own: Json = {"bos_token": BOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    return variant(tiny_model, target, template=BOS_TEMPLATE, tokenizer=_writes_bos, tokenizer_config=own)


@pytest.fixture(scope="module")
def bare_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant(tiny_model, tmp_path_factory.mktemp("bare") / "model", template="")


FORMATS: dict[str, tuple[str, str | None]] = {
    "the model's own": ("bos_model", "default-template"),
    "plain": ("bos_model", "plain"),
    "a custom one": ("bos_model", OWN),
    "none": ("bare_model", None),
}
ASKED: list[tuple[str, Json]] = [
    ("/generate", body(messages=TALK)),
    ("/generate", body(columns={"prefix_column": ["Be a bear."], "text_column": ["Who", " are you?"]})),
    ("/generate", body(prompt="Hello")),
    ("/generate", body(prompt=f"{BOS}{BOS}Hello")),
    ("/generate", body(prompt_token_ids=[0, 0, 5])),
    (CHAT, {"messages": TALK, "max_tokens": 6, "temperature": 0, "return_prompt_text": True, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": f"{BOS}Hello", "max_tokens": 6, "temperature": 0, "return_token_ids": True}),
]
"""Prompts in which a BOS would stand twice, if it could."""


async def life(kind: str, model: Path, request_format: str | None) -> list[Any]:
    """What a service tells from its start to its end."""
    values = {"backend": kind, "model": str(model), "served_model_name": "tiny", "engine_process": "auto"}
    asked = {} if request_format is None else {"request_format": request_format}
    async with running(Settings.model_validate({**values, **asked, "vllm_config": ENGINE_CONFIG})) as service:
        found = [await service.post(route, sent) for route, sent in ASKED]
        found += await drained(service)
        backend = service.service.backend
        late = await window_of(backend, [{"prompt": "late"}])
    assert await backend.close()
    assert await backend.close()
    with pytest.raises(EngineDead):
        await backend.generate(late)
    return found


@pytest.fixture
def _is_swept() -> Iterator[None]:
    """What a service leaves is collected before the next test: it was frozen, and vLLM closes no zmq context."""
    yield
    gc.unfreeze()
    gc.collect()


async def drained(service: Inline) -> list[Any]:
    """Answers to what was accepted before a stop, and to what came behind it."""
    sent = body(max_tokens=60, ignore_eos=True)
    accepted = [asyncio.create_task(service.post("/generate", {**sent, "seed": number})) for number in range(8)]
    accepted.append(asyncio.create_task(service.post("/batch", {"requests": [sent] * 40})))
    await asyncio.sleep(0.3)
    stopping = asyncio.create_task(stop(service.service))
    await asyncio.sleep(0)
    refused = await service.post("/generate", sent)
    await stopping
    assert all(task.done() for task in accepted)
    return [*(await asyncio.gather(*accepted)), refused]


def engine_processes() -> set[psutil.Process]:
    """Of vLLM, started by this process or by those it has started."""
    family = psutil.Process().children(recursive=True)
    return {process for process in family if process.is_running() and process.name().startswith("VLLM::")}


@pytest.mark.usefixtures("no_engine", "_is_swept")
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.parametrize("name", list(FORMATS))
async def test_both_live_alike_from_start_to_end(request: pytest.FixtureRequest, name: str) -> None:
    fixture, request_format = FORMATS[name]
    model: Path = request.getfixturevalue(fixture)
    before = engine_processes()
    found = [await life(kind, model, request_format) for kind in ("vllm_offline", "vllm_python")]

    for (one_status, one), (other_status, other) in zip(*found, strict=True):
        assert one_status == other_status, (one, other)
        assert differences(shared(one), shared(other)) == []
    statuses = [status for status, _ in found[1]]
    served = 400 if name == "none" else 200
    assert statuses == [served, served, 200, 200, 200, served, 200, *[200] * 9, 503]
    assert found[1][-1][1]["error"]["code"] == "shutting_down"
    assert engine_processes() - before == set()
