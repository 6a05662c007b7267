"""Structured output and tools through OpenAI's SDK: a random model, too, gives what was asked for."""

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.service.support import check_timings, strict_json

pytestmark = pytest.mark.engine

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


class City(BaseModel):
    """A city."""

    name: str = Field(pattern="^[a-z]{1,12}$")
    people: int = Field(ge=0, le=9999)
    climate: Literal["cold", "mild", "hot"]


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(pattern="^[A-Za-z ]{1,8}$")
    unit: Literal["C", "F"]


class Hour(BaseModel):
    """The time in an hour."""

    hour: int = Field(ge=0, le=23)


def an_object(**properties: Any) -> dict[str, Any]:
    """A closed object in which every property must be there."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


A_WORD = {"type": "string", "minLength": 1, "maxLength": 10}
TEN: list[dict[str, Any]] = [
    an_object(word=A_WORD, other=A_WORD),
    an_object(number={"type": "integer", "minimum": -5, "maximum": 99}, yes={"type": "boolean"}),
    an_object(color={"enum": ["red", "green", None, 7]}, kind={"const": "fixed"}),
    an_object(words={"type": "array", "items": A_WORD, "minItems": 2, "maxItems": 3}),
    an_object(inner=an_object(deep=an_object(word=A_WORD))),
    an_object(either={"anyOf": [A_WORD, {"type": "boolean"}, {"type": "null"}]}),
    an_object(day={"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"}, at={"type": "string", "format": "date"}),
    {
        "$defs": {"part": an_object(name=A_WORD)},
        **an_object(first={"$ref": "#/$defs/part"}, last={"$ref": "#/$defs/part"}),
    },
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 6}, "minItems": 5, "maxItems": 5},
    {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}}},
]

TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Hour)]


def ask(sdk: openai.OpenAI, **fields: Any) -> Any:
    """The first choice of a chat."""
    return sdk.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields}).choices[0]


def test_a_model_of_pydantic_is_parsed(sdk: openai.OpenAI) -> None:
    for seed in range(3):
        answer = sdk.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=City, seed=seed)
        (choice,) = answer.choices
        assert isinstance(choice.message.parsed, City)
        assert choice.message.parsed == City.model_validate_json(choice.message.content or "")
        assert choice.finish_reason == "stop"
        assert answer.model_extra
        check_timings(answer.model_extra["metrics"]["timings"])


async def test_a_model_of_pydantic_is_parsed_with_asyncio(async_sdk: openai.AsyncOpenAI) -> None:
    answer = await async_sdk.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=City, n=2)
    assert all(isinstance(choice.message.parsed, City) for choice in answer.choices)


def test_an_answer_that_was_cut_is_told_from_one_that_is_whole(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=City, max_tokens=3)


def test_the_streaming_helper_ends_with_the_parsed_model(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, response_format=City) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert "content.delta" in kinds
    assert isinstance(final.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-c]{4}"}, r"[0-9]{3}-[a-c]{4}"),
        ({"choice": ["red", "green", "blue"]}, r"red|green|blue"),
        ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" tail'}, r"ac*b"),
        (
            {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
            r"\[[12], ?[12]\]",
        ),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_structured_outputs_hold_on_both_routes(sdk: openai.OpenAI, asked: Any, pattern: str) -> None:
    extra = {"structured_outputs": asked}
    said = ask(sdk, extra_body=extra, max_tokens=400)
    text = sdk.completions.create(model="tiny", prompt="x", max_tokens=400, extra_body=extra).choices[0]
    assert [said.finish_reason, text.finish_reason] == ["stop", "stop"]
    assert re.fullmatch(pattern, said.message.content)
    assert re.fullmatch(pattern, text.text)


async def test_a_hundred_answers_to_ten_schemas_satisfy_them(async_sdk: openai.AsyncOpenAI) -> None:
    at_once = asyncio.Semaphore(8)  # the service's queue

    async def answered(number: int) -> str:
        asked: Any = {"type": "json_schema", "json_schema": {"name": "any", "schema": TEN[number % 10]}}
        async with at_once:
            answer = await async_sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, response_format=asked, seed=number, max_tokens=300
            )
        return answer.choices[0].message.content or ""

    texts = await asyncio.gather(*map(answered, range(100)))
    for number, text in enumerate(texts):
        jsonschema.Draft202012Validator(TEN[number % 10]).validate(strict_json(text))
    assert len(set(texts)) > 50


def test_a_json_object_begins_as_one(sdk: openai.OpenAI) -> None:
    choice = ask(sdk, response_format={"type": "json_object"}, max_tokens=20)
    assert choice.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"structured_outputs": {"regex": "["}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= nowhere"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_no_text_could_satisfy_is_a_bad_request(sdk: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sdk, max_tokens=5, **fields)
    assert caught.value.code == "invalid_request"
    assert (caught.value.param or "").startswith(param)
    assert ask(sdk, max_tokens=2).message.content  # and the engine goes on


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Hour"}}], ids=str)
def test_a_tool_that_must_be_used_is_called_with_arguments_of_its_schema(sdk: openai.OpenAI, choice: Any) -> None:
    for seed in (8, 9, 10):
        answer = sdk.chat.completions.parse(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, seed=seed, parallel_tool_calls=False
        )
        message = answer.choices[0].message
        assert message.tool_calls
        (call,) = message.tool_calls
        kinds = {"Weather": Weather, "Hour": Hour} if choice == "required" else {"Hour": Hour}
        assert isinstance(call.function.parsed_arguments, kinds[call.function.name])
        assert call.id
        assert not message.content


def test_tools_are_shown_to_the_template_and_none_of_them_need_be_used(sdk: openai.OpenAI) -> None:
    extra = {"return_prompt_text": True, "ignore_eos": True}
    for choice in ("auto", "none"):
        answer = sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=4, extra_body=extra
        )
        assert answer.model_extra
        assert '"name": "Weather"' in answer.model_extra["prompt_text"]
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls


def test_a_streamed_tool_call_has_its_name_and_arguments(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=9
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    (call,) = done
    assert call.name in ("Weather", "Hour")
    assert isinstance(call.parsed_arguments, Weather | Hour)
    assert json.loads(call.arguments) == call.parsed_arguments.model_dump()


def test_the_result_of_a_tool_goes_back_into_the_conversation(sdk: openai.OpenAI) -> None:
    called = ask(sdk, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=9).message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "It is warm."}
    messages: Any = [*MESSAGES, called, result]
    answer = sdk.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, extra_body={"return_prompt_text": True}
    )
    assert answer.model_extra
    assert answer.model_extra["prompt_text"].endswith("tool: It is warm.\nassistant: ")
