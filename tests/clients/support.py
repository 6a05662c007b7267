"""What the tests of generated clients share: the document, and what each client is asked to do."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "openapi" / "openapi.json"
KEY = "sk-clients"
LOCAL: Any = {"verify_ssl": False, "httpx_args": {"trust_env": False}}
"""Of the generated Python client: no proxy of the desk, and no list of authorities to read for a plain connection."""


def check_report(report: dict[str, Any]) -> None:
    """What the programs in TypeScript and Java print: each part of the contract as their client saw it."""
    assert report["livez"] == report["readyz"] == "ready"
    assert report["info"] == {"kind": "fake", "max_model_len": 2048}
    assert report["prompt"] == "HELLO HEL"
    assert report["messages"] == "<USER>ABC\n<ASSISTANT>"
    assert report["e2e_ms"] > 0
    assert [seen(row) for row in report["rows"]] == [
        (200, "ONE", None, None),
        (400, None, "invalid_request", "top_p"),
        (500, None, "generation_failed", None),
        (200, "TWO", None, None),
    ]
    assert report["counts"] == {"total": 4, "succeeded": 2, "failed": 2}
    check_openai_report(report["openai"])
    assert seen(report["error"]) == (400, None, "invalid_request", "temperature")
    assert seen(report["wrong_key"]) == (401, None, "invalid_api_key", None)


def check_openai_report(report: dict[str, Any]) -> None:
    """What they print of OpenAI's routes."""
    assert report["models"] == [report["model"]]
    assert report["texts"] == {"text": ["HI"], "list": ["ONE", "TWO"], "ids": ["AB"], "lists_of_ids": ["AB", "CD"]}
    assert report["chats"] == ["<USER>ABC\n<ASSISTANT>"] * 2
    assert report["e2e_ms"] > 0
    assert report["sum_ms"] == pytest.approx(report["e2e_ms"])
    assert report["requests"] == 2
    assert seen(report["error"]) == (400, None, "invalid_request", "top_k")


def seen(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row or an error as a client saw it; some clients write no null."""
    return tuple(row.get(name) for name in ("status", "text", "code", "param"))
