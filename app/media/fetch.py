"""Files of allowed hosts over HTTP: no redirect to other hosts, no proxies, and never more than was allowed."""

import re

import httpcore
import httpx

from app.media.addresses import CheckedNetwork
from app.media.limits import ByteBudget, MediaLimits, Refused

MAX_URL_CHARS = 8192
MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
WEB_PORTS = (None, 80, 443)
OTHER_PORTS = range(1024, 65536)
"""Below are those of mail servers, shells and the like."""
HEADERS = [
    (b"user-agent", b"batchserve"),
    (b"accept", b"image/*, audio/*"),
    (b"accept-encoding", b"identity"),
    (b"connection", b"close"),
]
NO_HOSTS = "nothing is fetched here: send data URIs, or name hosts in the service's setting allowed_media_domains"


class Fetcher:
    """Fetches what images and audio are given as URLs. Lives on the event loop.

    Args:
        limits: which hosts and addresses are allowed.
        network: makes the connections; default: to checked addresses alone.
    """

    def __init__(self, limits: MediaLimits, network: CheckedNetwork | None = None) -> None:
        self._limits = limits
        self._network = network or CheckedNetwork(limits.networks)
        self._pool = httpcore.AsyncConnectionPool(
            # Made once: it takes as long as a small picture.
            ssl_context=httpcore.default_ssl_context() if limits.domains else None,
            max_connections=None,
            # One that is kept may be closed by its server just when it is used again.
            max_keepalive_connections=0,
            network_backend=self._network,
        )

    def check(self, url: str) -> httpx.URL:
        """A URL that may be fetched; nothing is connected to yet.

        Raises:
            Refused: it may not, or is none.
        """
        if not self._limits.domains:
            raise Refused(NO_HOSTS)
        if len(url) > MAX_URL_CHARS:
            raise Refused(f"a URL may have {MAX_URL_CHARS} characters")
        return self._checked(_parsed(url))

    def _checked(self, url: httpx.URL) -> httpx.URL:
        host = url.raw_host.decode("ascii")
        if url.scheme not in ("http", "https"):
            raise Refused(f"{url.scheme[:40]}: URLs are not fetched, only http(s) URLs")
        if url.userinfo:
            raise Refused("a URL with a user name or password is not fetched")
        if not self._limits.allow_host(host):
            raise Refused(f"{host:.100} is not in the service's setting allowed_media_domains")
        if url.port not in WEB_PORTS and url.port not in OTHER_PORTS:
            raise Refused(f"port {url.port} is not fetched from")
        return url

    async def fetch(self, url: httpx.URL, budget: ByteBudget) -> bytes:
        """What a checked URL answers with, after at most so many redirects.

        Raises:
            Refused: it cannot be had, may not be had, or is too large.
        """
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(url, budget)
            if isinstance(answer, bytes):
                return answer
            url = self._checked(answer)
        raise Refused(f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL, budget: ByteBudget) -> bytes | httpx.URL:
        """The body, or where the server points to."""
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        try:
            async with self._pool.stream("GET", target, headers=HEADERS) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if response.status in REDIRECTS and b"location" in headers:
                    return _joined(url, headers[b"location"])
                _check_head(response.status, headers, budget)
                return await _body(response, budget)
        except _FAILURES as error:
            raise Refused(f"{target.host.decode('ascii'):.100} cannot be fetched from: {_reason(error)}") from error

    async def aclose(self) -> None:
        """Close what is still open."""
        await self._pool.aclose()
        self._network.close()


_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
    OSError,
)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200] if str(error) else type(error).__name__


def _parsed(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise Refused(f"is not a URL: {str(error)[:200]}") from error


def _joined(url: httpx.URL, location: bytes) -> httpx.URL:
    """Where a redirect points to."""
    try:
        return url.join(location.decode("ascii"))
    except (httpx.InvalidURL, ValueError) as error:
        raise Refused(f"the server redirects to what is not a URL: {str(error)[:200]}") from error


def _check_head(status: int, headers: dict[bytes, bytes], budget: ByteBudget) -> None:
    if status != 200:
        raise Refused(f"the server answers with status {status}")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        raise Refused("the server sends it compressed, though it was asked not to")
    if re.fullmatch(rb"\d{1,18}", length := headers.get(b"content-length", b"")):
        budget.check(int(length))


async def _body(response: httpcore.Response, budget: ByteBudget) -> bytes:
    """All of it, counted piece by piece."""
    pieces = []
    async for piece in response.aiter_stream():
        budget.take(len(piece))
        pieces.append(piece)
    return b"".join(pieces)
