"""GuideLLM as client and as counter: its backend that calls vLLM in its own process, and this service over HTTP.

Both run with GuideLLM of ``.venv-guidellm`` behind the packages of this environment, since that backend wants vLLM
beside GuideLLM: so both have the same vLLM and the same GuideLLM.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

ENVIRONMENT = report.ROOT / ".venv-guidellm"
BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from guidellm.__main__ import cli; cli()"
WARM_UP_TOKENS = 2
"""Length of the answers that come first and are not counted; no other has it."""
TIMEOUT_S = 600

Backend = dict[str, Any]
Request = dict[str, Any]


def in_process(folder: str, batch_size: int, wait_ms: float, engine_args: Mapping[str, Any]) -> Backend:
    """GuideLLM's backend that gives windows to ``LLM.generate()`` itself, with this engine."""
    return {
        "kind": "vllm_python_batch",
        "model": folder,
        "batch_size": batch_size,
        "batch_timeout": wait_ms / 1000,
        "request_format": "plain",
        "vllm_config": {**engine_args, "disable_log_stats": False},
    }


def over_http(url: str, model: str, *, is_streamed: bool = False) -> Backend:
    """A server; with vLLM's own default of the temperature, which the other backend cannot change."""
    return {
        "kind": "openai_http",
        "target": url,
        "model": model,
        "request_format": "/v1/completions",
        "stream": is_streamed,
        "extras": {"body": {"temperature": 1.0}},
    }


def run(
    backend: Backend, folder: str, requests: Sequence[Request], streams: int, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """GuideLLM's records of the requests, which this many streams have sent after a first short one of each.

    Raises:
        RuntimeError: there is no GuideLLM, it failed, or an answer is missing or has another length.
    """
    with tempfile.TemporaryDirectory() as place:
        data, output = Path(place, "requests.jsonl"), Path(place, "report.json")
        rows = [*_warm_up(requests, streams), *requests]
        data.write_text("".join(json.dumps(_row(request)) + "\n" for request in rows))
        words = ["run", "--backend", json.dumps(backend), "--profile", f"kind=concurrent,streams={streams}"]
        words += ["--constraint", f"kind=max_requests,count={len(rows)}", "--data", f"kind=json_file,path={data}"]
        words += ["--tokenizer", f"kind=hf_auto,model={folder}", "--output", f"kind=json,path={output}"]
        _call([*words, "--disable-console"], environment)
        records = json.loads(output.read_text())["benchmarks"][0]["requests"]["successful"]
    measured = [record for record in records if record["output_tokens"] != WARM_UP_TOKENS]
    expected = sorted(request["max_tokens"] for request in requests)
    if sorted(record["output_tokens"] for record in measured) != expected:
        raise RuntimeError(f"{len(measured)} of {len(requests)} answers came with the length that was asked for")
    return measured


def _warm_up(requests: Sequence[Request], streams: int) -> list[Request]:
    return [{"prompt": f"Warm up {at}", "max_tokens": WARM_UP_TOKENS} for at in range(streams)]


def _row(request: Request) -> dict[str, Any]:
    """The columns that GuideLLM looks for by these names."""
    return {"prompt": request["prompt"], "output_tokens_count": request["max_tokens"]}


def _call(words: list[str], environment: Mapping[str, str]) -> None:
    # One process for the client, as its other backend has: by default up to ten, on cores that the server needs.
    shared = os.environ | dict(environment) | {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", BOOT, str(site_packages()), *words]
    done = subprocess.run(command, env=shared, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"GuideLLM ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def site_packages() -> Path:
    """Where GuideLLM is installed.

    Raises:
        RuntimeError: nowhere.
    """
    for folder in ENVIRONMENT.glob("lib/python*/site-packages"):
        if (folder / "guidellm").is_dir():
            return folder
    raise RuntimeError("GuideLLM is not there: scripts/guidellm-env installs it")


def version() -> str:
    """Of the installed GuideLLM."""
    found = next(site_packages().glob("guidellm-*.dist-info"))
    return found.name.removeprefix("guidellm-").removesuffix(".dist-info")


def seconds(records: Sequence[Mapping[str, Any]]) -> float:
    """From the first request's start to the last one's end."""
    begun = min(record["request_start_time"] for record in records)
    return float(max(record["request_end_time"] for record in records) - begun)
