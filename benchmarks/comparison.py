"""Runs of several sides compared: percentiles, ratios repeat by repeat, and in words who is better where."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = {"median": 50, "p95": 95, "p99": 99}
WORTH = 0.05
"""A smaller difference is called none, and so is one on which the repeats do not agree."""

Run = Mapping[str, Any]
"""``requests``, ``completion_tokens``, ``seconds`` and, by name, percentiles in milliseconds."""
Cell = Mapping[str, Any]
"""``runs``: by side, one for each repeat. The first side is the one that the others are compared with."""
Value = Callable[[Run], float]


@dataclass(frozen=True)
class Measure:
    """What is compared, in words of the findings.

    Attributes:
        name: for the line.
        value: of a run.
        is_more_better: else less is.
    """

    name: str
    value: Value
    is_more_better: bool = False


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 95th and 99th percentile, between neighbours in proportion; None of nothing."""
    if not values:
        return None
    return {name: round(float(np.percentile(values, percent)), 2) for name, percent in PERCENTILES.items()}


def speed(run: Run) -> float:
    """Generated tokens a second."""
    return float(run["completion_tokens"] / run["seconds"])


def latency(of: str, name: str) -> Value:
    """The percentile of that name, in milliseconds."""
    return lambda run: float(run[of][name])


def first_side(cell: Cell) -> str:
    """The side that the others are compared with."""
    return str(next(iter(cell["runs"])))


def ratios(cell: Cell, side: str, value: Value) -> list[float]:
    """A side's value as a share of the first side's, for each repeat."""
    pairs = zip(cell["runs"][side], cell["runs"][first_side(cell)], strict=True)
    return [value(own) / value(first) for own, first in pairs]


def verdict(values: Sequence[float]) -> int:
    """1 for more, -1 for less, 0 where it is less than ``WORTH``, or where the repeats do not agree."""
    median = statistics.median(values)
    if median > 1 + WORTH and min(values) > 1:
        return 1
    return -1 if median < 1 - WORTH and max(values) < 1 else 0


def in_words(cells: Sequence[tuple[str, Cell]], side: str, measure: Measure) -> str:
    """Where the side is worse than the first one, where better, where neither; with the median of the ratios.

    Args:
        cells: each with its name.
        side: not the first.
        measure: what is compared.
    """
    groups: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for name, cell in cells:
        values = ratios(cell, side, measure.value)
        better = verdict(values) * (1 if measure.is_more_better else -1)
        groups[better].append(f"{name} × {statistics.median(values):.2f}")
    words = {-1: "**worse** with", 1: "better with", 0: "no difference that lasts with"}
    return "; ".join(f"{words[group]} {', '.join(places)}" for group, places in groups.items() if places)
