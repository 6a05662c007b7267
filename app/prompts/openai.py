"""Bodies of OpenAI's routes, with the fields that vLLM's own server has for them.

A field is one of four kinds. It is *honoured*: it stands in one of the models below. It is *harmless*: it changes
nothing here, and is accepted. It is *refused*: it would change the answer and cannot be honoured; a value that asks for
nothing passes. Anything else is ignored, and named to the caller.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.prompts.media import AudioUrl, ImageUrl, InputAudio, MediaPart
from app.prompts.sampling import MAX_LOGPROBS, MAX_SEED, MAX_TOKENS, MIN_SEED, SamplingFields
from app.prompts.spec import (
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    ChatMessage,
    GenerateRequest,
    check_one_way_to_end,
    check_parts,
    media_of,
    text_chars,
)
from app.prompts.strict import OpenModel, StrictModel, extras

MAX_TOOLS = 128
MAX_CHOICES = 1000
MAX_CHOICE_CHARS = 1000
MAX_GRAMMAR_CHARS = 64 << 10
MAX_ALLOWED_TOKEN_IDS = 1 << 17
MAX_DOCUMENTS = 1024
MAX_SALT_CHARS = 128
MEDIA_TYPES: dict[str, type[StrictModel]] = {"image_url": ImageUrl, "input_audio": InputAudio, "audio_url": AudioUrl}
"""Parts of images and audio: what stands under the name of their type."""
EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

HARMLESS = frozenset(
    {
        # OpenAI's
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        # of vLLM's server: of no effect on these routes, or without beam search
        "length_penalty",
        "early_stopping",
        "session_id",
        "stream_interval",
        "return_token_offsets",
        "mm_payload",
        "return_mm_kwargs",
        "routed_experts_prompt_start",
    }
)
"""Accepted, whatever their value: the answer is the same with them."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), "beam search is not served"),
    "best_of": ((1,), "only n outputs are generated, and all of them are answered"),
    "suffix": (("",), "text is not filled in before a suffix"),
    "prompt_embeds": (([],), "prompts are text or token ids"),
    "logits_processors": (([],), "code of a request is not run"),
    "chat_template": ((), "a template comes with the service's setting request_format"),
    "kv_transfer_params": (({},), "prefill and decode are not parted"),
    "ec_transfer_params": (({},), "encoders are not parted from the model"),
    "vllm_xargs": (({},), "there are no extensions of the engine"),
    "watermarking": ((False,), "text is not watermarked"),
    "media_io_kwargs": (({},), "images and audio are read in one way"),
    "mm_processor_kwargs": (({},), "the service has them for all requests: mm_processor_kwargs in vllm_config"),
    "modalities": ((["text"], []), "answers are text"),
    "audio": ((), "answers are text"),
    "functions": (([],), "send them as tools"),
    "function_call": (("none",), "send tool_choice"),
    "web_search_options": ((), "there is no search"),
    "verbosity": (("medium",), "say it in the prompt"),
    "guided_json": ((), "send structured_outputs.json"),
    "guided_regex": ((), "send structured_outputs.regex"),
    "guided_choice": ((), "send structured_outputs.choice"),
    "guided_grammar": ((), "send structured_outputs.grammar"),
    "guided_whitespace_pattern": ((), "white space cannot be set for one request"),
    "guided_decoding_backend": ((), "the service has one: structured_outputs_config in vllm_config"),
}
"""By name: values that ask for nothing (null beside them), and what to know."""


OF_THE_SERVICE = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Of vLLM's structured outputs: what its engine takes from its configuration, and structural tags."""


class StreamOptions(OpenModel):
    """What a streamed answer holds beside its text."""

    include_usage: bool | None = Field(None, description="End with a chunk that has `usage`. Default: false.")
    continuous_usage_stats: bool | None = Field(None, description="`usage` so far in every chunk. Default: false.")
    include_obfuscation: bool | None = Field(None, description="OpenAI's; of no effect here.")


class JsonSchema(OpenModel):
    """A JSON schema under a name, as OpenAI has it."""

    name: str = Field(max_length=MAX_LABEL_CHARS, description="Name of the format; of no effect here.")
    description: str | None = Field(None, description="What it is for; of no effect here.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The JSON schema that the text must satisfy.")
    strict: bool | None = Field(None, description="Of no effect: the schema always holds.")


class ResponseFormat(OpenModel):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="`text`: any; `json_object`: a JSON object; `json_schema`: JSON after the schema of `json_schema`."
    )
    json_schema: JsonSchema | None = Field(None, description="The schema, for `json_schema`.")

    @model_validator(mode="after")
    def _with_its_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("no_schema", "is needed with type json_schema", {"param": "json_schema"})
        return self


class StructuredOutputs(StrictModel):
    """vLLM's way to say which form the text must have: exactly one of the five."""

    json_schema: dict[str, Any] | str | None = Field(
        None, alias="json", description="A JSON schema, as an object or as its text."
    )
    regex: str | None = Field(None, max_length=MAX_GRAMMAR_CHARS, description="A regular expression for all of it.")
    choice: list[str] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description=f"The texts it may be, each ≤ {MAX_CHOICE_CHARS} chars."
    )
    grammar: str | None = Field(None, max_length=MAX_GRAMMAR_CHARS, description="A grammar in EBNF with a rule `root`.")
    json_object: Literal[True] | None = Field(None, description="`true`: any JSON object.")

    @model_validator(mode="before")
    @classmethod
    def _only_what_holds_for_one_request(cls, value: Any) -> Any:
        names = (name for name in OF_THE_SERVICE if isinstance(value, dict) and value.get(name))
        if (name := next(names, None)) is not None:
            raise PydanticCustomError(
                "of_the_service",
                "is not supported for one request; see structured_outputs_config in vllm_config",
                {"param": name},
            )
        return value

    @field_validator("choice")
    @classmethod
    def _short_choices(cls, value: list[str] | None) -> list[str] | None:
        if any(len(choice) > MAX_CHOICE_CHARS for choice in value or ()):
            raise PydanticCustomError(
                "long_choice", "a choice has at most {limit} characters", {"limit": MAX_CHOICE_CHARS}
            )
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        if len(self.model_dump(exclude_none=True)) != 1:
            raise PydanticCustomError("not_one", "give one of json, regex, choice, grammar, json_object")
        return self


class CommonFields(SamplingFields):
    """What both routes have in common, beside the sampling settings."""

    model: str | None = Field(
        None, description="Name of the model; when given it must be the one that is served, as `GET /v1/models` has it."
    )
    stream: bool | None = Field(
        None,
        description="Answer as server-sent events. They come once the text is there, with a comment line every 10 "
        "seconds until then. Default: false.",
    )
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    response_format: ResponseFormat | None = Field(None, description="The form that the text must have. Default: any.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in vLLM's words.")
    allowed_token_ids: list[int] | None = Field(
        None, max_length=MAX_ALLOWED_TOKEN_IDS, description="Only these tokens are generated. Default: all."
    )
    logprob_token_ids: list[int] | None = Field(
        None, max_length=128, description="List these tokens at each position, in place of the likeliest ones."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Keep so many tokens of the prompt; -1: as many as leave room for one more. Default: all.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens are cut off by `truncate_prompt_tokens`. Default: left."
    )
    add_special_tokens: bool | None = Field(None, description="Whether the tokenizer adds its special tokens.")
    spaces_between_special_tokens: bool | None = Field(
        None, description="Put a space between special tokens that are kept in the text. Default: true."
    )
    repetition_detection: dict[str, Annotated[int, Field(ge=0, le=MAX_TOKENS)]] | None = Field(
        None, max_length=3, description="vLLM's `max_pattern_size`, `min_pattern_size` and `min_count`, in tokens."
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="Most tokens of reasoning; -1: no limit."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT_CHARS, description="Shares cached prompts with this salt alone."
    )
    priority: int | None = Field(
        None,
        ge=MIN_SEED,
        le=MAX_SEED,
        description="Rank among those that wait: lower goes first, but the oldest one always gets a place. Default: 0.",
    )
    request_id: str | None = Field(
        None, max_length=MAX_LABEL_CHARS, description="The caller's label; `id` of the answer is made of it."
    )
    return_token_ids: bool | None = Field(None, description="Answer with the ids of the tokens. Default: false.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write the tokens of logprobs as `token_id:17`. Default: false."
    )

    @model_validator(mode="after")
    def _one_form(self) -> "CommonFields":
        has_format = self.response_format is not None and self.response_format.type != "text"
        if has_format and self.structured_outputs is not None:
            raise PydanticCustomError(
                "two_forms",
                "exclude each other: response_format and structured_outputs",
                {"param": "structured_outputs"},
            )
        if self.allowed_token_ids is not None and (has_format or self.structured_outputs is not None):
            raise PydanticCustomError(
                "two_forms", "cannot stand beside a form of the text", {"param": "allowed_token_ids"}
            )
        return self

    @property
    def forms_text(self) -> bool:
        """Whether the body says which form the text must have."""
        return self.structured_outputs is not None or self.response_format is not None

    @property
    def form_param(self) -> str:
        """The field that says so."""
        return "structured_outputs" if self.response_format is None else "response_format"

    @property
    def top_count(self) -> int:
        """How many likeliest tokens are listed at a position."""
        return max(int(self.logprobs or 0), self.prompt_logprobs or 0)

    @property
    def open_fields(self) -> tuple[str, ...]:
        """The fields within which unknown ones are ignored."""
        return ("stream_options", "response_format")

    def for_vllm(self) -> dict[str, Any]:
        """The fields that were given, as vLLM's request takes them; the prompt is not among them."""
        return self.model_dump(by_alias=True, exclude_none=True, exclude={"messages", "prompt"})


Prompt: TypeAlias = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(CommonFields):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(
        description="A text, a list of texts, token ids, or a list of lists of token ids; `n` choices for each. "
        "Never templated; a text gets the tokenizer's special tokens.",
        examples=["The capital of France is"],
    )
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Most tokens to generate. Default: 16. 0 with `echo`: the prompt alone."
    )
    echo: bool | None = Field(None, description="Put the prompt before the text. Default: false.")

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_of_four(cls, value: Any, _: Any) -> Prompt:
        """The outside alone: the ids of a list are checked with the vocabulary at hand."""
        if isinstance(value, str) or (isinstance(value, list) and value and _is_of_one_kind(value)):
            return value
        raise PydanticCustomError("not_a_prompt", "must be a text, token ids, or a list of these, and not empty")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)


def _is_of_one_kind(items: list[Any]) -> bool:
    kind = type(items[0])
    return kind in (str, int, list) and all(type(item) is kind for item in items)


class FunctionSpec(OpenModel):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=MAX_LABEL_CHARS, description="Name of the function.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = Field(None, description="Whether the arguments must satisfy the schema, as in vLLM.")
    defer_loading: bool | None = Field(None, description="For chat templates that know it.")


class Tool(OpenModel):
    """A tool that the model may use."""

    type: Literal["function"] = Field(description="The kind of tool: `function`.")
    function: FunctionSpec = Field(description="The function.")
    defer_loading: bool | None = Field(None, description="For chat templates that know it.")


class FunctionName(OpenModel):
    """A function by its name."""

    name: str = Field(min_length=1, max_length=MAX_LABEL_CHARS, description="Name of the function.")


class NamedTool(OpenModel):
    """The tool that must be used."""

    type: Literal["function"] = Field(description="The kind of tool: `function`.")
    function: FunctionName = Field(description="The function.")


class ChatCompletionRequest(CommonFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation; the setting `request_format` says how it becomes text. Further fields of a "
        "message are ignored.",
    )
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Most tokens to generate. Default: to the end of the context."
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Most tokens to generate; the newer name of `max_tokens`, before which it goes.",
    )
    # A number on the other routes.
    logprobs: bool | None = Field(None, description="List the generated tokens with their logprobs. Default: false.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many likeliest tokens to list beside each; with `logprobs`."
    )
    echo: bool | None = Field(None, description="Put the last message before the text it goes on with. Default: false.")
    tools: list[Tool] | None = Field(
        None, min_length=1, max_length=MAX_TOOLS, description="Tools; needs the setting `tool_call_parser`."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Whether a tool is used, and which. Default: `auto` with `tools`, else `none`."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls. Default: true.")
    reasoning_effort: EFFORTS | None = Field(None, description="For templates that know it.")
    include_reasoning: bool | None = Field(None, description="Answer with the reasoning, too. Default: true.")
    documents: list[dict[str, str]] | None = Field(
        None, max_length=MAX_DOCUMENTS, description="Documents, for templates that know them."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="Further variables for the chat template, at most 64."
    )
    add_generation_prompt: bool | None = Field(
        None, description="End the rendered conversation with the head of the answer. Default: true."
    )
    continue_final_message: bool | None = Field(
        None, description="Let the model go on with the last message. Default: false."
    )
    return_prompt_text: bool | None = Field(None, description="Answer with the rendered conversation. Default: false.")

    @field_validator("messages", mode="before")
    @classmethod
    def _as_known(cls, value: Any) -> Any:
        """Messages as this service knows them: SDKs send back all that an answer's message held."""
        if not isinstance(value, list) or len(value) > MAX_MESSAGES:
            return value
        check_parts(value)
        return [_known_message(message) if isinstance(message, dict) else message for message in value]

    @model_validator(mode="after")
    def _one_way_to_end(self) -> "ChatCompletionRequest":
        check_one_way_to_end(self.add_generation_prompt, self.continue_final_message)
        return self

    @property
    def forms_text(self) -> bool:
        """Whether the body says which form the text must have; tools do so as well."""
        return super().forms_text or self.tools is not None

    @property
    def top_count(self) -> int:
        """How many likeliest tokens are listed at a position."""
        return max(self.top_logprobs or 0, self.prompt_logprobs or 0)

    @property
    def open_fields(self) -> tuple[str, ...]:
        """The fields within which unknown ones are ignored."""
        return (*super().open_fields, "tools", "tool_choice")

    def for_vllm(self) -> dict[str, Any]:
        """The fields that were given; the messages in their place stand for roles alone."""
        return {**super().for_vllm(), "messages": [message.for_vllm() for message in self.messages]}


def _known_message(message: dict[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in message.items() if name in ChatMessage.model_fields}
    if known.get("reasoning") is None and message.get("reasoning_content") is not None:
        known["reasoning"] = message["reasoning_content"]
    if isinstance(content := known.get("content"), list):
        known["content"] = [_known_part(part) for part in content]
    return known


def _known_part(part: Any) -> Any:
    """A part under the name that this service has for its kind, without unknown fields; others stay, to be refused."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str | None):
        return part
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_image":
        return _known_media("image_url", part)
    # vLLM's server takes a part of media without its type.
    name = kind if kind is not None else next((name for name in MEDIA_TYPES if name in part), None)
    return _known_media(name, part) if name in MEDIA_TYPES else part


def _known_media(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """An image or audio with the fields that are known."""
    source, known = part.get(name), MEDIA_TYPES[name].field_names()
    if isinstance(source, dict):
        source = {key: value for key, value in source.items() if key in known}
    return {"type": name, name: source} | ({"uuid": part["uuid"]} if part.get("uuid") is not None else {})


OpenAIBody: TypeAlias = CompletionRequest | ChatCompletionRequest


@dataclass(frozen=True, slots=True)
class OpenAIPrompt:
    """One prompt of an OpenAI body, on its way like the body of a ``/generate``.

    Attributes:
        prompt: text or token ids of a completion; None: the conversation of ``body``.
        param: path of the prompt within the body.
    """

    body: OpenAIBody
    prompt: str | list[int] | None
    param: str

    queue_timeout_s = None
    request_timeout_s = None

    @property
    def model(self) -> str | None:
        """The model that is asked for; as in vLLM no name is any."""
        return self.body.model or None

    @property
    def priority(self) -> int:
        """Rank among those that wait."""
        return self.body.priority or 0

    @property
    def places(self) -> int:
        """How many places in the queue it takes."""
        return self.body.places

    @property
    def chars(self) -> int:
        """How many characters there are to tokenize, about."""
        if isinstance(self.body, ChatCompletionRequest):
            return text_chars(self.body.messages)
        return len(self.prompt or "")

    @property
    def media(self) -> list[MediaPart]:
        """The images and audio, in the order of the prompt."""
        return media_of(self.body.messages, self.param) if isinstance(self.body, ChatCompletionRequest) else []


Work: TypeAlias = GenerateRequest | OpenAIPrompt
"""What becomes one request."""


def prompts_of(body: OpenAIBody) -> list[OpenAIPrompt]:
    """The prompts of a body, in order."""
    if isinstance(body, ChatCompletionRequest):
        return [OpenAIPrompt(body, None, "messages")]
    prompts = body.prompts
    paths = ["prompt"] if len(prompts) == 1 else [f"prompt.{index}" for index in range(len(prompts))]
    return [OpenAIPrompt(body, prompt, path) for prompt, path in zip(prompts, paths, strict=True)]


def refusal(name: str, value: Any) -> str | None:
    """Why a field with this value cannot be served; None when it can, or is not ours to know."""
    if name not in REFUSED or value is None:
        return None
    neutral, reason = REFUSED[name]
    asks_for_nothing = any(type(value) is type(known) and value == known for known in neutral)
    return None if asks_for_nothing else f"{name} is not supported: {reason}"


def ignored(names: Iterable[str], body: OpenAIBody) -> list[str]:
    """The fields that are of no effect because nothing here knows them.

    Args:
        names: of all fields that came.
        body: what was made of those that are known.
    """
    known = body.field_names()
    on_top = [name for name in names if name not in known and name not in HARMLESS and name not in REFUSED]
    return on_top + [path for name in body.open_fields for path in extras(getattr(body, name), name)]
