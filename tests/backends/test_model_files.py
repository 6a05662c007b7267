"""Where a model's files are and whether they can be read; a stand-in for the question to the Hub."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.backends import hub, model_files
from app.backends.args import VLLMOfflineArgs
from app.backends.hub import Lookup
from app.backends.model_files import find_model


def make_args(model: Path | str, **vllm_config: Any) -> VLLMOfflineArgs:
    values = {"model": str(model), "served_model_name": "served", "vllm_config": vllm_config}
    return VLLMOfflineArgs.model_validate(values)


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole file of weights, with none in it."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.md"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a path one that may not be read, to root as well."""
    access = os.access

    def deny(path: Path) -> None:
        monkeypatch.setattr(os, "access", lambda file, mode: file != path and access(file, mode))

    return deny


Answer = Callable[..., None]


@pytest.fixture
def the_hub(monkeypatch: pytest.MonkeyPatch) -> Answer:
    def answer(*values: Any) -> None:
        monkeypatch.setattr(hub, "look_up", lambda model, revision: Lookup(*values))

    return answer


def test_a_whole_folder_is_found(model: Path) -> None:
    found = find_model(make_args(model))

    assert found.finding.status == "ok"
    assert found.folder == model
    assert not found.is_offline


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named_with_the_user(
    model: Path, denied: Callable[[Path], None], name: str
) -> None:
    denied(model / name)

    finding = find_model(make_args(model)).finding
    assert finding.status == "fail"
    assert f"user id {os.geteuid()} may not read {model / name}" in finding.found
    assert f"chmod -R a+rX {model}" in finding.advice


def test_a_file_that_vllm_does_not_read_may_be_secret(model: Path, denied: Callable[[Path], None]) -> None:
    denied(model / "notes.md")

    assert find_model(make_args(model)).finding.status == "ok"


def test_a_link_to_nowhere_is_told_as_such(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "gone")

    assert "a link to nowhere" in find_model(make_args(model)).finding.found


@pytest.mark.parametrize(
    "content",
    [
        NO_TENSORS[:-1],
        b"version https://git-lfs.github.com/spec/v1",
        (2**50).to_bytes(8, "little") + b"{}",
        (10**6).to_bytes(8, "little") + b"[" * 10**6,
        (70).to_bytes(8, "little") + b'{"a": {"dtype": "BF16", "shape": [9], "data_offsets": [0, 18]}}'.ljust(70),
    ],
    ids=["cut", "pointer", "huge header", "nested", "no data"],
)
def test_weights_that_are_cut_or_none_at_all_are_told(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)

    finding = find_model(make_args(model)).finding
    assert finding.status == "fail"
    assert f"{model / 'model.safetensors'} holds no weights, or not all of them" in finding.found


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_read(model: Path, name: str) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)

    assert f"{model / name} is no regular file" in find_model(make_args(model)).finding.found


def test_a_folder_that_may_not_be_entered_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, denied: Callable[[Path], None]
) -> None:
    def is_dir(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", is_dir)
    denied(model.parent)

    finding = find_model(make_args(model)).finding
    assert finding.status == "fail"
    assert f"may not read {model.parent}, which is of user" in finding.found
    assert str(model) in finding.found


@pytest.mark.parametrize(("name", "word"), [("config.json", "config.json"), ("model.safetensors", "weights")])
def test_what_is_missing_is_named(model: Path, name: str, word: str) -> None:
    (model / name).unlink()

    finding = find_model(make_args(model)).finding
    assert finding.status == "fail"
    assert word in finding.found


def test_weights_are_not_missed_where_none_are_read(model: Path) -> None:
    (model / "model.safetensors").unlink()

    assert find_model(make_args(model, load_format="dummy")).finding.status == "ok"


def test_without_a_tokenizer_there_is_a_warning_unless_it_is_elsewhere(model: Path) -> None:
    (model / "tokenizer.json").unlink()

    assert find_model(make_args(model)).finding.status == "warn"
    assert find_model(make_args(model, tokenizer="elsewhere")).finding.status == "ok"


def test_no_such_folder(tmp_path: Path) -> None:
    finding = find_model(make_args(tmp_path / "nowhere")).finding

    assert finding.status == "fail"
    assert str(tmp_path / "nowhere") in finding.found
    assert "Hugging Face id" in finding.advice


def test_what_vllm_alone_understands_is_left_to_it() -> None:
    assert find_model(make_args("s3://bucket/model")).finding.status == "ok"


# --- an id ---


@pytest.mark.parametrize("answer", ["offline", "unreachable", "unknown", "gated", "invalid"])
def test_an_id_that_cannot_be_had_fails_with_what_to_do(the_hub: Answer, answer: str) -> None:
    the_hub(None, answer, "the reason")

    found = find_model(make_args("owner/model"))
    assert found.finding.status == "fail"
    assert "owner/model" in found.finding.found
    assert found.finding.advice


def test_an_id_that_is_to_be_downloaded_wants_a_cache(the_hub: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    the_hub(None, "yes")
    assert find_model(make_args("owner/model")).finding.status == "ok"

    monkeypatch.setattr(model_files, "can_write", lambda folder: False)
    finding = find_model(make_args("owner/model")).finding
    assert finding.status == "fail"
    assert "HF_HOME" in finding.advice


def test_a_copy_in_the_cache_serves_without_the_hub(the_hub: Answer, model: Path) -> None:
    the_hub(str(model), "unreachable", "no route to host")

    found = find_model(make_args("owner/model"))
    assert found.finding.status == "warn"
    assert "no route to host" in found.finding.found
    assert found.is_offline
    assert found.folder == model


def test_half_a_copy_serves_only_with_the_hub(the_hub: Answer, model: Path) -> None:
    (model / "model.safetensors").unlink()

    the_hub(str(model), "yes")
    assert find_model(make_args("owner/model")).finding.status == "ok"
    the_hub(str(model), "unreachable", "no route to host")
    assert find_model(make_args("owner/model")).finding.status == "fail"


def test_an_unclear_answer_does_not_hinder_a_start(the_hub: Answer) -> None:
    the_hub(None, "unclear", "502")

    assert find_model(make_args("owner/model")).finding.status == "warn"
