"""Server-sent events: comments until there is something to say, one clean end or none, nothing left behind."""

import asyncio
import gc
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from app.api import sse
from app.errors import GenerationFailed, QueueTimeout, ServiceError

QUIET_S = 0.02
BOUND_S = 5.0


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "QUIET_S", QUIET_S)


class Client:
    """The other side of a call: notes what is sent, hangs up when told to."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.told: list[str] = []

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def head(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def data(self) -> list[str]:
        """The data of each event, comments left out."""
        blocks = [block for block in self.body.decode().split("\n\n") if block and not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks]

    @property
    def comments(self) -> int:
        return self.body.count(sse.COMMENT)

    async def call(self, source: "Source", **headers: str) -> None:
        """The two steps of a route."""
        events = sse.Events(source.events())
        await events.within_quiet(self.receive)
        response = sse.EventStream(events, lambda error: self.told.append(error.code), headers)
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        async with asyncio.timeout(BOUND_S):
            await response(scope, self.receive, self.send)


class Source:
    """Events, each after so many seconds, then an error; knows whether it has been let go.

    Attributes:
        asked: how many events were made.
        is_over: whether nothing of it is left.
    """

    def __init__(self, seconds: float, *events: bytes, error: Exception | None = None) -> None:
        self._seconds, self._events, self._error = seconds, events, error
        self.asked = 0
        self.is_over = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for event in self._events or (b"",):
                await asyncio.sleep(self._seconds)
                self.asked += 1
                if event:
                    yield event
            if self._error is not None:
                raise self._error
        finally:
            await asyncio.sleep(0)  # as one that gives places back
            self.is_over = True


async def test_what_is_there_at_once_comes_without_a_comment() -> None:
    client = Client()
    await client.call(Source(0, b'{"a":1}', b'{"b":2}'))
    assert client.body == b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'


async def test_the_head_says_what_it_is_and_is_not_kept() -> None:
    client = Client()
    await client.call(Source(0, b"{}"), **{"x-ignored-fields": "a"})
    assert client.sent[0]["status"] == 200
    assert client.head["content-type"].startswith("text/event-stream")
    assert client.head["cache-control"] == "no-store"
    assert client.head["x-ignored-fields"] == "a"
    assert "content-length" not in client.head


async def test_comments_keep_a_quiet_line_open() -> None:
    client = Client()
    await client.call(Source(QUIET_S * 6, b"{}"))
    assert 2 <= client.comments <= 8
    assert client.data == ["{}", "[DONE]"]
    assert client.body.index(sse.COMMENT) < client.body.index(b"data: ")


async def test_comments_come_between_events_too() -> None:
    client = Client()
    await client.call(Source(QUIET_S * 4, b'{"a":1}', b'{"b":2}'))
    assert client.data == ['{"a":1}', '{"b":2}', "[DONE]"]
    assert sse.COMMENT in client.body.partition(b'{"a":1}')[2]


async def test_each_event_is_sent_when_it_comes() -> None:
    client, source = Client(), Source(QUIET_S / 2, *[b"{}"] * 5)
    seen: list[int] = []

    async def send(message: Message) -> None:
        client.sent.append(message)
        seen.append(source.asked)

    events = sse.Events(source.events())
    await events.within_quiet(client.receive)
    await sse.EventStream(events, lambda _: None, {})(
        {"type": "http", "asgi": {"spec_version": "2.3"}}, client.receive, send
    )
    assert client.data == ["{}"] * 5 + ["[DONE]"]
    assert seen == sorted(seen)
    assert len(set(seen)) > 3  # and not all when the last one was made


async def test_an_error_in_the_middle_follows_what_was_sent_and_no_clean_end() -> None:
    client = Client()
    await client.call(Source(0, b'{"a":1}', error=GenerationFailed("broken")))
    assert client.data[0] == '{"a":1}'
    assert json.loads(client.data[1])["error"]["code"] == "generation_failed"
    assert len(client.data) == 2
    assert client.told == ["generation_failed"]


def test_a_comment_is_one_by_the_rules_of_sse() -> None:
    assert sse.COMMENT.startswith(b":")
    assert sse.COMMENT.endswith(b"\n\n")
    assert sse.COMMENT.count(b"\n") == 2


async def test_an_error_before_the_head_is_raised_for_its_status() -> None:
    client = Client()
    with pytest.raises(QueueTimeout):
        await client.call(Source(0, error=QueueTimeout("too late")))
    assert client.sent == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(GenerationFailed("broken"), "generation_failed"), (RuntimeError("a secret"), "internal_error")],
    ids=["known", "unknown"],
)
async def test_an_error_after_the_head_is_an_event_and_no_clean_end(error: Exception, code: str) -> None:
    client = Client()
    await client.call(Source(QUIET_S * 3, error=error))

    (only,) = client.data
    assert json.loads(only)["error"]["code"] == code
    assert set(json.loads(only)["error"]) >= {"message", "type", "code", "param"}
    assert "a secret" not in only
    assert client.told == [code]


async def test_a_caller_who_hangs_up_before_the_head_cancels_the_work() -> None:
    client, source = Client(), Source(BOUND_S)
    asyncio.get_running_loop().call_later(QUIET_S / 4, client.gone.set)
    with pytest.raises(ClientDisconnect):
        await client.call(source)
    assert source.is_over


async def test_a_caller_who_hangs_up_after_the_head_cancels_the_work() -> None:
    client, source = Client(), Source(BOUND_S)
    asyncio.get_running_loop().call_later(QUIET_S * 3, client.gone.set)
    await client.call(source)
    assert source.is_over
    assert client.data == []


async def test_a_caller_who_hangs_up_between_two_events_ends_the_source() -> None:
    client, source = Client(), Source(QUIET_S / 2, *[b"{}"] * 1000)
    asyncio.get_running_loop().call_later(QUIET_S * 3, client.gone.set)
    await client.call(source)
    assert source.is_over
    assert 1 <= source.asked < 1000
    assert "[DONE]" not in client.data


async def test_a_caller_of_a_newer_server_who_hangs_up_cancels_the_work() -> None:
    """From ASGI 2.4 on, sending fails when the caller has gone."""
    client, source = Client(), Source(BOUND_S)

    async def send(message: Message) -> None:
        if len(client.sent) > 2:
            raise OSError("gone")
        client.sent.append(message)

    response = sse.EventStream(sse.Events(source.events()), lambda _: None, {})
    with pytest.raises(ClientDisconnect):
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, client.receive, send)
    assert source.is_over


async def test_a_failure_that_nobody_waits_for_is_not_reported_as_forgotten() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    client, source = Client(), Source(0, error=RuntimeError("late"))
    response = sse.EventStream(sse.Events(source.events()), lambda _: None, {})
    await asyncio.sleep(QUIET_S)
    assert source.is_over

    async def send(_: Message) -> None:
        raise OSError("gone")

    with pytest.raises(ClientDisconnect):
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, client.receive, send)
    del source, response
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_a_stop_of_the_service_cancels_the_work() -> None:
    client, source = Client(), Source(BOUND_S)
    call = asyncio.ensure_future(client.call(source))
    await asyncio.sleep(QUIET_S / 4)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert source.is_over


def test_an_error_event_is_of_the_one_shape() -> None:
    error: ServiceError = GenerationFailed("x")
    assert error.body().keys() == {"message", "type", "code", "param"}
