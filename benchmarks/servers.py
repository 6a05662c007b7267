"""vLLM's own OpenAI server as a child process, with the engine settings of a running service."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from benchmarks.sides import STOP_S, wait_until

OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING"}
"""What is not taken over: vLLM's server has its engine core in a process of its own, as it has for everybody."""


def flags(engine_args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as options of vLLM's server."""
    words = []
    for name, value in engine_args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def environment(engine_environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the variables that the service's engine reads."""
    shared = {name: value for name, value in engine_environment.items() if name not in OWN}
    return {name: value for name, value in os.environ.items() if name not in OWN} | shared


@contextmanager
def vllm_server(
    folder: str, served_name: str, engine_args: Mapping[str, Any], engine_environment: Mapping[str, str]
) -> Iterator[str]:
    """Its address once ``/health`` answers 200; its log is shown when it does not."""
    port = free_port()
    # It ends with this process, however that ends; its own children end with it.
    words = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", folder, "--served-model-name", served_name, *flags(engine_args)]
    with (
        tempfile.TemporaryFile() as log,
        # In the session of the client and of the services: with autogroup Linux shares processor time out by session.
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(engine_environment)
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(f"{url}/health", process, log, "vLLM's server")
            yield url
        finally:
            end_with_children(process)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def memory_bytes(url: str) -> int:
    """What the process that listens at an address has in memory, and its children; pages they share count once.

    Raises:
        LookupError: none of this process's children listens there.
    """
    port = int(url.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        if any(at.status == psutil.CONN_LISTEN and at.laddr.port == port for at in process.net_connections("tcp")):
            family = [process, *process.children(recursive=True)]
            return sum(int(member.memory_full_info().pss) for member in family)
    raise LookupError(f"no child of this process listens at {url}")


def end_with_children(process: "subprocess.Popen[Any]", stop_s: float = STOP_S) -> None:
    """Ask it to end; kill what is left of it and of its children after so many seconds."""
    family = _family(process)
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=stop_s)
    for left in alive:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()
    psutil.wait_procs(family[1:], timeout=stop_s)


def _family(process: "subprocess.Popen[Any]") -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
