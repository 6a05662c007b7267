"""LoRA adapters, looked at before the engine is built: one that is broken must not get near it.

vLLM's own checks come late, when a window that holds a request for the adapter is under way, and some faults it does
not see at all: an adapter whose modules have other names than the model's changes nothing, without a word.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from app.errors import StartError

MAX_NAME_CHARS = 256
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?")
WITHIN_LAYERS = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+)")
"""What of a module's name is the same under the prefixes that checkpoints and PEFT give it."""
Shape = tuple[int, ...]


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
        name, equals, folder = word.partition("=")
        if not (name and equals and folder) or not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise StartError(f"lora_modules: {word[:100]!r} is not of the form name=folder")
        if name in found or name == served_model_name:
            raise StartError(f"lora_modules: two models cannot both be called {name!r}")
        found[name] = Path(folder).expanduser()
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


def _look_at(name: str, number: int, path: Path, base: Mapping[str, Shape]) -> Adapter:
    try:
        rank = _check_config(_config(path))
        _check_weights(path / WEIGHTS, base)
    except BrokenAdapter as error:
        return Adapter(name, number, path, reason=" ".join(str(error).split())[:300])
    return Adapter(name, number, path, rank)


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
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return tuple(get_args(MaxLoRARanks))


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise BrokenAdapter(f"there is no folder {path}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenAdapter(f"its folder has no {CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenAdapter(f"{CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BrokenAdapter(f"{CONFIG} holds no object")
    return config


def _check_config(config: dict[str, Any]) -> int:
    """The largest rank, of a configuration that vLLM takes."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    if config.get("peft_type", "LORA") != "LORA":
        raise BrokenAdapter(f"it is of the kind {config['peft_type']!r}, not LORA")
    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(LoRAConfig(max_lora_rank=max(_ranks())))
        return max(int(helper.r), *map(int, helper.rank_pattern.values()), 1)
    except Exception as error:  # a field of any wrong type ends in an error of its own
        raise BrokenAdapter(f"{CONFIG}: {error}") from error


def _check_weights(file: Path, base: Mapping[str, Shape]) -> None:
    """That each module has its two matrices, which fit each other and the model's own."""
    if not file.is_file():
        raise BrokenAdapter(f"its folder has no {WEIGHTS}; weights of other kinds are not read")
    try:
        with safe_open(file, framework="pt") as weights:
            shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
            _check_finite(weights)
    except (SafetensorError, OSError) as error:
        raise BrokenAdapter(f"{WEIGHTS} cannot be read: {error}") from error
    modules = _modules(shapes)
    for module, (down, up) in modules.items():
        _check_module(module, down, up, base)


def _check_finite(weights: Any) -> None:
    import torch

    changes = False
    for name in weights.keys():  # noqa: SIM118 -- it is no mapping
        tensor = weights.get_tensor(name)
        if not torch.isfinite(tensor.float()).all():
            raise BrokenAdapter(f"{name} holds values that are no numbers")
        changes |= "lora_B" in name and bool(tensor.any())
    if not changes:
        raise BrokenAdapter("it changes nothing: it is not trained")


def _modules(shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    """For each module the shapes of its two matrices: down to the rank, and up again."""
    sides: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if (found := TENSOR.fullmatch(name)) is None:
            raise BrokenAdapter(f"{name[:100]} is no part of a LoRA adapter that vLLM takes")
        sides.setdefault(found["module"], {})[found["side"]] = shape
    if not sides:
        raise BrokenAdapter(f"{WEIGHTS} is empty")
    if halves := [module for module, pair in sides.items() if len(pair) != 2]:
        raise BrokenAdapter(f"{halves[0][:100]} has only one of its two matrices")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _check_module(module: str, down: Shape, up: Shape, base: Mapping[str, Shape]) -> None:
    if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
        raise BrokenAdapter(f"the matrices of {module[:100]} do not fit each other: {down} and {up}")
    if not base:
        return
    own = next((base[key] for key in _keys(module) if key in base), None)
    if own is None:
        raise BrokenAdapter(f"the base model has no module {module[:100]}: it is of another base")
    if own and own != (up[0], down[1]):
        raise BrokenAdapter(
            f"{module[:100]} is for a matrix of {up[0]} by {down[1]}, the base model's is {own[0]} by {own[1]}"
        )


def _shapes_of_base(folder: Path) -> dict[str, Shape]:
    """The shape of each module of the base model, ``()`` where its weights are stored in another form.

    Empty when it is not stored as safetensors, so that nothing is said against an adapter that may be right.
    """
    shapes: dict[str, Shape] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 -- it is no mapping
                    module, _, kind = name.rpartition(".")
                    is_plain = kind == "weight" and not weights.get_slice(name).get_dtype().startswith(("U", "I"))
                    shape = tuple(weights.get_slice(name).get_shape()) if is_plain else ()
                    for key in _keys(module):
                        shapes[key] = shape if len(shape) == 2 else shapes.get(key, ())
        except (SafetensorError, OSError):
            return {}
    return shapes


def _keys(module: str) -> Iterator[str]:
    """The names under which a module is looked for: its own, and that within the layers."""
    yield module
    if (found := WITHIN_LAYERS.search(module)) is not None:
        yield found[1]
