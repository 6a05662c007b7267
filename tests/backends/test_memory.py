"""Whether vLLM and a model fit into the memory there is."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.backends import memory
from app.backends.args import VLLMOfflineArgs
from app.backends.model_files import hidden_size, weights_bytes
from app.errors import StartError

MIB = 2**20


def make_args(**values: Any) -> VLLMOfflineArgs:
    return VLLMOfflineArgs.model_validate({"model": "m", "served_model_name": "served", **values})


@pytest.fixture(autouse=True)
def _as_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has seen this kind of model before, and no engine of another test is in this process."""
    monkeypatch.setattr(memory, "_taken_bytes", lambda: 40 * MIB)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda count: monkeypatch.setattr("app.machine.available_memory", lambda: count)


def write_safetensors(file: Path, *tensors: tuple[str, int]) -> None:
    """A file with tensors of these types and numbers of elements; sparse on the disk."""
    size = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1}
    header, end = {}, 0
    for number, (kind, count) in enumerate(tensors):
        begin, end = end, end + count * size[kind]
        header[f"t{number}"] = {"dtype": kind, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def test_too_little_for_vllm_itself_fails_with_what_is_needed_and_there(available: Any) -> None:
    available(100 * MIB)

    finding = memory.check_memory(make_args(), None, is_cpu=True)

    assert finding.status == "fail"
    assert "802 MiB are needed (vLLM 770 MiB, the model 0 MiB) and 100 MiB may be used" in finding.found
    assert "docker run --memory" in finding.advice
    with pytest.raises(StartError, match="out of memory: at least 802 MiB are needed"):
        finding.require()


def test_enough_is_well(available: Any) -> None:
    available(2048 * MIB)

    assert memory.check_memory(make_args(), None, is_cpu=True).status == "ok"


def test_what_the_process_has_taken_already_is_not_needed_again(available: Any) -> None:
    available(802 * MIB - 10 * MIB)  # this process has more than 10 MiB

    assert memory.check_memory(make_args(), None, is_cpu=True).status == "ok"


def test_processes_of_the_engines_own_need_more(available: Any) -> None:
    available(1000 * MIB)

    assert memory.check_memory(make_args(), None, is_cpu=True).status == "ok"
    assert memory.check_memory(make_args(engine_process="separate"), None, is_cpu=True).status == "fail"


def test_weights_and_a_cache_that_is_asked_for_count(available: Any, tmp_path: Path) -> None:
    available(1000 * MIB)
    write_safetensors(tmp_path / "model.safetensors", ("BF16", 100 * MIB))
    assert memory.check_memory(make_args(), tmp_path, is_cpu=True).status == "ok"

    args = make_args(vllm_config={"kv_cache_memory_bytes": 500 * MIB})
    finding = memory.check_memory(args, tmp_path, is_cpu=True)
    assert "key-value cache 500 MiB" in finding.found
    assert "kv_cache_memory_bytes" in finding.advice


def test_on_a_gpu_the_models_weights_are_not_in_this_memory(available: Any, tmp_path: Path) -> None:
    available(1000 * MIB)
    write_safetensors(tmp_path / "model.safetensors", ("BF16", 5000 * MIB))

    assert memory.check_memory(make_args(), tmp_path, is_cpu=False).status == "ok"
    assert memory.check_memory(make_args(), tmp_path, is_cpu=True).status == "fail"


# --- the model ---


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        ([("BF16", 1000)], {}, 2000),
        ([("F32", 1000)], {}, 2000),
        ([("F32", 1000), ("F16", 10)], {"dtype": "float32"}, 4040),
        ([("I8", 1000), ("F32", 10)], {}, 1020),
        ([("BF16", 1000)], {"load_format": "dummy"}, 0),
        ([("BF16", 1000)], {"quantization": "fp8"}, 0),
    ],
    ids=str,
)
def test_weights_in_the_engines_type(
    tmp_path: Path, tensors: list[tuple[str, int]], config: dict[str, Any], expected: int
) -> None:
    write_safetensors(tmp_path / "model.safetensors", *tensors)

    assert weights_bytes(tmp_path, config) == expected


def test_the_parts_of_a_model_add_up_and_copies_do_not(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        write_safetensors(tmp_path / name, ("BF16", 100))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))

    assert weights_bytes(tmp_path, {}) == 400


def test_a_file_that_is_none_counts_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)

    assert weights_bytes(tmp_path, {}) == 1000
    assert weights_bytes(None, {}) == 0
    assert weights_bytes(tmp_path / "gone", {}) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"hidden_size": 576}', 576),
        ('{"text_config": {"hidden_size": 64}}', 64),
        ("{}", 0),
        ('{"hidden_size": "many"}', 0),
        ("[]", 0),
        ("{", 0),
    ],
)
def test_how_wide_a_model_is(tmp_path: Path, text: str, expected: int) -> None:
    (tmp_path / "config.json").write_text(text)

    assert hidden_size(tmp_path) == expected
