"""A grammar that gets slow where the trial does not come is cut in the engine: the neighbours go on."""

import asyncio
from typing import Any

import pytest

from app.backends.grammar_limit import MAX_PER_TOKEN_S, MAX_S
from tests.engine.inline import Inline

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

AMBIGUOUS = 'root ::= [b-z]* | "a" "!" "?" h\nh ::= h h h | h h | [a-z]'
"""Its second branch doubles the work with each token; the bias makes greedy decoding take it."""
TOKENS = 256
WITHOUT_BOUND_S = 100.0
"""About what it takes for so many tokens when nothing bounds it."""


def slow(inline: Inline) -> dict[str, Any]:
    (letter,) = inline.tokenizer.encode("a", add_special_tokens=False)
    bias, form = {str(letter): 100}, {"grammar": AMBIGUOUS}
    body = {"prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return {**body, "logit_bias": bias, "structured_outputs": form}


async def test_a_grammar_that_gets_slow_ends_its_own_request_and_no_other(inline: Inline) -> None:
    begun = asyncio.get_running_loop().time()
    (status, answer), (other, _) = await asyncio.gather(
        inline.post("/v1/completions", slow(inline)), inline.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    )

    assert (status, answer["error"]["code"]) == (500, "generation_failed")
    assert other == 200
    assert asyncio.get_running_loop().time() - begun < WITHOUT_BOUND_S / 3
    await inline.assert_serves()


async def test_an_ordinary_grammar_has_time_for_a_long_text(inline: Inline) -> None:
    body = {"prompt": "x", "max_tokens": 400, "min_tokens": 400, "temperature": 1, "seed": 1}
    status, answer = await inline.post("/v1/completions", {**body, "structured_outputs": {"regex": "[a-z ]*"}})

    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 400
    assert MAX_S + 400 * MAX_PER_TOKEN_S < WITHOUT_BOUND_S / 10
