"""Bad input in front of a real engine: a clear 400, nothing left behind, and the next request works."""

import asyncio
import time
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.inline import Inline

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

WRONG_IDS = [-1, "vocabulary", 10**9, 2**31, 2**63, 2**70, -(2**70), 10**400]
WRONG_TYPES = [1.0, 1.5, True, None, "1", [1], {"a": 1}]


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _serves_afterwards(inline: Inline) -> Any:
    yield
    await inline.assert_serves()


def token_id(inline: Inline, given: int | str) -> int:
    return inline.vocab_size if isinstance(given, str) else given


def short(value: Any) -> str:
    return str(value) if len(str(value)) < 20 else f"{str(value)[:4]}...{len(str(value))} digits"


# --- token ids ---


@pytest.mark.parametrize("given", WRONG_IDS, ids=short)
@pytest.mark.parametrize("position", [0, 2])
async def test_a_prompt_id_outside_the_vocabulary_is_refused(inline: Inline, given: int | str, position: int) -> None:
    ids: list[Any] = [5, 6, 7]
    ids[position] = token_id(inline, given)
    error = await inline.refused(prompt_token_ids=ids)
    assert error["param"] == f"prompt_token_ids.{position}"
    assert "vocabulary" in error["message"]


@pytest.mark.parametrize("given", WRONG_TYPES, ids=repr)
async def test_a_prompt_id_that_is_no_integer_is_refused(inline: Inline, given: Any) -> None:
    assert (await inline.refused(prompt_token_ids=[5, given, 7]))["param"] == "prompt_token_ids.1"


async def test_the_first_and_the_last_token_of_the_vocabulary_work(inline: Inline) -> None:
    await inline.generate(prompt_token_ids=[0, inline.vocab_size - 1], max_tokens=2)


@pytest.mark.parametrize("given", WRONG_IDS, ids=short)
async def test_a_stop_token_outside_the_vocabulary_is_refused(inline: Inline, given: int | str) -> None:
    error = await inline.refused(prompt="Hi", stop_token_ids=[5, token_id(inline, given)])
    assert error["param"].startswith("stop_token_ids")


@pytest.mark.parametrize("given", WRONG_IDS, ids=short)
async def test_a_bias_on_a_token_outside_the_vocabulary_is_refused(inline: Inline, given: int | str) -> None:
    error = await inline.refused(prompt="Hi", logit_bias={"5": 1.0, str(token_id(inline, given)): 1.0})
    assert error["param"].startswith("logit_bias")


@pytest.mark.parametrize("key", ["", "a", "1.5", " 1", "1e3", "0x1", "--1", "+1"])
async def test_a_bias_on_what_is_no_token_is_refused(inline: Inline, key: str) -> None:
    assert (await inline.refused(prompt="Hi", logit_bias={key: 1.0}))["param"].startswith("logit_bias")


# --- length ---


async def test_a_prompt_that_leaves_room_for_one_token_works(inline: Inline) -> None:
    answer = await inline.generate(prompt_token_ids=[5] * (inline.max_model_len - 1), max_tokens=50, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == inline.max_model_len - 1
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["outputs"][0]["finish_reason"] == "length"


async def test_generation_ends_at_the_end_of_the_context(inline: Inline) -> None:
    answer = await inline.generate(prompt_token_ids=[5] * (inline.max_model_len - 7), max_tokens=500, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["outputs"][0]["finish_reason"] == "length"
    assert answer["sampling"]["max_tokens"] == 7


@pytest.mark.parametrize("excess", [0, 1, 100_000])
async def test_a_prompt_that_is_too_long_says_by_how_much(inline: Inline, excess: int) -> None:
    length = inline.max_model_len + excess
    error = await inline.refused(prompt_token_ids=[5] * length)
    assert error["code"] == "context_length_exceeded"
    assert (error["prompt_tokens"], error["limit"]) == (length, inline.max_model_len)


@pytest.mark.parametrize("form", ["prompt", "messages", "columns"])
@pytest.mark.parametrize("words", [2_000, 100_000])
async def test_a_text_that_is_too_long_is_refused_in_every_form(inline: Inline, form: str, words: int) -> None:
    text = "bear " * words
    bodies: dict[str, Any] = {
        "prompt": text,
        "messages": [{"role": "user", "content": text}],
        "columns": {"text_column": [text]},
    }
    error = await inline.refused(**{form: bodies[form]})
    assert error["code"] == "context_length_exceeded"
    assert error["limit"] == inline.max_model_len
    assert error["prompt_tokens"] >= words


async def test_a_text_of_millions_of_characters_is_refused_quickly(inline: Inline) -> None:
    begun = time.monotonic()
    error = await inline.refused(prompt="x y " * 5_000_000)
    assert error["code"] == "context_length_exceeded"
    assert time.monotonic() - begun < 10


async def test_a_row_that_is_too_long_costs_its_neighbours_nothing(inline: Inline) -> None:
    requests: list[dict[str, Any]] = [{"prompt": f"{number} bears", "max_tokens": 3} for number in range(8)]
    alone = [await inline.text(**request) for request in requests]
    requests[3] = {"prompt_token_ids": [5] * 5000}
    rows = await inline.batch(requests)
    assert rows[3]["error"]["code"] == "context_length_exceeded"
    assert (rows[3]["error"]["prompt_tokens"], rows[3]["error"]["limit"]) == (5000, inline.max_model_len)
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert rows[number]["response"]["outputs"][0]["text"] == alone[number]


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt_token_ids": []}, {"messages": []}], ids=str)
async def test_an_empty_prompt_is_refused(inline: Inline, body: dict[str, Any]) -> None:
    assert (await inline.refused(**body))["param"] == next(iter(body))


async def test_a_prompt_of_white_space_works(inline: Inline) -> None:
    await inline.generate(prompt=" \n\t ", max_tokens=2)


STRANGE = ["\x00", "\ufffe", "a\x00b", "👩\u200d👩\u200d👧" * 50, "\u202e", "\U0010ffff", "<|im_end|>" * 20]


@pytest.mark.parametrize("text", STRANGE, ids=ascii)
async def test_strange_characters_work(inline: Inline, text: str) -> None:
    await inline.generate(prompt=text, max_tokens=2)
    await inline.generate(messages=[{"role": "user", "content": text}], max_tokens=2)


# --- sampling ---


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**31, 2**32, 2**63 - 1])
async def test_a_seed_of_64_signed_bits_works(inline: Inline, seed: int) -> None:
    body = {"prompt": "Hi", "seed": seed, "temperature": 1, "max_tokens": 6, "n": 2}
    texts = [[output["text"] for output in (await inline.generate(**body))["outputs"]] for _ in range(2)]
    assert texts[0] == texts[1]


async def test_seed_minus_one_is_vllms_word_for_no_seed(inline: Inline) -> None:
    answer = await inline.generate(prompt="Hi", seed=-1, temperature=1, max_tokens=2)
    assert answer["sampling"]["seed"] is None


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64, 10**400, 1.5, "7", True], ids=short)
async def test_a_seed_beyond_that_is_refused(inline: Inline, seed: Any) -> None:
    assert (await inline.refused(prompt="Hi", seed=seed, max_tokens=2))["param"] == "seed"


WRONG_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"n": 10**12}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 5000, "max_tokens": 5000}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["a" * 1001]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": list(range(100_000))}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["bear"] * 100_000}, "bad_words"),
    ({"logit_bias": {str(number): 1.0 for number in range(1025)}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 101}, "priority"),
    ({"queue_timeout_s": 0}, "queue_timeout_s"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_SAMPLING, ids=lambda value: short(value))
async def test_a_setting_out_of_its_bounds_is_refused_by_name(
    inline: Inline, fields: dict[str, Any], param: str
) -> None:
    error = await inline.refused(**{"prompt": "Hi", "max_tokens": 2, **fields})
    assert (error["param"] or "").split(".")[0] == param
    assert len(error["message"]) <= 500


async def test_the_message_for_a_mistyped_field_names_the_right_one(inline: Inline) -> None:
    assert "temperature" in (await inline.refused(prompt="Hi", temprature=1))["message"]


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("field", [b'"temperature": %s', b'"logit_bias": {"5": %s}', b'"top_p": %s', b'"seed": %s'])
async def test_what_is_no_finite_number_is_refused(inline: Inline, field: bytes, number: bytes) -> None:
    status, answer = await inline.post("/generate", b'{"prompt": "Hi", %s}' % (field % number))
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


async def test_the_widest_settings_work_together(inline: Inline) -> None:
    answer = await inline.generate(
        prompt="Hi",
        max_tokens=4,
        ignore_eos=True,
        n=128,
        temperature=2,
        top_k=-1,
        min_p=0,
        logprobs=20,
        prompt_logprobs=20,
        stop=["x" * 1000] * 64,
        stop_token_ids=list(range(3, 1027)),
        logit_bias={str(number): -100.0 for number in range(3, 1027)},
        bad_words=["bear", "wolf"],
        presence_penalty=2,
        frequency_penalty=-2,
        repetition_penalty=1.5,
    )
    assert len(answer["outputs"]) == 128
    assert answer["usage"]["completion_tokens"] == 128 * 4


@pytest.mark.parametrize("words", [["wolf" * 250], ["bear"] * 1024, ["\x00"], [" "], ["\n"]], ids=short)
async def test_absurd_bad_words_are_refused_or_harmless(inline: Inline, words: list[str]) -> None:
    status, answer = await inline.post("/generate", {"prompt": "Hi", "max_tokens": 2, "bad_words": words})
    assert status in (200, 400), answer


async def test_a_thousand_invalid_requests_leave_nothing_behind(inline: Inline) -> None:
    wrong: list[dict[str, Any]] = [
        {"prompt_token_ids": [10**9]},
        {"prompt_token_ids": [5] * 5000},
        {"prompt": "Hi", "seed": 2**70},
        {"prompt": "Hi", "n": 2},
        {"prompt": "Hi", "stop_token_ids": [10**9]},
        {"prompt": "Hi", "logit_bias": {"999999999": 1.0}},
        {"messages": [{"role": "user", "content": "bear " * 3000}]},
        {"prompt": "Hi", "min_tokens": 5000},
        {"prompt": "Hi", "unknown": 1},
        {"prompt": "Hi", "logprobs": 21},
    ]
    for _ in range(10):
        rows = await inline.batch(wrong * 10)
        assert {row["status"] for row in rows} == {400}
    service = inline.service
    assert (service.batcher.queue_requests, service.batcher.queue_tokens, service.batcher.reserved) == (0, 0, 0)


async def test_wrong_and_right_requests_at_once_do_not_mix(inline: Inline) -> None:
    alone = [await inline.text(prompt=f"{number} wolves", max_tokens=4) for number in range(10)]

    async def right(number: int) -> None:
        assert await inline.text(prompt=f"{number % 10} wolves", max_tokens=4) == alone[number % 10]

    async def wrong(number: int) -> None:
        await inline.refused(prompt_token_ids=[5, -number - 1])

    await asyncio.gather(*(call(number) for number in range(50) for call in (right, wrong)))


async def test_the_same_request_id_twice_is_only_a_label(inline: Inline) -> None:
    rows = await inline.batch([{"prompt": "Hi", "max_tokens": 2, "request_id": "x"}] * 4)
    assert [row["response"]["request_id"] for row in rows] == ["x"] * 4
    assert len({row["response"]["id"] for row in rows}) == 4
