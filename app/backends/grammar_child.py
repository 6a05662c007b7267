"""The process that tries grammars out: xgrammar is loaded once, each grammar is compiled in a fork with limits.

What a fork dies of (time, memory, a crash in xgrammar) is the verdict on its grammar; this process only waits. It
has one thread, so that forks are safe, and ends when its standard input does.

Standard input: a line of JSON for ``Judge``, then one ``{"id", "kind", "spec"}`` a check, and ``{"drop"}`` with the id
of one that nobody waits for any more. Standard output: a line once it is ready, then one a check:
``{"id", "message"}``, or ``{"id", "error"}`` where the check could not be made.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.backends.grammar_judge import COMPILE, NOUNS, PARSE, WALK, WALK_STEPS, Judge

MAX_CPU_S = {PARSE: 0.5, COMPILE: 0.5, WALK: 0.5}
"""Processor time of each stage of a check: ordinary grammars take hundredths of a second in all."""
MAX_SCHEMA_COMPILE_S = 4.0
"""The same for a JSON schema: a bound on the length of a string takes up to two seconds, and so does each further one.
The engine needs as long again, and the window with it. Times to compile are for a vocabulary of ``VOCABULARY`` tokens;
more for a larger one."""
SCHEMAS = ("json", "structural_tag")
VOCABULARY = 50_000
MAX_WALL_S = 60.0
"""For a fork that gets no processor; what it would have said is not known then."""
MAX_BYTES = 512 << 20
"""Address space of one check beside what this process has."""
STACK_BYTES = 2 << 20
"""The stack of a check: the smallest that a thread of the engine may have, so that what fits here fits there."""
MAX_AT_ONCE = 4
NICE = 10
"""The engine goes first where both want the processor."""
POLL_S = 0.5
"""How often this process looks whether its parent is still there."""
READ_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
SMALLER = {
    "json": "make it smaller, above all its optional properties, length and item bounds, and enumerations",
    "regex": "make it shorter, with smaller bounds for repetitions",
    "choice": "give fewer or shorter ones",
}


@dataclass
class Check:
    """A grammar to try."""

    id: int
    kind: str
    spec: str


@dataclass
class Fork:
    """A check that runs; what it says arrives on its pipe, whose end is its own."""

    check: Check
    pid: int
    deadline: float
    said: bytearray = field(default_factory=bytearray)


class Lines:
    """The lines of standard input, without waiting for more than has come."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def read(self) -> list[bytes] | None:
        """Whole lines of one read; None at the end of the input."""
        chunk = os.read(0, READ_BYTES)
        if not chunk:
            return None
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join(self._parts) + lines[0]
            self._parts.clear()
        self._parts.append(rest)
        return lines

    def first(self) -> Iterator[bytes]:
        """Wait for at least one line; nothing when the input has ended before."""
        while (lines := self.read()) is not None:
            if lines:
                yield from lines
                return


class Zygote:
    """Runs checks as they come, ``MAX_AT_ONCE`` at a time."""

    def __init__(self, judge: Judge, lines: Lines, parent: int) -> None:
        self._judge = judge
        self._lines = lines
        self._waiting: deque[Check] = deque()
        self._parent = parent
        self._forks: dict[int, Fork] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until standard input ends or the parent is gone."""
        while os.getppid() == self._parent:
            while self._waiting and len(self._forks) < MAX_AT_ONCE:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select(POLL_S):
                if key.fd != 0:
                    self._hear(key.fd)
                elif not self._take_checks():
                    return
            self._end_late_ones()

    def _take_checks(self) -> bool:
        lines = self._lines.read()
        self.take(lines or [])
        return lines is not None

    def take(self, lines: list[bytes]) -> None:
        """Checks to make, and those that nobody waits for any more."""
        for message in map(json.loads, lines):
            if "drop" in message:
                self._drop(message["drop"])
            else:
                self._waiting.append(Check(**message))

    def _drop(self, number: int) -> None:
        self._waiting = deque(check for check in self._waiting if check.id != number)
        for fork in self._forks.values():
            if fork.check.id == number:
                os.kill(fork.pid, signal.SIGKILL)

    def _start(self, check: Check) -> None:
        ear, mouth = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(ear)
            os.close(mouth)
            _answer({"id": check.id, "error": f"no process can be started: {error.strerror}"})
            return
        if pid == 0:
            _run_and_exit(self._judge, check, mouth)
        os.close(mouth)
        self._forks[ear] = Fork(check, pid, time.monotonic() + MAX_WALL_S)
        self._selector.register(ear, selectors.EVENT_READ)

    def _hear(self, ear: int) -> None:
        fork = self._forks[ear]
        if chunk := os.read(ear, READ_BYTES):
            fork.said += chunk
            return
        del self._forks[ear]
        self._selector.unregister(ear)
        os.close(ear)
        _, status = os.waitpid(fork.pid, 0)
        _answer({"id": fork.check.id, **_verdict(fork, os.waitstatus_to_exitcode(status))})

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for fork in self._forks.values():
            if now > fork.deadline:
                os.kill(fork.pid, signal.SIGKILL)

    def close(self) -> None:
        """End what still runs."""
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)


def _verdict(fork: Fork, status: int) -> dict[str, Any]:
    """What a fork has said, or what its end says."""
    kind = fork.check.kind
    *_, last = [json.loads(line) for line in fork.said.splitlines()] or [{"error": "it said nothing"}]
    if status == 0:
        return dict(last)
    smaller = SMALLER.get(kind, "make it smaller and less ambiguous")
    if status == -signal.SIGPROF and last.get("stage") == WALK:
        slow = f"takes too long to follow, more than {last['cpu_s']:g} s for {WALK_STEPS} tokens"
        return {"message": f"{NOUNS[kind]} {slow}: make it less ambiguous, without repetitions within repetitions"}
    if status == -signal.SIGPROF:
        return {"message": f"{NOUNS[kind]} takes more than {last['cpu_s']:g} s to {last['stage']}: {smaller}"}
    if status == -signal.SIGABRT:
        return {"message": f"{NOUNS[kind]} takes more than {MAX_BYTES >> 20} MiB to compile: {smaller}"}
    if status == -signal.SIGSEGV:
        return {"message": f"{NOUNS[kind]} is nested too deep for xgrammar to compile"}
    if status == -signal.SIGKILL and time.monotonic() > fork.deadline:
        return {"error": f"no answer within {MAX_WALL_S:g} s: the machine is overloaded"}
    return {"error": f"the process that compiled it ended with status {status}"}


def _run_and_exit(judge: Judge, check: Check, mouth: int) -> None:
    """In the fork: never returns, whatever happens."""
    status = 1

    def begin(stage: str) -> None:
        cpu_s = MAX_SCHEMA_COMPILE_S if stage == COMPILE and check.kind in SCHEMAS else MAX_CPU_S[stage]
        cpu_s *= max(1.0, judge.vocab_size / VOCABULARY) if stage == COMPILE else 1.0
        _write_line(mouth, {"stage": stage, "cpu_s": round(cpu_s, 3)})
        signal.setitimer(signal.ITIMER_PROF, cpu_s)

    try:
        _limit()
        _write_line(mouth, {"message": judge.judge(check.kind, check.spec, begin)})
        status = 0
    except MemoryError:
        os.abort()
    finally:
        os._exit(status)


def _limit() -> None:
    """Bound this process; what goes beyond ends it by a signal or a ``MemoryError``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)  # the other end must see them closed when this process's parent is killed
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_STACK, STACK_BYTES)
    _lower(resource.RLIMIT_AS, size_bytes + MAX_BYTES)


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY or soft > value:
        resource.setrlimit(limit, (value, hard))


def _answer(message: dict[str, Any]) -> None:
    _write_line(1, message)


def _write_line(file: int, message: dict[str, Any]) -> None:
    os.write(file, json.dumps(message).encode() + b"\n")


def _die_first() -> None:
    """Where memory runs out, the kernel ends a check before it ends the service."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _prepare_signals() -> None:
    """The end comes by standard input: a signal to the service's group would come before its drain is over."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def main() -> int:
    """Loads xgrammar, then checks until the parent is gone."""
    _prepare_signals()
    _die_first()
    os.nice(NICE)
    lines = Lines()
    question, *early = lines.first() or [b""]
    if not question:
        return 0
    settings = json.loads(question)
    parent = settings.pop("parent")
    try:
        judge = Judge(**settings)
        judge.judge("json_object", "", lambda _: None)  # what is imported late is there before the first fork
    except Exception as error:
        _answer({"fatal": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
        return 1
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, what the forks share
    _answer({"ready": True})
    zygote = Zygote(judge, lines, parent)
    try:
        zygote.take(early)
        zygote.serve()
    finally:
        zygote.close()
    return 0


if __name__ == "__main__":
    os._exit(main())  # torch takes half a second to be taken down
