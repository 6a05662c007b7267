"""Bad input on OpenAI's routes: each a clear error of the one shape, and the service stays ready."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from app.prompts.openai import HARMLESS, REFUSED, ChatCompletionRequest, CompletionRequest, OpenAIBody
from tests.service.support import Caller, Connection, Json, Process, check_error, fake_text, strict_json

ROUTES: dict[str, type[OpenAIBody]] = {"completions": CompletionRequest, "chat/completions": ChatCompletionRequest}
BOTH = pytest.mark.parametrize("route", list(ROUTES))
HUGE = 10**400
VALUES: list[Any] = [
    0,
    -1,
    1.5,
    HUGE,
    -HUGE,
    1e300,
    True,
    "",
    "x",
    "5",
    "x" * 100_000,
    [],
    [None],
    ["x", 5],
    [[]],
    [[[[1]]]],
    {},
    {"a": 1},
    {"": {"a": []}},
]
"""Of every JSON type; wrong for most fields."""


def right(route: str, /, **fields: Any) -> Json:
    prompt: Json = {"prompt": "x"} if route == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return {"max_tokens": 2, **prompt, **fields}


def fields() -> Iterator[tuple[str, str]]:
    for route, model in ROUTES.items():
        yield from ((route, name) for name in sorted(model.field_names()))


@pytest.fixture(autouse=True)
async def _serves_afterwards(remote: Caller) -> Any:
    yield
    assert (await remote.get("/health")).status_code == 200
    assert await remote.metric("batchserve_queue_requests") == 0
    body = await remote.completion(prompt="after", max_tokens=7)
    assert body["choices"][0]["text"] == fake_text("after", 7)


@pytest.mark.parametrize(("route", "name"), list(fields()))
async def test_a_wrong_value_of_any_type_is_refused_by_the_name_of_its_field(
    remote: Caller, route: str, name: str
) -> None:
    refused = 0
    for value in VALUES:
        response = await remote.call("POST", f"/v1/{route}", json=right(route, **{name: value}))
        assert response.status_code in (200, 400, 404), (value, response.text)
        if response.status_code != 200:
            refused += 1
            error = check_error(response)
            is_too_long = error["code"] == "context_length_exceeded"  # counted in tokens, wherever they come from
            assert is_too_long or (error["param"] or "").split(".")[0] == name, (value, error)
    assert refused >= 8


@pytest.mark.parametrize("name", sorted({*HARMLESS, *REFUSED}))
@BOTH
async def test_a_field_beside_the_models_never_harms(remote: Caller, route: str, name: str) -> None:
    for value in VALUES:
        response = await remote.call("POST", f"/v1/{route}", json=right(route, **{name: value}))
        assert response.status_code in ((200,) if name in HARMLESS else (200, 400))


RAW: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n ",
    "no JSON": b"prompt=x",
    "an array": b"[]",
    "a string": b'"x"',
    "a number": b"5",
    "null": b"null",
    "cut": b'{"prompt": "x"',
    "two values": b'{"prompt": "x"} {}',
    "a comment": b'{"prompt": "x" /* y */}',
    "single quotes": b"{'prompt': 'x'}",
    "NaN": b'{"prompt": "x", "messages": [], "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "messages": [], "logit_bias": {"5": Infinity}}',
    "NaN in a field that is ignored": b'{"prompt": "x", "messages": [], "zebra": NaN}',
    "-Infinity deep within": b'{"prompt": "x", "messages": [], "metadata": {"a": [-Infinity]}}',
    "a lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "a lone surrogate in a key": b'{"prompt": "x", "messages": [], "\\udfff": 1}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "deep arrays": b'{"prompt": "x", "zebra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"prompt": "x", "zebra": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}",
    "a number of a million digits": b'{"prompt": "x", "messages": [], "seed": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("name", list(RAW))
@BOTH
async def test_what_is_no_strict_json_is_refused(remote: Caller, route: str, name: str) -> None:
    response = await remote.call("POST", f"/v1/{route}", content=RAW[name])
    assert check_error(response)["code"] == "invalid_request"


@BOTH
async def test_a_number_beyond_a_float_is_refused_not_taken_for_infinity(remote: Caller, route: str) -> None:
    body = json.dumps(right(route, logit_bias={"5": 1})).replace('"5": 1', '"5": 1e999').encode()
    response = await remote.call("POST", f"/v1/{route}", content=body)
    assert check_error(response)["param"] == "logit_bias"


@BOTH
async def test_a_compressed_body_is_refused(remote: Caller, route: str) -> None:
    headers = {"content-encoding": "gzip"}
    response = await remote.call("POST", f"/v1/{route}", content=b"\x1f\x8b", headers=headers)
    assert check_error(response)["code"] == "invalid_request"


@pytest.mark.parametrize("kind", [{}, [], ["text"], 5, True], ids=str)
async def test_a_part_whose_type_is_no_word_is_refused(remote: Caller, kind: object) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": kind, "audio_url": "0"}]}]}
    response = await remote.call("POST", "/v1/chat/completions", json=body)
    error = check_error(response)
    assert error["code"] == "invalid_request"
    assert error["param"].startswith("messages.0.content.0")


MANY: dict[str, tuple[Json, str]] = {
    "stop strings": ({"stop": ["stop"] * 500_000}, "stop"),
    "different stop strings": ({"stop": [str(number) for number in range(500_000)]}, "stop"),
    "stop tokens": ({"stop_token_ids": list(range(500_000))}, "stop_token_ids"),
    "biases": ({"logit_bias": {str(number): 1 for number in range(60_000)}}, "logit_bias"),
    "bad words": ({"bad_words": ["bear"] * 500_000}, "bad_words"),
    "allowed tokens": ({"allowed_token_ids": [5] * 500_000}, "allowed_token_ids"),
    "choices": ({"structured_outputs": {"choice": ["a"] * 500_000}}, "structured_outputs.choice"),
    "a long pattern": ({"structured_outputs": {"regex": "a" * 500_000}}, "structured_outputs.regex"),
    "a long grammar": ({"structured_outputs": {"grammar": "a" * 500_000}}, "structured_outputs.grammar"),
    "a long label": ({"request_id": "x" * 500_000}, "request_id"),
    "a long salt": ({"cache_salt": "x" * 500_000}, "cache_salt"),
    "a long model": ({"model": "x" * 500_000}, "model"),
}


@pytest.mark.parametrize("name", list(MANY))
@BOTH
async def test_too_many_of_anything_is_refused_within_seconds(remote: Caller, route: str, name: str) -> None:
    body, param = MANY[name]
    async with asyncio.timeout(10):
        response = await remote.call("POST", f"/v1/{route}", json=right(route, **body))
    assert (check_error(response)["param"] or "").startswith(param)


CHAT: dict[str, tuple[Json, str]] = {
    "tools": ({"tools": [{"type": "function", "function": {"name": "a"}}] * 50_000}, "tools"),
    "messages": ({"messages": [{"role": "user", "content": "x"}] * 50_000}, "messages"),
    "parts": ({"messages": [{"role": "user", "content": ["x"] * 200_000}]}, "messages"),
    "parts of all messages": ({"messages": [{"role": "user", "content": ["x"] * 100}] * 4000}, "messages"),
    "documents": ({"documents": [{"a": "b"}] * 50_000}, "documents"),
    "variables": ({"chat_template_kwargs": {str(number): 1 for number in range(50_000)}}, "chat_template_kwargs"),
}


@pytest.mark.parametrize("name", list(CHAT))
async def test_too_many_parts_of_a_chat_are_refused_within_seconds(remote: Caller, name: str) -> None:
    body, param = CHAT[name]
    async with asyncio.timeout(10):
        response = await remote.call("POST", "/v1/chat/completions", json=right("chat/completions", **body))
    assert (check_error(response)["param"] or "").startswith(param)


@BOTH
async def test_a_body_over_the_limit_is_refused_while_it_comes(shared: Process, route: str) -> None:
    async with await shared.connect() as connection:
        await connection.post(f"/v1/{route}", right(route, user="x" * (33 << 20)))
        status, _, body = await connection.answer(30)
    assert (status, strict_json(body)["error"]["code"]) == (413, "request_too_large")


async def test_many_prompts_of_the_wrong_kind_are_one_error(remote: Caller) -> None:
    error = await remote.completion(prompt=[["x"]] * 4000, status=400)
    assert error["param"].startswith("prompt.0")


async def test_half_a_body_and_silence_leave_nothing(shared: Process, remote: Caller) -> None:
    connections: list[Connection] = [await shared.connect() for _ in range(20)]
    for connection in connections:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await remote.completion(max_tokens=1)
    for connection in connections:
        await connection.hang_up()


@BOTH
async def test_wrong_and_right_calls_at_once_do_not_mix(remote: Caller, route: str) -> None:
    wrong: list[Json] = [
        {"n": 0},
        {"model": "other"},
        {"stop": [""]},
        {"temperature": 9},
        {"best_of": 3},
        {"stream": 1},
    ]
    expected = await remote.openai(route, right(route, max_tokens=12))

    async def one(number: int) -> None:
        if number % 2:
            fields = wrong[number // 2 % len(wrong)]
            await remote.openai(route, right(route, **fields), status=404 if "model" in fields else 400)
        else:
            assert (await remote.openai(route, right(route, max_tokens=12)))["choices"] == expected["choices"]

    order = list(range(120))
    random.Random(4).shuffle(order)
    await asyncio.gather(*map(one, order))


async def test_a_random_mixture_of_fields_is_never_a_server_error(remote: Caller) -> None:
    dice = random.Random(17)
    for route, _ in itertools.product(ROUTES, range(150)):
        names = dice.sample(sorted({*ROUTES[route].field_names(), *HARMLESS, *REFUSED, "zebra"}), 4)
        body = right(route, **{name: dice.choice(VALUES) for name in names})
        response = await remote.call("POST", f"/v1/{route}", json=body)
        assert response.status_code in (200, 400, 404), body
