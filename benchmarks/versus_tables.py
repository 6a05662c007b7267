"""The tables, findings and plot of ``benchmarks.versus_vllm_serve``, from its report."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.comparison import (
    PERCENTILES,
    WORTH,
    Cell,
    Measure,
    Value,
    first_side,
    in_words,
    latency,
    ratios,
    speed,
)
from benchmarks.figures import plot

VLLM, GUIDELLM = "vllm", "guidellm"
SIDES = {
    VLLM: "vLLM's server",
    "service_32": "`batch_size` 32",
    "service_64": "`batch_size` 64",
}
GUIDELLM_SIDES = {
    GUIDELLM: "`vllm_python_batch`, `batch_timeout` 0.01",
    "service_64": "service, `max_wait_ms` 10",
}
COLOURS = {"service_32": "#1f6feb", "service_64": "#2da44e"}
KINDS = (("fixed", False), ("mixed", False), ("mixed", True))
"""Lengths of the answers, and whether they are streamed."""
MEASURES = (
    Measure("tokens/s", speed, is_more_better=True),
    Measure("end to end, median", latency("e2e_ms", "median")),
    Measure("end to end, p99", latency("e2e_ms", "p99")),
)
STREAMED_MEASURES = (
    Measure("first text at the caller, median", latency("ttft_ms", "median")),
    Measure("first text at the caller, p99", latency("ttft_ms", "p99")),
)

Case = dict[str, Any]


def render(result: report.Report) -> str:
    """Tables and findings as Markdown."""
    parts = [_settings(result)]
    for case in result["cases"]:
        for lengths, is_streamed in KINDS:
            cells = cells_of(case, lengths=lengths, is_streamed=is_streamed)
            parts.append(_title(case, lengths, cells, is_streamed=is_streamed))
            parts.append(_streamed_table(cells) if is_streamed else _plain_table(cells))
    parts += [_how_to_read(result), "\n".join(findings(result))]
    if compared := [case for case in result["cases"] if GUIDELLM in case]:
        parts += [_guidellm_title(compared), _guidellm_table(compared), "\n".join(guidellm_findings(compared))]
    return "\n\n".join((*parts, report.machine_line(result)))


def cells_of(case: Case, *, is_streamed: bool, lengths: str | None = None) -> list[Cell]:
    """Those of one kind; of both lengths, unless one is given."""
    cells = (cell for cell in case["cells"] if cell["is_streamed"] == is_streamed)
    return [cell for cell in cells if lengths in {None, cell["lengths"]}]


def services_of(case: Case) -> list[str]:
    """The sides that are not vLLM's."""
    return [side for side in case["cells"][0]["runs"] if side != VLLM]


# --- findings ---


def findings(result: report.Report) -> list[str]:
    """A line for each model, service and measure: where it is worse than vLLM's server, where better, where neither."""
    lines = []
    for case in result["cases"]:
        for side in services_of(case):
            lines.append(f"- {case['name']}, {SIDES[side]}")
            lines += [f"  - {measure.name}: {in_words(cells, side, measure)}." for measure, cells in _measured(case)]
    return lines


def _measured(case: Case) -> Iterator[tuple[Measure, list[tuple[str, Cell]]]]:
    for is_streamed, measures in ((False, MEASURES), (True, STREAMED_MEASURES)):
        named = [(f"{_callers(cell)} {cell['lengths']}", cell) for cell in cells_of(case, is_streamed=is_streamed)]
        for measure in measures:
            yield measure, named


def guidellm_findings(cases: list[Case]) -> list[str]:
    """The same against GuideLLM's backend."""
    lines = []
    for case in cases:
        cells = [(f"{case[GUIDELLM]['streams']} streams", case[GUIDELLM])]
        for side in list(case[GUIDELLM]["runs"])[1:]:
            lines.append(f"- {case['name']}, {GUIDELLM_SIDES[side]}")
            lines += [f"  - {measure.name}: {in_words(cells, side, measure)}." for measure in MEASURES]
    return lines


def _callers(cell: Cell) -> str:
    return f"{cell['callers']} {'caller' if cell['callers'] == 1 else 'callers'}"


# --- tables ---


def _settings(result: report.Report) -> str:
    config = ", ".join(f"`{name}` {value:,}" for name, value in result["vllm_config"].items())
    return f"Engine: {config}. Repeats: {result['repeats']}, with every server started anew for each."


def _how_to_read(result: report.Report) -> str:
    return (
        f"Better or worse: the median differs by more than {WORTH:.0%}, and all {result['repeats']} repeats lie on one "
        "side. × is the ratio to vLLM's server: of tokens a second more is better, of times less is."
    )


def _title(case: Case, lengths: str, cells: list[Cell], *, is_streamed: bool) -> str:
    mixed = f"mixed lengths, {case['tokens']} tokens on average"
    tokens = f"{case['tokens']} tokens each" if lengths == "fixed" else mixed
    counts = ", ".join(f"{cell['runs'][VLLM][0]['requests']} of {_callers(cell)}" for cell in cells)
    return f"**{case['name']}, {tokens}{', streamed' if is_streamed else ''}.** Requests in a run: {counts}."


def _plain_table(cells: list[Cell]) -> str:
    head = ("callers", "side", "tokens/s, median (range)", "of vLLM's", "requests/s", "end to end, ms: median", "p95")
    rows = [[str(cell["callers"]), SIDES[side], *_plain_row(cell, side)] for cell in cells for side in cell["runs"]]
    return report.table((*head, "p99", "of vLLM's: median", "p95", "p99"), rows, words=2)


def _plain_row(cell: Cell, side: str) -> list[str]:
    runs = cell["runs"][side]
    requests = statistics.median(run["requests"] / run["seconds"] for run in runs)
    speeds = report.spread([speed(run) for run in runs], 0)
    return [speeds, _share(cell, side, speed), f"{requests:,.1f}", *_times(cell, side, "e2e_ms")]


def _streamed_table(cells: list[Cell]) -> str:
    head = ("callers", "side", "first text at the caller, ms: median", "p95", "p99", "of vLLM's: median", "p95", "p99")
    rows = [[str(cell["callers"]), SIDES[side], *_streamed_row(cell, side)] for cell in cells for side in cell["runs"]]
    own = ("`timings.ttft_ms`: median", "p95", "p99")
    return report.table((*head, *own, "end to end, ms: median", "p95", "p99"), rows, words=2)


def _streamed_row(cell: Cell, side: str) -> list[str]:
    own = [""] * len(PERCENTILES) if side == VLLM else _medians(cell, side, "own_ttft_ms")
    return [*_times(cell, side, "ttft_ms"), *own, *_medians(cell, side, "e2e_ms")]


def _times(cell: Cell, side: str, of: str) -> list[str]:
    """Percentiles, and the ratios of each."""
    return [*_medians(cell, side, of), *(_share(cell, side, latency(of, name)) for name in PERCENTILES)]


def _medians(cell: Cell, side: str, of: str) -> list[str]:
    """The percentiles of a run, each as its median over the repeats."""
    return [f"{statistics.median(run[of][name] for run in cell['runs'][side]):,.0f}" for name in PERCENTILES]


def _share(cell: Cell, side: str, value: Value) -> str:
    return "1" if side == first_side(cell) else f"{statistics.median(ratios(cell, side, value)):.2f}"


def _guidellm_title(cases: list[Case]) -> str:
    at = cases[0][GUIDELLM]
    counts = ", ".join(f"{case[GUIDELLM]['runs'][GUIDELLM][0]['requests']} ({case['name']})" for case in cases)
    return (
        f"**GuideLLM {at['version']}, {at['streams']} streams, mixed lengths.** On all sides `batch_size` is "
        f"{at['batch_size']}. Requests in a run: {counts}. Ratios are to GuideLLM's own backend."
    )


def _guidellm_table(cases: list[Case]) -> str:
    head = ("model", "side", "tokens/s, median (range)", "ratio", "requests/s", "end to end, ms: median", "p95", "p99")
    rows = [
        [case["name"], GUIDELLM_SIDES[side], *_plain_row(case[GUIDELLM], side)]
        for case in cases
        for side in case[GUIDELLM]["runs"]
    ]
    return report.table((*head, "ratio: median", "p95", "p99"), rows, words=2)


# --- the plot ---


def draw(result: report.Report) -> str:
    """Each repeat's tokens a second as a share of those of vLLM's server."""
    rows = [(case, cell) for case in result["cases"] for cell in cells_of(case, is_streamed=False)][::-1]
    with plot(7, 1.2 + 0.32 * len(rows), "Tokens per second, as a share of vLLM's server") as drawing:
        axes, shown = drawing.axes, set()
        for at, (case, cell) in enumerate(rows):
            for place, side in enumerate(services_of(case)):
                values = ratios(cell, side, speed)
                label = None if side in shown else SIDES[side].replace("`", "")
                shown.add(side)
                heights = [at + 0.25 - 0.25 * place] * len(values)
                axes.plot(values, heights, "o", color=COLOURS[side], alpha=0.6, markersize=4, label=label)
        axes.set_yticks(
            range(len(rows)), [f"{case['name']}, {_callers(cell)}, {cell['lengths']}" for case, cell in rows]
        )
        axes.axvline(1, color="#57606a", linewidth=0.8, linestyle=":")
        axes.set_xlabel("a dot for each repeat; to the right of 1: more than vLLM's server")
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=3, frameon=False, fontsize=8)
    return drawing.svg
