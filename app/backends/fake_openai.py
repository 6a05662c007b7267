"""OpenAI's answers of the fake backend: their shape, as vLLM's server has it, without what only a model can say."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

from app.prompts.openai import ChatCompletionRequest, OpenAIBody, OpenAIPrompt
from app.request import Answer, AnswerHead, Generation, Output, Resolved

MAX_TOKENS = 16
"""Of a completion that does not say."""


def sampling_of(body: OpenAIBody, room: int) -> dict[str, Any]:
    """The sampling settings that a body gives, by name; ``room`` is what the context leaves, in tokens."""
    given = body.given()
    if isinstance(body, ChatCompletionRequest):
        given["max_tokens"] = body.max_completion_tokens or body.max_tokens or room
        given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    else:
        given["max_tokens"] = max(1, MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    return given


def answer(answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
    """The answer as plain JSON values."""
    prompt: OpenAIPrompt = answers[0].request.resolved.origin
    is_chat = isinstance(prompt.body, ChatCompletionRequest)
    choices = [choice for answer in answers for choice in _choices(answer, is_chat)]
    prompt_tokens = sum(answer.request.prompt_tokens for answer in answers)
    completion_tokens = sum(answer.generation.completion_tokens for answer in answers)
    return {
        "id": head.id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _choices(answer: Answer, is_chat: bool) -> Iterator[dict[str, Any]]:
    body = answer.request.resolved.origin.body
    prompt = bytes(token for token in answer.request.resolved.prompt_token_ids if token < 256).decode(errors="replace")
    for output in answer.generation.outputs:
        text = output.text if is_chat or not body.echo else prompt + ("" if body.max_tokens == 0 else output.text)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        ends = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        ids = output.token_ids if body.return_token_ids else None
        yield {**said, "logprobs": _logprobs(output, is_chat), **ends, "token_ids": ids}


def _logprobs(output: Output, is_chat: bool) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None
    if is_chat:
        return {
            "content": [
                _entry(entry) | {"top_logprobs": [_entry(top) for top in entry["top"]]} for entry in output.logprobs
            ]
        }
    return {
        "tokens": [entry["token"] for entry in output.logprobs],
        "token_logprobs": [entry["logprob"] for entry in output.logprobs],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top"]} for entry in output.logprobs],
        "text_offset": list(range(len(output.logprobs))),
    }


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": list(entry["token"].encode())}


Step = list[tuple[int, str, int, dict[str, Any]]]
"""What is new in each output: its index, its text, how many tokens these are, and how it ends where it does."""


def step_of(planned: Generation, step: int) -> Step:
    """What a generation has to say at its token of this number; an output says all of its text by its last token."""
    return [_part_of(output, step) for output in planned.outputs if step < len(output.token_ids)]


def _part_of(output: Output, step: int) -> tuple[int, str, int, dict[str, Any]]:
    is_last = step == len(output.token_ids) - 1
    text = output.text[step:] if is_last else output.text[step : step + 1]
    ends = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason} if is_last else {}
    return output.index, text, 1, ends


async def chunks(
    prompts: Sequence[Resolved], outputs: AsyncIterator[tuple[int, Step]], head: AnswerHead
) -> AsyncGenerator[bytes, None]:
    """The chunks of a streamed answer, as JSON."""
    body: OpenAIBody = prompts[0].origin.body
    is_chat = isinstance(body, ChatCompletionRequest)
    base = {"id": head.id, "created": head.created, "model": head.model}
    base["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    said, completion = not is_chat, 0
    async for prompt, step in outputs:
        for index, text, tokens, ends in step:
            completion += tokens
            choice: dict[str, Any] = {"index": prompt * body.places + index, "logprobs": None, "finish_reason": None}
            if not said:
                said = True
                for number in range(body.places):
                    role = {**choice, "index": number, "delta": {"role": "assistant", "content": ""}}
                    yield _json({**base, "choices": [role]})
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            yield _json({**base, "choices": [choice | ends]})
    if body.stream_options is not None and body.stream_options.include_usage:
        prompt_tokens = sum(len(resolved.prompt_token_ids) for resolved in prompts)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion}
        yield _json({**base, "choices": [], "usage": usage | {"total_tokens": prompt_tokens + completion}})


def _json(chunk: dict[str, Any]) -> bytes:
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
