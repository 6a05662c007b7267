"""Why an engine process has failed: its own exception, carried to the service in a file.

All that vLLM tells its parent is that a process has failed, "see root cause above".
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.settings import engine_reason_file, share_engine_reason_file

LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
"""Where a worker and an engine core log the exception that ends them."""


class _ToFile(logging.Handler):
    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """A line for each record with an exception; a worker's comes before that of its engine core."""
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            with open(self._path, "a", encoding="utf-8") as file:
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
