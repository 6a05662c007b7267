"""The streaming backend over a stand-in for ``AsyncLLM``: whose text is whose, and what is left in the engine."""

import asyncio
import dataclasses
import itertools
import types
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import pytest

from app import timings
from app.backends.args import VLLMPythonArgs
from app.backends.python import VLLMPythonBackend
from app.errors import EngineDead, GenerationFailed, InvalidRequest
from app.request import Generation, Request, Resolved, Window
from app.timings import Stamps
from tests.backends import stand_in
from tests.backends.stand_in import EngineDeadError, VLLMClientError
from tests.backends.test_offline import Stats, output


class Kind(Enum):
    """Which parts of an output are told."""

    FINAL_ONLY = 0
    DELTA = 1


@dataclasses.dataclass
class Params:
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: Kind = Kind.FINAL_ONLY


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


def piece(prompt: list[int], index: int, tokens: list[int], reason: str | None) -> Any:
    part = types.SimpleNamespace(index=index, token_ids=tokens, finish_reason=reason, stop_reason=None, text="x")
    return types.SimpleNamespace(outputs=[part], finished=reason is not None, num_cached_tokens=3, metrics=Stats())


class AsyncLLM:
    """Answers each prompt with its first token.

    Attributes:
        act: for a prompt that begins with this token, what its generator raises before it says anything.
        gate: generators wait here.
        inside: prompts whose generators are under way.
        closed: prompts whose generators were closed before their end.
    """

    def __init__(self) -> None:
        self.act: dict[int, Exception] = {}
        self.pieces: list[Any] | None = None
        self.says_nothing = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside: set[int] = set()
        self.closed: list[int] = []
        self.options: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.shutdowns = 0

    async def generate(self, prompt: Any, params: Params, request_id: str, **options: Any) -> AsyncIterator[Any]:
        first = prompt["prompt_token_ids"][0]
        self.inside.add(first)
        self.ids.append(request_id)
        self.options.append(options)
        is_over = False
        try:
            await self.gate.wait()
            if first in self.act:
                raise self.act[first]
            for each in self.pieces or [output(request_id, prompt["prompt_token_ids"])]:
                if not self.says_nothing:
                    yield each
            is_over = True
        finally:
            self.inside.discard(first)
            if not is_over:
                self.closed.append(first)

    def shutdown(self) -> None:
        self.shutdowns += 1


class Running:
    """A backend whose engine is a stand-in."""

    def __init__(self) -> None:
        self.llm = AsyncLLM()
        self.deaths: list[str] = []
        self.backend = VLLMPythonBackend(VLLMPythonArgs(model="m", served_model_name="m"))
        self.backend._llm = self.llm
        self.backend._report_death = self.deaths.append  # type: ignore[assignment,method-assign]
        self._ids = itertools.count(1)

    async def run(self, first: int, **options: Any) -> Any:
        """What one request gives: its generation or its error."""
        unused: Any = object()
        resolved = Resolved([first, 0], Params(), {}, adapter=options.pop("adapter", None))
        values = {"places": 1, "priority": 0, **options}
        request = Request(resolved, values["places"], values["priority"], None, Stamps(1.0), unused)
        request.listener = values.get("listener")
        window = Window(next(self._ids), "direct", [request], timings.now(), 0.0, self._ids)
        (outcome,) = await self.backend.generate(window)
        assert (outcome.request, outcome.window, outcome.position) == (request, window, 0)
        return outcome.result


@pytest.fixture
async def it() -> Running:
    return Running()


async def test_every_request_gets_its_own_text_and_statistics(it: Running) -> None:
    results = await asyncio.gather(*(it.run(first, priority=first, adapter=f"a{first}") for first in (5, 6, 7)))

    assert [result.outputs[0].text for result in results] == ["text of 5", "text of 6", "text of 7"]
    assert results[0].stats.raw == dataclasses.asdict(Stats())
    assert it.llm.options == [{"priority": n, "lora_request": f"a{n}"} for n in (5, 6, 7)]
    assert len(set(it.llm.ids)) == 3
    assert not it.llm.inside


async def test_a_request_that_is_cancelled_is_closed_in_the_engine_and_its_neighbour_goes_on(it: Running) -> None:
    it.llm.gate.clear()
    gone, stays = asyncio.ensure_future(it.run(5)), asyncio.ensure_future(it.run(6))
    while it.llm.inside != {5, 6}:  # noqa: ASYNC110 -- what is waited for has no event
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    it.llm.gate.set()

    assert (await stays).outputs[0].text == "text of 6"
    assert it.llm.closed == [5]


async def test_a_dead_engine_is_reported(it: Running) -> None:
    it.llm.act[5] = EngineDeadError()

    with pytest.raises(EngineDead):
        await it.run(5)
    assert len(it.deaths) == 1


async def test_what_vllm_calls_the_callers_fault_is_a_400_of_that_request(it: Running) -> None:
    it.llm.act[5] = VLLMClientError("bad_words: too long")

    wrong, right = await asyncio.gather(it.run(5), it.run(6))
    assert isinstance(wrong, InvalidRequest)
    assert "bad_words" in wrong.message
    assert right.outputs[0].text == "text of 6"
    assert it.deaths == []


async def test_any_other_error_is_a_500_of_that_request_with_its_cause(it: Running) -> None:
    error = RuntimeError()
    error.__cause__ = ValueError("the cause")
    it.llm.act[5] = error

    wrong = await it.run(5)
    assert isinstance(wrong, GenerationFailed)
    assert "the cause" in wrong.message


async def test_what_is_streamed_is_told_piece_by_piece_and_counted_as_a_whole(it: Running) -> None:
    it.llm.pieces = [piece([5], 0, [1, 2], None), piece([5], 1, [3], None), piece([5], 1, [4], "stop"),
                     piece([5], 0, [5], "length")]  # fmt: skip
    it.llm.pieces[2].finished = False
    told: list[tuple[Any, bool]] = []

    result = await it.run(5, places=2, listener=lambda output, is_last: told.append((output, is_last)))
    assert [output for output, _ in told] == it.llm.pieces
    assert [is_last for _, is_last in told] == [False, False, False, True]
    assert isinstance(result, Generation)
    assert [output.token_ids for output in result.outputs] == [[1, 2, 5], [3, 4]]
    assert [output.finish_reason for output in result.outputs] == ["length", "stop"]
    assert result.completion_tokens == 5
    assert result.cached_tokens == 3
    assert result.stats is not None


@pytest.mark.parametrize("reason", ["abort", "error", None])
@pytest.mark.parametrize("listener", [None, lambda *_: None], ids=["whole", "streamed"])
async def test_an_undocumented_end_is_an_error_of_this_request(it: Running, reason: str | None, listener: Any) -> None:
    whole = output("1", [5], reason=reason)
    whole.finished = reason is not None
    it.llm.pieces = [piece([5], 0, [1], reason)] if listener else [whole]

    assert isinstance(await it.run(5, listener=listener), GenerationFailed)


async def test_a_streamed_output_that_is_missing_is_an_error(it: Running) -> None:
    it.llm.pieces = [piece([5], 0, [1], "stop")]

    assert isinstance(await it.run(5, places=2, listener=lambda *_: None), GenerationFailed)


async def test_an_engine_that_says_nothing_has_failed_this_request(it: Running) -> None:
    it.llm.says_nothing = True

    assert isinstance(await it.run(5), GenerationFailed)
    assert isinstance(await it.run(5, listener=lambda *_: None), GenerationFailed)


async def test_a_closed_engine_runs_nothing(it: Running) -> None:
    it.backend._close()
    it.backend._close()

    assert it.llm.shutdowns == 1
    with pytest.raises(EngineDead):
        await it.run(5)
