"""An OpenAI answer cut into the chunks of a stream: pure functions of the answer."""

from collections.abc import Iterator, Sequence
from typing import Any

from app.prompts.openai import StreamOptions
from app.request import Answer

OBJECTS = {"chat.completion": "chat.completion.chunk", "text_completion": "text_completion"}
OF_A_CHOICE = ("logprobs", "token_ids", "prompt_token_ids")
"""Of a choice, beside its text: what the chunk with the text holds, when it is there."""
OF_THE_PROMPT = ("prompt_token_ids", "prompt_text")
"""Of a chat's answer: what its first chunk holds, when it is there."""
Json = dict[str, Any]


def chunks_of(answer: Json, answers: Sequence[Answer], options: StreamOptions | None) -> list[Json]:
    """The chunks in order; ``metrics`` is in the last one.

    Args:
        answer: the whole answer, as it would go out in one piece.
        answers: what it was made of, for the tokens of each choice.
        options: which usage the caller wants to see.
    """
    with_total = options is not None and options.include_usage
    with_each = options is not None and options.continuous_usage_stats
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": OBJECTS[answer["object"]]}
    chunks = [
        {**head, "choices": [choice], **({"usage": usage} if with_each else {})}
        for choice, usage in _choices(answer, list(_usages(answers)))
    ]
    chunks[0] |= {key: answer[key] for key in OF_THE_PROMPT if answer.get(key) is not None}
    if with_total:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    chunks[-1] |= {key: answer[key] for key in ("system_fingerprint", "metrics") if answer.get(key) is not None}
    return chunks


def with_member(chunk: bytes, name: str, value: bytes) -> bytes:
    """A chunk as JSON with one more member, which is JSON as well."""
    return chunk.removesuffix(b"}") + f',"{name}":'.encode() + value + b"}"


def _usages(answers: Sequence[Answer]) -> Iterator[tuple[int, int]]:
    """Prompt and completion tokens of each choice."""
    for answer in answers:
        for output in answer.generation.outputs:
            yield answer.request.prompt_tokens, len(output.token_ids)


def _choices(answer: Json, usages: list[tuple[int, int]]) -> Iterator[tuple[Json, Json]]:
    """Choices of chunks, each with the usage up to there: the roles of a chat, then the texts, then its ends.

    In a chat the end comes in a chunk of its own: OpenAI's SDK looks for tool calls only before it.
    """
    is_chat = answer["object"] == "chat.completion"
    choices = list(zip(answer["choices"], usages, strict=True))
    for choice, (prompt, _) in choices if is_chat else ():
        role = {"role": choice["message"]["role"], "content": ""}
        yield {"index": choice["index"], "delta": role, "logprobs": None, "finish_reason": None}, _usage(prompt, 0)
    for choice, (prompt, completion) in choices:
        said = {"delta": _delta(choice["message"])} if is_chat else {"text": choice["text"]}
        beside = {key: choice[key] for key in OF_A_CHOICE if choice.get(key) is not None}
        ends = {"finish_reason": choice["finish_reason"]}
        if choice.get("stop_reason") is not None:
            ends["stop_reason"] = choice["stop_reason"]
        usage = _usage(prompt, completion)
        with_text = {"finish_reason": None} if is_chat else ends
        yield {"index": choice["index"], **said, "logprobs": None, **beside, **with_text}, usage
        if is_chat:
            yield {"index": choice["index"], "delta": {}, "logprobs": None, **ends}, usage


def _usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _delta(message: Json) -> Json:
    calls = message.get("tool_calls")
    delta = {key: message[key] for key in ("content", "reasoning") if message.get(key) is not None}
    if calls:
        if not delta.get("content"):
            delta.pop("content", None)
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return delta
