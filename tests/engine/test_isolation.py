"""One failing request costs its neighbours nothing, and nothing of it comes out later. Faults in the real engine."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import faults
from tests.engine.checks import check_answer
from tests.engine.faults import POISON, Runs
from tests.engine.inline import Inline

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SIZE = 8
Fault = Callable[[Inline, pytest.MonkeyPatch], None]
BREAKING = [
    faults.step_before,
    faults.step_after,
    faults.step_late,
    faults.in_the_model,
    faults.add_before,
    faults.add_after,
]


def prompt_ids(number: int) -> list[int]:
    return [100 + number, 7, 8, 9, 200 + number]


def row(number: int, *, poisoned: bool = False, **body: Any) -> dict[str, Any]:
    ids = prompt_ids(number) + ([POISON] if poisoned else [])
    length = 2 if number in (1, 4) else 8
    # A random model repeats itself unless that is penalised.
    return {"prompt_token_ids": ids, "max_tokens": length, "ignore_eos": True, "repetition_penalty": 2.0, **body}


def window_of(culprits: set[int], **body: Any) -> list[dict[str, Any]]:
    return [row(number, poisoned=number in culprits, **body) for number in range(SIZE)]


_alone: dict[str, list[list[str]]] = {}


async def texts_alone(inline: Inline, requests: list[dict[str, Any]]) -> list[list[str]]:
    """What each request gets when it is the only one; asked for once in a session."""
    key = repr(requests)
    if key not in _alone:
        _alone[key] = [(await inline.batch_texts([request]))[0] for request in requests]
    return _alone[key]


def check_rows(rows: list[Any], culprits: set[int], alone: list[list[str]], code: str = "generation_failed") -> None:
    for number, (found, texts) in enumerate(zip(rows, alone, strict=True)):
        if number in culprits:
            assert found["status"] == (500 if code == "generation_failed" else 400)
            assert found["error"]["code"] == code
            assert found["response"] is None
        else:
            assert found["status"] == 200, found["error"]
            assert [output["text"] for output in found["response"]["outputs"]] == texts
            check_answer(found["response"])


def check_windows(rows: list[Any], requests: list[dict[str, Any]], runs: Runs) -> None:
    """Each answer names the run that gave its text: its id is of that run alone, and size and position fit."""
    by_window: dict[int, list[tuple[int, int, list[int]]]] = {}
    for found, request in zip(rows, requests, strict=True):
        if found["status"] == 200:
            window = found["response"]["window"]
            place = (window["size"], window["position"], request["prompt_token_ids"])
            by_window.setdefault(window["id"], []).append(place)
    for places in by_window.values():
        assert any(
            all(size == len(run) and run[position] == ids for size, position, ids in places) for run in runs.done
        )


@pytest.mark.parametrize("position", [0, 3, 7])
@pytest.mark.parametrize("fault", BREAKING, ids=lambda fault: fault.__name__)
async def test_a_culprit_gets_its_error_and_the_others_their_text(
    inline: Inline, monkeypatch: pytest.MonkeyPatch, fault: Fault, position: int
) -> None:
    alone = await texts_alone(inline, window_of(set()))
    requests = window_of({position})
    with monkeypatch.context() as patch:
        runs = Runs(inline, patch)
        fault(inline, patch)
        rows = await inline.batch(requests)
        assert runs.failed > 0
    check_rows(rows, {position}, alone)
    check_windows(rows, requests, runs)
    inline.assert_idle()
    following = await inline.batch(window_of(set()))
    check_rows(following, set(), alone)
    await inline.assert_serves()


@pytest.mark.parametrize("culprits", [{1, 6}, {0, 1, 2, 3}, set(range(SIZE))], ids=str)
@pytest.mark.parametrize("fault", [faults.step_after, faults.add_after], ids=lambda fault: fault.__name__)
async def test_each_of_several_culprits_gets_its_error(
    inline: Inline, monkeypatch: pytest.MonkeyPatch, fault: Fault, culprits: set[int]
) -> None:
    alone = await texts_alone(inline, window_of(set()))
    requests = window_of(culprits)
    with monkeypatch.context() as patch:
        runs = Runs(inline, patch)
        fault(inline, patch)
        rows = await inline.batch(requests)
    check_rows(rows, culprits, alone)
    check_windows(rows, requests, runs)
    check_rows(await inline.batch(window_of(set())), set(), alone)
    await inline.assert_serves()


@pytest.mark.parametrize("position", [0, 3, 7])
@pytest.mark.parametrize("fault", BREAKING, ids=lambda fault: fault.__name__)
async def test_members_with_several_outputs_are_isolated_too(
    inline: Inline, monkeypatch: pytest.MonkeyPatch, fault: Fault, position: int
) -> None:
    several = {"n": 3, "temperature": 0.9, "seed": 11}
    alone = await texts_alone(inline, window_of(set(), **several))
    with monkeypatch.context() as patch:
        fault(inline, patch)
        rows = await inline.batch(window_of({position}, **several))
    check_rows(rows, {position}, alone)
    inline.assert_idle()
    check_rows(await inline.batch(window_of(set(), **several)), set(), alone)
    await inline.assert_serves()


async def test_what_vllm_refuses_is_a_400_of_that_request_alone(
    inline: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await texts_alone(inline, window_of(set()))
    with monkeypatch.context() as patch:
        faults.add_refuses(inline, patch)
        rows = await inline.batch(window_of({3}))
    check_rows(rows, {3}, alone, code="invalid_request")
    await inline.assert_serves()


async def test_callers_of_their_own_in_one_window_do_not_feel_a_neighbours_failure(
    inline: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await texts_alone(inline, window_of(set()))
    with monkeypatch.context() as patch:
        faults.step_after(inline, patch)
        answers = await asyncio.gather(
            *(inline.post("/generate", {"temperature": 0, **body}) for body in window_of({3}))
        )
    for number, (status, body) in enumerate(answers):
        if number == 3:
            assert (status, body["error"]["code"]) == (500, "generation_failed")
        else:
            assert (status, [output["text"] for output in body["outputs"]]) == (200, alone[number])
    await inline.assert_serves()


async def test_re_run_members_carry_the_stamps_of_the_run_that_gave_the_text(
    inline: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        faults.step_late(inline, patch)
        rows = await inline.batch(window_of({3}))
    timings = [found["response"]["timings"] for number, found in enumerate(rows) if number != 3]
    windows = [found["response"]["window"] for number, found in enumerate(rows) if number != 3]
    assert all(window["size"] < SIZE for window in windows)
    for times in timings:
        assert not times["clock_anomaly"]
        assert times["dispatched_at"] - 0.001 <= times["request_state_stats"]["arrival_time"]
    # What the failed run cost is seen as waiting, not as work.
    assert max(times["window_wait_ms"] for times in timings) > min(times["inference_ms"] for times in timings)


# --- a generate() whose outputs do not belong to the window ---


def too_few(outputs: list[Any]) -> list[Any]:
    return outputs[:-1]


def too_many(outputs: list[Any]) -> list[Any]:
    extra = copy.copy(outputs[-1])
    extra.request_id = str(int(extra.request_id) + 1)
    return [*outputs, extra]


def none_at_all(outputs: list[Any]) -> list[Any]:
    return []


def foreign_id(outputs: list[Any]) -> list[Any]:
    outputs[3].request_id = "999999"
    return outputs


def same_id_twice(outputs: list[Any]) -> list[Any]:
    return [*outputs[:3], outputs[4], *outputs[4:]]


def one_swapped_for_an_older(outputs: list[Any]) -> list[Any]:
    outputs[0].request_id = str(int(outputs[0].request_id) - 1)
    return outputs


def one_doubled(outputs: list[Any]) -> list[Any]:
    return [*outputs, outputs[2]]


def lie(inline: Inline, patch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]]) -> None:
    generate = inline.llm.generate
    patch.setattr(inline.llm, "generate", lambda *args, **kwargs: change(generate(*args, **kwargs)))


@pytest.mark.parametrize(
    "change",
    [too_few, too_many, none_at_all, foreign_id, same_id_twice, one_swapped_for_an_older, one_doubled],
    ids=lambda change: change.__name__,
)
async def test_outputs_that_do_not_fit_the_window_hand_out_no_text(
    inline: Inline, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]]
) -> None:
    alone = await texts_alone(inline, window_of(set()))
    with monkeypatch.context() as patch:
        lie(inline, patch, change)
        rows = await inline.batch(window_of(set()))
    check_rows(rows, set(range(SIZE)), alone)
    assert not any(texts[0] and texts[0] in str(rows) for texts in alone)
    check_rows(await inline.batch(window_of(set())), set(), alone)
    await inline.assert_serves()


async def test_ids_decide_not_positions(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = await texts_alone(inline, window_of(set()))
    with monkeypatch.context() as patch:
        lie(inline, patch, lambda outputs: [outputs[place] for place in (5, 0, 7, 2, 1, 6, 3, 4)])
        rows = await inline.batch(window_of(set()))
    check_rows(rows, set(), alone)
    assert [found["response"]["window"]["position"] for found in rows] == list(range(SIZE))


@pytest.mark.parametrize("reason", ["abort", "error", None])
async def test_an_undocumented_end_is_an_error_of_that_request(
    inline: Inline, monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    alone = await texts_alone(inline, window_of(set()))

    def end(outputs: list[Any]) -> list[Any]:
        outputs[3].outputs[0].finish_reason = reason
        return outputs

    with monkeypatch.context() as patch:
        lie(inline, patch, end)
        rows = await inline.batch(window_of(set()))
    check_rows(rows, {3}, alone)


# --- what is left in the engine ---


def leave_behind(inline: Inline, request_id: str, **settings: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=200, ignore_eos=True, **settings)
    inline.engine.add_request(request_id, {"prompt_token_ids": [11, 12, 13]}, params)


@pytest.mark.parametrize("several", [{}, {"n": 3, "temperature": 1.0}], ids=["one output", "several outputs"])
@pytest.mark.parametrize("is_stepped", [False, True], ids=["waiting", "running"])
async def test_what_was_left_in_the_engine_never_comes_out(
    inline: Inline, several: dict[str, Any], is_stepped: bool
) -> None:
    alone = await texts_alone(inline, window_of(set()))
    upcoming = int(inline.llm.request_counter.counter)
    for request_id in ("leftover", str(upcoming), str(upcoming + 3)):
        leave_behind(inline, request_id, **several)
    if is_stepped:
        inline.engine.step()
    rows = await inline.batch(window_of(set()))
    check_rows(rows, set(), alone)
    await inline.assert_serves()


async def test_what_a_good_window_leaves_behind_never_comes_out(
    inline: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await texts_alone(inline, window_of(set()))

    def add(outputs: list[Any]) -> list[Any]:
        leave_behind(inline, "late")
        return outputs

    with monkeypatch.context() as patch:
        lie(inline, patch, add)
        check_rows(await inline.batch(window_of(set())), set(), alone)
    check_rows(await inline.batch(window_of(set())), set(), alone)
    await inline.assert_serves()


async def test_a_caller_that_hangs_up_leaves_the_engine_empty(inline: Inline) -> None:
    alone = await texts_alone(inline, window_of(set()))
    gone = asyncio.create_task(inline.generate(prompt="Once upon a time", max_tokens=100, ignore_eos=True))
    await asyncio.sleep(0.05)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    check_rows(await inline.batch(window_of(set())), set(), alone)
    await inline.assert_serves()
