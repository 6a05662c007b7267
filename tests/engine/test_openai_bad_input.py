"""Bad input on OpenAI's routes in front of a real engine: a clear 400, soon, and the engine untouched."""

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.engine.inline import Inline
from tests.service.support import check_error_object

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    # Raised inside vLLM, of its own use of xgrammar and of its own fields.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
REFUSED_S = 5.0
"""Far more than it takes: machines of tests are slow at times."""


def body_for(route: str, /, **fields: Any) -> Json:
    prompt: Json = {"prompt": "Hi"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    return {"max_tokens": 4, "temperature": 0, **prompt, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def _is_warm(the_engine: Any) -> None:
    """The first grammar waits for the checker to start, which is not what is tested here."""
    inline = await the_engine.service()
    await inline.post(COMPLETIONS, body_for(COMPLETIONS, structured_outputs={"choice": ["a"]}))


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _serves_afterwards(inline: Inline) -> Any:
    yield
    await inline.assert_serves()
    assert (await inline.client.get("/health")).status_code == 200


async def refused(inline: Inline, route: str, /, **fields: Any) -> Json:
    """The error of a body that must be refused soon, without the engine's help."""
    before, begun = int(inline.llm.request_counter.counter), time.monotonic()
    status, answer = await inline.post(route, body_for(route, **fields))
    seconds = time.monotonic() - begun
    assert status == 400, (status, str(answer)[:500])
    assert seconds < REFUSED_S
    assert int(inline.llm.request_counter.counter) == before
    error: Json = answer["error"]
    check_error_object(error)
    return error


# --- schemas, patterns and grammars ---


def nested(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def properties(count: int, **more: Any) -> Json:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}, **more}


def a_thousand_choices() -> Json:
    return {"anyOf": [properties(20, title=str(number)) for number in range(1000)]}


SCHEMAS: dict[str, Any] = {
    "two thousand properties": properties(2000, required=[f"p{number}" for number in range(2000)]),
    "two thousand optional properties": properties(2000),
    "ten thousand properties": properties(10_000),
    "a reference to itself": {"$ref": "#"},
    "a reference to itself in a definition": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "two references to each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "a list that must hold itself": {
        "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
        "$ref": "#/$defs/a",
    },
    "a reference to nothing": {"$ref": "#/$defs/nothing"},
    "a reference elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "an unknown type": {"type": "foo"},
    "a type that is a number": {"type": 5},
    "properties that are a list": {"type": "object", "properties": []},
    "an enum of nothing": {"enum": []},
    "a pattern that does not end": {"type": "string", "pattern": "("},
    "a pattern that explodes": {"type": "string", "pattern": "^(a|b|ab){1,2000}(c{1,2000}d{1,2000}){1,2000}$"},
    "a range upside down": {"type": "integer", "minimum": 5, "maximum": 1},
    "an endless string": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "a list of a billion": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "a thousand alternatives": a_thousand_choices(),
}
HEAVY = {"an enum of nothing", "a thousand alternatives", "an endless string", "a list of a billion"}
"""These may be refused or served."""
MUST = SCHEMAS.keys() - HEAVY
PATTERNS = {
    "open": "[",
    "unbalanced": "(a",
    "nothing to repeat": "*a",
    "look-behind": "(?<=a)b",
    "back-reference": r"(a)\1",
}
HEAVY_PATTERNS = [
    "(a|b|c){1,500}(d{1,500}e{1,500}){1,500}",
    "((((a{1,50}){1,50}){1,50}){1,50}){1,50}",
    "a{1000000000}",
    "(a?){500}a{500}",
    "(a|a)*" * 200,
    "(.*a){60}",
    "([a-z]+)*!",
    "(x+x+)+y",
    "[\\u0000-\\uffff]{1,100000}",
]
GRAMMARS = {
    "nothing": " ",
    "no grammar": "x",
    "an undefined rule": 'root ::= "a" other',
    "no root": 'other ::= "a"',
    "only itself": "root ::= root",
    "left recursion without an end": 'root ::= root "a"',
    "two rules without an end": "root ::= a\na ::= b\nb ::= a",
    "an open string": 'root ::= "a',
    "an open bracket": 'root ::= ("a"',
    "twenty thousand rules": "root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1} | "b" r{n}' for n in range(2000)),
}


@pytest.mark.parametrize("name", sorted(MUST))
@pytest.mark.parametrize("form", ["response_format", "structured_outputs", "text"])
@BOTH
async def test_a_schema_that_cannot_be_served_is_refused(inline: Inline, route: str, form: str, name: str) -> None:
    error = await refused(inline, route, **as_form(form, SCHEMAS[name]))
    assert (error["param"] or "").split(".")[0] == (
        "response_format" if form == "response_format" else "structured_outputs"
    )
    assert len(error["message"]) > 10


def as_form(form: str, schema: Any) -> Json:
    if form == "response_format":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    return {"structured_outputs": {"json": json.dumps(schema) if form == "text" else schema}}


@pytest.mark.parametrize("name", sorted(HEAVY))
async def test_a_heavy_schema_is_refused_or_served_soon(inline: Inline, name: str) -> None:
    await tried_beside_a_neighbour(inline, as_form("text", SCHEMAS[name]))


@pytest.mark.parametrize("pattern", HEAVY_PATTERNS, ids=lambda pattern: pattern[:30])
async def test_a_heavy_pattern_is_refused_or_served_soon(inline: Inline, pattern: str) -> None:
    await tried_beside_a_neighbour(inline, {"structured_outputs": {"regex": pattern}})


async def tried_beside_a_neighbour(inline: Inline, fields: Json) -> None:
    """Refused or served, and what stands beside it is served at the same time."""
    async with asyncio.timeout(20):
        (status, answer), (other, _) = await asyncio.gather(
            inline.post(COMPLETIONS, body_for(COMPLETIONS, max_tokens=20, **fields)),
            inline.post(COMPLETIONS, body_for(COMPLETIONS)),
        )
    assert (status in (200, 400), other) == (True, 200), answer


@pytest.mark.parametrize("name", list(PATTERNS))
@BOTH
async def test_a_pattern_that_cannot_be_served_is_refused(inline: Inline, route: str, name: str) -> None:
    error = await refused(inline, route, structured_outputs={"regex": PATTERNS[name]})
    assert (error["param"] or "").startswith("structured_outputs")


@pytest.mark.parametrize("name", list(GRAMMARS))
@BOTH
async def test_a_grammar_that_cannot_be_served_is_refused(inline: Inline, route: str, name: str) -> None:
    error = await refused(inline, route, structured_outputs={"grammar": GRAMMARS[name]})
    assert (error["param"] or "").startswith("structured_outputs")


@pytest.mark.parametrize("text", ["", "{", "[]x", "5", "null", '{"type": "string"', "\x00", "NaN"])
async def test_a_schema_as_text_that_is_none_is_refused(inline: Inline, text: str) -> None:
    error = await refused(inline, COMPLETIONS, structured_outputs={"json": text})
    assert (error["param"] or "").startswith("structured_outputs")


@BOTH
async def test_a_deep_schema_is_refused_or_served(inline: Inline, route: str) -> None:
    for depth in (10, 25, 60, 200):
        status, answer = await inline.post(route, body_for(route, structured_outputs={"json": nested(depth)}))
        assert status in (200, 400), answer
    deep = '{"type":"array","items":' * 5000 + "{}" + "}" * 5000
    await refused(inline, route, structured_outputs={"json": deep})


async def test_a_wrong_schema_of_a_tool_is_refused(inline: Inline) -> None:
    """Without the setting for tools, whatever it is; with it: see the tests of tools."""
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMAS["a reference to itself"]}}
    assert (await refused(inline, CHAT, tools=[tool], tool_choice="required"))["param"] == "tool_choice"


# --- in any order ---


async def all_of(*calls: Coroutine[Any, Any, None]) -> None:
    """All to their ends, also when one fails: the engine is idle then."""
    for failure in await asyncio.gather(*calls, return_exceptions=True):
        if failure is not None:
            raise failure


def good_bodies() -> Iterator[tuple[Json, Any]]:
    """Right ones, with what their text must be."""
    yield {"structured_outputs": {"choice": ["bear", "wolf"]}}, lambda text: text in ("bear", "wolf")
    yield {"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}
    yield {"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, lambda text: text in ("ab", "ac")
    yield {}, lambda text: text != ""


def bad_bodies() -> list[Json]:
    return [
        *(as_form(form, SCHEMAS[name]) for name in sorted(MUST) for form in ("response_format", "text")),
        *({"structured_outputs": {"regex": pattern}} for pattern in PATTERNS.values()),
        *({"structured_outputs": {"grammar": grammar}} for grammar in GRAMMARS.values()),
        {"logit_bias": {"999999999": 1}},
        {"stop_token_ids": [-1]},
    ]


async def test_bad_and_good_ones_at_once_do_not_mix(inline: Inline) -> None:
    good, bad = list(good_bodies()), bad_bodies()

    async def right(number: int) -> None:
        fields, is_right = good[number % len(good)]
        status, answer = await inline.post(COMPLETIONS, body_for(COMPLETIONS, max_tokens=6, **fields))
        assert status == 200, answer
        assert is_right(answer["choices"][0]["text"]), (fields, answer["choices"])

    async def wrong(number: int) -> None:
        fields = bad[number % len(bad)]
        status, answer = await inline.post(
            (COMPLETIONS, CHAT)[number % 2], body_for((COMPLETIONS, CHAT)[number % 2], **fields)
        )
        assert status == 400, (fields, answer)

    calls = [call for number in range(len(bad)) for call in ((right, number), (wrong, number))]
    random.Random(3).shuffle(calls)
    await all_of(*(call(number) for call, number in calls))


async def test_a_bad_one_just_before_and_just_behind_a_good_one_changes_nothing(inline: Inline) -> None:
    plain = body_for(COMPLETIONS, max_tokens=8)
    _, alone = await inline.post(COMPLETIONS, plain)
    for fields in bad_bodies()[::3]:
        assert (await inline.post(COMPLETIONS, body_for(COMPLETIONS, **fields)))[0] == 400
        status, answer = await inline.post(COMPLETIONS, plain)
        assert (status, answer["choices"]) == (200, alone["choices"])


# --- output that validates ---

STRICT: Json = {"additionalProperties": False}
VALID: list[Json] = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -9, "maximum": 99}},
        "required": ["a"],
        **STRICT,
    },
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"], **STRICT},
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        **STRICT,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"const": 5}}, "required": ["a", "b"], **STRICT},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"type": "string", "pattern": "^[a-z]{3}$"},
    {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"], **STRICT}},
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"$ref": "#/$defs/leaf"}},
        "required": ["l", "r"],
        **STRICT,
    },
    {"type": "string", "minLength": 2, "maxLength": 4},
]


def blanks(inline: Inline) -> Json:
    """A bias against tokens of nothing but white space, in which a model of random weights loses itself."""
    texts = ((token, inline.tokenizer.decode([token])) for token in range(inline.vocab_size))
    return {str(token): -100 for token, text in texts if text and not text.strip()}


async def test_a_hundred_requests_over_ten_schemas_all_validate(inline: Inline) -> None:
    bias = blanks(inline)

    async def one(number: int) -> None:
        schema, route = VALID[number % 10], (COMPLETIONS, CHAT)[number % 2]
        form = ("response_format", "structured_outputs")[number // 2 % 2]
        fields = {**as_form(form, schema), "temperature": 1, "seed": number, "max_tokens": 200, "logit_bias": bias}
        status, answer = await inline.post(route, body_for(route, **fields))
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        text = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
        jsonschema.validate(json.loads(text), schema)

    await all_of(*map(one, range(100)))


# --- too many, too deep, not finite ---


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["stop"] * 500_000}, "stop"),
        ({"stop": [str(number) for number in range(500_000)]}, "stop"),
        ({"bad_words": ["bear"] * 500_000}, "bad_words"),
        ({"logit_bias": {str(number): 1 for number in range(49_000)}}, "logit_bias"),
        ({"allowed_token_ids": [*range(49_000), 10**9]}, "allowed_token_ids"),
        ({"stop_token_ids": [1] * 500_000}, "stop_token_ids"),
        ({"structured_outputs": {"choice": ["a"] * 500_000}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a" * 900] * 1000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a?" * 30_000}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
@BOTH
async def test_too_many_of_anything_is_refused_soon(inline: Inline, route: str, fields: Json, param: str) -> None:
    assert (await refused(inline, route, **fields))["param"].split(".")[0] == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize(
    "field", ['"temperature": %s', '"logit_bias": {"5": %s}', '"top_p": %s', '"seed": %s', '"n": %s']
)
@BOTH
async def test_what_is_no_finite_number_is_refused(inline: Inline, route: str, field: str, number: str) -> None:
    raw = json.dumps(body_for(route)).replace('"temperature": 0', field % number)
    status, answer = await inline.post(route, raw.encode())
    assert status == 400, answer


@pytest.mark.parametrize(
    "text", ["\x00", "\ufffe", "👩\u200d👩\u200d👧" * 50, "\u202e", "\U0010ffff", "<|im_end|>" * 20], ids=ascii
)
@BOTH
async def test_strange_characters_work(inline: Inline, route: str, text: str) -> None:
    prompt: Json = {"prompt": text} if route == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    for fields in ({}, {"stream": True}):
        answer = await inline.client.post(route, json={**body_for(route), **prompt, **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "prompt", [[49_152], [-1], [2**31], [2**63], [10**400], [5, 6, 49_152]], ids=lambda ids: str(ids)[:30]
)
async def test_a_prompt_id_outside_the_vocabulary_is_named(inline: Inline, prompt: list[int]) -> None:
    error = await refused(inline, COMPLETIONS, prompt=prompt)
    assert error["param"] == f"prompt.{len(prompt) - 1}"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "x", "tool_calls": [{"a": 1}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": 5, "arguments": []}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "\x00", "content": "x"}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": "x"}] * 4000,
    ],
    ids=lambda value: str(value)[:70],
)
async def test_an_odd_conversation_is_refused_or_served(inline: Inline, messages: list[Json]) -> None:
    status, answer = await inline.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert status in (200, 400), answer


async def test_variables_of_a_template_cannot_reach_into_transformers(inline: Inline) -> None:
    for name in ("tokenize", "chat_template", "return_tensors", "conversation", "tools", "messages", "padding"):
        error = await refused(inline, CHAT, chat_template_kwargs={name: "x"})
        assert error["param"] == f"chat_template_kwargs.{name}"


async def test_a_long_list_of_prompts_with_one_wrong_grammar_admits_none(inline: Inline) -> None:
    error = await refused(inline, COMPLETIONS, prompt=["Hi"] * 500, structured_outputs={"regex": "["})
    assert error["param"].startswith("structured_outputs")
