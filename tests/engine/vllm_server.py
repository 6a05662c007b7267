"""vLLM's own OpenAI server, as a child process with the tests' model: what our answers are held against."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.process import CLEAN_ENVIRONMENT
from tests.service.support import free_port

START_S = 180.0
SETTINGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-num-seqs=64",
    "--max-model-len=1024",
    "--block-size=32",
    "--kv-cache-memory-bytes=100000000",
    "--enable-per-request-metrics",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
"""As the tests' own engine has them, where they decide about the answer."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}


class VLLMServer:
    """One running server."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._log = folder / "vllm-server.log"
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--served-model-name=tiny", "--host=127.0.0.1", *SETTINGS],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=CLEAN_ENVIRONMENT | ENVIRONMENT,
            )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)

    def wait_ready(self) -> "VLLMServer":
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.2)
        return self

    def _answers(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, route: str, body: Any) -> tuple[int, Any]:
        """Status and answer: JSON, or the text of a stream."""
        answer = self._client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
        is_json = answer.headers["content-type"].startswith("application/json")
        return answer.status_code, answer.json() if is_json else answer.text

    def end(self) -> None:
        """End it; it ends its engine's process."""
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


_running: list[VLLMServer] = []


def the_server(config: pytest.Config, folder: Path, model: Path) -> VLLMServer:
    """One for all modules of a run, ended with it."""
    if not _running:
        server = VLLMServer(folder, model)
        config.add_cleanup(server.end)
        _running.append(server.wait_ready())
    return _running[0]


def differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    """In what an answer of ours is not vLLM's: names, values, numbers by more than a thousandth."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = [f"{path}.{name} is missing" for name in theirs if name not in ours]
        found += [f"{path}.{name} is more" for name in ours if name not in theirs]
        shared = [name for name in theirs if name in ours]
        return found + [line for name in shared for line in differences(theirs[name], ours[name], f"{path}.{name}")]
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [line for index, (one, other) in pairs for line in differences(one, other, f"{path}.{index}")]
    if isinstance(theirs, float) and isinstance(ours, float):
        return [] if abs(theirs - ours) < 1e-3 else [f"{path}: {theirs} is {ours}"]
    return [] if type(theirs) is type(ours) and theirs == ours else [f"{path}: {theirs!r:.200} is {ours!r:.200}"]


OWN = ("id", "created", "system_fingerprint", "metrics")
"""Of an answer: what no two services share."""


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what no two services share, and without what the prefix cache happens to hold."""
    usage = {name: value for name, value in answer["usage"].items() if not name.endswith("_details")}
    return {name: value for name, value in answer.items() if name not in OWN} | {"usage": usage}
