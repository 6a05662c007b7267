"""What the service fills in beside ``vllm_config``; a small stand-in for vLLM's ``EngineArgs``."""

import dataclasses
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from app.backends import engine_args
from app.backends.args import VLLMOfflineArgs
from app.backends.engine_args import EngineArguments
from app.backends.places import is_inline
from app.errors import StartError


def make_args(**values: Any) -> VLLMOfflineArgs:
    return VLLMOfflineArgs.model_validate({"model": "m", "served_model_name": "served", **values})


class ModelConfig:
    max_model_len = 8192

    def get_total_num_kv_heads(self) -> int:
        return 3

    def get_head_size(self) -> int:
        return 64

    def get_total_num_hidden_layers(self) -> int:
        return 30


@dataclasses.dataclass
class EngineArgs:
    model: str = ""
    served_model_name: Any = None
    disable_log_stats: bool = True
    dtype: str = "auto"
    enforce_eager: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    structured_outputs_config: Any = None

    def create_model_config(self) -> ModelConfig:
        if self.model == "no such model":
            raise OSError("no\n  such repository")
        return ModelConfig()


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    arg_utils = types.ModuleType("vllm.engine.arg_utils")
    arg_utils.EngineArgs = EngineArgs  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", arg_utils)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(
    ("engine_process", "config", "is_cpu", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {"tensor_parallel_size": 1}, True, True),
        ("auto", {"tensor_parallel_size": 2}, True, False),
        ("auto", {"pipeline_parallel_size": 2}, True, False),
        ("auto", {"data_parallel_size": 2}, True, False),
        ("auto", {}, False, False),
        ("inline", {}, True, True),
        ("inline", {}, False, True),
        ("inline", {"tensor_parallel_size": 2}, True, True),
        ("separate", {}, True, False),
        ("separate", {}, False, False),
    ],
)
def test_where_the_engine_core_runs(engine_process: str, config: dict[str, Any], is_cpu: bool, expected: bool) -> None:
    assert is_inline(make_args(engine_process=engine_process, vllm_config=config), is_cpu=is_cpu) is expected


# --- names ---


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_model_length": 1}, r"has no 'max_model_length'; near it: .*max_model_len"),
        ({"nonsense": 1}, r"has no 'nonsense'$"),
        ({"model": "x"}, r"model belongs to the service: set it with --model"),
        ({"served_model_name": "x"}, r"served_model_name belongs to the service"),
        ({"disable_log_stats": True}, r"disable_log_stats belongs to the service: .*statistics"),
    ],
)
def test_unknown_and_owned_keys_are_refused_by_name(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(StartError, match=expected):
        engine_args.check_names(config)


def test_known_keys_pass() -> None:
    engine_args.check_names({"dtype": "float32", "max_num_seqs": 8})


# --- what is filled in ---


def test_on_a_cpu_what_is_left_open_is_filled_in() -> None:
    built = engine_args.build(make_args(vllm_config={"dtype": "float32"}), {}, is_cpu=True)

    per_request = (2048 + 128) * 2 * 30 * 3 * 64 * 2
    assert built.values.pop("kv_cache_memory_bytes") <= 32 * per_request
    assert built.values == {
        "model": "m",
        "served_model_name": ["served"],
        "disable_log_stats": False,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    assert built.sources == {
        "structured_outputs_config": "service",
        "dtype": "vllm_config",
        "enforce_eager": "service",
        "max_model_len": "service",
        "kv_cache_memory_bytes": "service",
    }
    assert built.is_inline


def test_on_a_gpu_the_engines_own_defaults_hold() -> None:
    built = engine_args.build(make_args(), {}, is_cpu=False)

    assert built.values.keys() == {"model", "served_model_name", "disable_log_stats", "structured_outputs_config"}
    assert built.sources == {"structured_outputs_config": "service"}
    assert not built.is_inline


@pytest.mark.parametrize("is_cpu", [True, False])
def test_structured_output_has_one_backend_which_the_first_request_does_not_choose(is_cpu: bool) -> None:
    built = engine_args.build(make_args(), {}, is_cpu=is_cpu)

    assert built.describe()["structured_outputs_config"] == {"value": {"backend": "xgrammar"}, "source": "service"}


def test_a_configuration_of_structured_output_is_kept_as_it_is_given() -> None:
    config = {"structured_outputs_config": {"backend": "guidance"}}
    built = engine_args.build(make_args(vllm_config=config), {}, is_cpu=True)

    assert built.describe()["structured_outputs_config"] == {
        "value": {"backend": "guidance"},
        "source": "vllm_config",
    }


def test_a_short_context_of_the_model_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "max_model_len", 512)

    assert engine_args.build(make_args(), {}, is_cpu=True).values["max_model_len"] == 512


@pytest.mark.parametrize("asked", [-1, None])
def test_a_context_that_is_left_to_vllm_gets_a_cache_for_the_models_own(
    monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    monkeypatch.setattr("app.machine.available_memory", lambda: 1 << 40)

    built = engine_args.build(make_args(vllm_config={"max_model_len": asked}), {}, is_cpu=True)
    whole = engine_args.build(make_args(vllm_config={"max_model_len": 8192}), {}, is_cpu=True)

    assert built.values["kv_cache_memory_bytes"] == whole.values["kv_cache_memory_bytes"]


def test_whoever_sizes_the_cache_otherwise_is_left_alone() -> None:
    built = engine_args.build(make_args(vllm_config={"gpu_memory_utilization": 0.5}), {}, is_cpu=True)

    assert "kv_cache_memory_bytes" not in built.values


def test_too_little_memory_is_told_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.machine.available_memory", lambda: 1 << 20)

    with pytest.raises(StartError, match=r'out of memory: .*--memory.*"max_model_len": 512'):
        engine_args.build(make_args(), {}, is_cpu=True)


def test_the_cache_fits_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.machine.available_memory", lambda: 1 << 32)

    built = engine_args.build(make_args(batch_size=256), {}, is_cpu=True)

    assert built.values["kv_cache_memory_bytes"] == 1 << 31


def test_the_cache_leaves_room_for_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within a container's limit the half would be too much."""
    monkeypatch.setattr("app.machine.available_memory", lambda: 2048 << 20)
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        file.truncate(1000 << 20)

    built = engine_args.build(make_args(batch_size=256), {}, is_cpu=True, folder=tmp_path)

    assert 0 < built.values["kv_cache_memory_bytes"] <= (2048 - 1000 - 64) << 20


def test_a_model_that_cannot_be_loaded_is_one_line() -> None:
    with pytest.raises(
        StartError, match=r"'no such model' cannot be loaded with this vllm_config: .*no such repository"
    ) as caught:
        engine_args.model_config({"model": "no such model"})
    assert "\n" not in str(caught.value)


def test_the_callers_config_is_not_changed() -> None:
    config = {"dtype": "float32"}
    engine_args.build(make_args(vllm_config=config), {}, is_cpu=True)

    assert config == {"dtype": "float32"}


def test_a_value_is_filled_in_only_where_none_is() -> None:
    engine = EngineArguments({"a": 1}, {"a": "vllm_config"}, {"OMP_NUM_THREADS": ("1", "environment")}, True)
    engine.fill("a", 2)
    engine.fill("b", None)
    engine.fill("b", 3)

    assert engine.values == {"a": 1, "b": None}
    assert engine.describe() == {
        "a": {"value": 1, "source": "vllm_config"},
        "b": {"value": None, "source": "service"},
        "OMP_NUM_THREADS": {"value": "1", "source": "environment"},
    }


# --- variables ---


def test_variables_of_a_cpu_are_set_unless_somebody_has_set_them() -> None:
    os.environ.pop("TORCH_COMPILE_DISABLE", None)
    os.environ.update(OMP_NUM_THREADS="7", VLLM_ENABLE_V1_MULTIPROCESSING="1")

    environment = engine_args.prepare_environment(make_args(), is_cpu=True, is_offline=False)

    assert environment["OMP_NUM_THREADS"] == ("7", "environment")
    assert environment["TORCH_COMPILE_DISABLE"] == ("1", "service")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == ("0", "service")
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_gpu_gets_no_variables_of_a_cpu() -> None:
    environment = engine_args.prepare_environment(make_args(), is_cpu=False, is_offline=False)

    assert not environment.keys() & engine_args.CPU_ENVIRONMENT.keys()
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == ("1", "service")


def test_whose_files_are_at_hand_needs_no_network() -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)

    asking = engine_args.prepare_environment(make_args(), is_cpu=True, is_offline=False)
    assert "HF_HUB_OFFLINE" not in asking
    environment = engine_args.prepare_environment(make_args(), is_cpu=True, is_offline=True)
    assert environment["HF_HUB_OFFLINE"] == ("1", "service")
