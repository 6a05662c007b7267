"""Fetching: what is refused is refused before any connection, and no server gets more time or memory than it may."""

import asyncio
import gzip
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.media.fetch import HEADERS, Fetcher
from app.media.limits import ByteBudget, MediaLimits, Refused
from tests.media.support import Recorder, Site, answer, limits, local, recorded, redirect, site


@pytest.fixture
async def web() -> AsyncIterator[Site]:
    async with site() as served:
        yield served


async def fetched(url: str, limits: MediaLimits, budget: ByteBudget | None = None) -> bytes:
    fetcher = Fetcher(limits)
    try:
        return await fetcher.fetch(fetcher.check(url), budget or ByteBudget(limits.max_bytes))
    finally:
        await fetcher.aclose()


async def refused(url: str, limits: MediaLimits) -> str:
    with pytest.raises(Refused) as caught:
        await fetched(url, limits)
    return str(caught.value)


# --- before any connection ---

OPEN = limits(domains=("cdn.example.com", ".img.example.com", "2130706433", "[::1]"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://example.com/a", "not in the service's setting allowed_media_domains"),
        ("http://cdn.example.com.evil.org/a", "not in the service's setting"),
        ("http://cdn.example.com@evil.org/a", "user name or password"),
        ("http://evil.org\\@cdn.example.com/a", "user name or password"),
        ("http://evil.org#@cdn.example.com/a", "not in the service's setting"),
        ("http://evil.org?@cdn.example.com/a", "not in the service's setting"),
        ("http://user:pass@cdn.example.com/a", "user name or password"),
        ("http://@cdn.example.com@evil.org/", "user name or password"),
        ("http://cdn.example.com:22/a", "port 22"),
        ("http://cdn.example.com:0/a", "port 0"),
        ("http://cdn.example.com:99999/a", "port 99999"),
        ("http://cdn.example.com:x/a", "not a URL"),
        ("http://cdn.example.com\r\nx: y/a", "not a URL"),
        ("http://cdn.example.com/\x00", "not a URL"),
        ("http:///a", "not in the service's setting"),
        ("http://", "not in the service's setting"),
        ("http://[::1/a", "not a URL"),
        ("http://127.0.0.1/a", "not in the service's setting"),
        ("http://0x7f000001/a", "not in the service's setting"),
        ("http://ⓒdn.example.com/a", "not a URL"),
        ("ftp://cdn.example.com/a", "ftp: URLs are not fetched"),
        ("file:///etc/passwd", "file: URLs are not fetched"),
        ("gopher://cdn.example.com/a", "gopher: URLs are not fetched"),
        ("//cdn.example.com/a", ": URLs are not fetched"),
        ("http://cdn.example.com/" + "a" * 10_000, "8192 characters"),
        ("http://" + "a" * 300 + ".com/", "not"),
    ],
)
async def test_a_url_that_may_not_be_fetched_is_refused_without_looking_anything_up(url: str, says: str) -> None:
    recorder = Recorder({"cdn.example.com": ["8.8.8.8"]})
    fetcher = recorded(OPEN, recorder)

    with pytest.raises(Refused) as caught:
        fetcher.check(url)

    assert says in str(caught.value)
    assert len(str(caught.value)) < 400
    assert (recorder.looked_up, recorder.connected) == ([], [])
    await fetcher.aclose()


@pytest.mark.parametrize(
    ("url", "connected"),
    [
        ("http://cdn.example.com/a", ("8.8.8.8", 80)),
        ("HTTP://CDN.Example.com/a", ("8.8.8.8", 80)),
        ("https://cdn.example.com/a", ("8.8.8.8", 443)),
        ("http://cdn.example.com:8080/a", ("8.8.8.8", 8080)),
        ("http://a.img.example.com/a", ("1.1.1.1", 80)),
    ],
)
async def test_an_allowed_url_is_connected_to_at_its_checked_address(url: str, connected: tuple[str, int]) -> None:
    recorder = Recorder({"cdn.example.com": ["8.8.8.8"], "a.img.example.com": ["1.1.1.1"]})
    fetcher = recorded(OPEN, recorder)

    with pytest.raises(Refused, match="cannot be fetched from"):
        await fetcher.fetch(fetcher.check(url), ByteBudget(10))

    assert recorder.connected == [connected]
    await fetcher.aclose()


@pytest.mark.parametrize("host", ["cdn.example.com", "2130706433", "[::1]"])
async def test_an_allowed_host_within_private_networks_is_not_connected_to(host: str) -> None:
    names = {"cdn.example.com": ["169.254.169.254"], "2130706433": ["127.0.0.1"], "::1": ["::1"]}
    recorder = Recorder(names)
    fetcher = recorded(OPEN, recorder)

    with pytest.raises(Refused, match="not at a public address"):
        await fetcher.fetch(fetcher.check(f"http://{host}/a"), ByteBudget(10))

    assert recorder.connected == []
    await fetcher.aclose()


async def test_without_allowed_hosts_the_refusal_names_the_setting() -> None:
    fetcher = Fetcher(limits())
    with pytest.raises(Refused, match="allowed_media_domains"):
        fetcher.check("https://example.com/a.png")
    await fetcher.aclose()


@given(st.text(max_size=60) | st.from_regex(r"https?://[^/]{0,30}(/.{0,20})?", fullmatch=True))
def test_any_text_is_refused_or_is_a_url_of_an_allowed_host(text: str) -> None:
    fetcher = Fetcher.__new__(Fetcher)
    fetcher._limits = OPEN

    try:
        url = fetcher.check(text)
    except Refused:
        return

    assert OPEN.allow_host(url.raw_host.decode())
    assert url.scheme in ("http", "https")


# --- answers ---


async def test_the_body_of_an_answer_is_had_and_counted(web: Site) -> None:
    web.pages["/a?b=c%20d"] = answer(b"hello")
    budget = ByteBudget(100)

    assert await fetched(web.url("/a?b=c%20d#e"), local(), budget) == b"hello"

    assert budget.left == 95
    head = web.asked[0].lower()
    assert f"host: 127.0.0.1:{web.port}" in head
    assert all(f"{name.decode()}: {value.decode()}" in head for name, value in HEADERS)


async def test_a_server_that_closes_its_connections_is_fetched_from_again_and_again(web: Site) -> None:
    web.pages["/a"] = answer(b"hello")
    fetcher = Fetcher(local())
    for _ in range(50):
        assert await fetcher.fetch(fetcher.check(web.url("/a")), ByteBudget(10)) == b"hello"
    await fetcher.aclose()


async def test_a_proxy_of_the_environment_is_not_used(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    web.pages["/a"] = answer(b"hello")

    assert await fetched(web.url("/a"), local()) == b"hello"


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial", "304 Not Modified", "404 Not Found", "500 Oops"])
async def test_another_status_is_refused_with_its_number(web: Site, status: str) -> None:
    web.pages["/a"] = answer(b"", status=status)

    assert f"status {status[:3]}" in await refused(web.url("/a"), local())


async def test_a_compressed_answer_is_refused_unread(web: Site) -> None:
    web.pages["/a"] = answer(gzip.compress(bytes(10**6)), "content-encoding: gzip")

    assert "compressed" in await refused(web.url("/a"), local())


async def test_an_answer_that_says_it_is_too_large_is_refused_unread(web: Site) -> None:
    web.pages["/a"] = answer(b"x", length=10**12)
    start = time.monotonic()

    assert "bytes in all" in await refused(web.url("/a"), local(timeout_s=30))

    assert time.monotonic() - start < 10


async def test_an_answer_without_end_is_given_up_at_the_limit(web: Site) -> None:
    sent = 0

    async def endless(_: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            sent += 0x10000
            await writer.drain()

    web.pages["/a"] = endless

    assert "bytes in all" in await refused(web.url("/a"), local(max_bytes=1 << 20))

    assert sent < 100 << 20


async def test_an_answer_shorter_than_it_says_is_refused(web: Site) -> None:
    web.pages["/a"] = answer(b"hello", length=100)

    assert "cannot be fetched from" in await refused(web.url("/a"), local())


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
    ids=["other protocol", "endless head", "length", "chunk", "nothing"],
)
async def test_what_is_no_http_is_refused(web: Site, raw: bytes) -> None:
    async def handle(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    web.pages["/a"] = handle

    assert "cannot be fetched from" in await refused(web.url("/a"), local())


async def test_a_port_where_nothing_listens_is_refused(web: Site, unused_tcp_port: int) -> None:
    assert "cannot be fetched from" in await refused(f"http://127.0.0.1:{unused_tcp_port}/a", local())


class Greeted(httpcore.AsyncNetworkStream):
    """A connection that notes how TLS is begun on it."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    async def start_tls(  # type: ignore[override]
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, **_: Any
    ) -> httpcore.AsyncNetworkStream:
        self.noted.append((server_hostname, ssl_context.check_hostname, ssl_context.verify_mode))
        raise httpcore.ConnectError("no more")

    async def aclose(self) -> None:
        """Nothing is open."""


class TlsRecorder(Recorder):
    noted: list[Any]

    async def connect_tcp(self, host: str, port: int, *_: Any) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        return Greeted(self.noted)


async def test_tls_is_checked_against_the_name_though_the_address_is_connected_to() -> None:
    recorder = TlsRecorder({"cdn.example.com": ["8.8.8.8"]})
    recorder.noted = []
    fetcher = recorded(OPEN, recorder)

    with pytest.raises(Refused, match="cannot be fetched from"):
        await fetcher.fetch(fetcher.check("https://cdn.example.com/a"), ByteBudget(10))

    assert recorder.connected == [("8.8.8.8", 443)]
    assert recorder.noted == [("cdn.example.com", True, ssl.CERT_REQUIRED)]
    await fetcher.aclose()


# --- redirects ---


@pytest.mark.parametrize("status", ["301 a", "302 a", "303 a", "307 a", "308 a"])
async def test_a_redirect_is_followed(web: Site, status: str) -> None:
    web.pages["/a"] = redirect("/b", status)
    web.pages["/b"] = answer(b"hello")

    assert await fetched(web.url("/a"), local()) == b"hello"


async def test_three_redirects_are_followed_and_no_fourth(web: Site) -> None:
    for number in range(5):
        web.pages[f"/{number}"] = redirect(f"/{number + 1}")
    web.pages["/5"] = answer(b"hello")

    assert await fetched(web.url("/2"), local()) == b"hello"
    assert "more than 3 redirects" in await refused(web.url("/1"), local())
    web.pages["/a"] = redirect("/a")
    assert "more than 3 redirects" in await refused(web.url("/a"), local())


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("http://evil.org/a", "not in the service's setting"),
        ("//evil.org/a", "not in the service's setting"),
        ("http://localhost/a", "not in the service's setting"),
        ("file:///etc/passwd", "file: URLs are not fetched"),
        ("data:image/png;base64,AAAA", "data: URLs are not fetched"),
        ("http://127.0.0.1:22/", "port 22"),
        ("http://u:p@127.0.0.1/", "user name or password"),
        ("http://[", "not in the service's setting"),
        ("http://\xff/", "not a URL"),
    ],
)
async def test_a_redirect_that_leads_elsewhere_is_refused(web: Site, to: str, says: str) -> None:
    async def handle(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\nlocation: " + to.encode("latin-1") + b"\r\n\r\n")

    web.pages["/a"] = handle

    assert says in await refused(web.url("/a"), local())
    assert len(web.asked) == 1


async def test_a_redirect_to_an_allowed_name_at_a_private_address_is_refused(web: Site) -> None:
    """The first host is within an allowed network, the second is not."""
    web.pages["/a"] = redirect(f"http://[::1]:{web.port}/b")
    allowed = MediaLimits(1000, 1000, 10, 5, domains=("127.0.0.1", "::1"), networks=("127.0.0.0/8",))

    assert "not at a public address" in await refused(web.url("/a"), allowed)
    assert len(web.asked) == 1
