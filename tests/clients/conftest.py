"""One service with a key for all generated clients, one with a real engine for OpenAI's SDK; each client made once."""

import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from tests.clients.generators import python_client
from tests.clients.support import KEY
from tests.engine.models import tiny_model
from tests.engine.process import ServiceProcess, service_process
from tests.service.support import LOCAL, Process, serving

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{{ (message.content or '') | upper if shout else message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Short, and it has a variable of its own: `shout`."""


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The fake backend: the prompt in capitals; a prompt with BOOM fails in its engine."""
    fake = {"step_ms": 1, "faults": {"fail_text": "BOOM"}}
    with serving(tmp_path_factory.mktemp("service"), fake, api_key=KEY) as process:
        yield process


@pytest.fixture(scope="session", params=["vllm_offline", "vllm_python"])
def backend(request: pytest.FixtureRequest) -> str:
    """One backend after the other: a client is to notice nothing but that tokens are streamed."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def engine_service(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Iterator[ServiceProcess]:
    """A real engine with a random model behind a key, with a parser of tool calls and a queue of eight."""
    settings = {
        "backend": backend,
        "served-model-name": "tiny",
        "api-key": KEY,
        "tool-call-parser": "hermes",
        "request-format": TEMPLATE,
        "batch-size": "4",
        "max-queue-requests": "8",
        "max-batch-requests": "8",
    }
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}  # a random model loves white space
    folder, config = tmp_path_factory.mktemp("engine"), {"structured_outputs_config": compact, "max_num_seqs": 4}
    with service_process(folder, tiny_model(), "auto", *options, **config) as service:
        yield service.wait_ready()


@pytest.fixture
def sdk(engine_service: ServiceProcess) -> Iterator[openai.OpenAI]:
    """Without the SDK's own retries: what fails is to be seen."""
    http = openai.DefaultHttpxClient(timeout=120, **LOCAL)
    with openai.OpenAI(base_url=f"{engine_service.url}/v1", api_key=KEY, max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture
async def async_sdk(engine_service: ServiceProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(timeout=120, **LOCAL)
    async with openai.AsyncOpenAI(
        base_url=f"{engine_service.url}/v1", api_key=KEY, max_retries=0, http_client=http
    ) as client:
        yield client


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The generated Python package, imported."""
    folder: Path = python_client(tmp_path_factory.mktemp("python") / "batchserve_client")
    sys.path.insert(0, str(folder.parent))
    yield importlib.import_module(folder.name)
    sys.path.remove(str(folder.parent))


@pytest.fixture(scope="session")
def models(generated: ModuleType) -> ModuleType:
    return importlib.import_module(f"{generated.__name__}.models")


@pytest.fixture(scope="session")
def api(generated: ModuleType) -> Any:
    """An operation's module by its name."""
    names = {"work": ("generate", "batch"), "openai": ("models", "model", "completions", "chat_completions")}
    tags = {name: tag for tag, tagged in names.items() for name in tagged}
    return lambda name: importlib.import_module(f"{generated.__name__}.api.{tags.get(name, 'state')}.{name}")
