"""The settings, and the only reader (and writer) of the environment.

Command line over ``BATCHSERVE_*`` environment over the defaults below.
"""

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import StartError

EMBEDDED = "embedded:smollm2-135m"
"""The model that comes with a package; see ``models/embedded.py``."""
PREFIX = "BATCHSERVE_"
REASON_VARIABLE = "BATCHSERVE_CHILD_REASON_FILE"


class Settings(BaseSettings):
    """What can be set, each with its unit and reason. Frozen once made."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", protected_namespaces=(), env_ignore_empty=True
    )

    model: str = Field(
        EMBEDDED,
        min_length=1,
        description="A Hugging Face id, a folder, or the model that comes with a package.",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="The model's name in answers and requests; default: `model`."
    )
    backend: str = Field(
        "vllm_offline",
        description="`vllm_offline`: windows; `vllm_python`: each request by itself, tokens streamed as they are made; "
        "`fake` for development without a model.",
    )
    scheduling: Literal["window", "rolling"] = Field(
        "window",
        description="`window`: one window after the other; `rolling`: the next request the moment one ends. With "
        "`vllm_python` it has no effect.",
    )
    batch_size: int = Field(
        32,
        ge=1,
        le=65536,
        description="Most requests in one window; with `rolling` and with `vllm_python` in the engine at once.",
    )
    max_wait_ms: float = Field(
        10,
        ge=0,
        le=3_600_000,
        allow_inf_nan=False,
        description="Longest wait of a window's oldest request for others, in milliseconds.",
    )
    engine_process: Literal["auto", "inline", "separate"] = Field(
        "auto",
        description="Where vLLM's engine core runs: `inline` in this process, `separate` in a child; `auto`: inline "
        "on a CPU with one worker.",
    )
    vllm_config: Annotated[dict[str, Any], NoDecode] = Field(
        default_factory=dict, description="JSON, passed through to vLLM's `EngineArgs`."
    )
    fake_config: Annotated[dict[str, Any], NoDecode] = Field(
        default_factory=dict,
        description="JSON for the `fake` backend: `open_s`, `step_ms`, `max_model_len`, `streams`, `faults`.",
    )
    request_format: str = Field(
        "default-template",
        min_length=1,
        description="`plain`, `default-template`, a template file, or an inline Jinja2 template.",
    )
    tool_call_parser: str | None = Field(
        None, min_length=1, description="vLLM's parser for the tool calls of this model; none: tools are refused."
    )
    reasoning_parser: str | None = Field(
        None, min_length=1, description="vLLM's parser for the reasoning of this model; none: it stays in the text."
    )
    lora_modules: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="LoRA adapters as `name=folder`, may repeat; a request selects one by its `model`."
    )
    image_placeholder: str = Field(
        "<image>", min_length=1, description="What stands for an image in `plain` text, as the model knows it."
    )
    audio_placeholder: str = Field(
        "<|audio|>", min_length=1, description="What stands for an audio in `plain` text, as the model knows it."
    )
    allowed_media_domains: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Hosts that images and audio are fetched from, may repeat; `.example.com` stands for all below it. "
        "None: nothing is fetched.",
    )
    allowed_media_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Private networks, such as `10.0.0.0/8`, in which those hosts may be, may repeat."
    )
    max_media_bytes: int = Field(
        16 * 2**20, ge=1, description="Images and audio of one request in bytes, as they come."
    )
    max_image_pixels: int = Field(2**25, ge=1, le=178_956_970, description="Images of one request in pixels.")
    max_audio_s: float = Field(600, gt=0, allow_inf_nan=False, description="Audio of one request in seconds.")
    media_timeout_s: float = Field(
        1.5, gt=0, le=600, allow_inf_nan=False, description="Longest fetch of the media of one request, in seconds."
    )
    default_max_tokens: int = Field(256, ge=1, description="Tokens to generate when the request does not say.")
    max_queue_requests: int = Field(8192, ge=1, description="Places in the queue; a request takes `n` of them.")
    max_queue_tokens: int = Field(8 * 2**20, ge=1, description="Prompt tokens in the queue.")
    max_queue_media_bytes: int = Field(
        2**30, ge=1, description="Images and audio in the queue, in bytes as the model takes them."
    )
    max_batch_requests: int = Field(4096, ge=1, description="Most requests in one `/batch`.")
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="Largest body in bytes.")
    queue_timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Longest wait for a window in seconds; none: no limit."
    )
    request_timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Longest time from receipt to answer in seconds; none: no limit."
    )
    drain_timeout_s: float = Field(
        25,
        ge=0,
        allow_inf_nan=False,
        description="Longest time for accepted work after a stop signal, in seconds; 25 fits Kubernetes' grace of 30.",
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="How long a connection on which nothing comes stays open, in seconds; above the 60 of common "
        "gateways.",
    )
    api_key: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Bearer keys, may repeat; none: no key is asked for."
    )
    root_path: str = Field("", description="Path prefix behind a gateway, such as `/llm`.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much is logged.")
    log_format: Literal["text", "json"] = Field("text", description="`json` for machines.")

    @field_validator("vllm_config", "fake_config", mode="before")
    @classmethod
    def _json_object(cls, value: Any) -> Any:
        """The text of an option or a variable is JSON."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            example = '{"max_model_len": 1024}'
            raise ValueError(f"not JSON ({error}); write it as in {example}") from None

    @field_validator("api_key", mode="before")
    @classmethod
    def _one_or_more_keys(cls, value: Any) -> Any:
        """A plain string is one key; commas part several."""
        parts = [value] if isinstance(value, str) else value
        keys = tuple(key.strip() for part in parts for key in str(part).split(",") if key.strip())
        if parts and not keys:
            raise ValueError("no key in it; to ask for none, leave the setting out")
        return keys

    @field_validator("lora_modules", "allowed_media_domains", "allowed_media_networks", mode="before")
    @classmethod
    def _one_or_more_words(cls, value: Any) -> Any:
        """A plain string is one word; commas part several."""
        parts = [value] if isinstance(value, str) else value
        return tuple(word.strip() for part in parts for word in str(part).split(",") if word.strip())

    @field_validator("allowed_media_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            try:
                ip_network(word)
            except ValueError as error:
                raise ValueError(f"{error}; write a network as in 10.0.0.0/8") from error
        return value

    @field_validator("allowed_media_domains")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if not re.fullmatch(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[?[0-9a-f:.]+\]?", word.lower()):
                raise ValueError(f"{word!r} is no host name; write it without scheme, port and path")
        return tuple(word.lower() for word in value)

    @field_validator("api_key")
    @classmethod
    def _ascii_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(key.isascii() and key.isprintable() and " " not in key for key in value):
            raise ValueError("a key is printable ASCII without spaces: it travels in a header")
        return value

    @field_validator("root_path")
    @classmethod
    def _clean_prefix(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("starts with a slash")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _a_batch_fits_the_queue(self) -> "Settings":
        if self.max_queue_requests < self.max_batch_requests:
            raise ValueError(
                f"max_queue_requests ({self.max_queue_requests}) is smaller than max_batch_requests "
                f"({self.max_batch_requests}), so that a full batch would never fit: raise the one or lower the other"
            )
        return self

    def public(self) -> dict[str, Any]:
        """The settings as JSON values, without secrets."""
        shown: dict[str, Any] = hide_secrets(self.model_dump(mode="json", exclude={"api_key"}))
        return shown

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.served_model_name or self.model


def load_settings(arguments: Sequence[str] | None = None, *, program: str = "batchserve serve") -> Settings:
    """The settings from the command line and the environment.

    Args:
        arguments: command-line words such as ``["--port", "8001"]``; None reads the environment alone.
        program: the command as ``--help`` shows it.

    Raises:
        StartError: one line for each mistake.
        SystemExit: ``--help`` was among the words.
    """
    mistakes = _unknown_variables()
    values, unknown_options = _parse(arguments or (), program)
    mistakes += unknown_options
    try:
        settings = Settings(**values)
    except ValidationError as error:
        mistakes += [_line(item) for item in error.errors(include_url=False)]
    if mistakes:
        raise StartError("\n".join(mistakes))
    return settings


def asked_log_format(arguments: Sequence[str]) -> str:
    """The log format for telling of settings that are wrong; ``text`` when that is wrong, too."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    with suppress(StartError):
        asked = _parse(words, "batchserve")[0].get("log_format") or os.environ.get(f"{PREFIX}LOG_FORMAT")
        return "json" if asked == "json" else "text"
    return "text"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        raise StartError(f"command line: {message}; batchserve serve --help lists the settings")


def _parse(arguments: Sequence[str], program: str) -> tuple[dict[str, Any], list[str]]:
    """Command-line words as {field: text}, which pydantic converts, and a line for each word that is no option."""
    parser = _Parser(
        prog=program,
        description=f"Each setting is also read from the environment, as in {PREFIX}BATCH_SIZE.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in Settings.model_fields.items():
        value = field.get_default(call_default_factory=True)
        default = "" if value in (None, (), "") else f" Default: {value}."
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        help_text = f"{field.description}{default}".replace("%", "%%")
        action = "append" if field.annotation == tuple[str, ...] else "store"
        parser.add_argument(
            _option(name), dest=name, metavar="|".join(choices) or "VALUE", action=action, help=help_text
        )
    known, rest = parser.parse_known_args(arguments)
    return vars(known), [_unknown_option(word) for word in rest if word.startswith("-")] or [
        f"command line: {word!r} belongs to no option" for word in rest
    ]


def _unknown_option(word: str) -> str:
    name = word.partition("=")[0]  # what stands behind it may be a secret
    near = difflib.get_close_matches(name, map(_option, Settings.model_fields), n=1)
    hint = f"did you mean {near[0]}?" if near else "batchserve serve --help lists the settings"
    return f"command line: there is no option {name}; {hint}"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


_SECRET = re.compile(r"(^|_)(token|key|secret|password|credentials)$", re.IGNORECASE)


def hide_secrets(value: Any) -> Any:
    """The value with what is named like a secret replaced by asterisks, at any depth."""
    if isinstance(value, dict):
        return {
            name: "***" if _SECRET.search(str(name)) and isinstance(item, str) else hide_secrets(item)
            for name, item in value.items()
        }
    return [hide_secrets(item) for item in value] if isinstance(value, list) else value


def _line(item: Any) -> str:
    """One mistake as one line; what may hold a key or a token is not shown."""
    name = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    given = "" if not name or name.startswith(("api_key", "vllm_config")) else f" (got {item['input']!r:.100})"
    hint = ""
    if name == "port" and str(item["input"]).startswith("tcp://"):
        hint = "; Kubernetes sets this variable for a Service called batchserve: turn enableServiceLinks off"
    return f"{name or 'settings'}: {message}{given}{hint}"


def _unknown_variables() -> list[str]:
    """A line for each variable that is nearly a setting's: it would be ignored in silence."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    lines = []
    if os.environ.get(PREFIX + "API_KEY", "key").strip(", ") == "":
        lines.append(f"environment: {PREFIX}API_KEY is set and holds no key; to ask for none, unset it")
    for name in sorted(os.environ):
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.85)
        if name.upper().startswith(PREFIX) and name.upper() not in known and near:
            lines.append(f"environment: {name} is not a setting; did you mean {near[0]}?")
    return lines


def set_engine_environment(wanted: dict[str, str], *, forced: AbstractSet[str]) -> dict[str, tuple[str, bool]]:
    """Set variables that the engine's libraries read.

    Args:
        wanted: value by name.
        forced: names that are set even when the environment has them already.

    Returns:
        By name: the value in force, and whether it is ours.
    """
    in_force = {}
    for name, value in wanted.items():
        is_ours = name in forced or name not in os.environ
        if is_ours:
            os.environ[name] = value
        in_force[name] = (os.environ[name], is_ours)
    return in_force


def engine_variable(name: str) -> str | None:
    """A variable that the engine's libraries read, as it is now; None when it is not set, or empty."""
    return os.environ.get(name) or None


def is_hub_offline() -> bool:
    """Whether Hugging Face's libraries are told to use their local cache alone."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def hub_cache() -> Path:
    """Where Hugging Face's libraries keep what they download."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def engine_cache() -> Path:
    """Where vLLM keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or os.path.join(base, "vllm")))


def user_cache() -> Path:
    """The folder for what can be made again, after the XDG specification, which has relative paths ignored.

    Raises:
        RuntimeError: there is no home folder.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return configured if configured.is_absolute() else Path.home() / ".cache"


def child_environment(changes: dict[str, str]) -> dict[str, str]:
    """This process's environment for a child, with changes."""
    return {**os.environ, **changes}


@contextmanager
def share_engine_reason_file(path: str) -> Iterator[None]:
    """Child processes started within find the file in their environment (``backends/reasons.py``)."""
    os.environ[REASON_VARIABLE] = path
    try:
        yield
    finally:
        del os.environ[REASON_VARIABLE]


def engine_reason_file() -> str | None:
    """The file that the service shares with this child process, if it does."""
    return os.environ.get(REASON_VARIABLE)
