"""An answer cut into the chunks of a stream: nothing is lost, nothing is said twice."""

import itertools
from typing import Any

import pytest

from app.api.chunks import chunks_of
from app.api.schemas import ChatCompletionChunk, CompletionChunk
from app.prompts.openai import StreamOptions
from app.request import Answer, Generation, Output, Request, Resolved, Window
from app.timings import EngineStats, Stamps

METRICS = {
    "time_to_first_token_ms": 1.0,
    "queue_time_ms": 1.0,
    "generation_time_ms": 1.0,
    "mean_itl_ms": 1.0,
    "tokens_per_second": 1.0,
    "timings": {"marked": True},
    "window": None,
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}


def made_of(prompt: int, *completions: int) -> Answer:
    """What a choice for each number of completion tokens was made of."""
    unused: Any = object()
    request = Request(Resolved([1] * prompt, None, {}), len(completions), 0, None, Stamps(0.0), unused)
    outputs = [Output(index, "", [1] * count, "stop", None, None) for index, count in enumerate(completions)]
    window = Window(1, "full", [request], 0.0, 0.0, itertools.count(2))
    return Answer(request, Generation(outputs, None, 0, EngineStats(0, 0, 0, 0, 0, 1, 0)), window, 0)


def completion(*texts: str, **more: Any) -> dict[str, Any]:
    choices = [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None, **more}
        for index, text in enumerate(texts)
    ]
    return {"id": "cmpl-1", "object": "text_completion", "choices": choices, **head()}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    choices = [
        {"index": index, "message": {"role": "assistant", **message}, "finish_reason": "stop", **more}
        for index, message in enumerate(messages)
    ]
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": choices, **head()}


def head() -> dict[str, Any]:
    rest = {"created": 17, "model": "served", "system_fingerprint": "print", "usage": USAGE, "metrics": METRICS}
    return {**rest, "service_tier": None, "kv_transfer_params": None}


def test_each_choice_of_a_completion_is_one_chunk() -> None:
    first, second = chunks_of(completion("one", "two"), [made_of(3, 2), made_of(2, 5)], None)

    assert first == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 17,
        "model": "served",
        "choices": [{"index": 0, "text": "one", "logprobs": None, "finish_reason": "length"}],
    }
    assert (second["choices"][0]["index"], second["choices"][0]["text"]) == (1, "two")
    CompletionChunk.model_validate({**first, "metrics": None}, strict=True)


def test_the_roles_of_a_chat_come_before_the_texts_and_each_end_behind_its_text() -> None:
    found = chunks_of(chat({"content": "one"}, {"content": "two"}), [made_of(3, 2, 5)], None)

    assert [chunk["choices"][0]["index"] for chunk in found] == [0, 1, 0, 0, 1, 1]
    assert [chunk["choices"][0]["delta"] for chunk in found] == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {},
        {"content": "two"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "stop", None, "stop"]
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    ChatCompletionChunk.model_validate(found[0], strict=True)


def test_the_role_is_the_one_of_the_message() -> None:
    first, *_ = chunks_of(chat({"role": "user", "content": "one"}), [made_of(1, 1)], None)
    assert first["choices"][0]["delta"]["role"] == "user"


@pytest.mark.parametrize("options", [None, StreamOptions(), StreamOptions(include_usage=False)])
def test_usage_is_not_told_unless_asked_for(options: StreamOptions | None) -> None:
    assert not any("usage" in chunk for chunk in chunks_of(chat({"content": "a"}), [made_of(5, 7)], options))


def test_the_usage_of_all_comes_in_a_chunk_without_choices() -> None:
    options = StreamOptions(include_usage=True)
    *texts, last = chunks_of(completion("a", "b"), [made_of(2, 3), made_of(3, 4)], options)

    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert not any("usage" in chunk for chunk in texts)


def test_continuous_usage_counts_what_has_come_of_the_choice_and_not_of_others() -> None:
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    found = chunks_of(chat({"content": "a"}, {"content": "b"}), [made_of(5, 3, 4)], options)

    assert [chunk["usage"] for chunk in found] == [
        {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5},
        {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5},
        *[{"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}] * 2,
        *[{"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}] * 2,
        USAGE,
    ]


@pytest.mark.parametrize("options", [None, StreamOptions(include_usage=True)], ids=["without usage", "with usage"])
def test_metrics_come_once_and_last(options: StreamOptions | None) -> None:
    *others, last = chunks_of(chat({"content": "a"}, {"content": "b"}), [made_of(5, 3, 4)], options)

    assert last["metrics"] == METRICS
    assert last["system_fingerprint"] == "print"
    assert not any("metrics" in chunk for chunk in others)


def test_tool_calls_are_numbered() -> None:
    _, calls, end = chunks_of(chat({"content": None, "tool_calls": [CALL, CALL]}), [made_of(1, 1)], None)
    assert calls["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **CALL}, {"index": 1, **CALL}]}
    assert (calls["choices"][0]["finish_reason"], end["choices"][0]["delta"]) == (None, {})


def test_text_beside_tool_calls_is_said_only_when_there_is_some() -> None:
    for content, said in (("", {}), ("so", {"content": "so"})):
        _, calls, _ = chunks_of(chat({"content": content, "tool_calls": [CALL]}), [made_of(1, 1)], None)
        assert calls["choices"][0]["delta"] == {**said, "tool_calls": [{"index": 0, **CALL}]}


def test_reasoning_comes_beside_the_text() -> None:
    _, text, _ = chunks_of(chat({"content": "a", "reasoning": "hm", "refusal": None}), [made_of(1, 1)], None)
    assert text["choices"][0]["delta"] == {"content": "a", "reasoning": "hm"}


def test_a_message_of_nothing_still_ends() -> None:
    *_, last = chunks_of(chat({"content": None}), [made_of(1, 1)], None)
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")


def test_what_belongs_to_a_choice_stays_with_it() -> None:
    given = {"logprobs": LOGPROBS, "stop_reason": "x", "token_ids": [1], "prompt_token_ids": [2]}
    (found,) = chunks_of(completion("a", **given), [made_of(1, 1)], None)
    assert found["choices"][0] == {"index": 0, "text": "a", "finish_reason": "length", **given}


def test_what_belongs_to_the_prompt_of_a_chat_is_in_the_first_chunk() -> None:
    answer = chat({"content": "a"}) | {"prompt_token_ids": [1, 2], "prompt_text": "Hello"}
    first, *others = chunks_of(answer, [made_of(2, 1)], None)

    assert (first["prompt_token_ids"], first["prompt_text"]) == ([1, 2], "Hello")
    assert not any("prompt_token_ids" in chunk for chunk in others)


def test_what_ended_a_chat_is_said_with_its_end() -> None:
    _, text, end = chunks_of(chat({"content": "a"}, stop_reason="x"), [made_of(1, 1)], None)
    assert (text["choices"][0].get("stop_reason"), end["choices"][0]["stop_reason"]) == (None, "x")


def test_cutting_leaves_the_answer_as_it_was() -> None:
    answer = chat({"content": "a", "tool_calls": [CALL]})
    before = repr(answer)
    chunks_of(answer, [made_of(1, 1)], StreamOptions(include_usage=True, continuous_usage_stats=True))
    assert repr(answer) == before
