"""Runs the command blocks of a page as a newcomer would, from the root of the checkout."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.docs.pages import ROOT, Block
from tests.service.support import free_port

BLOCK_S = 300.0
START_S = 240.0
STOP_S = 30.0
OUTPUT_CHARS = 4000
"""How much of its output, from the end, the message of a failing block shows."""
PAGES_PORT = r"(?<!\d)8000(?!\d)"
NOT_A_NEWCOMERS = re.compile(r"BATCHSERVE_|VLLM_|PYTEST_|OMP_|TORCH|LD_PRELOAD|HF_HUB_OFFLINE|PYTHON", re.IGNORECASE)
"""Variables of the desk, and those that an engine in the process of the tests leaves behind."""


class BlockFailed(AssertionError):
    """A block did not do what its page says; the message shows the block and its output."""


class PageRun:
    """The blocks of one page, one after the other, with the service that the page has started.

    Args:
        folder: for output and scripts.
        root: where the commands run.
    """

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.port = free_port()
        self._folder = folder
        self._root = root
        self._service: _Process | None = None

    def run(self, block: Block) -> None:
        """Run a block to its end, or start its service and wait until that is ready.

        Raises:
            BlockFailed: it failed, took too long, or showed something else.
        """
        if block.serves:
            self.close()
            self._service = self._start(block)
            self._wait_ready(self._service)
            return
        process = self._start(block)
        try:
            status = process.popen.wait(BLOCK_S)
        except subprocess.TimeoutExpired:
            raise self._failure(process, f"not done after {BLOCK_S:.0f} s") from None
        finally:
            process.end()
        if status != 0:
            raise self._failure(process, f"exit status {status}")
        if block.shows is not None and (difference := compare(*block.shows, process.stdout)):
            raise self._failure(process, f"it shows something else: {difference}")

    def check(self) -> None:
        """Fail when the page's service has ended by itself.

        Raises:
            BlockFailed: it has.
        """
        if self._service is not None and (status := self._service.popen.poll()) is not None:
            raise self._failure(self._service, f"the service has ended with status {status}")

    def close(self) -> None:
        """Stop the page's service, if there is one."""
        if self._service is not None:
            self._service.end()
            self._service = None

    def _start(self, block: Block) -> "_Process":
        text = re.sub(PAGES_PORT, str(self.port), block.text)
        script = self._folder / f"line-{block.line}.{block.language}"
        script.write_text(text, encoding="utf-8")
        command = ["bash", "-euo", "pipefail", str(script)] if block.language == "bash" else [sys.executable, script]
        return _Process(block, command, self._folder, self._root, newcomers_environment(self.port))

    def _wait_ready(self, service: "_Process") -> None:
        deadline = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{self.port}/readyz"):
            self.check()
            if time.monotonic() > deadline:
                raise self._failure(service, f"not ready after {START_S:.0f} s")
            time.sleep(0.05)

    def _failure(self, process: "_Process", what: str) -> BlockFailed:
        block = process.block
        parts = [f"{block.page}, line {block.line}: {what}", _titled("the block", block.text)]
        parts.append(_titled("its output", (process.stdout + process.stderr)[-OUTPUT_CHARS:]))
        if self._service is not None and self._service is not process:
            parts.append(_titled("the service's log", self._service.stderr[-3000:]))
        return BlockFailed("\n".join(parts))


class _Process:
    """A block at work, in a process group of its own; its output goes to files, which nothing can block on."""

    def __init__(self, block: Block, command: list[Any], folder: Path, root: Path, environment: dict[str, str]) -> None:
        self.block = block
        self._out, self._err = (folder / f"line-{block.line}.{name}" for name in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def end(self) -> None:
        """Stop what is left of the group: politely, then not."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while self._is_any_left() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def _is_any_left(self) -> bool:
        """Whether a member of the group lives; the leader may have ended before a service that drains."""
        self.popen.poll()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getpgid(process.pid) == self.popen.pid and process.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def newcomers_environment(port: int) -> dict[str, str]:
    """The desk's environment without settings of ours; the pages' port 8000 becomes ``port``."""
    kept = {name: value for name, value in os.environ.items() if not NOT_A_NEWCOMERS.match(name)}
    return kept | {"BATCHSERVE_PORT": str(port)}


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=5):
            return True
    return False


def _titled(title: str, text: str) -> str:
    return f"--- {title}\n{text.strip()}"


# --- what a page shows -----------------------------------------------------------------------------------------------


def compare(language: str, shown: str, printed: str) -> str | None:
    """How the output differs from what the page shows; None when it does not.

    JSON: what is shown must be there. Text: each line must be among those printed. In both, numbers may be others, and
    ``…`` stands for anything.
    """
    if language == "text":
        lines = printed.splitlines()
        missing = [
            line for line in shown.splitlines() if line.strip() and not any(_is_like(line, one) for one in lines)
        ]
        return f"no line like {missing[0]!r}" if missing else None
    try:
        return _json_difference(json.loads(shown), json.loads(printed), "")
    except ValueError as error:
        return f"not JSON: {error}"


NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


def _is_like(shown: str, printed: str) -> bool:
    """Whether numbers aside, an ellipsis for anything and spaces for spaces, the one is the other."""
    return re.fullmatch(_pattern(" ".join(shown.split())), " ".join(printed.split())) is not None


def _pattern(line: str) -> str:
    """A regular expression; each part is found once, at its first place, so that no line is tried over and over."""
    first, *rest = (_part(part) for part in line.split("…"))
    if not rest:
        return first
    between = "".join(f"(?>.*?{part})" for part in rest[:-1])
    return f"(?>{first}){between}.*{rest[-1]}"


def _part(text: str) -> str:
    parts = re.split(f"({NUMBER})", text)
    return "".join(NUMBER if part[:1].isdigit() else re.escape(part) for part in parts)


def _json_difference(shown: Any, printed: Any, path: str) -> str | None:
    if isinstance(shown, dict) and isinstance(printed, dict):
        for name, value in shown.items():
            if name not in printed:
                return f"no {path}.{name}"
            if difference := _json_difference(value, printed[name], f"{path}.{name}"):
                return difference
        return None
    if isinstance(shown, list) and isinstance(printed, list):
        if len(shown) > len(printed):
            return f"{path} has {len(printed)} entries"
        pairs = (_json_difference(*pair, f"{path}.{at}") for at, pair in enumerate(zip(shown, printed, strict=False)))
        return next(filter(None, pairs), None)
    if isinstance(shown, str) and isinstance(printed, str):
        return None if _is_like(shown, printed) else f"{path} is {printed!r:.200}"
    kinds = [float if type(value) is int else type(value) for value in (shown, printed)]
    is_same = kinds[0] is kinds[1] and (kinds[0] is float or shown == printed)
    return None if is_same else f"{path} is {printed!r:.200}"
