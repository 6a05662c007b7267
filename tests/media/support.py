"""What the tests of media share: files, a web server that misbehaves, a network that only records."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpcore
import numpy as np
import soundfile  # type: ignore[import-untyped]
from PIL import Image

from app.media.addresses import CheckedNetwork
from app.media.fetch import Fetcher
from app.media.limits import MediaLimits
from app.prompts.media import MediaPart, Modality

LOOPBACK = ("127.0.0.0/8", "::1/128")
RATE_HZ = 16_000.0


def limits(**changes: Any) -> MediaLimits:
    values: dict[str, Any] = {"max_bytes": 1 << 20, "max_image_pixels": 1 << 20, "max_audio_s": 60, "timeout_s": 1.0}
    return MediaLimits(**{**values, **changes})


def to_rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def picture(width: int = 4, height: int = 3, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 100, height: int = 100, kind: str = "PNG") -> bytes:
    """A picture that does not compress, the same each time."""
    values = np.random.default_rng(1).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind)
    return file.getvalue()


def sound(samples: Any = None, rate_hz: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of these samples; written in blocks, as the library wants it of OGG."""
    values = np.linspace(-0.5, 0.5, 1600, dtype=np.float32) if samples is None else np.asarray(samples, np.float32)
    channels = 1 if values.ndim == 1 else values.shape[1]
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate_hz, channels, subtype, format=kind) as out:
        for start in range(0, len(values), 8192):
            out.write(values[start : start + 8192])
    return file.getvalue()


def silence(seconds: float, rate_hz: int = 16_000, kind: str = "WAV", channels: int = 1) -> bytes:
    return sound(np.zeros((int(seconds * rate_hz), channels), np.float32), rate_hz, kind)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def part(source: str | bytes, modality: Modality = "image", param: str = "p") -> MediaPart:
    return MediaPart(modality, source if isinstance(source, str) else uri(source), param)


# --- a network on which nothing is sent ---


class Recorder(httpcore.AsyncNetworkBackend):
    """Records the addresses that are connected to; the names are looked up in a table."""

    def __init__(self, names: dict[str, list[str]] | None = None) -> None:
        self.names = names or {}
        self.looked_up: list[str] = []
        self.connected: list[tuple[str, int]] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        return self.names.get(host, [])

    async def connect_tcp(self, host: str, port: int, *_: Any) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        raise httpcore.ConnectError("nothing is there")


def recorded(limits: MediaLimits, recorder: Recorder) -> Fetcher:
    """A fetcher whose connections are recorded, with the checks as they are."""
    return Fetcher(limits, CheckedNetwork(limits.networks, recorder.resolve, recorder))


# --- a server on this machine ---

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Handler:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", *headers, "", ""]

    async def handle(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return handle


def redirect(to: str, status: str = "302 Found") -> Handler:
    return answer(b"", f"location: {to}", status=status)


class Site:
    """A web server with a handler for each path.

    Attributes:
        port: where it listens, on 127.0.0.1.
        asked: the heads of the requests, in order.
        open: connections that are open.
    """

    def __init__(self) -> None:
        self.pages: dict[str, Handler] = {}
        self.port = 0
        self.asked: list[str] = []
        self.open = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the answer is there or the caller has gone."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        path = head.split(" ")[1]
        handle = self.pages.get(path, answer(b"", status="404 Not Found"))
        tasks = [asyncio.ensure_future(handle(path, writer)), asyncio.ensure_future(reader.read())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, connections: int) -> None:
        """Wait until so many are open."""
        async with asyncio.timeout(5):
            while self.open != connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """The server, running."""
    served = Site()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        await served.until(0)


def local(domains: Sequence[str] = ("127.0.0.1",), **changes: Any) -> MediaLimits:
    """Limits with which the server can be reached."""
    return limits(domains=tuple(domains), networks=LOOPBACK, **changes)
