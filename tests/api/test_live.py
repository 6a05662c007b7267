"""The outputs of several requests as one stream: in their order, to the end of all, or to the first failure."""

import asyncio
from typing import Any

import pytest

from app.api.live import Live
from app.errors import GenerationFailed

BOUND_S = 5.0


def future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


async def test_outputs_come_with_the_number_of_their_prompt_until_all_are_answered() -> None:
    live, futures = Live(2), [future(), future()]
    first, second = live.listener(0), live.listener(1)
    seen = []

    async def tell() -> None:
        for listener, output, is_last in ((first, "a", False), (second, "b", True), (first, "c", True)):
            listener(output, is_last)
            await asyncio.sleep(0)
        for each in futures:
            each.set_result("answer")

    telling = asyncio.ensure_future(tell())
    async with asyncio.timeout(BOUND_S):
        async for index, output in live.outputs(futures):
            seen.append((index, output, live.is_last))
    await telling

    assert seen == [(0, "a", False), (1, "b", False), (0, "c", True)]


async def test_what_was_told_before_anybody_listened_is_not_lost() -> None:
    live, done = Live(1), future()
    live.listener(0)("early", True)
    done.set_result("answer")

    async with asyncio.timeout(BOUND_S):
        assert [item async for item in live.outputs([done])] == [(0, "early")]


async def test_the_failure_of_one_request_ends_the_stream() -> None:
    live, futures = Live(2), [future(), future()]
    live.listener(0)("a", False)
    futures[1].set_exception(GenerationFailed("broken"))

    outputs = live.outputs(futures)
    async with asyncio.timeout(BOUND_S):
        assert await anext(outputs) == (0, "a")
        with pytest.raises(GenerationFailed):
            await anext(outputs)
