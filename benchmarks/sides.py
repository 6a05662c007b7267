"""A running service, and how the sides of a comparison ask it."""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import aiohttp
import httpx
import psutil

from benchmarks.workload import Request

READY_S = 300
STOP_S = 40


class Service:
    """A running service of ``benchmarks.host``, and a client for it.

    Attributes:
        info: what ``GET /info`` says of it.
    """

    def __init__(self, url: str, process: "subprocess.Popen[Any]") -> None:
        self._process = process
        self.client = httpx.Client(base_url=url, timeout=None)
        self.url = url
        self.info: dict[str, Any] = self.client.get("/info").json()

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used so far."""
        return _cpu_seconds(self._process)

    @property
    def engine_args(self) -> dict[str, Any]:
        """The arguments of its ``LLM``."""
        return {name: value for name, value in self._engine().items() if not name.isupper()}

    @property
    def engine_environment(self) -> dict[str, str]:
        """The variables that its engine reads."""
        return {name: value for name, value in self._engine().items() if name.isupper()}

    def _engine(self) -> dict[str, Any]:
        return {name: entry["value"] for name, entry in self.info["backend"]["engine_args"].items()}

    def batch(self, requests: list[Request]) -> tuple[float, dict[str, Any]]:
        """Seconds until the whole answer of one ``POST /batch`` was there, and the answer."""
        begun = time.perf_counter()
        response = self.client.post("/batch", json={"requests": requests})
        seconds = time.perf_counter() - begun
        return seconds, response.raise_for_status().json()

    def direct(self, windows: list[list[Request]]) -> tuple[float, int]:
        """Seconds for the windows through ``LLM.generate()`` itself, and the tokens that they gave."""
        answer = self.client.post("/direct", json=windows).raise_for_status().json()
        return answer["seconds"], answer["completion_tokens"]

    def generate(self, request: Request) -> float:
        """Seconds for one ``POST /generate``."""
        begun = time.perf_counter()
        self.client.post("/generate", json=request).raise_for_status()
        return time.perf_counter() - begun

    def generate_concurrently(self, requests: list[Request], callers: int) -> tuple[float, list[dict[str, Any]]]:
        """Seconds for all requests by so many callers, each with one at a time; and the answers as they came."""
        return asyncio.run(self._generate_concurrently(requests, callers))

    async def _generate_concurrently(self, requests: list[Request], callers: int) -> tuple[float, list[dict[str, Any]]]:
        # Not httpx: with 64 connections it takes several times the service's own processor time for each request.
        async with aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=callers)) as client:
            await asyncio.gather(*(_connect(client) for _ in range(callers)))
            left, answers = iter(requests), []

            async def call() -> None:
                for request in left:
                    async with client.post("/generate", json=request, raise_for_status=True) as response:
                        answers.append(await response.read())

            begun = time.perf_counter()
            await asyncio.gather(*(call() for _ in range(callers)))
            seconds = time.perf_counter() - begun
        return seconds, [json.loads(answer) for answer in answers]


async def _connect(client: aiohttp.ClientSession) -> None:
    """Open a connection, so that it is there when the clock starts."""
    async with client.get("/livez") as response:
        await response.read()


@contextmanager
def service(model: str, *options: str) -> Iterator[Service]:
    """A service on a free port, of ``benchmarks.host``; its log is shown when it does not turn ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "benchmarks.host", "--port", str(port), "--model", model, *options]
    root = Path(__file__).parent.parent
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=root) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(f"{url}/readyz", process, log, "the service")
            running = Service(url, process)
            with closing(running.client):
                yield running
        finally:
            _end(process)


def wait_until(url: str, process: "subprocess.Popen[Any]", log: IO[bytes], name: str) -> None:
    """Until the address answers 200.

    Raises:
        RuntimeError: the process has ended, or ``READY_S`` have passed; with the end of its log.
    """
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"{name} is not ready: {log.read().decode(errors='replace')[-2000:]}")


def _cpu_seconds(process: "subprocess.Popen[Any]") -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _end(process: "subprocess.Popen[Any]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
