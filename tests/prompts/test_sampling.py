"""Sampling settings: the bounds at both ends, and what is given on to an engine."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.prompts.sampling import SamplingFields

INFINITY = float("inf")

BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, 2**31 - 1], [0, -1, 2**31, 1.0, "1", True]),
    "min_tokens": ([0, 2**31 - 1], [-1, 2**31, 1.0]),
    "temperature": ([0, 0.0, 2], [-0.01, 2.01, INFINITY, float("nan"), "1", True]),
    "top_p": ([0.01, 1], [0, -0.1, 1.01, INFINITY]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.5]),
    "min_p": ([0, 1], [-0.01, 1.01]),
    "n": ([1, 128], [0, -1, 129]),
    "seed": ([-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63, 1.0]),
    "stop": (["a", "x" * 1000, [], ["a"] * 64], ["", "x" * 1001, [""], ["a"] * 65, ["x" * 1001], 1, [1]]),
    "stop_token_ids": ([[], [0], [1] * 1024], [[1] * 1025, ["1"], [1.0], 1]),
    "ignore_eos": ([True, False], [1, "true"]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 2, 1e6], [0, -1, INFINITY]),
    "logit_bias": (
        [{}, {"0": -100, "50256": 100.0}, {str(token): 1.0 for token in range(1024)}],
        [{str(token): 1.0 for token in range(1025)}, {"1": INFINITY}, {"a": 1}, {"1.5": 1}, {"1": "1"}, {"٣": 1}, []],
    ),
    "logprobs": ([0, 20], [-1, 21]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "skip_special_tokens": ([True, False], [0]),
    "include_stop_str_in_output": ([True, False], [0]),
    "bad_words": ([[], ["a" * 100] * 256], [["a"] * 257, ["a" * 101], [""], "a"]),
}


def test_every_setting_has_its_bounds_in_this_table() -> None:
    assert BOUNDS.keys() == SamplingFields.model_fields.keys()


def shorten(value: Any) -> str:
    return ascii(value)[:40]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (good, _) in BOUNDS.items() for value in [None, *good]], ids=shorten
)
def test_what_is_within_the_bounds_is_taken(name: str, value: Any) -> None:
    fields = SamplingFields.model_validate({name: value})

    assert getattr(fields, name) == value


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, bad) in BOUNDS.items() for value in bad], ids=shorten
)
def test_what_is_beyond_them_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        SamplingFields.model_validate({name: value})


def test_only_what_was_given_is_given_on() -> None:
    assert SamplingFields().given() == {}
    assert SamplingFields.model_validate({"temperature": 0, "n": None, "min_tokens": 0}).given() == {
        "temperature": 0,
        "min_tokens": 0,
    }


def test_one_stop_string_becomes_a_list_and_token_ids_integers() -> None:
    fields = SamplingFields.model_validate({"stop": "a", "logit_bias": {"12": 1.5, "-1": 2}})

    assert fields.given() == {"stop": ["a"], "logit_bias": {12: 1.5, -1: 2.0}}


def test_giving_on_changes_nothing_and_shares_nothing_between_calls() -> None:
    fields = SamplingFields.model_validate({"stop": "a", "logit_bias": {"12": 1.5}})
    first, second = fields.given(), fields.given()
    first["stop"].append("b")
    first["logit_bias"].clear()

    assert second == {"stop": ["a"], "logit_bias": {12: 1.5}}
    assert fields.given() == second


def test_min_tokens_may_not_pass_max_tokens() -> None:
    assert SamplingFields(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ValidationError, match="min_tokens is larger than max_tokens"):
        SamplingFields(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(("n", "places"), [(None, 1), (1, 1), (128, 128)])
def test_each_output_takes_a_place(n: int | None, places: int) -> None:
    assert SamplingFields(n=n).places == places
