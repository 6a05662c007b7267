"""JSON values to bodies: what is wrong is told with the path of its field."""

import json
from typing import Any

import pytest

from app.api.validation import batch_body, generate_body, openai_body
from app.errors import InvalidRequest, RequestTooLarge
from app.prompts.openai import CompletionRequest
from app.prompts.spec import GenerateRequest

LIMIT = 4096
MAX_BYTES = 32 << 20


def refused(value: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        generate_body(value)
    return caught.value


def refused_batch(value: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        batch_body(value, LIMIT, MAX_BYTES)
    return caught.value


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


# --- one body ---


def test_a_body_of_every_kind_of_prompt_is_taken() -> None:
    assert generate_body({"prompt": "Hi"}).prompt == "Hi"
    assert generate_body({"prompt_token_ids": [1, 2]}).prompt_token_ids == [1, 2]
    assert generate_body(message()).messages is not None
    assert generate_body({"columns": {"text_column": ["a"]}}).columns is not None


@pytest.mark.parametrize(
    ("value", "kind"),
    [([], "an array"), ("x", "a string"), (1, "a number"), (1.5, "a number"), (True, "a boolean"), (None, "null")],
)
def test_what_is_no_object_is_named(value: Any, kind: str) -> None:
    assert refused(value).message == f"the body must be a JSON object, not {kind}"
    assert refused_batch(value).message == f"the body must be a JSON object, not {kind}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 1e999}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids.1"),
        ({"bad_words": ["a", 5]}, "bad_words.1"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"model": 5}, "model"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"queue_timeout_s": 0}, "queue_timeout_s"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_the_error_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused({"prompt": "Hi", **fields}).param == param


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"messages": {}}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        (message(content=5), "messages.0.content"),
        (message(content={"type": "text"}), "messages.0.content"),
        (message(content=["x"]), "messages.0.content.0"),
        (message(content=[{"type": "text"}]), "messages.0.content.0.text"),
        (message(content=[{"type": "text", "text": 5}]), "messages.0.content.0.text"),
        (message(content=[{"type": "video_url", "text": "x"}]), "messages.0.content.0.type"),
        (message(content=[{"type": "image_url", "text": "x"}]), "messages.0.content.0.text"),
        (message(tool_calls=[5]), "messages.0.tool_calls.0"),
        ({"columns": []}, "columns"),
        ({"columns": {}}, "columns.text_column"),
        ({"columns": {"text_column": "a"}}, "columns.text_column"),
        ({"columns": {"text_column": ["a", 5]}}, "columns.text_column.1"),
        ({"columns": {"text_column": ["a"], "image_column": [5]}}, "columns.image_column.0"),
        ({"columns": {"text_column": ["a"], "audio_column": "x"}}, "columns.audio_column"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt_token_ids": {"0": 1}}, "prompt_token_ids"),
    ],
    ids=str,
)
def test_the_path_leads_into_the_prompt(value: Any, param: str) -> None:
    assert refused(value).param == param


@pytest.mark.parametrize(
    ("value", "param", "near"),
    [
        ({"prompt": "x", "max_token": 1}, "max_token", "max_tokens"),
        ({"prompt": "x", "temprature": 1}, "temprature", "temperature"),
        ({"promt": "x"}, "promt", "prompt"),
        ({"prompt": "x", "Temperature": 1}, "Temperature", "temperature"),
        ({"messages": [{"rol": "user"}]}, "messages.0.rol", "role"),
        (message(content=[{"type": "text", "txt": "x"}]), "messages.0.content.0.txt", "text"),
        ({"columns": {"text_colum": ["a"]}}, "columns.text_colum", "text_column"),
    ],
    ids=str,
)
def test_an_unknown_field_is_told_with_the_nearest_known_one(value: Any, param: str, near: str) -> None:
    error = refused(value)

    assert error.param == param
    assert error.message.endswith(f"did you mean {near}?")


@pytest.mark.parametrize("name", ["stream", "tools", "x" * 100_000, "{message}", "a'b\"c", "日本", "\n", ""], ids=ascii)
def test_an_unknown_field_that_resembles_none_is_told_by_name(name: str) -> None:
    error = refused({"prompt": "x", name: 1})

    assert error.message.startswith("unknown field")
    assert len(json.dumps(error.body())) < 4096


def test_a_million_unknown_fields_are_refused_with_one_error() -> None:
    error = refused({"prompt": "x", **{f"field {number}": 1 for number in range(1_000_000)}})

    assert error.param == "field 0"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "prompt"),
        ({"max_tokens": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt": "a", **message()}, "messages"),
        ({**message(), "columns": {"text_column": ["a"]}}, "columns"),
        ({"prompt": "a", "prompt_token_ids": [1], **message(), "columns": {"text_column": ["a"]}}, "prompt_token_ids"),
    ],
    ids=str,
)
def test_exactly_one_form_of_prompt_is_asked_for(value: Any, param: str) -> None:
    assert refused(value).param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": "5"}, "must be an integer"),
        ({"temperature": []}, "must be a number"),
        ({"model": 5}, "must be a string"),
        ({"ignore_eos": 1}, "must be true or false"),
        ({"bad_words": {}}, "must be an array"),
        ({"chat_template_kwargs": []}, "must be a JSON object"),
        ({"stop": ["a", None]}, "must be a string"),
        ({"stop": ["a"] * 65}, "at most 64"),
        ({"n": 129}, "less than or equal to 128"),
    ],
    ids=str,
)
def test_the_message_says_in_the_words_of_json_what_is_wanted(fields: dict[str, Any], expected: str) -> None:
    assert expected in refused({"prompt": "x", **fields}).message


@pytest.mark.parametrize("name", sorted(GenerateRequest.model_fields.keys() - {"prompt"}))
def test_null_is_not_given(name: str) -> None:
    assert not getattr(generate_body({"prompt": "x", name: None}), name)


def test_a_prompt_of_spaces_is_a_prompt() -> None:
    assert generate_body({"prompt": "  "}).prompt == "  "


def test_a_form_that_is_null_is_not_given() -> None:
    assert generate_body({"prompt": "x", "messages": None}).messages is None


# --- a batch: its frame is right as a whole, its rows each for itself ---


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "requests"),
        ({"requests": None}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": {"0": {"prompt": "x"}}}, "requests"),
        ({"requests": [{"prompt": "x"}, "x"]}, "requests.1"),
        ({"requests": [{"prompt": "x"}, None]}, "requests.1"),
        ({"requests": [{"prompt": "x"}], "default": {}}, "default"),
        ({"requests": [{"prompt": "x"}], "model": "x"}, "model"),
        ({"requests": [{"prompt": "x"}], "request_id": 5}, "request_id"),
        ({"requests": [{"prompt": "x"}], "request_id": "x" * 257}, "request_id"),
        ({"requests": [{"prompt": "x"}], "defaults": []}, "defaults"),
        ({"requests": [{"prompt": "x"}], "defaults": {"max_tokens": "5"}}, "defaults.max_tokens"),
        ({"requests": [{"prompt": "x"}], "defaults": {"max_token": 5}}, "defaults.max_token"),
        ({"requests": [{"prompt": "x"}], "defaults": {"stop_token_ids": ["a"]}}, "defaults.stop_token_ids.0"),
    ],
    ids=str,
)
def test_a_wrong_frame_refuses_the_whole_batch(value: Any, param: str) -> None:
    assert refused_batch(value).param == param


@pytest.mark.parametrize("name", ["prompt", "prompt_token_ids", "messages", "columns", "request_id"])
def test_defaults_hold_neither_prompts_nor_a_label(name: str) -> None:
    error = refused_batch({"requests": [{"prompt": "x"}], "defaults": {name: "x"}})

    assert error.param == f"defaults.{name}"


def test_an_unknown_field_of_the_frame_is_told_with_the_nearest_known_one() -> None:
    assert "did you mean requests?" in refused_batch({"request": []}).message


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "max_token": 1}, "max_token"),
        ({"prompt": "x", "max_tokens": "1"}, "max_tokens"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({}, "prompt"),
        ({"requests": []}, "requests"),
    ],
    ids=str,
)
def test_what_is_wrong_inside_an_item_fails_that_row_alone(item: Any, param: str) -> None:
    good = {"prompt": "x"}

    rows = batch_body({"requests": [good, item, good]}, LIMIT, MAX_BYTES).rows

    assert isinstance(rows[0], GenerateRequest)
    assert isinstance(rows[2], GenerateRequest)
    assert isinstance(rows[1], InvalidRequest)
    assert rows[1].param == param  # relative to the item


def test_an_items_own_fields_win_over_the_defaults() -> None:
    body = batch_body(
        {
            "requests": [{"prompt": "a"}, {"prompt": "b", "max_tokens": 5}, {"prompt": "c", "max_tokens": None}],
            "defaults": {"max_tokens": 9, "temperature": 0, "stop": ["x"], "priority": 3},
            "request_id": "mine",
        },
        LIMIT,
        MAX_BYTES,
    )

    rows = [row for row in body.rows if isinstance(row, GenerateRequest)]
    assert [row.max_tokens for row in rows] == [9, 5, None]
    assert [(row.temperature, row.stop, row.priority) for row in rows] == [(0, ["x"], 3)] * 3
    assert body.request_id == "mine"


def test_rows_share_nothing_that_one_of_them_could_change() -> None:
    first, second = batch_body(
        {"requests": [{"prompt": "a"}, {"prompt": "b"}], "defaults": {"stop": ["x"], "logit_bias": {"1": 1.0}}},
        LIMIT,
        MAX_BYTES,
    ).rows

    assert isinstance(first, GenerateRequest)
    assert isinstance(second, GenerateRequest)
    assert first.stop is not second.stop
    assert first.logit_bias is not second.logit_bias


def test_a_default_that_contradicts_an_item_fails_that_row() -> None:
    rows = batch_body(
        {"requests": [{"prompt": "a", "max_tokens": 2}, {"prompt": "b"}], "defaults": {"min_tokens": 3}},
        LIMIT,
        MAX_BYTES,
    ).rows

    assert isinstance(rows[0], InvalidRequest)
    assert isinstance(rows[1], GenerateRequest)


def test_a_batch_of_just_the_limit_is_taken_and_one_more_is_not() -> None:
    assert len(batch_body({"requests": [{"prompt": "x"}] * LIMIT}, LIMIT, MAX_BYTES).rows) == LIMIT
    for count in (LIMIT + 1, 5000):
        with pytest.raises(RequestTooLarge) as caught:
            batch_body({"requests": [{"prompt": "x"}] * count}, LIMIT, MAX_BYTES)
        assert caught.value.extra == {"limit": LIMIT}
        assert str(count) in caught.value.message


def test_every_row_may_be_wrong() -> None:
    rows = batch_body({"requests": [{}, {"x": 1}]}, LIMIT, MAX_BYTES).rows

    assert all(isinstance(row, InvalidRequest) for row in rows)


def test_two_rows_may_carry_the_same_label() -> None:
    rows = batch_body({"requests": [{"prompt": "x", "request_id": "a"}] * 2}, LIMIT, MAX_BYTES).rows

    assert [row.request_id for row in rows if isinstance(row, GenerateRequest)] == ["a", "a"]


def test_defaults_count_as_if_they_were_written_into_each_item() -> None:
    body = {"requests": [{"prompt": "x"}] * 100, "defaults": {"stop": ["s" * 1000] * 60}}

    assert len(batch_body(body, LIMIT, 7_000_000).rows) == 100
    with pytest.raises(RequestTooLarge) as caught:
        batch_body(body, LIMIT, 5_000_000)
    assert caught.value.extra == {"limit": 5_000_000}


# --- the bodies of OpenAI's routes; their fields are tested with the models ---


def test_the_first_refused_field_is_told_before_anything_else_that_is_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        openai_body({"prompt": 5, "zebra": 1, "best_of": 3, "suffix": "x"}, CompletionRequest)
    assert caught.value.param == "best_of"


def test_a_million_unknown_fields_are_no_error() -> None:
    body = {"prompt": "x", **{str(number): number for number in range(1_000_000)}}
    assert len(openai_body(body, CompletionRequest).ignored) == 1_000_000
