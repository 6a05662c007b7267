"""Images and audio on real engines: whose they are, how they are counted, and what is refused."""

import asyncio
import json
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from tests.engine import models
from tests.engine.process import CLEAN_ENVIRONMENT, ServiceProcess, service_process
from tests.media import support
from tests.media.support import Site, answer, base64_of, noise, picture, redirect, silence, sound, uri

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
REFUSAL_S = 10.0
"""Refusals take milliseconds, and a second and a half where something is fetched; this machine may be busy."""
Json = dict[str, Any]


# --- what is sent ---


def image_part(data: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def audio_part(data: bytes) -> Json:
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": "wav"}}


def tone(hertz: float, seconds: float = 1.0, rate_hz: int = 16_000) -> bytes:
    return sound(np.sin(np.arange(int(seconds * rate_hz)) * hertz * 2 * np.pi / rate_hz) * 0.5, rate_hz)


def user(*content: Json | str) -> list[Json]:
    parts = [{"type": "text", "text": item} if isinstance(item, str) else item for item in content]
    return [{"role": "user", "content": parts}]


@dataclass(frozen=True)
class Kind:
    """One kind of media.

    Attributes:
        parts: two that differ, as parts of a message.
        row: the first of them as a row of a data set.
    """

    name: str
    model: Path
    parts: tuple[Json, Json]
    row: Json

    @property
    def conversations(self) -> list[list[Json]]:
        one, two = self.parts
        return [
            user("What is this?", one),
            user("What is this?"),
            user("What is this?", two),
            user(one, "and", two, "?"),
            [*user(one), {"role": "assistant", "content": "One."}, *user("And this?", two)],
        ]


def kind_of(name: str) -> Kind:
    if name == "image":
        parts = noise(64, 48), picture(64, 48)
        first, second = map(image_part, parts)
        return Kind(
            name,
            models.tiny_image_model(),
            (first, second),
            {"text_column": ["What is this?"], "image_column": [uri(parts[0])]},
        )
    tones = tone(440), tone(3000)
    first, second = map(audio_part, tones)
    row = {"text_column": ["What is this?"], "audio_column": [{"audio": base64_of(tones[0]), "format": "wav"}]}
    return Kind(name, models.tiny_audio_model(), (first, second), row)


# --- what is running ---


@dataclass
class Running:
    """A service for one kind of media on one backend."""

    kind: Kind
    backend: str
    client: httpx.AsyncClient
    direct: list[Json]

    async def generate(self, **body: Any) -> Json:
        response = await self.client.post("/generate", json={**TOKENS, **body})
        assert response.status_code == 200, response.text
        result: Json = response.json()
        return result

    async def batch(self, *requests: Json) -> list[Json]:
        response = await self.client.post("/batch", json={"requests": requests, "defaults": TOKENS})
        assert response.status_code == 200, response.text
        rows: list[Json] = response.json()["results"]
        return rows

    async def assert_serves(self) -> None:
        """A request with media still gets the text that it got from vLLM alone, and health is good."""
        answer = await self.generate(messages=self.kind.conversations[0])
        assert answer["outputs"][0]["text"] == self.direct[0]["text"]
        assert (await self.client.get("/readyz")).status_code == 200


def text_of(row: Json) -> str:
    assert row["status"] == 200, row
    text: str = row["response"]["outputs"][0]["text"]
    return text


@pytest.fixture(scope="module")
def direct() -> dict[str, list[Json]]:
    """What ``LLM.chat`` answers to the conversations of each kind."""
    found = {}
    for kind in map(kind_of, ("image", "audio")):
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("chat_directly.py"), kind.model],
            input=json.dumps(kind.conversations).encode(),
            stdout=subprocess.PIPE,
            check=True,
            timeout=180,
            env=CLEAN_ENVIRONMENT,
        )
        found[kind.name] = json.loads(done.stdout)
    return found


IMAGES = ["image-vllm_offline", "image-vllm_python"]
AUDIO = ["audio-vllm_offline", "audio-vllm_python"]
of_images = pytest.mark.parametrize("service", IMAGES, indirect=True, scope="module")
of_audio = pytest.mark.parametrize("service", AUDIO, indirect=True, scope="module")


@pytest.fixture(scope="module", params=[*IMAGES, *AUDIO])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kind, str, ServiceProcess]]:
    name, backend = request.param.split("-")
    kind = kind_of(name)
    # Only the one for images may fetch, and only from this machine under one of its names.
    domains = ["--allowed-media-domains", "localhost"]
    networks = ["--allowed-media-networks", "127.0.0.0/8,::1/128"] if name == "image" else []
    limits = ["--max-image-pixels", "4000000", "--max-audio-s", "60", "--max-media-bytes", "4000000"]
    with service_process(
        tmp_path_factory.mktemp(request.param),
        kind.model,
        "auto",
        *("--backend", backend, *domains, *networks, *limits),
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=2**27,
    ) as process:
        yield kind, backend, process.wait_ready()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def it(service: tuple[Kind, str, ServiceProcess], direct: dict[str, list[Json]]) -> AsyncIterator[Running]:
    kind, backend, process = service
    async with process.client() as client:
        yield Running(kind, backend, client, direct[kind.name])


# --- whose they are ---


async def test_a_window_that_mixes_texts_and_media_gives_each_the_text_that_vllm_gives_it_alone(it: Running) -> None:
    rows = await it.batch(
        *({"messages": conversation} for conversation in it.kind.conversations), {"columns": it.kind.row}
    )

    assert [text_of(row) for row in rows[:-1]] == [answer["text"] for answer in it.direct]
    assert text_of(rows[-1]) == it.direct[0]["text"]
    assert [row["response"]["usage"]["prompt_tokens"] for row in rows[:-1]] == [a["prompt_tokens"] for a in it.direct]
    assert len({text_of(row) for row in rows[:4]}) == 4
    if it.backend == "vllm_offline":
        assert {row["response"]["window"]["size"] for row in rows} == {len(rows)}
    else:
        assert {row["response"]["window"] for row in rows} == {None}


async def test_openais_route_has_the_same_text_and_counts_the_tokens_of_media(it: Running) -> None:
    body = {"messages": it.kind.conversations[0], **TOKENS}
    whole = (await it.client.post("/v1/chat/completions", json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await it.client.post("/v1/chat/completions", json={**body, **options})).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    assert whole["choices"][0]["message"]["content"] == it.direct[0]["text"]
    assert whole["usage"]["prompt_tokens"] == it.direct[0]["prompt_tokens"]
    assert whole["usage"]["prompt_tokens_details"]["multimodal_tokens"][it.kind.name] > 1
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == it.direct[0]["text"]
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert chunks[-1]["metrics"]["timings"]["first_token_at"] is not None


async def test_the_same_media_in_another_form_are_the_same(it: Running) -> None:
    (part, _), question = it.kind.parts, "What is this?"
    if it.kind.name == "image":
        other = {"type": "image_url", "image_url": part["image_url"]["url"]}
    else:
        url = f"data:audio/wav;base64,{part['input_audio']['data']}"
        other = {"type": "audio_url", "audio_url": {"url": url}}

    assert (await it.generate(messages=user(question, other)))["outputs"][0]["text"] == it.direct[0]["text"]


async def test_several_answers_to_one_image_or_audio(it: Running) -> None:
    answer = await it.generate(messages=it.kind.conversations[0], n=3, temperature=1.0, seed=1)

    assert len(answer["outputs"]) == 3
    assert answer["usage"]["completion_tokens"] == 24


# --- what is refused ---


def flac_of_an_hour() -> bytes:
    return silence(3600, 8000, "FLAC")


def png_of(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and holds next to nothing."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100)))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb() -> bytes:
    """25 million pixels in a few kilobytes."""
    return picture(5000, 5000)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


WRONG_IMAGES: dict[str, tuple[Any, str]] = {
    "no comma": ("data:image/png;base64", "comma"),
    "not base64": ("data:image/png;base64,#!?", "base64"),
    "not in base64": ("data:text/plain,hello", "base64"),
    "empty": ("data:image/png;base64,", "empty"),
    "no URL": ("picture.png", "neither a data URI"),
    "a file": ("file:///etc/passwd", "file: is neither"),
    "another scheme": ("ftp://localhost/x.png", "ftp: is neither"),
    "no picture": (uri(b"hello"), "not an image"),
    "truncated": (uri(cut(noise())), "cannot be decoded"),
    "truncated JPEG": (uri(cut(noise(kind="JPEG"))), "cannot be decoded"),
    "a line of pixels": (uri(png_of(2, 1_000_000)), "one side may be 200 times the other"),
    "20,000 by 20,000": (uri(png_of(20_000, 20_000)), "large"),
    "a bomb": (uri(bomb()), "pixels"),
    "too many bytes": (uri(bytes(4_000_001)), "bytes"),
    "another host": ("http://127.0.0.1:9/x.png", "allowed_media_domains"),
    "the host's own metadata": ("http://169.254.169.254/latest/meta-data", "allowed_media_domains"),
    "a name and a password": ("http://user:secret@localhost/x.png", "user name"),
    "a port of another service": ("http://localhost:22/x.png", "port"),
    "nobody there": ("http://localhost:1024/x.png", "cannot be fetched"),
}
WRONG_AUDIO: dict[str, tuple[Any, str]] = {
    "not base64": ("#!?", "base64"),
    "no audio": (base64_of(b"hello"), "not an audio file"),
    "an hour": (base64_of(flac_of_an_hour()), "60 seconds"),
    "a rate of 100 Hz": (base64_of(silence(1, 100)), "sample rate"),
    "no samples": (base64_of(silence(0)), "empty"),
    "too short": (base64_of(silence(0.001)), "too short"),
    "no numbers": (base64_of(sound(np.full(1600, np.nan), subtype="FLOAT")), "no numbers"),
    "huge samples": (base64_of(sound(np.full(1600, 1e18), subtype="FLOAT")), "samples above"),
    "truncated": (base64_of(cut(tone(440))), "truncated"),
    "truncated head": (base64_of(tone(440)[:30]), "truncated"),
    "a private address": ("http://localhost:8000/x.wav", "not at a public address"),
}


async def refused(it: Running, messages: list[Json]) -> Json:
    """The error of a request that gets a 400 soon, and whose neighbours get their texts."""
    started = time.monotonic()
    response = await it.client.post("/generate", json={"messages": messages})
    assert time.monotonic() - started < REFUSAL_S
    assert response.status_code == 400, response.text
    good = {"messages": it.kind.conversations[0]}
    rows = await it.batch(good, {"messages": messages}, {"messages": it.kind.conversations[1]})
    assert [row["status"] for row in rows] == [200, 400, 200]
    assert [text_of(rows[0]), text_of(rows[2])] == [it.direct[0]["text"], it.direct[1]["text"]]
    error: Json = response.json()["error"]
    assert rows[1]["error"] == error
    return error


@of_images
@pytest.mark.parametrize("name", WRONG_IMAGES)
async def test_a_wrong_image_is_refused_alone(it: Running, name: str) -> None:
    source, words = WRONG_IMAGES[name]

    error = await refused(it, user("What?", {"type": "image_url", "image_url": {"url": source}}))
    assert error["param"] == "messages.0.content.1.image_url.url"
    assert words in error["message"]


@of_audio
@pytest.mark.parametrize("name", WRONG_AUDIO)
async def test_wrong_audio_is_refused_alone(it: Running, name: str) -> None:
    source, words = WRONG_AUDIO[name]
    is_url = source.startswith("http")
    part = (
        {"type": "audio_url", "audio_url": {"url": source}}
        if is_url
        else {"type": "input_audio", "input_audio": {"data": source}}
    )

    error = await refused(it, user("What?", part))
    assert error["param"] == f"messages.0.content.1.{'audio_url.url' if is_url else 'input_audio.data'}"
    assert words in error["message"]


async def test_the_number_of_placeholders_is_that_of_the_parts(it: Running) -> None:
    mark = {"image": "<image>", "audio": "<|AUDIO|>"}[it.kind.name]
    for messages in (
        user(f"{mark} What?"),
        user(f"{mark} What?", it.kind.parts[0]),
        user(mark, mark, it.kind.parts[0]),
    ):
        error = await refused(it, messages)
        assert "placeholders" in error["message"]
    response = await it.client.post("/generate", json={"prompt": f"A {mark} without its part"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    completion = await it.client.post("/v1/completions", json={"prompt": ["A", f"A {mark}"]})
    assert (completion.status_code, completion.json()["error"]["param"]) == (400, "prompt.1")


async def test_media_of_the_other_kind_are_refused(it: Running) -> None:
    other = audio_part(tone(440)) if it.kind.name == "image" else image_part(picture())

    error = await refused(it, user("What?", other))
    assert f"no {'audio' if it.kind.name == 'image' else 'image'}" in error["message"]


async def test_what_is_no_medium_at_all_is_refused(it: Running) -> None:
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    error = await refused(it, user("What?", video))
    assert (error["param"], "video_url" in error["message"]) == ("messages.0.content.1.type", True)
    part = {**it.kind.parts[0], "uuid": "1"}
    error = await refused(it, user("What?", part))
    assert error["param"] == "messages.0.content.1.uuid"


async def test_media_and_a_cut_of_the_prompt_exclude_each_other(it: Running) -> None:
    body = {"messages": it.kind.conversations[0], "truncate_prompt_tokens": 5}
    response = await it.client.post("/generate", json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_media_count_against_the_context(it: Running) -> None:
    """Its tokens are known only when it has been rendered."""
    long = "word " * 1010
    response = await it.client.post("/generate", json={"messages": user(long, it.kind.parts[0])})

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["limit"]) == (400, "context_length_exceeded", 1024)
    await it.assert_serves()


@of_images
@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (2, 3)])
async def test_a_picture_of_few_pixels_is_taken(it: Running, size: tuple[int, int]) -> None:
    await it.generate(messages=user("What?", image_part(picture(*size))))
    await it.assert_serves()


@of_audio
@pytest.mark.parametrize("form", ["44.1 kHz", "stereo", "FLAC", "OGG", "MP3"])
async def test_audio_of_another_rate_or_form_is_brought_to_the_models(it: Running, form: str) -> None:
    wave = np.sin(np.arange(16_000) * 440 * 2 * np.pi / 16_000) * 0.5
    data = {
        "44.1 kHz": lambda: tone(440, rate_hz=44_100),
        "stereo": lambda: sound(np.stack([wave, wave], axis=1)),
        "FLAC": lambda: sound(wave, kind="FLAC"),
        "OGG": lambda: sound(wave, kind="OGG"),
        "MP3": lambda: sound(wave, kind="MP3"),
    }[form]()
    plain = await it.generate(messages=user("What is this?", audio_part(tone(440))))

    answer = await it.generate(messages=user("What is this?", audio_part(data)))
    assert abs(answer["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]) <= 2


# --- what is fetched ---


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with support.site() as site:
        yield site


def part_at(site: Site, path: str) -> Json:
    return {"type": "image_url", "image_url": {"url": site.url(path, "localhost")}}


async def slow(_: str, writer: asyncio.StreamWriter) -> None:
    """Says that something will come."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(60)


async def endless(_: str, writer: asyncio.StreamWriter) -> None:
    """As much as the caller takes."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(100_000))
        await writer.drain()


@of_images
async def test_an_image_of_an_allowed_host_is_fetched(it: Running, site: Site) -> None:
    site.pages = {"/a.png": answer(noise(64, 48), "content-type: image/png"), "/moved": redirect("/a.png")}

    for path in site.pages:
        answered = await it.generate(messages=user("What is this?", part_at(site, path)))
        assert answered["outputs"][0]["text"] == it.direct[0]["text"]


@of_images
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/slow", "longer than"),
        ("/endless", "bytes"),
        ("/elsewhere", "allowed_media_domains"),
        ("/to-a-file", "file"),
        ("/in-circles", "redirects"),
        ("/missing", "status 404"),
    ],
)
async def test_a_host_that_is_slow_endless_or_points_elsewhere_is_refused_alone(
    it: Running, site: Site, path: str, words: str
) -> None:
    site.pages = {
        "/slow": slow,
        "/endless": endless,
        "/elsewhere": redirect("http://169.254.169.254/latest/meta-data"),
        "/to-a-file": redirect("file:///etc/passwd"),
        "/in-circles": redirect("/in-circles"),
    }

    error = await refused(it, user("What?", part_at(site, path)))
    assert words in error["message"]
    await it.assert_serves()


@of_images
async def test_slow_hosts_hold_up_nobody_whose_media_are_there(it: Running, site: Site) -> None:
    site.pages = {"/slow": slow}
    body = {"messages": user("What?", part_at(site, "/slow"))}
    waiting = [asyncio.create_task(it.client.post("/generate", json=body)) for _ in range(40)]
    await asyncio.sleep(0.2)

    answered = await it.generate(messages=it.kind.conversations[0])

    assert not all(call.done() for call in waiting)
    assert answered["outputs"][0]["text"] == it.direct[0]["text"]
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {400}
    await it.assert_serves()
