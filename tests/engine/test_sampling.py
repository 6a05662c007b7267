"""Sampling settings through the service into a real engine: each does what vLLM means by it, for its own request."""

import math
from pathlib import Path
from typing import Any

import pytest

from app.prompts.sampling import SamplingFields
from tests.engine.inline import Inline
from tests.engine.models import variant
from tests.engine.resolution import resolving

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "Once upon a time there was a bear"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


async def output(inline: Inline, **body: Any) -> Any:
    """The one output of a request over the usual prompt, greedy unless told otherwise."""
    (found,) = (await inline.generate(**{**GREEDY, "max_tokens": 8, **body}))["outputs"]
    return found


# --- one window, many settings ---


async def test_settings_of_neighbours_do_not_mix(inline: Inline) -> None:
    lengths, temperatures = (1, 5, 9), (0.0, 1.0)
    requests = [
        {**GREEDY, "max_tokens": length, "temperature": temperature}
        for length in lengths
        for temperature in temperatures
    ]
    alone = await output(inline, max_tokens=9)
    for _ in range(2):
        rows = await inline.batch(requests)
        assert len({row["response"]["window"]["id"] for row in rows}) == 1
        for row, request in zip(rows, requests, strict=True):
            ids = row["response"]["outputs"][0]["token_ids"]
            assert len(ids) == request["max_tokens"] == row["response"]["sampling"]["max_tokens"]
            assert row["response"]["sampling"]["temperature"] == request["temperature"]
            if request["temperature"] == 0:
                assert ids == alone["token_ids"][: len(ids)]


async def test_members_never_share_an_object(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    generate = inline.llm.generate

    def record(prompts: Any, params: Any, **kwargs: Any) -> Any:
        given.extend(params)
        return generate(prompts, params, **kwargs)

    monkeypatch.setattr(inline.llm, "generate", record)
    body = {**GREEDY, "max_tokens": 2, "stop": ["zzz"], "logit_bias": {"5": 1.0}, "stop_token_ids": [5]}
    for _ in range(2):
        await inline.batch([body] * 8)
    assert len(given) == len({id(params) for params in given}) == 16
    for name in ("stop", "logit_bias", "stop_token_ids"):
        assert len({id(getattr(params, name)) for params in given}) == 16


async def test_the_same_body_twice_is_the_same_request(inline: Inline) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 7, "max_tokens": 8, "n": 2, "stop": ["zzz"]}
    first, second = [await inline.generate(**body) for _ in range(2)]
    assert first["outputs"] == second["outputs"]
    assert first["sampling"] == second["sampling"]
    assert first["id"] != second["id"]


@pytest.mark.parametrize("several", [{}, {"n": 4}], ids=["one", "four"])
async def test_a_seed_decides_alone_and_among_neighbours(inline: Inline, several: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 7, "max_tokens": 8, **several}
    alone = [found["text"] for found in (await inline.generate(**body))["outputs"]]
    texts = await inline.batch_texts([{**body, "seed": 1}, body, {**body, "temperature": 0.5}, body])
    assert texts[1] == texts[3] == alone
    assert texts[0] != alone
    assert len(set(alone)) == len(alone)


async def test_greedy_texts_are_those_of_llm_generate_called_directly(inline: Inline) -> None:
    from vllm import SamplingParams

    prompts = [f"{PROMPT} called {name}" for name in ("Ann", "Bob", "Cid", "Dot")]
    lengths = [3, 7, 1, 12]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    direct = await inline.backend._thread.call(lambda: inline.llm.generate(prompts, params, use_tqdm=False))
    ours = await inline.batch(
        [
            {"prompt": prompt, "max_tokens": length, "return_token_ids": True}
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
    )
    for theirs, row in zip(direct, ours, strict=True):
        found = row["response"]["outputs"][0]
        assert found["text"] == theirs.outputs[0].text
        assert found["token_ids"] == list(theirs.outputs[0].token_ids)
        assert found["finish_reason"] == theirs.outputs[0].finish_reason
        assert row["response"]["usage"]["prompt_tokens"] == len(theirs.prompt_token_ids)


# --- ends ---


async def test_a_stop_string_ends_the_text_and_is_left_out(inline: Inline) -> None:
    whole = (await output(inline))["text"]
    stop = whole[len(whole) // 2 :][:5]
    found = await output(inline, stop=["never in it", stop])
    assert found["text"] == whole[: whole.index(stop)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert await output(inline, stop=stop) == found
    kept = await output(inline, stop=[stop], include_stop_str_in_output=True)
    assert kept["text"].startswith(whole[: whole.index(stop) + len(stop)])


async def test_a_stop_token_ends_the_text(inline: Inline) -> None:
    varied = {"repetition_penalty": 2.0}  # a random model repeats itself
    ids = (await output(inline, **varied))["token_ids"]
    end = next(token for token in ids[1:] if token != ids[0])
    found = await output(inline, **varied, stop_token_ids=[end])
    assert found["token_ids"] == ids[: ids.index(end) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", end)


async def test_min_tokens_puts_a_stop_token_off(inline: Inline) -> None:
    first = (await output(inline))["token_ids"][0]
    assert len((await output(inline, stop_token_ids=[first]))["token_ids"]) == 1
    assert len((await output(inline, stop_token_ids=[first], min_tokens=4))["token_ids"]) >= 4


async def test_end_of_sequence_ends_the_text_unless_ignored(inline: Inline) -> None:
    eos = inline.tokenizer.eos_token_id
    always = {"logit_bias": {str(eos): 100.0}}
    found = await output(inline, ignore_eos=False, **always)
    assert (found["token_ids"], found["text"], found["finish_reason"]) == ([eos], "", "stop")
    found = await output(inline, ignore_eos=True, **always)
    assert (found["token_ids"], found["finish_reason"]) == ([eos] * 8, "length")
    found = await output(inline, ignore_eos=False, min_tokens=3, **always)
    assert len(found["token_ids"]) == 4


async def test_special_tokens_are_in_the_text_only_when_asked_for(inline: Inline) -> None:
    eos = inline.tokenizer.eos_token_id
    always = {"logit_bias": {str(eos): 100.0}, "max_tokens": 2}
    assert (await output(inline, **always))["text"] == ""
    assert (await output(inline, **always, skip_special_tokens=False))["text"] == inline.tokenizer.eos_token * 2


# --- choices ---


@pytest.mark.parametrize("place", [5000, -1], ids=["some token", "the last token"])
async def test_a_large_bias_decides_the_token(inline: Inline, place: int) -> None:
    token = place % inline.vocab_size
    found = await output(inline, logit_bias={str(token): 100.0}, max_tokens=3)
    assert found["token_ids"] == [token] * 3
    first = (await output(inline))["token_ids"][0]
    assert first not in (await output(inline, logit_bias={str(first): -100.0}))["token_ids"]


async def test_bad_words_do_not_come(inline: Inline) -> None:
    whole = await output(inline)
    word = inline.tokenizer.decode([whole["token_ids"][0]])
    found = await output(inline, bad_words=[word.strip()])
    assert found["token_ids"][0] != whole["token_ids"][0]


async def test_a_bad_word_of_one_member_is_allowed_to_its_neighbours(inline: Inline) -> None:
    whole = await output(inline, max_tokens=1)
    word = inline.tokenizer.decode(whole["token_ids"]).strip()
    rows = await inline.batch([GREEDY, {**GREEDY, "bad_words": [word]}, GREEDY], max_tokens=1)
    ids = [row["response"]["outputs"][0]["token_ids"] for row in rows]
    assert ids[0] == ids[2] == whole["token_ids"] != ids[1]


async def test_top_k_of_one_is_greedy_at_any_temperature(inline: Inline) -> None:
    found = await output(inline, temperature=1.5, top_k=1)
    assert found["token_ids"] == (await output(inline))["token_ids"]


async def test_several_outputs_are_told_apart_by_index(inline: Inline) -> None:
    answer = await inline.generate(**{**GREEDY, "temperature": 1.2, "n": 4, "seed": 3, "max_tokens": 6})
    assert [found["index"] for found in answer["outputs"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == sum(len(found["token_ids"]) for found in answer["outputs"]) == 24
    again = await inline.generate(**{**GREEDY, "temperature": 1.2, "n": 4, "seed": 3, "max_tokens": 6})
    assert again["outputs"] == answer["outputs"]


# --- logprobs ---


def check_entry(entry: Any, count: int) -> None:
    assert entry.keys() == {"token_id", "token", "logprob", "rank", "top"}
    assert entry["logprob"] is None or entry["logprob"] <= 0
    assert entry["rank"] >= 1
    assert len(entry["top"]) == count
    for place, other in enumerate(entry["top"], start=1):
        assert other.keys() == {"token_id", "token", "logprob", "rank"}
        assert other["rank"] == place
    known = [other["logprob"] for other in entry["top"]]
    assert known == sorted(known, reverse=True)
    same = [other for other in entry["top"] if other["token_id"] == entry["token_id"]]
    assert same == [{name: entry[name] for name in ("token_id", "token", "logprob", "rank")}] or entry["rank"] > count


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0, 2], ids=["greedy", "hot"])
async def test_logprobs_have_one_entry_a_token(inline: Inline, count: int, temperature: float) -> None:
    found = await output(inline, logprobs=count, temperature=temperature)
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    for entry in found["logprobs"]:
        check_entry(entry, count)
        if temperature == 0:
            assert entry["rank"] == 1


@pytest.mark.parametrize("count", [0, 1, 5, 20])
async def test_prompt_logprobs_have_one_entry_a_token_of_which_the_first_is_null(inline: Inline, count: int) -> None:
    ids = (await inline.resolve(prompt=PROMPT)).prompt_token_ids
    answer = await inline.generate(prompt=PROMPT, prompt_logprobs=count, max_tokens=2)
    assert answer["outputs"][0]["logprobs"] is None
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [entry["token_id"] for entry in others] == ids[1:]
    for entry in others:
        check_entry(entry, count)


async def test_no_logprobs_unless_asked_for(inline: Inline) -> None:
    answer = await inline.generate(prompt=PROMPT, max_tokens=2)
    assert answer["prompt_logprobs"] is None
    assert answer["outputs"][0]["logprobs"] is None
    assert answer["outputs"][0]["token_ids"] is None


async def test_several_outputs_have_their_own_logprobs(inline: Inline) -> None:
    body = {**GREEDY, "temperature": 1.5, "n": 3, "seed": 5, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1}
    answer = await inline.generate(**body)
    for found in answer["outputs"]:
        assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_minus_infinity_is_null(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is made to report one: strict JSON has no word for it."""
    generate = inline.llm.generate

    def impossible(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        flat = outputs[0].outputs[0].logprobs
        impossible_at = {2: -math.inf, 3: math.nan}
        flat.logprobs = [impossible_at.get(rank, value) for rank, value in zip(flat.ranks, flat.logprobs, strict=True)]
        return outputs

    monkeypatch.setattr(inline.llm, "generate", impossible)
    found = await output(inline, logprobs=3)
    for entry in found["logprobs"]:
        assert [other["logprob"] is None for other in entry["top"]] == [False, True, True]


async def test_logprobs_of_one_member_do_not_reach_its_neighbours(inline: Inline) -> None:
    rows = await inline.batch([GREEDY, {**GREEDY, "logprobs": 3}, {**GREEDY, "prompt_logprobs": 2}], max_tokens=2)
    responses = [row["response"] for row in rows]
    assert [response["outputs"][0]["logprobs"] is None for response in responses] == [True, False, True]
    assert [response["prompt_logprobs"] is None for response in responses] == [True, True, False]
    assert len({tuple(response["outputs"][0]["token_ids"]) for response in responses}) == 1


# --- what is asked of the prompt and of the answer ---


@pytest.mark.parametrize("keep", [1, 4, 10_000])
async def test_truncation_shortens_the_prompt_that_the_engine_runs(inline: Inline, keep: int) -> None:
    ids = (await inline.resolve(prompt=PROMPT)).prompt_token_ids
    answer = await inline.generate(**{**GREEDY, "max_tokens": 4, "truncate_prompt_tokens": keep})
    assert answer["usage"]["prompt_tokens"] == min(keep, len(ids))
    direct = await inline.generate(prompt_token_ids=ids[-keep:], max_tokens=4, ignore_eos=True)
    assert answer["outputs"][0]["text"] == direct["outputs"][0]["text"]


async def test_a_prompt_that_came_before_is_taken_from_the_cache(inline: Inline) -> None:
    ids = list(range(300, 400))
    first, second = [await inline.generate(prompt_token_ids=ids, max_tokens=4, return_token_ids=True) for _ in range(2)]
    assert second["usage"]["cached_tokens"] == 96
    assert first["outputs"] == second["outputs"]


# --- defaults ---


async def test_without_settings_the_models_own_are_in_effect(tiny_model: Path, tmp_path: Path) -> None:
    generation = {"temperature": 0.3, "top_p": 0.8, "top_k": 7, "repetition_penalty": 1.1, "max_new_tokens": 33}
    model = variant(tiny_model, tmp_path / "model", generation={**generation, "do_sample": True, "eos_token_id": 2})
    async with resolving(model, default_max_tokens=99) as backend:
        sampling = (await backend.resolved(prompt="Hi")).sampling
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            assert sampling[name] == generation[name]
        assert sampling["max_tokens"] == 33
        given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 5}
        sampling = (await backend.resolved(prompt="Hi", **given)).sampling
        assert {name: sampling[name] for name in given} == given


async def test_a_model_that_says_nothing_leaves_it_to_the_service(tiny_model: Path, tmp_path: Path) -> None:
    model = variant(tiny_model, tmp_path / "model", generation={})
    async with resolving(model, default_max_tokens=99) as backend:
        sampling = (await backend.resolved(prompt="Hi")).sampling
        assert (sampling["max_tokens"], sampling["temperature"], sampling["top_p"]) == (99, 1.0, 1.0)


async def test_default_max_tokens_ends_at_the_context(tiny_model: Path) -> None:
    async with resolving(tiny_model, default_max_tokens=99) as backend:
        assert (await backend.resolved(prompt_token_ids=[5] * 1000)).sampling["max_tokens"] == 24


async def test_the_settings_in_effect_are_echoed_in_full(inline: Inline) -> None:
    given: dict[str, Any] = {
        "max_tokens": 3,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "n": 2,
        "seed": 9,
        "stop": ["zzz"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1.0},
        "logprobs": 1,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "bad_words": ["wolf"],
    }
    assert given.keys() == SamplingFields.model_fields.keys()
    assert (await inline.generate(prompt=PROMPT, **given))["sampling"] == given


async def test_max_tokens_is_echoed_as_far_as_the_context_goes(inline: Inline) -> None:
    answer = await inline.generate(prompt_token_ids=[5] * (inline.max_model_len - 2), max_tokens=100)
    assert answer["sampling"]["max_tokens"] == 2
