"""This service against vLLM's own OpenAI server: the same engine settings, the same client, the same requests.

    .venv/bin/python -m benchmarks.versus_vllm_serve            writes docs/benchmarks.md, docs/figures/
    .venv/bin/python -m benchmarks.versus_vllm_serve --quick    a short run, to see that it works; writes nothing

One server computes at a time. Each repeat starts every server anew, in another order, since two processes with the same
engine differ by several percent for as long as they live; a ratio compares two runs of the same repeat. vLLM's server
gets the engine arguments that the service's ``GET /info`` names. GuideLLM's backend that calls vLLM in its own process
is the third side, measured by GuideLLM itself (``benchmarks.guidellm_runs``).
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.models import embedded
from app.settings import EMBEDDED
from benchmarks import client, guidellm_runs, report, servers, sides, workload
from benchmarks.comparison import percentiles, speed
from benchmarks.versus_tables import GUIDELLM, GUIDELLM_SIDES, KINDS, SIDES, VLLM, draw, render
from tests.engine.models import tiny_model

NAME = "versus_vllm_serve"
OPTIONS = {
    "service_32": ("--batch-size", "32"),
    "service_64": ("--batch-size", "64"),
}
VLLM_CONFIG = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2**30}
"""The first two are what vLLM's server takes by itself on a CPU; the offline class would take other values."""
STREAMS = BATCH_SIZE = 64
"""Of the comparison with GuideLLM: callers, and the most in a window on both sides."""
WAIT_MS = 10.0
"""How long GuideLLM's windows wait for more: its default, and the service's."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A model and how much is measured with it.

    Attributes:
        name: for the table; also the name under which the model is served.
        tokens: length of an answer, where it is fixed; the mean of mixed ones.
        requests: how many a run has, by the number of callers.
        streamed: numbers of callers that are measured with streamed answers, too.
        sides: which servers.
        guidellm_sides: which of those that GuideLLM measures.
    """

    name: str
    tokens: int
    requests: dict[int, int]
    streamed: tuple[int, ...] = (1, 32, 64, 256)
    sides: tuple[str, ...] = tuple(SIDES)
    guidellm_sides: tuple[str, ...] = tuple(GUIDELLM_SIDES)

    @property
    def model(self) -> str:
        """What the service is told."""
        return EMBEDDED if self.name == "embedded" else str(tiny_model())

    @property
    def folder(self) -> str:
        """The same for vLLM."""
        return str(embedded.prepare()) if self.name == "embedded" else str(tiny_model())


CASES = (
    Case(
        "embedded",
        tokens=12,
        requests={1: 4, 32: 64, 64: 64, 256: 256},
        streamed=(32,),
        sides=(VLLM, "service_32"),
    ),
    Case(
        "two-layer",
        tokens=32,
        requests={1: 24, 32: 192, 64: 256, 256: 512},
        streamed=(1, 32, 64),
    ),
)
"""As much of the grid as half an hour on two cores holds: the embedded model takes most of it."""
QUICK = (Case("two-layer", tokens=16, requests={1: 2, 16: 32}, streamed=(1, 16), sides=(VLLM, "service_32")),)


@dataclass
class Engine:
    """What the services of a case have said of themselves; the first one's engine is everybody's.

    Attributes:
        args: engine arguments.
        environment: variables that the engine reads.
        versions: of the packages.
        settings: each service's own, by side.
    """

    args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def learn(self, case: Case, side: str, service: sides.Service) -> None:
        """Keep what it says.

        Raises:
            RuntimeError: its engine is another one.
        """
        self.args = self.args or service.engine_args
        self.environment = self.environment or service.engine_environment
        self.versions = service.info["versions"]
        self.settings[side] = {**service.info["settings"], "model": case.name}
        if self.args != service.engine_args:
            raise RuntimeError(f"two services, two engines: {self.args} and {service.engine_args}")


def bodies(case: Case, callers: int, lengths: str, *, is_streamed: bool) -> list[client.Body]:
    """The requests of a run: the same for every side and repeat."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    mean = statistics.fmean(workload.MAX_TOKENS)
    return [
        {
            **request,
            "model": case.name,
            "max_tokens": case.tokens if lengths == "fixed" else round(request["max_tokens"] * case.tokens / mean),
            **streamed,
        }
        for request in workload.mixed(case.requests[callers], seed=callers)
    ]


# --- measuring ---


def measure(cases: tuple[Case, ...], repeats: int, say: Say, *, with_guidellm: bool) -> report.Report:
    """Run all cases; the report."""
    results, engine = [], Engine()
    for case in cases:
        engine = Engine()
        results.append(_measure_case(case, repeats, engine, say))
        if with_guidellm:
            results[-1][GUIDELLM] = _measure_guidellm(case, repeats, engine, say)
    return {
        "command": f"python -m benchmarks.{NAME}",
        "machine": report.machine(engine.versions),
        "vllm_config": VLLM_CONFIG,
        "repeats": repeats,
        "cases": results,
    }


def _measure_case(case: Case, repeats: int, engine: Engine, say: Say) -> dict[str, Any]:
    cells = [
        {"callers": callers, "lengths": lengths, "is_streamed": is_streamed, "runs": {side: [] for side in case.sides}}
        for lengths, is_streamed in KINDS
        for callers in (case.streamed if is_streamed else case.requests)
    ]
    orders = [order(case.sides, repeat) for repeat in range(repeats)]
    for repeat, names in enumerate(orders):
        for side in names:
            with server(case, side, engine, VLLM_CONFIG, OPTIONS.get(side, ())) as url:
                _warm_up(case, url)
                for cell in cells:
                    _measure_cell(case, cell, side, url)
            say(f"{case.name}: repeat {repeat + 1}, {SIDES[side]}: {_speeds(cells, side)} tokens/s")
    return {
        "name": case.name,
        "tokens": case.tokens,
        "engine_args": engine.args,
        "engine_environment": engine.environment,
        "service_settings": engine.settings,
        "orders": orders,
        "cells": cells,
    }


def order(names: Sequence[str], repeat: int) -> list[str]:
    """The sides in the order of a repeat: every other time backwards, each time another one first.

    The first order begins with a service, since it names the engine's settings.
    """
    by = 1 + repeat // 2
    turned = [*names[by % len(names) :], *names[: by % len(names)]]
    return turned[::-1] if repeat % 2 else turned


@contextmanager
def server(
    case: Case, side: str, engine: Engine, vllm_config: Mapping[str, Any], options: Sequence[str]
) -> Iterator[str]:
    """The address of a running server.

    Args:
        case: the model, and the name it is served under.
        side: vLLM's server, which gets the engine settings of the services; else a service, which tells them.
        engine: those settings.
        vllm_config: of a service.
        options: of a service, beside that.
    """
    if side == VLLM:
        with servers.vllm_server(case.folder, case.name, engine.args, engine.environment) as url:
            yield url
        return
    words = ("--served-model-name", case.name, "--vllm-config", json.dumps(vllm_config), *options)
    with sides.service(case.model, *words) as service:
        engine.learn(case, side, service)
        yield service.url


def _warm_up(case: Case, url: str) -> None:
    """Some requests of each kind."""
    for lengths, is_streamed in KINDS:
        warm = Case(case.name, 8, {16: 16})
        client.drive(url, bodies(warm, 16, lengths, is_streamed=is_streamed), 16)


def _measure_cell(case: Case, cell: dict[str, Any], side: str, url: str) -> None:
    requests = bodies(case, cell["callers"], cell["lengths"], is_streamed=cell["is_streamed"])
    cell["runs"][side].append(summary(client.drive(url, requests, cell["callers"])))


def _speeds(cells: list[dict[str, Any]], side: str) -> str:
    return ", ".join(f"{speed(cell['runs'][side][-1]):.0f}" for cell in cells)


def _measure_guidellm(case: Case, repeats: int, engine: Engine, say: Say) -> dict[str, Any]:
    """GuideLLM with its own backend, and with the service."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in case.guidellm_sides}
    for repeat in range(repeats):
        for side in order(case.guidellm_sides, repeat):
            run = _guidellm_summary(_ask_with_guidellm(case, side, engine))
            runs[side].append(run)
            say(f"{case.name}: GuideLLM, repeat {repeat + 1}, {GUIDELLM_SIDES[side]}: {speed(run):.0f} tokens/s")
    return {"version": guidellm_runs.version(), "streams": STREAMS, "batch_size": BATCH_SIZE, "runs": runs}


def _ask_with_guidellm(case: Case, side: str, engine: Engine) -> list[dict[str, Any]]:
    requests = bodies(case, STREAMS, "mixed", is_streamed=False)
    if side == GUIDELLM:
        backend = guidellm_runs.in_process(case.folder, BATCH_SIZE, WAIT_MS, engine.args)
        return guidellm_runs.run(backend, case.folder, requests, STREAMS, engine.environment)
    with server(case, side, engine, VLLM_CONFIG, OPTIONS.get(side, ())) as url:
        backend = guidellm_runs.over_http(url, case.name)
        return guidellm_runs.run(backend, case.folder, requests, STREAMS, {})


def _guidellm_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "requests": len(records),
        "completion_tokens": sum(record["output_tokens"] for record in records),
        "seconds": round(guidellm_runs.seconds(records), 4),
        "e2e_ms": percentiles([record["request_latency"] * 1000 for record in records]),
    }


def summary(run: client.Run) -> dict[str, Any]:
    """What is kept of a run."""
    answers = run.answers
    return {
        "requests": len(answers),
        "completion_tokens": sum(answer.completion_tokens for answer in answers),
        "seconds": round(run.seconds, 4),
        "e2e_ms": percentiles([answer.e2e_ms for answer in answers]),
        "ttft_ms": percentiles([answer.ttft_ms for answer in answers if answer.ttft_ms is not None]),
        "own_ttft_ms": percentiles([answer.own_ttft_ms for answer in answers if answer.own_ttft_ms is not None]),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small case, one repeat; shown, not written")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats, at least 3 (default: 3)")
    parser.add_argument("--docs", type=Path, default=report.DOCS, help="the folder to write to")
    options = parser.parse_args()
    if options.quick:
        print(render(measure(QUICK, 1, print, with_guidellm=False)))
        return 0
    guidellm_runs.site_packages()  # that it is missing shows before anything is measured
    result = measure(CASES, max(options.repeats, 3), print, with_guidellm=True)
    report.write(options.docs, NAME, result, render(result), plot=draw(result))
    print(render(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
