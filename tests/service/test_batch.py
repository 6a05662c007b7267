"""`POST /batch`: order, windows, defaults, isolation of rows, limits, and rows one a line as they finish."""

import asyncio
import time

import pytest

from app.api import batch as batch_route
from tests.service.support import Caller, Json, check_error, check_row, fake_text, service, strict_json, text_of

NDJSON = "application/x-ndjson"


def rows(count: int, **fields: object) -> list[Json]:
    """Rows that can be told apart by their texts."""
    return [{"prompt": f"row{index};", "max_tokens": len(f"row{index};"), **fields} for index in range(count)]


def texts(answer: Json) -> list[str]:
    """The texts of a batch whose rows have all succeeded."""
    return [text_of(row["response"]) for row in answer["results"]]


class TestAnswer:
    async def test_rows_come_in_input_order_over_as_many_windows_as_it_takes(self, caller: Caller) -> None:
        answer = await caller.batch(rows(50), request_id="mine")
        assert texts(answer) == [f"ROW{index};" for index in range(50)]
        assert answer["id"].startswith("batch-")
        assert (answer["request_id"], answer["model"]) == ("mine", "fake-model")
        assert answer["counts"] == {"total": 50, "succeeded": 50, "failed": 0}
        assert [window["size"] for window in answer["windows"]] == [8] * 6 + [2]
        assert [window["release"] for window in answer["windows"]] == ["full"] * 6 + ["max_wait"]
        positions = [row["response"]["window"]["position"] for row in answer["results"]]
        assert positions == [index % 8 for index in range(50)]

    async def test_its_times_cover_those_of_its_rows(self, caller: Caller) -> None:
        before = time.time()
        answer = await caller.batch(rows(20))
        times = answer["timings"]
        assert before - 0.01 <= times["received_at"] <= times["completed_at"] <= time.time() + 0.01
        for row in answer["results"]:
            own = row["response"]["timings"]
            assert own["received_at"] >= times["received_at"] - 0.001
            assert own["completed_at"] <= times["completed_at"] + 0.001
        assert times["completion_tokens_per_s"] == pytest.approx(
            times["completion_tokens"] / times["e2e_ms"] * 1000, rel=1e-6
        )

    async def test_defaults_are_for_all_and_an_items_own_win(self, caller: Caller) -> None:
        answer = await caller.batch(
            [{"prompt": "abcdef"}, {"prompt": "abcdef", "max_tokens": 5}, {"prompt": "abcdef", "stop": []}],
            defaults={"max_tokens": 3, "stop": ["B"], "temperature": 0, "return_token_ids": True},
        )
        assert texts(answer) == ["A", "A", "ABC"]
        assert [row["response"]["sampling"]["max_tokens"] for row in answer["results"]] == [3, 5, 3]
        assert all(row["response"]["sampling"]["temperature"] == 0 for row in answer["results"])
        assert all(row["response"]["outputs"][0]["token_ids"] for row in answer["results"])

    @pytest.mark.parametrize("defaults", [None, {}])
    async def test_no_defaults_are_none(self, caller: Caller, defaults: Json | None) -> None:
        assert texts(await caller.batch(rows(2), defaults=defaults)) == ["ROW0;", "ROW1;"]

    async def test_each_row_echoes_its_own_label(self, caller: Caller) -> None:
        labelled = [{**row, "request_id": "same"} for row in rows(2)]
        answer = await caller.batch([*labelled, *rows(1)])
        responses = [row["response"] for row in answer["results"]]
        assert [response["request_id"] for response in responses] == ["same", "same", None]
        assert len({response["id"] for response in responses}) == 3

    async def test_a_batch_shares_its_windows_with_other_callers(self) -> None:
        async with service(max_wait_ms=200) as caller:
            answers = await asyncio.gather(
                caller.batch(rows(5)), caller.batch(rows(2)), caller.generate(prompt="alone", max_tokens=5)
            )
            windows = [answers[0]["windows"], answers[1]["windows"], [answers[2]["window"]]]
            assert all(len(shown) == 1 for shown in windows)
            assert {shown[0]["id"] for shown in windows} == {windows[0][0]["id"]}
            assert windows[0][0] == {"id": windows[0][0]["id"], "size": 8, "release": "full"}
            assert texts(answers[0]) == [f"ROW{index};" for index in range(5)]
            assert text_of(answers[2]) == "ALONE"

    async def test_more_rows_than_a_window_never_wait_for_one_that_holds_them(self) -> None:
        async with service(batch_size=64) as caller:
            answer = await caller.batch(rows(100))
            assert sorted(window["size"] for window in answer["windows"]) == [36, 64]

    async def test_the_largest_batch_is_taken(self, caller: Caller) -> None:
        answer = await caller.batch([{"prompt": "x", "max_tokens": 1}] * 4096)
        assert answer["counts"]["succeeded"] == 4096


class TestRows:
    async def test_each_wrong_row_carries_its_own_error(self, caller: Caller) -> None:
        good = {"prompt": "ok", "max_tokens": 2}
        answer = await caller.batch([good, {"prompt": ""}, good, {**good, "model": "no"}, {**good, "tempratur": 0}])
        assert [row["status"] for row in answer["results"]] == [200, 400, 200, 404, 400]
        assert [row["error"] and row["error"]["code"] for row in answer["results"]] == [
            None,
            "invalid_request",
            None,
            "model_not_found",
            "invalid_request",
        ]
        assert answer["results"][4]["error"]["param"] == "tempratur"
        assert "temperature" in answer["results"][4]["error"]["message"]
        assert answer["counts"] == {"total": 5, "succeeded": 2, "failed": 3}

    async def test_errors_of_rows_are_counted(self, caller: Caller) -> None:
        await caller.batch([{"prompt": ""}] * 3)
        assert await caller.metric("batchserve_errors_total", code="invalid_request") == 3

    async def test_what_an_item_makes_of_the_defaults_is_its_own_fault(self, caller: Caller) -> None:
        answer = await caller.batch(
            [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}], defaults={"max_tokens": 9, "min_tokens": 5}
        )
        assert [row["status"] for row in answer["results"]] == [200, 400]
        assert answer["results"][1]["error"]["param"] == "min_tokens"

    async def test_a_failing_row_is_500_and_the_others_get_their_texts(self) -> None:
        async with service(fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
            wanted = rows(8)
            wanted[3] = {"prompt": "BOOM", "max_tokens": 4}
            answer = await caller.batch(wanted)
            assert [row["status"] for row in answer["results"]] == [200] * 3 + [500] + [200] * 4
            assert answer["results"][3]["error"]["code"] == "generation_failed"
            for index in (0, 1, 2, 4, 5, 6, 7):
                assert text_of(answer["results"][index]["response"]) == f"ROW{index};"

    async def test_a_row_that_waited_too_long_is_504_and_the_rest_goes_on(self) -> None:
        async with service(batch_size=2, fake_config={"step_ms": 20}) as caller:
            wanted = rows(6)
            wanted[5]["queue_timeout_s"] = 0.02
            answer = await caller.batch(wanted)
            assert [row["status"] for row in answer["results"]] == [200] * 5 + [504]
            assert answer["results"][5]["error"]["code"] == "queue_timeout"


class TestAdmission:
    """Whole or not at all."""

    slow: Json = {"prompt": "slow", "max_tokens": 50}  # noqa: RUF012

    async def test_a_batch_of_n_needs_n_places_and_is_refused_whole(self) -> None:
        async with service(
            batch_size=1, max_queue_requests=10, max_batch_requests=10, fake_config={"step_ms": 10}
        ) as caller:
            running = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            waiting = asyncio.create_task(caller.batch([{"prompt": "w", "max_tokens": 1}] * 6))
            await caller.wait_for_metric("batchserve_queue_requests", 6)
            error = await caller.batch([{"prompt": "late", "max_tokens": 1}] * 5, status=429)
            assert (error["code"], error["queue_depth"], error["limit"]) == ("queue_full", 6, 10)
            assert await caller.metric("batchserve_queue_requests") == 6
            fits = asyncio.create_task(caller.batch([{"prompt": "f", "max_tokens": 1}] * 4))
            answers = await asyncio.gather(running, waiting, fits)
            assert texts(answers[1]) == ["W"] * 6
            assert texts(answers[2]) == ["F"] * 4

    async def test_outputs_of_its_rows_count(self) -> None:
        async with service(max_queue_requests=10, max_batch_requests=10) as caller:
            error = await caller.batch([{"prompt": "x", "n": 6}, {"prompt": "x", "n": 5}], status=413)
            assert (error["code"], error["limit"]) == ("request_too_large", 10)
            answer = await caller.batch([{"prompt": "x", "n": 5, "max_tokens": 1}] * 2)
            assert [len(row["response"]["outputs"]) for row in answer["results"]] == [5, 5]

    async def test_wrong_rows_take_no_places(self) -> None:
        async with service(max_queue_requests=10, max_batch_requests=10) as caller:
            answer = await caller.batch([{"prompt": "x", "n": 10, "max_tokens": 1}] + [{"prompt": "", "n": 10}] * 9)
            assert answer["counts"] == {"total": 10, "succeeded": 1, "failed": 9}

    async def test_more_rows_than_the_setting_are_413(self) -> None:
        async with service(max_batch_requests=3) as caller:
            assert (await caller.batch(rows(4), status=413))["limit"] == 3
            assert texts(await caller.batch(rows(3))) == ["ROW0;", "ROW1;", "ROW2;"]

    async def test_more_prompt_tokens_than_an_empty_queue_takes_are_413(self) -> None:
        async with service(max_queue_tokens=100) as caller:
            error = await caller.batch([{"prompt": "x" * 50}] * 2, status=413)
            assert (error["code"], error["limit"]) == ("request_too_large", 100)
            assert await caller.metric("batchserve_queue_requests") == 0
            assert await caller.metric("batchserve_queue_tokens") == 0
            assert await caller.metric("batchserve_window_size_count") == 0

    async def test_more_prompt_tokens_than_there_is_room_for_now_are_429(self) -> None:
        async with service(batch_size=1, max_queue_tokens=100, fake_config={"step_ms": 10}) as caller:
            running = asyncio.create_task(caller.generate(self.slow))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            waiting = asyncio.create_task(caller.generate(prompt="x" * 59, max_tokens=1))
            await caller.wait_for_metric("batchserve_queue_tokens", 60)
            error = await caller.batch([{"prompt": "x" * 20}] * 2, status=429)
            assert (error["queue_depth"], error["limit"]) == (60, 100)
            await asyncio.gather(running, waiting)


class TestLines:
    async def test_rows_come_as_they_finish_and_the_rest_comes_last(self) -> None:
        async with service(batch_size=2, fake_config={"step_ms": 1}) as caller:
            wanted = [*rows(5), {"prompt": ""}]
            wanted[0]["priority"] = wanted[1]["priority"] = 50
            lines = await caller.lines(wanted, request_id="mine")
            *got, rest = filter(None, lines)
            for row in got:
                check_row(row)
            assert sorted(row["index"] for row in got) == list(range(6))
            assert got[0]["index"] == 5
            assert got[0]["status"] == 400
            assert "results" not in rest
            assert rest.keys() == {"id", "request_id", "model", "created", "counts", "windows", "timings"}
            assert rest["request_id"] == "mine"
            assert rest["counts"] == {"total": 6, "succeeded": 5, "failed": 1}
            by_index = {row["index"]: row for row in got}
            assert [text_of(by_index[index]["response"]) for index in range(5)] == [f"ROW{i};" for i in range(5)]
            assert {window["id"] for window in rest["windows"]} == {
                by_index[index]["response"]["window"]["id"] for index in range(5)
            }

    async def test_the_one_in_front_does_not_hold_the_others_back(self) -> None:
        async with service(batch_size=2, fake_config={"step_ms": 1}) as caller:
            wanted = [{**row, "priority": -index} for index, row in enumerate(rows(6))]
            order = [line["index"] for line in filter(None, await caller.lines(wanted)) if "index" in line]
            assert sorted(order) == list(range(6))
            assert set(order[:2]) == {0, 5}
            assert set(order[2:4]) == {1, 4}

    async def test_an_empty_line_comes_after_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_route, "QUIET_S", 0.05)
        async with service(fake_config={"step_ms": 30}) as caller:
            lines = await caller.lines([{"prompt": "x", "max_tokens": 10}])
            assert lines[:2] == [None, None]
            assert 3 <= lines.count(None) <= 8
            row, rest = filter(None, lines)
            check_row(row)
            assert rest["counts"] == {"total": 1, "succeeded": 1, "failed": 0}

    @pytest.mark.parametrize(
        "accept",
        [NDJSON, f"{NDJSON}; q=1", f"application/json;q=0.5, {NDJSON}", NDJSON.upper(), f"{NDJSON}, */*"],
    )
    async def test_it_is_given_to_who_accepts_it(self, caller: Caller, accept: str) -> None:
        response = await caller.call("POST", "/batch", json={"requests": rows(2)}, headers={"accept": accept})
        assert response.headers["content-type"].startswith(NDJSON)
        assert len(response.text.splitlines()) == 3

    @pytest.mark.parametrize(
        "accept",
        [
            "application/json",
            "*/*",
            "text/html,*/*;q=0.1",
            "",
            "application/ndjson",
            f"application/json, {NDJSON}",
            f"{NDJSON};q=0.5, */*;q=1",
            f"{NDJSON};q=0.1, application/*",
            f"{NDJSON};q=0",
        ],
    )
    async def test_others_get_json(self, caller: Caller, accept: str) -> None:
        response = await caller.call("POST", "/batch", json={"requests": rows(2)}, headers={"accept": accept})
        assert response.headers["content-type"].startswith("application/json")
        assert len(strict_json(response.content)["results"]) == 2

    async def test_a_refusal_is_one_json_error(self, caller: Caller) -> None:
        for body, code in (({"requests": []}, "invalid_request"), ({"requests": rows(5000)}, "request_too_large")):
            response = await caller.call("POST", "/batch", json=body, headers={"accept": NDJSON})
            assert check_error(response)["code"] == code

    async def test_a_failing_row_is_a_line_with_its_error(self) -> None:
        async with service(fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
            *got, rest = filter(None, await caller.lines([*rows(2), {"prompt": "BOOM"}]))
            for row in got:
                check_row(row)
            assert sorted(row["status"] for row in got) == [200, 200, 500]
            assert rest["counts"] == {"total": 3, "succeeded": 2, "failed": 1}

    async def test_rows_arrive_while_others_still_run(self, remote: Caller) -> None:
        """Over real sockets: the first line is there long before the last window has run."""
        wanted = [{"prompt": "x", "max_tokens": 50} for _ in range(24)]
        arrived = []
        started = time.monotonic()
        options: Json = {"json": {"requests": wanted}, "headers": {"accept": NDJSON}}
        async with remote.http.stream("POST", "/batch", **options) as response:
            async for line in response.aiter_lines():
                strict_json(line)
                arrived.append(time.monotonic() - started)
        assert len(arrived) == 25
        assert arrived[0] < arrived[-1] / 2


class TestIsolationThroughHttp:
    @pytest.mark.parametrize("position", [0, 3, 7])
    async def test_the_culprit_gets_500_and_each_neighbour_its_own_text(self, position: int) -> None:
        async with service(max_wait_ms=200, fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
            prompts = [f"caller{index};" for index in range(8)]
            prompts[position] = "BOOM"
            calls = [
                caller.generate(prompt=prompt, max_tokens=len(prompt), status=500 if prompt == "BOOM" else 200)
                for prompt in prompts
            ]
            answers = await asyncio.gather(*calls)
            assert answers[position]["code"] == "generation_failed"
            assert [text_of(answer) for answer in answers if "outputs" in answer] == [
                prompt.upper() for prompt in prompts if prompt != "BOOM"
            ]
            assert (await caller.get("/readyz")).status_code == 200
            assert text_of(await caller.generate(prompt="next", max_tokens=4)) == "NEXT"

    async def test_several_culprits_are_all_found(self) -> None:
        async with service(fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
            wanted = [{"prompt": "BOOM" if index % 3 == 0 else f"r{index}", "max_tokens": 2} for index in range(24)]
            answer = await caller.batch(wanted)
            assert [row["status"] for row in answer["results"]] == [500 if i % 3 == 0 else 200 for i in range(24)]

    async def test_after_windows_that_failed_as_a_whole_the_next_one_is_served(self) -> None:
        async with service(fake_config={"faults": {"fail_text": "BOOM"}}) as caller:
            for _ in range(3):
                answer = await caller.batch([{"prompt": "BOOM"}] * 8)
                assert {row["status"] for row in answer["results"]} == {500}
            assert text_of(await caller.generate(prompt="fine", max_tokens=4)) == fake_text("fine", 4)

    @pytest.mark.parametrize("wrong_count", [-1, 1])
    async def test_no_text_is_handed_out_when_another_number_comes_back(self, wrong_count: int) -> None:
        async with service(fake_config={"faults": {"wrong_count": wrong_count}}) as caller:
            answer = await caller.batch(rows(8))
            assert {row["status"] for row in answer["results"]} == {500}
            assert {row["error"]["code"] for row in answer["results"]} == {"generation_failed"}
            assert "ROW" not in str(answer)
            assert (await caller.generate(prompt="alone", status=500))["code"] == "generation_failed"
