"""From bodies to futures, and what happens when the caller goes on the way."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect

from app import timings
from app.api.service import Service
from app.api.submit import submit, unless_gone
from app.errors import InvalidRequest, QueueFull, QueueTimeout, RequestTooLarge, ServiceError
from app.prompts.spec import GenerateRequest
from app.request import Call, Request, Resolved
from tests.batching.doubles import House, house, settle

Resolve = Callable[[Sequence[GenerateRequest]], Any]


def resolve_each(bodies: Sequence[GenerateRequest]) -> list[Resolved | ServiceError]:
    """``wrong`` cannot be resolved; anything else is its own label."""
    return [
        InvalidRequest("wrong") if body.prompt == "wrong" else Resolved([0], None, {"label": body.prompt})
        for body in bodies
    ]


def service(it: House, resolve: Resolve = resolve_each, queue_timeout_s: float | None = None) -> Service:
    calls: list[int] = []

    async def resolve_on_a_thread(bodies: Sequence[GenerateRequest]) -> list[Resolved | ServiceError]:
        calls.append(len(bodies))
        await asyncio.sleep(0)
        found = resolve(bodies)
        return await found if asyncio.iscoroutine(found) else found

    backend = SimpleNamespace(resolve=resolve_on_a_thread, calls=calls)
    settings = SimpleNamespace(queue_timeout_s=queue_timeout_s, request_timeout_s=queue_timeout_s)
    parts = SimpleNamespace(
        batcher=it.batcher, backend=backend, metrics=it.metrics, settings=settings, lifecycle=it.lifecycle
    )
    return cast(Service, parts)


def bodies(*prompts: str, **fields: Any) -> list[GenerateRequest]:
    return [GenerateRequest(prompt=prompt, **fields) for prompt in prompts]


async def test_bodies_become_futures_and_wrong_ones_errors_in_order() -> None:
    async with house() as it:
        entries = await submit(service(it), bodies("a", "wrong", "b"), Call(1.0))
        first, wrong, last = entries

        assert isinstance(wrong, InvalidRequest)
        assert isinstance(first, Request)
        assert isinstance(last, Request)
        assert await settle([first.future, last.future]) == ["a", "b"]
        assert first.stamps.received == 1.0
        assert it.batcher.queue_requests == 0


async def test_an_answer_is_owed_for_accepted_work_alone() -> None:
    async with house(max_queue_requests=4) as it:
        accepted, refused = Call(0.0), Call(0.0)
        await submit(service(it), bodies("a"), accepted)
        with pytest.raises(RequestTooLarge):
            await submit(service(it), bodies("a", n=5, temperature=1.0), refused)

        assert (accepted.is_accepted, refused.is_accepted, it.lifecycle.answers_owed) == (True, False, 1)


async def test_places_are_asked_for_before_anything_is_resolved() -> None:
    async with house(max_queue_requests=4) as it:
        it_service = service(it)
        with pytest.raises(RequestTooLarge):
            await submit(it_service, bodies("a", n=5, temperature=1.0), Call(0.0))
        with it.batcher.reserve(3), pytest.raises(QueueFull):
            await submit(it_service, bodies("a", "b"), Call(0.0))

        assert cast(Any, it_service.backend).calls == []


async def test_a_large_batch_is_resolved_in_pieces() -> None:
    async with house(max_wait_s=60, batch_size=1000) as it:
        it_service = service(it)
        await submit(it_service, bodies(*["a"] * 100), Call(0.0))

        assert cast(Any, it_service.backend).calls == [32, 32, 32, 4]
        assert it.batcher.queue_requests == 100


async def test_a_bug_in_resolving_gives_the_places_back() -> None:
    async with house() as it:
        with pytest.raises(ZeroDivisionError):
            await submit(service(it, lambda bodies: 1 // 0), bodies("a", "b"), Call(0.0))

        assert it.batcher.queue_requests == 0


async def test_a_caller_that_goes_while_its_body_is_resolved_is_counted_and_gives_its_places_back() -> None:
    async with house() as it:
        task = asyncio.create_task(submit(service(it, lambda _: asyncio.sleep(60)), bodies("a", "b"), Call(0.0)))
        await asyncio.sleep(0.01)
        assert it.batcher.queue_requests == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert it.batcher.queue_requests == 0
        assert it.count("batchserve_client_disconnected_total") == 2


@pytest.mark.parametrize(
    ("own", "setting", "expected"),
    [(None, None, None), (5.0, None, 5.0), (None, 7.0, 7.0), (5.0, 7.0, 5.0), (9.0, 7.0, 7.0)],
)
async def test_a_body_may_only_shorten_the_queue_timeout(
    own: float | None, setting: float | None, expected: float | None
) -> None:
    async with house() as it:
        (request,) = await submit(
            service(it, queue_timeout_s=setting), bodies("a", queue_timeout_s=own), Call(timings.now())
        )
        assert isinstance(request, Request)
        await settle([request.future])

        assert request.queue_timeout_s == expected


# --- hanging up ---


def caller(hangs_up: asyncio.Event) -> Callable[[], Any]:
    async def receive() -> dict[str, Any]:
        await hangs_up.wait()
        return {"type": "http.disconnect"}

    return receive


async def test_work_that_ends_first_gives_its_result() -> None:
    assert await unless_gone(asyncio.sleep(0, "done"), caller(asyncio.Event())) == "done"


async def test_work_that_fails_first_gives_its_error() -> None:
    async def fail() -> None:
        raise QueueFull("full")

    with pytest.raises(QueueFull):
        await unless_gone(fail(), caller(asyncio.Event()))


async def test_a_caller_that_hangs_up_cancels_the_work() -> None:
    hangs_up, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(unless_gone(work(), caller(hangs_up)))
    await asyncio.sleep(0)
    hangs_up.set()
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(task, 5)
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_other_messages_are_no_hang_up() -> None:
    messages = iter([{"type": "http.request"}, {"type": "http.request"}])

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await asyncio.sleep(60)
        raise AssertionError

    assert await asyncio.wait_for(unless_gone(asyncio.sleep(0.01, "done"), receive), 5) == "done"


async def test_long_bodies_are_resolved_in_smaller_turns_than_short_ones() -> None:
    async with house() as it:
        it_service = service(it)
        await submit(it_service, bodies("a" * 60_000, "a" * 60_000, *["a"] * 33), Call(timings.now()))

        assert it_service.backend.calls == [1, 32, 2]  # type: ignore[attr-defined]


async def test_the_time_that_resolving_takes_counts_as_waiting() -> None:
    async with house() as it:
        received = timings.now() - 10
        (request,) = await submit(service(it), bodies("a", queue_timeout_s=5.0), Call(received))
        assert isinstance(request, Request)
        (error,) = await settle([request.future])
        assert isinstance(error, QueueTimeout)
