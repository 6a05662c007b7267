"""Bodies of OpenAI's routes: each field is honoured, harmless, refused by name or ignored, and none by accident."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.api.validation import openai_body
from app.errors import InvalidRequest
from app.prompts.openai import (
    HARMLESS,
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_TOOLS,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIBody,
    StructuredOutputs,
    ignored,
    prompts_of,
    refusal,
)
from app.prompts.sampling import MAX_SEED, MIN_SEED
from app.prompts.spec import MAX_MESSAGES, MAX_PARTS

HELLO = [{"role": "user", "content": "Hello"}]
ROUTES = pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest], ids=["completions", "chat"])
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def body_for(model: type[OpenAIBody], /, **fields: Any) -> dict[str, Any]:
    return {**({"prompt": "Hello"} if model is CompletionRequest else {"messages": HELLO}), **fields}


def parsed(model: type[OpenAIBody], /, **fields: Any) -> OpenAIBody:
    return openai_body(body_for(model, **fields), model).body


def completion(**fields: Any) -> CompletionRequest:
    body = parsed(CompletionRequest, **fields)
    assert isinstance(body, CompletionRequest)
    return body


def chat(**fields: Any) -> ChatCompletionRequest:
    body = parsed(ChatCompletionRequest, **fields)
    assert isinstance(body, ChatCompletionRequest)
    return body


def refused(model: type[OpenAIBody], /, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        openai_body(body_for(model, **fields), model)
    return caught.value


# --- the four kinds of fields ---


@ROUTES
def test_no_field_is_of_two_kinds(model: type[OpenAIBody]) -> None:
    assert not HARMLESS & REFUSED.keys()
    assert not (HARMLESS | REFUSED.keys()) & set(model.field_names())


@ROUTES
@pytest.mark.parametrize("name", sorted(HARMLESS))
@pytest.mark.parametrize("value", [None, 0, "x", {"a": [1]}], ids=repr)
def test_a_harmless_field_is_accepted_whatever_it_holds(model: type[OpenAIBody], name: str, value: Any) -> None:
    found = openai_body(body_for(model, **{name: value}), model)
    assert found.ignored == []
    assert found.body == parsed(model)


@ROUTES
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(model: type[OpenAIBody], name: str) -> None:
    error = refused(model, **{name: 17})
    assert error.param == name
    assert error.message.startswith(f"{name} is not supported: ")


@ROUTES
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in sorted(REFUSED.items()) for value in (None, *values)]
)
def test_a_refused_field_that_asks_for_nothing_passes(model: type[OpenAIBody], name: str, value: Any) -> None:
    assert openai_body(body_for(model, **{name: value}), model).ignored == []


@pytest.mark.parametrize(("name", "value"), [("use_beam_search", 0), ("best_of", True), ("best_of", 2)])
def test_a_value_that_only_looks_like_one_that_asks_for_nothing_is_refused(name: str, value: Any) -> None:
    assert refusal(name, value) is not None


@ROUTES
def test_any_other_field_is_ignored_and_named_in_order(model: type[OpenAIBody]) -> None:
    found = openai_body(body_for(model, zebra=1, user="me", ant=None, best_of=1), model)
    assert found.ignored == ["zebra", "ant"]
    assert found.body == parsed(model)


def test_a_field_of_the_other_route_is_ignored_not_obeyed() -> None:
    assert ignored(["messages", "tools", "prompt"], completion()) == ["messages", "tools"]
    assert ignored(["messages", "tools", "prompt"], chat()) == ["prompt"]


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"tools": [TOOL, {**TOOL, "defer": True}]}, ["tools.1.defer"]),
        ({"tools": [{"type": "function", "function": {"name": "a", "zebra": 1}}]}, ["tools.0.function.zebra"]),
        ({"stream_options": {"zebra": 1, "ant": 2}}, ["stream_options.zebra", "stream_options.ant"]),
        ({"response_format": {"type": "text", "zebra": 1}}, ["response_format.zebra"]),
        ({"zebra": 1, "stream_options": {"ant": 2}}, ["zebra", "stream_options.ant"]),
    ],
    ids=str,
)
def test_what_is_ignored_within_a_field_is_named_by_its_path(fields: dict[str, Any], paths: list[str]) -> None:
    assert openai_body(body_for(ChatCompletionRequest, **fields), ChatCompletionRequest).ignored == paths


def test_a_schema_of_the_caller_holds_no_fields_of_ours() -> None:
    schema = {"type": "object", "zebra": 1}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    assert (
        openai_body(body_for(ChatCompletionRequest, response_format=given, tools=tools), ChatCompletionRequest).ignored
        == []
    )


@ROUTES
def test_a_null_is_as_good_as_nothing_for_every_optional_field(model: type[OpenAIBody]) -> None:
    names = set(model.field_names()) - {"prompt", "messages"}
    found = openai_body(body_for(model, **dict.fromkeys(names)), model).body
    assert found.model_dump() == parsed(model).model_dump()
    assert found.for_vllm() == parsed(model).for_vllm()


# --- types and bounds that both routes have ---

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": MAX_SEED + 1}, "seed"),
    ({"seed": MIN_SEED - 1}, "seed"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": ["x" * 1001]}, "stop.0"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logit_bias": {"5": float("inf")}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"allowed_token_ids": ["1"]}, "allowed_token_ids.0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"priority": 2**63}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice.1"),
    ({"structured_outputs": {"choice": ["x"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["x" * (MAX_CHOICE_CHARS + 1)]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a", "zebra": 1}}, "structured_outputs.zebra"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"allowed_token_ids": [5], "structured_outputs": {"regex": "a"}}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
    ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection.max_pattern_size"),
]


@ROUTES
@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_the_error_names_the_field(model: type[OpenAIBody], fields: dict[str, Any], param: str) -> None:
    assert refused(model, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, None),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
    ],
    ids=str,
)
def test_a_wrong_completion_names_the_field(fields: dict[str, Any], param: str | None) -> None:
    if param is None:  # refused with the tokens at hand: there are none
        assert completion(**fields).prompts == [""]
    else:
        assert refused(CompletionRequest, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "search", "function": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools.0.function.parameters"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"documents": [{"a": 5}]}, "documents.0.a"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(number): 1 for number in range(65)}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages.0"),
        ({"messages": [{"content": "Hello"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": ["x"] * (MAX_PARTS + 1)}]}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_chat_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatCompletionRequest, **fields).param == param


@pytest.mark.parametrize(
    "choice",
    ["sometimes", 5, ["auto"], {"type": "function"}, {"type": "function", "function": {"name": ""}}],
    ids=str,
)
def test_a_wrong_tool_choice_is_named(choice: Any) -> None:
    assert (refused(ChatCompletionRequest, tools=[TOOL], tool_choice=choice).param or "").startswith("tool_choice")


@ROUTES
def test_the_prompt_is_needed(model: type[OpenAIBody]) -> None:
    name = "prompt" if model is CompletionRequest else "messages"
    with pytest.raises(InvalidRequest) as caught:
        openai_body({}, model)
    assert caught.value.param == name
    assert refused(model, **{name: None}).param == name


@pytest.mark.parametrize("value", [[], "x", 5, None, True])
@ROUTES
def test_what_is_no_object_is_no_body(model: type[OpenAIBody], value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        openai_body(value, model)


@ROUTES
def test_a_format_of_any_text_stands_beside_everything(model: type[OpenAIBody]) -> None:
    parsed(model, response_format={"type": "text"}, structured_outputs={"regex": "a"})
    parsed(model, response_format={"type": "text"}, allowed_token_ids=[5])


@ROUTES
def test_the_message_alone_says_which_field_it_is_about(model: type[OpenAIBody]) -> None:
    """OpenAI's SDK shows no more than that."""
    assert refused(model, temperature="hot").message == "temperature: must be a number"
    assert refused(model, logit_bias={"five": 1}).message.startswith("logit_bias.five: ")


# --- forms of prompts ---


@pytest.mark.parametrize(
    ("prompt", "prompts", "params"),
    [
        ("a", ["a"], ["prompt"]),
        (["a"], ["a"], ["prompt"]),
        (["a", "b"], ["a", "b"], ["prompt.0", "prompt.1"]),
        ([1, 2], [[1, 2]], ["prompt"]),
        ([[1], [2, 3]], [[1], [2, 3]], ["prompt.0", "prompt.1"]),
        ([[]], [[]], ["prompt"]),
    ],
    ids=str,
)
def test_each_prompt_goes_its_own_way(prompt: Any, prompts: list[Any], params: list[str]) -> None:
    found = prompts_of(completion(prompt=prompt))
    assert [one.prompt for one in found] == prompts
    assert [one.param for one in found] == params


@pytest.mark.parametrize("prompt", [[], [[1], "a"], ["a", 1], [1, "a"], [1.5], [True], [None], 5, {"a": 1}], ids=str)
def test_what_is_none_of_the_four_forms_is_refused(prompt: Any) -> None:
    assert refused(CompletionRequest, prompt=prompt).param == "prompt"


def test_each_prompt_takes_n_places() -> None:
    found = prompts_of(completion(prompt=["a", "b"], n=3, priority=-4))
    assert [(one.places, one.priority) for one in found] == [(3, -4), (3, -4)]


def test_a_conversation_is_one_prompt() -> None:
    (found,) = prompts_of(chat(n=2, messages=[*HELLO, {"role": "user", "content": ["abc", "de"]}]))
    assert (found.prompt, found.param, found.places, found.chars) == (None, "messages", 2, 10)


# --- messages as SDKs send them back ---


def test_a_message_of_an_answer_can_be_sent_back_as_it_came() -> None:
    given: dict[str, Any] = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "hm",
    }
    (message,) = chat(messages=[given]).messages
    assert message.for_vllm() == {"role": "assistant", "content": "Hi", "reasoning": "hm"}


def test_reasoning_under_its_own_name_goes_before() -> None:
    given = {"role": "assistant", "content": "Hi", "reasoning": "new", "reasoning_content": "old"}
    assert chat(messages=[given]).messages[0].reasoning == "new"


def test_tool_calls_and_their_results_stay() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    given: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    assert [message.for_vllm() for message in chat(messages=given).messages] == [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("a", "a"),
        ({"type": "text", "text": "a"}, "a"),
        ({"type": "input_text", "text": "a"}, "a"),
        ({"type": "output_text", "text": "a", "annotations": []}, "a"),
        ({"type": "refusal", "refusal": "no"}, "no"),
        ({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "a"),
    ],
    ids=str,
)
def test_a_part_of_text_is_taken_under_each_of_its_names(part: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": [part]}]).messages[0].text_parts == [text]


@pytest.mark.parametrize("kind", ["video_url", "file", "image_embeds", "input_video"])
def test_what_is_not_served_is_refused_by_its_place(kind: str) -> None:
    error = refused(ChatCompletionRequest, messages=[{"role": "user", "content": ["a", {"type": kind, kind: {}}]}])
    assert error.param == "messages.0.content.1.type"
    assert f"parts of type '{kind}' are not served" in error.message


def media(*parts: Any) -> list[tuple[str, str]]:
    (prompt,) = prompts_of(chat(messages=[{"role": "user", "content": list(parts)}]))
    return [(part.source, part.param.removeprefix("messages.0.content.")) for part in prompt.media]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": "a:", "detail": "low", "x": 1}}, ("a:", "0.image_url.url")),
        ({"type": "image_url", "image_url": {"url": "a:"}, "cache_control": {}}, ("a:", "0.image_url.url")),
        ({"type": "image_url", "image_url": "a:", "uuid": None}, ("a:", "0.image_url")),
        ({"image_url": "a:"}, ("a:", "0.image_url")),
        ({"image_url": {"url": "a:"}}, ("a:", "0.image_url.url")),
        ({"type": "input_image", "image_url": "a:", "detail": "auto"}, ("a:", "0.image_url")),
        ({"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}}, ("a", "0.input_audio.data")),
        ({"audio_url": "a:"}, ("a:", "0.audio_url")),
        ({"type": "audio_url", "audio_url": {"url": "a:"}}, ("a:", "0.audio_url.url")),
    ],
    ids=str,
)
def test_media_are_taken_in_the_forms_that_vllms_server_takes(part: Any, expected: tuple[str, str]) -> None:
    assert media(part) == [expected]


def test_a_completion_has_no_media() -> None:
    assert prompts_of(completion())[0].media == []


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "image_url.url"),
        ({"type": "image_url", "image_url": "a:", "uuid": "1"}, "uuid"),
        ({"uuid": "1"}, "type"),
        ({"type": "input_audio", "input_audio": {"data": None}}, "input_audio.data"),
    ],
    ids=str,
)
def test_wrong_media_are_refused_by_their_place(part: Any, param: str) -> None:
    error = refused(ChatCompletionRequest, messages=[{"role": "user", "content": [part]}])
    assert error.param == f"messages.0.content.0.{param}"


def test_media_go_on_to_vllm_without_their_data() -> None:
    body = chat(messages=[{"role": "user", "content": [{"image_url": "a:"}]}])
    parts = [{"type": "image_url", "image_url": None, "uuid": "0"}]
    assert body.for_vllm()["messages"] == [{"role": "user", "content": parts}]


# --- what goes on to vLLM ---


def test_what_was_not_given_is_not_sent_on() -> None:
    assert completion(temperature=0, stop="x", user="me").for_vllm() == {"temperature": 0, "stop": "x"}


def test_schemas_go_on_under_their_names_on_the_wire() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert completion(response_format=given).for_vllm() == {"response_format": given}
    assert completion(structured_outputs={"json": schema}).for_vllm() == {"structured_outputs": {"json": schema}}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (completion(), 0),
        (completion(logprobs=3), 3),
        (completion(logprobs=3, prompt_logprobs=5), 5),
        (chat(logprobs=True, top_logprobs=4), 4),
        (chat(logprobs=True, prompt_logprobs=2), 2),
    ],
    ids=["none", "logprobs", "prompt_logprobs", "chat", "chat's prompt_logprobs"],
)
def test_the_listed_tokens_of_a_position_are_known(body: OpenAIBody, count: int) -> None:
    assert body.top_count == count


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar", "json_object"])
def test_each_form_of_structured_output_is_taken_alone(kind: str) -> None:
    values: dict[str, Any] = {
        "json": {"type": "object"},
        "regex": "a+",
        "choice": ["a"],
        "grammar": 'root ::= "a"',
        "json_object": True,
    }
    StructuredOutputs.model_validate({kind: values[kind]})
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(values)
