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
    assert all(request["time_to_first_token_ms"] > 0 for request in streamed)
    for request in requests:
        check_request(request)
    windows = [request["response_metrics"]["window"] for request in requests]
    assert len({(window["id"], window["position"]) for window in windows}) == len(requests)


@pytest.mark.parametrize("path", PATHS)
def test_guidellm_sees_tokens_come_one_by_one_from_the_backend_that_streams(
    guidellm: Path, streaming_service: ServiceProcess, tiny_model: Path, tmp_path: Path, path: str
) -> None:
    """And nothing of it where it asks for the whole answer."""

    def run(stream: bool) -> list[Json]:
        profile, report = "kind=concurrent,streams=4", tmp_path / f"stream-{stream}.json"
        return run_guidellm(
            guidellm, streaming_service.url, tiny_model, report, profile=profile, path=path, stream=stream, count=16
        )

    with ThreadPoolExecutor(2) as pool:
        whole, streamed = pool.map(run, (False, True))

    for request in (*whole, *streamed):
        check_request(request)
        assert request["response_metrics"]["window"] is None
    for request in streamed:
        timings = request["response_metrics"]["timings"]
        assert timings["ttft_ms"] - CLOCKS_S * 1e3 <= request["time_to_first_token_ms"]
        assert request["time_to_first_token_ms"] < request["request_latency"] * 1e3
        assert timings["itl_ms"] / 10 < request["inter_token_latency_ms"] < timings["itl_ms"] * 10
    assert len({round(request["inter_token_latency_ms"], 3) for request in streamed}) > 8


def check_request(request: Json) -> None:
    """One request of the report: complete, with timings that are its own."""
    timings, window = (request["response_metrics"][name] for name in ("timings", "window"))
    assert request["output_tokens"] == OUTPUT_TOKENS
    assert sum(timings[name] for name in SEVEN) == pytest.approx(timings["e2e_ms"], abs=ROUNDING_MS)
    assert not timings["clock_anomaly"]
    assert window is None or 0 <= window["position"] < window["size"]
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


def bench_serve(url: str, tokenizer: Path, folder: Path, backend: str, path: str) -> Json:
    """What vLLM's benchmark finds over streams, in which none of 24 requests may fail."""
    arguments = (
        f"--backend {backend} --endpoint {path} --base-url {url} --model tiny --tokenizer {tokenizer} "
        f"--dataset-name random --random-input-len 32 --random-output-len 12 --ignore-eos --num-prompts 24 "
        f"--max-concurrency 8 --save-result --save-detailed --result-dir {folder} --result-filename result.json"
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
    result: Json = json.loads((folder / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["output_lens"] == [12] * 24
    assert all(0 < ttft_s <= result["duration"] for ttft_s in result["ttfts"])
    return result


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllms_bench_serve_has_no_failed_request(
    tiny_service: ServiceProcess, tiny_model: Path, tmp_path: Path, backend: str, path: str
) -> None:
    bench_serve(tiny_service.url, tiny_model, tmp_path, backend, path)


def test_vllms_bench_serve_sees_tokens_come_one_by_one_from_the_backend_that_streams(
    streaming_service: ServiceProcess, tiny_model: Path, tmp_path: Path
) -> None:
    result = bench_serve(streaming_service.url, tiny_model, tmp_path, "openai-chat", "/v1/chat/completions")

    gaps = [gap_s for itls in result["itls"] for gap_s in itls]
    assert len(gaps) > 24 * 5
    assert len({round(gap_s, 5) for gap_s in gaps}) > 50
