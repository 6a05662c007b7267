"""The fake keeps the contract of a backend, is deterministic, and plays faults when told to."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app import timings
from app.backends.args import FakeArgs
from app.backends.fake import VOCAB_SIZE, FakeBackend
from app.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ServiceError,
    StartError,
)
from app.prompts.spec import GenerateRequest
from app.request import Generation, Outcome, Request, Resolved, Window
from app.timings import Stamps

BOUND_S = 5.0


def make_args(**values: Any) -> FakeArgs:
    return FakeArgs.model_validate({"model": "m", "served_model_name": "m", "default_max_tokens": 4, **values})


@contextlib.asynccontextmanager
async def opened(**values: Any) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(make_args(**values))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close(BOUND_S)


async def resolve(backend: FakeBackend, **body: Any) -> Resolved:
    (found,) = await backend.resolve([GenerateRequest(**body)])
    if isinstance(found, ServiceError):
        raise found
    return found


async def run(backend: FakeBackend, *bodies: dict[str, Any]) -> list[Outcome]:
    requests = [await make_request(backend, body) for body in bodies]
    ids = itertools.count(1)
    window = Window(next(ids), "full", requests, timings.now(), timings.wall_offset(), ids)
    return await asyncio.wait_for(backend.generate(window), BOUND_S)


async def make_request(backend: FakeBackend, body: dict[str, Any]) -> Request:
    resolved = await resolve(backend, **body)
    future = asyncio.get_running_loop().create_future()
    return Request(resolved, body.get("n", 1), 0, None, Stamps(timings.now()), future)


def text(outcome: Outcome) -> Any:
    return outcome.result.outputs[0].text if isinstance(outcome.result, Generation) else type(outcome.result)


async def test_every_text_can_be_traced_to_its_request() -> None:
    async with opened() as backend:
        outcomes = await run(backend, {"prompt": "ab", "max_tokens": 5}, {"prompt": "xyz", "max_tokens": 2})

        assert [text(outcome) for outcome in outcomes] == ["ABABA", "XY"]


async def test_the_same_request_gives_the_same_answer() -> None:
    async with opened() as backend:
        first, second = [await run(backend, {"prompt": "same", "max_tokens": 9, "logprobs": 2}) for _ in range(2)]

        assert isinstance(first[0].result, Generation)
        assert isinstance(second[0].result, Generation)
        assert first[0].result.outputs == second[0].result.outputs


async def test_requests_of_one_window_keep_their_own_settings() -> None:
    async with opened() as backend:
        outcomes = await run(backend, *({"prompt": "a", "max_tokens": count} for count in (1, 5, 9)))

        assert [text(outcome) for outcome in outcomes] == ["A", "AAAAA", "AAAAAAAAA"]


async def test_two_requests_never_share_their_settings() -> None:
    async with opened() as backend:
        body = GenerateRequest(prompt="a", stop=["x"])
        first, second = await backend.resolve([body, body])

        assert isinstance(first, Resolved)
        assert isinstance(second, Resolved)
        assert first.params is not second.params
        assert first.params == second.params


async def test_a_stop_string_ends_the_text() -> None:
    async with opened() as backend:
        (outcome,) = await run(backend, {"prompt": "a.b", "max_tokens": 9, "stop": "."})

        assert isinstance(outcome.result, Generation)
        output = outcome.result.outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("A", "stop", ".")


async def test_n_gives_so_many_outputs() -> None:
    async with opened() as backend:
        (outcome,) = await run(backend, {"prompt": "a", "n": 3})

        assert isinstance(outcome.result, Generation)
        assert [output.index for output in outcome.result.outputs] == [0, 1, 2]


async def test_generation_ends_with_the_context() -> None:
    async with opened(max_model_len=8) as backend:
        (outcome,) = await run(backend, {"prompt": "abcde", "max_tokens": 100})

        assert isinstance(outcome.result, Generation)
        assert outcome.result.completion_tokens == 8 - 6
        assert outcome.result.outputs[0].finish_reason == "length"


async def test_stamps_are_those_of_an_engine() -> None:
    async with opened(step_ms=5) as backend:
        (outcome,) = await run(backend, {"prompt": "a", "max_tokens": 4})

        assert isinstance(outcome.result, Generation)
        stats = outcome.result.stats
        assert stats is not None
        assert outcome.window.dispatched <= stats.queued <= stats.scheduled <= stats.first_token <= stats.last_token
        assert stats.last_token - stats.scheduled >= 0.02
        assert stats.num_generation_tokens == 4


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"prompt": "x" * 16}, ContextLengthExceeded, None),
        ({"prompt_token_ids": [VOCAB_SIZE]}, InvalidRequest, "prompt_token_ids.0"),
        ({"prompt_token_ids": [1, -1]}, InvalidRequest, "prompt_token_ids.1"),
        ({"prompt_token_ids": [1, True]}, InvalidRequest, "prompt_token_ids.1"),
        ({"prompt_token_ids": [1, "2"]}, InvalidRequest, "prompt_token_ids.1"),
        ({"prompt_token_ids": [10**5000]}, InvalidRequest, "prompt_token_ids.0"),
        ({"prompt": "x", "stop_token_ids": [999]}, InvalidRequest, "stop_token_ids.0"),
        ({"prompt": "x", "logit_bias": {"999": 1.0}}, InvalidRequest, "logit_bias.999 or logit_bias"),
        ({"prompt": "x", "n": 2, "temperature": 0}, InvalidRequest, "n"),
    ],
    ids=["context", "vocabulary", "negative", "boolean", "string", "huge", "stop id", "bias", "greedy n"],
)
async def test_what_cannot_run_is_refused_before_it_is_queued(
    body: dict[str, Any], error: type[ServiceError], param: str | None
) -> None:
    async with opened(max_model_len=16) as backend:
        with pytest.raises(error) as caught:
            await resolve(backend, **body)
        assert caught.value.param in (param.split(" or ") if param else [None])


async def test_messages_go_through_the_format() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for request_format, expected in [
        ("default-template", b"<user>Hi\n<assistant>"),
        ("{{ messages[0].content }}!", b"Hi!"),
    ]:
        async with opened(request_format=request_format) as backend:
            assert bytes((await resolve(backend, messages=messages)).prompt_token_ids) == expected
    async with opened(request_format="plain") as backend:
        ids = (await resolve(backend, messages=messages)).prompt_token_ids
        assert (ids[0], bytes(ids[1:])) == (256, b"Hi")


# --- faults ---


async def test_an_open_that_fails_tells_why() -> None:
    backend = FakeBackend(make_args(faults={"fail_open": "no such model"}))
    with pytest.raises(StartError, match="no such model"):
        await backend.open()
    await backend.close(BOUND_S)


async def test_a_failing_request_costs_its_neighbours_nothing() -> None:
    async with opened(faults={"fail_text": "boom"}) as backend:
        prompts = ["a", "b", "boom", "c"]
        outcomes = await run(backend, *({"prompt": prompt, "max_tokens": 1} for prompt in prompts))

        assert [text(outcome) for outcome in outcomes] == ["A", "B", GenerationFailed, "C"]
        assert backend.windows_run == [4, 2, 2, 1, 1]


async def test_a_count_that_does_not_match_hands_out_nothing() -> None:
    async with opened(faults={"wrong_count": 1}) as backend:
        outcomes = await run(backend, {"prompt": "a"}, {"prompt": "b"})

        assert [text(outcome) for outcome in outcomes] == [GenerationFailed, GenerationFailed]


async def test_a_request_that_kills_the_engine_is_a_death() -> None:
    async with opened(faults={"die_text": "kill"}) as backend:
        with pytest.raises(EngineDead):
            await run(backend, {"prompt": "kill"})
        assert backend.death is not None
        assert await asyncio.wait_for(backend.death, BOUND_S)


async def test_a_hang_ends_neither_the_loop_nor_a_close() -> None:
    async with opened(faults={"hang_text": "hang", "hang_s": 0.5}) as backend:
        task = asyncio.create_task(run(backend, {"prompt": "hang"}))
        await asyncio.sleep(0.05)

        assert await asyncio.wait_for(backend.close(0.05), 1) is False
        await task
