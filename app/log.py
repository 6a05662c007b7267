"""Log lines, as text or JSON, each with the id of the request it belongs to."""

import json
import logging
import sys
from contextvars import ContextVar
from typing import Literal

request_id_var: ContextVar[str] = ContextVar("request_id", default="-")


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.request_id = request_id_var.get()
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": request_id_var.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, style: Literal["text", "json"]) -> None:
    """Send everything to standard error; libraries from ``warning`` on unless ``level`` is debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for name in ("app", "batchserve"):
        logging.getLogger(name).setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


def complain(message: str) -> None:
    """Why the service cannot start, on standard error: one line for each mistake."""
    for line in message.splitlines():
        print(f"batchserve: cannot start: {line}", file=sys.stderr, flush=True)
