"""Faults put into a real engine: a request that carries the poisoned token makes it fail."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.inline import Inline

POISON = 4242
"""A token id of no special meaning; no other prompt of these tests holds it."""


class Broken(Exception):
    """What a broken engine raises."""


def _is_poisoned(ids: Any) -> bool:
    return ids is not None and POISON in ids


def _holds_poison(inline: Inline) -> bool:
    states = inline.engine.output_processor.request_states.values()
    return any(_is_poisoned(state.prompt_token_ids) for state in states)


def step_before(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """``step()`` raises before it does anything, for as long as the poisoned request is in the engine."""
    step = inline.engine.step

    def broken() -> Any:
        if _holds_poison(inline):
            raise Broken("step")
        return step()

    patch.setattr(inline.engine, "step", broken)


def step_after(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """``step()`` does its work and raises then, so that its outputs are lost."""
    step = inline.engine.step

    def broken() -> Any:
        is_poisoned = _holds_poison(inline)
        outputs = step()
        if is_poisoned:
            raise Broken("step")
        return outputs

    patch.setattr(inline.engine, "step", broken)


def step_late(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """``step()`` raises after three good ones, when short neighbours have ended already."""
    step, count = inline.engine.step, 0

    def broken() -> Any:
        nonlocal count
        count = count + 1 if _holds_poison(inline) else 0
        if count > 3:
            count = 0
            raise Broken("step")
        return step()

    patch.setattr(inline.engine, "step", broken)


def in_the_model(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """The model's own run raises, within the engine core: the scheduler believes it has run."""
    executor = inline.core.model_executor
    execute = executor.execute_model

    def broken(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_is_poisoned(request.prompt_token_ids) for request in scheduled.scheduled_new_reqs):
            raise Broken("model")
        return execute(scheduled, *args, **kwargs)

    patch.setattr(executor, "execute_model", broken)


def _add(inline: Inline, patch: pytest.MonkeyPatch, fail: Callable[[], None], *, is_after: bool) -> None:
    add = inline.engine.add_request

    def broken(request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        is_poisoned = _is_poisoned(prompt.get("prompt_token_ids"))
        if is_poisoned and not is_after:
            fail()
        added = add(request_id, prompt, *args, **kwargs)
        if is_poisoned:
            fail()
        return added

    patch.setattr(inline.engine, "add_request", broken)


def _fail() -> None:
    raise Broken("add_request")


def add_before(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """``add_request()`` raises instead of adding."""
    _add(inline, patch, _fail, is_after=False)


def add_after(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """``add_request()`` raises when the request is in the engine already."""
    _add(inline, patch, _fail, is_after=True)


def add_refuses(inline: Inline, patch: pytest.MonkeyPatch) -> None:
    """``add_request()`` complains of the request, as vLLM does of a wrong one."""

    def refuse() -> None:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError("this one is wrong", parameter="prompt")

    _add(inline, patch, refuse, is_after=False)


class Runs:
    """The prompts of each ``generate()`` that came to its end, in order."""

    def __init__(self, inline: Inline, patch: pytest.MonkeyPatch) -> None:
        self.done: list[list[list[int]]] = []
        self.failed = 0
        generate = inline.llm.generate

        def record(prompts: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                outputs = generate(prompts, *args, **kwargs)
            except Exception:
                self.failed += 1
                raise
            self.done.append([prompt["prompt_token_ids"] for prompt in prompts])
            return outputs

        patch.setattr(inline.llm, "generate", record)
