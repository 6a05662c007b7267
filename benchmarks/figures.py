"""Plots as SVG text: the same report gives the same bytes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, PAPER = "#1f2328", "#ffffff"
STYLE: Any = {  # rcParams: a mapping by literal names
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes little room
    "svg.hashsalt": "batchserve",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "text.color": INK,
    "figure.facecolor": PAPER,
}


class Plot:
    """A figure with one set of axes.

    Attributes:
        axes: where to draw.
        svg: the drawing, once the ``with`` block has ended.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.svg = ""


@contextmanager
def plot(width_in: float, height_in: float, title: str) -> Iterator[Plot]:
    """A plot of this size in inches."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        drawing = Plot(figure.add_subplot())
        drawing.axes.set_title(title, loc="left", fontsize=10)
        yield drawing
        drawing.svg = _as_svg(figure)


def _as_svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib ends lines with a space
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
