"""Every route, every status, one error shape: DESIGN's contract without sockets."""

import asyncio
import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.schemas import Health, Info
from app.main import create_app
from tests.service.support import (
    STATUS_OF,
    Caller,
    Json,
    check_error,
    fake_settings,
    fake_text,
    running,
    service,
    strict_json,
    text_of,
)

ROUTES = {
    "/generate": "POST",
    "/batch": "POST",
    "/livez": "GET",
    "/readyz": "GET",
    "/health": "GET",
    "/info": "GET",
    "/metrics": "GET",
    "/openapi.json": "GET",
    "/docs": "GET",
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
WRONG = [(path, method) for path, right in ROUTES.items() for method in METHODS if method != right]


class TestGenerate:
    async def test_it_answers_with_text_usage_settings_timings_and_window(self, caller: Caller) -> None:
        before = time.time()
        body = await caller.generate(prompt="hello ", max_tokens=9, temperature=0, request_id="mine")
        assert text_of(body) == "HELLO HEL"
        assert body["id"].startswith("gen-")
        assert (body["request_id"], body["model"]) == ("mine", "fake-model")
        assert int(before) <= body["created"] <= time.time()
        assert body["outputs"][0]["finish_reason"] == "length"
        assert body["outputs"][0]["token_ids"] is None
        assert body["outputs"][0]["logprobs"] is None
        assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16, "cached_tokens": 0}
        assert body["sampling"]["max_tokens"] == 9
        assert body["sampling"]["temperature"] == 0
        assert body["window"]["size"] == 1
        assert body["window"]["release"] == "max_wait"
        assert before - 0.01 <= body["timings"]["received_at"] <= body["timings"]["completed_at"] <= time.time() + 0.01

    @pytest.mark.parametrize(
        ("form", "text"),
        [
            ({"prompt": "abc"}, "ABC"),
            ({"prompt_token_ids": [104, 105, 33]}, "HI!"),
            ({"messages": [{"role": "user", "content": "abc"}]}, "<USER>ABC\n<ASSISTANT>"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}, "<USER>ABC\n<ASSISTANT>"),
            (
                {"columns": {"prefix_column": ["be brief"], "text_column": ["a", "bc"]}},
                "<SYSTEM>BE BRIEF\n<USER>ABC\n<ASSISTANT>",
            ),
        ],
    )
    async def test_each_form_of_a_prompt_is_taken(self, caller: Caller, form: Json, text: str) -> None:
        assert text_of(await caller.generate(**form, max_tokens=len(text))) == text

    async def test_plain_joins_the_texts_and_uses_no_template(self) -> None:
        async with service(request_format="plain") as caller:
            messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
            assert text_of(await caller.generate(messages=messages, max_tokens=7)) == "ONE TWO"

    async def test_without_max_tokens_the_setting_says_how_many(self) -> None:
        async with service(default_max_tokens=11) as caller:
            assert (await caller.generate(prompt="x"))["usage"]["completion_tokens"] == 11

    async def test_generation_ends_at_the_context_with_length(self) -> None:
        async with service(fake_config={"max_model_len": 64}) as caller:
            body = await caller.generate(prompt="x" * 59, max_tokens=500)
            assert body["usage"] | {"cached_tokens": 0} == {
                "prompt_tokens": 60,
                "completion_tokens": 4,
                "total_tokens": 64,
                "cached_tokens": 0,
            }
            assert body["outputs"][0]["finish_reason"] == "length"
            assert body["sampling"]["max_tokens"] == 4

    async def test_a_prompt_that_leaves_room_for_exactly_one_token_is_served(self) -> None:
        async with service(fake_config={"max_model_len": 64}) as caller:
            assert (await caller.generate(prompt="x" * 62))["usage"]["completion_tokens"] == 1
            error = await caller.generate(prompt="x" * 63, status=400)
            assert (error["code"], error["prompt_tokens"], error["limit"]) == ("context_length_exceeded", 64, 64)

    async def test_truncation_keeps_the_last_tokens(self, caller: Caller) -> None:
        body = await caller.generate(prompt="abcdef", truncate_prompt_tokens=2, max_tokens=2)
        assert (text_of(body), body["usage"]["prompt_tokens"]) == ("EF", 2)

    async def test_a_stop_string_ends_the_text_and_is_named(self, caller: Caller) -> None:
        output = (await caller.generate(prompt="abcde", stop=["D"], max_tokens=5))["outputs"][0]
        assert (output["text"], output["finish_reason"], output["stop_reason"]) == ("ABC", "stop", "D")

    async def test_several_outputs_are_indexed_and_all_counted(self, caller: Caller) -> None:
        body = await caller.generate(prompt="ab", n=3, max_tokens=4, temperature=1)
        assert len(body["outputs"]) == 3
        assert body["usage"]["completion_tokens"] == 12

    async def test_token_ids_and_logprobs_come_when_asked_for(self, caller: Caller) -> None:
        output = (await caller.generate(prompt="ab", max_tokens=2, return_token_ids=True, logprobs=1))["outputs"][0]
        assert output["token_ids"] == [65, 66]
        assert [entry["token_id"] for entry in output["logprobs"]] == [65, 66]

    async def test_one_token_has_no_inter_token_latency(self, caller: Caller) -> None:
        body = await caller.generate(prompt="ab", max_tokens=1)
        assert body["timings"]["itl_ms"] is None
        assert body["timings"]["tokens_per_s"] is None or body["timings"]["tokens_per_s"] > 0

    async def test_the_served_name_may_be_given_and_is_shown(self) -> None:
        async with service(served_model_name="public-name") as caller:
            assert (await caller.generate(prompt="x", model="public-name", max_tokens=1))["model"] == "public-name"
            error = await caller.generate(prompt="x", model="fake-model", status=404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")

    async def test_the_same_body_twice_gives_the_same_result(self, caller: Caller) -> None:
        body = {"prompt": "same", "max_tokens": 9, "temperature": 1, "seed": 7, "logit_bias": {"5": 1.5}, "stop": "Z"}
        first, second = await caller.generate(body), await caller.generate(body)
        for part in ("outputs", "usage", "sampling"):
            assert first[part] == second[part]
        assert first["sampling"]["seed"] == 7
        assert first["id"] != second["id"]

    async def test_two_requests_with_one_label_both_succeed(self, caller: Caller) -> None:
        bodies = [{"prompt": text, "max_tokens": 1, "request_id": "x"} for text in ("a", "b")]
        first, second = await asyncio.gather(*map(caller.generate, bodies))
        assert (text_of(first), text_of(second)) == ("A", "B")
        assert first["request_id"] == second["request_id"] == "x"
        assert first["id"] != second["id"]

    async def test_each_request_keeps_its_own_settings_within_a_window(self, caller: Caller) -> None:
        bodies = [{"prompt": "word", "max_tokens": count, "temperature": count % 2} for count in (1, 5, 9)]
        answers = await asyncio.gather(*map(caller.generate, bodies))
        assert [body["usage"]["completion_tokens"] for body in answers] == [1, 5, 9]
        assert [body["sampling"]["temperature"] for body in answers] == [1, 1, 1]
        assert len({body["window"]["id"] for body in answers}) == 1

    async def test_white_space_alone_is_a_prompt(self, caller: Caller) -> None:
        assert text_of(await caller.generate(prompt=" \n", max_tokens=2)) == " \n"

    async def test_any_unicode_goes_through(self, caller: Caller) -> None:
        prompt = "é日😀\u0000\u2028"
        body = await caller.generate(prompt=prompt, max_tokens=len(prompt.upper().encode()), request_id="日😀")
        assert text_of(body) == prompt.upper()
        assert body["request_id"] == "日😀"


class TestErrorShape:
    @pytest.mark.parametrize(("path", "method"), WRONG)
    async def test_a_wrong_method_is_405_and_names_the_right_one(self, caller: Caller, path: str, method: str) -> None:
        response = await caller.call(method, path)
        assert response.status_code == 405
        assert ROUTES[path] in response.headers["allow"]

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("path", ["/", "/generate/", "/Generate", "/v2/x", "/%00", "/x" * 3000, "/%22<b>é"])
    async def test_an_unknown_path_is_404_of_the_one_shape(self, caller: Caller, path: str, method: str) -> None:
        response = await caller.call(method, path)
        assert check_error(response)["code"] == "not_found"

    @pytest.mark.parametrize("path", ["/docs/assets/", "/docs/assets/none.js", "/docs/assets/../../../main.py"])
    async def test_a_file_that_is_not_there_is_404_of_the_one_shape(self, caller: Caller, path: str) -> None:
        assert check_error(await caller.get(path))["code"] == "not_found"

    async def test_a_wrong_method_on_a_file_is_405_with_allow(self, caller: Caller) -> None:
        response = await caller.call("POST", "/docs/assets/swagger-ui.css")
        assert check_error(response)["code"] == "method_not_allowed"
        assert "GET" in response.headers["allow"]

    async def test_a_fault_of_the_service_is_500_and_tells_no_details(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = create_app(fake_settings())

        def broken() -> Any:
            raise ValueError("the secret detail")

        monkeypatch.setattr(app.state.service.backend, "info", broken)
        async with running(app) as caller:
            before = await caller.metric("batchserve_errors_total", code="internal_error")
            response = await caller.get("/info", headers={"x-request-id": "abc"})
            assert check_error(response)["code"] == "internal_error"
            assert "secret" not in response.text
            assert response.headers["x-request-id"] == "abc"
            assert await caller.metric("batchserve_errors_total", code="internal_error") == before + 1

    async def test_a_compressed_body_is_refused_by_name(self, caller: Caller) -> None:
        response = await caller.call("POST", "/generate", content=b"x", headers={"content-encoding": "gzip"})
        error = check_error(response)
        assert error["code"] == "invalid_request"
        assert "gzip" in error["message"]

    async def test_error_bodies_stay_small_whatever_they_quote(self, caller: Caller) -> None:
        long = "\u0001é😀" * 100_000
        for body in (
            {"prompt": "x", long: 1},
            {"prompt": "x", "model": long},
            {"prompt": "x", "stop": [long]},
            {"messages": [{"role": "user", "content": "x", long: 1}]},
            {"prompt": "x", "logit_bias": {long: 1}},
            {"prompt": "x", "request_id": long},
        ):
            error = await caller.generate(body, status=404 if "model" in body else 400)
            assert error["message"]
            row = (await caller.batch([body]))["results"][0]
            assert row["status"] == STATUS_OF[error["code"]]

    async def test_an_unknown_field_names_the_nearest_known_one(self, caller: Caller) -> None:
        error = await caller.generate(prompt="x", max_token=5, status=400)
        assert error["param"] == "max_token"
        assert "max_tokens" in error["message"]


class TestTooLarge:
    async def test_a_body_over_the_limit_is_413_and_names_it(self) -> None:
        async with service(max_body_bytes=2000) as caller:
            assert (await caller.generate(prompt="x" * 2000, status=413))["limit"] == 2000
            assert (await caller.batch([{"prompt": "x" * 2000}], status=413))["limit"] == 2000
            assert text_of(await caller.generate(prompt="x" * 1000, max_tokens=1)) == "X"

    async def test_a_body_sent_in_pieces_is_held_to_the_limit_too(self) -> None:
        async def pieces() -> Any:
            for _ in range(30):
                yield b" " * 100

        async with service(max_body_bytes=2000) as caller:
            error = check_error(await caller.call("POST", "/generate", content=pieces()))
            assert (error["code"], error["limit"]) == ("request_too_large", 2000)

    async def test_more_outputs_than_an_empty_queue_has_places_is_413(self) -> None:
        async with service(max_queue_requests=4, max_batch_requests=4) as caller:
            error = await caller.generate(prompt="x", n=5, status=413)
            assert (error["code"], error["limit"]) == ("request_too_large", 4)
            assert (await caller.generate(prompt="x", n=4, max_tokens=1))["usage"]["completion_tokens"] == 4

    async def test_more_prompt_tokens_than_an_empty_queue_takes_is_413(self) -> None:
        async with service(max_queue_tokens=10) as caller:
            error = await caller.generate(prompt="x" * 10, status=413)
            assert (error["code"], error["limit"]) == ("request_too_large", 10)
            await caller.generate(prompt="x" * 9, max_tokens=1)


class TestOverload:
    """One window of one runs for half a second; what comes next waits."""

    settings: Json = {"batch_size": 1, "fake_config": {"step_ms": 10}}  # noqa: RUF012
    slow: Json = {"prompt": "slow", "max_tokens": 50}  # noqa: RUF012

    async def test_a_full_queue_is_429_with_depth_and_limit_and_costs_nothing(self) -> None:
        async with service(**self.settings, max_queue_requests=3, max_batch_requests=3) as caller:
            running_one = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            waiting = [asyncio.create_task(caller.generate(prompt="w", max_tokens=1)) for _ in range(3)]
            await caller.wait_for_metric("batchserve_queue_requests", 3)
            error = await caller.generate(prompt="late", status=429)
            assert (error["code"], error["queue_depth"], error["limit"]) == ("queue_full", 3, 3)
            assert await caller.metric("batchserve_queue_requests") == 3
            assert [text_of(body) for body in await asyncio.gather(*waiting)] == ["W"] * 3
            assert text_of(await running_one) == fake_text("slow", 50)
            assert await caller.metric("batchserve_errors_total", code="queue_full") == 1
            await caller.generate(prompt="late", max_tokens=1)

    async def test_a_queue_full_of_tokens_is_429_in_tokens(self) -> None:
        async with service(**self.settings, max_queue_tokens=20) as caller:
            running_one = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            waiting = asyncio.create_task(caller.generate(prompt="x" * 14, max_tokens=1))
            await caller.wait_for_metric("batchserve_queue_tokens", 15)
            error = await caller.generate(prompt="x" * 5, status=429)
            assert (error["code"], error["queue_depth"], error["limit"]) == ("queue_full", 15, 20)
            assert "token" in error["message"]
            await asyncio.gather(running_one, waiting)
            assert await caller.metric("batchserve_queue_tokens") == 0
            assert await caller.metric("batchserve_queue_requests") == 0

    async def test_outputs_count_as_places(self) -> None:
        async with service(**self.settings, max_queue_requests=5, max_batch_requests=5) as caller:
            running_one = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            waiting = asyncio.create_task(caller.generate(prompt="w", n=4, max_tokens=1))
            await caller.wait_for_metric("batchserve_queue_requests", 4)
            assert (await caller.generate(prompt="late", n=2, status=429))["queue_depth"] == 4
            fits = asyncio.create_task(caller.generate(prompt="fits", n=1, max_tokens=1))
            await asyncio.gather(running_one, waiting, fits)

    async def test_waiting_longer_than_the_callers_limit_is_504(self) -> None:
        async with service(**self.settings) as caller:
            running_one = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            error = await caller.generate(prompt="w", queue_timeout_s=0.05, status=504)
            assert error["code"] == "queue_timeout"
            assert not running_one.done()
            await running_one
            assert await caller.metric("batchserve_window_size_count") == 1
            assert await caller.metric("batchserve_errors_total", code="queue_timeout") == 1
            assert await caller.metric("batchserve_client_disconnected_total") == 0

    async def test_a_caller_may_shorten_the_services_limit_and_not_lengthen_it(self) -> None:
        async with service(**self.settings, queue_timeout_s=0.05) as caller:
            running_one = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            assert (await caller.generate(prompt="w", status=504))["code"] == "queue_timeout"
            response = await caller.call("POST", "/generate", json={"prompt": "w", "queue_timeout_s": 60})
            assert response.status_code in (400, 504)
            await running_one

    async def test_not_being_done_in_time_is_504_while_waiting_and_while_running(self) -> None:
        async with service(**self.settings) as caller:
            running_one = asyncio.create_task(caller.generate(**self.slow, request_timeout_s=0.1, status=504))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            waiting = asyncio.create_task(caller.generate(prompt="w", request_timeout_s=0.1, status=504))
            errors = await asyncio.gather(running_one, waiting)
            assert [error["code"] for error in errors] == ["request_timeout"] * 2
            assert text_of(await caller.generate(prompt="next", max_tokens=4)) == "NEXT"
            assert await caller.metric("batchserve_errors_total", code="request_timeout") == 2
            assert await caller.metric("batchserve_client_disconnected_total") == 0

    async def test_a_caller_may_shorten_the_services_time_and_not_lengthen_it(self) -> None:
        async with service(**self.settings, request_timeout_s=0.1) as caller:
            for body in (self.slow, {**self.slow, "request_timeout_s": 60}):
                assert (await caller.generate(body, status=504))["code"] == "request_timeout"

    async def test_openais_routes_have_the_services_time(self) -> None:
        async with service(**self.settings, request_timeout_s=0.1) as caller:
            response = await caller.call("POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 50})
            assert check_error(response)["code"] == "request_timeout"

    async def test_the_limit_is_for_waiting_not_for_running(self) -> None:
        async with service(**self.settings) as caller:
            assert text_of(await caller.generate(**self.slow, queue_timeout_s=0.1)) == fake_text("slow", 50)


class TestBeforeReady:
    async def test_work_is_refused_with_not_ready_and_state_routes_answer(self) -> None:
        async with running(create_app(fake_settings(fake_config={"open_s": 0.4})), is_awaited=False) as caller:
            for path in ("/readyz", "/health"):
                response = await caller.get(path)
                assert check_error(response)["code"] == "not_ready"
            assert (await caller.generate(prompt="x", status=503))["code"] == "not_ready"
            assert (await caller.batch([{"prompt": "x"}], status=503))["code"] == "not_ready"
            for path in ("/livez", "/info", "/metrics", "/openapi.json", "/docs"):
                assert (await caller.get(path)).status_code == 200
            assert strict_json((await caller.get("/livez")).content)["status"] == "loading"
            await caller.wait_ready()
            assert text_of(await caller.generate(prompt="x", max_tokens=1)) == "X"

    async def test_a_batch_whose_rows_are_all_wrong_is_refused_too(self) -> None:
        async with running(create_app(fake_settings(fake_config={"open_s": 0.3})), is_awaited=False) as caller:
            assert (await caller.batch([{"prompt": ""}], status=503))["code"] == "not_ready"


class TestState:
    async def test_health_routes_validate(self, caller: Caller) -> None:
        for path in ("/livez", "/readyz", "/health"):
            response = await caller.get(path)
            assert response.status_code == 200
            assert Health.model_validate(strict_json(response.content), strict=True).status == "ready"

    async def test_info_shows_what_runs_here(self) -> None:
        async with service(max_queue_requests=5000, served_model_name="shown") as caller:
            body = strict_json((await caller.get("/info")).content)
            info = Info.model_validate(body, strict=True)
            assert (info.model, info.state) == ("shown", "ready")
            assert info.backend["kind"] == "fake"
            assert info.limits["max_queue_requests"] == 5000
            assert info.limits["max_model_len"] == 2048
            assert info.limits["batch_size"] == 8
            assert info.settings["max_wait_ms"] == 5
            assert info.versions["batchserve"] == info.version

    async def test_info_and_openapi_tell_no_key(self) -> None:
        async with service(api_key=("sk-tellnoone-1", "sk-tellnoone-2")) as caller:
            for path in ("/info", "/openapi.json", "/metrics", "/docs"):
                response = await caller.get(path, headers={"authorization": "Bearer sk-tellnoone-2"})
                assert response.status_code == 200
                assert "tellnoone" not in response.text


class TestMetrics:
    async def test_the_promised_names_are_there_from_the_start(self, caller: Caller) -> None:
        text = (await caller.get("/metrics")).text
        families = {family.name for family in text_string_to_metric_families(text)}
        for name in (
            "queue_requests",
            "queue_tokens",
            "window_size",
            "window_fill_ratio",
            "window_releases",
            "window_wait_seconds",
            "ttft_seconds",
            "e2e_seconds",
            "tokens",
            "errors",
            "client_disconnected",
        ):
            assert f"batchserve_{name}" in families
        assert "process_resident_memory_bytes" in families
        for reason in ("full", "max_wait", "drain"):
            assert f'batchserve_window_releases_total{{reason="{reason}"}} 0.0' in text
        assert "batchserve_client_disconnected_total 0.0" in text

    async def test_no_family_is_there_twice(self, caller: Caller) -> None:
        text = (await caller.get("/metrics")).text
        names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(set(names)) == len(names)

    async def test_counters_move_with_what_happens(self, caller: Caller) -> None:
        await caller.generate(prompt="abc", max_tokens=5)
        await caller.batch([{"prompt": "abcd", "max_tokens": 2}] * 8 + [{"prompt": ""}])
        await caller.generate(prompt="", status=400)
        await caller.get("/nowhere")
        await caller.call("GET", "/generate")
        assert await caller.metric("batchserve_tokens_total", kind="prompt") == 4 + 8 * 5
        assert await caller.metric("batchserve_tokens_total", kind="completion") == 5 + 8 * 2
        assert await caller.metric("batchserve_window_size_count") == 2
        assert await caller.metric("batchserve_window_size_sum") == 9
        assert await caller.metric("batchserve_window_fill_ratio_sum") == 1 + 1 / 8
        assert await caller.metric("batchserve_window_releases_total", reason="max_wait") == 1
        assert await caller.metric("batchserve_window_releases_total", reason="full") == 1
        assert await caller.metric("batchserve_window_wait_seconds_count") == 9
        assert await caller.metric("batchserve_ttft_seconds_count") == 9
        assert await caller.metric("batchserve_e2e_seconds_count") == 9
        assert await caller.metric("batchserve_errors_total", code="invalid_request") == 2
        assert await caller.metric("batchserve_errors_total", code="not_found") == 1
        assert await caller.metric("batchserve_errors_total", code="method_not_allowed") == 1
        assert await caller.metric("batchserve_client_disconnected_total") == 0

    async def test_a_scrape_within_a_window_shows_who_waits(self) -> None:
        async with service(batch_size=1, fake_config={"step_ms": 10}) as caller:
            tasks = [asyncio.create_task(caller.generate(prompt="ab", n=2, max_tokens=10)) for _ in range(4)]
            await caller.wait_for_metric("batchserve_queue_requests", 6)
            assert await caller.metric("batchserve_queue_tokens") == 9
            await asyncio.gather(*tasks)
            assert await caller.metric("batchserve_queue_requests") == 0
            assert await caller.metric("batchserve_queue_tokens") == 0


class TestRequestId:
    @pytest.mark.parametrize("path", ["/livez", "/info", "/nowhere", "/generate", "/docs/assets/swagger-ui.css"])
    async def test_a_sane_one_is_taken_on_answers_and_errors(self, caller: Caller, path: str) -> None:
        response = await caller.get(path, headers={"x-request-id": "My.id_1:2/3+4=5@6-7"})
        assert response.headers["x-request-id"] == "My.id_1:2/3+4=5@6-7"

    @pytest.mark.parametrize("given", ["", " ", "a b", "x" * 129, "é", 'a"b', "a;b", "a\\nb", "<script>"])
    async def test_another_is_replaced(self, caller: Caller, given: str) -> None:
        response = await caller.get("/livez", headers=[(b"x-request-id", given.encode())])
        made = response.headers["x-request-id"]
        assert made != given
        assert re.fullmatch(r"[A-Za-z0-9-]{16,64}", made)

    async def test_made_ones_are_unique_even_when_random_is_seeded(self, caller: Caller) -> None:
        import random

        seen = set()
        for _ in range(20):
            random.seed(0)
            seen.add((await caller.get("/livez")).headers["x-request-id"])
            seen.add((await caller.generate(prompt="x", max_tokens=1))["id"])
        assert len(seen) == 40

    async def test_an_ndjson_answer_carries_it(self, caller: Caller) -> None:
        headers = {"accept": "application/x-ndjson", "x-request-id": "stream-1"}
        response = await caller.call("POST", "/batch", json={"requests": [{"prompt": "x"}]}, headers=headers)
        assert response.headers["x-request-id"] == "stream-1"


class TestOpenApi:
    @pytest.fixture
    async def document(self, caller: Caller) -> Json:
        document: Json = strict_json((await caller.get("/openapi.json")).content)
        return document

    async def test_it_names_every_route_and_no_422(self, document: Json, caller: Caller) -> None:
        assert set(ROUTES) - {"/openapi.json", "/docs"} <= document["paths"].keys()
        assert "422" not in (await caller.get("/openapi.json")).text
        assert "HTTPValidationError" not in document["components"]["schemas"]

    async def test_every_documented_error_has_the_one_shape(self, document: Json) -> None:
        for path, methods in document["paths"].items():
            for operation in methods.values():
                for status, response in operation["responses"].items():
                    if int(status) >= 400:
                        schema = response["content"]["application/json"]["schema"]
                        assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)

    @pytest.mark.parametrize(
        ("path", "statuses"),
        [
            ("/generate", {"200", "400", "401", "404", "413", "429", "500", "503", "504"}),
            ("/batch", {"200", "400", "401", "413", "429", "500", "503"}),  # all else is a row's
        ],
    )
    async def test_work_routes_document_each_status(self, document: Json, path: str, statuses: set[str]) -> None:
        assert document["paths"][path]["post"]["responses"].keys() == statuses

    async def test_batch_items_are_typed_as_the_generate_body(self, document: Json) -> None:
        schemas = document["components"]["schemas"]
        reference = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        batch = document["paths"]["/batch"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schemas[batch["$ref"].rsplit("/", 1)[1]]["properties"]["requests"]["items"] == reference

    async def test_window_and_position_may_be_null(self, document: Json) -> None:
        schemas = document["components"]["schemas"]
        assert {"type": "null"} in schemas["GenerateResponse"]["properties"]["window"]["anyOf"]
        assert {"type": "null"} in schemas["WindowInfo"]["properties"]["position"]["anyOf"]

    async def test_every_reference_leads_somewhere(self, document: Json) -> None:
        for name in set(re.findall(r'"#/components/schemas/([^"]+)"', httpx.Response(200, json=document).text)):
            assert name in document["components"]["schemas"]


class TestDocs:
    async def test_the_page_asks_nothing_of_the_internet_and_its_assets_are_here(self, caller: Caller) -> None:
        page = await caller.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        sources = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(sources) >= 2
        assert "//" not in re.sub(r"^\s*//.*$", "", page.text, flags=re.MULTILINE).replace("<!DOCTYPE", "")
        for source in sources:
            response = await caller.get(source)
            assert response.status_code == 200
            assert response.content
