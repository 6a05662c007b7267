"""Sampling settings as plain values, under vLLM's names, with the bounds that hold for every backend."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, FiniteFloat, Tag, model_validator
from pydantic_core import PydanticCustomError

from app.prompts.strict import StrictModel

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 100
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_TOKENS = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("~one")] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("~many")],
    Discriminator(lambda value: "~many" if isinstance(value, list) else "~one"),
]
TokenKey = Annotated[str, Field(pattern=r"^-?[0-9]{1,18}$")]


class SamplingFields(StrictModel):
    """The sampling part of a ``/generate`` body. Not given: the model's own generation defaults."""

    max_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Most tokens to generate. Default: the setting `default_max_tokens`. At the end of the context "
        "(`limits.max_model_len` of `GET /info`) the answer ends with `finish_reason: length`.",
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_TOKENS,
        description="Tokens to generate before end-of-sequence or a stop token may end it; not above `max_tokens`. "
        "Default: 0.",
    )
    temperature: FiniteFloat | None = Field(
        None, ge=0, le=2, description="How freely tokens are drawn; 0 is greedy. Default: the model's."
    )
    top_p: FiniteFloat | None = Field(
        None,
        gt=0,
        le=1,
        description="Cumulative probability of the tokens considered; 1: all. Default: the model's.",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="How many of the likeliest tokens are considered; 0 or -1: all. Default: the model's.",
    )
    min_p: FiniteFloat | None = Field(
        None,
        ge=0,
        le=1,
        description="Least probability of a token considered, relative to the likeliest one's. Default: 0.",
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="How many outputs; each takes one place in the queue, which has `limits.max_queue_requests` of "
        "`GET /info`. More than 1 needs a temperature above 0. Default: 1.",
    )
    seed: int | None = Field(
        None,
        ge=MIN_SEED,
        le=MAX_SEED,
        description="Seed of this request, 64 signed bits; -1 is none, as in vLLM. Default: none.",
    )
    stop: Stop | None = Field(
        None,
        description="A string or a list of strings that end the text. They are not part of "
        "it unless `include_stop_str_in_output` is set.",
        examples=["\n"],
    )
    stop_token_ids: list[int] | None = Field(
        None,
        max_length=MAX_STOP_TOKEN_IDS,
        description="Token ids that end the text; each within the model's vocabulary.",
    )
    ignore_eos: bool | None = Field(
        None, description="Go on after end-of-sequence, until `max_tokens`. Default: false."
    )
    presence_penalty: FiniteFloat | None = Field(
        None,
        ge=-2,
        le=2,
        description="Taken off the logit of each token that was generated before; negative favours them. Default: 0.",
    )
    frequency_penalty: FiniteFloat | None = Field(
        None,
        ge=-2,
        le=2,
        description="Taken off the logit of a token for each time it was generated before. Default: 0.",
    )
    repetition_penalty: FiniteFloat | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Weakens tokens of the prompt and the text so far when above 1, favours them below. Default: the "
        "model's.",
    )
    logit_bias: dict[TokenKey, FiniteFloat] | None = Field(
        None,
        max_length=MAX_LOGIT_BIAS,
        description="Token id (as a string) to what is added to its logit; vLLM clamps to -100 … 100.",
        examples=[{"504": -100}],
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="How many likeliest tokens to list beside each generated one; 0 lists the generated one alone. "
        "Default: no list.",
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="The same for each token of the prompt. Default: no list."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default: true.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string in the text. Default: false."
    )
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="Words that must not be generated. Default: none."
    )

    @model_validator(mode="after")
    def _min_within_max(self) -> "SamplingFields":
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise PydanticCustomError("min_over_max", "min_tokens is larger than max_tokens", {"param": "min_tokens"})
        return self

    @property
    def places(self) -> int:
        """How many places in the queue this request takes."""
        return self.n or 1

    def given(self) -> dict[str, Any]:
        """The sampling settings that the caller gave, by name; token ids of ``logit_bias`` as integers."""
        values = {name: getattr(self, name) for name in SamplingFields.model_fields}
        settings = {name: value for name, value in values.items() if value is not None}
        if bias := settings.get("logit_bias"):
            settings["logit_bias"] = {int(token): value for token, value in bias.items()}
        if isinstance(stop := settings.get("stop"), str):
            settings["stop"] = [stop]
        return settings
