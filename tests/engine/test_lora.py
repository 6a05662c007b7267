"""LoRA adapters over a real engine: each request gets the text of its own, never the base's, on both backends."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from app.settings import Settings
from tests.engine.adapters import BROKEN, tiny_adapter
from tests.engine.conftest import ENGINE_CONFIG
from tests.engine.inline import Caller, Inline, TheEngine, running, strict_json
from tests.engine.process import Remote, ServiceProcess, python_service

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "Once upon a time there was a bear"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 12}
GOOD = {"a": 8, "b": 16, "c": 1}
"""Adapters that can be used, each with its rank."""
NAMES = [None, "a", "tiny", "b", "a", None, "c", "b", "c", None]
"""A window that mixes them with the base, which has two names."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good adapters and broken ones, a broken one first and last."""
    root = tmp_path_factory.mktemp("adapters")
    first, *others = BROKEN
    found = {first: BROKEN[first](root / first)}
    found |= {name: tiny_adapter(root / name, seed, rank=rank) for seed, (name, rank) in enumerate(GOOD.items())}
    return found | {kind: BROKEN[kind](root / kind) for kind in others}


def words(folders: dict[str, Path]) -> list[str]:
    return [f"{name}={folder}" for name, folder in folders.items()]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def windows(the_engine: TheEngine, tiny_model: Path, folders: dict[str, Path]) -> AsyncIterator[Inline]:
    """``vllm_offline`` with all of them."""
    await the_engine.close()
    values = {"model": str(tiny_model), "served_model_name": "tiny", "engine_process": "inline"}
    settings = {**values, "lora_modules": words(folders), "vllm_config": ENGINE_CONFIG}
    async with running(Settings.model_validate(settings)) as service:
        yield service


@pytest.fixture(scope="module")
def process(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, folders: dict[str, Path]
) -> Iterator[ServiceProcess]:
    options = [option for word in words(folders) for option in ("--lora-modules", word)]
    with python_service(tmp_path_factory.mktemp("python"), tiny_model, *options) as service:
        yield service.wait_ready()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def streaming(process: ServiceProcess) -> AsyncIterator[Remote]:
    """``vllm_python`` with the same."""
    async with process.client() as client:
        yield Remote(client, process)


@pytest.fixture(params=["windows", "streaming"])
def service(request: pytest.FixtureRequest) -> Caller:
    """Either of the two."""
    found: Caller = request.getfixturevalue(request.param)
    return found


async def alone(service: Caller, **body: Any) -> dict[str | None, str]:
    """The text of the base and of each adapter, each asked for by itself."""
    texts: dict[str | None, str] = {}
    for name in (None, *GOOD):
        texts[name] = await service.text(**{**GREEDY, **body, "model": name or "tiny"})
    texts["tiny"] = texts[None]
    return texts


def named(name: str | None, **body: Any) -> dict[str, Any]:
    return {**GREEDY, **body} if name is None else {**GREEDY, **body, "model": name}


# --- each its own text ---


async def test_the_base_and_each_adapter_have_a_text_of_their_own(service: Caller) -> None:
    texts = await alone(service)
    assert len(set(texts.values())) == 1 + len(GOOD)
    assert await service.text(**GREEDY) == texts["tiny"]


async def test_in_one_batch_each_gets_what_it_gets_alone(service: Caller) -> None:
    texts = await alone(service)
    rows = await service.batch([named(name) for name in NAMES])

    assert [row["response"]["outputs"][0]["text"] for row in rows] == [texts[name] for name in NAMES]
    assert [row["response"]["model"] for row in rows] == [name or "tiny" for name in NAMES]
    assert len({(row["response"]["window"] or {}).get("id") for row in rows}) == 1, "they were not in one window"


async def test_requests_of_many_callers_at_once_get_their_own(service: Caller) -> None:
    """Lengths differ, so that the engine runs ever other mixtures of adapters."""
    lengths = [3 + number % 7 for number in range(40)]
    names = [NAMES[number % len(NAMES)] for number in range(40)]
    texts = {length: await alone(service, max_tokens=length) for length in sorted(set(lengths))}

    bodies = [named(name, max_tokens=length) for name, length in zip(names, lengths, strict=True)]
    found = await asyncio.gather(*(service.text(**body) for body in bodies))

    assert found == [texts[length][name] for name, length in zip(names, lengths, strict=True)]


async def test_what_is_cached_of_a_prompt_belongs_to_its_adapter(service: Caller) -> None:
    prompt = "The bears went over the mountain to see what they could see. " * 12
    first = await alone(service, prompt=prompt)
    again = await alone(service, prompt=prompt)

    assert first == again
    assert len(set(first.values())) == 1 + len(GOOD)
    answer = await service.generate(**named("a", prompt=prompt))
    assert answer["usage"]["cached_tokens"] > 0


async def test_several_outputs_and_log_probabilities_are_the_adapters(service: Caller) -> None:
    body = {"n": 2, "temperature": 0.8, "seed": 3, "max_tokens": 5, "logprobs": 2}
    rows = await service.batch([named(name, **body) for name in (None, "a", "b")])
    for row, name in zip(rows, ("tiny", "a", "b"), strict=True):
        single = await service.generate(**named(name, **body))
        assert [output["text"] for output in row["response"]["outputs"]] == [o["text"] for o in single["outputs"]]
    first = [row["response"]["outputs"][0]["logprobs"][0]["logprob"] for row in rows]
    assert len(set(first)) == 3


async def test_openais_routes_select_it_by_the_model_too(service: Caller) -> None:
    texts = await alone(service)
    options = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    found = await asyncio.gather(
        *(service.post("/v1/completions", {**options, "model": name}) for name in ("a", "tiny", "b"))
    )
    assert [answer["choices"][0]["text"] for _, answer in found] == [texts[name] for name in ("a", "tiny", "b")]
    assert [answer["model"] for _, answer in found] == ["a", "tiny", "b"]

    messages = [{"role": "user", "content": "Who are you?"}]
    chats = [
        (await service.post("/v1/chat/completions", {**options, "prompt": None, "messages": messages, "model": name}))[
            1
        ]
        for name in ("a", "tiny")
    ]
    contents = [chat["choices"][0]["message"]["content"] for chat in chats]
    assert contents == [await service.text(**named(name, prompt=None, messages=messages)) for name in ("a", "tiny")]
    assert contents[0] != contents[1]


async def test_streamed_texts_are_the_same(service: Caller) -> None:
    texts = await alone(service)

    async def streamed(name: str) -> str:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True, "model": name}
        answer = await service.client.post("/v1/completions", json=body)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [strict_json(line.encode()) for line in lines]
        assert {chunk["model"] for chunk in chunks} == {name}
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    names = ["a", "b", "tiny", "c"] * 3
    assert await asyncio.gather(*map(streamed, names)) == [texts[name] for name in names]


# --- what cannot be had ---


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["nobody", "A", "a ", "tiny/a", *BROKEN])
async def test_what_is_not_there_or_broken_is_a_404_at_once(service: Caller, name: str, route: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in route else {"prompt": PROMPT}
    begun = time.monotonic()
    status, answer = await service.post(route, {**prompt, "max_tokens": 2, "model": name})

    assert time.monotonic() - begun < 2
    assert status == 404, answer
    error = answer["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    wanted = f"the adapter {name!r} cannot be used: " if name in BROKEN else f"model {name!r} is not served here"
    assert error["message"].startswith(wanted)


async def test_they_cost_their_neighbours_nothing(service: Caller) -> None:
    texts = await alone(service)
    names = [*BROKEN, "a", "nobody", None, *BROKEN, "b"]
    status, answer = await service.post("/batch", {"requests": [named(name) for name in names]})

    assert status == 200
    rows = answer["results"]
    assert [row["status"] for row in rows] == [404 if name in BROKEN or name == "nobody" else 200 for name in names]
    served = {
        name: row["response"]["outputs"][0]["text"] for name, row in zip(names, rows, strict=True) if name in GOOD
    }
    assert served == {name: texts[name] for name in ("a", "b")}


async def test_what_is_served_and_what_is_not_can_be_seen(service: Caller) -> None:
    listed = strict_json((await service.client.get("/v1/models")).content)["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("tiny", None), *((name, "tiny") for name in GOOD)]

    warnings = strict_json((await service.client.get("/info")).content)["backend"]["warnings"]
    for kind in BROKEN:
        (told,) = [warning for warning in warnings if warning.startswith(f"the adapter {kind} cannot be used: ")]
        assert len(told) < 400
        assert "root cause" not in told


async def test_what_only_the_engine_can_tell_is_told_too(service: Caller) -> None:
    """The files say nothing against these."""
    for name, reason in (("with_other_names", "changes nothing"), ("with_unknown_modules", "expected target modules")):
        _, answer = await service.post("/generate", named(name))
        assert reason in answer["error"]["message"]


# --- the engine below ---


async def test_the_engines_last_slot_stays_empty(windows: Inline) -> None:
    """On a CPU base requests use what was last in it, whether they should or not."""
    await windows.batch([named(name) for name in NAMES])
    manager = windows.core.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    assert set(manager.lora_index_to_id[:-1]) >= {2, 3, 4}
    assert manager.lora_index_to_id[-1] is None
    for module in manager.modules.values():
        for stacked in (*module.lora_a_stacked, *module.lora_b_stacked):
            assert not stacked[-1].any()
    await windows.assert_serves()


async def test_the_engine_has_room_for_what_is_served(windows: Inline) -> None:
    arguments = windows.backend.info()["engine_args"]
    assert arguments["max_lora_rank"] == {"value": 16, "source": "service"}
    assert arguments["max_loras"]["value"] == len(GOOD) + 2 + 1, "the two that only the engine can tell, and one"


async def test_an_adapter_whose_folder_has_gone_since_is_still_served(
    windows: Inline, folders: dict[str, Path]
) -> None:
    text = await windows.text(**named("c"))
    away = folders["c"].rename(folders["c"].with_name("away"))
    try:
        assert await windows.text(**named("c", prompt=PROMPT)) == text
        await windows.assert_serves()
    finally:
        away.rename(folders["c"])
