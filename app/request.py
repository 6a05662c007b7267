"""What crosses the thread: a request, its stamps and future; a window; what comes back.

A ``Request`` is made on the event loop once its body has been resolved, waits in the batcher,
goes to the engine inside a ``Window`` and comes back as an ``Outcome``.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from app.timings import EngineStats, Stamps

Release = Literal["full", "max_wait", "drain", "rolling", "direct"]
"""Why a window went. Its one request had room in the engine: ``rolling``; or ``direct``, which no answer tells of."""


def new_id(prefix: str) -> str:
    """An id that is unique across processes. Not from ``random``: vLLM seeds that."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(slots=True)
class Call:
    """One HTTP call.

    Attributes:
        received: when its first line was handled, in monotonic seconds.
        is_accepted: whether work of it was admitted, so that a stop waits for its answer to leave.
    """

    received: float
    is_accepted: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """A body turned into what an engine takes.

    Attributes:
        prompt_token_ids: the whole prompt, special tokens included.
        params: the backend's own sampling object, fresh for this request.
        sampling: the settings that are in effect, as plain values, for the answer.
        origin: what the backend needs again to shape an OpenAI answer; None for a ``/generate`` body.
        cache_salt: shares cached prompts with this salt alone; None: with those without one.
        rendered: the prompt with its images and audio, as the engine takes it; None for text alone.
        media_bytes: what these take.
        adapter: the backend's own handle of a LoRA adapter; None: the base model.
    """

    prompt_token_ids: list[int]
    params: Any
    sampling: dict[str, Any]
    origin: Any = None
    cache_salt: str | None = None
    rendered: Any = None
    media_bytes: int = 0
    adapter: Any = None


@dataclass(frozen=True, slots=True)
class Output:
    """One generated sequence. ``logprobs`` has one entry a token, already in the wire's shape.

    ``repetition`` is the end only where an OpenAI body asks for its detection.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "repetition"]
    stop_reason: int | str | None
    logprobs: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Generation:
    """All that an engine gave for one request.

    Attributes:
        raw: the backend's own output, where an OpenAI answer will be shaped from it.
    """

    outputs: list[Output]
    prompt_logprobs: list[dict[str, Any] | None] | None
    cached_tokens: int | None
    stats: EngineStats | None
    raw: Any = None

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all outputs, counted from the engine's ids."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name: the base, or an adapter on it.

    Attributes:
        root: a Hugging Face id or a folder.
        parent: name of the base model, for an adapter.
    """

    name: str
    root: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an OpenAI answer begins with.

    Attributes:
        id: such as ``cmpl-…``.
        created: when the call came, in Unix seconds.
        model: the served model's name.
    """

    id: str
    created: int
    model: str


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its sampling settings, from admission to settlement.

    Attributes:
        places: how much of ``max_queue_requests`` it takes: its ``n``.
        priority: lower goes first, as in vLLM.
        queue_timeout_s: the longest it may wait for a window, in seconds; None is no limit.
        request_timeout_s: the longest it may take from receipt to its answer, in seconds; None is no limit.
        future: settled once, on the event loop, with an ``Answer`` or a ``ServiceError``.
        listener: told on the event loop of each part of the output as it comes, and whether it is the last, by a
            backend that streams.
    """

    resolved: Resolved
    places: int
    priority: int
    queue_timeout_s: float | None
    stamps: Stamps
    future: "asyncio.Future[Answer]"
    request_timeout_s: float | None = None
    listener: Callable[[Any, bool], None] | None = None
    id: str = field(default_factory=lambda: new_id("gen"))

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.resolved.prompt_token_ids)


@dataclass(slots=True, eq=False)
class Window:
    """The requests that go to the engine together: those of one ``LLM.generate()`` call, or one by itself.

    Attributes:
        id: counts up within a process, over re-runs of a part as well.
        dispatched: monotonic seconds when it went to the engine thread.
        offset: wall clock minus monotonic clock in seconds, measured for this window.
        ids: where the ids of windows come from, so that ``split`` can number its halves.
        size: what answers tell as its size; 0: as many as it has requests. A request by itself tells how many were in
            the engine when it was taken in, itself included.
    """

    id: int
    release: Release
    requests: list[Request]
    dispatched: float
    offset: float
    ids: Iterator[int]
    size: int = 0

    def split(self) -> "tuple[Window, Window]":
        """Two windows with ids of their own, each with half of the requests."""
        middle = (len(self.requests) + 1) // 2
        first, second = (
            Window(next(self.ids), self.release, part, self.dispatched, self.offset, self.ids)
            for part in (self.requests[:middle], self.requests[middle:])
        )
        return first, second

    def describe(self, position: int | None) -> dict[str, Any]:
        """The ``window`` object of the answer of the request at ``position``."""
        size = self.size or len(self.requests)
        position = None if self.release == "rolling" else position
        return {"id": self.id, "size": size, "position": position, "release": self.release}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a window gave for one of its requests: a generation or the error it gets."""

    request: Request
    window: Window
    position: int | None
    result: Generation | Exception


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request's future resolves to."""

    request: Request
    generation: Generation
    window: Window | None
    position: int | None
