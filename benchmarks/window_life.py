"""A window's life, drawn from the timings of one real ``POST /batch``: what each request waited for, and when.

.venv/bin/python -m benchmarks.window_life    writes docs/benchmarks.md and docs/figures/window_life.*
"""

import argparse
from pathlib import Path
from typing import Any

from app.settings import EMBEDDED
from benchmarks import report, sides, workload
from benchmarks.figures import plot

NAME = "window_life"
REQUESTS = 24
BATCH_SIZE = 16
PARTS = {
    "resolve_ms": ("resolve", "#8250df"),
    "window_wait_ms": ("wait for a window", "#d0d7de"),
    "submit_ms": ("submit", "#bf8700"),
    "engine_queue_ms": ("engine queue", "#fb8500"),
    "prefill_ms": ("prefill", "#1f6feb"),
    "decode_ms": ("decode", "#2da44e"),
    "window_tail_ms": ("window tail", "#eac54f"),
}
"""The seven durations that add up to ``e2e_ms``, in their order, with name and colour."""


def measure() -> report.Report:
    """One batch through the service, after another that warms it up."""
    with sides.service(EMBEDDED, "--batch-size", str(BATCH_SIZE)) as service:
        service.batch(workload.mixed(BATCH_SIZE, seed=1))
        _, answer = service.batch(workload.mixed(REQUESTS))
        return {
            "command": f"python -m benchmarks.{NAME}",
            "machine": report.machine(service.info["versions"]),
            "model": EMBEDDED,
            "batch_size": BATCH_SIZE,
            "windows": answer["windows"],
            "rows": [_row(row["response"]) for row in answer["results"]],
        }


def _row(response: dict[str, Any]) -> dict[str, Any]:
    timings = response["timings"]
    return {
        "window": response["window"]["id"],
        "completion_tokens": response["usage"]["completion_tokens"],
        **{part: timings[part] for part in PARTS},
        "ttft_ms": timings["ttft_ms"],
        "e2e_ms": timings["e2e_ms"],
    }


def windows(result: report.Report) -> list[tuple[int, list[dict[str, Any]]]]:
    """The rows by window, in the order in which the windows went."""
    ids = [window["id"] for window in result["windows"]]
    return [(number, [row for row in result["rows"] if row["window"] == number]) for number in ids]


def render(result: report.Report) -> str:
    """A line for each window as Markdown, in milliseconds."""
    fields = ("window_wait_ms", "prefill_ms", "decode_ms", "window_tail_ms", "e2e_ms")
    rows = [
        [f"{number}, {len(members)} requests", *(report.spread([row[field] for row in members], 0) for field in fields)]
        for number, members in windows(result)
    ]
    head = ("window", *(f"`{field}`" for field in fields))
    return f"{report.table(head, rows)}\n\n{report.machine_line(result)}"


def draw(result: report.Report) -> str:
    """A bar for each request, its seven durations one after the other."""
    rows = [row for _, members in windows(result) for row in members]
    title = f"One POST /batch of {len(rows)} requests in windows of {result['batch_size']}"
    with plot(8, 1.2 + 0.19 * len(rows), title) as drawing:
        axes = drawing.axes
        left = [0.0] * len(rows)
        for part, (name, colour) in PARTS.items():
            widths = [row[part] for row in rows]
            axes.barh(range(len(rows)), widths, left=left, height=0.78, color=colour, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [f"{row['completion_tokens']} tokens" for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xlabel("milliseconds since the batch was received")
        axes.legend(ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.45, -0.09), frameon=False, fontsize=7)
    return drawing.svg


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=report.DOCS, help="the folder to write to")
    options = parser.parse_args()
    result = measure()
    report.write(options.docs, NAME, result, render(result), plot=draw(result))
    print(render(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
