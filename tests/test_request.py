"""What crosses the thread."""

import itertools
import uuid
from typing import Any

import pytest

from app.request import Generation, Output, Window, new_id
from tests.batching.doubles import make_request


def make_window(size: int) -> Window:
    ids = itertools.count(7)
    unused: Any = object()
    return Window(next(ids), "full", [make_request(future=unused) for _ in range(size)], 5.0, 1.7e9, ids)


def test_ids_are_unique_and_not_made_from_random(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    random.seed(0)
    first = [new_id("gen") for _ in range(1000)]
    random.seed(0)
    second = [new_id("gen") for _ in range(1000)]

    assert len({*first, *second}) == 2000
    prefix, _, number = first[0].partition("-")
    assert prefix == "gen"
    assert uuid.UUID(number).version == 4


@pytest.mark.parametrize(("size", "halves"), [(2, (1, 1)), (3, (2, 1)), (8, (4, 4)), (9, (5, 4))])
def test_a_window_is_split_into_halves_with_ids_of_their_own(size: int, halves: tuple[int, int]) -> None:
    window = make_window(size)

    first, second = window.split()

    assert (len(first.requests), len(second.requests)) == halves
    assert [*first.requests, *second.requests] == window.requests
    assert (window.id, first.id, second.id) == (7, 8, 9)
    assert first.split()[0].id == 10 if size > 2 else True
    assert (first.release, first.offset, second.offset) == ("full", 1.7e9, 1.7e9)


def test_a_window_describes_itself_to_each_of_its_requests() -> None:
    window = make_window(3)

    assert window.describe(2) == {"id": 7, "size": 3, "position": 2, "release": "full"}
    assert window.describe(None)["position"] is None


def test_tokens_are_counted_from_ids() -> None:
    outputs = [Output(index, "text", [1] * count, "stop", None, None) for index, count in enumerate((3, 0, 4))]

    assert Generation(outputs, None, None, None).completion_tokens == 7
    assert make_request(tokens=12, future=object()).prompt_tokens == 12


def test_requests_are_told_apart_by_identity() -> None:
    unused: Any = object()
    first, second = make_request(label="x", future=unused), make_request(label="x", future=unused)

    assert first != second
    assert first.id != second.id
    assert len({first, second}) == 2
