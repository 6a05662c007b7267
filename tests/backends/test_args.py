"""What a backend is built from."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.backends.args import FakeArgs, VLLMOfflineArgs, parse_args
from app.errors import StartError

NEEDED = {"model": "m", "served_model_name": "m"}


def test_the_kind_decides_which_arguments_there_are() -> None:
    offline = parse_args({"kind": "vllm_offline", **NEEDED, "vllm_config": {"dtype": "float32"}})
    fake = parse_args({"kind": "fake", **NEEDED, "step_ms": 1})

    assert isinstance(offline, VLLMOfflineArgs)
    assert isinstance(fake, FakeArgs)
    assert offline.vllm_config == {"dtype": "float32"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "vllm"}, r"^backend: 'vllm' is unknown; there are .*'vllm_offline'.*'fake'"),
        ({"kind": "fake", "step": 1}, r"^fake_config\.step: Extra inputs are not permitted"),
        ({"kind": "fake", "step_ms": -1}, r"^fake_config\.step_ms: .*greater than or equal to 0"),
        ({"kind": "fake", "faults": {"die": "x"}}, r"^fake_config\.faults\.die: Extra inputs"),
        ({"kind": "fake", "max_model_len": 1}, r"^fake_config\.max_model_len: "),
        ({"kind": "fake", "batch_size": 0}, r"^batch_size: "),
        ({"kind": "vllm_offline", "engine_process": "thread"}, r"^engine_process: "),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_names_the_argument(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(StartError, match=expected) as caught:
        parse_args({**NEEDED, **values})
    assert "\n" not in str(caught.value)


def test_only_a_format_that_somebody_set_is_asked_for() -> None:
    assert not parse_args({"kind": "fake", **NEEDED}).is_template_asked_for
    assert parse_args({"kind": "fake", **NEEDED, "request_format": "default-template"}).is_template_asked_for


def test_arguments_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_args({"kind": "fake", **NEEDED}).batch_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("count", [0, -5, True, 1.5, float("inf"), "1G", 10**400])
def test_a_cache_that_is_no_number_of_bytes_is_told(count: object) -> None:
    with pytest.raises(
        StartError, match=r"^vllm_config: kv_cache_memory_bytes is a whole number of bytes above 0 \(got "
    ):
        parse_args({"kind": "vllm_offline", **NEEDED, "vllm_config": {"kv_cache_memory_bytes": count}})
