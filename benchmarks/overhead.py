"""What the service costs: ``LLM.generate()`` against ``POST /batch`` and concurrent ``POST /generate``.

    .venv/bin/python -m benchmarks.overhead            writes docs/benchmarks.md and docs/figures/overhead.*
    .venv/bin/python -m benchmarks.overhead --quick    a short run, to see that it works; writes nothing

All sides use the same engine in the same process (``benchmarks.host``); the direct side gives the same requests to
``LLM.generate()`` on the engine thread, in consecutive windows of ``batch_size``. Each repeat runs all sides, in
another order, and a ratio compares two runs of the same repeat. The direct side's time is that of the calls alone; the
service's is what a client in another process waits, from the first byte sent to the last received, over a real socket.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.settings import EMBEDDED
from benchmarks import report, sides, workload
from benchmarks.figures import plot
from tests.engine.models import tiny_model

NAME = "overhead"
SIDES = {"direct": "`LLM.generate()`", "batch": "`POST /batch`", "generate": "64 × `POST /generate`"}
CALLERS = 64
ALONE_BOUND_MS = 10
"""What a lone request may take beyond ``max_wait_ms``."""


@dataclass(frozen=True)
class Case:
    """A model and how much is measured with it.

    Attributes:
        name: for the table.
        requests: how many requests a run of a side has.
        pairs: how many lone requests each side gets.
        targets: least share of the direct side's tokens a second, by side.
    """

    name: str
    requests: int
    pairs: int
    targets: dict[str, float]

    @property
    def model(self) -> str:
        """What the service is told."""
        return EMBEDDED if self.name == "embedded" else str(tiny_model())


CASES = (
    Case("embedded", 192, 25, {"batch": 0.97, "generate": 0.95}),
    Case("two-layer", 1024, 50, {"batch": 0.93, "generate": 0.85}),
)
QUICK = (Case("two-layer", 96, 3, CASES[1].targets),)


def measure(cases: tuple[Case, ...], repeats: int, say: Callable[[str], None]) -> report.Report:
    """Run all cases; the report."""
    results, versions, settings = [], {}, {}
    for case in cases:
        say(f"{case.name}: the engine starts")
        with sides.service(case.model) as service:
            versions, settings = service.info["versions"], service.info["settings"]
            results.append(_measure_case(case, repeats, service, say))
    return {
        "command": f"python -m benchmarks.{NAME}",
        "machine": report.machine(versions),
        "batch_size": settings["batch_size"],
        "max_wait_ms": settings["max_wait_ms"],
        "callers": CALLERS,
        "cases": results,
    }


def _measure_case(case: Case, repeats: int, service: sides.Service, say: Callable[[str], None]) -> dict[str, Any]:
    requests, batch_size = workload.mixed(case.requests), service.info["settings"]["batch_size"]
    runs: dict[str, Callable[[], tuple[float, int]]] = {
        "direct": lambda: service.direct(list(workload.windows_of(requests, batch_size))),
        "batch": lambda: _batch(service, requests),
        "generate": lambda: _concurrently(service, requests),
    }
    for run in runs.values():
        run()  # a first run warms up
    seconds: dict[str, list[float]] = {side: [] for side in runs}
    cpu_seconds: dict[str, list[float]] = {side: [] for side in runs}
    for repeat in range(repeats):
        for side in _rotated(list(runs), repeat):
            used = service.cpu_seconds
            took, tokens = runs[side]()
            assert tokens == workload.tokens_of(requests), f"{side} gave {tokens} tokens"
            seconds[side].append(took)
            cpu_seconds[side].append(service.cpu_seconds - used)
        say(f"{case.name}: repeat {repeat + 1}: " + ", ".join(f"{side} {seconds[side][-1]:.2f} s" for side in runs))
    return {
        **asdict(case),
        "engine_args": {**service.engine_args, "model": case.name},
        "engine_environment": service.engine_environment,
        "service_settings": {**service.info["settings"], "model": case.name},
        "completion_tokens": workload.tokens_of(requests),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "alone_ms": _alone(case.pairs, service),
    }


def _batch(service: sides.Service, requests: list[workload.Request]) -> tuple[float, int]:
    seconds, answer = service.batch(requests)
    return seconds, answer["timings"]["completion_tokens"]


def _concurrently(service: sides.Service, requests: list[workload.Request]) -> tuple[float, int]:
    seconds, answers = service.generate_concurrently(requests, CALLERS)
    return seconds, sum(answer["usage"]["completion_tokens"] for answer in answers)


def _alone(pairs: int, service: sides.Service) -> dict[str, list[float]]:
    """One request at a time, on both sides in turn: milliseconds."""
    request = workload.alone()
    times: dict[str, list[float]] = {"direct": [], "generate": []}
    for _ in range(pairs):
        times["direct"].append(service.direct([[request]])[0] * 1000)
        times["generate"].append(service.generate(request) * 1000)
    return times


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def ratios(case: dict[str, Any], side: str) -> list[float]:
    """A side's tokens a second as a share of the direct side's, for each repeat."""
    pairs = zip(case["seconds"]["direct"], case["seconds"][side], strict=True)
    return [direct / own for direct, own in pairs]


def cpu_ms(case: dict[str, Any], side: str) -> list[float]:
    """Processor time of the service's process for each request, in milliseconds, for each repeat."""
    return [seconds / case["requests"] * 1000 for seconds in case["cpu_seconds"][side]]


def render(result: report.Report) -> str:
    """The tables as Markdown."""
    throughput = report.table(
        ("model", "side", "tokens/s, median (range)", "of direct, median (range)", "target", "CPU ms a request"),
        [_row(case, side) for case in result["cases"] for side in SIDES],
        words=2,
    )
    alone = report.table(
        ("model", "`LLM.generate()`, ms", "`POST /generate`, ms", "slower by, ms", "target"),
        [_alone_row(case, result["max_wait_ms"]) for case in result["cases"]],
    )
    counts = ", ".join(f"{case['requests']:,} ({case['completion_tokens']:,} tokens)" for case in result["cases"])
    repeats = len(result["cases"][0]["seconds"]["direct"])
    return "\n\n".join(
        (
            f"Windows of {result['batch_size']}; requests in a run: {counts}; {repeats} interleaved repeats.",
            throughput,
            f"A lone request of {workload.alone()['max_tokens']} tokens, `max_wait_ms` {result['max_wait_ms']:g}:",
            alone,
            report.machine_line(result),
        )
    )


def _row(case: dict[str, Any], side: str) -> list[str]:
    rates = [case["completion_tokens"] / seconds for seconds in case["seconds"][side]]
    head = [case["name"], SIDES[side], report.spread(rates, 0)]
    cpu = report.spread(cpu_ms(case, side), 2)
    if side == "direct":
        return [*head, "1", "", cpu]
    return [*head, report.spread(ratios(case, side), 3), f"≥ {case['targets'][side]}", cpu]


def _alone_row(case: dict[str, Any], max_wait_ms: float) -> list[str]:
    times = case["alone_ms"]
    later = [own - direct for direct, own in zip(times["direct"], times["generate"], strict=True)]
    cells = [report.spread(values, 1) for values in (times["direct"], times["generate"], later)]
    return [case["name"], *cells, f"≤ {max_wait_ms + ALONE_BOUND_MS:g}"]


def missed(result: report.Report) -> list[str]:
    """A line for each target that the medians miss."""
    lines = []
    for case in result["cases"]:
        for side, target in case["targets"].items():
            if (median := statistics.median(ratios(case, side))) < target:
                lines.append(f"{case['name']}: {SIDES[side]} reaches {median:.3f} of direct, wanted {target}")
        times = case["alone_ms"]
        later = statistics.median(own - direct for direct, own in zip(times["direct"], times["generate"], strict=True))
        if later > result["max_wait_ms"] + ALONE_BOUND_MS:
            lines.append(f"{case['name']}: a lone request is {later:.1f} ms slower")
    return lines


def draw(result: report.Report) -> str:
    """Each repeat's ratio as a dot, the targets as lines."""
    rows = [(case, side) for case in result["cases"] for side in ("batch", "generate")][::-1]
    with plot(7, 0.9 + 0.45 * len(rows), "Tokens per second, as a share of direct LLM.generate()") as drawing:
        axes = drawing.axes
        for at, (case, side) in enumerate(rows):
            values = ratios(case, side)
            axes.plot(values, [at] * len(values), "o", color="#1f6feb", alpha=0.45, markersize=6)
            axes.plot([statistics.median(values)], [at], "|", color="#0a3069", markersize=18, markeredgewidth=2)
            axes.plot([case["targets"][side]] * 2, [at - 0.35, at + 0.35], color="#cf222e", linewidth=1.2)
        axes.set_yticks(range(len(rows)), [f"{case['name']}, {SIDES[side].replace('`', '')}" for case, side in rows])
        axes.axvline(1, color="#57606a", linewidth=0.8, linestyle=":")
        axes.set_xlabel("dot: a repeat; dark bar: median; red line: target")
    return drawing.svg


def main() -> int:
    """The command; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small case, two repeats; shown, not written")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats, at least 5 (default: 7)")
    parser.add_argument("--docs", type=Path, default=report.DOCS, help="the folder to write to")
    options = parser.parse_args()
    if options.quick:
        result = measure(QUICK, 2, print)
        print(render(result))
        return 0
    result = measure(CASES, max(options.repeats, 5), print)
    report.write(options.docs, NAME, result, render(result), plot=draw(result))
    print(render(result))
    print("\n".join(missed(result)) or "all targets are met")
    return 1 if missed(result) else 0


if __name__ == "__main__":
    raise SystemExit(main())
