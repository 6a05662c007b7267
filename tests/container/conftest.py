"""The image that all tests here share: built once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.models import embedded
from tests.container.images import Store, build, store
from tests.engine.models import tiny_model


@pytest.fixture(scope="session")
def images() -> Iterator[Store]:
    """A store that holds the `cpu` image."""
    with store() as opened:
        build(opened, "cpu")
        yield opened


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to mount at /models: `tiny` is a model that everyone may read."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)
    return _copy(tiny_model(), folder / "tiny").parent


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to mount at /cache, which anyone may write, with the embedded model in it to save its preparation."""
    built = embedded.prepare()
    folder = tmp_path_factory.mktemp("cache")
    _copy(built, folder / "batchserve" / "models" / built.name)
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o777 if place.is_dir() else 0o666)
    return folder


def _copy(model: Path, target: Path) -> Path:
    """A copy that other users may read; the fixture's folders are private."""
    shutil.copytree(model, target)
    target.chmod(0o755)
    for file in target.iterdir():
        file.chmod(0o644)
    return target
