"""Images: looked at before they are decoded, whatever they are made of."""

import contextlib
import io
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.media import image
from app.media.limits import Refused
from tests.media.support import noise, picture, sound, to_rgb


def decoded(data: bytes) -> Image.Image:
    return image.decode(image.open_image(data), to_rgb)


def refused(data: bytes) -> str:
    with pytest.raises(Refused) as caught:
        decoded(data)
    assert len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_usual_formats_are_read(kind: str) -> None:
    assert (decoded(picture(5, 7, kind)).size, decoded(picture(5, 7, kind)).mode) == ((5, 7), "RGB")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_kind_of_pixel_is_read(mode: str) -> None:
    assert decoded(picture(mode=mode)).mode == "RGB"


def test_the_size_is_known_before_anything_is_decoded() -> None:
    opened = image.open_image(picture(9000, 9000, mode="1"))

    assert opened.size == (9000, 9000)
    assert opened.getbbox is not None
    assert getattr(opened, "_im", None) is None


def test_one_pixel_is_an_image() -> None:
    assert decoded(picture(1, 1)).size == (1, 1)


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for kind, lossless in (("GIF", {}), ("WEBP", {"lossless": True})):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:], **lossless)

        assert decoded(file.getvalue()).getpixel((1, 1)) == (255, 0, 0)


def test_what_turns_and_converts_it_gets_the_opened_image_with_its_exif_data() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    seen = []

    def turn(item: Image.Image) -> Image.Image:
        seen.append(item.getexif()[0x0112])
        return item

    image.decode(image.open_image(picture(kind="JPEG", exif=exif)), turn)

    assert seen == [6]


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA", "PCX", "EPS", "PDF", "ICNS"])
def test_other_formats_are_refused(kind: str) -> None:
    assert "not an image that can be read: PNG, JPEG" in refused(picture(32, 32, kind))


@pytest.mark.parametrize("data", [b"x", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"RIFF", sound()[:200], b"<svg/>"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert refused(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_a_truncated_image_is_refused(kind: str, share: float) -> None:
    data = noise(kind=kind)

    assert refused(data[: int(len(data) * share)])


@pytest.mark.parametrize("size", [(2, 401), (401, 2), (1, 201), (2, 16_000_000)])
def test_a_line_of_pixels_is_refused_from_its_head(size: tuple[int, int]) -> None:
    assert "one side may be 200 times the other" in refused(picture(*size, mode="1"))


@pytest.mark.parametrize("size", [(1, 200), (400, 2), (1, 1)])
def test_a_long_image_is_read(size: tuple[int, int]) -> None:
    assert decoded(picture(*size)).size == size


def test_an_image_of_twenty_thousand_squared_pixels_is_refused_from_its_head() -> None:
    data = picture(20_000, 20_000, mode="1")
    start = time.monotonic()

    assert "too large" in refused(data)

    assert time.monotonic() - start < 10


def test_a_huge_webp_is_refused_before_its_canvas_is_touched() -> None:
    assert "too large" in refused(picture(16383, 16383, "WEBP", lossless=True))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PNG, JPEG, GIF = (picture(8, 8, kind, "L") for kind in ("PNG", "JPEG", "GIF"))
MANY = 600_000
BOMBS: dict[str, Any] = {
    "text inflated": lambda: PNG[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(30_000_000))) + PNG[33:],
    "texts inflated": lambda: PNG[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**6))) * 100 + PNG[33:],
    "texts before": lambda: PNG[:33] + chunk(b"tEXt", b"a\0b") * MANY + PNG[33:],
    "texts behind": lambda: PNG[:-12] + chunk(b"tEXt", b"a\0b") * MANY + PNG[-12:],
    "empty data": lambda: PNG[:33] + chunk(b"IDAT") * MANY + PNG[33:],
    "comments": lambda: JPEG[:2] + b"\xff\xfe\0\2" * MANY + JPEG[2:],
    "padding": lambda: JPEG[:2] + b"\xff" * MANY * 10 + JPEG[2:],
    "gif comments": lambda: GIF[:13] + b"\x21\xfe\1a\0" * MANY + GIF[13:],
    "gif comment": lambda: GIF[:13] + b"\x21\xfe" + (b"\xff" + b"a" * 255) * 60_000 + b"\0" + GIF[13:],
    "gif of nothing": lambda: GIF[:13] + bytes(MANY * 10),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_made_to_be_slow_is_given_up_soon(name: str) -> None:
    data = BOMBS[name]()
    start = time.monotonic()

    assert refused(data)

    assert time.monotonic() - start < 10


def scans(jpeg: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan stands in it so often."""
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * count + jpeg[-2:]


def test_a_jpeg_with_endless_scans_is_refused_and_a_usual_one_is_not() -> None:
    progressive = picture(64, 64, "JPEG", progressive=True)

    assert decoded(scans(progressive, 1)).size == (64, 64)
    assert "more than 32 scans" in refused(scans(progressive, 1000))


def test_what_stands_behind_a_jpeg_or_in_its_head_is_none_of_its_scans() -> None:
    """Phones put a film behind a picture, and all put a small one into its head."""
    exif = Image.Exif()
    exif[0x9286] = b"\xff\xda" * 1000
    film = np.random.default_rng(1).bytes(3 << 20)
    assert film.count(b"\xff\xda") > image.MAX_SCANS

    assert decoded(picture(64, 64, "JPEG", exif=exif) + film).size == (64, 64)


def test_a_bmp_that_python_would_have_to_unpack_is_refused() -> None:
    head = b"BM" + struct.pack("<IHHI", 1 << 20, 0, 0, 54 + 1024)
    info = struct.pack("<IiiHHIIiiII", 40, 4000, 4000, 1, 8, 1, 0, 0, 0, 256, 0)

    assert "compressed BMP" in refused(head + info + bytes(1024) + b"\1\1" * 1000)


@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), st.data())
def test_a_damaged_image_is_decoded_or_refused_and_nothing_else(kind: str, data: st.DataObject) -> None:
    file = bytearray(noise(24, 24, kind))
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))

    with contextlib.suppress(Refused):
        opened = image.open_image(bytes(file))
        if opened.width * opened.height < 1 << 20:
            image.decode(opened, to_rgb)


@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBP"]), st.binary()
)
def test_any_bytes_are_refused_or_an_image(head: bytes, data: bytes) -> None:
    with contextlib.suppress(Refused):
        image.open_image(head + data)
