"""How vLLM's server gets the engine of a running service, and how it is ended."""

import subprocess
import sys

import psutil
import pytest

from benchmarks import servers


def test_engine_arguments_become_options_of_the_same_meaning() -> None:
    given = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 128,
        "quantization": None,
        "compilation_config": {"level": 0},
    }
    assert servers.flags(given) == [
        *("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "128"),
        *("--compilation-config", '{"level": 0}'),
    ]


def test_the_engine_runs_where_vllms_server_has_it_and_else_with_the_same_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    shared = servers.environment({"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    assert shared["OMP_NUM_THREADS"] == "1"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in shared
    assert "PATH" in shared


def test_a_server_that_does_not_end_when_asked_ends_all_the_same_and_its_children_too() -> None:
    child = "import time; time.sleep(600)"
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        servers.end_with_children(process, stop_s=0.2)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert process.returncode == -9


def test_memory_is_that_of_the_process_that_listens_and_of_its_children() -> None:
    child = "import time; held = b'x' * (60 << 20); print(flush=True); time.sleep(600)"
    listens = (
        "import socket, subprocess, sys; at = socket.create_server(('127.0.0.1', 0));"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
        "child.stdout.readline(); print(at.getsockname()[1], flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", listens], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        held = servers.memory_bytes(url)
        servers.end_with_children(process, stop_s=0.2)
    assert 60 * 2**20 < held < 120 * 2**20
    with pytest.raises(LookupError, match="listens at"):
        servers.memory_bytes(url)
