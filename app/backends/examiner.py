"""Runs the checkup in a child process, and says why it ended where it did not do so itself."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from app.backends.args import BackendArgs
from app.backends.checkup import VLLM
from app.finding import Finding
from app.settings import child_environment

COMMAND = [sys.executable, "-P", "-m", "app.backends.checkup"]
END_S = 2.0
IMPORT_TIMEOUT_S = 300.0
ENGINE_TIMEOUT_S = 1800.0
"""How long vLLM may take to be imported, and another stage to end: a large model takes minutes to load."""


def ask(args: BackendArgs, stages: Sequence[str], *, is_offline: bool, log_level: str) -> Iterator[Finding]:
    """The child's findings as they come; should it end early, the stage that it was in has failed.

    Args:
        args: what the backend is built from.
        stages: some of ``checkup.STAGES``, in their order.
        is_offline: the Hub is not to be asked for files.
        log_level: with ``debug`` all that the child says is shown on standard error.
    """
    given = args.model_dump(exclude_unset=True) | {"kind": args.kind}
    question = {"args": given, "stages": stages, "is_offline": is_offline, "log_level": log_level}
    try:
        child = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment({})
        )
    except OSError as error:
        found = f"user id {os.geteuid()} cannot start {sys.executable}: {error.strerror}"
        yield Finding(stages[0], "fail", found, "install Python where this user may run it")
        return
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    errors: deque[str] = deque(maxlen=50)
    readers = (
        threading.Thread(target=_read, args=(child, lines), daemon=True),
        threading.Thread(target=_drain, args=(child, errors, log_level == "debug"), daemon=True),
    )
    try:
        for reader in readers:
            reader.start()
        _tell(child, json.dumps(question))
        yield from _findings(child, stages, lines, errors, readers[1])
    finally:
        _end(child, readers)


def _tell(child: "subprocess.Popen[bytes]", question: str) -> None:
    """Standard input stays open: by its end the child learns that its parent is gone."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(question.encode() + b"\n")
        child.stdin.flush()


def _findings(
    child: "subprocess.Popen[bytes]",
    stages: Sequence[str],
    lines: "queue.SimpleQueue[bytes]",
    errors: deque[str],
    said: threading.Thread,
) -> Iterator[Finding]:
    for stage in stages:
        timeout_s = IMPORT_TIMEOUT_S if stage == VLLM else ENGINE_TIMEOUT_S
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            yield Finding(stage, "fail", f"no end within {timeout_s:g} s", "try again with --log-level debug")
            return
        if not line:
            status = child.wait()
            said.join(END_S)
            if (finding := _of_the_end(stage, status, errors)) is not None:
                yield finding
            return
        yield Finding(**json.loads(line))


def _end(child: "subprocess.Popen[bytes]", readers: Sequence[threading.Thread]) -> None:
    child.kill()
    child.wait()
    for reader in readers:
        reader.join(END_S)  # a process that the child has left behind may hold the pipes open for a while
    for pipe in (child.stdin, child.stdout, child.stderr):
        with suppress(OSError):
            if pipe is not None and not any(reader.is_alive() for reader in readers):
                pipe.close()


def _read(child: "subprocess.Popen[bytes]", lines: "queue.SimpleQueue[bytes]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(b"")


def _drain(child: "subprocess.Popen[bytes]", errors: deque[str], is_loud: bool) -> None:
    """Keep the last lines of the child's standard error, and with ``--log-level debug`` show them."""
    assert child.stderr is not None
    for line in child.stderr:
        text = line.decode(errors="replace")
        errors.append(text.strip())
        if is_loud:
            print(text, end="", file=sys.stderr, flush=True)


def _of_the_end(stage: str, status: int, errors: Sequence[str]) -> Finding | None:
    """Why the child has ended within a stage; None when it has said so itself."""
    if status == 0:
        return None
    last = next((line for line in reversed(errors) if line), "no message")
    if status == -signal.SIGKILL:
        advice = "most likely for want of memory: give it more (docker run --memory), or set a smaller model"
        return Finding(stage, "fail", "the process was killed", advice)
    if status == -signal.SIGILL:
        advice = "vLLM's build for the CPU wants AVX2 at least: use another machine, or build vLLM for this one"
        return Finding(stage, "fail", "this processor lacks instructions that vLLM or torch uses (SIGILL)", advice)
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    again = "install the pinned packages again (scripts/setup); --log-level debug shows all that it says"
    return Finding(stage, "fail", f"the process {how}: {last[:300]}", again)
