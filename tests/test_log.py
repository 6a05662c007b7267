"""Log lines: the id of the request in each, and one event never looks like two."""

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from app import log

FORGED = 'x\n{"level": "error", "message": "forged"}\r\n2026-01-01 ERROR forged\u2028end'


Logged = Callable[[], str]


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Logged]:
    """What has been logged since it was last asked; the logging of the tests is put back afterwards."""
    names = ("", "app", "batchserve", "uvicorn", "uvicorn.error")
    before = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers[:]
    yield lambda: capsys.readouterr().err
    logging.getLogger().handlers[:] = handlers
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def request_id() -> Iterator[str]:
    token = log.request_id_var.set("req-42")
    yield "req-42"
    log.request_id_var.reset(token)


def test_a_text_line_carries_the_requests_id(logged: Logged, request_id: str) -> None:
    log.configure("info", "text")
    logging.getLogger("batchserve").info("hello %s", "you")

    assert "INFO batchserve [req-42] hello you\n" in logged()


def test_a_json_line_carries_the_requests_id(logged: Logged, request_id: str) -> None:
    log.configure("info", "json")
    logging.getLogger("batchserve").info("hello %s", "you")

    line = json.loads(logged())
    assert line.pop("time") > 0
    assert line == {"level": "info", "logger": "batchserve", "request_id": "req-42", "message": "hello you"}


def test_outside_of_a_request_there_is_a_dash(logged: Logged) -> None:
    log.configure("info", "json")
    logging.getLogger("app.batching").info("x")

    assert json.loads(logged())["request_id"] == "-"


def test_a_line_break_in_a_message_forges_no_json_line(logged: Logged) -> None:
    log.configure("info", "json")
    logging.getLogger("batchserve").info("GET %s", FORGED)
    logging.getLogger("batchserve").info(FORGED)

    lines = logged().splitlines()
    assert [json.loads(line)["message"] for line in lines] == [f"GET {FORGED}", FORGED]


def test_an_exception_is_part_of_its_json_line(logged: Logged) -> None:
    log.configure("info", "json")
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("batchserve").exception("it failed")

    (line,) = logged().splitlines()
    assert "ValueError" in json.loads(line)["exception"]


def test_a_lone_surrogate_breaks_no_line(logged: Logged) -> None:
    log.configure("info", "json")
    logging.getLogger("batchserve").info("%s", "\ud800")

    assert logged().isascii()


def test_libraries_are_quiet_unless_everything_is_wanted(logged: Logged) -> None:
    log.configure("info", "text")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    logging.getLogger("app").debug("detail")
    shown = logged()
    assert "chatter" not in shown
    assert "trouble" in shown
    assert "detail" not in shown

    log.configure("debug", "text")
    logging.getLogger("some.library").info("more chatter")
    assert logged().count("more chatter") == 1


def test_a_complaint_is_a_line_for_each_mistake_and_one_that_points_to_the_doctor(logged: Logged) -> None:
    log.complain("port: wrong\nhost: wrong")

    *lines, pointer = logged().splitlines()
    assert lines == ["batchserve: cannot start: port: wrong", "batchserve: cannot start: host: wrong"]
    assert "`batchserve doctor`" in pointer


def test_configuring_twice_writes_each_line_once(logged: Logged) -> None:
    log.configure("info", "text")
    log.configure("info", "text")
    logging.getLogger("app").info("once")

    assert logged().count("once") == 1
