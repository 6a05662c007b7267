"""How callers that wait for each answer fill windows: the sizes of the windows that they get.

.venv/bin/python -m benchmarks.callers    writes docs/offline-backend.md and docs/figures/callers.json
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from app.settings import EMBEDDED
from benchmarks import report, sides, workload

NAME = "callers"
PAGE = "offline-backend.md"
CALLERS = (64, 48, 32, 16)
ROUNDS = 6
SHOWN = 6


def measure() -> report.Report:
    """Each number of callers asks ``ROUNDS`` times, for answers of equal length."""
    with sides.service(EMBEDDED) as service:
        settings = service.info["settings"]
        return {
            "command": f"python -m benchmarks.{NAME}",
            "machine": report.machine(service.info["versions"]),
            "model": EMBEDDED,
            "batch_size": settings["batch_size"],
            "max_wait_ms": settings["max_wait_ms"],
            "sizes": {str(callers): _sizes(service, callers) for callers in CALLERS},
        }


def _sizes(service: sides.Service, callers: int) -> list[int]:
    """The sizes of the windows, in their order."""
    requests = [{**body, "max_tokens": 8} for body in workload.mixed(callers * ROUNDS)]
    _, answers = service.generate_concurrently(requests, callers)
    windows: dict[int, dict[str, Any]] = {answer["window"]["id"]: answer["window"] for answer in answers}
    return [windows[number]["size"] for number in sorted(windows)]


def render(result: report.Report) -> str:
    """The table as Markdown; the last windows are left out, since callers have ended by then."""
    rows = [
        [callers, ", ".join(map(str, sizes[:SHOWN])) + ", …", f"{_fill(sizes, result['batch_size']):.0%}"]
        for callers, sizes in result["sizes"].items()
    ]
    table = report.table(("callers", "sizes of its windows", "full, on average"), rows, words=2)
    settings = f"`batch_size` {result['batch_size']}, `max_wait_ms` {result['max_wait_ms']:g}"
    return f"{table}\n\n{settings}; {report.machine_line(result)}"


def _fill(sizes: list[int], batch_size: int) -> float:
    return statistics.fmean(sizes) / batch_size


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=report.DOCS, help="the folder to write to")
    options = parser.parse_args()
    result = measure()
    report.write(options.docs, NAME, result, render(result), page=PAGE)
    print(render(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
