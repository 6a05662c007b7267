"""What a prompt keeps to before an engine sees it."""

from typing import Any

import pytest

from app.errors import ContextLengthExceeded, InvalidRequest
from app.prompts.bounds import check_bias, check_context, check_token_ids, keep_last, one_bos


@pytest.mark.parametrize("tokens", [0, 1, 2047])
def test_a_prompt_that_leaves_room_for_one_token_passes(tokens: int) -> None:
    check_context(tokens, 2048)


@pytest.mark.parametrize("tokens", [2048, 2049, 5000])
def test_a_prompt_that_leaves_none_is_told_its_length_and_the_limit(tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        check_context(tokens, 2048)

    assert caught.value.extra == {"prompt_tokens": tokens, "limit": 2048}
    assert str(tokens) in caught.value.message


def test_a_length_that_was_not_counted_is_told_as_a_lower_bound() -> None:
    with pytest.raises(ContextLengthExceeded, match="at least 5000"):
        check_context(5000, 2048, at_least=True)


@pytest.mark.parametrize("ids", [[], [0], [99], [5] * 10_000])
def test_ids_of_the_vocabulary_pass(ids: list[int]) -> None:
    check_token_ids(ids, 100, "prompt_token_ids")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (100, "100 is outside"),
        (-1, "-1 is outside"),
        (999_999_999, "999999999 is outside"),
        (10**4000, "of more than 30 digits is outside"),
        (-(10**4000), "of more than 30 digits is outside"),
        (True, "True is not a token id"),
        (1.0, "1.0 is not a token id"),
        ("1", "'1' is not a token id"),
        (None, "None is not a token id"),
        ([1], r"\[1\] is not a token id"),
    ],
    ids=["one over", "negative", "far over", "huge", "huge negative", "boolean", "float", "string", "null", "list"],
)
def test_the_first_wrong_id_is_named_with_its_place(wrong: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as caught:
        check_token_ids([1, 2, wrong, wrong], 100, "prompt_token_ids")

    assert caught.value.param == "prompt_token_ids.2"


@pytest.mark.parametrize(
    ("count", "expected"), [(None, [1, 2, 3]), (1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (100, [1, 2, 3])]
)
def test_the_last_ids_are_kept(count: int | None, expected: list[int]) -> None:
    assert keep_last([1, 2, 3], count) == expected


@pytest.mark.parametrize(
    ("ids", "bos", "expected"),
    [
        ([1, 1, 5], 1, [1, 5]),
        ([1, 1, 1, 5], 1, [1, 5]),
        ([1, 5], 1, [1, 5]),
        ([5, 1, 1], 1, [5, 1, 1]),
        ([1], 1, [1]),
        ([], 1, []),
        ([1, 1, 5], None, [1, 1, 5]),
        ([0, 0, 5], 0, [0, 5]),
    ],
)
def test_a_prompt_begins_with_one_bos_at_most(ids: list[int], bos: int | None, expected: list[int]) -> None:
    assert one_bos(ids, bos) == expected


@pytest.mark.parametrize("token", [0, 99])
def test_a_bias_on_a_token_of_the_vocabulary_passes(token: int) -> None:
    check_bias({token: 1.0}, 100)


@pytest.mark.parametrize("token", [-1, 100, 10**17])
def test_a_bias_on_another_token_is_named(token: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_bias({5: 1.0, token: 1.0}, 100)
    assert caught.value.param == f"logit_bias.{token}"
