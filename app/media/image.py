"""Images: looked at before they are decoded, then decoded with what they may cost known."""

import io
import re
from collections.abc import Callable
from typing import TypeAlias

from PIL import Image, UnidentifiedImageError

from app.media.limits import Refused

ToRgb: TypeAlias = Callable[[Image.Image], Image.Image]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_READS = 100_000
"""Pillow reads headers in Python, a few bytes at a time: a file made of nothing else would take minutes."""
MAX_ASPECT = 200
"""Longer side to shorter: making a line of millions of pixels small holds up everybody, and no model sees it."""
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""In a JPEG, where it is no pixel."""
START_OF_IMAGE, END_OF_IMAGE, START_OF_SCAN = 0xD8, 0xD9, 0xDA
MAX_SCANS = 32
"""A progressive JPEG has about ten; each goes over all pixels, and costs a hundred bytes."""


class _Metered(io.BytesIO):
    """A file that ends when it is read too often."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MAX_READS:
            raise Refused("the image's header does not end")
        return super().read(size)


def open_image(data: bytes) -> Image.Image:
    """An image with its size known and nothing decoded.

    Raises:
        Refused: it is none that this service takes.
    """
    try:
        image = Image.open(_Metered(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise Refused(f"is not an image that can be read: {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(f"the image is too large: {error}") from error
    except Refused:
        raise
    except Exception as error:  # a reader may fail in any way on a file made to have it fail
        raise Refused(_broken(error)) from error
    _check(image, data)
    return image


def _check(image: Image.Image, data: bytes) -> None:
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise Refused(f"the image is {image.width} by {image.height}: one side may be {MAX_ASPECT} times the other")
    if image.format in ("JPEG", "MPO") and _has_many_scans(data):
        raise Refused(f"the JPEG has more than {MAX_SCANS} scans")
    if image.format == "BMP" and image.info.get("compression"):
        raise Refused("compressed BMP is not read")


def _has_many_scans(data: bytes) -> bool:
    """Of a JPEG, up to its end: what stands in its thumbnail or behind it, as phones put films there, is another's."""
    at = scans = 0
    while scans <= MAX_SCANS and (found := MARKER.search(data, at)) is not None:
        kind, at = found[0][-1], found.end()
        if kind == END_OF_IMAGE:
            return False
        if kind != START_OF_IMAGE:
            at += int.from_bytes(data[at : at + 2], "big")
        scans += kind == START_OF_SCAN
    return scans > MAX_SCANS


def decode(image: Image.Image, to_rgb: ToRgb) -> Image.Image:
    """The pixels of an opened image, of its first frame.

    Args:
        image: with nothing decoded.
        to_rgb: turns it as its EXIF data says, and makes its colours those that models take.

    Raises:
        Refused: it is truncated or broken.
    """
    try:
        image.load()
        return to_rgb(image)
    except Refused:
        raise
    except Exception as error:
        raise Refused(_broken(error)) from error


def _broken(error: Exception) -> str:
    return f"the image cannot be decoded: {str(error)[:200] or type(error).__name__}"
