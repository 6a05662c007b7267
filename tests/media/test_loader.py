"""The media of a request: all of them within the limits, or an error that names the one at fault."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.errors import InvalidRequest
from app.media.limits import MAX_PARTS, MediaLimits
from app.media.loader import DECODERS, REQUESTS_AT_ONCE, MediaLoader, size_bytes
from app.prompts.media import MediaPart
from tests.media.support import (
    RATE_HZ,
    Recorder,
    Site,
    answer,
    base64_of,
    limits,
    local,
    noise,
    part,
    picture,
    recorded,
    redirect,
    silence,
    site,
    to_rgb,
    uri,
)

SOON_S = 10
"""What is refused is refused within two seconds on a machine that does nothing else."""


@pytest.fixture
async def web() -> AsyncIterator[Site]:
    async with site() as served:
        yield served


async def loaded(parts: list[MediaPart], allowed: MediaLimits | None = None, rate_hz: float | None = RATE_HZ) -> Any:
    loader = MediaLoader(allowed or limits(), rate_hz, to_rgb)
    try:
        return await loader.load(parts)
    finally:
        await loader.aclose()


async def refused(parts: list[MediaPart], allowed: MediaLimits | None = None, **options: Any) -> InvalidRequest:
    start = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        await loaded(parts, allowed, **options)
    assert time.monotonic() - start < SOON_S
    assert len(caught.value.message) < 400
    return caught.value


# --- what comes back ---


async def test_media_come_back_in_order_whatever_way_they_came(web: Site) -> None:
    web.pages["/slow.png"] = slow(0.2, picture(7, 1))
    web.pages["/b.png"] = answer(picture(5, 1))
    parts = [
        part(web.url("/slow.png")),
        part(uri(silence(0.5), "audio/wav"), "audio"),
        part(picture(3, 1)),
        part(base64_of(silence(0.25)), "audio"),
        part(web.url("/b.png")),
    ]

    items = await loaded(parts, local())

    assert [item.size for item in items if isinstance(item, Image.Image)] == [(7, 1), (3, 1), (5, 1)]
    assert [len(item) for item in items if isinstance(item, np.ndarray)] == [8000, 4000]
    assert [size_bytes(item) for item in items] == [21, 32_000, 9, 16_000, 15]


async def test_nothing_is_loaded_of_nothing() -> None:
    assert await loaded([]) == []


@pytest.mark.parametrize("head", ["data:;base64,", "data:image/png;base64,", "DATA:IMAGE/PNG;charset=x;BASE64,"])
async def test_a_data_uri_may_say_its_type_or_not(head: str) -> None:
    assert [item.size for item in await loaded([part(head + base64_of(picture()))])] == [(4, 3)]


async def test_a_thousand_small_images_are_loaded_and_no_more() -> None:
    parts = [part(picture(1, 1), param=str(number)) for number in range(MAX_PARTS + 1)]

    assert len(await loaded(parts[:-1])) == MAX_PARTS
    assert (await refused(parts)).param == str(MAX_PARTS)


# --- what is refused: always by the part at fault ---


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:", "no comma"),
        ("data:image/png;base64" + " " * 10**6 + ",AAAA", "no comma"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:,AAAA", "not in base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:image/png;base64,AA AA", "not base64"),
        ("data:image/png;base64,AAAA\n", "not base64"),
        ("data:image/png;base64,ÄÄÄÄ", "not base64"),
        ("data:image/png;base64,-_-_", "not base64"),
        ("data:image/png;base64,AAAA", "not an image"),
        ("AAAA", "neither a data URI nor an http(s) URL"),
        ("/etc/passwd", "neither a data URI nor an http(s) URL"),
        (" http://a/b", "neither a data URI nor an http(s) URL"),
        ("file:///etc/passwd", "file: is neither"),
        ("FILE:///etc/passwd", "FILE: is neither"),
        ("ftp://a/b", "ftp: is neither"),
        ("javascript:alert(1)", "javascript: is neither"),
        ("a" * 10**6 + "://x", "neither"),
        ("https://example.com/a.png", "allowed_media_domains"),
    ],
    ids=lambda value: value[:30],
)
async def test_a_source_that_cannot_be_taken_is_refused_by_its_place(source: str, says: str) -> None:
    error = await refused([part(picture()), part(source, param="messages.0.content.1.image_url.url")])

    assert says in error.message
    assert error.param == "messages.0.content.1.image_url.url"


@pytest.mark.parametrize("source", ["", "@", "AAA", "UklGRg==", "http://a/b", "file:///etc/passwd", "data:audio/wav,a"])
async def test_the_same_for_audio(source: str) -> None:
    assert (await refused([part(source, "audio", "a")])).param == "a"


async def test_a_model_that_takes_no_audio_says_so() -> None:
    assert "takes no audio" in (await refused([part(base64_of(silence(1)), "audio")], rate_hz=None)).message


async def test_audio_given_as_an_image_is_refused_and_the_other_way_round() -> None:
    assert "not an image" in (await refused([part(uri(silence(1)))])).message
    assert "not an audio file" in (await refused([part(uri(picture()), "audio")])).message


async def test_a_refusal_stands_before_any_connection_of_its_request() -> None:
    allowed = limits(domains=("cdn.example.com",))
    recorder = Recorder({"cdn.example.com": ["8.8.8.8"]})
    loader = MediaLoader(allowed, RATE_HZ, to_rgb, recorded(allowed, recorder))

    for wrong in ("http://evil.org/a", "ftp://cdn.example.com/a", "data:image/png,a", "data:;base64," + "A" * 2**21):
        with pytest.raises(InvalidRequest) as caught:
            await loader.load([part("http://cdn.example.com/a"), part(wrong, param="1")])
        assert caught.value.param == "1"

    assert (recorder.looked_up, recorder.connected) == ([], [])
    await loader.aclose()


# --- limits are the request's, not the part's ---


async def test_bytes_are_those_of_all_parts(web: Site) -> None:
    file = noise(100, 100)
    web.pages["/a"] = answer(file)
    allowed = local(max_bytes=len(file) * 2 + 10)

    for parts in ([part(file), part(file)], [part(file), part(web.url("/a"))], [part(web.url("/a"))] * 2):
        assert len(await loaded(parts, allowed)) == 2
        assert "bytes in all" in (await refused([*parts, part(file)], allowed)).message
        assert "bytes in all" in (await refused([*parts, part(web.url("/a"))], allowed)).message


async def test_pixels_are_those_of_all_parts_and_refused_before_any_is_decoded() -> None:
    converted: list[Any] = []

    def convert(image: Image.Image) -> Image.Image:
        converted.append(image)
        return image

    loader = MediaLoader(limits(max_image_pixels=300), RATE_HZ, convert)

    await loader.load([part(picture(10, 10))] * 3)
    assert len(converted) == 3
    with pytest.raises(InvalidRequest, match="300 pixels in all") as caught:
        await loader.load([part(picture(10, 10))] * 3 + [part(picture(1, 1), param="last")])

    assert caught.value.param == "last"
    assert len(converted) == 3
    await loader.aclose()


async def test_seconds_are_those_of_all_parts() -> None:
    parts = [part(base64_of(silence(1)), "audio", str(number)) for number in range(4)]

    assert len(await loaded(parts[:3], limits(max_audio_s=3))) == 3
    error = await refused(parts, limits(max_audio_s=3))
    assert (error.param, "3 seconds in all" in error.message) == ("3", True)


BAD: dict[str, Callable[[], MediaPart]] = {
    "20,000 by 20,000 pixels": lambda: part(picture(20_000, 20_000, mode="1")),
    "10,000 by 10,000 pixels": lambda: part(picture(10_000, 10_000, mode="1")),
    "truncated": lambda: part(noise(1000, 1000)[:-1000]),
    "an hour": lambda: part(base64_of(silence(3600, kind="FLAC")), "audio"),
    "a rate of 100 Hz": lambda: part(base64_of(silence(1, 100)), "audio"),
    "no samples": lambda: part(base64_of(silence(0)), "audio"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
async def test_what_is_too_much_or_broken_is_refused_soon(name: str) -> None:
    error = await refused([BAD[name]()], MediaLimits(16 << 20, 2**25, 600, 1.5))

    assert error.param == "p"


# --- time ---


def slow(delay_s: float, body: bytes) -> Any:
    async def handle(path: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        await answer(body)(path, writer)

    return handle


async def drip(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def drip_head(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def drip_interim(_: str, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "handle", [drip, drip_head, drip_interim, slow(60, b"")], ids=["body", "head", "1xx", "silent"]
)
async def test_a_slow_server_is_given_up_and_its_connection_closed(web: Site, handle: Any) -> None:
    web.pages["/a"] = handle

    error = await refused([part(picture()), part(web.url("/a"), param="a")], local(timeout_s=0.3))

    assert (error.param, "longer than 0.3 seconds" in error.message) == ("a", True)
    await web.until(0)


async def test_the_time_is_that_of_all_parts(web: Site) -> None:
    web.pages["/a"] = redirect("/b")
    web.pages["/b"] = slow(0.4, picture())
    parts = [part(web.url("/a"), param=str(number)) for number in range(40)]

    assert "longer than" in (await refused(parts, local(timeout_s=1))).message
    assert len(await loaded(parts[:8], local(timeout_s=10))) == 8


async def test_a_silent_name_server_costs_no_more_than_the_time_allowed() -> None:
    allowed = limits(domains=("cdn.example.com",), timeout_s=0.2)
    recorder = Recorder()

    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    recorder.resolve = never  # type: ignore[method-assign]
    loader = MediaLoader(allowed, RATE_HZ, to_rgb, recorded(allowed, recorder))
    with pytest.raises(InvalidRequest, match=r"longer than 0\.2 seconds"):
        await loader.load([part("http://cdn.example.com/a")])
    await loader.aclose()


async def test_the_first_failure_ends_the_other_fetches_of_its_request(web: Site) -> None:
    web.pages["/slow"] = drip
    start = time.monotonic()

    error = await refused([part(web.url("/slow")), part(web.url("/none"), param="1")], local(timeout_s=60))

    assert (error.param, "status 404" in error.message) == ("1", True)
    assert time.monotonic() - start < SOON_S
    await web.until(0)


async def test_a_caller_that_goes_ends_its_fetches(web: Site) -> None:
    web.pages["/a"] = drip
    loader = MediaLoader(local(timeout_s=60), RATE_HZ, to_rgb)
    task = asyncio.create_task(loader.load([part(web.url("/a"))]))
    await web.until(1)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await web.until(0)
    await loader.aclose()


# --- many requests at a time ---


async def test_so_many_requests_fetch_at_a_time_and_those_that_wait_have_their_time_still(web: Site) -> None:
    most = 0

    async def count(path: str, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        most = max(most, web.open)
        await slow(0.15, picture())(path, writer)

    web.pages["/a"] = count
    loader = MediaLoader(local(timeout_s=5), RATE_HZ, to_rgb)

    results = await asyncio.gather(*(loader.load([part(web.url("/a"))]) for _ in range(REQUESTS_AT_ONCE * 3)))

    assert len(results) == REQUESTS_AT_ONCE * 3
    assert most <= REQUESTS_AT_ONCE
    await loader.aclose()


async def test_so_many_decode_at_a_time_though_callers_go() -> None:
    running = most = 0
    lock, gate = threading.Lock(), threading.Event()

    def convert(image: Image.Image) -> Image.Image:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(5)
        with lock:
            running -= 1
        return image

    loader = MediaLoader(limits(), RATE_HZ, convert)
    tasks = [asyncio.create_task(loader.load([part(picture())])) for _ in range(20)]
    await asyncio.sleep(0.2)
    for task in tasks[:10]:
        task.cancel()
    await asyncio.sleep(0.2)
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert most == DECODERS
    assert [task.cancelled() for task in tasks] == [True] * 10 + [False] * 10
    await loader.aclose()


async def test_the_loop_goes_on_while_images_are_decoded() -> None:
    loader = MediaLoader(MediaLimits(16 << 20, 2**25, 600, 1.5), RATE_HZ, to_rgb)
    task = asyncio.create_task(loader.load([part(picture(4000, 4000))]))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1

    assert (await task)[0].size == (4000, 4000)
    assert turns > 10
    await loader.aclose()


@given(
    st.lists(st.tuples(st.sampled_from(["image", "audio"]), st.text(max_size=40) | st.binary(max_size=40)), max_size=4)
)
async def test_any_sources_are_loaded_or_refused_by_the_place_of_one(sources: list[Any]) -> None:
    parts = [part(source, modality, str(number)) for number, (modality, source) in enumerate(sources)]
    outcome = await asyncio.gather(loaded(parts), return_exceptions=True)

    if isinstance(outcome[0], BaseException):
        assert isinstance(outcome[0], InvalidRequest)
        assert outcome[0].param in [str(number) for number in range(len(parts))]
    else:
        assert len(outcome[0]) == len(parts)
