"""Child processes end when the service does, however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import app
from app.backends import guard

ROOT = Path(app.__file__).parents[1]
BOUND_S = 10.0

PARENT = """
import multiprocessing, os, sys, time
from app.backends.guard import guard

def child(ready):
    guard()
    guard()
    open(ready + ".part", "w").write(f"{os.getpid()} {os.getpgid(0)}")
    os.rename(ready + ".part", ready)
    time.sleep(120)

if __name__ == "__main__":
    guard()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
    process.start()
    process.join()
"""


def test_in_the_service_itself_it_does_nothing() -> None:
    threads, group = threading.enumerate(), os.getpgid(0)

    guard.guard()

    assert not guard.is_child()
    assert threading.enumerate() == threads
    assert os.getpgid(0) == group


def test_a_child_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore")

    assert guard.is_child()


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A program with one spawned child: the program, the child's id and its process group."""
    script, ready = tmp_path / "parent.py", tmp_path / "ready"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen([sys.executable, script, ready], env=environment)
    child = 0
    try:
        wait_for(ready.exists)
        child, group = map(int, ready.read_text().split())
        yield program, child, group
    finally:
        program.kill()
        program.wait()
        if child and is_running(child):
            os.kill(child, signal.SIGKILL)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_ends_when_its_parent_is_killed(parent: tuple[subprocess.Popen[bytes], int, int]) -> None:
    program, child, _ = parent
    assert is_running(child)
    program.kill()
    program.wait()

    wait_for(lambda: not is_running(child))


def test_a_child_is_out_of_reach_of_the_terminals_ctrl_c(parent: tuple[subprocess.Popen[bytes], int, int]) -> None:
    program, child, group = parent

    assert group == child
    assert group != os.getpgid(program.pid)
