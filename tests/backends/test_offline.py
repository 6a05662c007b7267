"""The offline backend over a stand-in for ``LLM``: whose text is whose, and what is left in the engine."""

import dataclasses
import itertools
import math
import types
from typing import Any

import pytest

from app import timings
from app.backends import base, outputs, reasons, resolution
from app.backends.args import VLLMOfflineArgs
from app.backends.offline import VLLMOfflineBackend
from app.errors import EngineDead, GenerationFailed, InvalidRequest, StartError
from app.prompts.sampling import SamplingFields
from app.request import Generation, Outcome, Request, Resolved, Window
from app.timings import Stamps
from tests.backends import stand_in
from tests.backends.stand_in import EngineDeadError, VLLMClientError


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


class Params:
    def __init__(self, logprobs: int | None = None) -> None:
        self.logprobs = logprobs
        self.prompt_logprobs: int | None = None

    def clone(self) -> "Params":
        return Params(self.logprobs)


@dataclasses.dataclass
class Stats:
    queued_ts: float = 1.0
    scheduled_ts: float = 2.0
    first_token_ts: float = 3.0
    last_token_ts: float = 4.0
    first_token_latency: float = 2.0
    num_generation_tokens: int = 3
    num_preemptions: int = 0
    arrival_time: float = 1.8e9


def output(request_id: str, prompt: list[int], *, reason: str | None = "stop", parts: int = 1) -> Any:
    texts = [
        types.SimpleNamespace(
            index=index,
            text=f"text of {prompt[0]}",
            token_ids=[7, 8, 9],
            finish_reason=reason,
            stop_reason=None,
            logprobs=None,
        )
        for index in range(parts)
    ]
    return types.SimpleNamespace(
        request_id=request_id,
        outputs=texts,
        finished=True,
        prompt_logprobs=None,
        prompt_token_ids=prompt,
        num_cached_tokens=0,
        metrics=Stats(),
    )


class LLM:
    """Answers each prompt with its first token; ``left`` is what stays in the engine.

    Attributes:
        act: changes the outputs before they are handed out, or raises.
    """

    def __init__(self) -> None:
        self.request_counter = types.SimpleNamespace(counter=100)
        self.left: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.calls: list[list[int]] = []
        self.priorities: list[int] = []
        self.abort_works = True
        self.shutdowns = 0
        self.act = lambda outputs: outputs
        self.llm_engine = types.SimpleNamespace(
            output_processor=types.SimpleNamespace(request_states=self.left, parent_requests={}),
            abort_request=self._abort,
            has_unfinished_requests=lambda: bool(self.left),
            engine_core=types.SimpleNamespace(shutdown=self._shutdown),
        )

    def _abort(self, ids: list[str], internal: bool) -> None:
        assert internal
        self.aborted += ids
        if self.abort_works:
            self.left.clear()

    def _shutdown(self) -> None:
        self.shutdowns += 1

    def generate(
        self, prompts: list[Any], params: list[Any], *, use_tqdm: bool, lora_request: list[Any], priority: list[int]
    ) -> list[Any]:
        assert not self.left, "a window went into an engine that was not empty"
        assert len(prompts) == len(params) == len(lora_request) == len(priority)
        assert len(set(map(id, params))) == len(params)
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.calls.append([prompt[0] for prompt in ids])
        self.priorities = priority
        first = self.request_counter.counter
        self.request_counter.counter += len(prompts)
        return self.act([output(str(first + number), prompt) for number, prompt in enumerate(ids)])


class Running:
    """A backend whose engine is a stand-in, without its thread."""

    def __init__(self) -> None:
        self.llm = LLM()
        self.deaths: list[str] = []
        self.backend = VLLMOfflineBackend(VLLMOfflineArgs(model="m", served_model_name="m"))
        self.backend._llm = self.llm
        self.backend._report_death = self.deaths.append  # type: ignore[assignment,method-assign]

    def run(self, *firsts: int, places: int = 1, priority: int = 0) -> list[Outcome]:
        unused: Any = object()
        requests = [
            Request(Resolved([first, 0], Params(), {}), places, priority, None, Stamps(1.0), unused) for first in firsts
        ]
        ids = itertools.count(1)
        return self.backend._run(Window(next(ids), "full", requests, timings.now(), 0.0, ids))


@pytest.fixture
def it() -> Running:
    return Running()


def texts(outcomes: list[Outcome]) -> list[Any]:
    return [o.result.outputs[0].text if isinstance(o.result, Generation) else type(o.result) for o in outcomes]


# --- whose text is whose ---


def test_every_request_gets_its_own_text_and_statistics(it: Running) -> None:
    outcomes = it.run(5, 6, 7, priority=-3)

    assert texts(outcomes) == ["text of 5", "text of 6", "text of 7"]
    assert it.llm.priorities == [-3, -3, -3]
    assert isinstance(outcomes[0].result, Generation)
    stats = outcomes[0].result.stats
    assert stats is not None
    assert (stats.queued, stats.scheduled, stats.first_token, stats.last_token) == (1.0, 2.0, 3.0, 4.0)
    assert stats.raw == dataclasses.asdict(Stats())


def test_outputs_are_matched_by_id_not_by_place(it: Running) -> None:
    it.llm.act = lambda outputs: outputs[::-1]

    assert texts(it.run(5, 6, 7)) == ["text of 5", "text of 6", "text of 7"]


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda outputs: [*outputs, output("7", [9])], id="one too many"),
        pytest.param(lambda outputs: outputs[1:], id="one too few"),
        pytest.param(lambda outputs: [output("7", [9]), *outputs[1:]], id="a stranger's in place of one"),
        pytest.param(lambda outputs: [outputs[0], *outputs[:-1]], id="one twice"),
        pytest.param(lambda outputs: [], id="none"),
    ],
)
def test_when_ids_do_not_match_no_text_is_handed_out(it: Running, act: Any) -> None:
    it.llm.act = act

    assert texts(it.run(5, 6, 7)) == [GenerationFailed] * 3
    it.llm.act = lambda outputs: outputs
    assert texts(it.run(8)) == ["text of 8"]


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_an_undocumented_end_is_an_error_of_this_request(it: Running, reason: str | None) -> None:
    def end(outputs: list[Any]) -> list[Any]:
        outputs[1].outputs[0].finish_reason = reason
        return outputs

    it.llm.act = end

    assert texts(it.run(5, 6, 7)) == ["text of 5", GenerationFailed, "text of 7"]


def test_an_answer_with_too_few_outputs_is_an_error(it: Running) -> None:
    assert texts(it.run(5, places=2)) == [GenerationFailed]


# --- what is left in the engine ---


def test_leftovers_are_aborted_before_the_next_window(it: Running) -> None:
    it.llm.left["42"] = "somebody's"

    assert texts(it.run(5)) == ["text of 5"]
    assert it.llm.aborted == ["42"]


def test_after_a_failing_run_the_engine_is_emptied_before_the_halves_are_run(it: Running) -> None:
    def fail(outputs: list[Any]) -> list[Any]:
        if any(found.prompt_token_ids[0] == 6 for found in outputs):
            it.llm.left.update({found.request_id: found for found in outputs})
            raise RuntimeError("broken")
        return outputs

    it.llm.act = fail

    assert texts(it.run(5, 6, 7, 8)) == ["text of 5", GenerationFailed, "text of 7", "text of 8"]
    assert it.llm.calls == [[5, 6, 7, 8], [5, 6], [5], [6], [7, 8]]
    assert not it.llm.left
    assert texts(it.run(9)) == ["text of 9"]


def test_an_engine_that_cannot_be_emptied_is_declared_dead(it: Running) -> None:
    it.llm.left["42"] = "stuck"
    it.llm.abort_works = False

    with pytest.raises(EngineDead):
        it.run(5)
    assert it.llm.calls == []
    assert len(it.deaths) == 1


def test_an_abort_that_fails_is_the_engines_death(it: Running) -> None:
    it.llm.left["42"] = "stuck"

    def fail(ids: list[str], internal: bool) -> None:
        raise RuntimeError("no")

    it.llm.llm_engine.abort_request = fail

    with pytest.raises(EngineDead):
        it.run(5)
    assert "no" in it.deaths[0]


# --- errors of vLLM ---


def test_a_dead_engine_is_reported_and_no_window_is_run_again(it: Running) -> None:
    def die(outputs: list[Any]) -> list[Any]:
        raise EngineDeadError

    it.llm.act = die

    with pytest.raises(EngineDead):
        it.run(5, 6, 7)
    assert len(it.llm.calls) == 1
    assert len(it.deaths) == 1


def test_what_vllm_calls_the_callers_fault_is_that_of_the_culprit(it: Running) -> None:
    def refuse(outputs: list[Any]) -> list[Any]:
        if any(found.prompt_token_ids[0] == 6 for found in outputs):
            raise VLLMClientError("bad_words: too long")
        return outputs

    it.llm.act = refuse

    assert texts(it.run(5, 6)) == ["text of 5", InvalidRequest]


def test_a_closed_engine_runs_nothing(it: Running) -> None:
    it.backend._close()
    it.backend._close()

    assert it.llm.shutdowns == 1
    with pytest.raises(EngineDead):
        it.run(5)


# --- plain values ---


def logprob(value: float, rank: int | None, token: str | None) -> Any:
    return types.SimpleNamespace(logprob=value, rank=rank, decoded_token=token)


def test_a_logprob_list_has_an_entry_for_each_token() -> None:
    positions = [
        None,
        {5: logprob(-2.0, 9, "five"), 6: logprob(-0.1, 1, "six"), 7: logprob(-0.5, 2, "seven")},
        {8: logprob(-math.inf, 1, None)},
    ]

    assert outputs._logprob_list(positions, [1, 5, 8], 2) == [
        None,
        {
            "token_id": 5,
            "token": "five",
            "logprob": -2.0,
            "rank": 9,
            "top": [
                {"token_id": 6, "token": "six", "logprob": -0.1, "rank": 1},
                {"token_id": 7, "token": "seven", "logprob": -0.5, "rank": 2},
            ],
        },
        {
            "token_id": 8,
            "token": None,
            "logprob": None,
            "rank": 1,
            "top": [{"token_id": 8, "token": None, "logprob": None, "rank": 1}],
        },
    ]


def test_logprobs_are_listed_only_when_they_were_asked_for() -> None:
    position = {5: logprob(-2.0, 1, "five")}

    assert outputs._logprob_list([position], [5], None) is None
    assert outputs._logprob_list(None, [5], 2) is None
    assert outputs._logprob_list([position], [5], 0)[0]["top"] == []  # type: ignore[index]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ValueError("No available memory for the KV cache blocks"),
        OSError("Cannot allocate memory"),
    ],
    ids=repr,
)
def test_want_of_memory_is_told_with_what_to_change(error: Exception) -> None:
    assert "max_model_len" in str(reasons.start_error(error, None))


def test_any_other_failure_to_start_is_one_line_with_its_reason() -> None:
    error = reasons.start_error(ValueError("dtype\n   is wrong" + "x" * 1000), None)

    assert isinstance(error, StartError)
    assert "ValueError: dtype is wrong" in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 500


def test_values_become_what_json_can_carry() -> None:
    assert base._plain({"a": (1, [None]), 2: object, "b": {"c": 1.5}}) == {
        "a": [1, [None]],
        "2": "<class 'object'>",
        "b": {"c": 1.5},
    }


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (ValueError("max_tokens must be at least 1"), "max_tokens"),
        (ValueError("the value of top_p is wrong"), "top_p"),
        (ValueError("something is wrong"), None),
    ],
    ids=str,
)
def test_the_field_that_vllm_complains_of_is_found(error: Exception, param: str | None) -> None:
    assert resolution._param_of(error) == param


def test_the_field_that_vllm_names_wins() -> None:
    error = ValueError("max_tokens and more")
    error.parameter = "logit_bias"  # type: ignore[attr-defined]

    assert resolution._param_of(error) == "logit_bias"


def test_settings_in_effect_are_plain_values_under_vllms_names() -> None:
    params = types.SimpleNamespace(**dict.fromkeys(SamplingFields.model_fields) | {"logit_bias": {5: 1.5}, "n": 2})

    effective = resolution._effective(params)

    assert effective.keys() == SamplingFields.model_fields.keys()
    assert effective["logit_bias"] == {"5": 1.5}
    assert effective["n"] == 2


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ValueError: No available memory for the cache blocks.", "raise kv_cache_memory_bytes"),
        ("ValueError: Available memory on node 0 on kv cache allocation is less than requested", "lower max_model_len"),
    ],
)
def test_the_advice_follows_what_the_engines_own_process_said(said: str, advice: str) -> None:
    error = reasons.start_error(RuntimeError("Engine core initialization failed. See root cause above."), said)

    assert advice in str(error)
    assert said in str(error)
