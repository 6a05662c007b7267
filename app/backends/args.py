"""What a backend is built from: a pydantic union over ``kind``."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from app.errors import StartError


class BackendArgs(BaseModel):
    """What every backend needs.

    Attributes:
        model: a Hugging Face id or a folder.
        served_model_name: the name that answers carry and that a request's ``model`` must equal.
        batch_size: most requests in one window, or in the engine at once.
        scheduling: ``window`` gives windows to the engine one after the other; ``rolling`` gives it the next request
            the moment one ends.
        request_format: ``plain``, ``default-template``, a template file or an inline template.
        default_max_tokens: tokens to generate where neither request nor model says how many.
        image_placeholder: marks an image in ``plain`` text.
        audio_placeholder: marks an audio in ``plain`` text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    kind: str
    model: str
    served_model_name: str
    batch_size: int = Field(32, ge=1)
    scheduling: Literal["window", "rolling"] = "window"
    request_format: str = "default-template"
    default_max_tokens: int = Field(256, ge=1)
    image_placeholder: str = "<image>"
    audio_placeholder: str = "<|audio|>"

    @property
    def is_template_asked_for(self) -> bool:
        """Whether somebody set ``request_format``; its default asks for nothing."""
        return "request_format" in self.model_fields_set


class VLLMArgs(BackendArgs):
    """What the backends on vLLM share.

    Attributes:
        engine_process: ``inline`` keeps the engine core in this process, ``separate`` in a child;
            ``auto`` is inline on a CPU with one worker.
        vllm_config: passed through to vLLM's ``EngineArgs``.
        tool_call_parser: vLLM's parser for the tool calls of this model; None: tools are refused.
        reasoning_parser: vLLM's parser for the reasoning of this model.
        lora_modules: adapters as ``name=folder``.
        allowed_media_domains: hosts that images and audio are fetched from.
        allowed_media_networks: private networks in which they may be.
        max_media_bytes: images and audio of one request, in bytes as they come.
        max_image_pixels: images of one request, in pixels.
        max_audio_s: audio of one request, in seconds.
        media_timeout_s: longest fetch of the media of one request, in seconds.
    """

    engine_process: Literal["auto", "inline", "separate"] = "auto"
    vllm_config: dict[str, Any] = Field(default_factory=dict)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    lora_modules: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    allowed_media_networks: tuple[str, ...] = ()
    max_media_bytes: int = 16 * 2**20
    max_image_pixels: int = 2**25
    max_audio_s: float = 600
    media_timeout_s: float = 1.5

    @field_validator("vllm_config")
    @classmethod
    def _cache_of_some_bytes(cls, value: dict[str, Any]) -> dict[str, Any]:
        """A wrong one would end in a tale of too little memory."""
        given = value.get("kv_cache_memory_bytes")
        if given is not None and (type(given) is not int or not 0 < given < 2**63):
            raise ValueError(f"kv_cache_memory_bytes is a whole number of bytes above 0 (got {given!r:.40})")
        return value


class VLLMOfflineArgs(VLLMArgs):
    """The offline backend: windows through vLLM's ``LLM``."""

    kind: Literal["vllm_offline"] = "vllm_offline"


class VLLMPythonArgs(VLLMArgs):
    """The streaming backend: each request by itself through vLLM's ``AsyncLLM``; its engine core is always a child."""

    kind: Literal["vllm_python"] = "vllm_python"

    @field_validator("engine_process")
    @classmethod
    def _never_inline(cls, value: str) -> str:
        if value == "inline":
            raise ValueError("vllm_python always has its engine core in a process of its own (got 'inline')")
        return value


class FakeFaults(BaseModel):
    """Faults that the fake backend plays.

    Attributes:
        fail_open: the message with which opening fails.
        fail_text: a prompt that holds this text makes the run of its window raise.
        die_text: a prompt that holds this text kills the engine thread.
        hang_text: a prompt that holds this text makes the run hang for ``hang_s`` seconds.
        break_text: a prompt that holds this text makes a streamed run fail behind its second token.
        hang_s: how long a hang lasts, in seconds.
        wrong_count: this many outputs too many (or, negative, too few) come back from every run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fail_open: str | None = None
    fail_text: str | None = None
    die_text: str | None = None
    hang_text: str | None = None
    break_text: str | None = None
    hang_s: float = Field(3600.0, ge=0, allow_inf_nan=False)
    wrong_count: int = 0


class FakeArgs(BackendArgs):
    """The fake backend: the same contract without vLLM.

    Attributes:
        open_s: how long opening takes, in seconds.
        step_ms: how long one token of the longest request takes, in milliseconds.
        max_model_len: context length in tokens; a token is one byte of UTF-8.
        streams: each request runs by itself, as with ``vllm_python``, and its tokens are streamed.
    """

    kind: Literal["fake"] = "fake"
    open_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    step_ms: float = Field(0.0, ge=0, allow_inf_nan=False)
    max_model_len: int = Field(2048, ge=2)
    streams: bool = False
    faults: FakeFaults = FakeFaults()


AnyBackendArgs = Annotated[VLLMOfflineArgs | VLLMPythonArgs | FakeArgs, Field(discriminator="kind")]


def parse_args(values: dict[str, Any]) -> BackendArgs:
    """The right kind of arguments for ``values["kind"]``.

    Raises:
        StartError: an unknown kind (the message names those there are) or a wrong value.
    """
    try:
        return TypeAdapter(AnyBackendArgs).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "union_tag_invalid":
            kinds = first["ctx"]["expected_tags"]
            raise StartError(f"backend: {values['kind']!r} is unknown; there are {kinds}") from error
        path = [str(part) for part in first["loc"][1:]]
        if values["kind"] == "fake" and path[0] not in BackendArgs.model_fields:
            path.insert(0, "fake_config")
        message = first["msg"].removeprefix("Value error, ")
        raise StartError(f"{'.'.join(path)}: {message}") from error
