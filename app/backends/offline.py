"""``VLLMOfflineBackend``: builds, uses and closes one vLLM ``LLM`` on one named thread."""

import logging
from collections.abc import Sequence
from typing import Any

from app.backends.args import VLLMOfflineArgs
from app.backends.base import VLLMBackendBase
from app.backends.isolation import WindowMismatch, run_isolated
from app.backends.outputs import to_generation, to_prompt
from app.backends.registry import Backend
from app.errors import EngineDead, InvalidRequest
from app.request import Generation, Outcome, Request, Window

logger = logging.getLogger(__name__)


@Backend.register("vllm_offline")
class VLLMOfflineBackend(VLLMBackendBase):
    """Windows through ``LLM.generate()``, with every request's statistics."""

    args: VLLMOfflineArgs

    def __init__(self, args: VLLMOfflineArgs) -> None:
        super().__init__(args)
        self._llm: Any = None

    @property
    def _engine(self) -> Any:
        return self._llm.llm_engine

    def _build(self, values: dict[str, Any]) -> None:
        self._llm = _llm_class()(**values)

    def _open(self) -> None:
        super()._open()
        self._warn_of_small_engine()

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


def _llm_class() -> Any:
    """``LLM``, which by itself would render each prompt once more, and on the engine thread."""
    from vllm import LLM

    class RenderedLLM(LLM):  # type: ignore[misc]  # vLLM is untyped here
        """Takes prompts that have been rendered, beside those that ``LLM`` takes."""

        def _preprocess_cmpl_one(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            return prompt if "type" in prompt else super()._preprocess_cmpl_one(prompt, *args, **kwargs)

    return RenderedLLM
