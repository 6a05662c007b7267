"""``batchserve doctor`` with real vLLM, as the process that a user starts."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.engine.models import variant
from tests.engine.process import CLEAN_ENVIRONMENT, PROGRAM
from tests.engine.test_failed_starts import without_roots_rights

pytestmark = pytest.mark.engine

PATIENCE_S = 180.0


def examine(words: list[object], *, exit_code: int) -> dict[str, dict[str, str]]:
    """The findings by check, in their order."""
    done = subprocess.run(
        [*map(str, words), "--log-format", "json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=CLEAN_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == exit_code, done.stdout + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    return {finding["check"]: finding for finding in findings}


def doctor(model: Path, *options: str, exit_code: int = 0) -> dict[str, dict[str, str]]:
    return examine([PROGRAM, "doctor", "--port", "0", "--model", model, *options], exit_code=exit_code)


def test_a_sound_case_is_well_and_the_engine_has_generated(tiny_model: Path) -> None:
    findings = doctor(tiny_model)

    assert {finding["status"] for finding in findings.values()} <= {"ok", "warn"}
    for check in ("settings", "model", "memory", "port", "vllm", "statistics", "engine arguments", "chat template"):
        assert findings[check]["status"] == "ok", findings[check]
    *_, engine = findings.values()
    assert engine["check"] == "engine"
    assert engine["found"] == "built, generated two tokens with statistics, closed"


def test_a_separate_engine_core_is_built(tiny_model: Path) -> None:
    findings = doctor(tiny_model, "--engine-process", "separate")

    assert "MiB free" in findings["shared memory"]["found"]
    assert findings["engine"]["status"] == "ok"


def test_a_model_without_a_template_is_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    findings = doctor(variant(tiny_model, tmp_path / "model", template=""), "--quick")

    assert findings["chat template"]["status"] == "warn"
    assert "request_format=plain" in findings["chat template"]["advice"]
    assert "engine" not in findings


def test_a_template_that_writes_the_bos_twice_is_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    findings = doctor(variant(tiny_model, tmp_path / "model", template=template), "--quick")

    assert findings["chat template"]["status"] == "warn"
    assert "2 BOS tokens" in findings["chat template"]["found"]


def test_a_template_that_fails_on_a_users_message_fails(tiny_model: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ raise_exception('not this') }}{% endfor %}"
    findings = doctor(variant(tiny_model, tmp_path / "model", template=template), exit_code=1)

    assert findings["chat template"]["status"] == "fail"
    assert "not this" in findings["chat template"]["found"]
    assert findings["engine"]["found"] == "not checked: 'chat template' has failed"


def test_an_unknown_engine_argument_fails_with_the_near_ones(tiny_model: Path) -> None:
    findings = doctor(tiny_model, "--quick", "--vllm-config", '{"max_model_length": 5}', exit_code=1)

    assert findings["engine arguments"]["status"] == "fail"
    assert "max_model_len" in findings["engine arguments"]["advice"]


def test_an_engine_that_cannot_be_built_fails(tiny_model: Path) -> None:
    findings = doctor(tiny_model, "--vllm-config", '{"kv_cache_memory_bytes": 1000}', exit_code=1)

    assert findings["engine arguments"]["status"] == "ok"
    assert findings["engine"]["status"] == "fail"
    assert "kv_cache_memory_bytes" in findings["engine"]["found"] + findings["engine"]["advice"]


def test_a_model_that_may_not_be_read_fails_and_vllm_is_looked_at_all_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = variant(tiny_model, tmp_path / "model")
    (model / "config.json").chmod(0)

    findings = examine(without_roots_rights(["--quick", "--model", str(model)], "doctor"), exit_code=1)

    assert findings["model"]["status"] == "fail"
    assert str(model / "config.json") in findings["model"]["found"]
    assert findings["vllm"]["status"] == "ok"
    assert findings["chat template"]["found"] == "not checked: the model cannot be read"
