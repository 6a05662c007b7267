"""Starts that fail: soon, with one line that says what to change, and one that points to the doctor."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app.backends.args import VLLMOfflineArgs
from app.backends.offline import VLLMOfflineBackend
from app.errors import StartError
from tests.engine.inline import TheEngine
from tests.engine.limits import can_make_memory_cgroups, memory_cgroup
from tests.engine.models import variant
from tests.engine.process import CLEAN_ENVIRONMENT, PROGRAM, START_S, ServiceProcess, service_process

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

QUICKLY_S = 60.0


async def failure(model: Path | str, **args: Any) -> str:
    """The one line with which opening the backend fails."""
    values = {"kind": "vllm_offline", "model": str(model), "served_model_name": "served", "engine_process": "inline"}
    backend = VLLMOfflineBackend(VLLMOfflineArgs.model_validate({**values, **args}))
    begun = time.monotonic()
    try:
        with pytest.raises(StartError) as caught:
            await backend.open()
    finally:
        await backend.close()
    assert time.monotonic() - begun < QUICKLY_S
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 700
    return message


@pytest.mark.usefixtures("no_engine")
class TestOpening:
    """Without a process: what ``open`` raises."""

    async def test_no_such_folder(self, tmp_path: Path) -> None:
        message = await failure(tmp_path / "nowhere")
        assert str(tmp_path / "nowhere") in message
        assert "Hugging Face id" in message

    async def test_no_such_id(self) -> None:
        assert "no-such-owner/no-such-model" in await failure("no-such-owner/no-such-model")

    async def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        assert "config.json" in await failure(tmp_path)

    async def test_a_model_without_weights(self, tiny_model: Path, tmp_path: Path) -> None:
        model = variant(tiny_model, tmp_path / "model")
        (model / "model.safetensors").unlink()
        assert "weights" in (await failure(model)).lower()

    async def test_a_config_that_is_no_json(self, tiny_model: Path, tmp_path: Path) -> None:
        model = variant(tiny_model, tmp_path / "model")
        (model / "config.json").write_text("{")
        assert str(model) in await failure(model)

    @pytest.mark.parametrize(
        ("key", "near"),
        [("max_model_length", "max_model_len"), ("gpu_memory_utilisation", "gpu_memory_utilization")],
    )
    async def test_an_unknown_key_is_named_with_its_near_matches(self, tiny_model: Path, key: str, near: str) -> None:
        message = await failure(tiny_model, vllm_config={key: 1})
        assert key in message
        assert near in message

    @pytest.mark.parametrize("key", ["model", "disable_log_stats", "served_model_name"])
    async def test_a_key_that_the_service_owns_is_refused(self, tiny_model: Path, key: str) -> None:
        """So the statistics cannot be turned off."""
        message = await failure(tiny_model, vllm_config={key: True})
        assert f"vllm_config: {key} belongs to the service" in message

    @pytest.mark.parametrize(
        ("config", "word"),
        [
            ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
            ({"kv_cache_memory_bytes": 10**15}, "kv_cache_memory_bytes"),
            ({"max_model_len": 10**9}, "max_model_len"),
            ({"gpu_memory_utilization": 0.000001}, "gpu_memory_utilization"),
        ],
        ids=str,
    )
    async def test_too_little_memory_says_what_to_lower_or_raise(
        self, tiny_model: Path, config: dict[str, Any], word: str
    ) -> None:
        assert word in await failure(tiny_model, vllm_config=config)

    @pytest.mark.parametrize("config", [{"max_model_len": "many"}, {"dtype": "float7"}, {"max_num_seqs": 0}], ids=str)
    async def test_a_wrong_value_is_named(self, tiny_model: Path, config: dict[str, Any]) -> None:
        message = await failure(tiny_model, vllm_config=config)
        assert "vllm_config" in message

    async def test_a_template_that_was_asked_for_and_is_not_there(self, tiny_model: Path, tmp_path: Path) -> None:
        model = variant(tiny_model, tmp_path / "model", template="")
        message = await failure(model, request_format="default-template")
        assert "request_format=plain" in message
        assert "template file" in message

    async def test_a_failed_start_does_not_hinder_the_next(self, the_engine: TheEngine) -> None:
        await (await the_engine.service()).assert_serves()


# --- as a user sees it ---

needs_memory_cgroups = pytest.mark.skipif(
    not can_make_memory_cgroups(), reason="memory cgroups (version 1) cannot be made by this user"
)
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="unshare is not installed, or may not be used"
)


def without_roots_rights(options: list[str], command: str = "serve") -> list[Any]:
    """A command as a user who may read only what the modes of the files allow; root may read all."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    return [*drop, PROGRAM, command, "--port", "0", *options]


def run_program(words: list[Any], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=QUICKLY_S,
        env=CLEAN_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | environment,
    )


def one_line_of(words: list[Any], **environment: str) -> str:
    """The line with which a start ends that has not come to building an engine."""
    done = run_program(words, **environment)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    reason, pointer = [line for line in done.stderr.splitlines() if line.startswith("batchserve: ")]
    assert "`batchserve doctor`" in pointer
    assert "importing vLLM" not in done.stderr
    return reason


def one_line(service: ServiceProcess) -> str:
    """The line that the failed start ends with."""
    assert service.wait_exit(QUICKLY_S) not in (0, None)
    service.wait_gone()
    lines = [line for line in service.err.splitlines() if line.startswith("batchserve: ")]
    assert len(lines) == 2, service.err[-3000:]
    assert lines[0].startswith("batchserve: cannot start: ")
    assert "`batchserve doctor`" in lines[1]
    assert "Traceback" not in service.err + service.out
    return lines[0]


@pytest.mark.parametrize(
    ("model", "config", "word"),
    [
        ("no-such-owner/no-such-model", {}, "no-such-owner/no-such-model"),
        ("tiny", {"max_model_length": 5}, "max_model_len"),
    ],
    ids=["no such model", "unknown key"],
)
async def test_the_program_ends_with_one_line(
    tmp_path: Path, tiny_model: Path, model: str, config: dict[str, Any], word: str
) -> None:
    with service_process(tmp_path, tiny_model if model == "tiny" else model, "auto", **config) as service:
        assert word in await asyncio.to_thread(one_line, service)


async def test_too_little_memory_in_a_process_of_the_engine_ends_with_one_line(
    tmp_path: Path, tiny_model: Path
) -> None:
    with service_process(tmp_path, tiny_model, "separate", kv_cache_memory_bytes=1000) as service:
        assert service.wait_exit(START_S) == 1
        (line,) = [line for line in service.err.splitlines() if line.startswith("batchserve: cannot start: ")]
        assert "kv_cache_memory_bytes" in line


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
async def test_a_model_that_may_not_be_read_is_told_before_vllm_is_imported(
    tmp_path: Path, tiny_model: Path, name: str
) -> None:
    model = variant(tiny_model, tmp_path / "model")
    content = (model / name).read_bytes()
    (model / name).unlink()
    (model / name).write_bytes(content)
    (model / name).chmod(0)
    begun = time.monotonic()

    line = await asyncio.to_thread(one_line_of, without_roots_rights(["--model", str(model)]))

    assert f"may not read {model / name}" in line
    assert f"user id {os.geteuid()}" in line
    assert time.monotonic() - begun < 15


async def test_an_id_without_a_network_is_told_soon(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    begun = time.monotonic()

    words = [PROGRAM, "serve", "--port", "0", "--model", "owner/model"]
    line = await asyncio.to_thread(one_line_of, words, **environment)

    assert "does not answer" in line
    assert "HF_HOME" in line
    assert time.monotonic() - begun < 30


@needs_memory_cgroups
@pytest.mark.parametrize(("limit_mib", "engine_process"), [(300, "inline"), (600, "inline"), (1200, "separate")])
async def test_too_little_memory_in_a_container_is_told_instead_of_being_killed(
    tiny_model: Path, limit_mib: int, engine_process: str
) -> None:
    words = [PROGRAM, "serve", "--port", "0", "--model", str(tiny_model), "--engine-process", engine_process]
    with memory_cgroup(limit_mib) as enter:
        line = await asyncio.to_thread(one_line_of, [*enter, *words])

    assert "out of memory: at least" in line
    assert f"the container's limit is {limit_mib:,} MiB" in line
    assert "docker run --memory" in line


@needs_memory_cgroups
async def test_the_key_value_cache_keeps_to_the_containers_limit(tiny_model: Path) -> None:
    """It would take gigabytes of the machine's memory, and half of the limit is too much beside vLLM."""
    words = [PROGRAM, "doctor", "--port", "0", "--model", tiny_model, "--batch-size", "8192"]
    with memory_cgroup(1050) as enter:
        done = await asyncio.to_thread(run_program, [*enter, *words])

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    cache = re.search(r"kv_cache_memory_bytes=(\d+)", done.stdout)
    assert cache, done.stdout
    assert 10 << 20 < int(cache[1]) < 250 << 20


@needs_mounts
async def test_too_little_shared_memory_is_told_before_vllm_is_imported(tiny_model: Path) -> None:
    mount = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "-"]
    words = [PROGRAM, "serve", "--port", "0", "--model", str(tiny_model), "--engine-process", "separate"]

    line = await asyncio.to_thread(one_line_of, [*mount, *words])

    assert "/dev/shm has 64 MiB free" in line
    assert "--shm-size=1g" in line


async def test_without_a_folder_for_temporary_files_one_line_says_so(tiny_model: Path, tmp_path: Path) -> None:
    """A start in an environment in which Python finds none."""
    script = f"""
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: [{str(tmp_path / "gone")!r}]
from app.cli import main
sys.exit(main(["serve", "--port", "0", "--model", {str(tiny_model)!r}]))
"""
    line = await asyncio.to_thread(one_line_of, [sys.executable, "-c", script])

    assert "TMPDIR" in line


async def test_a_port_that_is_taken_is_known_at_once(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        with service_process(tmp_path, tiny_model, "inline", "--port", str(port)) as service:
            line = await asyncio.to_thread(one_line, service)
        assert str(port) in line
        assert "--port" in line
        assert time.monotonic() - begun < 10
