"""OpenAI's routes over the windows: answers, streams, limits, and callers that go away."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api import sse
from app.main import create_app
from tests.service.support import (
    Caller,
    Json,
    check_error,
    events_of,
    fake_settings,
    fake_text,
    running,
    service,
    serving,
)

ROUTES = pytest.mark.parametrize("route", ["completions", "chat/completions"])
MESSAGES = [{"role": "user", "content": "x"}]


def body_for(route: str, /, **fields: Any) -> Json:
    """A right body for either route; a text given as `prompt` becomes a message of a chat."""
    text = fields.pop("prompt", "x")
    prompt: Json = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {"max_tokens": 2, **prompt, **fields}


def texts_of(body: Json) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in body["choices"]]


# --- models ---


class TestModels:
    async def test_the_one_model_is_listed_and_told_of_alone(self, caller: Caller) -> None:
        listed = (await caller.get("/v1/models")).json()
        (model,) = listed["data"]
        assert (listed["object"], model["object"], model["id"]) == ("list", "model", "fake-model")
        assert model["max_model_len"] == 2048
        assert (await caller.get("/v1/models/fake-model")).json() == model

    async def test_a_name_with_slashes_is_found(self) -> None:
        async with service(model="org/name:tag") as caller:
            assert (await caller.get("/v1/models/org/name:tag")).json()["id"] == "org/name:tag"
            assert (await caller.get("/v1/models/org%2Fname:tag")).json()["id"] == "org/name:tag"

    @pytest.mark.parametrize(
        "name", ["other", "fake-model/", "fake-model%00", "FAKE-MODEL", "%F0%9F%90%BB", "x" * 3000]
    )
    async def test_another_model_is_not_found(self, caller: Caller, name: str) -> None:
        response = await caller.get(f"/v1/models/{name}")
        assert check_error(response)["code"] == "model_not_found"

    async def test_models_are_listed_while_the_model_loads(self) -> None:
        app = create_app(fake_settings(fake_config={"open_s": 30}))
        async with running(app, is_awaited=False) as caller:
            (model,) = (await caller.get("/v1/models")).json()["data"]
            assert (model["id"], model["max_model_len"]) == ("fake-model", None)

    @ROUTES
    async def test_a_wrong_model_is_not_found_and_names_the_field(self, caller: Caller, route: str) -> None:
        error = await caller.openai(route, body_for(route, model="other"), status=404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")

    @ROUTES
    async def test_the_served_model_may_be_named_or_not(self, caller: Caller, route: str) -> None:
        for fields in ({}, {"model": None}, {"model": "fake-model"}):
            assert (await caller.openai(route, body_for(route, **fields)))["model"] == "fake-model"


# --- answers ---


class TestCompletions:
    @pytest.mark.parametrize(
        ("prompt", "texts"),
        [
            ("ab", ["ABAB"]),
            (["ab"], ["ABAB"]),
            (["ab", "c", "def"], ["ABAB", "CCCC", "DEFD"]),
            ([97, 98], ["ABAB"]),
            ([[97], [98, 99]], ["AAAA", "BCBC"]),
        ],
        ids=str,
    )
    async def test_every_form_of_prompt_is_answered_in_order(
        self, caller: Caller, prompt: Any, texts: list[str]
    ) -> None:
        assert texts_of(await caller.completion(prompt=prompt, max_tokens=4)) == texts

    async def test_n_choices_of_each_prompt_stand_together(self, caller: Caller) -> None:
        body = await caller.completion(prompt=["a", "b"], n=3, max_tokens=1)
        assert texts_of(body) == ["A", "A", "A", "B", "B", "B"]
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}

    async def test_sixteen_tokens_are_the_default(self, caller: Caller) -> None:
        assert (await caller.completion())["usage"]["completion_tokens"] == 16
        assert (await caller.completion(max_tokens=None))["usage"]["completion_tokens"] == 16

    async def test_echo_puts_the_prompt_first_and_alone_with_no_tokens(self, caller: Caller) -> None:
        assert texts_of(await caller.completion(prompt="ab", echo=True, max_tokens=2)) == ["abAB"]
        assert texts_of(await caller.completion(prompt="ab", echo=True, max_tokens=0)) == ["ab"]

    async def test_more_prompts_than_a_window_are_spread(self, caller: Caller) -> None:
        prompts = [f"p{number}" for number in range(30)]
        body = await caller.completion(prompt=prompts, max_tokens=4)
        assert texts_of(body) == [fake_text(prompt, 4) for prompt in prompts]
        assert len({one["window"]["id"] for one in body["metrics"]["requests"]}) >= 4


class TestChat:
    async def test_a_conversation_is_rendered(self, caller: Caller) -> None:
        body = await caller.chat(max_tokens=5)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "<USER"}

    async def test_it_goes_to_the_end_of_the_context(self) -> None:
        async with service(fake_config={"max_model_len": 64}) as caller:
            body = await caller.chat()
            assert body["usage"]["total_tokens"] == 64
            assert body["choices"][0]["finish_reason"] == "length"

    async def test_the_newer_name_of_the_limit_goes_before(self, caller: Caller) -> None:
        body = await caller.chat(max_tokens=7, max_completion_tokens=3)
        assert body["usage"]["completion_tokens"] == 3

    async def test_parts_are_one_text(self, caller: Caller) -> None:
        parts = [{"type": "text", "text": "ab"}, {"type": "input_text", "text": "cd"}]
        whole, cut = [
            await caller.openai("chat/completions", {"messages": [{"role": "user", "content": one}], "max_tokens": 20})
            for one in ("abcd", parts)
        ]
        assert texts_of(whole) == texts_of(cut)


class TestBoth:
    @ROUTES
    async def test_the_id_is_made_of_the_callers_label_or_the_calls_id(self, caller: Caller, route: str) -> None:
        assert (await caller.openai(route, body_for(route, request_id="mine")))["id"].endswith("-mine")
        response = await caller.call("POST", f"/v1/{route}", json=body_for(route), headers={"x-request-id": "trace-7"})
        assert response.headers["x-request-id"] == "trace-7"
        assert response.json()["id"].endswith("-trace-7")

    @ROUTES
    async def test_a_stop_string_ends_it(self, caller: Caller, route: str) -> None:
        body = await caller.openai(route, body_for(route, prompt="abc", max_tokens=30, stop=["C", "<never>"]))
        choice = body["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "C")

    @ROUTES
    async def test_what_is_said_is_counted_once(self, caller: Caller, route: str) -> None:
        await caller.openai(route, body_for(route))
        before = await caller.metric("batchserve_tokens_total", kind="completion")
        await caller.openai(route, body_for(route, n=3))
        assert await caller.metric("batchserve_tokens_total", kind="completion") == before + 6

    async def test_calls_of_all_routes_share_windows(self) -> None:
        async with service(max_wait_ms=300, batch_size=3) as caller:
            one, two, three = await asyncio.gather(
                caller.generate(prompt="a", max_tokens=1), caller.completion(max_tokens=1), caller.chat(max_tokens=1)
            )
            windows = [one["window"], two["metrics"]["window"], three["metrics"]["window"]]
            assert {window["id"] for window in windows} == {1}
            assert {window["position"] for window in windows} == {0, 1, 2}

    @ROUTES
    async def test_a_lower_priority_goes_first(self, route: str) -> None:
        async with service(batch_size=2, fake_config={"step_ms": 20}) as caller:
            busy = asyncio.create_task(caller.generate(prompt="busy", max_tokens=10))
            await caller.wait_until_admitted(1)
            await caller.wait_for_metric("batchserve_queue_requests", 0)
            calls = []
            for number, priority in enumerate((5, 5, 5, -(2**63), 2**63 - 1)):
                calls.append(asyncio.create_task(caller.openai(route, body_for(route, priority=priority))))
                await caller.wait_for_metric("batchserve_queue_requests", number + 1)
            answers = await asyncio.gather(*calls)
            await busy
            order = [answer["metrics"]["window"]["id"] for answer in answers]
            assert order[3] == min(order)
            assert order[4] == max(order)


# --- streams ---


class TestStreams:
    @ROUTES
    async def test_the_streamed_text_is_the_one_in_one_piece(self, caller: Caller, route: str) -> None:
        body = body_for(route, prompt="größe 🐻", max_tokens=40)
        whole = await caller.openai(route, body)
        events = await caller.events(route, body)
        said = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in said)
        assert [text] == texts_of(whole)
        assert said[-1]["finish_reason"] == "length"

    @ROUTES
    async def test_usage_comes_when_asked_for(self, caller: Caller, route: str) -> None:
        whole = await caller.openai(route, body_for(route))
        plain = await caller.events(route, body_for(route))
        asked = await caller.events(route, body_for(route, stream_options={"include_usage": True}))
        assert not any("usage" in event for event in plain)
        assert (asked[-1]["choices"], asked[-1]["usage"]) == ([], whole["usage"])

    @ROUTES
    async def test_usage_so_far_comes_with_each_chunk_when_asked_for(self, caller: Caller, route: str) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await caller.events(route, body_for(route, n=2, stream_options=options))
        assert all(event["usage"]["total_tokens"] > 0 for event in events)
        assert events[-1]["usage"]["completion_tokens"] == 4

    async def test_a_list_of_prompts_is_streamed_with_all_its_metrics(self, caller: Caller) -> None:
        events = await caller.events("completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 2})
        assert [event["choices"][0]["text"] for event in events] == ["AA", "AA", "BB", "BB"]

    @ROUTES
    async def test_a_refusal_has_its_own_status(self, caller: Caller, route: str) -> None:
        error = await caller.openai(route, body_for(route, stream=True, model="other"), status=404)
        assert error["code"] == "model_not_found"

    @ROUTES
    async def test_a_failure_before_the_head_has_its_own_status(self, route: str) -> None:
        async with service(fake_config={"faults": {"fail_text": "boom"}}) as caller:
            error = await caller.openai(route, body_for(route, prompt="boom", stream=True), status=500)
            assert error["code"] == "generation_failed"

    @ROUTES
    async def test_comments_come_while_it_is_quiet(self, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sse, "QUIET_S", 0.05)
        async with service(fake_config={"step_ms": 100}) as caller:
            response = await caller.call("POST", f"/v1/{route}", json=body_for(route, stream=True, max_tokens=4))
            assert response.content.count(sse.COMMENT) >= 3
            events, is_ended = events_of(response.content)
            assert (len(events) > 0, is_ended) == (True, True)

    @ROUTES
    async def test_a_failure_behind_the_head_is_an_event_without_a_clean_end(
        self, route: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sse, "QUIET_S", 0.05)
        async with service(fake_config={"faults": {"fail_text": "boom", "hang_text": "boom", "hang_s": 0.3}}) as caller:
            response = await caller.call("POST", f"/v1/{route}", json=body_for(route, prompt="boom", stream=True))
            assert response.status_code == 200
            ((event,), is_ended) = events_of(response.content)
            assert (event["error"]["code"], is_ended) == ("generation_failed", False)
            assert await caller.metric("batchserve_errors_total", code="generation_failed") == 1

    @ROUTES
    async def test_errors_of_a_stream_are_counted(self, caller: Caller, route: str) -> None:
        before = await caller.metric("batchserve_errors_total", code="invalid_request")
        await caller.openai(route, body_for(route, stream=True, n=0), status=400)
        assert await caller.metric("batchserve_errors_total", code="invalid_request") == before + 1


# --- one of several ---


class TestOneOfSeveral:
    @pytest.mark.parametrize(
        "prompts", [["a", "", "b"], [[97], [], [98]], ["a", "x" * 3000, "b"]], ids=["", "[]", "long"]
    )
    async def test_one_wrong_prompt_fails_the_call_and_none_is_admitted(
        self, caller: Caller, prompts: list[Any]
    ) -> None:
        before = await caller.metric("batchserve_window_size_sum")
        error = await caller.completion(prompt=prompts, status=400)
        assert error["param"] == "prompt.1"
        await asyncio.sleep(0.02)
        assert await caller.metric("batchserve_window_size_sum") == before
        assert await caller.metric("batchserve_queue_requests") == 0

    async def test_an_id_outside_the_vocabulary_is_named_by_its_place(self, caller: Caller) -> None:
        assert (await caller.completion(prompt=[[97], [98, 5000]], status=400))["param"] == "prompt.1.1"

    async def test_a_failing_prompt_fails_the_call_and_the_others_are_cancelled(self) -> None:
        faults = {"fail_text": "boom"}
        async with service(batch_size=1, fake_config={"step_ms": 20, "faults": faults}) as caller:
            prompts = ["boom", *(f"late {number}" for number in range(20))]
            error = await caller.completion(prompt=prompts, max_tokens=5, status=500)
            assert error["code"] == "generation_failed"
            await caller.wait_for_metric("batchserve_queue_requests", 0)
            assert await caller.metric("batchserve_window_size_sum") < 10


# --- limits ---


class TestLimits:
    @ROUTES
    async def test_n_that_never_fits_is_too_large(self, route: str) -> None:
        async with service(max_queue_requests=8, max_batch_requests=8) as caller:
            error = await caller.openai(route, body_for(route, n=9), status=413)
            assert error["limit"] == 8
            await caller.openai(route, body_for(route, n=8))

    async def test_prompts_times_n_count_against_the_queue(self) -> None:
        async with service(max_queue_requests=8, max_batch_requests=8) as caller:
            await caller.completion(prompt=["x"] * 3, n=3, max_tokens=1, status=413)
            await caller.completion(prompt=["x"] * 4, n=2, max_tokens=1)

    async def test_more_prompts_than_a_batch_may_hold_are_too_large(self) -> None:
        async with service(max_queue_requests=64, max_batch_requests=5) as caller:
            error = await caller.completion(prompt=["x"] * 6, status=413)
            assert (error["code"], error["limit"]) == ("request_too_large", 5)
            await caller.completion(prompt=["x"] * 5, max_tokens=1)

    @ROUTES
    async def test_a_full_queue_says_when_to_come_again(self, route: str) -> None:
        config = {"step_ms": 20}
        async with service(max_queue_requests=4, max_batch_requests=4, batch_size=1, fake_config=config) as caller:
            busy = asyncio.create_task(caller.generate(prompt="busy", max_tokens=20))
            await caller.wait_until_admitted(1)
            await caller.wait_for_metric("batchserve_queue_requests", 0)
            waiting = asyncio.create_task(caller.openai(route, body_for(route, n=3)))
            await caller.wait_for_metric("batchserve_queue_requests", 3)
            response = await caller.call("POST", f"/v1/{route}", json=body_for(route, n=2))
            error = check_error(response)
            assert (error["code"], error["queue_depth"], error["limit"]) == ("queue_full", 3, 4)
            last = await caller.openai(route, body_for(route, n=1))
            assert len((await waiting)["choices"]) == 3
            assert len(last["choices"]) == 1
            await busy

    @ROUTES
    async def test_a_long_body_is_too_large(self, route: str) -> None:
        async with service(max_body_bytes=2000) as caller:
            await caller.openai(route, body_for(route, prompt="x" * 3000), status=413)

    @ROUTES
    async def test_a_wait_beyond_the_settings_is_timed_out(self, route: str) -> None:
        async with service(queue_timeout_s=0.1, batch_size=1, fake_config={"step_ms": 30}) as caller:
            busy = asyncio.create_task(caller.generate(prompt="busy", max_tokens=20))
            await caller.wait_until_admitted(1)
            await caller.wait_for_metric("batchserve_queue_requests", 0)
            for stream in (False, True):
                error = await caller.openai(route, body_for(route, stream=stream), status=504)
                assert error["code"] == "queue_timeout"
            await busy


# --- doors ---


class TestDoors:
    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake-model"])
    async def test_a_key_is_asked_for_on_models(self, path: str) -> None:
        async with service(api_key=("secret",)) as caller:
            assert (await caller.get(path)).status_code == 401
            assert (await caller.get(path, headers={"authorization": "Bearer secret"})).status_code == 200

    @ROUTES
    async def test_a_key_is_asked_for(self, route: str) -> None:
        async with service(api_key=("secret",)) as caller:
            error = await caller.openai(route, body_for(route), status=401)
            assert error["code"] == "invalid_api_key"
            headers = {"authorization": "Bearer secret"}
            response = await caller.call("POST", f"/v1/{route}", json=body_for(route), headers=headers)
            assert response.status_code == 200

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("GET", "/v1/completions", "POST"),
            ("GET", "/v1/chat/completions", "POST"),
            ("POST", "/v1/models", "GET"),
            ("DELETE", "/v1/models/fake-model", "GET"),
            ("PUT", "/v1/completions", "POST"),
        ],
    )
    async def test_another_method_is_told_the_right_one(
        self, caller: Caller, method: str, path: str, allow: str
    ) -> None:
        response = await caller.call(method, path)
        assert response.status_code == 405
        assert allow in response.headers["allow"]

    @pytest.mark.parametrize(
        "path", ["/v1", "/v1/", "/v1/completion", "/v1/chat", "/v1/embeddings", "/v1/chat/completions/x"]
    )
    async def test_another_path_is_not_found(self, caller: Caller, path: str) -> None:
        response = await caller.call("POST", path, json={})
        assert check_error(response)["code"] == "not_found"

    @ROUTES
    async def test_work_is_refused_while_the_model_loads(self, route: str) -> None:
        app = create_app(fake_settings(fake_config={"open_s": 30}))
        async with running(app, is_awaited=False) as caller:
            for stream in (False, True):
                error = await caller.openai(route, body_for(route, stream=stream), status=503)
                assert error["code"] == "not_ready"

    @ROUTES
    async def test_work_is_refused_while_it_drains_and_accepted_work_ends(self, route: str, folder: Path) -> None:
        with serving(folder, {"step_ms": 20}) as process:
            async with process.caller() as caller, process.caller() as other:
                accepted = asyncio.create_task(
                    caller.call("POST", f"/v1/{route}", json=body_for(route, max_tokens=30, stream=True))
                )
                await other.wait_until_admitted(1)
                process.signal()
                await other.wait_for_status("/readyz", 503)
                error = await other.openai(route, body_for(route), status=503)
                assert error["code"] == "shutting_down"
                events, is_ended = events_of((await accepted).content)
                assert (len(events) > 0, is_ended) == (True, True)
            assert await process.ended() == 0

    @ROUTES
    async def test_a_dead_engine_is_told(self, route: str) -> None:
        async with service(fake_config={"faults": {"die_text": "die"}}) as caller:
            error = await caller.openai(route, body_for(route, prompt="die"), status=503)
            assert error["code"] == "engine_dead"


# --- fields that are ignored ---

HEADER_WORD = re.compile(r"[!-~]+(, [!-~]+)*")


class TestIgnoredFields:
    async def ignored(self, caller: Caller, route: str, **fields: Any) -> str | None:
        response = await caller.call("POST", f"/v1/{route}", json=body_for(route, **fields))
        assert response.status_code == 200, response.text
        named: str | None = response.headers.get("x-ignored-fields")
        return named

    @ROUTES
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_they_are_named(self, caller: Caller, route: str, stream: bool) -> None:
        assert await self.ignored(caller, route, zebra=1, user="me", ant=2, stream=stream) == "zebra, ant"

    @ROUTES
    async def test_without_any_there_is_no_header(self, caller: Caller, route: str) -> None:
        assert (
            await self.ignored(caller, route, user="me", metadata={"a": "b"}, store=True, service_tier="auto") is None
        )

    @ROUTES
    @pytest.mark.parametrize(
        "name",
        ["größe", "🐻", "a b", "a,b", "a\r\nset-cookie: x=1", "\x00", '"', "", " ", "%41", "\u202e", "x" * 10_000],
        ids=ascii,
    )
    async def test_odd_names_make_no_odd_header(self, caller: Caller, route: str, name: str) -> None:
        named = await self.ignored(caller, route, **{name: 1, "plain": 2})
        assert named is not None
        assert named.isascii()
        assert named.endswith("plain")
        assert len(named) < 1000
        if name:
            assert HEADER_WORD.fullmatch(named)

    @ROUTES
    async def test_thousands_of_them_make_no_long_header(self, caller: Caller, route: str) -> None:
        names = {f"{number}-" + "ü" * 200: 1 for number in range(5000)}
        named = await self.ignored(caller, route, **names)
        assert named is not None
        assert len(named.encode()) <= 16 << 10

    @ROUTES
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_odd_names_pass_a_real_server(self, remote: Caller, route: str, stream: bool) -> None:
        """It refuses what is no header, when the answer is made and nothing can be said any more."""
        for names in ([""], ["a", ""], ["", "a"], [" ", "\t"], ["\x00"], ["\r\n"], ["é"], [","]):
            await self.ignored(remote, route, stream=stream, **dict.fromkeys(names, 1))

    async def test_thousands_of_them_pass_a_real_server(self, remote: Caller) -> None:
        names = {f"{number}-" + "ü" * 200: 1 for number in range(5000)}
        assert await self.ignored(remote, "completions", **names)


# --- callers that go away; over real sockets ---


class TestCallersThatGo:
    @ROUTES
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_what_they_left_in_the_queue_is_dropped(self, route: str, stream: bool, folder: Path) -> None:
        with serving(folder, {"step_ms": 20}, batch_size=1) as process:
            async with process.caller() as caller:
                busy = asyncio.create_task(caller.generate(prompt="busy", max_tokens=30))
                await caller.wait_until_admitted(1)
                await caller.wait_for_metric("batchserve_queue_requests", 0)
                async with await process.connect() as connection:
                    prompt: Any = ["x"] * 5 if route == "completions" else "x"
                    await connection.post(f"/v1/{route}", body_for(route, prompt=prompt, stream=stream))
                    await caller.wait_for_metric("batchserve_queue_requests", 5 if route == "completions" else 1)
                    await connection.hang_up()
                    await caller.wait_for_metric("batchserve_queue_requests", 0)
                assert not busy.done()
                await busy
                await asyncio.sleep(0.05)
                assert await caller.metric("batchserve_window_size_sum") == 1
                assert await caller.metric("batchserve_queue_tokens") == 0

    async def test_one_who_goes_behind_the_head_of_a_stream_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sse, "QUIET_S", 0.02)
        async with service(fake_config={"step_ms": 20}, batch_size=1) as caller:
            busy = asyncio.create_task(caller.generate(prompt="busy", max_tokens=30))
            await caller.wait_until_admitted(1)
            await caller.wait_for_metric("batchserve_queue_requests", 0)
            stream = asyncio.create_task(
                caller.call("POST", "/v1/completions", json={"prompt": ["a", "b"], "stream": True})
            )
            await caller.wait_for_metric("batchserve_queue_requests", 2)
            await asyncio.sleep(0.1)
            stream.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stream
            await caller.wait_for_metric("batchserve_queue_requests", 0)
            assert not busy.done()
            await busy


async def test_a_hundred_at_once_each_get_their_own(remote: Caller) -> None:
    async def one(number: int) -> None:
        prompt, is_streamed = f"prompt {number}; ", number % 2 == 0
        body: Json = {"prompt": prompt, "max_tokens": 24}
        if is_streamed:
            (event,) = await remote.events("completions", body)
            text = event["choices"][0]["text"]
        else:
            (text,) = texts_of(await remote.openai("completions", body))
        assert text == fake_text(prompt, 24)

    await asyncio.gather(*(one(number) for number in range(100)))


async def test_an_answer_is_compressed_nowhere_and_of_the_length_it_says(remote: Caller) -> None:
    response: httpx.Response = await remote.call("POST", "/v1/completions", json={"prompt": "x"})
    assert int(response.headers["content-length"]) == len(response.content)
