"""GuideLLM measures its own backend and this service with the same requests."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import guidellm_runs, report, sides, workload
from tests.engine.models import tiny_model

pytestmark = pytest.mark.engine

REQUESTS = [{"prompt": body["prompt"], "max_tokens": 4 + at} for at, body in enumerate(workload.mixed(6))]
STREAMS = 4
ENGINE = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**27}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module", autouse=True)
def guidellm() -> None:
    """The environment that ``scripts/guidellm-env`` makes once."""
    made = subprocess.run([report.ROOT / "scripts" / "guidellm-env"], capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]


def test_its_own_backend_answers_every_request_at_its_length() -> None:
    folder = str(tiny_model())
    backend = guidellm_runs.in_process(folder, 4, 10.0, ENGINE)
    records = guidellm_runs.run(backend, folder, REQUESTS, STREAMS, ENVIRONMENT)
    assert sorted(record["output_tokens"] for record in records) == [4, 5, 6, 7, 8, 9]
    assert 0 < guidellm_runs.seconds(records) < 60


def test_the_service_answers_every_request_at_its_length_and_the_warm_up_is_left_out() -> None:
    folder = str(tiny_model())
    with sides.service(folder, "--backend", "fake", "--served-model-name", "made-up") as service:
        records = guidellm_runs.run(guidellm_runs.over_http(service.url, "made-up"), folder, REQUESTS, STREAMS, {})
        metrics = service.client.get("/metrics").text
    assert len(records) == len(REQUESTS)
    assert f"batchserve_e2e_seconds_count {len(REQUESTS) + STREAMS}.0" in metrics


def test_a_streamed_answer_has_a_first_token_and_times_between_tokens() -> None:
    folder = str(tiny_model())
    options = ("--backend", "vllm_python", "--served-model-name", "made-up", "--vllm-config", json.dumps(ENGINE))
    with sides.service(folder, *options) as service:
        backend = guidellm_runs.over_http(service.url, "made-up", is_streamed=True)
        records = guidellm_runs.run(backend, folder, REQUESTS, STREAMS, {})
    assert len(records) == len(REQUESTS)
    for record in records:
        assert 0 < record["time_to_first_token_ms"] < record["request_latency"] * 1000
        assert record["inter_token_latency_ms"] > 0


def test_without_its_environment_it_says_what_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guidellm_runs, "ENVIRONMENT", tmp_path)
    with pytest.raises(RuntimeError, match="scripts/guidellm-env installs it"):
        guidellm_runs.site_packages()
