"""Bad input: each a clear error of the one shape, at no cost to anybody else, and the service stays ready.

Every wrong body goes to a real process three times: alone, as a row between two good ones, and as the defaults
where it can stand there. After each the service is ready and answers as before.
"""

import contextlib
import json
from typing import Any

import pytest

from tests.service.support import Caller, Connection, Json, Process, check_error, fake_text, metric, text_of

CONTEXT = 2048
"""Of the fake model; a prompt of so many bytes minus one (there is one BOS) leaves no room."""
INVALID, CONTEXT_CODE, NO_MODEL = "invalid_request", "context_length_exceeded", "model_not_found"
GOOD: Json = {"prompt": "neighbour", "max_tokens": 9}
HUGE_INT = 10**40


def ok(**fields: Any) -> Json:
    """A body that is right but for what is given."""
    return {"prompt": "x", "max_tokens": 2, **fields}


def said(**message: Any) -> Json:
    """A conversation of one message."""
    return {"messages": [{"role": "user", "content": "x", **message}]}


PROMPTS: dict[str, tuple[Json, str, str | None]] = {
    "none of the prompts": ({"max_tokens": 2}, INVALID, "prompt"),
    "no field at all": ({}, INVALID, "prompt"),
    "prompt and messages": ({**said(), "prompt": "x"}, INVALID, "messages"),
    "prompt and ids": (ok(prompt_token_ids=[1]), INVALID, "prompt_token_ids"),
    "prompt and columns": (ok(columns={"text_column": ["x"]}), INVALID, "columns"),
    "prompt empty": (ok(prompt=""), INVALID, "prompt"),
    "prompt null": (ok(prompt=None), INVALID, "prompt"),
    "prompt a number": (ok(prompt=5), INVALID, "prompt"),
    "prompt a list": (ok(prompt=["x"]), INVALID, "prompt"),
    "prompt too long by one": (ok(prompt="x" * (CONTEXT - 1)), CONTEXT_CODE, None),
    "prompt too long by a hundred thousand": (ok(prompt="x" * (CONTEXT + 99_999)), CONTEXT_CODE, None),
    "ids empty": ({"prompt_token_ids": []}, INVALID, "prompt_token_ids"),
    "ids a string": ({"prompt_token_ids": "12"}, INVALID, "prompt_token_ids"),
    "ids an object": ({"prompt_token_ids": {"0": 1}}, INVALID, "prompt_token_ids"),
    "an id a string": ({"prompt_token_ids": [1, "2"]}, INVALID, "prompt_token_ids.1"),
    "an id a fraction": ({"prompt_token_ids": [1, 2.0]}, INVALID, "prompt_token_ids.1"),
    "an id a boolean": ({"prompt_token_ids": [True]}, INVALID, "prompt_token_ids.0"),
    "an id null": ({"prompt_token_ids": [1, 2, None]}, INVALID, "prompt_token_ids.2"),
    "an id a list": ({"prompt_token_ids": [[1]]}, INVALID, "prompt_token_ids.0"),
    "an id negative": ({"prompt_token_ids": [1, -1]}, INVALID, "prompt_token_ids.1"),
    "an id one beyond the vocabulary": ({"prompt_token_ids": [258]}, INVALID, "prompt_token_ids.0"),
    "an id far beyond the vocabulary": ({"prompt_token_ids": [999_999_999]}, INVALID, "prompt_token_ids.0"),
    "an id of forty digits": ({"prompt_token_ids": [HUGE_INT]}, INVALID, "prompt_token_ids.0"),
    "ids too long by one": ({"prompt_token_ids": [65] * CONTEXT}, CONTEXT_CODE, None),
    "ids too long by a hundred thousand": ({"prompt_token_ids": [65] * (CONTEXT + 100_000)}, CONTEXT_CODE, None),
    "no message": ({"messages": []}, INVALID, "messages"),
    "messages a string": ({"messages": "x"}, INVALID, "messages"),
    "a message a string": ({"messages": ["x"]}, INVALID, "messages.0"),
    "a message without role": ({"messages": [{"content": "x"}]}, INVALID, "messages.0.role"),
    "a role empty": (said(role=""), INVALID, "messages.0.role"),
    "a role a number": (said(role=1), INVALID, "messages.0.role"),
    "a content a number": (said(content=5), INVALID, "messages.0.content"),
    "a content an object": (said(content={"text": "x"}), INVALID, "messages.0.content"),
    "a part without text": (said(content=[{"type": "text"}]), INVALID, "messages.0.content.0.text"),
    "a part a string": (said(content=["x"]), INVALID, "messages.0.content.0"),
    "a part an image": (
        said(content=[{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]),
        INVALID,
        "messages.0.content.0",
    ),
    "a message with an unknown field": (said(contents="x"), INVALID, "messages.0.contents"),
    "five thousand messages": ({"messages": [{"role": "user", "content": "x"}] * 5000}, INVALID, "messages"),
    "columns a list": ({"columns": ["x"]}, INVALID, "columns"),
    "columns empty": ({"columns": {}}, INVALID, "columns.text_column"),
    "columns without text": ({"columns": {"text_column": ["", ""]}}, INVALID, "columns.text_column"),
    "a column a string": ({"columns": {"text_column": "x"}}, INVALID, "columns.text_column"),
    "a column of numbers": ({"columns": {"text_column": [1]}}, INVALID, "columns.text_column.0"),
    "a column with images": (
        {"columns": {"text_column": ["x"], "image_column": ["file:///etc/passwd"]}},
        INVALID,
        "columns.image_column",
    ),
    "an unknown column": ({"columns": {"text_column": ["x"], "texts": []}}, INVALID, "columns.texts"),
}

FIELDS: dict[str, tuple[Json, str, str | None]] = {
    "unknown field": ({"max_token": 5}, INVALID, "max_token"),
    "unknown field of a stranger": ({"zzz": 5}, INVALID, "zzz"),
    "structured output, not served yet": ({"structured_outputs": {"json": {}}}, INVALID, "structured_outputs"),
    "max_tokens a string": ({"max_tokens": "5"}, INVALID, "max_tokens"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, INVALID, "max_tokens"),
    "max_tokens a boolean": ({"max_tokens": True}, INVALID, "max_tokens"),
    "max_tokens 0": ({"max_tokens": 0}, INVALID, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, INVALID, "max_tokens"),
    "max_tokens absurd": ({"max_tokens": HUGE_INT}, INVALID, "max_tokens"),
    "min_tokens negative": ({"min_tokens": -1}, INVALID, "min_tokens"),
    "min_tokens over max_tokens": ({"min_tokens": 3, "max_tokens": 2}, INVALID, "min_tokens"),
    "temperature negative": ({"temperature": -0.1}, INVALID, "temperature"),
    "temperature too high": ({"temperature": 100}, INVALID, "temperature"),
    "temperature a string": ({"temperature": "hot"}, INVALID, "temperature"),
    "top_p 0": ({"top_p": 0}, INVALID, "top_p"),
    "top_p over 1": ({"top_p": 1.01}, INVALID, "top_p"),
    "top_k below -1": ({"top_k": -2}, INVALID, "top_k"),
    "top_k a fraction": ({"top_k": 1.5}, INVALID, "top_k"),
    "min_p negative": ({"min_p": -0.1}, INVALID, "min_p"),
    "min_p over 1": ({"min_p": 1.1}, INVALID, "min_p"),
    "n 0": ({"n": 0}, INVALID, "n"),
    "n negative": ({"n": -1}, INVALID, "n"),
    "n 129": ({"n": 129}, INVALID, "n"),
    "n absurd": ({"n": 10**9}, INVALID, "n"),
    "n a list": ({"n": [1]}, INVALID, "n"),
    "n with greedy sampling": ({"n": 2, "temperature": 0}, INVALID, "n"),
    "seed of 65 bits": ({"seed": 2**63}, INVALID, "seed"),
    "seed a string": ({"seed": "7"}, INVALID, "seed"),
    "presence_penalty out of range": ({"presence_penalty": 3}, INVALID, "presence_penalty"),
    "frequency_penalty out of range": ({"frequency_penalty": -3}, INVALID, "frequency_penalty"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, INVALID, "repetition_penalty"),
    "stop empty": ({"stop": ""}, INVALID, "stop"),
    "stop with an empty one": ({"stop": ["x", ""]}, INVALID, "stop.1"),
    "stop a number": ({"stop": 5}, INVALID, "stop"),
    "stop of numbers": ({"stop": [5]}, INVALID, "stop.0"),
    "65 stops": ({"stop": ["x"] * 65}, INVALID, "stop"),
    "stop of 1,001 characters": ({"stop": ["x" * 1001]}, INVALID, "stop.0"),
    "stop_token_ids negative": ({"stop_token_ids": [-1]}, INVALID, "stop_token_ids"),
    "stop_token_ids beyond the vocabulary": ({"stop_token_ids": [999_999_999]}, INVALID, "stop_token_ids"),
    "stop_token_ids of strings": ({"stop_token_ids": ["5"]}, INVALID, "stop_token_ids.0"),
    "logit_bias negative id": ({"logit_bias": {"-1": 1}}, INVALID, "logit_bias"),
    "logit_bias beyond the vocabulary": ({"logit_bias": {"999999999": 1}}, INVALID, "logit_bias"),
    "logit_bias not an id": ({"logit_bias": {"a": 1}}, INVALID, "logit_bias"),
    "logit_bias not a number": ({"logit_bias": {"5": "x"}}, INVALID, "logit_bias"),
    "logit_bias a list": ({"logit_bias": [1]}, INVALID, "logit_bias"),
    "logit_bias of 1,025": ({"logit_bias": {str(token): 1 for token in range(1025)}}, INVALID, "logit_bias"),
    "logprobs 21": ({"logprobs": 21}, INVALID, "logprobs"),
    "logprobs negative": ({"logprobs": -1}, INVALID, "logprobs"),
    "logprobs a boolean": ({"logprobs": True}, INVALID, "logprobs"),
    "prompt_logprobs 21": ({"prompt_logprobs": 21}, INVALID, "prompt_logprobs"),
    "ignore_eos a string": ({"ignore_eos": "yes"}, INVALID, "ignore_eos"),
    "skip_special_tokens a number": ({"skip_special_tokens": 1}, INVALID, "skip_special_tokens"),
    "bad_words with an empty one": ({"bad_words": [""]}, INVALID, "bad_words.0"),
    "model another": ({"model": "gpt-5"}, NO_MODEL, "model"),
    "model a number": ({"model": 5}, INVALID, "model"),
    "priority too low": ({"priority": -101}, INVALID, "priority"),
    "priority too high": ({"priority": 101}, INVALID, "priority"),
    "priority a fraction": ({"priority": 0.5}, INVALID, "priority"),
    "queue_timeout_s 0": ({"queue_timeout_s": 0}, INVALID, "queue_timeout_s"),
    "queue_timeout_s a string": ({"queue_timeout_s": "5"}, INVALID, "queue_timeout_s"),
    "truncate_prompt_tokens 0": ({"truncate_prompt_tokens": 0}, INVALID, "truncate_prompt_tokens"),
    "chat_template_kwargs a list": ({"chat_template_kwargs": []}, INVALID, "chat_template_kwargs"),
    "return_token_ids a string": ({"return_token_ids": "yes"}, INVALID, "return_token_ids"),
    "a template from the caller": ({"chat_template": "{{ messages }}"}, INVALID, "chat_template"),
}

NOT_IN_DEFAULTS = {"min_tokens over max_tokens", "n with greedy sampling", "model another"}
"""Right as defaults: what is wrong shows only with the item, or only once it is resolved."""

ITEM_ONLY: dict[str, tuple[Json, str, str | None]] = {
    "request_id of 257 characters": ({"request_id": "x" * 257}, INVALID, "request_id"),
    "request_id a number": ({"request_id": 5}, INVALID, "request_id"),
    "two ways to end": (
        {"continue_final_message": True, "add_generation_prompt": True},
        INVALID,
        "continue_final_message",
    ),
}

WRONG = [
    pytest.param(body, code, param, id=name)
    for name, (body, code, param) in {
        **PROMPTS,
        **{name: (ok(**body), code, param) for name, (body, code, param) in {**FIELDS, **ITEM_ONLY}.items()},
    }.items()
]
WRONG_DEFAULTS = [
    pytest.param(body, param, id=name)
    for name, (body, code, param) in FIELDS.items()
    if name not in NOT_IN_DEFAULTS and "vocabulary" not in name and "negative id" not in name
    if name != "stop_token_ids negative"
]


def nested(depth: int) -> bytes:
    """A body that is right but for a value nested ``depth`` deep."""
    return b'{"prompt":"x","chat_template_kwargs":{"a":' + b"[" * depth + b"]" * depth + b"}}"


NOT_JSON = {
    "nothing": b"",
    "blanks": b" \r\n\t",
    "a word": b"hello",
    "cut off": b'{"prompt": "x"',
    "something behind it": b'{"prompt": "x"} {"prompt": "y"}',
    "single quotes": b"{'prompt': 'x'}",
    "a trailing comma": b'{"prompt": "x",}',
    "a comment": b'{"prompt": "x" /* y */}',
    "a form": b"prompt=x&max_tokens=5",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "an overlong form": b'{"prompt": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a raw control character": b'{"prompt": "a\x00b"}',
    "a lone high surrogate": b'{"prompt": "\\ud83d"}',
    "a lone low surrogate": b'{"prompt": "x\\uDE00"}',
    "a surrogate in a key": b'{"prompt": "x", "\\ud83d": 1}',
    "a surrogate within a list": b'{"prompt": "x", "stop": ["y", "\\udc00"]}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "minus Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "a number of 5,000 digits": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "nested 100 deep": nested(100),
    "nested 100,000 deep": nested(100_000),
    "nested 100,000 deep and open": b"[" * 100_000,
    "objects nested 100,000 deep": b'{"a":' * 100_000,
    "nested deep in a large body": b'{"prompt":"' + b"x" * (2 << 20) + b'","stop":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "a large body cut off": b'{"prompt":"' + b"x" * (2 << 20),
    "a large list of ids cut off": b'{"prompt_token_ids":[' + b"65," * (1 << 20),
    "a large body with NaN": b'{"prompt":"' + b"x" * (2 << 20) + b'","top_p":NaN}',
}
NOT_AN_OBJECT = {"a list": b"[]", "a number": b"123", "null": b"null", "a string": b'"x"', "true": b"true"}

WRONG_BATCHES: dict[str, tuple[Any, str | None]] = {
    "no requests": ({}, "requests"),
    "requests null": ({"requests": None}, "requests"),
    "requests empty": ({"requests": []}, "requests"),
    "requests an object": ({"requests": GOOD}, "requests"),
    "requests a string": ({"requests": "x"}, "requests"),
    "an item a string": ({"requests": [GOOD, "x"]}, "requests.1"),
    "an item null": ({"requests": [None, GOOD]}, "requests.0"),
    "an item a list": ({"requests": [GOOD, GOOD, [GOOD]]}, "requests.2"),
    "an unknown field": ({"requests": [GOOD], "request": []}, "request"),
    "a generate body": (GOOD, "prompt"),
    "defaults a list": ({"requests": [GOOD], "defaults": []}, "defaults"),
    "defaults with a prompt": ({"requests": [GOOD], "defaults": {"prompt": "x"}}, "defaults.prompt"),
    "defaults with ids": ({"requests": [GOOD], "defaults": {"prompt_token_ids": [1]}}, "defaults.prompt_token_ids"),
    "defaults with messages": ({"requests": [GOOD], "defaults": said()}, "defaults.messages"),
    "defaults with columns": ({"requests": [GOOD], "defaults": {"columns": {}}}, "defaults.columns"),
    "defaults with a label": ({"requests": [GOOD], "defaults": {"request_id": "x"}}, "defaults.request_id"),
    "request_id a number": ({"requests": [GOOD], "request_id": 5}, "request_id"),
    "request_id too long": ({"requests": [GOOD], "request_id": "x" * 257}, "request_id"),
}


def named(values: dict[str, Any]) -> list[Any]:
    """Parameters with their names."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), id=name) for name, value in values.items()]


async def still_well(remote: Caller) -> None:
    """The service is ready, holds nothing and answers as before."""
    assert (await remote.get("/readyz")).status_code == 200
    assert text_of(await remote.generate(GOOD)) == "NEIGHBOUR"
    exposition = (await remote.get("/metrics")).text
    assert metric(exposition, "batchserve_queue_requests") == metric(exposition, "batchserve_queue_tokens") == 0


def check_param(error: Json, param: str | None) -> None:
    """``param`` is the path of the field at fault; a path within it is as good."""
    if param is None:
        assert error["param"] is None or isinstance(error["param"], str)
    else:
        assert error["param"] is not None
        assert error["param"] == param or error["param"].startswith(f"{param}."), error


@pytest.mark.parametrize(("body", "code", "param"), WRONG)
async def test_a_wrong_body_costs_its_neighbours_nothing(
    remote: Caller, body: Json, code: str, param: str | None
) -> None:
    status = 404 if code == NO_MODEL else 400
    alone = await remote.generate(body, status=status)
    assert alone["code"] == code
    check_param(alone, param)
    answer = await remote.batch([GOOD, body, GOOD])
    assert [row["status"] for row in answer["results"]] == [200, status, 200]
    assert answer["results"][1]["error"] == alone
    for row in (answer["results"][0], answer["results"][2]):
        assert text_of(row["response"]) == "NEIGHBOUR"
    await still_well(remote)


@pytest.mark.parametrize(("fields", "param"), WRONG_DEFAULTS)
async def test_wrong_defaults_are_400_for_the_whole_batch(remote: Caller, fields: Json, param: str) -> None:
    error = await remote.batch([GOOD], defaults=fields, status=400)
    assert error["code"] == INVALID
    check_param(error, f"defaults.{param}")
    await still_well(remote)


@pytest.mark.parametrize("path", ["/generate", "/batch"])
@pytest.mark.parametrize("content", named(NOT_JSON))
async def test_what_is_not_strict_json_is_400(remote: Caller, path: str, content: bytes) -> None:
    error = check_error(await remote.call("POST", path, content=content))
    assert error["code"] == INVALID
    await still_well(remote)


@pytest.mark.parametrize("path", ["/generate", "/batch"])
@pytest.mark.parametrize("content", named(NOT_AN_OBJECT))
async def test_what_is_not_an_object_is_400_and_says_so(remote: Caller, path: str, content: bytes) -> None:
    error = check_error(await remote.call("POST", path, content=content))
    assert error["code"] == INVALID
    assert "object" in error["message"]
    await still_well(remote)


@pytest.mark.parametrize(("body", "param"), named(WRONG_BATCHES))
async def test_a_wrong_frame_is_400_for_the_whole_batch(remote: Caller, body: Any, param: str | None) -> None:
    error = check_error(await remote.call("POST", "/batch", json=body))
    assert error["code"] == INVALID
    check_param(error, param)
    await still_well(remote)


@pytest.mark.parametrize("content", named({"1e999": b"1e999", "-1e999": b"-1e999"}))
@pytest.mark.parametrize("field", ["temperature", "top_p", "queue_timeout_s", "presence_penalty"])
async def test_a_number_too_large_for_a_float_is_400(remote: Caller, field: str, content: bytes) -> None:
    body = b'{"prompt": "x", "%s": %s}' % (field.encode(), content)
    error = check_error(await remote.call("POST", "/generate", content=body))
    assert error["param"] == field
    row = (await remote.call("POST", "/batch", content=b'{"requests": [%s]}' % body)).json()["results"][0]
    assert (row["status"], row["error"]["param"]) == (400, field)


async def test_nesting_up_to_the_bound_is_taken(remote: Caller) -> None:
    response = await remote.call("POST", "/generate", content=nested(60))
    assert response.status_code == 200


async def test_a_pair_of_surrogates_is_a_character(remote: Caller) -> None:
    response = await remote.call("POST", "/generate", content=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 4}')
    assert text_of(response.json()) == "😀"


async def test_five_thousand_rows_are_413_with_the_limit(remote: Caller) -> None:
    error = await remote.batch([GOOD] * 5000, status=413)
    assert (error["code"], error["limit"]) == ("request_too_large", 4096)
    assert "5000" in error["message"]
    await still_well(remote)


async def test_a_batch_of_wrong_rows_only_is_200(remote: Caller) -> None:
    answer = await remote.batch([{"prompt": ""}, {"prompt_token_ids": [-1]}, {}, ok(n=0)])
    assert answer["counts"] == {"total": 4, "succeeded": 0, "failed": 4}
    assert answer["windows"] == []
    assert answer["timings"]["prompt_tokens"] == answer["timings"]["completion_tokens"] == 0
    await still_well(remote)


async def test_a_thousand_wrong_rows_leave_nothing_behind(remote: Caller) -> None:
    rows = [ok(prompt=""), ok(n=0), {"prompt_token_ids": [999]}, ok(prompt="x" * 3000)] * 250
    answer = await remote.batch([*rows, GOOD])
    assert answer["counts"] == {"total": 1001, "succeeded": 1, "failed": 1000}
    await still_well(remote)


async def test_a_body_too_large_gets_to_see_its_413(remote: Caller) -> None:
    error = check_error(await remote.call("POST", "/generate", content=b" " * (33 << 20)))
    assert (error["code"], error["limit"]) == ("request_too_large", 32 << 20)
    await still_well(remote)


async def test_one_overlong_prompt_among_eight_fails_alone(remote: Caller) -> None:
    rows = [dict(GOOD) for _ in range(8)]
    rows[5] = {"prompt_token_ids": [65] * 5000}
    answer = await remote.batch(rows)
    assert [row["status"] for row in answer["results"]] == [200] * 5 + [400] + [200] * 2
    error = answer["results"][5]["error"]
    assert (error["code"], error["prompt_tokens"], error["limit"]) == (CONTEXT_CODE, 5000, CONTEXT)


@pytest.mark.parametrize(
    "head",
    named(
        {
            "not HTTP": b"hello\r\n\r\n",
            "no such version": b"GET /livez HTTP/9.9\r\n\r\n",
            "a bad content length": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
            "a head of a megabyte": b"GET /livez HTTP/1.1\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n",
            "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        }
    ),
)
async def test_what_is_not_http_costs_nobody_anything(shared: Process, remote: Caller, head: bytes) -> None:
    async with await shared.connect() as connection:
        with contextlib.suppress(ConnectionError):
            await connection.send(head)
        await still_well(remote)


async def test_a_client_that_sends_half_a_head_costs_nobody_anything(shared: Process, remote: Caller) -> None:
    connections: list[Connection] = []
    for _ in range(20):
        connections.append(await shared.connect())
        await connections[-1].send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-le")
    await still_well(remote)
    for connection in connections:
        await connection.hang_up()


async def test_bodies_go_over_in_both_encodings_of_json(remote: Caller) -> None:
    for ascii_only in (True, False):
        content = json.dumps({"prompt": "é日😀", "max_tokens": 9}, ensure_ascii=ascii_only).encode()
        response = await remote.call("POST", "/generate", content=content, headers={"content-type": "text/plain"})
        assert text_of(response.json()) == fake_text("é日😀", 9)
