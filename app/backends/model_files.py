"""Where the model's files are, and whether this user may read them: seen before vLLM is imported."""

import contextlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from app.backends import hub
from app.backends.args import VLLMArgs
from app.finding import Finding
from app.machine import can_write, mebibytes
from app.settings import EMBEDDED, engine_variable, hub_cache

MODEL_FILES = (".json", ".safetensors", ".bin", ".pt", ".gguf", ".model", ".txt", ".jinja", ".py")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_FILES = ("config.json", "params.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the model is.

    Attributes:
        finding: whether it can be read.
        folder: the folder with its files; None when it is yet to be downloaded, or kept elsewhere.
        is_offline: the Hub cannot be reached, but the local copy will do.
    """

    finding: Finding
    folder: Path | None = None
    is_offline: bool = False


def find_model(args: VLLMArgs) -> ModelFiles:
    """The model's files: a folder, or what the local cache and the Hub have."""
    try:
        is_folder = Path(args.model).expanduser().is_dir()
    except OSError as error:
        return ModelFiles(_unreadable(Path(args.model), error.strerror or str(error)))
    if is_folder:
        folder = Path(args.model).expanduser()
        return ModelFiles(_check_folder(folder, args.vllm_config, is_complete=True), folder)
    if args.model.startswith(("/", "./", "../", "~")):
        advice = f"give a folder with config.json, a Hugging Face id or {EMBEDDED}"
        return ModelFiles(Finding("model", "fail", f"there is no folder {args.model}", advice))
    if "://" in args.model or engine_variable("VLLM_USE_MODELSCOPE"):
        return ModelFiles(Finding("model", "ok", f"{args.model} is for vLLM to find; not looked for"))
    return _find_id(args)


def _check_folder(folder: Path, vllm_config: dict[str, Any], *, is_complete: bool) -> Finding:
    """Whether a folder holds a model that this user may read.

    Args:
        folder: where it is.
        vllm_config: says where else a tokenizer is, and whether weights are wanted.
        is_complete: whether what is missing cannot be downloaded.
    """
    try:
        files = [file for file in folder.iterdir() if file.name.endswith(MODEL_FILES) and not file.is_dir()]
        denied = next((file for file in files if not os.access(file, os.R_OK)), None)
    except OSError as error:
        return _unreadable(folder, error.strerror or str(error))
    if denied is not None:
        is_broken_link = denied.is_symlink() and not denied.exists()
        return _unreadable(denied, "a link to nowhere" if is_broken_link else "Permission denied")
    if damage := next(filter(None, map(_damage, files)), None):
        advice = "get the folder again: a download that was cut, or pointers of Git LFS in place of the files"
        return Finding("model", "fail", damage, advice)
    names = {file.name for file in files}
    if is_complete and (missing := _missing(names, vllm_config)):
        advice = f"give a folder with config.json, weights and a tokenizer, a Hugging Face id or {EMBEDDED}"
        return Finding("model", "fail", f"{folder} has no {missing}", advice)
    if is_complete and not names & set(TOKENIZER_FILES) and "tokenizer" not in vllm_config:
        advice = "copy the tokenizer's files beside the model, or name its folder as `tokenizer` in vllm_config"
        return Finding("model", "warn", f"{folder} has none of {', '.join(TOKENIZER_FILES)}", advice)
    weights = sum(file.stat().st_size for file in files if file.name.endswith(WEIGHT_FILES))
    return Finding("model", "ok", f"{folder}, weights of {mebibytes(weights)}")


def _damage(file: Path) -> str | None:
    """What is wrong with a file as such: one that would hang its reader, or weights that are cut short."""
    if not file.is_file():
        return f"{file} is no regular file"
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="numpy"):
                return None
        except SafetensorError as error:
            return f"{file} holds no weights, or not all of them ({error})"
    return None


def _missing(names: set[str], vllm_config: dict[str, Any]) -> str | None:
    if not names & set(CONFIG_FILES) and "hf_config_path" not in vllm_config:
        return "config.json"
    wants_weights = vllm_config.get("load_format", "auto") == "auto"
    if wants_weights and not any(name.endswith(WEIGHT_FILES) for name in names):
        return f"weights ({', '.join('*' + suffix for suffix in WEIGHT_FILES)})"
    return None


def _unreadable(path: Path, reason: str) -> Finding:
    """Names the file and the user, since in a container neither is what one is used to."""
    place = next((above for above in reversed(path.parents) if not os.access(above, os.X_OK)), path)
    owner = ""
    with contextlib.suppress(OSError):
        status = place.stat()
        owner = f", which is of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"
    within = "" if place == path else f", so not {path} either"
    found = f"user id {os.geteuid()} may not read {place}{owner}{within}: {reason}"
    folder = place if os.path.isdir(place) else place.parent
    advice = f"chmod -R a+rX {folder}, or run as its owner (docker run --user)"
    return Finding("model", "fail", found, advice)


def _find_id(args: VLLMArgs) -> ModelFiles:
    known = hub.look_up(args.model, args.vllm_config.get("revision"))
    is_alone = known.answer in ("offline", "unreachable")
    if known.folder is not None and (is_alone or known.answer in ("yes", "unclear")):
        folder = Path(known.folder)
        finding = _check_folder(folder, args.vllm_config, is_complete=is_alone)
        if finding.status == "ok" and known.answer == "unreachable":
            advice = "none needed for the files in the cache; for others check the network and its proxy"
            finding = Finding("model", "warn", f"{finding.found}; the Hub cannot be reached ({known.reason})", advice)
        return ModelFiles(finding, folder, is_offline=is_alone)
    if known.answer in ("yes", "unclear"):
        return ModelFiles(_check_download(args.model, known))
    found, advice = _refusal(args.model, known)
    return ModelFiles(Finding("model", "fail", found, advice))


def _refusal(model: str, known: hub.Lookup) -> tuple[str, str]:
    otherwise = f"or give a folder, or {EMBEDDED}"
    token = "set HF_TOKEN to the token of an account that may read it"
    return {
        "offline": (
            f"model {model!r} is not in the local cache ({hub_cache()}), and HF_HUB_OFFLINE keeps it from being loaded",
            f"unset HF_HUB_OFFLINE, or set HF_HOME to a cache that has it, {otherwise}",
        ),
        "unreachable": (
            f"model {model!r} is not in the local cache ({hub_cache()}), and the Hub does not answer ({known.reason})",
            f"check the network and its proxy, or set HF_HOME to a cache that has it, {otherwise}",
        ),
        "unknown": (
            f"the Hub has no model {model!r}, or a private one",
            f"check the Hugging Face id, {token}, {otherwise}",
        ),
        "gated": (f"model {model!r} is gated", f"ask for access on its page and {token}, {otherwise}"),
    }.get(known.answer, (f"model {model!r} is no folder and no Hugging Face id", f"give one, {otherwise}"))


def _check_download(model: str, known: hub.Lookup) -> Finding:
    """A model that is yet to be loaded needs a cache that can be written."""
    if known.answer == "unclear":
        advice = "if the start fails, check the network, its proxy and HF_ENDPOINT"
        return Finding("model", "warn", f"the Hub did not say whether it has {model!r} ({known.reason})", advice)
    cache = hub_cache()
    if not can_write(cache):
        found = f"model {model!r} is to be downloaded, and user id {os.geteuid()} may not write {cache}"
        return Finding("model", "fail", found, "set HF_HOME to a folder that can be written")
    return Finding("model", "ok", f"{model} will be downloaded into {cache}")


def weights_bytes(folder: Path | None, vllm_config: dict[str, Any]) -> int:
    """Size of the weights in the engine's type; 0 when it cannot be told: not at hand, or quantized on being read."""
    if folder is None or vllm_config.get("load_format") == "dummy" or "quantization" in vllm_config:
        return 0
    element = 4 if vllm_config.get("dtype") in ("float", "float32") else 2
    with contextlib.suppress(OSError):
        # Some folders hold the same weights once more, in Mistral's own layout.
        tensors = [file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")]
        others = [file for suffix in WEIGHT_FILES[1:] for file in folder.glob(f"*{suffix}")]
        return sum(_tensor_bytes(file, element) for file in tensors) if tensors else sum(map(_size, others))
    return 0


def hidden_size(folder: Path | None) -> int:
    """How wide the model is; 0 when its configuration does not say."""
    config = _config(folder)
    text = config.get("text_config")
    size = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, dict) else 0)
    return size if isinstance(size, int) and 0 < size < 2**20 else 0


def _config(folder: Path | None) -> dict[str, Any]:
    """The content of ``config.json``; empty when it is none: vLLM will say what is wrong with it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
        return config if isinstance(config, dict) else {}
    return {}


def _tensor_bytes(file: Path, element: int) -> int:
    """What the tensors of a file take once floats have ``element`` bytes; quantized ones stay as they are."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), 100 * 2**20)))
        total = 0
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                stored = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(tensor["dtype"])
                total += int(end - begin) if stored is None else (end - begin) // stored * element
        return total
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return _size(file)  # vLLM will say what is wrong with it


def _size(file: Path) -> int:
    return file.stat().st_size
