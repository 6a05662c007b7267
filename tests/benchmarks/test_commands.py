"""The benchmarks run, on real engines."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report, window_life, workload

pytestmark = pytest.mark.engine


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=report.ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_the_overhead_is_measured_on_both_sides() -> None:
    shown = run("benchmarks.overhead", "--quick")
    assert "| two-layer | `LLM.generate()` |" in shown
    assert "| two-layer | `POST /batch` |" in shown
    assert "| two-layer | 64 × `POST /generate` |" in shown


def test_the_service_and_vllms_server_answer_the_same_requests() -> None:
    shown = run("benchmarks.versus_vllm_serve", "--quick")
    for callers in (1, 16):
        rows = [line for line in shown.splitlines() if line.startswith(f"| {callers} | ")]
        assert [row.split(" | ")[1] for row in rows] == ["vLLM's server", "`batch_size` 32"] * 3
    assert "- two-layer, `batch_size` 32\n  - tokens/s: " in shown


def test_both_backends_and_vllms_server_answer_the_same_requests_streamed_too() -> None:
    shown = run("benchmarks.backends", "--quick").splitlines()
    names = ["vLLM's server", "`vllm_offline`, 32", "`vllm_python`, 64"]
    for callers in ("1", "16"):
        rows = [row.split(" | ") for row in shown if row.startswith(f"| two-layer | {callers} |")]
        assert [row[2] for row in rows] == names
        assert [row[7] == "–" for row in rows] == [False, True, False]  # a window's text comes in one piece
    costs = [row.split(" | ") for row in shown if row.startswith("| two-layer | ") and row.count("|") == 5]
    assert [row[1] for row in costs] == names
    assert any(row.startswith("| two-layer | mixed | 64 at once") for row in shown)


def test_a_windows_life_is_measured_and_written(tmp_path: Path) -> None:
    run("benchmarks.window_life", "--docs", str(tmp_path))
    result = report.read(tmp_path, "window_life")
    tokens = [request["max_tokens"] for request in workload.mixed(window_life.REQUESTS)]
    assert [row["completion_tokens"] for row in result["rows"]] == tokens
    assert [window["size"] for window in result["windows"]] == [16, 8]
    assert (tmp_path / "figures" / "window_life.svg").read_text() == window_life.draw(result)
