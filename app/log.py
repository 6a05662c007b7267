"""Log lines, as text or JSON, each with the id of the request it belongs to."""

import json
import logging
import re
import sys
from contextvars import ContextVar
from typing import Any, Literal

request_id_var: ContextVar[str] = ContextVar("request_id", default="-")


POINTER = "`batchserve doctor` with the same options and variables checks what a start needs"

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.request_id = request_id_var.get()
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- logging's name
        """A line is a record: what callers send must not begin another one."""
        record.message = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": request_id_var.get(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
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
    """Why the service cannot start, on standard error: one line for each mistake, and where to find out more."""
    for line in message.splitlines():
        print(f"batchserve: cannot start: {line}", file=sys.stderr, flush=True)
    print(f"batchserve: {POINTER}", file=sys.stderr, flush=True)
