"""Real engines, few of them: one in the test process, and services as processes where that is what is tested."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from app.models import embedded
from app.settings import Settings
from tests.engine import models
from tests.engine.inline import Inline, running
from tests.engine.process import ServiceProcess, service_process

# Read by vLLM and torch on being imported, which happens when the first engine is built.
os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
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
async def inline(tiny_model: Path) -> AsyncIterator[Inline]:
    """The one service of the session whose engine lives in the test process."""
    settings = Settings(
        model=str(tiny_model), served_model_name="tiny", engine_process="inline", vllm_config=ENGINE_CONFIG
    )
    async with running(settings) as service:
        yield service


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
