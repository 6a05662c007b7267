"""The media of a request: fetched, decoded, bounded; or a refusal that names the one at fault."""

import asyncio
import base64
import binascii
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import numpy as np
from PIL import Image

from app.errors import InvalidRequest
from app.media import audio, image
from app.media.fetch import Fetcher
from app.media.image import ToRgb
from app.media.limits import MAX_PARTS, ByteBudget, MediaLimits, Refused
from app.prompts.media import MediaPart

REQUESTS_AT_ONCE = 16
"""How many requests fetch at a time: what they hold in memory is at most so many times ``max_bytes``."""
FETCHES_AT_ONCE = 8
"""Of one request."""
DECODERS = min(4, os.cpu_count() or 1)
MAX_HEAD_CHARS = 1024
"""What stands before the comma of a data URI."""

Item: TypeAlias = Image.Image | audio.Samples
"""RGB pixels, or one channel at the model's rate."""


@dataclass(frozen=True, slots=True)
class Base64:
    """A file within the body."""

    text: str

    @property
    def size_bytes(self) -> int:
        """How many bytes it holds, within three."""
        return len(self.text) * 3 // 4


class MediaLoader:
    """Turns what a body says of its media into pixels and samples. Belongs to the event loop; one for all requests.

    Args:
        limits: what the media of one request may cost.
        audio_rate_hz: what the model takes; None: it takes no audio.
        to_rgb: turns an opened image as its EXIF data says, and makes its colours those that models take.
        fetcher: default: one over the network.
    """

    def __init__(
        self, limits: MediaLimits, audio_rate_hz: float | None, to_rgb: ToRgb, fetcher: Fetcher | None = None
    ) -> None:
        self._limits = limits
        self._audio_rate_hz = audio_rate_hz
        self._to_rgb = to_rgb
        self._fetcher = fetcher or Fetcher(limits)
        self._slots = asyncio.Semaphore(REQUESTS_AT_ONCE)
        # Threads of its own: a caller that hangs up does not end a decoder, which must count all the same.
        self._decoders = ThreadPoolExecutor(max_workers=DECODERS, thread_name_prefix="media")

    async def load(self, parts: Sequence[MediaPart]) -> list[Item]:
        """The media of one request, in order: ``fetch`` and ``decode``.

        Raises:
            InvalidRequest: names the part that cannot be taken, and says why.
        """
        return await self.decode(parts, await self.fetch(parts))

    async def fetch(self, parts: Sequence[MediaPart]) -> list[Base64 | bytes]:
        """The files of one request, in order.

        Raises:
            InvalidRequest: names the part that cannot be taken, and says why.
        """
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(f"at most {MAX_PARTS} images and audio files", param=parts[MAX_PARTS].param)
        budget = ByteBudget(self._limits.max_bytes)
        sources = [self._source(part, budget) for part in parts]
        return await self._files(parts, sources, budget)

    async def decode(self, parts: Sequence[MediaPart], files: Sequence[Base64 | bytes]) -> list[Item]:
        """What the files of one request hold, in order.

        Raises:
            InvalidRequest: names the part that cannot be taken, and says why.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, self._decode, parts, files)

    def _source(self, part: MediaPart, budget: ByteBudget) -> Base64 | httpx.URL:
        """Where a part comes from, checked as far as that goes without a connection."""
        with _named(part):
            if part.modality == "audio":
                audio.require_packages()  # before anything is fetched in vain
            source = _source(part, self._fetcher)
            if isinstance(source, Base64):
                budget.take(source.size_bytes)
            return source

    async def _files(
        self, parts: Sequence[MediaPart], sources: Sequence[Base64 | httpx.URL], budget: ByteBudget
    ) -> list[Base64 | bytes]:
        """What is fetched, in the place of its URL."""
        if all(isinstance(source, Base64) for source in sources):
            return [source for source in sources if isinstance(source, Base64)]
        gate = asyncio.Semaphore(FETCHES_AT_ONCE)
        async with self._slots:
            deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
            return await _all([self._file(*pair, budget, gate, deadline) for pair in zip(parts, sources, strict=True)])

    async def _file(
        self,
        part: MediaPart,
        source: Base64 | httpx.URL,
        budget: ByteBudget,
        gate: asyncio.Semaphore,
        deadline: float,
    ) -> Base64 | bytes:
        if isinstance(source, Base64):
            return source
        with _named(part):
            try:
                async with asyncio.timeout_at(deadline), gate:
                    return await self._fetcher.fetch(source, budget)
            except TimeoutError as error:
                raise Refused(f"fetching took longer than {self._limits.timeout_s:g} seconds") from error

    def _decode(self, parts: Sequence[MediaPart], files: Sequence[Base64 | bytes]) -> list[Item]:
        """On a thread: all headers before anything is decoded."""
        opened = []
        pixels, spoken = 0, audio.AudioBudget(self._limits.max_audio_s)
        for part, file in zip(parts, files, strict=True):
            with _named(part):
                data = _bytes(file) if isinstance(file, Base64) else file
                opened.append(_open(part, data))
                pixels += _pixels(opened[-1])
                self._check_pixels(pixels)
                _check_length(opened[-1], spoken)
        spoken = audio.AudioBudget(self._limits.max_audio_s)
        return [self._item(part, file, spoken) for part, file in zip(parts, opened, strict=True)]

    def _check_pixels(self, pixels: int) -> None:
        if pixels > self._limits.max_image_pixels:
            raise Refused(f"images of one request may have {self._limits.max_image_pixels} pixels in all")

    def _item(self, part: MediaPart, file: Any, budget: audio.AudioBudget) -> Item:
        with _named(part):
            if isinstance(file, Image.Image):
                return image.decode(file, self._to_rgb)
            if self._audio_rate_hz is None:
                raise Refused("this model takes no audio")
            return audio.decode(file, self._audio_rate_hz, budget)

    async def aclose(self) -> None:
        """Close connections and threads."""
        await self._fetcher.aclose()
        self._decoders.shutdown(wait=False, cancel_futures=True)


def size_bytes(item: Item) -> int:
    """What an item takes in memory."""
    return item.nbytes if isinstance(item, np.ndarray) else item.width * item.height * len(item.getbands())


@contextmanager
def _named(part: MediaPart) -> Iterator[None]:
    """A refusal becomes the error of a part."""
    try:
        yield
    except Refused as error:
        raise InvalidRequest(str(error), param=part.param) from error


def _source(part: MediaPart, fetcher: Fetcher) -> Base64 | httpx.URL:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", part.source[:MAX_HEAD_CHARS])
    if scheme is None and part.modality == "audio":
        return Base64(part.source)
    if scheme is None:
        raise Refused("is neither a data URI nor an http(s) URL")
    if scheme[1].lower() == "data":
        return Base64(_data(part.source))
    if scheme[1].lower() in ("http", "https"):
        return fetcher.check(part.source)
    raise Refused(f"{scheme[1][:40]}: is neither a data URI nor an http(s) URL")


def _data(uri: str) -> str:
    comma = uri.find(",", 0, MAX_HEAD_CHARS)
    if comma < 0:
        raise Refused("the data URI has no comma after its type")
    if not uri[:comma].lower().endswith(";base64"):
        raise Refused("the data URI is not in base64: write data:image/png;base64,…")
    return uri[comma + 1 :]


def _bytes(file: Base64) -> bytes:
    try:
        data = base64.b64decode(file.text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"is not base64: {error}") from error
    if not data:
        raise Refused("is empty")
    return data


def _open(part: MediaPart, data: bytes) -> Any:
    return image.open_image(data) if part.modality == "image" else audio.open_audio(data)


def _pixels(opened: Any) -> int:
    return opened.width * opened.height if isinstance(opened, Image.Image) else 0


def _check_length(opened: Any, budget: audio.AudioBudget) -> None:
    if not isinstance(opened, Image.Image):
        budget.take(opened.frames, opened.samplerate, opened.channels)


async def _all(tasks: Sequence[Any]) -> list[Any]:
    """What all of them give; the first failure ends the others."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
