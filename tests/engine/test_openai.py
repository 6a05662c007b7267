"""OpenAI's routes on real vLLM: the same text, numbers and shapes as vLLM's own server gives for the same body."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from app.prompts.openai import (
    HARMLESS,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIBody,
    StructuredOutputs,
)
from tests.engine.inline import Inline
from tests.engine.vllm_server import VLLMServer, comparable, differences, the_server
from tests.service.support import check_error_object, check_events, check_openai, events_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    # Raised inside vLLM, of its own use of xgrammar and of its own fields.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETION: Json = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 6, "temperature": 0}
ASKED = [{"role": "user", "content": "Name a bear."}]
BEGUN = [*ASKED, {"role": "assistant", "content": "The bear is"}]
LONG = [{"role": "user", "content": "bear " * 950}]
"""Nearly the whole context of 1,024 tokens."""
CONVERSATION: Json = {"model": "tiny", "messages": ASKED, "max_tokens": 6, "temperature": 0}
BASES = {COMPLETIONS: COMPLETION, CHAT: CONVERSATION}
BOTH = pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
AS_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
BOOL_TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def vllm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> VLLMServer:
    return the_server(pytestconfig, tmp_path_factory.mktemp("vllm-server"), tiny_model)


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _is_idle_afterwards(inline: Inline) -> Any:
    yield
    inline.assert_idle()


def body_for(route: str, fields: Json) -> Json:
    return {**BASES[route], **fields}


async def both(inline: Inline, vllm: VLLMServer, route: str, body: Json) -> tuple[tuple[int, Any], tuple[int, Any]]:
    """Status and answer of vLLM's server, then of ours."""
    theirs = await asyncio.to_thread(vllm.post, route, body)
    return theirs, await inline.post(route, body)


# --- every field ---

SHARED: list[Json] = [
    {},
    {"model": None},
    {"n": 3, "seed": 7, "temperature": 1},
    {"n": 2, "seed": 7, "temperature": 1, "return_token_ids": True},
    {"top_p": 0.5, "top_k": 20, "min_p": 0.01, "temperature": 1, "seed": 11},
    {"seed": -5, "temperature": 0.7},
    {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.3},
    {"stop": "o"},
    {"stop": ["e", "o"]},
    {"stop": "e", "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(1000))},
    {"ignore_eos": True, "max_tokens": 12},
    {"logit_bias": {"2": 100}, "ignore_eos": True},
    {"logit_bias": {"2": 100}},
    {"logit_bias": {"2": 100}, "min_tokens": 3},
    {"logit_bias": {"500": 100}},
    {"allowed_token_ids": [100, 101, 102]},
    {"bad_words": ["The", " fox"]},
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0},
    {"return_token_ids": True},
    {"truncate_prompt_tokens": 2, "return_token_ids": True},
    {"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True},
    {"truncate_prompt_tokens": -1, "return_token_ids": True},
    {"add_special_tokens": False, "return_token_ids": True},
    {"add_special_tokens": True, "return_token_ids": True},
    {"logit_bias": {"2": 100}, "ignore_eos": True, "skip_special_tokens": False},
    {
        "logit_bias": {"2": 100},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    {"cache_salt": "abc"},
    {"request_id": "abc"},
    {"priority": 0},
    {"priority": -7},
    {"repetition_detection": {"max_pattern_size": 1, "min_count": 2, "min_pattern_size": 1}, "max_tokens": 20},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}, "max_tokens": 30},
    {"response_format": AS_SCHEMA, "max_tokens": 30},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 30},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}, "max_tokens": 30},
    {"structured_outputs": {"regex": "[ab]{3}"}},
    {"structured_outputs": {"choice": ["bear", "wolf"]}},
    {"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}},
    {"structured_outputs": {"json_object": True}, "max_tokens": 20},
    {"stream": None, "stream_options": None, "stop": None, "logit_bias": None},
    {"user": "x", "metadata": {"a": "b"}, "store": True, "zebra": 1},
]
OF_COMPLETIONS: list[Json] = [
    {"prompt": ["One bear", "Two wolves"]},
    {"prompt": [5, 6, 7, 8]},
    {"prompt": [[5, 6, 7], [9, 10]]},
    {"prompt": ["a", "b"], "n": 2, "seed": 3, "temperature": 1},
    {"prompt": "größe 🐻 \x00\n"},
    {"max_tokens": None},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"echo": True, "max_tokens": 0, "prompt": ["a b", "c"], "logprobs": 0},
    {"echo": True, "logprobs": 3},
    {"echo": True, "prompt": [5, 6, 7]},
    {"echo": True, "prompt": [5, 6, 7], "logprobs": 0},
    {"echo": True, "n": 2, "seed": 7, "temperature": 1, "logprobs": 2},
    {"echo": True, "truncate_prompt_tokens": 2},
    {"echo": True, "prompt": [[5, 6], [7, 8]], "max_tokens": 0, "logprobs": 1, "return_token_ids": True},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 20, "stop": ["o"]},
    {"logprobs": 3, "return_tokens_as_token_ids": True},
    {"logprobs": 2, "logit_bias": {"500": 50, "501": 49.5}},
    {"logprobs": 1, "logprob_token_ids": [5, 6]},
    {"logprobs": 2, "structured_outputs": {"choice": ["bear", "wolf"]}},
    {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "return_token_ids": True},
    {"prompt": [5] * 1000, "max_tokens": 600, "ignore_eos": True},
    {"prompt": [5] * 1500, "truncate_prompt_tokens": -1, "return_token_ids": True},
    {"prompt": [5] * 1500, "truncate_prompt_tokens": 1000},
]
OF_CHAT: list[Json] = [
    {"max_completion_tokens": 3},
    {"max_tokens": 3, "max_completion_tokens": 2},
    {
        "messages": [
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}]},
    {"messages": [{"role": "developer", "content": "Hi"}], "return_prompt_text": True},
    {"messages": [{"role": "user", "content": ""}], "return_prompt_text": True},
    {"messages": [{"role": "user"}], "return_prompt_text": True},
    {"messages": [{"role": "user", "content": "y", "name": "joe"}], "return_prompt_text": True},
    {"messages": [*BEGUN, {"role": "user", "content": "more", "reasoning_content": "hm"}], "return_prompt_text": True},
    {"logprobs": True},
    {"logprobs": False},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
    {"logprobs": True, "top_logprobs": 2, "structured_outputs": {"choice": ["bear", "wolf"]}},
    {"logprobs": True, "logprob_token_ids": [5, 6]},
    {"top_logprobs": 0},
    {"return_prompt_text": True, "return_token_ids": True},
    {"add_generation_prompt": False, "return_prompt_text": True},
    {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False, "return_prompt_text": True},
    {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False, "echo": True},
    {"messages": BEGUN, "echo": True},
    {"echo": True, "logprobs": True, "top_logprobs": 2},
    {"chat_template_kwargs": {"zebra": 1}},
    {"include_reasoning": False},
    {"reasoning_effort": "low"},
    {"documents": [{"title": "a", "text": "b"}]},
    {"tools": None, "tool_choice": None},
    {"tool_choice": "none", "parallel_tool_calls": False},
    {"messages": LONG, "max_tokens": 900, "ignore_eos": True},
]
ALL = [
    *((route, fields) for route in (COMPLETIONS, CHAT) for fields in SHARED),
    *((COMPLETIONS, fields) for fields in OF_COMPLETIONS),
    *((CHAT, fields) for fields in OF_CHAT),
]
ELSEWHERE = {"tools", "tool_choice", "stream", "stream_options", "thinking_token_budget"}
"""Fields with tests of their own."""


@pytest.mark.parametrize(("route", "fields"), ALL, ids=lambda value: str(value)[:80])
async def test_the_answer_is_that_of_vllms_server(inline: Inline, vllm: VLLMServer, route: str, fields: Json) -> None:
    body = {name: value for name, value in body_for(route, fields).items() if (name, value) != ("model", None)}
    (their_status, theirs), (our_status, ours) = await both(inline, vllm, route, body)

    assert (their_status, our_status) == (200, 200), (theirs, ours)
    assert differences(comparable(theirs), comparable(ours)) == []
    prompts = len(ours["choices"]) // (body.get("n") or 1)
    check_openai(ours, prompts=prompts, n=body.get("n") or 1)
    assert (theirs["metrics"] or {}).keys() - {"speculative_decoding"} <= ours["metrics"].keys()


@pytest.mark.parametrize(("route", "model"), [(COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)])
async def test_every_field_is_in_the_table(route: str, model: type[OpenAIBody]) -> None:
    used = {name for of, fields in ALL if of == route for name in body_for(of, fields)}
    assert set(model.field_names()) - ELSEWHERE == (used & set(model.field_names())) - ELSEWHERE


@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_every_field_of_vllms_server_is_of_a_known_kind(inline: Inline, kind: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as VLLMChatRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as VLLMCompletionRequest

    pairs: dict[str, tuple[Any, type[OpenAIBody]]] = {
        "completion": (VLLMCompletionRequest, CompletionRequest),
        "chat": (VLLMChatRequest, ChatCompletionRequest),
    }
    theirs, ours = pairs[kind]
    assert set(theirs.model_fields) - set(ours.field_names()) - HARMLESS - REFUSED.keys() == set()


async def test_the_forms_of_structured_output_are_vllms(inline: Inline) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    refused = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag"}
    theirs = {name for name in StructuredOutputsParams.__dataclass_fields__ if not name.startswith("_")}
    assert theirs - set(StructuredOutputs.field_names()) == refused


@BOTH
async def test_the_defaults_are_those_of_vllms_server(inline: Inline, vllm: VLLMServer, route: str) -> None:
    """With a seed, for the temperature of both is not 0 then."""
    prompt: Json = {"prompt": "Hi"} if route == COMPLETIONS else {"messages": LONG}
    theirs, ours = await both(inline, vllm, route, {**prompt, "seed": 3})
    assert differences(comparable(theirs[1]), comparable(ours[1])) == []
    assert ours[1]["usage"]["completion_tokens"] >= 16


async def test_without_a_limit_a_chat_goes_to_the_end_of_the_context(inline: Inline) -> None:
    _, answer = await inline.post(CHAT, {"messages": LONG, "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == inline.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


# --- metrics ---


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
async def test_metrics_are_what_vllm_makes_of_the_same_statistics(inline: Inline, route: str, max_tokens: int) -> None:
    from vllm.entrypoints.generate.base.serving import build_per_request_timing_metrics
    from vllm.v1.metrics.stats import RequestStateStats

    _, answer = await inline.post(route, body_for(route, {"max_tokens": max_tokens, "ignore_eos": True}))
    metrics = answer["metrics"]
    stats = RequestStateStats(**metrics["timings"]["request_state_stats"])
    theirs = build_per_request_timing_metrics(stats, answer["usage"]["completion_tokens"]).model_dump()
    del theirs["speculative_decoding"]
    for name, value in theirs.items():
        assert metrics[name] == (None if value is None else pytest.approx(value, rel=1e-9)), name
    assert (metrics["mean_itl_ms"] is None) == (max_tokens == 1)


async def test_each_prompt_has_metrics_of_its_own(inline: Inline) -> None:
    _, answer = await inline.post(COMPLETIONS, {"prompt": ["a", "b " * 100, "c"], "max_tokens": 3, "ignore_eos": True})
    check_openai(answer, prompts=3)
    stamps = [one["timings"]["request_state_stats"]["first_token_ts"] for one in answer["metrics"]["requests"]]
    assert len(stamps) == 3
    assert all(stamp > 0 for stamp in stamps)


# --- streams ---

STREAMED: list[tuple[str, Json]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": ["One bear", "Two"], "logprobs": 2}),
    (COMPLETIONS, {"n": 2, "seed": 7, "temperature": 1, "return_token_ids": True}),
    (COMPLETIONS, {"echo": True, "logprobs": 1}),
    (COMPLETIONS, {"echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"stop": ["e"], "prompt": "größe 🐻"}),
    (CHAT, {}),
    (CHAT, {"n": 2, "seed": 7, "temperature": 1}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    (CHAT, {"response_format": AS_SCHEMA, "max_tokens": 30}),
    (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False, "echo": True}),
    (CHAT, {"stop": ["e"], "return_prompt_text": True}),
]


def joined(events: list[Json]) -> dict[int, Json]:
    """What a client puts together of a stream: for each choice its text, tokens, logprobs and end."""
    choices: dict[int, Json] = {}
    for part in (choice for event in events for choice in event["choices"]):
        said = part.get("text") or (part.get("delta") or {}).get("content") or ""
        whole = choices.setdefault(part["index"], {"text": "", "ids": [], "logprobs": [], "end": None, "stop": None})
        whole["text"] += said
        whole["ids"] += part.get("token_ids") or []
        whole["logprobs"] += flat(part.get("logprobs"))
        whole["end"] = part.get("finish_reason") or whole["end"]
        whole["stop"] = part.get("stop_reason") or whole["stop"]
    return choices


def flat(logprobs: Json | None) -> list[Any]:
    """Logprobs of either route as one list."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    lists = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return [list(entry) for entry in zip(*lists, strict=True)]


@pytest.mark.parametrize(("route", "fields"), STREAMED, ids=lambda value: str(value)[:60])
async def test_a_stream_holds_what_the_answer_in_one_piece_holds(inline: Inline, route: str, fields: Json) -> None:
    body = body_for(route, fields)
    _, whole = await inline.post(route, body)
    events = await streamed(inline, route, body)
    choices = joined(events)

    assert sorted(choices) == list(range(len(whole["choices"])))
    for index, choice in choices.items():
        expected = whole["choices"][index]
        said = expected["message"]["content"] if "message" in expected else expected["text"]
        assert choice == {
            "text": said,
            "ids": expected["token_ids"] or [],
            "logprobs": flat(expected["logprobs"]),
            "end": expected["finish_reason"],
            "stop": expected["stop_reason"],
        }
    assert events[0].get("prompt_text") == whole.get("prompt_text")


async def streamed(inline: Inline, route: str, body: Json) -> list[Json]:
    answer = await inline.client.post(route, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events, is_ended = events_of(answer.content)
    assert is_ended
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    check_events(events, prompts=prompts, n=body.get("n") or 1)
    return events


@pytest.mark.parametrize(("route", "fields"), STREAMED, ids=lambda value: str(value)[:60])
async def test_a_stream_says_what_the_stream_of_vllms_server_says(
    inline: Inline, vllm: VLLMServer, route: str, fields: Json
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body_for(route, {**fields, "stream_options": options})
    status, text = await asyncio.to_thread(vllm.post, route, {**body, "stream": True})
    assert status == 200, text
    theirs, is_ended = events_of(text)
    assert is_ended
    ours = await streamed(inline, route, body)

    assert differences(joined(theirs), joined(ours)) == []
    assert ours[-1]["choices"] == theirs[-1]["choices"] == []
    assert differences(counted(theirs[-1]), counted(ours[-1])) == []
    assert all("usage" in event for event in ours)
    assert names_of(ours) <= names_of(theirs) | {"metrics", "usage"}


def counted(event: Json) -> Json:
    return {name: value for name, value in event["usage"].items() if not name.endswith("_details")}


def names_of(events: list[Json]) -> set[str]:
    """Names of all that stands in chunks, choices and deltas."""
    choices = [choice for event in events for choice in event["choices"]]
    return {*(name for part in (*events, *choices, *(choice.get("delta", {}) for choice in choices)) for name in part)}


# --- wrong bodies ---

WRONG: list[Json] = [
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": "x"},
    {"max_tokens": 2.5},
    {"max_tokens": 2**70},
    {"max_tokens": 1025},
    {"n": 0},
    {"n": 2},
    {"n": 100_000},
    {"n": "x"},
    {"temperature": -1},
    {"temperature": "x"},
    {"temperature": 3},
    {"top_p": 0},
    {"top_p": 2},
    {"top_k": -2},
    {"min_p": 2},
    {"min_tokens": 7},
    {"min_tokens": -1},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"seed": 2**63},
    {"seed": "x"},
    {"stop": ""},
    {"stop": [""]},
    {"stop": 5},
    {"stop": ["x"] * 70},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": [10**9]},
    {"stop_token_ids": [-1]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"999999999": 1}},
    {"logit_bias": []},
    {"prompt_logprobs": -2},
    {"prompt_logprobs": 50},
    {"prompt_logprobs": 1, "stream": True},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [10**9]},
    {"bad_words": "x"},
    {"truncate_prompt_tokens": -2},
    {"truncate_prompt_tokens": 5000},
    {"truncation_side": "x"},
    {"cache_salt": "a@b"},
    {"cache_salt": ""},
    {"cache_salt": "x" * 200},
    {"stream_options": {"include_usage": True}},
    {"response_format": {"type": "x"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
    {"response_format": "x"},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "["}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"grammar": "x"}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": {"type": "foo"}}},
    {"structured_outputs": {"zebra": 1}},
    {"model": "other"},
    {"model": 5},
    {"logprob_token_ids": [5]},
    {"thinking_token_budget": -2},
    {"thinking_token_budget": 5},
    {"repetition_detection": {"max_pattern_size": -1}},
    {"request_id": 5},
    {"ignore_eos": "x"},
    {"stream": "x"},
]
WRONG_COMPLETIONS: list[Json] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": None},
    {"prompt": 5},
    {"prompt": ["a", ""]},
    {"prompt": [[]]},
    {"prompt": [[1], []]},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [1.5]},
    {"prompt": ["a", 5]},
    {"prompt": [[1], "a"]},
    {"prompt": {"a": 1}},
    {"prompt": [5] * 1024},
    {"prompt": [5] * 1025},
    {"prompt": "bear " * 3000},
    {"prompt": ["a", "bear " * 3000]},
    {"logprobs": -1},
    {"logprobs": 21},
    {"logprobs": "x"},
    {"echo": 5},
    {"suffix": "x"},
    {"prompt_embeds": "x"},
    {"logprob_token_ids": [5], "logprobs": 1, "echo": True, "max_tokens": 0},
]
WRONG_CHAT: list[Json] = [
    {"messages": []},
    {"messages": None},
    {"messages": "x"},
    {"messages": ["x"]},
    {"messages": [{"content": "y"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "foo"}]}]},
    {"messages": [{"role": "user", "content": "bear " * 3000}]},
    {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
    {"messages": BEGUN, "continue_final_message": True},
    {"logprobs": "x"},
    {"top_logprobs": 2},
    {"top_logprobs": 21, "logprobs": True},
    {"top_logprobs": -2, "logprobs": True},
    {"max_completion_tokens": 0},
    {"max_completion_tokens": 1025},
    {"tools": []},
    {"tools": [5]},
    {"tools": "x"},
    {"tools": [{"type": "foo"}]},
    {"tool_choice": "required"},
    {"tool_choice": "auto"},
    {"tool_choice": "foo", "tools": [BOOL_TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [BOOL_TOOL]},
    {"tool_choice": {"type": "function"}, "tools": [BOOL_TOOL]},
    {"chat_template_kwargs": 5},
    {"documents": 5},
    {"documents": [{"a": 5}]},
    {"reasoning_effort": "x"},
]


def wrong_bodies() -> Iterator[tuple[str, Json]]:
    yield from ((route, fields) for route in (COMPLETIONS, CHAT) for fields in WRONG)
    yield from ((COMPLETIONS, fields) for fields in WRONG_COMPLETIONS)
    yield from ((CHAT, fields) for fields in WRONG_CHAT)


NAMES_NO_FIELD = {"repetition_detection"}
"""Refused by vLLM, which names only what is within."""


@pytest.mark.parametrize(("route", "fields"), list(wrong_bodies()), ids=lambda value: str(value)[:80])
async def test_a_wrong_body_has_the_status_of_vllms_server_and_names_its_field(
    inline: Inline, vllm: VLLMServer, route: str, fields: Json
) -> None:
    (their_status, theirs), (our_status, ours) = await both(inline, vllm, route, body_for(route, fields))

    assert our_status == their_status, (theirs, ours)
    error = ours["error"]
    check_error_object(error)
    assert (error["param"] or "").split(".")[0] in fields or (
        error["param"] is None and fields.keys() <= NAMES_NO_FIELD
    )


DELIBERATE: list[tuple[Json, int, int]] = [
    ({"stop": ["x"] * 40}, 400, 200),  # vLLM takes four; this service 64
    ({"stop": "x" * 1001}, 200, 400),
    ({"n": 200, "seed": 1, "temperature": 1, "max_tokens": 1}, 200, 400),
    ({"max_tokens": "6"}, 200, 400),  # types are those of the document
    ({"user": 5}, 400, 200),  # of no effect, so of no matter
    ({"best_of": 2}, 200, 400),  # vLLM ignores what it cannot honour; here it is told
    ({"guided_regex": "a"}, 200, 400),
    ({"logits_processors": ["x"]}, 200, 400),
    ({"use_beam_search": True}, 200, 400),
    ({"kv_transfer_params": {"a": 1}}, 200, 400),
]


@BOTH
@pytest.mark.parametrize(("fields", "their_status", "our_status"), DELIBERATE, ids=lambda value: str(value)[:40])
async def test_where_this_service_differs_it_does_so_on_purpose(
    inline: Inline, vllm: VLLMServer, route: str, fields: Json, their_status: int, our_status: int
) -> None:
    theirs, ours = await both(inline, vllm, route, body_for(route, fields))
    assert (theirs[0], ours[0]) == (their_status, our_status), (theirs, ours)


# --- windows ---


async def test_a_lower_priority_goes_before_those_that_wait(inline: Inline) -> None:
    size = inline.service.settings.batch_size

    async def one(priority: int) -> int:
        body = {"prompt": "Hi", "max_tokens": 2, "priority": priority}
        _, answer = await inline.post(COMPLETIONS, body)
        number: int = answer["metrics"]["window"]["id"]
        return number

    busy = asyncio.create_task(inline.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 300, "ignore_eos": True}))
    await asyncio.sleep(0.1)
    waiting = [asyncio.create_task(one(5)) for _ in range(size + 4)]
    await asyncio.sleep(0.1)
    first, last = asyncio.create_task(one(-(2**63))), asyncio.create_task(one(2**63 - 1))
    windows = await asyncio.gather(*waiting, first, last)
    await busy
    assert windows[-2] == min(windows)
    assert windows[-1] == max(windows)
    assert min(windows) < max(windows)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(["Hi", [5], "there"], "prompt"), (["Hi", "bear " * 2000], "prompt.1"), ([[5], [5, 10**9]], "prompt.1.1")],
    ids=["two kinds", "too long", "unknown token"],
)
async def test_one_wrong_prompt_of_a_list_is_named_and_none_runs(inline: Inline, prompt: list[Any], param: str) -> None:
    before = int(inline.llm.request_counter.counter)
    status, answer = await inline.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert (status, answer["error"]["param"]) == (400, param)
    assert int(inline.llm.request_counter.counter) == before
