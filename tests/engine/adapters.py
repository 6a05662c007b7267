"""LoRA adapters for the small models, good ones and broken ones, in the layout of PEFT."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HIDDEN, LAYERS = 128, 2
"""Of the small models."""
OUTPUTS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
TEXT, IMAGE = "model.layers", "model.text_model.layers"
"""What the layers of ``tiny_model`` and ``tiny_image_model`` are called."""
Weights = dict[str, np.ndarray]


def tiny_adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 8,
    layers: str = TEXT,
    modules: Mapping[str, int] = OUTPUTS,
    hidden: int = HIDDEN,
    scale: float = 0.4,
    **config: object,
) -> Path:
    """A random adapter on the attention of both layers, strong enough for a greedy text of its own.

    Args:
        folder: a folder that is not there yet.
        seed: adapters of different seeds differ.
        rank: of all its matrices.
        layers: the name of the model's list of layers.
        modules: of the attention, with their number of outputs.
        hidden: the width of the model.
        scale: standard deviation of the weights.
        config: further members of ``adapter_config.json``, or others in place of those there are.
    """
    random = np.random.default_rng(seed)
    weights: Weights = {}
    for layer in range(LAYERS):
        for module, outputs in modules.items():
            name = f"base_model.model.{layers}.{layer}.self_attn.{module}"
            inputs = OUTPUTS["o_proj"] if module == "o_proj" else hidden
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                weights[f"{name}.lora_{side}.weight"] = random.normal(0, scale, shape).astype(np.float32)
    return written(folder, weights, {"r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(modules), **config})


def written(folder: Path, weights: Weights, config: Mapping[str, object]) -> Path:
    """An adapter of these weights, with what else belongs into its configuration."""
    folder.mkdir(parents=True)
    save_file(weights, folder / WEIGHTS)
    common = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": "tiny"}
    (folder / CONFIG).write_text(json.dumps({**common, **config}))
    return folder


def with_weights(folder: Path, change: Callable[[Weights], Weights | None]) -> Path:
    """The adapter with its weights changed, in place or for others."""
    weights = load_file(folder / WEIGHTS)
    changed = change(weights)
    save_file(weights if changed is None else changed, folder / WEIGHTS)
    return folder


def missing(folder: Path) -> Path:
    return folder


def without_config(folder: Path) -> Path:
    (tiny_adapter(folder, 1) / CONFIG).unlink()
    return folder


def without_weights(folder: Path) -> Path:
    (tiny_adapter(folder, 1) / WEIGHTS).unlink()
    return folder


def no_json(folder: Path) -> Path:
    (tiny_adapter(folder, 1) / CONFIG).write_text('{"r": 8,')
    return folder


def truncated(folder: Path) -> Path:
    file = tiny_adapter(folder, 1) / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder


def of_a_wider_base(folder: Path) -> Path:
    return tiny_adapter(folder, 1, hidden=576)


def of_a_deeper_base(folder: Path) -> Path:
    def add_a_layer(weights: Weights) -> Weights:
        return weights | {name.replace("layers.1.", "layers.2."): weight for name, weight in weights.items()}

    return with_weights(tiny_adapter(folder, 1), add_a_layer)


def with_unknown_modules(folder: Path) -> Path:
    return tiny_adapter(folder, 1, modules={"c_attn": 384})


def with_other_names(folder: Path) -> Path:
    """vLLM looks at the last part of a name alone, finds it known, and then uses none of them."""
    return tiny_adapter(folder, 1, layers="transformer.h")


def of_rank_zero(folder: Path) -> Path:
    return tiny_adapter(folder, 1, r=0)


def of_too_high_a_rank(folder: Path) -> Path:
    return tiny_adapter(folder, 1, rank=513)


def with_a_wrong_rank(folder: Path) -> Path:
    """vLLM would scale it by the rank it is told."""
    return tiny_adapter(folder, 1, r=4)


def dora(folder: Path) -> Path:
    return tiny_adapter(folder, 1, use_dora=True)


def with_nan(folder: Path) -> Path:
    def spoil(weights: Weights) -> None:
        next(iter(weights.values()))[0, 0] = np.nan

    return with_weights(tiny_adapter(folder, 1), spoil)


def huge(folder: Path) -> Path:
    """Of finite weights, with which activations are so no longer."""

    def blow_up(weights: Weights) -> None:
        for weight in weights.values():
            weight *= 1e15

    return with_weights(tiny_adapter(folder, 1), blow_up)


def with_huge_alpha(folder: Path) -> Path:
    return tiny_adapter(folder, 1, lora_alpha=1e12)


def half(folder: Path) -> Path:
    def keep_one_side(weights: Weights) -> Weights:
        return {name: weight for name, weight in weights.items() if "lora_A" in name}

    return with_weights(tiny_adapter(folder, 1), keep_one_side)


def untrained(folder: Path) -> Path:
    """As PEFT makes them: the second matrix is zero."""

    def clear(weights: Weights) -> None:
        for name, weight in weights.items():
            weight *= "lora_A" in name

    return with_weights(tiny_adapter(folder, 1), clear)


def empty(folder: Path) -> Path:
    return with_weights(tiny_adapter(folder, 1), lambda _: {})


BROKEN: dict[str, Callable[[Path], Path]] = {
    make.__name__: make
    for make in (
        missing,
        without_config,
        without_weights,
        no_json,
        truncated,
        of_a_wider_base,
        of_a_deeper_base,
        with_unknown_modules,
        with_other_names,
        of_rank_zero,
        of_too_high_a_rank,
        with_a_wrong_rank,
        dora,
        with_nan,
        huge,
        with_huge_alpha,
        half,
        untrained,
        empty,
    )
}
"""Adapters for ``tiny_model`` that cannot be used: each a function that makes one in a folder."""
