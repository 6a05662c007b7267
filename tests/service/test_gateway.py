"""Keys, a path prefix, request ids in the log: what stands between the service and the world."""

import asyncio
import contextlib
import hmac
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.main import create_app
from tests.service.support import (
    Caller,
    Json,
    Process,
    check_error,
    fake_settings,
    running,
    service,
    serving,
    strict_json,
    text_of,
)

KEYS = ("sk-first-tellnoone", "sk-second-tellnoone")
OPEN = ("/livez", "/readyz", "/health")
CLOSED = ("/generate", "/batch", "/info", "/metrics", "/openapi.json", "/docs", "/docs/assets/swagger-ui.css", "/none")


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"authorization": f"Bearer {key}"}


class TestApiKey:
    @pytest.mark.parametrize("path", OPEN)
    async def test_probes_need_none(self, path: str) -> None:
        async with service(api_key=KEYS) as caller:
            assert (await caller.get(path)).status_code == 200

    @pytest.mark.parametrize("method", ["GET", "POST"])
    @pytest.mark.parametrize("path", CLOSED)
    async def test_everything_else_is_401_without_one(self, path: str, method: str) -> None:
        async with service(api_key=KEYS) as caller:
            response = await caller.call(method, path)
            assert check_error(response)["code"] == "invalid_api_key"
            assert gives_no_hint(response)

    @pytest.mark.parametrize(
        "given",
        [
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Bearer sk-first-tellnoon",
            "Bearer sk-first-tellnoone-",
            "Bearer SK-FIRST-TELLNOONE",
            "Basic sk-first-tellnoone",
            "sk-first-tellnoone",
            "Token sk-first-tellnoone",
            "Bearer sk-first-tellnoone,sk-second-tellnoone",
            "Bearer é",
            "Bearer " + "x" * 5000,
        ],
    )
    async def test_a_wrong_one_or_a_wrong_scheme_is_401(self, given: str) -> None:
        async with service(api_key=KEYS) as caller:
            headers = [(b"authorization", given.encode())]
            response = await caller.call("POST", "/generate", json={"prompt": "x"}, headers=headers)
            assert check_error(response)["code"] == "invalid_api_key"
            assert gives_no_hint(response)

    @pytest.mark.parametrize("given", [f"Bearer {KEYS[0]}", f"Bearer {KEYS[1]}", f"bearer {KEYS[1]}"])
    async def test_each_key_opens_every_route(self, given: str) -> None:
        async with service(api_key=KEYS) as caller:
            caller.http.headers["authorization"] = given
            assert text_of(await caller.generate(prompt="x", max_tokens=1)) == "X"
            assert (await caller.batch([{"prompt": "x"}]))["counts"]["succeeded"] == 1
            for path in CLOSED[2:-1]:
                assert (await caller.get(path)).status_code == 200
            assert (await caller.get("/none")).status_code == 404

    async def test_every_key_is_compared_in_constant_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[bytes] = []
        real = hmac.compare_digest

        def spy(a: Any, b: Any) -> bool:
            compared.append(b)
            return real(a, b)

        monkeypatch.setattr(hmac, "compare_digest", spy)
        async with service(api_key=KEYS) as caller:
            for key in (*KEYS, "wrong"):
                compared.clear()
                await caller.get("/info", headers=bearer(key))
                assert compared == [key.encode() for key in KEYS]

    async def test_401s_are_counted_and_reach_no_queue(self) -> None:
        async with service(api_key=KEYS) as caller:
            for _ in range(3):
                await caller.generate(prompt="x", status=401)
            caller.http.headers.update(bearer(KEYS[0]))
            assert await caller.metric("batchserve_errors_total", code="invalid_api_key") == 3
            assert await caller.metric("batchserve_window_size_count") == 0

    async def test_without_keys_any_header_passes(self, caller: Caller) -> None:
        assert (await caller.get("/info", headers={"authorization": "Basic eA=="})).status_code == 200


def gives_no_hint(response: httpx.Response) -> bool:
    """A refusal tells nothing of the keys."""
    return "tellnoone" not in response.text and "tellnoone" not in str(response.headers)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Two keys, the log as JSON, failing windows on demand."""
    folder = tmp_path_factory.mktemp("keys")
    faults = {"faults": {"fail_text": "BOOM"}}
    with serving(folder, faults, api_key=KEYS, log_format="json", log_level="info") as process:
        yield process


class TestKeysOfAProcess:
    async def test_neither_log_nor_output_ever_shows_one(self, process: Process) -> None:
        async with process.caller() as caller:
            for given in (f"Bearer {KEYS[0]}", f"Basic {KEYS[0]}", f"Bearer {KEYS[1]}x"):
                for path in CLOSED:
                    await caller.get(path, headers={"authorization": given})
                    await caller.call("POST", path, json={"prompt": "x"}, headers={"authorization": given})
            info = (await caller.get("/info", headers=bearer(KEYS[0]))).text
        assert "tellnoone" not in process.log + process.stdout + info
        assert "Authorization: Bearer KEY" in process.stdout

    async def test_a_large_upload_with_a_wrong_key_gets_to_see_its_401(self, process: Process) -> None:
        async with process.caller() as caller:
            response = await caller.call("POST", "/generate", content=b" " * (20 << 20), headers=bearer("wrong"))
            assert check_error(response)["code"] == "invalid_api_key"

    async def test_each_line_of_the_log_is_json_and_carries_the_request_id(self, process: Process) -> None:
        async with process.caller() as caller:
            caller.http.headers.update(bearer(KEYS[1]))
            await caller.call("POST", "/generate", json={"prompt": "x"}, headers={"x-request-id": "id-ok"})
            await caller.call("POST", "/generate", json={"prompt": ""}, headers={"x-request-id": "id-bad"})
            await caller.call("POST", "/generate", json={"prompt": "BOOM"}, headers={"x-request-id": "id-boom"})
            await caller.get("/line%0abreak", headers={"x-request-id": "id-break"})
        await process.wait_for_log("id-break")
        lines: list[Json] = [json.loads(line) for line in process.log.splitlines()]
        assert all({"time", "level", "logger", "request_id", "message"} <= line.keys() for line in lines)
        for request_id, status in (("id-ok", "200"), ("id-bad", "400"), ("id-boom", "500"), ("id-break", "404")):
            messages = [line["message"] for line in lines if line["request_id"] == request_id]
            assert any(status in message for message in messages), request_id


class TestLogOfAProcess:
    async def test_text_lines_carry_the_request_id_and_no_line_is_broken(self, shared: Process, remote: Caller) -> None:
        await remote.call("POST", "/generate", json={"prompt": "x"}, headers={"x-request-id": "id-text-1"})
        await remote.get("/line%0abreak%0dINFO", headers={"x-request-id": "id-text-2"})
        response = await remote.get("/none")
        for request_id in ("id-text-1", "id-text-2", response.headers["x-request-id"]):
            await shared.wait_for_log(f"[{request_id}]")
            assert re.search(rf"^\d{{4}}-.* \[{request_id}\] .*", shared.log, re.MULTILINE)
        assert not re.search(r"^(break|INFO)", shared.log, re.MULTILINE)

    async def test_probes_and_scrapes_do_not_fill_the_log(self, shared: Process, remote: Caller) -> None:
        for path in (*OPEN, "/metrics"):
            await remote.get(path, headers={"x-request-id": "id-quiet"})
        assert "id-quiet" not in shared.log


class TestRootPath:
    """A gateway serves us under `/llm`; it may take the prefix off the path, or leave it."""

    @pytest.mark.parametrize("base", ["", "/llm"], ids=["taken off", "left"])
    async def test_every_route_is_found(self, base: str) -> None:
        async with running(create_app(fake_settings(root_path="/llm")), root=base) as caller:
            assert text_of(await caller.generate(prompt="x", max_tokens=1)) == "X"
            assert (await caller.batch([{"prompt": "x"}]))["counts"]["succeeded"] == 1
            for path in (*OPEN, *CLOSED[2:-1]):
                assert (await caller.get(path)).status_code == 200, path
            assert (await caller.get("/none")).status_code == 404
            assert (await caller.get("/generate")).status_code == 405

    @pytest.mark.parametrize("base", ["", "/llm"], ids=["taken off", "left"])
    async def test_the_page_and_the_document_name_urls_with_the_prefix(self, base: str) -> None:
        async with running(create_app(fake_settings(root_path="/llm/")), root=base) as caller:
            page = (await caller.get("/docs")).text
            sources = re.findall(r'(?:src|href)="([^"]+)"', page)
            assert sources
            assert all(source.startswith("/llm/docs/assets/") for source in sources)
            assert re.search(r"url: *['\"]/llm/openapi.json['\"]", page)
            for source in sources:
                assert (await caller.http.get(f"http://service{source}")).status_code == 200
                assert (await caller.http.get(f"http://service{source.removeprefix('/llm')}")).status_code == 200

    @pytest.mark.parametrize("base", ["", "/llm"], ids=["taken off", "left"])
    async def test_the_document_sends_clients_to_the_prefix(self, base: str) -> None:
        async with running(create_app(fake_settings(root_path="/llm")), root=base) as caller:
            document = (await caller.get("/openapi.json")).json()
            assert [server["url"] for server in document["servers"]] == ["/llm"]
            assert "/generate" in document["paths"]

    @pytest.mark.parametrize("base", ["", "/llm"], ids=["taken off", "left"])
    async def test_keys_are_asked_for_all_the_same(self, base: str) -> None:
        async with running(create_app(fake_settings(root_path="/llm", api_key=KEYS)), root=base) as caller:
            for path in OPEN:
                assert (await caller.get(path)).status_code == 200
            for path in CLOSED:
                assert (await caller.get(path)).status_code == 401
            assert (await caller.get("/info", headers=bearer(KEYS[0]))).status_code == 200

    @pytest.mark.parametrize("path", ["/llm/llm/livez", "/llmlivez", "/livez/../info", "//livez", "/livez/", "/LIVEZ"])
    async def test_no_other_spelling_passes_without_a_key(self, path: str) -> None:
        async with running(create_app(fake_settings(root_path="/llm", api_key=KEYS))) as caller:
            response = await caller.http.get(f"http://service{path}")
            assert response.status_code == 401


class TestForeignHeads:
    """What other HTTP clients put into the head of a request."""

    async def test_an_upgrade_that_nobody_asked_for_is_ignored(self, shared: Process) -> None:
        """Java's client offers HTTP/2 with its first request."""
        offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
        async with await shared.connect() as connection:
            await connection.post("/generate", {"prompt": "hi", "max_tokens": 2}, headers=offer)
            status, _, body = await connection.answer()
        assert status == 200, body
        assert text_of(strict_json(body)) == "HI"

    async def test_a_head_of_megabytes_is_refused_and_holds_nobody_up(self, shared: Process, remote: Caller) -> None:
        async with await shared.connect() as connection:
            with contextlib.suppress(ConnectionError):
                await connection.send(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * (8 << 20))
            began = time.monotonic()
            assert (await remote.get("/livez")).status_code == 200
            assert time.monotonic() - began < 1
            with contextlib.suppress(ConnectionError):
                assert b" 200 " not in await connection.reader.read()

    @pytest.mark.parametrize(
        "begun", [b"", b"GET /liv", b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"], ids=repr
    )
    async def test_a_caller_that_stops_half_way_is_not_waited_for_without_end(self, folder: Path, begun: bytes) -> None:
        with serving(folder, keep_alive_s=1) as process:
            async with await process.connect() as connection, asyncio.timeout(10):
                await connection.send(begun)
                assert await connection.reader.read() == b""
