"""``VLLMBackendBase``: what backends on vLLM share, which is all but the engine and how requests go into it."""

import asyncio
import contextlib
import copy
import logging
import math
import multiprocessing
import os
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from app.backends import engine_args, grammar, lora, mending, reasons
from app.backends.args import VLLMArgs
from app.backends.conversation import Conversations
from app.backends.grammar import GrammarChecker
from app.backends.media import PROCESSOR_CACHE_GB, MediaRenderer, to_rgb
from app.backends.memory import check_memory
from app.backends.model_files import ModelFiles, find_model
from app.backends.openai import AnswerSide, StreamSide, check_parsers, structured_outputs_of
from app.backends.packages import is_cpu_build, versions
from app.backends.places import check_shared_memory
from app.backends.registry import Backend
from app.backends.resolution import Resolution
from app.errors import EngineDead, InvalidRequest, ModelNotFound, ServiceError, StartError
from app.machine import check_temporary_folder
from app.media.limits import MediaLimits
from app.media.loader import MediaLoader
from app.prompts.media import Modality
from app.prompts.openai import OpenAIPrompt, Work
from app.request import Answer, AnswerHead, Resolved, ServedModel

logger = logging.getLogger(__name__)

WATCH_S = 0.2
MEDIA_AT_ONCE = 8
"""So many requests have their images and audio decoded and not yet rendered: each may hold a hundred megabytes."""
SENTENCE = "The quick brown fox jumps over the lazy dog."


class VLLMBackendBase(Backend):
    """The start, the resolution of bodies and the answers of OpenAI's routes, for backends on vLLM.

    Attributes:
        unusable_adapters: by name, why a LoRA adapter cannot be used.
    """

    args: VLLMArgs

    def __init__(self, args: VLLMArgs) -> None:
        super().__init__(args)
        self._arguments: engine_args.EngineArguments | None = None
        self._files: ModelFiles | None = None
        self._resolution: Resolution | None = None
        self._grammars: GrammarChecker | None = None
        self._renderer: MediaRenderer | None = None
        self._loader: MediaLoader | None = None
        self._media_slots = asyncio.Semaphore(MEDIA_AT_ONCE)
        self._render_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._warnings: list[str] = []
        self._adapters: list[lora.Adapter] = []
        self.unusable_adapters: dict[str, str] = {}
        self._compute_threads: int | None = None
        self._is_finished = threading.Event()

    @abstractmethod
    def _build(self, values: dict[str, Any]) -> None:
        """Build the engine from its arguments; on the engine thread."""

    @property
    @abstractmethod
    def _engine(self) -> Any:
        """The engine itself, with its ``vllm_config`` and ``engine_core``."""

    @property
    def resolution(self) -> Resolution:
        """What turns bodies into requests; there once prompts have been prepared."""
        assert self._resolution is not None
        return self._resolution

    @property
    def conversations(self) -> Conversations:
        """The request format at work."""
        return self.resolution.conversations

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return self.resolution.max_model_len

    # --- start and end

    def _open(self) -> None:
        """Build the engine. What is cheap to check is checked before weights are loaded."""
        self._require_needs()
        arguments = self.prepare_arguments()
        self.prepare_prompts()
        self._prepare_grammars(arguments.values["structured_outputs_config"])
        logger.info("loading %s into the engine", self.args.model)
        self._build_or_say_why(arguments.values)
        self._use_vllm_config(self._engine.vllm_config)
        self._watch_processes()
        self._note_threads()

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
        self._adapters = lora.look_at(self.args.lora_modules, self.args.served_model_name, files.folder)
        self.unusable_adapters = {adapter.name: adapter.reason for adapter in self._adapters if adapter.reason}
        for name, value in lora.engine_values(self._adapters).items():
            self._arguments.fill(name, value)
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
        if config.is_multimodal_model:
            self._arguments.fill("mm_processor_cache_gb", PROCESSOR_CACHE_GB)
        self._prepare_resolution(config, _tokenizer_of(config))

    def _prepare_resolution(self, model_config: Any, tokenizer: Any) -> None:
        if tokenizer is None:
            raise StartError("vllm_config: skip_tokenizer_init leaves the service without a tokenizer")
        self._resolution = Resolution(self.args, model_config, copy.deepcopy(tokenizer))

    def _prepare_grammars(self, structured_outputs: dict[str, Any]) -> None:
        """Start the process that tries grammars out, which warms up while the engine is built.

        Args:
            structured_outputs: what is set of vLLM's ``StructuredOutputsConfig``.
        """
        if grammar.needs_check(structured_outputs.get("backend", "auto")):
            is_compact = bool(structured_outputs.get("disable_any_whitespace"))
            self._grammars = GrammarChecker(disable_any_whitespace=is_compact)
            self._grammars.start(self.resolution.grammar_tokenizer())

    def _build_or_say_why(self, values: dict[str, Any]) -> None:
        mending.install()
        with reasons.collected() as file:
            try:
                self._build(values)
            except Exception as error:
                logger.debug("the engine could not be built", exc_info=True)
                raise reasons.start_error(error, reasons.first(file)) from error

    def _use_vllm_config(self, vllm_config: Any) -> None:
        if vllm_config.model_config.supports_multimodal_inputs:
            self._renderer = MediaRenderer(vllm_config, self.resolution.new_tokenizer())
            self._renderer.warm_up()
            self._check_placeholders(self._renderer)
            self._loader = MediaLoader(self._media_limits(), self._renderer.audio_rate_hz, to_rgb)
        self.resolution.use_vllm_config(vllm_config, self._renderer)
        self._answers = AnswerSide(vllm_config, self.resolution.new_tokenizer(), self.args)
        if not self.takes_windows:
            self._streams = StreamSide(vllm_config, self.resolution.new_tokenizer(), self.args)

    def _check_placeholders(self, renderer: MediaRenderer) -> None:
        """Tell of a setting for ``plain`` that would have every image or audio refused."""
        settings: dict[Modality, str] = {"image": self.args.image_placeholder, "audio": self.args.audio_placeholder}
        for modality, placeholder in settings.items():
            is_used = self.conversations.is_plain and modality in renderer.limits
            if is_used and not renderer.knows(modality, placeholder):
                self._warn(
                    f"{modality}_placeholder: {placeholder!r} is not what this model knows for {modality}s in text"
                )

    def _media_limits(self) -> MediaLimits:
        args = self.args
        return MediaLimits(
            max_bytes=args.max_media_bytes,
            max_image_pixels=args.max_image_pixels,
            max_audio_s=args.max_audio_s,
            timeout_s=args.media_timeout_s,
            domains=args.allowed_media_domains,
            networks=args.allowed_media_networks,
        )

    def _note_threads(self) -> None:
        """How many threads compute, where they are this process's; and a line about it in the log."""
        import torch

        assert self._arguments is not None
        if self._arguments.is_inline:
            self._compute_threads = torch.get_num_threads()
        where = "in this process" if self._arguments.is_inline else "in a process of its own"
        logger.info("the engine core runs %s; threads: %s", where, self._threads())

    def _watch_processes(self) -> None:
        """Where the engine core is a process of its own: notice its death."""
        core = self._engine.engine_core
        if getattr(core, "resources", None) is not None:
            threading.Thread(target=self._watch, args=(core,), daemon=True, name="engine-watch").start()

    def _watch(self, core: Any) -> None:
        while not self._is_finished.wait(WATCH_S):
            if core.resources.engine_dead:
                self._release_callers(core)
                self._report_death("vLLM's engine core process has died")
                return

    def _release_callers(self, core: Any) -> None:
        """End what waits for an engine core that has died, where vLLM does not do so itself."""

    @abstractmethod
    async def _generated(self, prompt: dict[str, Any], params: Any, adapter: Any) -> Any:
        """The output for one prompt, before there are requests."""

    @abstractmethod
    async def _add_adapter(self, adapter: Any) -> None:
        """Hand a LoRA adapter to the engine, which raises when it does not take it."""

    @abstractmethod
    async def _remove_adapter(self, number: int) -> None:
        """Take a LoRA adapter out of the engine, where it may be registered though it was refused."""

    async def _prove(self) -> None:
        """Two tokens must come back with statistics; and each adapter must make a difference."""
        from vllm import SamplingParams

        prompt = {"type": "token", "prompt_token_ids": [self.resolution.tokenizer.bos_token_id or 0]}
        output = await self._generated(prompt, SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0), None)
        stats = output.metrics
        if stats is None or not (stats.queued_ts > 0 and stats.first_token_ts > 0):
            raise StartError("vLLM returns no statistics for a request, so there are no timings: is this vLLM 0.32?")
        await self._load_adapters()

    async def _load_adapters(self) -> None:
        """Those that look right into the engine, one by one; who then still cannot be used is told of."""
        requests = {adapter.name: lora.lora_request(adapter) for adapter in self._adapters if adapter.reason is None}
        base = await self._scores(None) if requests else None
        for name, request in requests.items():
            if (reason := await self._try_adapter(request, base)) is not None:
                self.unusable_adapters[name] = reason
        for name, reason in self.unusable_adapters.items():
            self._warn(f"the adapter {name} cannot be used: {reason}")
        self.resolution.adapters = {
            name: request for name, request in requests.items() if name not in self.unusable_adapters
        }

    async def _try_adapter(self, request: Any, base: Any) -> str | None:
        """Why an adapter cannot be used; None: it can. One that cannot must not keep its slot in the engine."""
        reason = None
        try:
            await self._add_adapter(request)
            scores = await self._scores(request)
            if any(math.isnan(score) for position in scores for _, score in position):
                raise StartError(f"lora_modules: {request.lora_name} makes the model's scores no numbers: leave it out")
            if scores == base:
                reason = "it changes nothing: vLLM finds none of its modules in this model"
        except (EngineDead, StartError):
            raise  # what are no numbers stay in the engine's cache
        except Exception as error:
            reason = f"vLLM does not take it: {' '.join(str(error).split())[:300]}"
        if reason is not None:
            await self._remove_adapter(request.lora_int_id)
        return reason

    async def _scores(self, adapter: Any) -> list[Any]:
        """How likely the model finds the words of a sentence."""
        from vllm import SamplingParams

        ids = self.resolution.tokenizer.encode(SENTENCE, add_special_tokens=True)[: self.max_model_len - 1]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        output = await self._generated({"type": "token", "prompt_token_ids": ids}, params, adapter)
        positions = [position for position in output.prompt_logprobs if position]
        return [sorted((token, entry.logprob) for token, entry in position.items()) for position in positions]

    def _warn(self, warning: str) -> None:
        """Into the log, and into ``/info``."""
        self._warnings.append(warning)
        logger.warning("%s", warning)

    def models(self) -> list[ServedModel]:
        """The model, and the adapters that can be used."""
        (base,) = super().models()
        usable = self._resolution.adapters if self._resolution is not None else {}
        return [base, *(ServedModel(name, request.lora_path, base.name) for name, request in usable.items())]

    def find_model(self, name: str, *, param: str | None = None) -> ServedModel:
        """As the base class has it; for an adapter that cannot be used with the reason."""
        if (reason := self.unusable_adapters.get(name)) is not None:
            raise ModelNotFound(f"the adapter {name!r} cannot be used: {reason}", param=param)
        return super().find_model(name, param=param)

    async def close(self, timeout_s: float = 10.0) -> bool:
        """As the base class has it; connections to hosts of media end as well."""
        self._render_thread.shutdown(wait=False, cancel_futures=True)
        if self._loader is not None:
            await self._loader.aclose()
        return await super().close(timeout_s)

    def _close(self) -> None:
        self._is_finished.set()
        if self._renderer is not None:
            self._renderer.close()
        if self._grammars is not None:
            self._grammars.close()

    def kill(self) -> None:
        """End the engine's processes at once; workers follow their engine core (``guard``)."""
        self._is_finished.set()
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError, ValueError):
                child.kill()

    # --- requests and answers

    async def resolve(self, bodies: Sequence[Work]) -> list[Resolved | ServiceError]:
        """As the base class does; what forms a text is tried out first, where it can do no harm; media are loaded."""
        if not any(_forms_text(body) or body.media for body in bodies):
            return await super().resolve(bodies)
        return list(await asyncio.gather(*(self._resolve_with_care(body) for body in bodies)))

    async def _resolve_with_care(self, body: Work) -> Resolved | ServiceError:
        """One body, whose grammar is compiled elsewhere before vLLM's code sees it; so is one that tools make."""
        try:
            self._check_model(body)
            if isinstance(body, OpenAIPrompt) and body.body.forms_text:
                asked = await self._on(self._resolver, structured_outputs_of, body.body)
                await self._try_grammar(asked, body.body.form_param)
            resolved = await self._resolve_fully(body)
            if not resolved.params.structured_outputs:
                return resolved
            await self._try_grammar(resolved.params.structured_outputs, "tools")
            return await self._on(self._resolver, self.resolution.verify_grammar, resolved, self._grammars)
        except Exception as error:
            return self._refusal(body, error)

    async def _resolve_fully(self, body: Work) -> Resolved:
        """One body, with its images and audio: refused before anything is fetched, where that can be told."""
        parts = body.media
        if not parts:
            return await self._on(self._resolver, self._resolve, body)
        if self._renderer is None or self._loader is None:
            raise InvalidRequest(f"this model takes no {parts[0].modality}", param=parts[0].param)
        self._renderer.check(parts)
        prompt = await self._on(self._resolver, self.resolution.prompt, body)
        files = await self._loader.fetch(parts)  # without a slot: a slow host holds up nobody who has all there
        async with self._media_slots:
            items = await self._loader.decode(parts, files)
            del files
            rendered = await self._on(self._render_thread, self._renderer.render, prompt.ids, parts, items)
            del items
        return await self._on(self._resolver, self.resolution.complete, body, prompt, rendered)

    async def _try_grammar(self, structured_outputs: Any, param: str) -> None:
        """Compile it in a process of its own.

        Args:
            structured_outputs: vLLM's ``StructuredOutputsParams``, or None.
            param: the field that asked for it.

        Raises:
            InvalidRequest: says what is wrong with it.
            NotReady: it could not be tried.
        """
        if structured_outputs is None or self._grammars is None:
            return
        try:
            kind, spec = await self._on(self._resolver, grammar.spec_of, structured_outputs)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from error
        if (wrong := await self._grammars.check(kind, spec)) is not None:
            raise InvalidRequest(wrong, param=param)

    def _resolve(self, body: Work) -> Resolved:
        return self.resolution.resolve(body)

    def _shape(self, answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
        return self._answers.answer([(answer.request.resolved, answer.generation.raw) for answer in answers], head)

    def stream(
        self, prompts: Sequence[Resolved], outputs: AsyncIterator[tuple[int, Any]], head: AnswerHead
    ) -> AsyncGenerator[bytes, None]:
        """As the base class has it; by vLLM's own makers of chunks."""
        return self._streams.chunks(prompts, outputs, head)

    # --- what it tells of itself

    def info(self) -> dict[str, Any]:
        """Engine settings with their sources, versions, thread binding, warnings."""
        arguments, resolution = self._arguments, self._resolution
        return {
            "kind": self.args.kind,
            "engine_process": None if arguments is None else "inline" if arguments.is_inline else "separate",
            "engine_args": {} if arguments is None else _plain(arguments.describe()),
            "generation_defaults": {} if resolution is None else _plain(resolution.defaults),
            "request_format": None if resolution is None else resolution.format.source,
            "versions": versions(),
            "threads": self._threads(),
            "media": [] if self._renderer is None else list(self._renderer.limits),
            "adapters": [self._describe(adapter) for adapter in self._adapters],
            "warnings": list(self._warnings),
        }

    def _describe(self, adapter: lora.Adapter) -> dict[str, Any]:
        reason = self.unusable_adapters.get(adapter.name)
        return {"name": adapter.name, "folder": str(adapter.path), "rank": adapter.rank or None, "unusable": reason}

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


def _tokenizer_of(model_config: Any) -> Any:
    """A tokenizer that nobody else holds: not vLLM's cached one, which the engine uses."""
    from vllm.tokenizers.registry import get_tokenizer

    return get_tokenizer(
        model_config.tokenizer,
        tokenizer_mode=model_config.tokenizer_mode,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
        runner_type=model_config.runner_type,
    )


def _forms_text(body: Work) -> bool:
    return isinstance(body, OpenAIPrompt) and body.body.forms_text


def _plain(value: Any) -> Any:
    """A value as JSON can carry it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
