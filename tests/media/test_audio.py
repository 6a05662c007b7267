"""Audio: one channel at the model's rate, and no file costs more than it may."""

import io
import sys
import time
from typing import Any

import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from app.media import audio
from app.media.audio import AudioBudget
from app.media.limits import Refused
from tests.media.support import RATE_HZ, picture, silence, sound


def decoded(data: bytes, rate_hz: float = RATE_HZ, max_s: float = 60) -> audio.Samples:
    return audio.decode(audio.open_audio(data), rate_hz, AudioBudget(max_s))


def refused(data: bytes, **options: Any) -> str:
    with pytest.raises(Refused) as caught:
        decoded(data, **options)
    assert len(str(caught.value)) < 400
    return str(caught.value)


def tone(seconds: float = 1.0, rate_hz: int = 16_000, pitch_hz: float = 440) -> Any:
    return np.sin(np.arange(int(seconds * rate_hz)) * (2 * np.pi * pitch_hz / rate_hz), dtype=np.float32) / 2


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "FLOAT", 0),
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-6),
        ("WAVEX", "PCM_16", 1e-4),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.1),
        ("MP3", "MPEG_LAYER_III", 0.1),
    ],
)
def test_the_usual_formats_are_read_as_they_are_at_the_models_rate(kind: str, subtype: str, tolerance: float) -> None:
    samples = decoded(sound(tone(), kind=kind, subtype=subtype))

    assert samples.dtype == np.float32
    assert abs(len(samples) - 16_000) <= (0 if kind != "MP3" else 2400)
    assert np.abs(samples[4000:12_000] - tone()[4000:12_000]).max() <= tolerance or kind == "MP3"


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 16])
def test_channels_become_their_mean_as_vllm_has_it(channels: int) -> None:
    values = np.random.default_rng(channels).uniform(-1, 1, (100_000, channels)).astype(np.float32)

    samples = decoded(sound(values, subtype="FLOAT"))

    assert samples.shape == (100_000,)
    np.testing.assert_allclose(samples, np.mean(values.T, axis=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate_hz", [1000, 8000, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_another_rate_becomes_the_models(rate_hz: int) -> None:
    samples = decoded(sound(tone(2, rate_hz, 100), rate_hz))

    expected = tone(2, 16_000, 100)
    assert len(samples) == pytest.approx(32_000, abs=2)
    assert np.abs(samples[4000:-4000] - expected[4000 : len(samples) - 4000]).max() < 0.01


@pytest.mark.parametrize("rate_hz", [1, 100, 999, 384_001, 10**6])
def test_a_rate_out_of_reason_is_refused(rate_hz: int) -> None:
    assert f"sample rate is {rate_hz} Hz" in refused(silence(0.01, rate_hz) if rate_hz > 100 else sound([0.0], rate_hz))


def test_more_channels_than_anything_has_are_refused() -> None:
    assert "17 channels" in refused(silence(0.1, channels=17))


def test_an_hour_is_refused_from_its_header() -> None:
    data = silence(3600, kind="FLAC")
    start = time.monotonic()

    with pytest.raises(Refused, match="600 seconds in all"):
        AudioBudget(600).take(audio.open_audio(data).frames, 16_000, 1)

    assert time.monotonic() - start < 10


def test_what_is_longer_than_its_header_says_is_given_up_at_the_limit() -> None:
    opened = audio.open_audio(silence(30, kind="FLAC"))
    budget = AudioBudget(10)

    with pytest.raises(Refused, match="10 seconds in all"):
        audio.decode(opened, RATE_HZ, budget)

    assert opened.tell() < 11 * 16_000 + audio.BLOCK_FRAMES


def test_channels_count_towards_the_work_that_is_done() -> None:
    AudioBudget(10**6).take(audio.MAX_VALUES // 16, 384_000, 16)
    with pytest.raises(Refused, match="its channels counted"):
        AudioBudget(10**6).take(audio.MAX_VALUES // 16 + 1, 384_000, 16)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(kind: str, share: float) -> None:
    data = sound(np.random.default_rng(1).uniform(-0.5, 0.5, 48_000), kind=kind)

    assert refused(data[: int(len(data) * share)])


@pytest.mark.parametrize("length", [0, 0x7FFF0000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_wav_whose_length_was_not_known_when_it_was_begun_is_read(length: int) -> None:
    wav = bytearray(silence(1))
    wav[4:8] = length.to_bytes(4, "little")

    assert len(decoded(bytes(wav))) == 16_000


def test_a_length_that_a_stream_left_open_is_found_by_reading_or_refused() -> None:
    wav = bytearray(silence(1))
    place = wav.index(b"data") + 4
    wav[place : place + 4] = b"\xff\xff\xff\xff"
    flac = bytearray(silence(1, kind="FLAC"))
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)

    assert len(decoded(bytes(wav))) == 16_000
    assert "leaves its length open" in refused(bytes(flac))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_audio_without_samples_is_refused(kind: str) -> None:
    assert refused(silence(0, kind=kind))


@pytest.mark.parametrize("value", [32_769.0, -1e18, 3.4e38])
def test_samples_that_a_model_could_not_compute_with_are_refused(value: float) -> None:
    assert "samples above 32768" in refused(sound([0.0] * 70_000 + [value], subtype="FLOAT"))
    assert len(decoded(sound([32_768.0, -32_768.0], subtype="FLOAT"))) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(value: float) -> None:
    assert "no numbers" in refused(sound([0.0] * 70_000 + [value], subtype="FLOAT"))


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "W64", "VOC"])
def test_other_formats_are_refused(kind: str) -> None:
    assert f"{kind} is not read: send WAV, FLAC, OGG or MP3" in refused(silence(0.1, kind=kind))


@pytest.mark.parametrize("data", [b"x", b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb\x90\x00", bytes(1000), picture()])
def test_what_is_no_audio_is_refused(data: bytes) -> None:
    assert refused(data)


@pytest.mark.parametrize("missing", ["soundfile", "soxr"])
def test_without_its_packages_the_refusal_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = silence(0.1)
    monkeypatch.setitem(sys.modules, missing, None)

    assert "pip install 'batchserve[audio]'" in refused(data)


def test_a_library_that_is_not_there_is_told_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package wraps a library of the system where its wheel brings none; that raises OSError."""
    data = silence(0.1)

    def fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "soundfile":
            raise OSError("sndfile library not found")
        return real(name, *arguments, **options)

    real = __import__
    monkeypatch.setattr("builtins.__import__", fail)

    assert "pip install 'batchserve[audio]'" in refused(data)


@given(st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]), st.data())
def test_a_damaged_file_is_decoded_or_refused_and_nothing_else(kind: str, data: st.DataObject) -> None:
    file = bytearray(sound(tone(0.2), kind=kind))
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))

    try:
        samples = decoded(bytes(file[: data.draw(st.integers(1, len(file)))]))
    except Refused:
        return

    assert np.isfinite(samples).all()
    assert samples.ndim == 1


def test_the_files_of_these_tests_are_what_they_are_called() -> None:
    assert soundfile.info(io.BytesIO(sound(kind="MP3"))).format == "MP3"
