"""Tools and reasoning on real vLLM: found by vLLM's own parsers, as its own server finds them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from app.backends.args import VLLMOfflineArgs
from app.backends.openai import check_parsers
from app.errors import StartError
from app.settings import Settings
from tests.engine.conftest import ENGINE_CONFIG
from tests.engine.inline import Inline, running
from tests.engine.models import variant
from tests.engine.process import ServiceProcess
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
CHAT = "/v1/chat/completions"
COUNT: Json = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}
CITY: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Json, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **more}}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("count_bears", COUNT), tool("find_city", CITY)]
STRICT = [tool("count_bears", COUNT, strict=True), tool("find_city", CITY, strict=True)]
"""Those whose arguments hermes' grammar binds to their schema."""
SCHEMAS = {"count_bears": COUNT, "find_city": CITY}
CALLED = r'<tool_call>\n\{"name": "find_city", "arguments": \{"city": "(Paris|Rome)"\}\}\n</tool_call>'


def body(**fields: Any) -> Json:
    messages = [{"role": "user", "content": "How many bears are there in Rome?"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 120, "temperature": 0, "tools": TOOLS, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tools(the_engine: Any, tiny_model: Path) -> AsyncIterator[Inline]:
    """A service that finds tools, in the place of the session's."""
    await the_engine.close()
    values = {"model": str(tiny_model), "served_model_name": "tiny", "engine_process": "inline"}
    settings = {**values, "tool_call_parser": "hermes", "vllm_config": ENGINE_CONFIG}
    async with running(Settings.model_validate(settings)) as service:
        yield service


@pytest.fixture(scope="module")
def vllm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> VLLMServer:
    return the_server(pytestconfig, tmp_path_factory.mktemp("vllm-server"), tiny_model)


async def answered(service: Inline, **fields: Any) -> Json:
    """The one choice of a chat that must succeed."""
    status, answer = await service.post(CHAT, body(**fields))
    assert status == 200, answer
    check_openai(answer, n=fields.get("n", 1))
    choice: Json = answer["choices"][0]
    return choice


def check_calls(calls: list[Json]) -> None:
    """Each call is of a known tool, with arguments that satisfy its schema, and an id of its own."""
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


class TestTools:
    @pytest.mark.parametrize("name", list(SCHEMAS))
    async def test_a_named_tool_is_called(self, tools: Inline, name: str) -> None:
        choice = await answered(tools, tools=STRICT, tool_choice=named(name), logit_bias=blanks(tools))
        (call,) = choice["message"]["tool_calls"]
        check_calls([call])
        assert call["function"]["name"] == name

    @pytest.mark.parametrize("seed", range(3))
    async def test_a_required_tool_is_called(self, tools: Inline, seed: int) -> None:
        """Ended behind the first call: a model of random weights calls on and on."""
        end = {"stop": "</tool_call>", "include_stop_str_in_output": True}
        fields = {"tools": STRICT, "tool_choice": "required", "logit_bias": blanks(tools), **end}
        choice = await answered(tools, temperature=1, seed=seed, **fields)
        check_calls(choice["message"]["tool_calls"])

    async def test_one_call_is_left_when_they_may_not_be_several(self, tools: Inline) -> None:
        two = {"tool_choice": "auto", "structured_outputs": {"regex": f"{CALLED}\n{CALLED}"}}
        several = await answered(tools, **two)
        one = await answered(tools, parallel_tool_calls=False, **two)
        assert [len(choice["message"]["tool_calls"]) for choice in (several, one)] == [2, 1]

    async def test_with_auto_a_call_in_the_text_is_found(self, tools: Inline) -> None:
        choice = await answered(tools, tool_choice="auto", structured_outputs={"regex": CALLED})
        (call,) = choice["message"]["tool_calls"]
        check_calls([call])
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]

    async def test_with_auto_a_text_without_a_call_is_a_text(self, tools: Inline) -> None:
        choice = await answered(tools, tool_choice="auto", structured_outputs={"choice": ["no bears"]})
        assert choice["message"]["content"] == "no bears"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"

    async def test_with_none_a_call_in_the_text_stays_text(self, tools: Inline) -> None:
        choice = await answered(tools, tool_choice="none", structured_outputs={"regex": CALLED})
        assert "<tool_call>" in choice["message"]["content"]
        assert "tool_calls" not in choice["message"]

    async def test_tools_are_shown_to_the_template(self, tools: Inline) -> None:
        """The tests' model has a template that knows no tools; what it renders is what vLLM's server renders."""
        _, answer = await tools.post(CHAT, body(tool_choice="auto", max_tokens=1, return_prompt_text=True))
        assert "How many bears" in answer["prompt_text"]

    async def test_calls_and_their_results_can_be_sent_back(self, tools: Inline) -> None:
        choice = await answered(tools, tool_choice="auto", structured_outputs={"regex": CALLED})
        (call,) = choice["message"]["tool_calls"]
        history = [
            *body()["messages"],
            choice["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        ]
        await answered(tools, messages=history, max_tokens=5, tool_choice="none")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": None, "tool_choice": "required"}, "tool_choice"),
            ({"tools": None, "tool_choice": named("x")}, "tool_choice"),
            ({"tool_choice": named("x")}, "tool_choice"),
            ({"tool_choice": "sometimes"}, "tool_choice"),
            ({"tools": []}, "tools"),
            ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ],
        ids=str,
    )
    async def test_a_wrong_choice_is_refused_by_name(self, tools: Inline, fields: Json, param: str) -> None:
        status, answer = await tools.post(CHAT, body(**fields))
        assert status == 400
        check_error_object(answer["error"])
        assert answer["error"]["param"] == param

    @pytest.mark.parametrize(
        "parameters",
        [
            {"$ref": "#"},
            {"type": "foo"},
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3000)}},
        ],
        ids=lambda value: str(value)[:30],
    )
    @pytest.mark.parametrize("choice", ["required", named("look")], ids=["required", "named"])
    async def test_a_schema_that_cannot_be_served_is_refused_soon(
        self, tools: Inline, parameters: Json, choice: Any
    ) -> None:
        async with asyncio.timeout(10):
            status, answer = await tools.post(
                CHAT, body(tools=[tool("look", parameters, strict=True)], tool_choice=choice)
            )
        assert status == 400, answer
        check_error_object(answer["error"])
        tools.assert_idle()
        await tools.assert_serves()


def blanks(service: Inline) -> Json:
    """A bias against tokens of nothing but white space, in which a model of random weights loses itself."""
    texts = ((token, service.tokenizer.decode([token])) for token in range(service.vocab_size))
    return {str(token): -100 for token, text in texts if text and not text.strip()}


CASES: list[Json] = [
    {"tool_choice": named("find_city")},
    {"tool_choice": named("count_bears"), "n": 2, "temperature": 1, "seed": 5},
    {"tool_choice": "required", "max_tokens": 60},
    {"tools": STRICT, "tool_choice": "required", "temperature": 1, "seed": 4},
    {"tools": STRICT, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": 4},
    {"tools": STRICT, "tool_choice": named("find_city"), "temperature": 1, "seed": 4},
    {"tools": STRICT, "tool_choice": "auto", "max_tokens": 20},
    {"tool_choice": "auto", "structured_outputs": {"regex": CALLED}},
    {"tool_choice": "auto", "structured_outputs": {"regex": "so " + CALLED}},
    {"tool_choice": "auto", "structured_outputs": {"choice": ["no bears"]}},
    {"tool_choice": "none", "structured_outputs": {"regex": CALLED}},
    {"max_tokens": 8, "return_prompt_text": True},
    {"tool_choice": "auto", "structured_outputs": {"regex": CALLED}, "logprobs": True, "top_logprobs": 1},
]


def without_ids(answer: Json) -> Json:
    """Ids of calls are drawn by chance."""
    text = re.sub(r"(chatcmpl-tool|call)[-_]\w+", "an id", json.dumps(answer))
    found: Json = json.loads(text)
    return found


@pytest.mark.parametrize("fields", CASES, ids=lambda value: str(value)[:70])
async def test_the_answer_is_that_of_vllms_server(tools: Inline, vllm: VLLMServer, fields: Json) -> None:
    their_status, theirs = await asyncio.to_thread(vllm.post, CHAT, body(**fields))
    our_status, ours = await tools.post(CHAT, body(**fields))
    assert (their_status, our_status) == (200, 200), (theirs, ours)
    assert differences(without_ids(comparable(theirs)), without_ids(comparable(ours))) == []


@pytest.mark.parametrize("fields", CASES, ids=lambda value: str(value)[:70])
async def test_a_stream_holds_the_calls_of_the_answer_in_one_piece(tools: Inline, fields: Json) -> None:
    _, whole = await tools.post(CHAT, body(**fields))
    answer = await tools.client.post(CHAT, json=body(**fields, stream=True))
    events, is_ended = events_of(answer.content)
    assert is_ended
    check_events(events, n=fields.get("n", 1))
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        expected = choice["message"].get("tool_calls", [])
        assert [call["index"] for call in calls] == list(range(len(expected)))
        assert [call["function"] for call in calls] == [call["function"] for call in expected]
        text = "".join(part["delta"].get("content") or "" for part in parts)
        assert text == (choice["message"]["content"] or "")
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


# --- reasoning ---


THINK, UNTHINK = 3, 4
"""Tokens of the tests' model that become the marks of reasoning."""


def with_marks(content: dict[str, Any]) -> None:
    """Two special tokens become the marks that ``deepseek_r1`` and its like look for."""
    vocabulary = content["model"]["vocab"]
    for added in content["added_tokens"]:
        if added["id"] in (THINK, UNTHINK):
            vocabulary.pop(added["content"], None)
            added |= {"content": "<think>" if added["id"] == THINK else "</think>", "special": False}
            vocabulary[added["content"]] = added["id"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinking(
    the_engine: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Inline]:
    """A service whose model thinks, in the place of the session's."""
    await the_engine.close()
    model = variant(tiny_model, tmp_path_factory.mktemp("thinking") / "model", tokenizer=with_marks)
    values = {"model": str(model), "served_model_name": "tiny", "engine_process": "inline"}
    settings = {**values, "reasoning_parser": "deepseek_r1", "vllm_config": ENGINE_CONFIG}
    async with running(Settings.model_validate(settings)) as service:
        yield service


class TestReasoning:
    def asked(self, **fields: Any) -> Json:
        bears = {"structured_outputs": {"choice": ["bears"]}, "thinking_token_budget": 5, "max_tokens": 40}
        no_second_mark = {"logit_bias": {str(THINK): -100}}
        messages = [{"role": "user", "content": "Who lives here?"}, {"role": "assistant", "content": "<think>"}]
        goes_on = {"continue_final_message": True, "add_generation_prompt": False}
        return {"messages": messages, "temperature": 0, **goes_on, **bears, **no_second_mark, **fields}

    async def test_it_stands_beside_the_text_which_alone_is_bound_to_a_form(self, thinking: Inline) -> None:
        status, answer = await thinking.post(CHAT, self.asked())
        assert status == 200, answer
        check_openai(answer)
        message = answer["choices"][0]["message"]
        assert message["content"] == "bears"
        assert message["reasoning"]
        assert "think>" not in message["reasoning"]

    async def test_it_is_left_out_when_it_is_not_wanted(self, thinking: Inline) -> None:
        """vLLM binds the text from its first token then."""
        status, answer = await thinking.post(CHAT, self.asked(include_reasoning=False))
        assert status == 200, answer
        assert not answer["choices"][0]["message"].get("reasoning")

    async def test_a_stream_holds_it_too(self, thinking: Inline) -> None:
        _, whole = await thinking.post(CHAT, self.asked())
        answer = await thinking.client.post(CHAT, json=self.asked(stream=True))
        events, is_ended = events_of(answer.content)
        assert is_ended
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        for name in ("content", "reasoning"):
            assert "".join(delta.get(name) or "" for delta in deltas) == whole["choices"][0]["message"][name]


# --- starts ---


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
async def test_a_parser_that_vllm_does_not_have_is_told_with_those_it_has(setting: str) -> None:
    args = VLLMOfflineArgs.model_validate({"model": "m", "served_model_name": "m", setting: "no-such-parser"})
    with pytest.raises(StartError) as caught:
        check_parsers(args)
    message = str(caught.value)
    assert message.startswith(f"{setting}: vLLM has no 'no-such-parser'")
    assert ("hermes" if setting == "tool_call_parser" else "deepseek_r1") in message


async def test_such_a_parser_ends_the_start_with_one_line(tmp_path: Path, tiny_model: Path) -> None:
    service = ServiceProcess(tmp_path, "--model", str(tiny_model), "--tool-call-parser", "no-such-parser")
    try:
        code = await asyncio.to_thread(service.wait_exit, 90)
    finally:
        service.end()
    assert code == 1
    (line,) = [line for line in service.err.splitlines() if "no-such-parser" in line]
    assert "tool_call_parser" in line
    assert "Traceback" not in service.err
