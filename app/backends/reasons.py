"""Why an engine process has failed: its own exception, carried to the service in a file.

All that vLLM tells its parent is that a process has failed, "see root cause above".
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.errors import StartError
from app.settings import engine_reason_file, share_engine_reason_file

LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
"""Where a worker and an engine core log the exception that ends them."""
OUT_OF_MEMORY = ("out of memory", "enough memory", "t allocate", "cannot allocate", "is less than", "free memory")
KILLED = "': -9}"
"""How vLLM tells of a process that a SIGKILL has ended."""
TOO_SMALL_CACHE = ("cache blocks", "kv cache")


class _ToFile(logging.Handler):
    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """A line for each record with an exception; a worker's comes before that of its engine core."""
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            # Once the engine is built nobody reads it; an exception in here would end a worker that can go on.
            with suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")


def report() -> None:
    """In a child of vLLM: write down the exceptions that end it."""
    path = engine_reason_file()
    if path is not None:
        for name in LOGGERS:
            logging.getLogger(name).addHandler(_ToFile(path))


@contextmanager
def collected() -> Iterator[Path]:
    """In the service: while an engine is built, the file that its processes write to."""
    with tempfile.TemporaryDirectory(prefix="batchserve-") as folder:
        path = Path(folder, "reasons")
        with share_engine_reason_file(str(path)):
            yield path


def first(path: Path) -> str | None:
    """The root cause, or None when no process has given one."""
    try:
        return path.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None


def start_error(error: Exception, root_cause: str | None) -> StartError:
    """What to change when ``LLM`` cannot be built.

    Args:
        error: what ``LLM`` raised.
        root_cause: what the engine's own process said, where it is one.
    """
    reason = root_cause or f"{type(error).__name__}: {' '.join(str(error).split())}"
    said = f"({reason[:300]})"
    if KILLED in reason:
        return StartError(
            "out of memory: a process of the engine was killed, as the kernel does with those it has no memory for. "
            f"Give it more (docker run --memory), or lower max_model_len or kv_cache_memory_bytes in vllm_config {said}"
        )
    if isinstance(error, MemoryError) or any(mark in reason.lower() for mark in OUT_OF_MEMORY):
        return StartError(
            "out of memory: the model and its key-value cache do not fit. Give it more (docker run --memory), or in "
            f"vllm_config lower max_model_len or kv_cache_memory_bytes (on a GPU gpu_memory_utilization) {said}"
        )
    if any(mark in reason.lower() for mark in TOO_SMALL_CACHE):
        return StartError(
            "out of memory: the key-value cache is too small for the model's context. In vllm_config raise "
            f"kv_cache_memory_bytes (on a GPU gpu_memory_utilization) or lower max_model_len {said}"
        )
    return StartError(f"vLLM cannot start with this model and vllm_config {said}")
