"""What stands in for vLLM's modules of exceptions where backends are tested without it."""

import sys
import types

import pytest


class VLLMClientError(ValueError):
    """The caller's fault."""


class EngineDeadError(Exception):
    """The engine core is gone."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have imports find it for the length of a test."""
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, error in (("vllm.exceptions", VLLMClientError), ("vllm.v1.engine.exceptions", EngineDeadError)):
        module = types.ModuleType(name)
        setattr(module, error.__name__, error)
        monkeypatch.setitem(sys.modules, name, module)
