"""The stages of the checkup over stand-ins for vLLM; with real vLLM in ``tests/engine/test_doctor.py``."""

import dataclasses
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from app.backends import checkup
from app.backends.args import VLLMOfflineArgs
from app.backends.checkup import Checkup
from app.backends.offline import VLLMOfflineBackend
from app.errors import StartError


@dataclasses.dataclass
class EngineArgs:
    model: str = ""
    disable_log_stats: bool = True


@dataclasses.dataclass
class RequestStateStats:
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the modules that the stages import."""
    modules: dict[str, Any] = {
        "torch": {"__version__": "2.13.0+cpu"},
        "vllm": {"LLM": object},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(device_type="cpu")},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.stats": {"RequestStateStats": RequestStateStats},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(checkup, "is_cpu_build", lambda: True)
    monkeypatch.setattr("app.backends.engine_args.prepare_environment", lambda *_, **__: {})
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    return modules


@pytest.fixture
def stages() -> Checkup:
    return Checkup(VLLMOfflineArgs(model="m", served_model_name="served"), is_offline=True)


def test_what_can_be_imported_is_well(stages: Checkup) -> None:
    assert stages.run(checkup.VLLM).status == "ok"


def test_an_import_that_fails_is_told_in_one_line(stages: Checkup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    finding = stages.run(checkup.VLLM)
    assert finding.status == "fail"
    assert "vllm" in finding.found
    assert "scripts/setup" in finding.advice


def test_another_torch_in_front_of_the_installed_one_is_a_warning(
    stages: Checkup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["torch"], "__version__", "2.12.0+cpu")

    assert "2.12.0" in stages.run(checkup.VLLM).found


def test_statistics_can_be_turned_on_and_are_whole(stages: Checkup) -> None:
    assert stages.run(checkup.STATISTICS).status == "ok"


def test_statistics_that_cannot_be_turned_on(stages: Checkup, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.make_dataclass("EngineArgs", ["model"])
    monkeypatch.setattr(sys.modules["vllm.engine.arg_utils"], "EngineArgs", other)

    finding = stages.run(checkup.STATISTICS)
    assert finding.status == "fail"
    assert "disable_log_stats" in finding.found


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RequestStateStats)])
def test_statistics_without_what_the_timings_need(stages: Checkup, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    names = [item.name for item in dataclasses.fields(RequestStateStats) if item.name != field]
    other = dataclasses.make_dataclass("RequestStateStats", [(name, float, 0.0) for name in names])
    monkeypatch.setattr(sys.modules["vllm.v1.metrics.stats"], "RequestStateStats", other)

    finding = stages.run(checkup.STATISTICS)
    assert finding.status == "fail"
    assert field in finding.found


def test_a_reason_of_a_start_becomes_what_was_found_and_what_to_do(
    stages: Checkup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise StartError("vllm_config: no such key 'x'; near it: y")

    monkeypatch.setattr(VLLMOfflineBackend, "prepare_arguments", fail)

    finding = stages.run(checkup.ARGUMENTS)
    assert (finding.status, finding.found, finding.advice) == ("fail", "vllm_config: no such key 'x'", "near it: y")


@pytest.mark.parametrize(
    ("has_template", "bos", "status", "words"),
    [
        (True, (1, 1), "ok", "1 BOS"),
        (True, (0, 0), "ok", "no BOS"),
        (True, (2, 1), "warn", "begins with 2 BOS tokens"),
        (True, (0, 1), "warn", "without the BOS of a text"),
        (False, (0, 0), "warn", "`messages` will be refused"),
    ],
)
def test_the_chat_template_and_its_bos(
    stages: Checkup,
    monkeypatch: pytest.MonkeyPatch,
    has_template: bool,
    bos: tuple[int, int],
    status: str,
    words: str,
) -> None:
    monkeypatch.setattr(VLLMOfflineBackend, "prepare_prompts", lambda self: None)
    conversations = SimpleNamespace(is_possible=has_template, bos_repeats=lambda: bos)
    monkeypatch.setattr(VLLMOfflineBackend, "conversations", conversations, raising=False)
    monkeypatch.setattr(VLLMOfflineBackend, "info", lambda self: {"request_format": "default-template"})

    finding = stages.run(checkup.TEMPLATE)
    assert finding.status == status
    assert words in finding.found


class Engine(VLLMOfflineBackend):
    """Opens and answers without vLLM; the test says how the generation goes."""

    closed = 0

    def _open(self) -> None:
        """Nothing to build."""

    def _close(self) -> None:
        Engine.closed += 1


@pytest.mark.parametrize("goes_well", [True, False])
def test_the_engine_is_proved_by_a_generation_and_closed(
    stages: Checkup, monkeypatch: pytest.MonkeyPatch, goes_well: bool
) -> None:
    async def prove(_: object) -> None:
        if not goes_well:
            raise StartError("vLLM returns no statistics for a request, so there are no timings")

    monkeypatch.setattr(Engine, "closed", 0)
    monkeypatch.setattr(Engine, "_prove", prove)
    monkeypatch.setattr(checkup, "_backend", lambda args: Engine(args))

    finding = stages.run(checkup.ENGINE)
    assert finding.status == ("ok" if goes_well else "fail")
    assert goes_well or "no statistics" in finding.found
    assert Engine.closed == 1
