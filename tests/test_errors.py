"""The error tree: as drawn, decided in one place, and strict JSON under 4 KiB whatever it quotes."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app import errors
from app.api import render
from app.errors import (
    ContextLengthExceeded,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    QueueFull,
    ServiceError,
    StartError,
)

APP = Path(errors.__file__).parent
LINE = re.compile(r"^([│ ├└─]+)(\w+) +(\d{3}) +(\w+|\(never raised itself\))( .*)?$")
MAX_BODY_BYTES = 4096


def drawn() -> dict[str, tuple[str, int, str, str]]:
    """By class: parent, status, code and the rest of the line, as the module's docstring draws them."""
    found, path = {}, ["ServiceError"]
    for match in filter(None, map(LINE.match, (errors.__doc__ or "").splitlines())):
        indent, name, status, code, rest = match.groups()
        depth = len(indent) // 4
        path[depth:] = [name]
        found[name] = (path[depth - 1], int(status), code, rest or "")
    return found


def subclasses(kind: type[ServiceError]) -> list[type[ServiceError]]:
    return [found for child in kind.__subclasses__() for found in (child, *subclasses(child))]


def make(kind: type[ServiceError], message: str = "m", **extra: Any) -> ServiceError:
    return kind(message, allow="GET") if kind is MethodNotAllowed else kind(message, **extra)


ALL = [kind for kind in subclasses(ServiceError) if kind.__module__ == errors.__name__]


# --- the tree ---


def test_the_drawing_is_the_tree() -> None:
    classes = {kind.__name__: (kind.__bases__[0].__name__, kind.status) for kind in ALL}

    assert {name: line[:2] for name, line in drawn().items()} == classes


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_drawing_tells_the_code_and_the_header(kind: type[ServiceError]) -> None:
    _, _, code, rest = drawn()[kind.__name__]

    if code.isidentifier():
        assert code == kind.code
    parent = drawn().get(kind.__bases__[0].__name__, ("", 0, "", ""))[3]
    promised = {name.lower() for name in re.findall(r"header ([\w-]+)", rest + parent)}
    assert make(kind).headers().keys() - {"www-authenticate"} == promised


def test_codes_are_those_of_the_documentation() -> None:
    statuses = {kind.code: kind.status for kind in ALL if kind.__name__ != "Unavailable"}

    assert statuses == {
        "invalid_request": 400,
        "context_length_exceeded": 400,
        "invalid_api_key": 401,
        "model_not_found": 404,
        "not_found": 404,
        "method_not_allowed": 405,
        "request_too_large": 413,
        "queue_full": 429,
        "queue_timeout": 504,
        "request_timeout": 504,
        "generation_failed": 500,
        "internal_error": 500,
        "not_ready": 503,
        "shutting_down": 503,
        "engine_dead": 503,
    }


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_is_documented_and_of_a_known_type(kind: type[ServiceError]) -> None:
    assert kind.__doc__
    assert kind.type in {
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "rate_limit_error",
        "server_error",
    }
    assert (kind.type == "server_error") == (kind.status >= 500)


def test_codes_are_not_used_twice() -> None:
    codes = [kind.code for kind in ALL if kind.__name__ != "Unavailable"]

    assert len(codes) == len(set(codes))


def test_a_start_error_is_no_answer_to_a_caller() -> None:
    assert not issubclass(StartError, ServiceError)


# --- headers ---


def test_who_may_come_again_is_told_when() -> None:
    for kind in ALL:
        promised = kind.status in (429, 503)
        assert ("retry-after" in make(kind).headers()) == promised
        if promised:
            assert int(make(kind).headers()["retry-after"]) > 0


def test_a_missing_key_is_challenged_and_a_wrong_method_told_the_right_ones() -> None:
    assert InvalidApiKey("m").headers() == {"www-authenticate": "Bearer"}
    assert MethodNotAllowed("m", allow="GET, POST").headers() == {"allow": "GET, POST"}


# --- the body ---


def test_an_error_body_has_one_shape() -> None:
    error = ContextLengthExceeded("too long", param="prompt", prompt_tokens=5000, limit=2048)

    assert error.body() == {
        "message": "too long",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
        "param": "prompt",
        "prompt_tokens": 5000,
        "limit": 2048,
    }
    assert InvalidRequest("x").body()["param"] is None


any_text = st.text(st.characters()) | st.text(st.sampled_from("\ud800\udfff\0\x1b\n\r\"\\'é日😀\u2028")) | st.just("x")
"""Lone surrogates and control characters included."""


at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine with other work to do is no reason to fail."""


@at_leisure
@given(st.sampled_from(ALL), any_text, st.integers(1, 2000), any_text | st.none())
@example(InvalidRequest, "\0", 2000, "\0" * 2000)
@example(InvalidRequest, "😀", 2000, "😀" * 2000)
@example(InvalidRequest, "\ud800", 2000, "\ud800" * 2000)
def test_a_body_is_strict_json_under_4_kib_whatever_it_quotes(
    kind: type[ServiceError], text: str, times: int, param: str | None
) -> None:
    error = make(kind, text * times)
    error.param = param
    error.extra = {"limit": 2**63, "queue_depth": 2**63, "prompt_tokens": 2**63}

    written = render.encode({"error": error.body()})

    assert len(written) < MAX_BODY_BYTES
    assert json.loads(written)["error"]["code"] == kind.code


def test_a_long_message_keeps_its_beginning() -> None:
    message = InvalidRequest("begin " + "x" * 10_000).body()["message"]

    assert message.startswith("begin x")
    assert message.endswith("…")


def test_the_log_and_the_traceback_keep_the_whole_message() -> None:
    assert str(QueueFull("y" * 10_000)) == "y" * 10_000


# --- statuses are decided here alone ---


def test_no_other_module_writes_the_status_of_an_error() -> None:
    """``api/errors.py`` may compare with Starlette's, and has the one for a caller that is gone."""
    written = {
        f"{path.relative_to(APP)}:{node.lineno}"
        for path in APP.rglob("*.py")
        if path.relative_to(APP).as_posix() not in ("errors.py", "api/errors.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.keyword) and node.arg in ("status", "status_code") and _is_error_status(node.value))
        or (isinstance(node, ast.Assign) and _names_a_status(node.targets) and _is_error_status(node.value))
        or (isinstance(node, ast.Name) and node.id == "HTTPException")
    }

    assert written == set()


def _is_error_status(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and 400 <= node.value < 600


def _names_a_status(targets: list[ast.expr]) -> bool:
    return any(isinstance(target, ast.Name | ast.Attribute) and "status" in ast.unparse(target) for target in targets)
