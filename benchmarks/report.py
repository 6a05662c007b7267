"""Where figures are kept: a JSON file for each benchmark, a marked block of a page and a plot made of it.

The JSON in ``docs/figures/`` holds what was measured; tables and plots are functions of it, so that a test can tell
when one of them was changed by hand. ``write`` puts all of them in place.
"""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
Report = dict[str, Any]


def write(
    docs: Path, name: str, report: Report, table: str, *, plot: str | None = None, page: str = "benchmarks.md"
) -> None:
    """Write ``figures/<name>.json``, the plot if there is one beside it, and the table into its block of the page."""
    figures = docs / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    (figures / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    if plot is not None:
        (figures / f"{name}.svg").write_text(plot)
    if (docs / page).exists():
        (docs / page).write_text(with_block((docs / page).read_text(), name, table))


def read(docs: Path, name: str) -> Report:
    """The report that ``write`` has written."""
    report: Report = json.loads((docs / "figures" / f"{name}.json").read_text())
    return report


def block(page: str, name: str) -> str:
    """What stands between the marks of a block.

    Raises:
        ValueError: the page has no such block.
    """
    start, end = _marks(name)
    _, found, rest = page.partition(start)
    inside, ended, _ = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no block {start} … {end}")
    return inside.strip("\n")


def with_block(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of a block."""
    start, end = _marks(name)
    block(page, name)
    before, _, rest = page.partition(start)
    return f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by python -m benchmarks.{name} -->", f"<!-- end of {name} -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table; the first ``words`` columns to the left, the others hold numbers."""
    rule = ["---" if column < words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and in brackets least and greatest."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"


def machine(versions: dict[str, str | None]) -> dict[str, Any]:
    """Where and with what a benchmark ran; ``versions`` are those of ``/info``."""
    commit = _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no", "--", "app", "benchmarks", "requirements"))
    return {
        "commit": f"{commit} with changes" if changed else commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def machine_line(report: Report) -> str:
    """One line about it, for below a table."""
    at = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in at["versions"].items())
    return (
        f"{at['date']}, commit `{at['commit'][:12]}`{' with changes' if ' ' in at['commit'] else ''}; {at['cpu']}, "
        f"{at['cores']} cores, {at['memory_gib']} GiB; Python {at['python']}, {versions}."
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
