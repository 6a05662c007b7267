"""The service over a backend that takes each request by itself: tokens as they are made, and callers that go."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.service.support import (
    Caller,
    Connection,
    Json,
    Process,
    check_error,
    events_of,
    fake_text,
    service,
    serving,
    strict_json,
    text_of,
)

STREAMS: Json = {"streams": True}
ROUTES = ("completions", "chat/completions")
SLOW_MS = 20
GONE_S = 1.0
"""Within this time the place of a caller that has gone is another's."""


WAYS: dict[str, Json] = {"streams": {"fake_config": STREAMS}, "rolling": {"fake_config": {}, "scheduling": "rolling"}}
"""As `vllm_python` takes requests by themselves, and as `vllm_offline` does with `scheduling: rolling`."""


@pytest.fixture(params=WAYS)
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    """A ready service in this process that streams, with room for 8."""
    way = WAYS[request.param]
    faults = {"fail_text": "fail", "break_text": "break"}
    async with service(**{**way, "fake_config": {**way["fake_config"], "faults": faults}}) as caller:
        yield caller


@pytest.fixture(scope="module", params=WAYS)
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Room for one, 20 ms a token."""
    way = WAYS[request.param]
    fake, options = {**way["fake_config"], "step_ms": SLOW_MS}, {**way, "batch_size": 1}
    del options["fake_config"]
    with serving(tmp_path_factory.mktemp("streaming"), fake, **options) as process:
        yield process


def is_alone(window: Json | None) -> bool:
    """Whether it is what an answer tells of a request that went by itself."""
    return window is None or (window["release"], window["position"]) == ("rolling", None)


def body_of(route: str, prompt: str, **fields: object) -> Json:
    asked = {"prompt": prompt} if route == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    return {**asked, "max_tokens": 12, **fields}


def said(events: list[Json], index: int = 0) -> str:
    choices = (choice for event in events for choice in event["choices"] if choice["index"] == index)
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


# --- what is streamed ---


@pytest.mark.parametrize("route", ROUTES)
async def test_the_pieces_of_a_stream_are_the_text_of_the_whole(caller: Caller, route: str) -> None:
    whole = await caller.openai(route, body_of(route, "hello"))
    events = await caller.events(route, body_of(route, "hello", stream_options={"include_usage": True}))

    (choice,) = whole["choices"]
    assert said(events) == (choice.get("text") or choice["message"]["content"])
    assert sum(bool(said([event])) for event in events) == 12
    assert events[-1]["usage"] == whole["usage"]
    assert is_alone(events[-1]["metrics"]["window"])
    ends = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [end for end in ends if end] == ["length"]


async def test_prompts_and_choices_have_their_own_pieces(caller: Caller) -> None:
    events = await caller.events("completions", {"prompt": ["one ", "two "], "n": 2, "temperature": 1, "max_tokens": 8})

    assert [said(events, index) for index in range(4)] == ["ONE ONE "] * 2 + ["TWO TWO "] * 2
    assert len(events[-1]["metrics"]["requests"]) == 2


async def test_a_stop_string_ends_a_stream(caller: Caller) -> None:
    events = await caller.events("completions", body_of("completions", "hello", stop=["LO"]))

    assert said(events) == "HEL"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == "LO"


async def test_pieces_leave_one_by_one(process: Process) -> None:
    async with await process.connect() as connection:
        await connection.post("/v1/completions", body_of("completions", "hello", stream=True))
        times = [time.monotonic() async for line in lines(connection) if line.startswith(b"data: {")]

    assert len(times) == 12
    assert times[-1] - times[0] > 6 * SLOW_MS / 1000


async def test_generate_and_batch_have_all_but_windows(caller: Caller) -> None:
    answer = await caller.generate(prompt="hello", max_tokens=5)
    assert text_of(answer) == "HELLO"
    assert is_alone(answer["window"])
    batch = await caller.batch([{"prompt": f"{n} ", "max_tokens": 2} for n in range(20)])
    assert [text_of(row["response"]) for row in batch["results"]] == [fake_text(f"{n} ", 2) for n in range(20)]
    assert batch["windows"] == []


async def test_rows_by_the_line_come_when_each_is_finished(process: Process) -> None:
    async with process.caller() as caller:
        rows = await caller.lines([{"prompt": f"{n}", "max_tokens": 3} for n in range(3)])
        times = [row["response"]["timings"]["completed_at"] for row in rows if row and "response" in row]

    assert len(times) == 3
    assert times == sorted(times)
    assert times[-1] - times[0] > SLOW_MS / 1000


# --- errors ---


@pytest.mark.parametrize("route", ROUTES)
async def test_what_fails_before_the_first_token_has_its_own_status(caller: Caller, route: str) -> None:
    response = await caller.call("POST", f"/v1/{route}", json=body_of(route, "fail", stream=True))
    assert response.status_code == 500
    assert check_error(response)["code"] == "generation_failed"

    response = await caller.call("POST", f"/v1/{route}", json=body_of(route, "x", stream=True, model="other"))
    assert (response.status_code, check_error(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("route", ROUTES)
async def test_what_breaks_off_in_the_middle_is_an_error_event_without_an_end_mark(caller: Caller, route: str) -> None:
    response = await caller.call("POST", f"/v1/{route}", json=body_of(route, "break", stream=True))

    events, is_ended = events_of(response.content)
    assert response.status_code == 200
    assert said(events[:-1]) == ("BR" if route == "completions" else "<U")
    assert events[-1]["error"]["code"] == "generation_failed"
    assert not is_ended
    assert await caller.metric("batchserve_errors_total", code="generation_failed") == 1


async def test_one_prompt_that_breaks_off_is_the_end_of_its_call_alone(caller: Caller) -> None:
    good, bad = await asyncio.gather(
        caller.events("completions", body_of("completions", "good")),
        caller.call("POST", "/v1/completions", json={"prompt": ["fine", "break"], "max_tokens": 50, "stream": True}),
    )

    assert said(good) == fake_text("good", 12)
    assert not events_of(bad.content)[1]
    await caller.wait_for_metric("batchserve_queue_requests", 0)


async def test_a_failing_row_is_a_row(caller: Caller) -> None:
    batch = await caller.batch([{"prompt": "a", "max_tokens": 1}, {"prompt": "fail"}, {"prompt": "b", "max_tokens": 1}])
    assert [row["status"] for row in batch["results"]] == [200, 500, 200]


async def test_an_engine_that_dies_ends_streams_with_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    fake = {**STREAMS, "step_ms": SLOW_MS, "faults": {"die_text": "die"}}
    with serving(tmp_path_factory.mktemp("death"), fake, batch_size=4) as process:
        async with await process.connect() as connection, process.caller() as other:
            await connection.post("/v1/completions", body_of("completions", "x", stream=True, max_tokens=500))
            await until_said(connection)
            await other.call("POST", "/generate", json={"prompt": "die"})
            rest = b"".join([line async for line in lines(connection)])
            assert b'"code":"engine_dead"' in rest
            assert b"[DONE]" not in rest
            assert (await other.get("/health")).status_code == 503
        assert await process.ended() == 70


# --- callers that go ---


async def lines(connection: Connection) -> AsyncIterator[bytes]:
    """The lines of a stream until its end, from where it stands."""
    async with asyncio.timeout(20):
        while True:
            line = await connection.reader.readline()
            yield line
            if line.strip() in (b"0", b"") and connection.reader.at_eof():
                return
            if line.strip() == b"0":  # of the chunked encoding
                return


async def until_said(connection: Connection) -> None:
    """Until the first piece has come."""
    async for line in lines(connection):
        if line.startswith(b"data: {"):
            return


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "long", "max_tokens": 1500, "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "long"}], "max_tokens": 1500, "stream": True},
        ),
        ("/v1/completions", {"prompt": ["long", "longer"], "max_tokens": 1500}),
        ("/generate", {"prompt": "long", "max_tokens": 1500}),
        ("/batch", {"requests": [{"prompt": "long", "max_tokens": 1500}] * 3}),
    ],
)
async def test_the_place_of_a_caller_that_goes_is_anothers_at_once(process: Process, path: str, body: Json) -> None:
    async with process.caller() as other:
        gone = await other.metric("batchserve_client_disconnected_total")
        async with await process.connect() as connection:
            await connection.post(path, body)
            if body.get("stream"):
                await until_said(connection)
            else:
                await asyncio.sleep(5 * SLOW_MS / 1000)
            await connection.hang_up()
        started = time.monotonic()
        answer = await other.generate(prompt="next", max_tokens=1)

        assert text_of(answer) == "N"
        assert time.monotonic() - started < GONE_S
        assert await other.metric("batchserve_client_disconnected_total") > gone
        assert await other.metric("batchserve_queue_requests") == 0
        await other.wait_for_metric("batchserve_running_requests", 0)


async def test_a_reader_that_stops_reading_holds_nobody_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("slow-reader"), STREAMS, batch_size=2) as process:
        async with await process.connect() as connection, process.caller() as other:
            connection.stop_reading()
            await connection.post("/v1/completions", {"prompt": "x", "max_tokens": 2000, "stream": True})
            for _ in range(20):
                assert text_of(await other.generate(prompt="next", max_tokens=4)) == "NEXT"
            connection.go_on_reading()
            got = b"".join([line async for line in lines(connection)])
            assert got.count(b"data: {") == 2000


async def test_a_drain_lets_streams_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("drain"), {**STREAMS, "step_ms": SLOW_MS}, batch_size=2) as process:
        async with await process.connect() as connection:
            await connection.post("/v1/completions", body_of("completions", "hello", stream=True, max_tokens=30))
            await until_said(connection)
            process.signal()
            rest = b"".join([line async for line in lines(connection)])
        assert b"data: [DONE]" in rest
        assert await process.ended() == 0


async def test_comments_come_while_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.sse.QUIET_S", 0.05)
    async with service(fake_config={**STREAMS, "step_ms": 120}) as caller:
        response = await caller.call(
            "POST", "/v1/completions", json=body_of("completions", "x", stream=True, max_tokens=3)
        )

    text = response.text
    assert text.startswith(": ")
    pieces = text.split("\n\n")
    assert sum(piece.startswith(":") for piece in pieces) >= 3
    assert [json.loads(piece[6:])["choices"][0]["text"] for piece in pieces if piece.startswith("data: {")] == ["X"] * 3


async def test_more_callers_than_places_each_get_their_own_text(caller: Caller) -> None:
    answers = await asyncio.gather(*(caller.events("completions", body_of("completions", f"{n} ")) for n in range(100)))
    assert [said(events) for events in answers] == [fake_text(f"{n} ", 12) for n in range(100)]


async def test_info_names_the_limits(caller: Caller) -> None:
    info = strict_json((await caller.get("/info")).content)
    assert info["settings"]["fake_config"].get("streams") or info["settings"]["scheduling"] == "rolling"
