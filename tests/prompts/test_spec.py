"""The body of ``/generate``: forms of prompt, options, rows of a data set."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.prompts.sampling import SamplingFields
from app.prompts.spec import MAX_MESSAGES, MAX_PARTS, PROMPT_FORMS, BatchDefaults, ChatMessage, Columns, GenerateRequest
from app.prompts.strict import unknown


def columns(**fields: Any) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in Columns.model_validate(fields).messages()]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text_column": ["a"]}, [("user", "a")]),
        ({"text_column": ["a", "b"]}, [("user", "ab")]),
        ({"prefix_column": ["p", "q"], "text_column": ["a"]}, [("system", "p q"), ("user", "a")]),
        ({"prefix_column": ["p", "", "q"], "text_column": ["a", ""]}, [("system", "p q"), ("user", "a")]),
        ({"prefix_column": ["p"]}, [("system", "p")]),
        ({"text_column": ["a"], "image_column": [], "audio_column": []}, [("user", "a")]),
    ],
    ids=str,
)
def test_a_data_set_row_becomes_a_conversation(fields: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert columns(**fields) == expected


@pytest.mark.parametrize("fields", [{}, {"text_column": []}, {"text_column": [""]}, {"prefix_column": [""]}], ids=str)
def test_a_row_without_anything_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="holds no text, image or audio"):
        Columns.model_validate(fields)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (None, []),
        ([], []),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a", "b"]),
    ],
    ids=str,
)
def test_a_messages_texts_are_listed_in_order(content: Any, parts: list[str]) -> None:
    assert ChatMessage.model_validate({"role": "user", "content": content}).text_parts == parts


def test_there_are_bounds_on_messages_and_parts() -> None:
    one, part = {"role": "user", "content": "x"}, {"type": "text", "text": "x"}
    GenerateRequest.model_validate({"messages": [one] * MAX_MESSAGES})
    with pytest.raises(ValidationError, match="at most"):
        GenerateRequest.model_validate({"messages": [one] * (MAX_MESSAGES + 1)})
    half = {"role": "user", "content": [part] * (MAX_PARTS // 2)}
    GenerateRequest.model_validate({"messages": [half, half]})
    with pytest.raises(ValidationError, match="content parts"):
        GenerateRequest.model_validate({"messages": [half, half, {"role": "user", "content": [part]}]})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("priority", [-100, 0, 100], [-101, 101, 0.5, "0"]),
        ("queue_timeout_s", [0.001, 60, None], [0, -1, float("inf"), "1"]),
        ("truncate_prompt_tokens", [1, 2**31 - 1, None], [0, -1, 2**31]),
        ("request_id", ["", "x" * 256, None], ["x" * 257, 5]),
        ("return_token_ids", [True, False], [1, "true"]),
        ("add_generation_prompt", [True, False, None], [1]),
        ("continue_final_message", [True, False, None], [1]),
        ("model", ["x", None], [1]),
        ("chat_template_kwargs", [{}, {"a": [1]}, None], [[], {str(n): 1 for n in range(65)}]),
    ],
)
def test_options_and_their_bounds(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(GenerateRequest.model_validate({"prompt": "x", name: value}), name) == value
    for value in bad:
        with pytest.raises(ValidationError):
            GenerateRequest.model_validate({"prompt": "x", name: value})


def test_a_conversation_either_goes_on_or_begins_an_answer() -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        GenerateRequest(prompt="x", continue_final_message=True, add_generation_prompt=True)
    GenerateRequest(prompt="x", continue_final_message=True, add_generation_prompt=False)


def test_defaults_are_a_body_without_its_prompt_and_label() -> None:
    assert GenerateRequest.model_fields.keys() - BatchDefaults.model_fields.keys() == {*PROMPT_FORMS, "request_id"}
    assert BatchDefaults.model_fields.keys() > SamplingFields.model_fields.keys()


def test_five_million_token_ids_are_taken_without_looking_at_each() -> None:
    ids = [7] * 5_000_000

    assert GenerateRequest.model_validate({"prompt_token_ids": ids}).prompt_token_ids is ids


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_token", "unknown field 'max_token'; did you mean max_tokens?"),
        ("x", "unknown field 'x'"),
        ("", "unknown field ''"),
    ],
)
def test_an_unknown_field_is_told_with_the_nearest(name: str, expected: str) -> None:
    assert unknown(name, ["max_tokens", "temperature"]) == expected


def test_an_unknown_field_of_any_length_is_told_shortly() -> None:
    assert len(unknown("x" * 10**6, ["max_tokens"])) < 120
