"""The service as a process of its own, and its family of processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.inline import Caller

START_S = 180.0
GONE_S = 10.0
PROGRAM = Path(sys.executable).with_name("batchserve")
CLEAN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("BATCHSERVE_")}
"""As it is before an engine in the test process changes it: vLLM sets LD_PRELOAD and more."""


class ServiceProcess:
    """One ``batchserve serve``; a process group of its own, so that its family can be told from all others.

    Not a session: with autogroup Linux shares processor time out by session, and a client outside that of a busy
    service may wait for half a second.
    """

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [PROGRAM, "serve", "--port", "0", *arguments],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                process_group=0,
                cwd=folder,
                env=CLEAN_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | (environment or {}),
            )
        self.started = time.monotonic()
        self._seen: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def url(self) -> str:
        """Where it listens, which it says before the model is there."""
        wait_until(lambda: re.search(r"listening on (\S+);", self.err) or self._ended(), 30, "it does not listen")
        found = re.search(r"listening on (\S+);", self.err)
        assert found, self.err[-2000:]
        return found[1]

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def wait_ready(self) -> "ServiceProcess":
        """Wait for the line that says so."""
        wait_until(lambda: "batchserve is ready" in self.out or self._ended(), START_S, "it does not turn ready")
        assert not self._ended(), (self.out + self.err)[-3000:]
        self.family()
        return self

    def family(self) -> list[psutil.Process]:
        """The living processes: the service's group and its descendants, those seen earlier included."""
        for pid in psutil.pids():
            try:
                if pid not in self._seen and os.getpgid(pid) == self.pid:
                    self._seen[pid] = psutil.Process(pid)
            except (OSError, psutil.Error):
                continue
        if self.pid in self._seen:
            with suppress(psutil.Error):
                self._seen.update({child.pid: child for child in self._seen[self.pid].children(recursive=True)})
        return [process for process in self._seen.values() if _is_alive(process)]

    def member(self, title: str) -> psutil.Process:
        """The one living process whose title ends with this, such as ``EngineCore``."""
        (found,) = [process for process in self.family() if process.name().startswith(f"VLLM::{title}")]
        return found

    def wait_gone(self, timeout_s: float = GONE_S) -> None:
        """Wait until no process of the family is left."""
        wait_until(lambda: not self.family(), timeout_s, lambda: f"left: {self.family()}")

    def wait_exit(self, timeout_s: float) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """A signal to the service alone."""
        os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """A signal to the process group, as a terminal does."""
        os.killpg(self.pid, number)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120)

    def end(self) -> None:
        """End what is left of it."""
        for process in self.family():
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait(GONE_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_until(condition: Callable[[], Any], timeout_s: float, complaint: str | Callable[[], str]) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, complaint if isinstance(complaint, str) else complaint()
        time.sleep(0.05)


@contextmanager
def service_process(
    folder: Path, model: Path | str, engine_process: str, *arguments: str, **vllm_config: Any
) -> Iterator[ServiceProcess]:
    """A service that is ended with all it has started."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps({"max_num_seqs": 64, **vllm_config})
    service = ServiceProcess(
        folder, "--model", str(model), "--engine-process", engine_process, "--vllm-config", config, *arguments
    )
    try:
        yield service
    finally:
        service.end()


# --- one service of the streaming backend for all tests of a run ---

PYTHON_CONFIG = {"dtype": "float32", "max_model_len": 1024, "block_size": 32}
"""As the tests' own engine has them, and vLLM's server, where they decide about the answer."""


@dataclass
class Remote(Caller):
    """A service in a process of its own, and a client of it."""

    client: httpx.AsyncClient
    process: ServiceProcess
    kind: str = "vllm_python"


def python_service(folder: Path, model: Path, *arguments: str) -> AbstractContextManager[ServiceProcess]:
    """``vllm_python`` with the settings above, ended with all it has started."""
    options = ("--backend", "vllm_python", "--served-model-name", "tiny", *arguments)
    return service_process(folder, model, "auto", *options, **PYTHON_CONFIG)


def rolling_service(folder: Path, model: Path, *arguments: str) -> AbstractContextManager[ServiceProcess]:
    """``vllm_offline`` with ``scheduling: rolling`` and the settings above, ended with all it has started."""
    options = ("--scheduling", "rolling", "--served-model-name", "tiny", "--batch-size", "64", *arguments)
    return service_process(folder, model, "inline", *options, **PYTHON_CONFIG)


_running: list[ServiceProcess] = []


def the_python_service(config: pytest.Config, folder: Path, model: Path) -> ServiceProcess:
    """One for all modules of a run, which takes tools; ended with it."""
    if not _running:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        service = stack.enter_context(python_service(folder, model, "--tool-call-parser", "hermes"))
        _running.append(service.wait_ready())
    return _running[0]
