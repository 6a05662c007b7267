"""The checks of ``batchserve doctor`` that import vLLM, in a child process: what kills it is found, not suffered.

Reads one line of JSON from standard input, writes a finding a line to standard output, and ends when its parent does.
"""

import asyncio
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from app.backends import engine_args, offline, python  # noqa: F401 -- they register themselves
from app.backends.args import VLLMArgs, parse_args
from app.backends.base import VLLMBackendBase
from app.backends.outputs import to_stats
from app.backends.packages import is_cpu_build
from app.backends.registry import Backend
from app.errors import StartError
from app.finding import Finding
from app.log import configure
from app.models.embedded import end_with_parent

VLLM, STATISTICS, ARGUMENTS, TEMPLATE, ENGINE = "vllm", "statistics", "engine arguments", "chat template", "engine"
STAGES = (VLLM, STATISTICS, ARGUMENTS, TEMPLATE, ENGINE)
"""In this order; each is impossible once one of the first three has failed."""
CLOSE_TIMEOUT_S = 10.0
ADAPTERS_ADVICE = "mend them, or take them out of lora_modules: requests for them get a 404"


class Checkup:
    """The stages share one backend, up to the last, which builds another."""

    def __init__(self, args: VLLMArgs, *, is_offline: bool) -> None:
        self._args = args
        self._is_offline = is_offline
        self._backend = _backend(args)

    def run(self, stage: str) -> Finding:
        """One check; whatever goes wrong in it is what it has found."""
        checks: dict[str, Callable[[], Finding]] = {
            VLLM: self._import,
            STATISTICS: self._look_at_statistics,
            ARGUMENTS: self._prepare,
            TEMPLATE: self._try_template,
            ENGINE: self._build,
        }
        try:
            return checks[stage]()
        except StartError as error:
            found, _, advice = str(error).rpartition("; ")
            return Finding(stage, "fail", found or advice, advice if found else "mend this, then try again")
        except Exception as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return Finding(stage, "fail", found, ADVICE.get(stage, "mend this, then try again"))

    def _import(self) -> Finding:
        engine_args.prepare_environment(self._args, is_cpu=is_cpu_build(), is_offline=self._is_offline)
        import torch
        from vllm import LLM  # noqa: F401 -- the package alone imports next to nothing
        from vllm.platforms import current_platform

        pinned = metadata.version("torch")
        if torch.__version__.partition("+")[0] != pinned.partition("+")[0]:
            advice = "another torch lies in front of the installed one: look at PYTHONPATH"
            return Finding(VLLM, "warn", f"imported torch {torch.__version__}, installed is {pinned}", advice)
        return Finding(VLLM, "ok", f"imported, with torch {torch.__version__}, for {current_platform.device_type}")

    def _look_at_statistics(self) -> Finding:
        """Whether vLLM still has what the timings are made of."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.metrics.stats import RequestStateStats

        advice = "install the pinned vLLM again (scripts/setup)"
        if "disable_log_stats" not in {field.name for field in dataclasses.fields(EngineArgs)}:
            return Finding(STATISTICS, "fail", "EngineArgs has no disable_log_stats: they cannot be turned on", advice)
        try:
            to_stats(RequestStateStats())
        except AttributeError as error:
            return Finding(STATISTICS, "fail", f"RequestStateStats lacks what the timings need: {error}", advice)
        return Finding(STATISTICS, "ok", "turned on by the service; RequestStateStats has all that the timings need")

    def _prepare(self) -> Finding:
        arguments = self._backend.prepare_arguments()
        shown = {**arguments.values, "model": None}
        names = ("dtype", "max_model_len", "kv_cache_memory_bytes", "tensor_parallel_size", "gpu_memory_utilization")
        values = ", ".join(f"{name}={shown[name]}" for name in names if shown.get(name) is not None)
        where = "inline" if arguments.is_inline else "in a process of its own"
        if (broken := self._broken_adapters()) is not None:
            return Finding(ARGUMENTS, "warn", broken, ADAPTERS_ADVICE)
        return Finding(ARGUMENTS, "ok", f"{values or 'vLLM’s own defaults'}; the engine core runs {where}")

    def _try_template(self) -> Finding:
        self._backend.prepare_prompts()
        if not self._backend.conversations.is_possible:
            advice = "start with request_format=plain, or with a template file; `prompt` is served without"
            return Finding(TEMPLATE, "warn", "the model has none: `messages` will be refused", advice)
        chat, text = self._backend.conversations.bos_repeats()
        source = self._backend.info()["request_format"]
        if chat > 1:
            advice = "take bos_token out of the template; the service drops all but one, other servers may not"
            return Finding(TEMPLATE, "warn", f"{source}: a user's message begins with {chat} BOS tokens", advice)
        if chat < text:
            advice = "put bos_token at the beginning of the template, unless the model was trained without"
            return Finding(TEMPLATE, "warn", f"{source}: a user's message begins without the BOS of a text", advice)
        return Finding(TEMPLATE, "ok", f"{source} renders a user's message, {chat or 'no'} BOS at its beginning")

    def _build(self) -> Finding:
        self._backend = _backend(self._args)  # a new one, as in a start; the other's memory is let go
        gc.collect()
        asyncio.run(self._open_and_close(self._backend))
        if (broken := self._broken_adapters()) is not None:
            return Finding(ENGINE, "warn", f"built and closed; {broken}", ADAPTERS_ADVICE)
        return Finding(ENGINE, "ok", "built, generated two tokens with statistics, closed")

    def _broken_adapters(self) -> str | None:
        told = [f"{name}: {reason}" for name, reason in self._backend.unusable_adapters.items()]
        return f"adapters that cannot be used: {'; '.join(told)}" if told else None

    async def _open_and_close(self, backend: VLLMBackendBase) -> None:
        try:
            await backend.open()
            await backend.validate()
        finally:
            await backend.close(CLOSE_TIMEOUT_S)


def _backend(args: VLLMArgs) -> VLLMBackendBase:
    backend = Backend.create(args)
    assert isinstance(backend, VLLMBackendBase)
    return backend


ADVICE = {
    VLLM: "install the pinned packages again (scripts/setup); a library that is missing comes with the system",
    STATISTICS: "install the pinned vLLM again (scripts/setup)",
}


def main() -> None:
    """Run the stages that the parent asks for; after one that the others need has failed, no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no finding
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    end_with_parent()
    configure(asked["log_level"], "text")
    args = parse_args(asked["args"])
    assert isinstance(args, VLLMArgs)
    checkup = Checkup(args, is_offline=asked["is_offline"])
    for stage in asked["stages"]:
        finding = checkup.run(stage)
        print(json.dumps(finding.as_dict()), file=out, flush=True)
        if finding.status == "fail" and stage in (VLLM, ARGUMENTS, TEMPLATE):
            break
    out.close()
    os._exit(0)  # threads of vLLM's must not hold it up


if __name__ == "__main__":
    main()
