"""The body of ``/generate``: what one request may hold. One definition for the wire and for the backends."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

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

from app.prompts.sampling import MAX_TOKENS, SamplingFields
from app.prompts.strict import StrictModel

MAX_MESSAGES = 4096
MAX_PARTS = 16384
MAX_COLUMN_ITEMS = 4096
MAX_LABEL_CHARS = 256
PROMPT_FORMS = ("prompt", "prompt_token_ids", "messages", "columns")


class TextPart(StrictModel):
    """A content part of a chat message; this service takes text."""

    type: Literal["text"] = Field(description="The kind of part: `text`.")
    text: str = Field(description="The text itself.", examples=["What is the capital of France?"])

    @model_validator(mode="before")
    @classmethod
    def _no_media(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text":
            raise PydanticCustomError(
                "media", "images and audio are not served; parts are of type text", {"param": "type"}
            )
        return value


def _content_kind(content: Any) -> str:
    return "~parts" if isinstance(content, list) else "~text"


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], Field(max_length=MAX_PARTS), Tag("~parts")],
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
        description=f"A text, or a list of text parts; a conversation may hold {MAX_PARTS} parts in all.",
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
        return [self.content] if isinstance(self.content, str) else [part.text for part in self.content]

    def for_vllm(self) -> dict[str, Any]:
        """The message as vLLM takes it."""
        return self.model_dump(exclude_none=True)


def text_chars(messages: Sequence[ChatMessage]) -> int:
    """How many characters the texts of a conversation have."""
    return sum(len(text) for message in messages for text in message.text_parts)


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
    """A row of a data set. Prefixes become the system message, texts the user's."""

    prefix_column: list[str] = Field(
        default_factory=list,
        max_length=MAX_COLUMN_ITEMS,
        description="Texts of the system message, put together with a space between them.",
        examples=[["Answer with one word."]],
    )
    text_column: list[str] = Field(
        default_factory=list,
        max_length=MAX_COLUMN_ITEMS,
        description="Texts of the user's message, put together as they are.",
        examples=[["What is the capital of France?"]],
    )
    image_column: list[Any] = Field(
        default_factory=list, max_length=MAX_COLUMN_ITEMS, description="Not served yet: must be empty."
    )
    audio_column: list[Any] = Field(
        default_factory=list, max_length=MAX_COLUMN_ITEMS, description="Not served yet: must be empty."
    )

    @model_validator(mode="after")
    def _text_only(self) -> "Columns":
        for name in ("image_column", "audio_column"):
            if getattr(self, name):
                raise PydanticCustomError(
                    "media", "images and audio are not served; leave {param} empty", {"param": name}
                )
        if not any(self.text_column) and not any(self.prefix_column):
            raise PydanticCustomError("empty", "text_column holds no text", {"param": "text_column"})
        return self

    def messages(self) -> list[ChatMessage]:
        """The conversation that the row stands for."""
        system, user = " ".join(filter(None, self.prefix_column)), "".join(self.text_column)
        pairs = (("system", system), ("user", user))
        return [ChatMessage(role=role, content=text) for role, text in pairs if text]


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
    def chars(self) -> int:
        """How many characters there are to tokenize, about: what resolving this body costs."""
        messages = self.messages or (self.columns.messages() if self.columns else [])
        return text_chars(messages) + len(self.prompt or "") + sum(map(len, self.bad_words or ()))

    @model_validator(mode="after")
    def _one_way_to_end(self) -> "GenerateRequest":
        check_one_way_to_end(self.add_generation_prompt, self.continue_final_message)
        return self
