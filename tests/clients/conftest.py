"""One service with a key for all generated clients, and the clients, each made once."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.clients.generators import python_client
from tests.clients.support import KEY
from tests.service.support import Process, serving


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The fake backend: the prompt in capitals; a prompt with BOOM fails in its engine."""
    fake = {"step_ms": 1, "faults": {"fail_text": "BOOM"}}
    with serving(tmp_path_factory.mktemp("service"), fake, api_key=KEY) as process:
        yield process


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
    tag = {"generate": "work", "batch": "work"}
    return lambda name: importlib.import_module(f"{generated.__name__}.api.{tag.get(name, 'state')}.{name}")
