"""The body of ``/generate``: what one request may hold. One definition for the wire and for the backends."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    FiniteFloat,
    SkipValidation,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.prompts.media import (
    KINDS_OF_MEDIA,
    PART_TYPES,
    AnyMediaPart,
    AudioItem,
    AudioUrlPart,
    ImageItem,
    ImagePart,
    InputAudio,
    InputAudioPart,
    MediaPart,
    Modality,
    Placeholders,
    audio_of,
    for_vllm,
    image_of,
)
from app.prompts.sampling import MAX_TOKENS, SamplingFields
from app.prompts.strict import StrictModel

MAX_MESSAGES = 4096
MAX_PARTS = 16384
MAX_COLUMN_ITEMS = 4096
MAX_LABEL_CHARS = 256
PROMPT_FORMS = ("prompt", "prompt_token_ids", "messages", "columns")


class TextPart(StrictModel):
    """A text within a chat message."""

    type: Literal["text"] = Field(description="The kind of part: `text`.")
    text: str = Field(description="The text itself.", examples=["What is the capital of France?"])

    @model_validator(mode="before")
    @classmethod
    def _known_kind(cls, value: Any) -> Any:
        """What is of no known kind is held against this one."""
        if not isinstance(value, dict):
            return value
        if "type" not in value:
            raise PydanticCustomError("no_type", "is needed: one of " + ", ".join(PART_TYPES), {"param": "type"})
        if isinstance(kind := value["type"], str) and kind not in PART_TYPES:
            raise PydanticCustomError(
                "part_type",
                "parts of type {kind} are not served, but those of type " + ", ".join(PART_TYPES),
                {"kind": f"{kind[:40]!r}", "param": "type"},
            )
        return value


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"~{kind}" if isinstance(kind, str) and kind in PART_TYPES else "~text"


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImagePart, Tag("~image_url")]
    | Annotated[InputAudioPart, Tag("~input_audio")]
    | Annotated[AudioUrlPart, Tag("~audio_url")],
    Discriminator(_part_kind),
]


def _content_kind(content: Any) -> str:
    return "~parts" if isinstance(content, list) else "~text"


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("~parts")],
    Discriminator(_content_kind),
]


class ChatMessage(StrictModel):
    """One message of a conversation, as in OpenAI's chat API."""

    role: str = Field(
        min_length=1,
        max_length=64,
        description="Who speaks, as the chat template knows it: `system`, `user`, `assistant`, `tool`.",
        examples=["user"],
    )
    content: Content | None = Field(
        None,
        description="A text, or a list of parts: texts, images, audio. A conversation may hold "
        f"{MAX_PARTS} parts in all.",
        examples=["What is the capital of France?"],
    )
    name: str | None = Field(None, description="Name of the speaker, for templates that use it.")
    tool_calls: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_PARTS, description="Tool calls of an assistant's message, for templates that use them."
    )
    tool_call_id: str | None = Field(
        None, description="Which tool call this message answers, for templates that use it."
    )
    reasoning: str | None = Field(None, description="Reasoning of an assistant's message, for templates that use it.")

    @property
    def text_parts(self) -> list[str]:
        """The texts of the message, in order."""
        if self.content is None:
            return []
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content if isinstance(part, TextPart)]

    def media(self, param: str) -> list[MediaPart]:
        """The images and audio of the message that stands at ``param``, in order."""
        parts = self.content if isinstance(self.content, list) else ()
        places = ((part, f"{param}.content.{index}") for index, part in enumerate(parts))
        return [part.media(place) for part, place in places if not isinstance(part, TextPart)]

    def for_vllm(self) -> dict[str, Any]:
        """The message as vLLM takes it; of its images and audio only that they are there."""
        if not isinstance(self.content, list):
            return self.model_dump(exclude_none=True)
        parts = [part.model_dump() if isinstance(part, TextPart) else for_vllm(part) for part in self.content]
        return {**self.model_dump(exclude_none=True, exclude={"content"}), "content": parts}


def text_chars(messages: Sequence[ChatMessage]) -> int:
    """How many characters the texts of a conversation have."""
    return sum(len(text) for message in messages for text in message.text_parts)


def media_of(messages: Sequence[ChatMessage], param: str) -> list[MediaPart]:
    """The images and audio of a conversation that stands at ``param``, in order."""
    return [part for index, message in enumerate(messages) for part in message.media(f"{param}.{index}")]


def plain_texts(messages: Sequence[ChatMessage], placeholders: Placeholders, param: str) -> list[str]:
    """The text of each message for ``plain``: its parts as they are.

    Placeholders that the texts do not hold stand before the text of their message, images first, each with a line
    break behind it, as in GuideLLM.

    Raises:
        InvalidRequest: the texts hold placeholders, and not as many as there are media of the kind.
    """
    texts = ["".join(message.text_parts) for message in messages]
    media = [message.media(param) for message in messages]
    added = placeholders.missing(texts, list(itertools.chain(*media)), param)
    return [_heads(parts, added) + text for parts, text in zip(media, texts, strict=True)]


def _heads(parts: Sequence[MediaPart], placeholders: dict[Modality, str]) -> str:
    kinds = (kind for kind in KINDS_OF_MEDIA for part in parts if part.modality == kind)
    return "".join(f"{placeholders[kind]}\n" for kind in kinds if kind in placeholders)


def check_parts(messages: Sequence[Any]) -> None:
    """A conversation, before its messages are looked at one by one, may hold so many parts."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    if sum(len(content) for content in contents if isinstance(content, list)) > MAX_PARTS:
        raise PydanticCustomError("too_many_parts", "at most {limit} content parts", {"limit": MAX_PARTS})


def check_one_way_to_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """A rendered conversation ends with the head of an answer, or in the middle of its last message."""
    if continue_final_message and add_generation_prompt:
        raise PydanticCustomError(
            "exclusive",
            "add_generation_prompt and continue_final_message exclude each other",
            {"param": "continue_final_message"},
        )


class Columns(StrictModel):
    """A row of a data set. Prefixes become the system message; texts, images and audio the user's.

    With images or audio the user's message has a part for each item, taken in turn from the texts, the images and the
    audio: the first of each, then the second of each, and so on.
    """

    prefix_column: list[str] = Field(
        default_factory=list,
        max_length=MAX_COLUMN_ITEMS,
        description="Texts of the system message, put together with a space between them.",
        examples=[["Answer with one word."]],
    )
    text_column: list[str] = Field(
        default_factory=list,
        max_length=MAX_COLUMN_ITEMS,
        description="Texts of the user's message; without images and audio put together as they are.",
        examples=[["What is the capital of France?"]],
    )
    image_column: list[ImageItem] = Field(
        default_factory=list,
        max_length=MAX_COLUMN_ITEMS,
        description="Images of the user's message: each a data URI or an http(s) URL, or an object with it as `image`.",
    )
    audio_column: list[AudioItem] = Field(
        default_factory=list,
        max_length=MAX_COLUMN_ITEMS,
        description="Audio files of the user's message: each in base64, a data URI or an http(s) URL, or an object "
        "with it as `audio`.",
    )

    @model_validator(mode="after")
    def _not_empty(self) -> "Columns":
        if not any((*self.text_column, *self.prefix_column, self.image_column, self.audio_column)):
            raise PydanticCustomError("empty", "the row holds no text, image or audio", {"param": "text_column"})
        return self

    def messages(self) -> list[ChatMessage]:
        """The conversation that the row stands for."""
        system = " ".join(filter(None, self.prefix_column))
        has_media = self.image_column or self.audio_column
        user = [part for part, _ in self._interleaved("")] if has_media else "".join(self.text_column)
        pairs: tuple[tuple[str, Any], ...] = (("system", system), ("user", user))
        return [ChatMessage(role=role, content=content) for role, content in pairs if content]

    def media(self, param: str) -> list[MediaPart]:
        """The images and audio of the row that stands at ``param``, in the order of the user's message."""
        return [medium for _, medium in self._interleaved(param) if medium is not None]

    def _interleaved(self, param: str) -> Iterator[tuple[TextPart | AnyMediaPart, MediaPart | None]]:
        """The parts of the user's message; beside each image and audio where it comes from."""
        images = [image_of(item, f"{param}.image_column.{n}") for n, item in enumerate(self.image_column)]
        audio = [audio_of(item, f"{param}.audio_column.{n}") for n, item in enumerate(self.audio_column)]
        for items in itertools.zip_longest(self.text_column, images, audio):
            yield from ((_part_of(item), None if isinstance(item, str) else item) for item in items if item)


def _part_of(item: str | MediaPart) -> TextPart | AnyMediaPart:
    """The content part that an item of a row becomes."""
    if isinstance(item, str):
        return TextPart(type="text", text=item)
    if item.modality == "image":
        return ImagePart(type="image_url", image_url=item.source)
    return InputAudioPart(type="input_audio", input_audio=InputAudio(data=item.source))


def _a_list(value: Any) -> Any:
    if not isinstance(value, list):
        raise PydanticCustomError("not_ids", "must be an array of token ids")
    return value


TokenIds = Annotated[SkipValidation[list[int]], AfterValidator(_a_list)]
"""Only the outside is checked here: five million ids would hold the interpreter for half a second.
The backend checks the length against the context first, then the ids one by one."""


class PromptFields(StrictModel):
    """The prompt part of a ``/generate`` body: exactly one of the four forms."""

    prompt: str | None = Field(
        None,
        description="A text, never templated; gets the tokenizer's special tokens, one BOS at most. Not empty, and "
        "shorter than the context: `limits.max_model_len` of `GET /info`, in tokens.",
        examples=["The capital of France is"],
    )
    prompt_token_ids: TokenIds | None = Field(
        None,
        description="Token ids, taken as they are; each within the model's vocabulary. Not empty, and shorter than the "
        "context.",
        examples=[[504, 3575, 282, 4649, 314]],
    )
    messages: list[ChatMessage] | None = Field(
        None,
        max_length=MAX_MESSAGES,
        description="A conversation of at least one message; the setting `request_format` says how it becomes text.",
    )
    columns: Columns | None = Field(
        None, description="A data-set row; the setting `request_format` says how it becomes text."
    )

    @field_validator("messages", mode="before")
    @classmethod
    def _not_too_many_parts(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) <= MAX_MESSAGES:
            check_parts(value)
        return value

    @model_validator(mode="after")
    def _exactly_one_form(self) -> "PromptFields":
        given = [form for form in PROMPT_FORMS if getattr(self, form) is not None]
        if not given:
            raise PydanticCustomError(
                "no_prompt", "give one of prompt, prompt_token_ids, messages, columns", {"param": "prompt"}
            )
        if len(given) > 1:
            raise PydanticCustomError(
                "two_prompts", "give only one of {names}", {"names": ", ".join(given), "param": given[1]}
            )
        if len(getattr(self, given[0]) if given[0] != "columns" else "-") == 0:
            raise PydanticCustomError("empty", "must not be empty", {"param": given[0]})
        return self


class OptionFields(StrictModel):
    """What is neither prompt nor sampling: how to render, when to go, what to give back."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="Further variables for the chat template, at most 64."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="End the rendered conversation with the head of the answer. Default: true, or false with "
        "`continue_final_message`.",
    )
    continue_final_message: bool | None = Field(
        None, description="Let the model go on with the last message. Default: false."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Keep only the last so many tokens of the prompt. Default: keep all."
    )
    model: str | None = Field(
        None, description="Name of the model; when given it must be the one that is served, `model` of `GET /info`."
    )
    priority: int | None = Field(
        0,
        ge=-100,
        le=100,
        description="Rank among those that wait: lower goes first, but the oldest one always gets a place. Default: 0.",
    )
    queue_timeout_s: FiniteFloat | None = Field(
        None,
        gt=0,
        description="Longest wait for a window in seconds, counted from receipt. Default: the service's setting of "
        "that name, which it may only shorten.",
    )
    request_timeout_s: FiniteFloat | None = Field(
        None,
        gt=0,
        description="Longest time from receipt to the answer in seconds. Default: the service's setting of that name, "
        "which it may only shorten.",
    )
    return_token_ids: bool | None = Field(False, description="Fill `token_ids` of the outputs. Default: false.")


class BatchDefaults(OptionFields, SamplingFields):
    """Fields for all items of a `/batch`; an item's own win, and `null` in an item is its own, too."""


class GenerateRequest(PromptFields, OptionFields, SamplingFields):
    """One prompt with its sampling settings: the body of `POST /generate` and an item of a `/batch`.

    Exactly one of `prompt`, `prompt_token_ids`, `messages` and `columns` is given. Sampling settings that are not given
    come from the model's generation config, then from vLLM; `sampling` of the answer shows what was in effect.
    """

    request_id: str | None = Field(
        None,
        max_length=MAX_LABEL_CHARS,
        description="The caller's own label in characters, echoed in the answer; need not be unique.",
    )

    @property
    def conversation(self) -> list[ChatMessage]:
        """The messages that were given, or that the row stands for; none for the other forms of a prompt."""
        return self.messages or (self.columns.messages() if self.columns else [])

    @property
    def media(self) -> list[MediaPart]:
        """The images and audio, in the order of the prompt."""
        if self.columns is not None:
            return self.columns.media("columns")
        return media_of(self.messages or (), "messages")

    @property
    def chars(self) -> int:
        """How many characters there are to tokenize, about: what resolving this body costs."""
        return text_chars(self.conversation) + len(self.prompt or "") + sum(map(len, self.bad_words or ()))

    @model_validator(mode="after")
    def _one_way_to_end(self) -> "GenerateRequest":
        check_one_way_to_end(self.add_generation_prompt, self.continue_final_message)
        return self
