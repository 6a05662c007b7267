"""Audio: headers first, then blocks of samples, so that no file costs more than was allowed."""

import io
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from app.media.limits import Refused

Samples: TypeAlias = npt.NDArray[np.float32]
SoundFile: TypeAlias = Any
"""A ``soundfile.SoundFile``; the package is an extra, and has no types."""

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
MIN_RATE_HZ, MAX_RATE_HZ = 1000, 384_000
MAX_CHANNELS = 16
MAX_SAMPLE = 2**15
"""Samples are -1 to 1, or whole numbers of 16 bits: far larger ones become no numbers within a model, stay in its cache
and change the texts of others."""
MAX_VALUES = 2**27
"""Samples of all channels of a request: ten minutes in stereo at 96 kHz are somewhat less."""
UNKNOWN_FRAMES = 2**62
"""A FLAC header may leave the length open, which then reads as more than this; the library fails on reading it."""
BLOCK_FRAMES = 1 << 16
RIFF_OPEN = 0x7FFF0000
"""From here on the length in a WAV's head is one that nobody knew when it was written."""
OGG_END = 4
"""Of a page's flags: it is the last."""
NO_PACKAGE = "audio is not served here: pip install 'batchserve[audio]' where the service runs"


class AudioBudget:
    """Counts the audio of a request.

    Args:
        max_s: most of it, in seconds.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._seconds = 0.0
        self._values = 0

    def take(self, frames: int, rate_hz: int, channels: int) -> None:
        """Count some.

        Raises:
            Refused: there was more than the limit.
        """
        self._seconds += frames / rate_hz
        self._values += frames * channels
        if self._seconds > self._max_s:
            raise Refused(f"audio of one request may last {self._max_s:g} seconds in all")
        if self._values > MAX_VALUES:
            raise Refused(f"audio of one request may have {MAX_VALUES} samples in all, its channels counted")


def _packages() -> tuple[Any, Any]:
    """The extra ``audio``.

    Raises:
        Refused: it is not installed, or the library that it wraps is not.
    """
    try:
        import soundfile  # type: ignore[import-untyped]
        import soxr  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:
        raise Refused(NO_PACKAGE) from error
    return soundfile, soxr


def require_packages() -> None:
    """The extra ``audio`` is installed.

    Raises:
        Refused: it is not.
    """
    _packages()


def open_audio(data: bytes) -> SoundFile:
    """A file with its header read and nothing decoded.

    Raises:
        Refused: it is none that this service takes.
    """
    soundfile, _ = _packages()
    _check_whole(data)
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:
        raise Refused("is not an audio file that can be read: WAV, FLAC, OGG, MP3") from error
    if file.format not in FORMATS:
        raise Refused(f"{file.format} is not read: send WAV, FLAC, OGG or MP3")
    if file.frames > UNKNOWN_FRAMES:
        raise Refused("the audio's header leaves its length open")
    if not MIN_RATE_HZ <= file.samplerate <= MAX_RATE_HZ:
        raise Refused(f"the sample rate is {file.samplerate} Hz; it may be {MIN_RATE_HZ} to {MAX_RATE_HZ}")
    if file.channels > MAX_CHANNELS:
        raise Refused(f"the audio has {file.channels} channels; it may have {MAX_CHANNELS}")
    return file


def _check_whole(data: bytes) -> None:
    """A WAV says how long it is, the last page of an OGG that it is the last: the library takes what is there."""
    is_wav_cut = data[:4] == b"RIFF" and len(data) + 1 < 8 + int.from_bytes(data[4:8], "little") < RIFF_OPEN
    is_ogg_cut = data[:4] == b"OggS" and not _flags_of_last_page(data) & OGG_END
    if is_wav_cut or is_ogg_cut:
        raise Refused("the audio is truncated")


def _flags_of_last_page(data: bytes) -> int:
    return int.from_bytes(data[data.rfind(b"OggS") + 5 :][:1], "little")


def decode(file: SoundFile, rate_hz: float, budget: AudioBudget) -> Samples:
    """One channel, the mean of the file's, at the model's rate.

    Args:
        file: with its header read.
        rate_hz: of the model.
        budget: counts what is really decoded: headers lie.

    Raises:
        Refused: broken, empty, too long, or holds what is no number.
    """
    pieces = list(_resampled(_blocks(file, budget), file.samplerate, rate_hz))
    samples = np.concatenate(pieces) if pieces else np.empty(0, np.float32)
    if not samples.size:
        raise Refused("the audio is empty")
    return samples


def _blocks(file: SoundFile, budget: AudioBudget) -> Iterator[Samples]:
    while True:
        try:
            block = file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)
        except Exception as error:
            raise Refused(f"the audio cannot be decoded: {str(error)[:200]}") from error
        if not len(block):
            return
        budget.take(len(block), file.samplerate, file.channels)
        if not np.isfinite(block).all():
            raise Refused("the audio holds values that are no numbers")
        if np.abs(block).max() > MAX_SAMPLE:
            raise Refused(f"the audio holds samples above {MAX_SAMPLE}")
        yield block.mean(axis=1)


def _resampled(blocks: Iterator[Samples], from_hz: float, to_hz: float) -> Iterator[Samples]:
    if from_hz == to_hz:
        yield from blocks
        return
    _, soxr = _packages()
    stream = soxr.ResampleStream(from_hz, to_hz, num_channels=1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.empty(0, np.float32), last=True)
