"""Services that several tests share. What a test changes for good, it does to a service of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.service.support import Caller, Process, service, serving


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    """A ready service in this process: windows of 8, a fake model that takes no time."""
    async with service() as caller:
        yield caller


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One service process for all tests that leave it as it was: windows of 8, 1 ms a token."""
    with serving(tmp_path_factory.mktemp("shared"), {"step_ms": 1}) as process:
        yield process


@pytest.fixture
async def remote(shared: Process) -> AsyncIterator[Caller]:
    """A caller of the shared process over real sockets."""
    async with shared.caller() as caller:
        yield caller


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a service process of one test keeps its output."""
    return tmp_path / "service"
