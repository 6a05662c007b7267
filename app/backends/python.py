"""``VLLMPythonBackend``: each request by itself through vLLM's ``AsyncLLM``, whose tokens are told of as they are made.

The engine is built and closed on the engine thread, which would else hold the event loop for the length of a start.
It is used on the event loop: its engine core is a process of its own.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from app.backends.args import VLLMPythonArgs
from app.backends.base import VLLMBackendBase
from app.backends.outputs import Parts, to_generation, to_prompt
from app.backends.registry import Backend
from app.errors import EngineDead, GenerationFailed, InvalidRequest
from app.request import Generation, Outcome, Request, Window, new_id

logger = logging.getLogger(__name__)


@Backend.register("vllm_python")
class VLLMPythonBackend(VLLMBackendBase):
    """Requests one by one into vLLM's own scheduler; a request whose caller has gone is aborted."""

    takes_windows = False
    args: VLLMPythonArgs

    def __init__(self, args: VLLMPythonArgs) -> None:
        super().__init__(args)
        self._llm: Any = None

    @property
    def _engine(self) -> Any:
        return self._llm

    @property
    def max_in_flight(self) -> int:
        """As many sequences as the engine runs at once: what waits, waits here, where it is counted and taken back."""
        return int(self._llm.vllm_config.scheduler_config.max_num_seqs)

    def has_room(self, request: Request, running_requests: int, running_places: int) -> bool:
        """By places, each of which is a sequence."""
        return running_places + request.places <= self.max_in_flight

    def _build(self, values: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**values))

    async def _generated(self, prompt: dict[str, Any], params: Any, adapter: Any) -> Any:
        return [output async for output in self._outputs(prompt, params, lora_request=adapter)][-1]

    async def _add_adapter(self, adapter: Any) -> None:
        await self._llm.add_lora(adapter)

    async def _remove_adapter(self, number: int) -> None:
        await self._llm.remove_lora(number)

    async def generate(self, window: Window) -> list[Outcome]:
        """Run the one request of a window; cancelled, it is aborted in the engine.

        Raises:
            EngineDead: the engine has died.
        """
        (request,) = window.requests
        try:
            result = await self._generation(request)
        except (GenerationFailed, InvalidRequest) as error:
            return [Outcome(request, window, 0, error)]
        return [Outcome(request, window, 0, result)]

    async def _generation(self, request: Request) -> Generation | Exception:
        resolved, listener = request.resolved, request.listener
        if listener is not None:
            resolved.params.output_kind = type(resolved.params.output_kind).DELTA
        outputs = self._outputs(
            to_prompt(resolved), resolved.params, priority=request.priority, lora_request=resolved.adapter
        )
        if listener is None:
            whole = [output async for output in outputs]
            return to_generation(whole[-1], request) if whole else GenerationFailed("the engine gave no output")
        parts = Parts()
        async for output in outputs:
            parts.add(output)
            listener(output, output.finished)
        return parts.generation(request)

    async def _outputs(self, prompt: dict[str, Any], params: Any, **options: Any) -> AsyncIterator[Any]:
        """The outputs of ``AsyncLLM``; what it raises, as this service's errors."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._llm is None:
            raise EngineDead("the engine is closed")
        running = self._llm.generate(prompt, params, new_id("engine"), **options)
        try:
            async with contextlib.aclosing(running):
                async for output in running:
                    yield output
        except EngineDeadError as error:
            self._report_death("vLLM's engine core has died")
            raise EngineDead("the engine died while this request was in it") from error
        except VLLMClientError as error:
            raise InvalidRequest(str(error)) from error
        except Exception as error:
            cause = error.__cause__ or error
            raise GenerationFailed(f"the engine failed: {type(cause).__name__}: {cause}") from error

    def _close(self) -> None:
        super()._close()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
