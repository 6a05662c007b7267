"""Starts that fail: soon, and with one line that says what to change."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from app.backends.args import VLLMOfflineArgs
from app.backends.offline import VLLMOfflineBackend
from app.errors import StartError
from tests.engine.inline import TheEngine
from tests.engine.models import variant
from tests.engine.process import ServiceProcess, service_process

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


def one_line(service: ServiceProcess) -> str:
    """The line that the failed start ends with."""
    assert service.wait_exit(QUICKLY_S) not in (0, None)
    service.wait_gone()
    lines = [line for line in service.err.splitlines() if line.startswith("batchserve: cannot start: ")]
    assert len(lines) == 1, service.err[-3000:]
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
        assert "Traceback" not in service.err + service.out


async def test_too_little_memory_in_a_process_of_the_engine_ends_with_one_line(
    tmp_path: Path, tiny_model: Path
) -> None:
    with service_process(tmp_path, tiny_model, "separate", kv_cache_memory_bytes=1000) as service:
        line = await asyncio.to_thread(one_line, service)
        assert "kv_cache_memory_bytes" in line


async def test_a_port_that_is_taken_is_known_at_once(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        with service_process(tmp_path, tiny_model, "inline", "--port", str(port)) as service:
            line = await asyncio.to_thread(one_line, service)
        assert str(port) in line
        assert "--port" in line
        assert time.monotonic() - begun < 10
