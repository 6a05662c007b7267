"""``VLLMOfflineBackend``: builds, uses and closes one vLLM ``LLM`` on one named thread."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from app.backends.args import VLLMOfflineArgs
from app.backends.base import VLLMBackendBase
from app.backends.isolation import WindowMismatch, run_again, run_isolated
from app.backends.outputs import to_generation, to_prompt
from app.backends.registry import Backend
from app.backends.rolling import Admission, Rolling
from app.errors import EngineDead, InvalidRequest
from app.request import Generation, Outcome, Request, Window

logger = logging.getLogger(__name__)


MAX_AHEAD = 16
"""So many requests wait on the engine thread at most: they are taken in before the event loop hears of free room."""


@Backend.register("vllm_offline")
class VLLMOfflineBackend(VLLMBackendBase):
    """Windows through ``LLM.generate()``, or one request the moment another ends, with every request's statistics."""

    args: VLLMOfflineArgs
    release = "rolling"

    def __init__(self, args: VLLMOfflineArgs) -> None:
        super().__init__(args)
        self.takes_windows = args.scheduling == "window"
        self._llm: Any = None
        self._rolling: Rolling | None = None

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine

    @property
    def max_in_flight(self) -> int:
        """Those in the engine, and a few behind them."""
        size = self.args.batch_size
        return size + min(MAX_AHEAD, max(2, size // 4))

    def _build(self, values: dict[str, Any]) -> None:
        self._llm = _llm_class()(**values)

    def _open(self) -> None:
        super()._open()
        self._warn_of_small_engine()
        if not self.takes_windows:
            self._rolling = Rolling(
                self._engine, self.args.batch_size, self._run_again, self._report_death, self._tell_loop
            )

    def _warn_of_small_engine(self) -> None:
        max_num_seqs = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        if max_num_seqs < self.args.batch_size:
            self._warn(
                f"max_num_seqs is {max_num_seqs}, below batch_size {self.args.batch_size}: windows queue in vLLM"
            )

    async def _generated(self, prompt: dict[str, Any], params: Any, adapter: Any) -> Any:
        def generate() -> Any:
            (output,) = self._llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)
            return output

        return await self._thread.call(generate)

    async def _add_adapter(self, adapter: Any) -> None:
        await self._thread.call(self._engine.add_lora, adapter)

    async def _remove_adapter(self, number: int) -> None:
        await self._thread.call(self._engine.remove_lora, number)

    async def generate(self, window: Window) -> list[Outcome]:
        """As the base class has it; a request by itself is aborted in the engine when this is cancelled."""
        if self._rolling is None:
            return await super().generate(window)
        (request,) = window.requests
        admission = Admission(request, window, asyncio.get_running_loop().create_future())
        self._thread.post(self._rolling.admit, admission)
        try:
            return [await admission.future]
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDead):
                self._thread.post(self._rolling.withdraw, admission)
            raise

    def _advance(self) -> bool:
        return self._rolling is not None and self._rolling.advance()

    def _tell_loop(self, told: list[tuple[Admission, Any]]) -> None:
        """One hop for what a step has made."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop has ended before the engine
            self._loop.call_soon_threadsafe(_take, told)

    def _run_again(self, window: Window, error: Exception) -> list[Outcome]:
        return run_again(window, error, self._generate, self._empty_engine)

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
        return [to_generation(by_id[key], request) for key, request in zip(wanted, requests, strict=True)]

    def _call(self, requests: Sequence[Request]) -> list[Any]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs: list[Any] = self._llm.generate(
                [to_prompt(request.resolved) for request in requests],
                [request.resolved.params for request in requests],
                use_tqdm=False,
                lora_request=[request.resolved.adapter for request in requests],
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
        engine = self._engine
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

    def _release_callers(self, core: Any) -> None:
        """``generate()`` would wait for this queue for ever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        core.outputs_queue.put(EngineDeadError())

    def _close(self) -> None:
        super()._close()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _take(told: list[tuple[Admission, Any]]) -> None:
    for admission, what in told:
        admission.take(what)


def _llm_class() -> Any:
    """``LLM``, which by itself would render each prompt once more, and on the engine thread."""
    from vllm import LLM

    class RenderedLLM(LLM):  # type: ignore[misc]  # vLLM is untyped here
        """Takes prompts that have been rendered, beside those that ``LLM`` takes."""

        def _preprocess_cmpl_one(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            return prompt if "type" in prompt else super()._preprocess_cmpl_one(prompt, *args, **kwargs)

    return RenderedLLM
