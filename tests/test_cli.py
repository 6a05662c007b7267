"""The command line as a shell has it: the program runs as a process."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("batchserve")


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PROGRAM, *words], capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    )


def test_without_a_command_all_of_them_are_listed() -> None:
    done = run()

    assert done.returncode == 0
    for command in ("serve", "doctor [--quick]", "openapi"):
        assert f"batchserve {command}" in done.stdout


def test_an_unknown_command_is_exit_2() -> None:
    assert run("sevre").returncode == 2


def test_a_reader_that_has_seen_enough_gets_no_trace() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {PROGRAM} openapi | head -c 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout == "{"
    assert done.stderr == ""
    assert done.returncode == 141  # as of a program that a SIGPIPE ends


def test_the_doctor_of_the_fake_backend_is_well() -> None:
    done = run("doctor", "--backend", "fake", "--port", "0", "--log-format", "json")

    assert done.returncode == 0, done.stdout + done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert findings[0]["check"] == "settings"
    assert findings[-1] == {"check": "engine", "status": "ok", "found": "opened, generated, closed", "advice": ""}
    assert done.stderr == ""


def test_the_doctor_tells_by_its_exit_code() -> None:
    done = run("doctor", "--quick", "--backend", "fake", "--host", "203.0.113.1")

    assert done.returncode == 1
    assert "fail  port" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_doctor_takes_the_options_of_serve() -> None:
    done = run("doctor", "--help")

    assert done.returncode == 0
    assert "batchserve doctor [--quick]" in done.stdout
    assert "--engine-process" in done.stdout


def test_a_failed_start_points_to_the_doctor() -> None:
    done = run("serve", "--backend", "nope")

    assert done.returncode == 1
    reason, pointer = done.stderr.splitlines()
    assert reason.startswith("batchserve: cannot start: backend")
    assert pointer == "batchserve: `batchserve doctor` with the same options and variables checks what a start needs"
