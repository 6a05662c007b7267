"""``vllm_config`` checked, and completed with what the service fills in; each value with its source."""

import dataclasses
import difflib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from app import machine
from app.backends.args import VLLMArgs, VLLMPythonArgs
from app.backends.memory import still_to_come_bytes
from app.backends.places import environment_for_user, is_inline
from app.errors import StartError
from app.prompts.sampling import MAX_STOP_STRINGS
from app.settings import hide_secrets, set_engine_environment

logger = logging.getLogger(__name__)

OWNED = {
    "model": "set it with --model",
    "served_model_name": "set it with --served-model-name",
    "reasoning_parser": "set it with --reasoning-parser",
    "disable_log_stats": "the service needs the statistics for its timings",
    "allowed_media_domains": "set it with --allowed-media-domains",
    "allowed_local_media_path": "the service reads no files for its callers: they send data URIs",
    "media_io_kwargs": "the service decodes images and audio itself",
    "lora_modules": "set it with --lora-modules",
    "enable_lora": "it follows from --lora-modules",
    "max_loras": "it follows from --lora-modules",
}
CPU_MAX_MODEL_LEN = 2048
KV_CACHE_SHARE = 0.5
"""The most of the free memory that the key-value cache may take on a CPU."""
KV_ELEMENT_BYTES = 2
"""Size of one number in the key-value cache: bfloat16."""
STRUCTURED_OUTPUTS = {"backend": "xgrammar"}
"""By itself vLLM lets the first structured request choose the backend for all later ones; and what xgrammar cannot do
is then ignored in some and done by another backend in others, where so it is refused by name."""
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}

Source = Literal["vllm_config", "service", "environment"]


@dataclass(slots=True)
class EngineArguments:
    """Keyword arguments for ``LLM`` and where each came from.

    Attributes:
        values: by name, ``model`` and ``disable_log_stats`` included.
        sources: by name: ``vllm_config``, ``service`` (filled in) or ``environment``.
        environment: variables that the engine reads, by name: value and source.
        is_inline: whether the engine core runs in this process.
    """

    values: dict[str, Any]
    sources: dict[str, Source]
    environment: dict[str, tuple[str, Source]]
    is_inline: bool

    def fill(self, name: str, value: Any) -> None:
        """Set what ``vllm_config`` left open."""
        if name not in self.values:
            self.values[name] = value
            self.sources[name] = "service"

    def describe(self) -> dict[str, dict[str, Any]]:
        """Each value with its source and without secrets, for ``/info``."""
        values = hide_secrets(self.values)
        shown = {name: {"value": values[name], "source": source} for name, source in self.sources.items()}
        return shown | {name: {"value": value, "source": source} for name, (value, source) in self.environment.items()}


def prepare_environment(args: VLLMArgs, *, is_cpu: bool, is_offline: bool) -> dict[str, tuple[str, Source]]:
    """Set the variables that vLLM and torch read when they are imported, unless somebody has set them.

    Args:
        args: what the backend is built from.
        is_cpu: whether this is vLLM's build for the CPU.
        is_offline: the model's files are all at hand, or the Hub cannot be reached: it is not asked for any.
    """
    wanted = dict(CPU_ENVIRONMENT) if is_cpu else {}
    wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_inline(args, is_cpu=is_cpu) else "1"
    wanted["VLLM_NO_USAGE_STATS"] = "1"
    wanted["VLLM_MAX_STOP_STRINGS"] = str(MAX_STOP_STRINGS)  # on all routes as many as on the service's own
    wanted["VLLM_CONFIGURE_LOGGING"] = "0"  # its lines come through the service's log, in the service's format
    wanted |= environment_for_user()
    if is_offline:
        wanted["HF_HUB_OFFLINE"] = "1"
    return {
        name: (value, "service" if is_ours else "environment")
        for name, (value, is_ours) in set_engine_environment(wanted, forced={"VLLM_ENABLE_V1_MULTIPROCESSING"}).items()
    }


def check_names(vllm_config: dict[str, Any]) -> None:
    """Refuse keys that ``EngineArgs`` does not have, and those that the service owns.

    Raises:
        StartError: names the key and the near ones.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for key in vllm_config:
        if key in OWNED:
            raise StartError(f"vllm_config: {key} belongs to the service: {OWNED[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known - OWNED.keys(), n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise StartError(f"vllm_config: vLLM's EngineArgs has no {key!r}{hint}")


def build(
    args: VLLMArgs, environment: dict[str, tuple[str, Source]], *, is_cpu: bool, folder: Path | None = None
) -> EngineArguments:
    """The arguments for ``LLM``, with what the service fills in: on a CPU more, on a GPU mostly vLLM's own defaults.

    Args:
        args: what the backend is built from.
        environment: what ``prepare_environment`` has set.
        is_cpu: whether this is vLLM's build for the CPU.
        folder: the model's files, where they are known: the cache leaves room for the weights.

    Raises:
        StartError: an unknown key, a model that cannot be loaded, or too little memory.
    """
    check_names(args.vllm_config)
    sources: dict[str, Source] = dict.fromkeys(args.vllm_config, "vllm_config")
    owned = {"model": args.model, "served_model_name": [args.served_model_name], "disable_log_stats": False}
    values = {**args.vllm_config, **owned}
    if args.reasoning_parser is not None:
        values["reasoning_parser"] = args.reasoning_parser
    engine = EngineArguments(values, sources, environment, is_inline(args, is_cpu=is_cpu))
    engine.fill("structured_outputs_config", dict(STRUCTURED_OUTPUTS))
    if isinstance(args, VLLMPythonArgs):
        engine.fill("max_num_seqs", args.batch_size)
    if is_cpu:
        engine.fill("dtype", "bfloat16")
        engine.fill("enforce_eager", True)
        config = model_config(engine.values)
        engine.fill("max_model_len", min(config.max_model_len, CPU_MAX_MODEL_LEN))
        if "gpu_memory_utilization" not in engine.values:
            engine.fill("kv_cache_memory_bytes", _kv_cache_bytes(engine, config, args, folder))
    return engine


def model_config(values: dict[str, Any]) -> Any:
    """The ``ModelConfig`` that vLLM makes of these arguments: reads the model's files, loads no weights.

    Raises:
        StartError: there is no such model, or vLLM does not take a value.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**values).create_model_config()
    except Exception as error:
        raise StartError(
            f"model {values['model']!r} cannot be loaded with this vllm_config: {_reason(error)}; mend vllm_config, or "
            "give another folder with config.json, a Hugging Face id or embedded:smollm2-135m"
        ) from error


def _reason(error: Exception) -> str:
    """What vLLM says, without pydantic's frame around it."""
    said = [item["msg"] for item in error.errors()] if isinstance(error, ValidationError) else [str(error)]
    return " ".join(" ".join(said).removeprefix("Value error, ").split())[:300]


def _kv_cache_bytes(engine: EngineArguments, config: Any, args: VLLMArgs, folder: Path | None) -> int:
    """A key-value cache that holds a full window at full context, within the free memory.

    Raises:
        StartError: not even one request of full context fits.
    """
    heads, head_size, layers = (
        config.get_total_num_kv_heads(),
        config.get_head_size(),
        config.get_total_num_hidden_layers(),
    )
    bytes_per_token = 2 * layers * heads * head_size * KV_ELEMENT_BYTES
    asked = engine.values["max_model_len"]  # -1 and None leave it to vLLM
    max_model_len = asked if isinstance(asked, int) and asked > 0 else int(config.max_model_len)
    # vLLM hands the cache out in blocks of 128 tokens on a CPU, so the last one of each request may be part empty.
    per_request = (max_model_len + 128) * bytes_per_token
    available = machine.available_memory()
    free = min(int(available * KV_CACHE_SHARE), available - still_to_come_bytes(args, folder))
    if per_request > free:
        raise StartError(
            f"out of memory: one request of {max_model_len} tokens needs {machine.mebibytes(per_request)} of key-value "
            f"cache, for which {machine.mebibytes(max(0, free))} are left beside the weights: "
            f"{machine.describe_memory()}; give it more (docker run --memory), or set a smaller max_model_len in "
            'vllm_config, as in {"max_model_len": 512}'
        )
    return int(min(args.batch_size * per_request, free))
