"""LoRA adapters, looked at before the engine is built: one that is broken must not get near it.

vLLM's own checks come late, when a window that holds a request for the adapter is under way, and some faults it does
not see at all: it takes weights that are no numbers, scales by a rank that is not the matrices', and leaves out,
without a word, modules that the model does not have.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError, safe_open

from app.errors import StartError

MAX_NAME_CHARS = 256
MAX_CHANGE = 1e6
"""Of what an adapter adds to one entry of a matrix: beyond it activations overflow, and what are no numbers spread."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WITHIN_LAYERS = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+)")
"""What of a module's name is the same under the prefixes that checkpoints and PEFT give it."""
ENDS_OF_MODEL = ("embed_tokens", "lm_head")
"""Modules that are one in many models, and then have but one name in the weights."""
Shape = tuple[int, ...]
BaseShapes = Mapping[str, set[Shape]]
"""The shapes that modules of a name have in the base model; ``()`` where they are stored in another form."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of the setting ``lora_modules``.

    Attributes:
        name: what a request gives as its ``model``.
        id: vLLM's number of it, from 1.
        path: its folder.
        rank: the largest of its modules' ranks; 0 when it cannot be told.
        reason: why it cannot be used; None: it can.
    """

    name: str
    id: int
    path: Path
    rank: int = 0
    reason: str | None = None


class BrokenAdapter(Exception):
    """Says what is wrong with an adapter."""


def parse_modules(words: Sequence[str], served_model_name: str) -> list[tuple[str, Path]]:
    """Name and folder of each ``name=folder``.

    Raises:
        StartError: a word is not of that form, or a name is taken.
    """
    found: dict[str, Path] = {}
    for word in words:
        name, _, folder = word.partition("=")
        if not (name.strip() and folder) or not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise StartError(f"lora_modules: {word[:100]!r} is not of the form name=folder")
        if name in found or name == served_model_name:
            raise StartError(f"lora_modules: two models cannot both be called {name!r}")
        found[name] = Path(os.path.expanduser(folder)).absolute()  # Path's own raises for an unknown user
    return list(found.items())


def look_at(words: Sequence[str], served_model_name: str, base: Path | None) -> list[Adapter]:
    """All adapters, each with what is wrong with it.

    Args:
        words: the setting.
        served_model_name: of the base model.
        base: its folder, where that is known.

    Raises:
        StartError: the setting is wrong.
    """
    modules = parse_modules(words, served_model_name)
    shapes = _shapes_of_base(base) if modules and base is not None else {}
    return [_look_at(name, number, path, shapes) for number, (name, path) in enumerate(modules, start=1)]


def _look_at(name: str, number: int, path: Path, base: BaseShapes) -> Adapter:
    try:
        config = _peft_config(_config(path))
        _check_weights(path / WEIGHTS, config, base)
    except (BrokenAdapter, OSError) as error:
        return Adapter(name, number, path, reason=" ".join(str(error).split())[:300])
    return Adapter(name, number, path, max(config.r, *config.rank_pattern.values(), 1))


def engine_values(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """The engine's arguments for the adapters that can be used; none without any.

    One slot is more than there are adapters: on a CPU, with all of them taken, requests for the base model get the last
    adapter's text.
    """
    usable = [adapter for adapter in adapters if adapter.reason is None]
    if not usable:
        return {}
    largest = max(adapter.rank for adapter in usable)
    slots = len(usable) + 1
    rank = min(known for known in _ranks() if known >= largest)
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}


def lora_request(adapter: Adapter) -> Any:
    """An adapter as vLLM takes it: its ``LoRARequest``."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.id, str(adapter.path))


def _ranks() -> tuple[int, ...]:
    """The ranks that vLLM makes room for."""
    from vllm.config.lora import MaxLoRARanks

    return tuple(get_args(MaxLoRARanks))


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise BrokenAdapter(f"there is no folder {path}")
    if not (path / CONFIG).is_file():
        raise BrokenAdapter(f"its folder has no {CONFIG}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenAdapter(f"{CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BrokenAdapter(f"{CONFIG} holds no object")
    return config


def _peft_config(config: dict[str, Any]) -> Any:
    """The configuration as vLLM has it, a ``PEFTHelper``; of a kind that vLLM takes."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    if config.get("peft_type", "LORA") != "LORA":
        raise BrokenAdapter(f"it is of the kind {config['peft_type']!r}, not LORA")
    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(LoRAConfig(max_lora_rank=max(_ranks())))
    except Exception as error:  # a field of any wrong type ends in an error of its own
        raise BrokenAdapter(f"{CONFIG}: {error}") from error
    return helper


def _check_weights(file: Path, config: Any, base: BaseShapes) -> None:
    """That each module has its two matrices, which fit each other, their configuration, and the model's own."""
    if not file.is_file():
        raise BrokenAdapter(f"its folder has no {WEIGHTS}; weights of other kinds are not read")
    try:
        with safe_open(file, framework="pt") as weights:
            shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
            modules = _modules(shapes)
            _check_modules(modules, config, base)
            _check_values(weights, max(_scaling(module, config) * down[0] for module, (down, _) in modules.items()))
    except SafetensorError as error:
        raise BrokenAdapter(f"{WEIGHTS} cannot be read: {error}") from error


def _modules(shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    """For each module the shapes of its two matrices: down to the rank, and up again."""
    from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

    sides: dict[str, dict[bool, Shape]] = {}
    for name, shape in shapes.items():
        if is_base_embedding_weights(name):
            continue  # a copy of the base's own, which PEFT adds and vLLM passes over
        try:
            module, is_down = parse_fine_tuned_lora_name(name)
        except ValueError as error:
            raise BrokenAdapter(f"{name[:100]} is no part of a LoRA adapter that vLLM takes") from error
        sides.setdefault(module, {})[is_down] = shape
    if not sides:
        raise BrokenAdapter(f"{WEIGHTS} is empty")
    if halves := [module for module, pair in sides.items() if len(pair) != 2]:
        raise BrokenAdapter(f"{halves[0][:100]} has only one of its two matrices")
    return {module: (pair[True], pair[False]) for module, pair in sides.items()}


def _check_modules(modules: Mapping[str, tuple[Shape, Shape]], config: Any, base: BaseShapes) -> None:
    single = {module: pair for module, pair in modules.items() if ".experts" not in module}  # others share matrices
    for module, (down, up) in single.items():
        if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
            raise BrokenAdapter(f"the matrices of {module[:100]} do not fit each other: {down} and {up}")
        _check_rank(module, down[0], config)
    own = {module: _shapes_of(module, base) for module in single}
    if not any(own.values()):
        return  # the base's weights have other names, so they tell nothing
    for module, (down, up) in single.items():
        _check_base(module, (up[0], down[1]), own[module])


def _check_rank(module: str, rank: int, config: Any) -> None:
    try:
        told, scaling = config.get_rank_and_scaling(module)
    except Exception as error:  # patterns are regular expressions, numbers may be of any type
        raise BrokenAdapter(f"{CONFIG}: {error}") from error
    if told != rank:
        raise BrokenAdapter(f"{CONFIG} gives {module[:100]} the rank {told}, its matrices have {rank}")
    if not math.isfinite(scaling):
        raise BrokenAdapter(f"{CONFIG}: lora_alpha is no number")


def _check_base(module: str, shape: Shape, own: set[Shape]) -> None:
    """That the base model has this module, of this shape; some models store theirs turned round."""
    if not own and not module.endswith(ENDS_OF_MODEL):
        raise BrokenAdapter(f"the base model has no module {module[:100]}: it is of another base")
    if own and () not in own and not own & {shape, shape[::-1]}:
        outputs, inputs = min(own)
        raise BrokenAdapter(
            f"{module[:100]} is for a matrix of {shape[0]} by {shape[1]}, the base model's is {outputs} by {inputs}"
        )


def _scaling(module: str, config: Any) -> float:
    return abs(float(config.get_rank_and_scaling(module)[1]))


def _check_values(weights: Any, scaling: float) -> None:
    """That they are numbers, of a size that a training gives.

    Args:
        weights: the file.
        scaling: of the product of a module's matrices, times their rank: the largest there is.
    """
    import torch

    is_trained, largest = False, {True: 0.0, False: 0.0}
    for name in weights.keys():  # noqa: SIM118 -- it is no mapping
        tensor = weights.get_tensor(name)
        if not torch.isfinite(tensor.float()).all():
            raise BrokenAdapter(f"{name[:100]} holds values that are no numbers")
        is_second = "_B" in name
        largest[is_second] = max(largest[is_second], float(tensor.abs().max()) if tensor.numel() else 0.0)
        is_trained |= is_second and bool(tensor.float().any())
    if not is_trained:
        raise BrokenAdapter("it changes nothing: its second matrices are all zero, as before a training")
    if not largest[False] * largest[True] * scaling <= MAX_CHANGE:
        factors = f"weights up to {max(largest.values()):.0e}, scaled by {scaling:.0e}"
        raise BrokenAdapter(f"what it adds is far larger than a training gives: {factors}")


def _shapes_of_base(folder: Path) -> dict[str, set[Shape]]:
    """The shapes of the base model's modules; empty when it is not stored as safetensors."""
    shapes: dict[str, set[Shape]] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 -- it is no mapping
                    module, _, kind = name.rpartition(".")
                    for key in _keys(module):
                        shapes.setdefault(key, set()).update(_stored_shape(weights.get_slice(name), kind))
        except (SafetensorError, OSError):
            return {}
    return shapes


def _stored_shape(weight: Any, kind: str) -> set[Shape]:
    """The shape of a module's matrix: none when this is another part of it, ``()`` when it is packed."""
    shape = tuple(weight.get_shape())
    if kind == "bias" or (kind == "weight" and len(shape) == 1):
        return set()
    is_plain = kind == "weight" and len(shape) == 2 and not weight.get_dtype().startswith(("U", "I"))
    return {shape if is_plain else ()}


def _shapes_of(module: str, base: BaseShapes) -> set[Shape]:
    return next((base[key] for key in _keys(module) if key in base), set())


def _keys(module: str) -> Iterator[str]:
    """The names under which a module is looked for: its own, and that within the layers."""
    yield module
    if (found := WITHIN_LAYERS.search(module)) is not None:
        yield found[1]
