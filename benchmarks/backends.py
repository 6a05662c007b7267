"""Both backends beside vLLM's own OpenAI server: the same engine settings, the same client, the same requests.

    .venv/bin/python -m benchmarks.backends            writes docs/backends.md, docs/figures/
    .venv/bin/python -m benchmarks.backends --quick    a short run, to see that it works; writes nothing

All servers of a model are up at once and one of them computes at a time: each measurement goes round all of them before
the next one begins, so that a ratio compares runs that are seconds apart. Each repeat starts every server anew and goes
round in another order. vLLM's server gets the engine arguments that the services' ``GET /info`` names; ``max_num_seqs``
is the same for all. GuideLLM then asks the same servers for streams, and measures them in its own way.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import client, guidellm_runs, report, servers
from benchmarks import versus_vllm_serve as versus
from benchmarks.backends_tables import BATCH, GUIDELLM, PLAIN, SIDES, STREAMED, VLLM, draw, render
from benchmarks.comparison import percentiles, speed

NAME = "backends"
PAGE = "backends.md"
MAX_NUM_SEQS = 64
OPTIONS = {
    "offline_32": ("--backend", "vllm_offline", "--batch-size", "32"),
    "offline_64": ("--backend", "vllm_offline", "--batch-size", "64"),
    "python": ("--backend", "vllm_python", "--batch-size", str(MAX_NUM_SEQS)),
}
VLLM_CONFIG = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2**29}
STREAMS = 32
"""Of the comparison by GuideLLM."""
BATCH_ROWS = 256
MEASURED = (VLLM, "offline_64", "python")
"""All with 64 in the engine at most."""
GUIDELLM_SIDES = (VLLM, "offline_64", "python")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case(versus.Case):
    """A model and how much is measured with it.

    Attributes:
        fixed: numbers of callers that are measured with answers of one length, too.
    """

    fixed: tuple[int, ...] = (1, 8, 32, 64)
    streamed: tuple[int, ...] = (1, 8, 32, 64)
    sides: tuple[str, ...] = tuple(SIDES)
    guidellm_sides: tuple[str, ...] = GUIDELLM_SIDES


CASES = (
    Case(
        "embedded",
        tokens=11,
        requests={1: 3, 32: 48, 64: 64},
        fixed=(32,),
        streamed=(1, 32, 64),
        sides=MEASURED,
        guidellm_sides=(VLLM, "python"),
    ),
    Case(
        "two-layer",
        tokens=32,
        requests={1: 10, 8: 48, 32: 128, 64: 192, BATCH_ROWS: BATCH_ROWS},
        fixed=(32,),
        sides=MEASURED,
    ),
)
"""As much of the grid as a quarter of an hour on two cores holds: starts take half of it."""
QUICK = (
    Case(
        "two-layer",
        tokens=16,
        requests={1: 2, 16: 32, 64: 64},
        fixed=(16,),
        streamed=(1, 16),
        sides=(VLLM, "offline_32", "python"),
        guidellm_sides=(),
    ),
)


@dataclass(frozen=True)
class Running:
    """A server that is up.

    Attributes:
        url: its address.
        start_s: seconds from its command to its readiness.
    """

    url: str
    start_s: float

    def give_at_once(self, requests: Sequence[client.Body], *, is_ours: bool) -> client.Run:
        """All requests: in one ``POST /batch``, or, where there is none, by a caller for each."""
        return client.batch(self.url, requests) if is_ours else client.drive(self.url, requests, len(requests))


# --- measuring ---


def measure(cases: tuple[Case, ...], repeats: int, say: Say) -> report.Report:
    """Run all cases; the report."""
    begun, results, engine = time.perf_counter(), [], versus.Engine()
    for case in cases:
        engine = versus.Engine()
        results.append(_measure_case(case, repeats, engine, say))
    return {
        "command": f"python -m benchmarks.{NAME}",
        "machine": report.machine(engine.versions),
        "vllm_config": VLLM_CONFIG,
        "repeats": repeats,
        "minutes": round((time.perf_counter() - begun) / 60, 1),
        "cases": results,
    }


def _measure_case(case: Case, repeats: int, engine: versus.Engine, say: Say) -> dict[str, Any]:
    cells = list(cells_of(case))
    costs: dict[str, dict[str, list[float]]] = {side: {"start_s": [], "memory_mib": []} for side in case.sides}
    guidellm: dict[str, list[dict[str, Any]]] = {side: [] for side in case.guidellm_sides}
    for repeat in range(repeats):
        with _running(case, engine) as running:
            for side, server in running.items():
                _warm_up(case, side, server)
            for turn, cell in enumerate(cells, repeat):
                _measure_cell(case, cell, running, turn)
                say(f"{case.name}, repeat {repeat + 1}: {_in_words(cell)}")
            for side in versus.order(list(guidellm), repeat) if guidellm else ():
                guidellm[side].append(_ask_with_guidellm(case, running[side]))
                say(f"{case.name}, repeat {repeat + 1}: GuideLLM, {side}: {speed(guidellm[side][-1]):.0f} tokens/s")
            for side, server in running.items():
                costs[side]["start_s"].append(round(server.start_s, 2))
                costs[side]["memory_mib"].append(round(servers.memory_bytes(server.url) / 2**20))
    compared = {"version": guidellm_runs.version(), "streams": STREAMS, "runs": guidellm} if guidellm else None
    return {
        "name": case.name,
        "tokens": case.tokens,
        "engine_args": engine.args,
        "engine_environment": engine.environment,
        "service_settings": engine.settings,
        "cells": cells,
        "costs": costs,
        GUIDELLM: compared,
    }


def cells_of(case: Case) -> Iterator[dict[str, Any]]:
    """What is measured with a model, each with room for the runs of all sides."""
    callers = [number for number in case.requests if number != max(case.requests)]
    kinds = [(PLAIN, "fixed", case.fixed), (PLAIN, "mixed", callers), (STREAMED, "mixed", case.streamed)]
    kinds.append((BATCH, "mixed", [max(case.requests)]))
    for kind, lengths, numbers in kinds:
        for number in numbers:
            yield {"kind": kind, "lengths": lengths, "callers": number, "runs": {side: [] for side in case.sides}}


@contextmanager
def _running(case: Case, engine: versus.Engine) -> Iterator[dict[str, Running]]:
    """All servers of a case; the services first, since they name the engine's settings."""
    with ExitStack() as stack:
        running = {}
        for side in sorted(case.sides, key=lambda side: side == VLLM):
            begun = time.perf_counter()
            url = stack.enter_context(versus.server(case, side, engine, VLLM_CONFIG, OPTIONS.get(side, ())))
            running[side] = Running(url, time.perf_counter() - begun)
        yield running


def _warm_up(case: Case, side: str, server: Running) -> None:
    """Some requests of each kind."""
    warm = versus.Case(case.name, 8, {16: 16})
    client.drive(server.url, versus.bodies(warm, 16, "mixed", is_streamed=True), 16)
    server.give_at_once(versus.bodies(warm, 16, "fixed", is_streamed=False), is_ours=side != VLLM)


def _measure_cell(case: Case, cell: dict[str, Any], running: Mapping[str, Running], turn: int) -> None:
    """One round of all sides."""
    requests = versus.bodies(case, cell["callers"], cell["lengths"], is_streamed=cell["kind"] == STREAMED)
    for side in versus.order(case.sides, turn):
        if cell["kind"] == BATCH:
            run = running[side].give_at_once(requests, is_ours=side != VLLM)
        else:
            run = client.drive(running[side].url, requests, cell["callers"])
        cell["runs"][side].append(summary(run))


def summary(run: client.Run) -> dict[str, Any]:
    """What is kept of a run."""
    gaps = [gap for answer in run.answers for gap in answer.itl_ms]
    return {**versus.summary(run), "chunks": len(gaps) + len(run.answers), "itl_ms": percentiles(gaps)}


def _in_words(cell: Mapping[str, Any]) -> str:
    speeds = ", ".join(f"{side} {speed(runs[-1]):.0f}" for side, runs in cell["runs"].items())
    return f"{cell['kind']}, {cell['callers']} callers, {cell['lengths']}: {speeds} tokens/s"


def _ask_with_guidellm(case: Case, server: Running) -> dict[str, Any]:
    requests = versus.bodies(case, STREAMS, "mixed", is_streamed=False)
    backend = guidellm_runs.over_http(server.url, case.name, is_streamed=True)
    return guidellm_summary(guidellm_runs.run(backend, case.folder, requests, STREAMS, {}))


def guidellm_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept of GuideLLM's records, under the names of our own."""
    return {
        "requests": len(records),
        "completion_tokens": sum(record["output_tokens"] for record in records),
        "seconds": round(guidellm_runs.seconds(records), 4),
        "e2e_ms": percentiles([record["request_latency"] * 1000 for record in records]),
        "ttft_ms": percentiles([record["time_to_first_token_ms"] for record in records]),
        "itl_ms": percentiles([record["inter_token_latency_ms"] for record in records]),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small case, one repeat; shown, not written")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats, at least 3 (default: 3)")
    parser.add_argument("--docs", type=Path, default=report.DOCS, help="the folder to write to")
    options = parser.parse_args()
    if options.quick:
        print(render(measure(QUICK, 1, print)))
        return 0
    guidellm_runs.site_packages()  # that it is missing shows before anything is measured
    result = measure(CASES, max(options.repeats, 3), print)
    report.write(options.docs, NAME, result, render(result), plot=draw(result), page=PAGE)
    print(render(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
