"""LoRA adapters looked at from their files alone: what is broken is told of, what is not is left alone."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.backends.lora import Adapter, engine_values, look_at
from app.errors import StartError
from tests.engine.adapters import BROKEN, HIDDEN, OUTPUTS, Weights, tiny_adapter, with_weights, written

pytestmark = pytest.mark.engine

REASONS = {
    "missing": "there is no folder",
    "without_config": "has no adapter_config.json",
    "without_weights": r"has no adapter_model\.safetensors",
    "no_json": r"adapter_config\.json cannot be read",
    "truncated": r"adapter_model\.safetensors cannot be read",
    "of_a_wider_base": "k_proj is for a matrix of 64 by 576, the base model's is 64 by 128",
    "of_a_deeper_base": r"no module model\.layers\.2\.self_attn\.\w+: it is of another base",
    "of_rank_zero": "positive integer, got 0",
    "of_too_high_a_rank": "rank 513 is greater than max_lora_rank 512",
    "with_a_wrong_rank": r"gives model\.\S+ the rank 4, its matrices have 8",
    "dora": "DoRA",
    "with_nan": r"lora_A\.weight holds values that are no numbers",
    "huge": r"far larger than a training gives: weights up to \de\+15, scaled by 2e\+01",
    "with_huge_alpha": r"far larger than a training gives: weights up to 2e\+00, scaled by 1e\+12",
    "half": "only one of its two matrices",
    "untrained": "changes nothing",
    "empty": r"adapter_model\.safetensors is empty",
}
TOLD_BY_ENGINE = {"with_unknown_modules", "with_other_names"}
"""Of these the files tell nothing that is sure: a base may have its modules under other names than its checkpoint."""


def seen(folder: Path, base: Path | None = None) -> Adapter:
    """The one adapter of a service."""
    (adapter,) = look_at([f"it={folder}"], "tiny", base)
    return adapter


def base_of(folder: Path, names: Mapping[str, tuple[int, ...]], dtype: Any = np.float16) -> Path:
    """A base model's folder with these weights alone, zeros in as many files."""
    folder.mkdir()
    for number, (name, shape) in enumerate(names.items()):
        save_file({name: np.zeros(shape, dtype)}, folder / f"model-{number}.safetensors")
    return folder


# --- broken ones ---


@pytest.mark.parametrize("kind", REASONS)
def test_a_broken_one_is_told_of_with_what_is_wrong(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    adapter = seen(BROKEN[kind](tmp_path / kind), tiny_model)

    assert adapter.reason is not None
    assert re.search(REASONS[kind], adapter.reason), adapter.reason
    assert len(adapter.reason) <= 300
    assert "\n" not in adapter.reason


def test_the_table_above_knows_all_broken_ones() -> None:
    assert REASONS.keys() | TOLD_BY_ENGINE == BROKEN.keys()


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"r": "8"},
        {"r": None},
        {"lora_alpha": None},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"rank_pattern": {"q_proj": "8"}},
        {"rank_pattern": {"(": 4}},
        {"alpha_pattern": {"q_proj": "much"}},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 2]]},
    ],
    ids=str,
)
def test_a_configuration_that_vllm_does_not_serve_is_told_of(
    tmp_path: Path, tiny_model: Path, config: dict[str, Any]
) -> None:
    assert seen(tiny_adapter(tmp_path / "it", 1, **config), tiny_model).reason


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000], ids=repr)
def test_a_configuration_that_is_none_is_told_of(tmp_path: Path, tiny_model: Path, content: bytes) -> None:
    folder = tiny_adapter(tmp_path / "it", 1)
    (folder / "adapter_config.json").write_bytes(content)
    assert "adapter_config.json" in str(seen(folder, tiny_model).reason)


@pytest.mark.parametrize("path", ["\0", "x" * 300, "~nobody-of-this-name/it", "/dev/null", "/proc/1/root"], ids=repr)
def test_a_path_that_leads_nowhere_is_told_of(path: str) -> None:
    assert seen(Path(path)).reason


def test_the_files_are_looked_at_where_they_are_no_files(tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path / "it", 1)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    assert "has no adapter_model.safetensors" in str(seen(folder).reason)


def test_a_broken_one_does_not_hide_the_others(tmp_path: Path, tiny_model: Path) -> None:
    folders = {"a": tiny_adapter(tmp_path / "a", 1), **{kind: BROKEN[kind](tmp_path / kind) for kind in REASONS}}
    folders["z"] = tiny_adapter(tmp_path / "z", 2)
    found = look_at([f"{name}={folder}" for name, folder in folders.items()], "tiny", tiny_model)

    assert [adapter.name for adapter in found] == list(folders)
    assert [adapter.name for adapter in found if adapter.reason is None] == ["a", "z"]
    assert [adapter.id for adapter in found] == list(range(1, len(found) + 1))


# --- good ones ---


@pytest.mark.parametrize("rank", [1, 3, 8, 512])
def test_a_good_one_is_usable_and_its_rank_is_known(tmp_path: Path, tiny_model: Path, rank: int) -> None:
    adapter = seen(tiny_adapter(tmp_path / "it", 1, rank=rank), tiny_model)
    assert (adapter.reason, adapter.rank) == (None, rank)


def test_one_with_ranks_of_its_own_for_some_modules_has_the_largest(tmp_path: Path, tiny_model: Path) -> None:
    def widen(weights: Weights) -> None:
        for name, weight in weights.items():
            if "q_proj" in name:
                axis = 0 if "lora_A" in name else 1
                weights[name] = np.repeat(weight, 2, axis=axis)

    folder = with_weights(tiny_adapter(tmp_path / "it", 1, rank_pattern={"q_proj": 16}), widen)
    adapter = seen(folder, tiny_model)
    assert (adapter.reason, adapter.rank) == (None, 16)


def test_copies_of_the_bases_embeddings_are_no_fault(tmp_path: Path, tiny_model: Path) -> None:
    """PEFT stores them when tokens were added; vLLM passes over them."""

    def add(weights: Weights) -> None:
        weights["base_model.model.model.embed_tokens.base_layer.weight"] = np.zeros((8, HIDDEN), np.float32)

    assert seen(with_weights(tiny_adapter(tmp_path / "it", 1), add), tiny_model).reason is None


def lm_head_adapter(folder: Path) -> Path:
    def add(weights: Weights) -> None:
        weights["base_model.model.lm_head.lora_A.weight"] = np.ones((8, HIDDEN), np.float32)
        weights["base_model.model.lm_head.lora_B.weight"] = np.ones((512, 8), np.float32)

    return with_weights(tiny_adapter(folder, 1), add)


def test_the_head_that_a_base_shares_with_its_embeddings_is_not_missed(tmp_path: Path, tiny_model: Path) -> None:
    assert seen(lm_head_adapter(tmp_path / "it"), tiny_model).reason is None


BASES: dict[str, Callable[[Path], Path]] = {
    "of other names": lambda folder: base_of(folder, {"layers.0.attention.wq.weight": (128, 128)}),
    "not of safetensors": lambda folder: base_of(folder, {}),
    "packed": lambda folder: base_of(
        folder, {f"model.layers.{n}.self_attn.{m}.qweight": (16, 16) for n in range(2) for m in OUTPUTS}, np.int32
    ),
    "quantized to bytes": lambda folder: base_of(
        folder, {f"model.layers.{n}.self_attn.{m}.weight": (64, 1) for n in range(2) for m in OUTPUTS}, np.uint8
    ),
    "turned round": lambda folder: base_of(
        folder, {f"model.layers.{n}.self_attn.{m}.weight": (128, o) for n in range(2) for m, o in OUTPUTS.items()}
    ),
    "with a vision tower before it": lambda folder: base_of(
        folder,
        {
            f"{part}.layers.{n}.self_attn.{m}.weight": shape
            for n in range(2)
            for m, o in OUTPUTS.items()
            for part, shape in (("model.language_model", (o, 128)), ("model.vision_tower.encoder", (48, 48)))
        },
    ),
}


@pytest.mark.parametrize("base", BASES)
def test_nothing_is_said_against_an_adapter_of_which_the_base_tells_nothing(tmp_path: Path, base: str) -> None:
    assert seen(tiny_adapter(tmp_path / "it", 1), BASES[base](tmp_path / "base")).reason is None


def test_a_broken_base_is_not_the_adapters_fault(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"model.layers.0.self_attn.q_proj.weight": (7, 7)})
    (base / "model-1.safetensors").write_bytes(b"no weights")
    assert seen(tiny_adapter(tmp_path / "it", 1), base).reason is None


def test_without_its_folder_the_base_is_left_out_of_it(tmp_path: Path) -> None:
    assert seen(BROKEN["of_a_wider_base"](tmp_path / "it")).reason is None


def test_experts_that_share_a_matrix_are_left_to_vllm(tmp_path: Path, tiny_model: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.experts"
    weights: Weights = {f"{name}.lora_A.weight": np.ones((32, 128)), f"{name}.lora_B.weight": np.ones((256, 32))}
    config = {"r": 8, "lora_alpha": 8, "target_modules": ["experts"]}
    assert seen(written(tmp_path / "it", weights, config), tiny_model).reason is None


# --- what the engine needs for them ---


@pytest.mark.parametrize(("ranks", "expected"), [([1], 1), ([2], 8), ([8, 9], 16), ([200], 256), ([512], 512)], ids=str)
def test_the_engine_has_a_slot_more_than_adapters_and_room_for_the_largest_rank(
    ranks: list[int], expected: int
) -> None:
    adapters = [Adapter(f"a{rank}", number, Path("/a"), rank) for number, rank in enumerate(ranks, start=1)]
    slots = len(ranks) + 1
    wanted = {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": expected}
    assert engine_values([*adapters, Adapter("broken", 9, Path("/b"), 400, "broken")]) == wanted


def test_without_usable_adapters_the_engine_is_as_it_was() -> None:
    assert engine_values([]) == engine_values([Adapter("broken", 1, Path("/b"), 0, "broken")]) == {}


# --- the setting ---


@pytest.mark.parametrize(
    "words",
    [["a"], ["=x"], ["a="], ["a=/x", "a=/y"], ["tiny=/x"], ["a\n=/x"], [" =/x"], ["a" * 257 + "=/x"]],
    ids=lambda words: str(words)[:30],
)
def test_a_wrong_setting_is_refused_at_start(words: list[str]) -> None:
    with pytest.raises(StartError, match="lora_modules: "):
        look_at(words, "tiny", None)


def test_a_path_may_hold_equals_signs_and_is_taken_from_where_the_service_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_adapter(tmp_path / "a=b", 1)
    monkeypatch.chdir(tmp_path)
    (adapter,) = look_at(["it=a=b"], "tiny", None)
    assert (adapter.path, adapter.reason) == (tmp_path / "a=b", None)
