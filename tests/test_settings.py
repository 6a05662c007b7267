"""The settings: where they come from, and one clear line for each mistake."""

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from app import settings as module
from app.errors import StartError
from app.settings import Settings, load_settings, set_engine_environment

KEY = "sk-secret-42"


def mistakes(*arguments: str) -> list[str]:
    with pytest.raises(StartError) as caught:
        load_settings(arguments)
    return str(caught.value).splitlines()


def mistake(*arguments: str) -> str:
    (line,) = mistakes(*arguments)
    return line


# --- where values come from ---


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().batch_size == 32
    monkeypatch.setenv("BATCHSERVE_BATCH_SIZE", "16")
    assert load_settings().batch_size == 16
    assert load_settings([]).batch_size == 16
    assert load_settings(["--batch-size", "8"]).batch_size == 8
    assert load_settings(["--batch-size=4"]).batch_size == 4


def test_the_defaults_are_those_of_the_documentation() -> None:
    defaults = load_settings().model_dump()

    assert defaults == {
        "model": "embedded:smollm2-135m",
        "served_model_name": None,
        "backend": "vllm_offline",
        "scheduling": "window",
        "batch_size": 32,
        "max_wait_ms": 10,
        "engine_process": "auto",
        "vllm_config": {},
        "fake_config": {},
        "request_format": "default-template",
        "tool_call_parser": None,
        "reasoning_parser": None,
        "lora_modules": (),
        "image_placeholder": "<image>",
        "audio_placeholder": "<|audio|>",
        "allowed_media_domains": (),
        "allowed_media_networks": (),
        "max_media_bytes": 16 * 1024 * 1024,
        "max_image_pixels": 32 * 1024 * 1024,
        "max_audio_s": 600,
        "media_timeout_s": 1.5,
        "default_max_tokens": 256,
        "max_queue_requests": 8192,
        "max_queue_tokens": 8 * 1024 * 1024,
        "max_queue_media_bytes": 1024 * 1024 * 1024,
        "max_batch_requests": 4096,
        "max_body_bytes": 32 * 1024 * 1024,
        "queue_timeout_s": None,
        "request_timeout_s": None,
        "drain_timeout_s": 25,
        "keep_alive_s": 75,
        "api_key": (),
        "root_path": "",
        "host": "127.0.0.1",
        "port": 8000,
        "log_level": "info",
        "log_format": "text",
    }


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_an_option_a_variable_and_a_description(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"vllm_config": '{"a": 1}', "fake_config": '{"a": 1}', "api_key": "k", "root_path": "/a"}.get(name, "7")
    text = {"lora_modules": "a=/b", "allowed_media_networks": "10.0.0.0/8"}.get(name, text)
    text = {"engine_process": "inline", "scheduling": "rolling", "log_level": "debug", "log_format": "json"}.get(
        name, text
    )
    text = {"max_queue_requests": "5000", "max_body_bytes": "2048"}.get(name, text)
    from_option = load_settings([f"--{name.replace('_', '-')}", text])
    monkeypatch.setenv(f"BATCHSERVE_{name.upper()}", text)
    from_variable = load_settings()

    assert getattr(from_option, name) == getattr(from_variable, name) != Settings.model_fields[name].get_default()
    assert Settings.model_fields[name].description


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSERVE_BATCH_SIZE", "")
    monkeypatch.setenv("BATCHSERVE_QUEUE_TIMEOUT_S", "")

    assert load_settings() == Settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().batch_size = 4  # type: ignore[misc]


def test_json_settings_are_read_from_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"max_model_len": 512, "dtype": "float32"}'
    monkeypatch.setenv("BATCHSERVE_VLLM_CONFIG", text)

    assert load_settings().vllm_config == load_settings(["--vllm-config", text]).vllm_config
    assert load_settings().vllm_config == {"max_model_len": 512, "dtype": "float32"}


def test_the_name_in_answers_is_the_served_one_or_the_models() -> None:
    assert load_settings(["--model", "a/b"]).model_name == "a/b"
    assert load_settings(["--model", "a/b", "--served-model-name", "c"]).model_name == "c"


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(["--help"])

    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in shown for name in Settings.model_fields)


# --- one line for each mistake ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("batch_size", "0"),
        ("batch_size", "x"),
        ("batch_size", "8.5"),
        ("batch_size", "-1"),
        ("max_wait_ms", "-1"),
        ("max_wait_ms", "nan"),
        ("max_wait_ms", "inf"),
        ("engine_process", "thread"),
        ("vllm_config", "{bad"),
        ("vllm_config", "[1]"),
        ("vllm_config", "5"),
        ("vllm_config", '{"a": NaN}'),
        ("fake_config", "x"),
        ("default_max_tokens", "0"),
        ("max_queue_requests", "0"),
        ("max_queue_tokens", "0"),
        ("max_batch_requests", "0"),
        ("max_body_bytes", "10"),
        ("queue_timeout_s", "0"),
        ("queue_timeout_s", "nan"),
        ("queue_timeout_s", "none"),
        ("request_timeout_s", "0"),
        ("scheduling", "rolling "),
        ("drain_timeout_s", "-1"),
        ("drain_timeout_s", "inf"),
        ("keep_alive_s", "0"),
        ("root_path", "llm"),
        ("port", "65536"),
        ("port", "-1"),
        ("port", "http"),
        ("log_level", "LOUD"),
        ("log_format", "xml"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_setting_and_shows_the_value(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_option = mistakes(f"--{name.replace('_', '-')}={text}")
    monkeypatch.setenv(f"BATCHSERVE_{name.upper()}", text)

    assert from_option == mistakes()
    lines = [line for line in from_option if not line.startswith("settings:")]
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}: ")
    assert ("(got " in lines[0]) == (name != "vllm_config")  # which may hold a token


def test_several_mistakes_are_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSERVE_BATCH_SIZE", "none")
    monkeypatch.setenv("BATCHSERVE_MAX_WAITMS", "1")
    monkeypatch.setenv("BATCHSERVE_HOSTS", "x")

    lines = mistakes("--port", "99999", "--log-levle", "info", "--log-format", "xml")

    starts = [line.split(":")[0] for line in lines]
    assert sorted(starts) == ["batch_size", "command line", "environment", "environment", "log_format", "port"]


def test_a_line_stays_one_line_whatever_was_given() -> None:
    assert len(mistakes("--batch-size", "1\n2")) == 1
    assert len(mistakes("--log-level", "x\ny" * 10_000)) == 1
    assert len(mistake("--log-level", "x\ny" * 10_000)) < 400


def test_a_mistyped_variable_is_refused_with_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSERVE_BATCH_SIZES", "3")

    assert mistake() == "environment: BATCHSERVE_BATCH_SIZES is not a setting; did you mean BATCHSERVE_BATCH_SIZE?"


def test_a_variable_near_no_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets some of its own for a Service called batchserve."""
    for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "PORT_8000_TCP_PROTO", "X"):
        monkeypatch.setenv(f"BATCHSERVE_{name}", "10.0.0.1")

    assert load_settings() == Settings()


def test_the_port_that_kubernetes_sets_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSERVE_PORT", "tcp://10.0.0.1:8000")

    assert "enableServiceLinks" in mistake()
    assert load_settings(["--port", "8001"]).port == 8001


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch-siz", "3"], r"--batch-siz\b.*did you mean --batch-size"),
        (["--batch_size", "3"], r"--batch_size\b.*did you mean --batch-size"),
        (["--nonsense"], r"--nonsense\b.*--help"),
        (["stray"], r"stray"),
        (["--batch-size"], r"--batch-size.*expected one argument"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments: list[str], expected: str) -> None:
    line = mistake(*arguments)

    assert line.startswith("command line: ")
    assert re.search(expected, line)


def test_an_option_is_not_guessed_from_its_beginning() -> None:
    mistakes("--batch", "3")


def test_a_queue_that_cannot_hold_a_full_batch_is_refused_at_start() -> None:
    line = mistake("--max-queue-requests", "100")

    assert "max_queue_requests (100) is smaller than max_batch_requests (4096)" in line
    assert load_settings(["--max-queue-requests", "100", "--max-batch-requests", "100"]).max_queue_requests == 100


# --- keys ---


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([], "a", ("a",)),
        ([], "a,b", ("a", "b")),
        ([], " a , b ,", ("a", "b")),
        (["--api-key", "a"], None, ("a",)),
        (["--api-key", "a", "--api-key", "b"], None, ("a", "b")),
        (["--api-key", "a,b", "--api-key", "c"], None, ("a", "b", "c")),
        (["--api-key", "a"], "b", ("a",)),
        ([], "123", ("123",)),
        ([], '["a"', ('["a"',)),
        ([], "true", ("true",)),
    ],
)
def test_keys_repeat_and_commas_part_them(
    arguments: list[str], variable: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("BATCHSERVE_API_KEY", variable)

    assert load_settings(arguments).api_key == expected


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--api-key", f"{KEY} x"], id="a space in a key"),
        pytest.param(["--api-key", f"{KEY}é"], id="a key that is not ASCII"),
        pytest.param(["--api-key", f"{KEY}\n"], id="a line break in a key, beside a wrong port"),
        pytest.param(["--api-key", KEY, "--port", "x"], id="a wrong port"),
        pytest.param(["--api-key", KEY, "--max-queue-requests", "1"], id="settings that contradict each other"),
        pytest.param(["--api-keys", KEY], id="a mistyped option"),
        pytest.param([f"--api-keys={KEY}"], id="a mistyped option with its value"),
        pytest.param([f"--apikey={KEY}"], id="another mistyped option with its value"),
    ],
)
def test_a_key_is_in_no_message(arguments: list[str]) -> None:
    try:
        shown = str(load_settings([*arguments, "--port", "99999"]))
    except StartError as error:
        shown = str(error)

    assert "port" in shown
    assert KEY not in shown


def test_a_key_in_a_mistyped_variable_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSERVE_API_KEYS", KEY)

    assert KEY not in mistake()


# --- paths behind a gateway ---


@pytest.mark.parametrize(
    ("given", "expected"), [("", ""), ("/", ""), ("/llm", "/llm"), ("/llm/", "/llm"), ("/a/b//", "/a/b")]
)
def test_the_path_prefix_has_no_slash_at_its_end(given: str, expected: str) -> None:
    assert load_settings(["--root-path", given]).root_path == expected


# --- the environment of others ---


def test_variables_of_the_engine_are_set_unless_somebody_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"THEIRS": "a", "FORCED": "b"})

    in_force = set_engine_environment({"THEIRS": "1", "FORCED": "2", "OPEN": "3"}, forced={"FORCED"})

    assert in_force == {"THEIRS": ("a", False), "FORCED": ("2", True), "OPEN": ("3", True)}
    assert os.environ == {"THEIRS": "a", "FORCED": "2", "OPEN": "3"}


def test_a_child_gets_the_environment_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"A": "1", "B": "2"})

    assert module.child_environment({"B": "3"}) == {"A": "1", "B": "3"}
    assert os.environ == {"A": "1", "B": "2"}


def test_the_cache_is_where_xdg_says_unless_that_is_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.user_cache() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert module.user_cache() == Path.home() / ".cache"


def test_what_is_named_like_a_secret_is_not_shown() -> None:
    config = {"hf_token": "hf_abc", "max_num_batched_tokens": 64, "loader": [{"aws_secret": "x", "key": 1}]}
    shown = Settings(vllm_config=config, api_key=("k",)).public()

    assert shown["vllm_config"] == {
        "hf_token": "***",
        "max_num_batched_tokens": 64,
        "loader": [{"aws_secret": "***", "key": 1}],
    }
    assert "api_key" not in shown


def test_a_token_in_a_broken_vllm_config_is_not_printed() -> None:
    with pytest.raises(StartError) as failure:
        load_settings(["--vllm-config", '{"hf_token": "hf_abc"'])

    assert "hf_abc" not in str(failure.value)


@pytest.mark.parametrize("given", ["", ",", " , "])
def test_a_key_that_is_none_is_a_mistake(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (from_option,) = mistakes("--api-key", given)
    monkeypatch.setenv("BATCHSERVE_API_KEY", given)

    assert "no key" in from_option
    assert all("no key" in line for line in mistakes())
