"""Requests one by one in an engine that a test moves on by hand."""

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from app.backends.rolling import Admission, Rolling
from app.errors import EngineDead, GenerationFailed, InvalidRequest
from app.request import Generation, Outcome, Request, Resolved, Window
from app.timings import Stamps
from tests.backends import stand_in
from tests.backends.stand_in import EngineDeadError, VLLMClientError
from tests.backends.test_python import Kind, Params

_ids = itertools.count(1)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


def part(text: str, end: str | None = None, index: int = 0) -> Any:
    """What is new of one sequence; a character is a token."""
    ids = [ord(letter) for letter in text]
    return SimpleNamespace(index=index, text=text, token_ids=ids, finish_reason=end, stop_reason=None, logprobs=None)


def output(name: str, *parts: Any) -> Any:
    is_finished = all(part.finish_reason for part in parts)
    return SimpleNamespace(
        request_id=name,
        outputs=list(parts),
        finished=is_finished,
        num_cached_tokens=0,
        metrics=None,
        prompt_logprobs=None,
        prompt_token_ids=[1],
    )


class EngineDouble:
    """Holds what it is given until a test has it finish.

    Attributes:
        inside: ids of what it holds, in the order of their coming.
        next_outputs: what the next step gives; an exception is raised.
        refuses: what adding raises, by prompt.
    """

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.most_inside = 0
        self.next_outputs: list[Any] | Exception = []
        self.refuses: dict[int, Exception] = {}
        self.prompts: dict[str, int] = {}
        self.engine_core = SimpleNamespace(engine_core=None)
        self.output_processor = SimpleNamespace(parent_requests={}, external_req_ids={})

    def add_request(self, name: str, prompt: Any, params: Any, **_: Any) -> None:
        (token,) = prompt["prompt_token_ids"]
        self.inside.append(name)
        self.output_processor.external_req_ids[name] = [name]
        if token in self.refuses:
            raise self.refuses[token]
        self.prompts[name] = token
        self.most_inside = max(self.most_inside, len(self.inside))

    def abort_request(self, names: Sequence[str], internal: bool) -> None:
        assert internal
        for name in names:
            self.inside.remove(name)

    def step(self) -> list[Any]:
        given, self.next_outputs = self.next_outputs, []
        if isinstance(given, Exception):
            raise given
        for one in given:
            if one.finished:
                self.inside.remove(one.request_id)
        return given


class House:
    """A ``Rolling`` over an ``EngineDouble``; what it tells goes to the admissions at once."""

    def __init__(self, size: int = 2) -> None:
        self.engine = EngineDouble()
        self.deaths: list[str] = []
        self.run_again_as: dict[int, Any] = {}
        self.run_again: list[list[int]] = []
        self.rolling = Rolling(self.engine, size, self._run_again, self.deaths.append, self._tell)

    @staticmethod
    def _tell(told: list[tuple[Admission, Any]]) -> None:
        for admission, what in told:
            admission.take(what)

    def _run_again(self, window: Window, error: Exception) -> list[Outcome]:
        self.engine.inside.clear()
        self.run_again.append([request.resolved.prompt_token_ids[0] for request in window.requests])
        outcomes = []
        for position, request in enumerate(window.requests):
            given = self.run_again_as[request.resolved.prompt_token_ids[0]]
            if isinstance(given, EngineDead):
                raise given
            result = given if isinstance(given, Exception) else Generation([], None, 0, None, raw=given)
            outcomes.append(Outcome(request, window, position, result))
        return outcomes

    def admit(self, token: int, *, heard: list[Any] | None = None) -> Admission:
        """A request whose prompt is one token; ``heard`` gets what its listener is told."""
        loop = asyncio.get_running_loop()
        request = Request(Resolved([token], Params(), {}), 1, 0, None, Stamps(0.0), loop.create_future())
        if heard is not None:
            request.listener = lambda output, is_last: heard.append((output, is_last))
        admission = Admission(request, Window(next(_ids), "rolling", [request], 0.0, 0.0, _ids), loop.create_future())
        self.rolling.admit(admission)
        return admission

    def finish(self, *admissions: Admission, text: str = "x") -> bool:
        self.engine.next_outputs = [output(admission.id, part(text, "stop")) for admission in admissions]
        return self.rolling.advance()


def text_of(admission: Admission) -> str:
    result = admission.future.result().result
    assert isinstance(result, Generation)
    return result.outputs[0].text


def error_of(admission: Admission) -> Exception:
    result = admission.future.result().result
    assert isinstance(result, Exception)
    return result


async def test_the_next_is_taken_in_between_two_steps_when_one_has_ended() -> None:
    it = House(size=2)
    first, second, third = (it.admit(token) for token in (1, 2, 3))
    assert it.rolling.advance()
    assert it.engine.inside == [first.id, second.id]

    assert it.finish(first, text="one")
    assert text_of(first) == "one"
    assert not third.future.done()
    it.rolling.advance()
    assert it.engine.inside == [second.id, third.id]
    assert it.engine.most_inside == 2


async def test_there_is_nothing_to_do_without_requests() -> None:
    it = House()
    assert not it.rolling.advance()
    only = it.admit(1)
    assert not it.finish(only)


async def test_a_window_says_how_many_were_in_the_engine_when_it_was_taken_in() -> None:
    it = House(size=3)
    admissions = [it.admit(token) for token in (1, 2, 3)]
    it.rolling.advance()
    assert [admission.window.describe(0)["size"] for admission in admissions] == [1, 2, 3]
    assert {admission.window.describe(0)["position"] for admission in admissions} == {None}


async def test_who_has_gone_leaves_the_engine_or_never_gets_in() -> None:
    it = House(size=1)
    first, second, third = (it.admit(token) for token in (1, 2, 3))
    it.rolling.advance()
    it.rolling.withdraw(first)
    it.rolling.withdraw(second)
    assert it.engine.inside == []
    it.rolling.advance()
    assert it.engine.inside == [third.id]
    it.rolling.withdraw(first)  # once more does no harm
    assert not first.future.done()


async def test_what_the_engine_refuses_costs_nobody_else_anything() -> None:
    it = House(size=4)
    it.engine.refuses = {1: VLLMClientError("too odd"), 2: RuntimeError("no idea")}
    wrong, failed, good = (it.admit(token) for token in (1, 2, 3))
    assert it.rolling.advance()
    assert isinstance(error_of(wrong), InvalidRequest)
    assert isinstance(error_of(failed), GenerationFailed)
    assert it.engine.inside == [good.id]


async def test_a_step_that_fails_is_survived_by_all_but_the_culprit() -> None:
    it = House(size=3)
    first, culprit, third, waiting = (it.admit(token) for token in (1, 2, 3, 4))
    it.rolling.advance()
    it.run_again_as = {1: None, 2: GenerationFailed("that was you"), 3: None}
    it.engine.next_outputs = RuntimeError("the step failed")
    assert it.rolling.advance()

    assert it.run_again == [[1, 2, 3]]
    assert first.future.result().window.release == third.future.result().window.release == "rolling"
    assert "that was you" in str(error_of(culprit))
    it.rolling.advance()
    assert it.engine.inside == [waiting.id]
    assert it.deaths == []


async def test_a_step_that_fails_when_nobody_is_left_harms_nobody() -> None:
    it = House()
    gone = it.admit(1)
    it.rolling.advance()
    it.rolling.withdraw(gone)
    it.engine.next_outputs = RuntimeError("the step failed")
    assert not it.rolling.advance()
    assert it.run_again == []
    assert it.deaths == []
    good = it.admit(2)
    assert not it.finish(good, text="two")
    assert text_of(good) == "two"


async def test_a_stream_goes_on_where_it_was_when_a_step_failed() -> None:
    it, heard = House(), list[Any]()
    it.admit(1, heard=heard)
    stream = next(iter(it.rolling._ready))
    it.engine.next_outputs = []
    it.rolling.advance()
    it.engine.next_outputs = [output(stream.id, part("ab"))]
    it.rolling.advance()
    it.run_again_as = {1: output("0", part("abcd", "stop"))}
    it.engine.next_outputs = RuntimeError("the step failed")
    it.rolling.advance()

    assert [("".join(one.text for one in told.outputs), is_last) for told, is_last in heard] == [
        ("ab", False),
        ("cd", True),
    ]
    assert [ord(letter) for letter in "cd"] == heard[-1][0].outputs[0].token_ids
    assert isinstance(stream.future.result().result, Generation)


async def test_a_stream_fails_when_a_second_run_gives_another_text() -> None:
    it, heard = House(), list[Any]()
    stream = it.admit(1, heard=heard)
    it.rolling.advance()
    it.engine.next_outputs = [output(stream.id, part("ab"))]
    it.rolling.advance()
    it.run_again_as = {1: output("0", part("axyz", "stop"))}
    it.engine.next_outputs = RuntimeError("the step failed")
    it.rolling.advance()

    assert len(heard) == 1
    assert "another text" in str(error_of(stream))


@pytest.mark.parametrize("way", ["step", "add", "abort", "recovery"])
async def test_everybody_hears_of_a_dead_engine(way: str) -> None:
    it = House(size=1)
    inside, waiting = it.admit(1), it.admit(2)
    if way == "add":
        it.engine.refuses = {1: EngineDeadError()}
    it.rolling.advance()
    if way == "step":
        it.engine.next_outputs = EngineDeadError()
    elif way == "recovery":
        it.engine.next_outputs = RuntimeError("the step failed")
        it.run_again_as = {1: EngineDead("its leftovers stay")}
    elif way == "abort":
        it.engine.inside.clear()
        it.rolling.withdraw(it.admit(3))  # never was in
        it.rolling.withdraw(inside)
    it.rolling.advance()

    assert len(it.deaths) == 1
    for admission in (inside, waiting) if way != "abort" else (waiting,):
        with pytest.raises(EngineDead):
            admission.future.result()
    assert not it.rolling.advance()
    assert it.engine.inside == [] or way in ("step", "add")


async def test_streams_ask_for_what_is_new_and_others_for_the_end_alone() -> None:
    it = House(size=2)
    plain, stream = it.admit(1), it.admit(2, heard=[])
    it.rolling.advance()
    assert plain.request.resolved.params.output_kind is Kind.FINAL_ONLY
    assert stream.request.resolved.params.output_kind is Kind.DELTA


async def test_an_output_that_nobody_asked_for_goes_to_nobody() -> None:
    it = House()
    mine = it.admit(1)
    it.rolling.advance()
    it.engine.inside.append("stray")
    it.engine.next_outputs = [output("stray", part("not yours", "stop"))]
    assert it.rolling.advance()
    assert not mine.future.done()
