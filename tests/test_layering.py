"""Dependencies run one way, vLLM stays behind its border, and importing starts nothing."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import app

APP = Path(app.__file__).parent

LAYERS = (
    {"__main__"},
    {"cli", "doctor"},
    {"server"},
    {"main"},
    {"api"},
    {"batching"},
    {"backends"},
    {"media", "prompts", "request", "lifecycle", "metrics", "models"},
    {"settings", "errors", "timings", "log", "finding", "machine", "listening"},
)
"""From the top down: a module imports from its own layer and from those below."""


def modules() -> list[str]:
    names = (path.relative_to(APP.parent).with_suffix("") for path in sorted(APP.rglob("*.py")))
    return [".".join(name.parts).removesuffix(".__init__") for name in names]


def source(module: str) -> Path:
    path = APP.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(module: str) -> Iterator[str]:
    """All that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(module: str) -> int:
    """The number of the layer; 0 is the top."""
    part = module.split(".")[1]
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


@pytest.mark.parametrize("module", [name for name in modules() if name != "app"])
def test_a_module_imports_only_from_its_own_layer_and_those_below(module: str) -> None:
    above = [name for name in imported(module) if name.startswith("app.") and layer(name) < layer(module)]

    assert above == []


def test_the_package_itself_imports_nothing() -> None:
    assert list(imported("app")) == []


def test_only_the_backends_import_vllm() -> None:
    importers = {module for module in modules() if any(name.split(".")[0] == "vllm" for name in imported(module))}

    assert importers
    assert all(module.startswith("app.backends.") for module in importers)


def test_only_the_settings_read_the_environment() -> None:
    readers = {
        module
        for module in modules()
        for node in ast.walk(ast.parse(source(module).read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    }

    assert readers == {"app.settings"}


def test_importing_every_module_starts_nothing_and_loads_neither_vllm_nor_torch() -> None:
    script = f"""
import importlib, json, multiprocessing, sys, threading
for name in {modules()!r}:
    importlib.import_module(name)
heavy = [name for name in ("vllm", "torch", "transformers", "gguf") if name in sys.modules]
threads = [thread.name for thread in threading.enumerate()]
print(json.dumps([heavy, threads, len(multiprocessing.active_children())]))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=APP.parent, timeout=60)

    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [[], ["MainThread"], 0]
