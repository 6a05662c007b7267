"""Real engines, few of them: one in the test process, and services as processes where that is what is tested."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from app.models import embedded
from app.settings import Settings
from tests.engine import models
from tests.engine.inline import Inline, TheEngine
from tests.engine.process import Remote, ServiceProcess, rolling_service, service_process, the_python_service

# Read by vLLM and torch on being imported, which happens when the first engine is built.
os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_MAX_STOP_STRINGS": "64",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
)

ENGINE_CONFIG = {
    # Exact enough for a greedy text not to depend on the neighbours in its window.
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_model_len": 1024,
    # Small enough for twelve requests of some length to push each other out.
    "block_size": 32,
    "num_gpu_blocks_override": 36,
}


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return models.tiny_model()


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    return embedded.prepare()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def the_engine(tiny_model: Path) -> AsyncIterator[TheEngine]:
    values = {"model": str(tiny_model), "served_model_name": "tiny", "engine_process": "inline"}
    engine = TheEngine(Settings.model_validate({**values, "vllm_config": ENGINE_CONFIG}))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def inline(the_engine: TheEngine) -> Inline:
    """The service of the session whose engine lives in the test process."""
    return await the_engine.service()


@pytest_asyncio.fixture(loop_scope="session")
async def no_engine(the_engine: TheEngine) -> None:
    """No engine in the test process: the test builds its own."""
    await the_engine.close()


@pytest.fixture(scope="module")
def embedded_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """The embedded model, as a user starts it."""
    folder = tmp_path_factory.mktemp("embedded")
    with service_process(folder, "embedded:smollm2-135m", "inline") as service:
        yield service.wait_ready()


@pytest.fixture(scope="module")
def separate_service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServiceProcess]:
    """The tiny model with the engine core in a child process."""
    with service_process(tmp_path_factory.mktemp("separate"), tiny_model, "separate") as service:
        yield service.wait_ready()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def python(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> AsyncIterator[Remote]:
    """The tiny model behind the streaming backend, with exact arithmetic; shared by all tests of a run."""
    service = the_python_service(pytestconfig, tmp_path_factory.mktemp("python"), tiny_model)
    async with service.client() as client:
        yield Remote(client, service)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rolling(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Remote]:
    """The tiny model behind `vllm_offline` with `scheduling: rolling`; shared by all tests of a run."""
    with rolling_service(tmp_path_factory.mktemp("rolling"), tiny_model, "--tool-call-parser", "hermes") as service:
        async with service.wait_ready().client() as client:
            yield Remote(client, service, "vllm_offline")
