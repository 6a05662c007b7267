"""The service as a real process with real models, and the load generators' own environment."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.engine import models
from tests.engine.process import ServiceProcess, service_process, the_python_service

INSTALL_S = 600.0


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of a random two-layer model; the tokenizer is the embedded model's."""
    return models.tiny_model()


@pytest.fixture(scope="session")
def guidellm() -> Path:
    """GuideLLM's program, in the environment that its lock describes."""
    made = subprocess.run(
        [ROOT / "scripts" / "guidellm-env"], capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return Path(made.stdout.strip())


@pytest.fixture(scope="module")
def tiny_service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServiceProcess]:
    """The tiny model: what is measured is the service and its clients."""
    with service_process(
        tmp_path_factory.mktemp("tiny"), tiny_model, "inline", "--served-model-name", "tiny"
    ) as service:
        yield service.wait_ready()


@pytest.fixture(scope="session")
def streaming_service(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> ServiceProcess:
    """The same model behind the backend that streams; the one that the tests of the engine use as well."""
    return the_python_service(pytestconfig, tmp_path_factory.mktemp("python"), tiny_model)
