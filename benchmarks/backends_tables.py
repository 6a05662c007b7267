"""The tables, findings and plot of ``benchmarks.backends``, from its report."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.comparison import WORTH, Cell, Measure, Value, first_side, in_words, latency, ratios, speed
from benchmarks.figures import plot

VLLM, GUIDELLM = "vllm", "guidellm"
SIDES = {
    VLLM: "vLLM's server",
    "offline_32": "`vllm_offline`, 32",
    "offline_64": "`vllm_offline`, 64",
    "python": "`vllm_python`, 64",
}
"""The numbers are ``batch_size``."""
COLOURS = {VLLM: "#57606a", "offline_32": "#1f6feb", "offline_64": "#54aeff", "python": "#2da44e"}
PLAIN, STREAMED, BATCH = "plain", "streamed", "batch"
SHOWN = ("median", "p95")
THROUGHPUT = Measure("tokens/s", speed, is_more_better=True)
WAITS = (
    Measure("first text, median", latency("ttft_ms", "median")),
    Measure("between texts, median", latency("itl_ms", "median")),
    Measure("between texts, p95", latency("itl_ms", "p95")),
)

Case = dict[str, Any]


def render(result: report.Report) -> str:
    """Tables and findings as Markdown."""
    cases = result["cases"]
    parts = [_settings(result), "**Throughput**, not streamed.", _throughput_table(cases)]
    parts += ["**Streams**, mixed lengths, as the client sees them.", _streams_table(cases)]
    if compared := [case for case in cases if case[GUIDELLM]]:
        parts += [_guidellm_title(compared), _guidellm_table(compared)]
    parts += ["**Start and memory.**", _costs_table(cases), _how_to_read(result), "\n".join(findings(result))]
    return "\n\n".join((*parts, report.machine_line(result)))


def cells_of(case: Case, *kinds: str) -> list[Cell]:
    """Those of some kinds."""
    return [cell for cell in case["cells"] if cell["kind"] in kinds]


# --- findings ---


def findings(result: report.Report) -> list[str]:
    """A line for each model, side and measure: where it is worse than vLLM's server, where better, where neither."""
    lines = []
    for case in result["cases"]:
        for side in _others(case["cells"][0]):
            lines.append(f"- {case['name']}, {SIDES[side]}")
            lines += [f"  - {measure.name}: {in_words(cells, side, measure)}." for measure, cells in _told(case, side)]
    return lines


def _told(case: Case, side: str) -> Iterator[tuple[Measure, list[tuple[str, Cell]]]]:
    """What is told of a side; of what it does not have, nothing."""
    yield THROUGHPUT, [(_name(cell), cell) for cell in cells_of(case, PLAIN, BATCH)]
    for measure in WAITS:
        cells = [(_callers(cell), cell) for cell in cells_of(case, STREAMED)]
        if measured := [(name, cell) for name, cell in cells if _has(cell, side, measure.value)]:
            yield measure, measured


def _has(cell: Cell, side: str, value: Value) -> bool:
    """Whether the side's runs, and the first side's, have such a value."""
    try:
        return bool([value(run) for name in (side, first_side(cell)) for run in cell["runs"][name]])
    except TypeError:
        return False


def _others(cell: Cell) -> list[str]:
    return list(cell["runs"])[1:]


def _callers(cell: Cell) -> str:
    return f"{cell['callers']} {'caller' if cell['callers'] == 1 else 'callers'}"


def _name(cell: Cell) -> str:
    return f"a batch of {cell['callers']}" if cell["kind"] == BATCH else f"{_callers(cell)} {cell['lengths']}"


# --- tables ---


def _settings(result: report.Report) -> str:
    config = ", ".join(f"`{name}` {value:,}" for name, value in result["vllm_config"].items())
    lengths = " and ".join(f"{case['tokens']} ({case['name']})" for case in result["cases"])
    return (
        f"Engine: {config}. An answer has {lengths} tokens, fixed or on average. Repeats: {result['repeats']}, with "
        "every server started anew for each."
    )


def _how_to_read(result: report.Report) -> str:
    return (
        f"Better or worse: the median differs by more than {WORTH:.0%}, and all {result['repeats']} repeats lie on one "
        "side. × is the ratio to vLLM's server: of tokens a second more is better, of times less is."
    )


def _throughput_table(cases: list[Case]) -> str:
    """A row for each measurement; a ratio holds for requests as for tokens, since all sides have the same ones."""
    sides = [side for side in SIDES if side in _others(cases[0]["cells"][0])]
    head = ["model", "lengths", "callers", "requests", "vLLM's server: tokens/s", "requests/s"]
    head += [f"{SIDES[side]}: of vLLM's" for side in sides]
    rows = [
        [case["name"], cell["lengths"], _callers_or_batch(cell), *_reference(cell), *_shares(cell, sides, speed)]
        for case in cases
        for cell in cells_of(case, PLAIN, BATCH)
    ]
    return report.table(head, rows, words=3)


def _callers_or_batch(cell: Cell) -> str:
    return f"{cell['callers']} at once, ours as one `/batch`" if cell["kind"] == BATCH else str(cell["callers"])


def _reference(cell: Cell) -> list[str]:
    runs = cell["runs"][first_side(cell)]
    rate = statistics.median(run["requests"] / run["seconds"] for run in runs)
    return [f"{runs[0]['requests']}", report.spread([speed(run) for run in runs], 0), f"{rate:,.1f}"]


def _shares(cell: Cell, sides: list[str], value: Value) -> list[str]:
    return [report.spread(ratios(cell, side, value), 2) for side in sides]


def _streams_table(cases: list[Case]) -> str:
    head = ["model", "callers", "side", "first text, ms: median", "p95", "of vLLM's: median", "p95"]
    head += ["between texts, ms: median", "p95", "of vLLM's: median", "p95", "tokens/s", "of vLLM's"]
    rows = [
        [case["name"], str(cell["callers"]), SIDES[side], *_stream_row(cell, side)]
        for case in cases
        for cell in cells_of(case, STREAMED)
        for side in cell["runs"]
    ]
    return report.table(head, rows, words=3)


def _stream_row(cell: Cell, side: str) -> list[str]:
    speeds = statistics.median(speed(run) for run in cell["runs"][side])
    return [*_waits(cell, side), f"{speeds:,.0f}", _share(cell, side, speed)]


def _waits(cell: Cell, side: str) -> list[str]:
    """First text and the time between texts, each with its ratios."""
    return [text for of in ("ttft_ms", "itl_ms") for text in _times(cell, side, of)]


def _times(cell: Cell, side: str, of: str) -> list[str]:
    """Percentiles as medians over the repeats, and the ratios of each; nothing where all came at once."""
    values = [latency(of, name) for name in SHOWN]
    if not all(_has(cell, side, value) and _median(cell, side, value) > 0 for value in values):
        return ["–"] * 2 * len(values)
    return [*(_ms(_median(cell, side, value)) for value in values), *(_share(cell, side, value) for value in values)]


def _median(cell: Cell, side: str, value: Value) -> float:
    return statistics.median(value(run) for run in cell["runs"][side])


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _share(cell: Cell, side: str, value: Value) -> str:
    return "1" if side == first_side(cell) else f"{statistics.median(ratios(cell, side, value)):.2f}"


def _guidellm_title(cases: list[Case]) -> str:
    at = cases[0][GUIDELLM]
    counts = ", ".join(f"{case[GUIDELLM]['runs'][VLLM][0]['requests']} ({case['name']})" for case in cases)
    return (
        f"**GuideLLM {at['version']}**, {at['streams']} streams, `/v1/completions` with `stream=true`, mixed lengths, "
        f"as GuideLLM reports it. Requests in a run: {counts}."
    )


def _guidellm_table(cases: list[Case]) -> str:
    head = ["model", "side", "TTFT, ms: median", "p95", "of vLLM's: median", "p95", "ITL, ms: median", "p95"]
    head += ["of vLLM's: median", "p95", "latency, ms: median", "p95", "of vLLM's: median", "p95"]
    rows = [
        [case["name"], SIDES[side], *_waits(case[GUIDELLM], side), *_times(case[GUIDELLM], side, "e2e_ms")]
        for case in cases
        for side in case[GUIDELLM]["runs"]
    ]
    return report.table(head, rows, words=2)


def _costs_table(cases: list[Case]) -> str:
    head = ("model", "side", "ready after, s", "memory, MiB")
    rows = [
        [case["name"], SIDES[side], report.spread(costs["start_s"], 1), report.spread(costs["memory_mib"], 0)]
        for case in cases
        for side, costs in case["costs"].items()
    ]
    return report.table(head, rows, words=2)


# --- the plot ---


def draw(result: report.Report) -> str:
    """Each repeat's tokens a second as a share of those of vLLM's server."""
    rows = [(case, cell) for case in result["cases"] for cell in cells_of(case, PLAIN, BATCH)][::-1]
    with plot(7, 1.2 + 0.32 * len(rows), "Tokens per second, as a share of vLLM's server") as drawing:
        axes, shown = drawing.axes, set[str]()
        for at, (_, cell) in enumerate(rows):
            for place, side in enumerate(_others(cell)):
                values = ratios(cell, side, speed)
                label = None if side in shown else SIDES[side].replace("`", "")
                shown.add(side)
                heights = [at + 0.25 - 0.25 * place] * len(values)
                axes.plot(values, heights, "o", color=COLOURS[side], alpha=0.6, markersize=4, label=label)
        axes.set_yticks(range(len(rows)), [f"{case['name']}, {_name(cell)}" for case, cell in rows])
        axes.axvline(1, color=COLOURS[VLLM], linewidth=0.8, linestyle=":")
        axes.set_xlabel("a dot for each repeat; to the right of 1: more than vLLM's server")
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=3, frameon=False, fontsize=8)
    return drawing.svg
