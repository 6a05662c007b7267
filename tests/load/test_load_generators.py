"""GuideLLM and vLLM's `bench serve` against the live service: none fails, and GuideLLM keeps the service's timings."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.engine.process import ServiceProcess
from tests.load.guidellm import OUTPUT_TOKENS, Json, run_guidellm
from tests.service.support import SEVEN

pytestmark = pytest.mark.engine

COUNT = 8
PROFILES = [
    "kind=synchronous",
    "kind=concurrent,streams=4",
    "kind=throughput,max_concurrency=8",
    "kind=constant,rate=10",
]
PATHS = ["/v1/completions", "/v1/chat/completions"]
ROUNDING_MS = 0.01
CLOCKS_S = 0.005
"""How far the wall clocks of the two may be apart: both read this machine's."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("profile", PROFILES)
def test_guidellm_has_no_errors_and_its_report_holds_the_services_timings(
    guidellm: Path, tiny_service: ServiceProcess, tiny_model: Path, tmp_path: Path, profile: str, path: str
) -> None:
    def run(stream: bool) -> list[Json]:
        report = tmp_path / f"stream-{stream}.json"
        return run_guidellm(
            guidellm, tiny_service.url, tiny_model, report, profile=profile, path=path, stream=stream, count=COUNT
        )

    with ThreadPoolExecutor(2) as pool:  # most of a run is GuideLLM's own start
        whole, streamed = pool.map(run, (False, True))

    requests = [*whole, *streamed]
    assert (len(whole), len(streamed)) == (COUNT, COUNT)
    for request in requests:
        check_request(request)
    assert all(request["time_to_first_token_ms"] > 0 for request in streamed)
    windows = [request["response_metrics"]["window"] for request in requests]
    assert len({(window["id"], window["position"]) for window in windows}) == len(requests)


def check_request(request: Json) -> None:
    """One request of the report: complete, with timings that are its own."""
    timings, window = (request["response_metrics"][name] for name in ("timings", "window"))
    assert request["output_tokens"] == OUTPUT_TOKENS
    assert sum(timings[name] for name in SEVEN) == pytest.approx(timings["e2e_ms"], abs=ROUNDING_MS)
    assert not timings["clock_anomaly"]
    assert 0 <= window["position"] < window["size"]
    # What the service says has to lie within what GuideLLM saw from outside: in length, and on the clock.
    assert 0 < timings["e2e_ms"] <= request["request_latency"] * 1e3 + CLOCKS_S * 1e3
    assert request["request_start_time"] - CLOCKS_S <= timings["received_at"]
    assert timings["completed_at"] <= request["request_end_time"] + CLOCKS_S


# --- vLLM's bench serve ---

BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllms_bench_serve_has_no_failed_request(
    tiny_service: ServiceProcess, tiny_model: Path, tmp_path: Path, backend: str, path: str
) -> None:
    arguments = (
        f"--backend {backend} --endpoint {path} --base-url {tiny_service.url} --model tiny --tokenizer {tiny_model} "
        f"--dataset-name random --random-input-len 32 --random-output-len 12 --ignore-eos --num-prompts 24 "
        f"--max-concurrency 8 --save-result --save-detailed --result-dir {tmp_path} --result-filename result.json"
    )
    done = subprocess.run(
        [sys.executable, "-c", BENCH_SERVE, *arguments.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["output_lens"] == [12] * 24
    assert all(0 < ttft_s <= result["duration"] for ttft_s in result["ttfts"])
