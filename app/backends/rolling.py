"""``Rolling``: requests one by one in vLLM's ``LLMEngine``, the next admitted between two steps when one has ended.

All of it runs on the engine thread, but for ``Admission.take``, which belongs to the event loop.
"""

import asyncio
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app import timings
from app.backends.outputs import Parts, to_generation, to_prompt
from app.errors import EngineDead, GenerationFailed, InvalidRequest
from app.request import Generation, Outcome, Request, Window, new_id

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Admission:
    """One request on its way through the engine.

    Attributes:
        window: the request by itself.
        future: settled on the event loop with the outcome, or with ``EngineDead``.
        id: what the engine calls it.
    """

    request: Request
    window: Window
    future: "asyncio.Future[Outcome]"
    id: str = field(default_factory=lambda: new_id("engine"))
    _parts: Parts = field(default_factory=Parts)

    def take(self, told: Any) -> None:
        """What the engine thread tells of it: one of vLLM's ``RequestOutput``, an outcome, or ``EngineDead``."""
        if self.future.done():
            return
        if isinstance(told, EngineDead):
            self.future.set_exception(copy.copy(told))
        elif isinstance(told, Outcome):
            self.future.set_result(self._told_of(told))
        elif self.request.listener is None:
            self.future.set_result(self.outcome(to_generation(told, self.request)))
        else:
            self._parts.add(told)
            self.request.listener(told, told.finished)
            if told.finished:
                self.future.set_result(self.outcome(self._parts.generation(self.request)))

    def _told_of(self, outcome: Outcome) -> Outcome:
        """The outcome of a second run, whose listener gets what it has not had; it must go on from there."""
        if self.request.listener is None or not isinstance(outcome.result, Generation):
            return outcome
        if (rest := self._parts.rest(outcome.result.raw)) is None:
            return self.outcome(GenerationFailed("the engine failed, and a second run gave another text"))
        self.request.listener(rest, True)
        return outcome

    def outcome(self, result: Generation | Exception) -> Outcome:
        """An outcome of the request by itself."""
        return Outcome(self.request, self.window, None, result)


class Rolling:
    """Keeps up to ``size`` requests in the engine.

    Args:
        engine: vLLM's ``LLMEngine``.
        size: most requests in the engine at once.
        run_again: runs the requests of a window whose step has raised this error, without harm from one to another;
            an outcome for each. The engine is empty before and after. Raises ``EngineDead``.
        report_death: told that the engine core has died.
        tell: hands what was told of admissions over to the event loop.
    """

    def __init__(
        self,
        engine: Any,
        size: int,
        run_again: Callable[[Window, Exception], list[Outcome]],
        report_death: Callable[[str], None],
        tell: Callable[[list[tuple[Admission, Any]]], None],
    ) -> None:
        self._engine = engine
        self._size = size
        self._run_again = run_again
        self._report_death = report_death
        self._tell = tell
        self._ready: dict[Admission, None] = {}
        self._running: dict[str, Admission] = {}
        self._told: list[tuple[Admission, Any]] = []
        self._is_inline = hasattr(engine.engine_core, "engine_core")
        self._has_aborted = False

    def admit(self, admission: Admission) -> None:
        """Take it in as soon as there is room."""
        self._ready[admission] = None

    def withdraw(self, admission: Admission) -> None:
        """Its caller has gone: it leaves the engine."""
        self._ready.pop(admission, None)
        if self._running.pop(admission.id, None) is not None:
            try:
                self._engine.abort_request(self._ids_within(admission.id), internal=True)
                self._has_aborted = True
            except Exception as error:
                self._die(f"a request cannot be aborted: {error}")

    def _ids_within(self, name: str) -> list[str]:
        """What the engine itself calls the sequences of a request, and then what holds several of them together."""
        processor = self._engine.output_processor
        parents = [id for id, parent in processor.parent_requests.items() if parent.external_req_id == name]
        return [*processor.external_req_ids.get(name, ()), *parents]

    def advance(self) -> bool:
        """Take in what there is room for, and one step of the engine; whether there is more to do."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self._fill()
            if self._running or (self._has_aborted and self._is_inline):
                self._step()  # behind an abort an empty one, so that vLLM's own gauges see it
        except (EngineDead, EngineDeadError) as error:
            self._die(str(error) or "vLLM's engine core has died")
        if self._told:
            self._tell(self._told)
            self._told = []
        return bool(self._running or self._ready)

    def _fill(self) -> None:
        while self._ready and len(self._running) < self._size:
            admission = next(iter(self._ready))
            del self._ready[admission]
            self._add(admission)

    def _add(self, admission: Admission) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        request, resolved = admission.request, admission.request.resolved
        kinds = type(resolved.params.output_kind)
        resolved.params.output_kind = kinds.FINAL_ONLY if request.listener is None else kinds.DELTA
        admission.window.size = len(self._running) + 1
        admission.window.dispatched = timings.now()
        self._running[admission.id] = admission
        try:
            self._engine.add_request(
                admission.id,
                to_prompt(resolved),
                resolved.params,
                lora_request=resolved.adapter,
                priority=request.priority,
            )
        except EngineDeadError:
            raise
        except Exception as error:
            self.withdraw(admission)  # some of its sequences may be in
            is_wrong = isinstance(error, VLLMClientError)
            failure = InvalidRequest(str(error)) if is_wrong else GenerationFailed(f"the engine failed: {error}")
            self._told.append((admission, admission.outcome(failure)))

    def _step(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._has_aborted = False
        try:
            outputs = self._engine.step()
        except EngineDeadError:
            raise
        except Exception as error:
            self._recover(error)
            return
        for output in outputs:
            self._note(output)

    def _note(self, output: Any) -> None:
        admission = self._running.get(output.request_id)
        if admission is None:
            logger.warning("the engine gave an output that nobody asked for")
            return
        if output.finished:
            del self._running[output.request_id]
        self._told.append((admission, output))

    def _recover(self, error: Exception) -> None:
        """A step has raised, and nobody knows for whom: all that was in the engine is run again."""
        logger.warning("a step of %d failed: %s: %s", len(self._running), type(error).__name__, error)
        inside = {admission.request: admission for admission in self._running.values()}
        if not inside:
            return
        ids = next(iter(inside.values())).window.ids
        window = Window(next(ids), "rolling", list(inside), timings.now(), timings.wall_offset(), ids)
        outcomes = self._run_again(window, error)
        self._running = {}
        self._told += [(inside[outcome.request], outcome) for outcome in outcomes]

    def _die(self, reason: str) -> None:
        """Everybody is told; the engine is left alone."""
        self._report_death(reason)
        self._told += [(admission, EngineDead(reason)) for admission in (*self._running.values(), *self._ready)]
        self._running, self._ready = {}, {}
