"""Text, images, audio and adapters in one window of one model, on both backends: each request gets its own text."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.engine import models
from tests.engine.adapters import tiny_adapter
from tests.engine.process import ServiceProcess, service_process
from tests.engine.test_media import TOKENS, audio_part, image_part, tone, user
from tests.media.support import noise, picture, silence

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

Json = dict[str, Any]
ADAPTERS = ("a", "b")
IMAGE, OTHER_IMAGE = image_part(noise(64, 48)), image_part(picture(64, 48))
SOUND, OTHER_SOUND = audio_part(tone(440)), audio_part(tone(3000))
REQUESTS: list[Json] = [
    {"prompt": "Once upon a time"},
    {"messages": user("What is this?", IMAGE)},
    {"messages": user("What is this?", SOUND), "model": "a"},
    {"messages": user("What is this?")},
    {"messages": user(SOUND, "and", IMAGE, "?")},
    {"messages": user("What is this?", OTHER_IMAGE), "model": "b"},
    {"messages": user("What is this?", IMAGE), "model": "a"},
    {"messages": user("What is this?", OTHER_SOUND)},
    {"prompt": "Once upon a time", "model": "b"},
    {"messages": user(IMAGE, OTHER_IMAGE, SOUND, OTHER_SOUND)},
]


@pytest.fixture(scope="module", params=["vllm_offline", "vllm_python"])
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp(request.param)
    adapters = {
        name: tiny_adapter(folder / name, seed, layers="llm.model.layers") for seed, name in enumerate(ADAPTERS)
    }
    options = [word for name, path in adapters.items() for word in ("--lora-modules", f"{name}={path}")]
    with service_process(
        folder / "service",
        models.tiny_omni_model(),
        "auto",
        *("--backend", request.param, "--served-model-name", "omni", "--max-audio-s", "30", *options),
        dtype="float32",
        trust_remote_code=True,
        max_model_len=1024,
        kv_cache_memory_bytes=2**27,
    ) as process:
        yield process.wait_ready()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(process: ServiceProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with process.client() as client:
        yield client


async def rows(client: httpx.AsyncClient, requests: list[Json]) -> list[Json]:
    response = await client.post("/batch", json={"requests": requests, "defaults": TOKENS})
    assert response.status_code == 200, response.text
    results: list[Json] = response.json()["results"]
    return results


def text_of(row: Json) -> str:
    assert row["status"] == 200, row
    text: str = row["response"]["outputs"][0]["text"]
    return text


async def test_each_of_a_mixed_window_gets_what_it_gets_alone(client: httpx.AsyncClient) -> None:
    alone = [text_of(row) for request in REQUESTS for row in await rows(client, [request])]
    together = await rows(client, REQUESTS)

    assert [text_of(row) for row in together] == alone
    assert len(set(alone)) == len(alone)
    windows = [row["response"]["window"] for row in together]
    assert windows == [None] * len(together) or {window["size"] for window in windows} == {len(REQUESTS)}
    assert [row["response"]["model"] for row in together] == [request.get("model", "omni") for request in REQUESTS]


async def test_what_is_wrong_in_a_mixed_window_costs_the_others_nothing(client: httpx.AsyncClient) -> None:
    alone = [text_of(row) for row in await rows(client, REQUESTS)]
    wrong: list[tuple[Json, int]] = [
        ({"messages": user("What?", image_part(noise()[:500]))}, 400),
        ({"messages": user("What?", audio_part(silence(40)))}, 400),
        ({"messages": user("What?", IMAGE), "model": "nobody"}, 404),
        ({"prompt": "A (<image>./</image>) without its part"}, 400),
    ]
    mixed: list[Json] = [
        item for good, bad in zip(REQUESTS, [*wrong, *wrong, *wrong], strict=False) for item in (bad[0], good)
    ]
    found = await rows(client, mixed)

    assert [row["status"] for row in found[::2]] == [status for _, status in [*wrong, *wrong, *wrong]][: len(REQUESTS)]
    assert [text_of(row) for row in found[1::2]] == alone
    assert (await client.get("/readyz")).status_code == 200
