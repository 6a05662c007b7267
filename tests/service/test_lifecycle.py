"""The life of a service process: loading, ready, draining, ended; with real signals and real exit codes."""

import asyncio
import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.service.support import (
    PYTHON,
    ROOT,
    START_S,
    Json,
    Process,
    check_error,
    free_port,
    post_bytes,
    serve_command,
    serving,
    start,
    strict_json,
    text_of,
)

CLOSE_S = 5.0
"""What comes after the drain, in any case: answers leave, the backend closes."""
STOPS = [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT")]


async def test_it_listens_while_it_loads_and_greets_when_ready(folder: Path) -> None:
    with start(folder, serve_command({"open_s": 1.5})) as process:
        async with process.caller() as caller:
            assert strict_json((await caller.get("/livez")).content)["status"] == "loading"
            assert check_error(await caller.get("/readyz"))["code"] == "not_ready"
            assert (await caller.generate(prompt="x", status=503))["code"] == "not_ready"
            assert process.stdout == ""
            await caller.wait_ready()
            await asyncio.sleep(0.1)
            first, *curls = process.stdout.splitlines()
            assert first == f"batchserve is ready at {process.url}"
            assert len(curls) == 2
            for line in curls:
                words = shlex.split(line)
                assert words[0] == "curl"
                url = next(word for word in words if word.startswith("http"))
                response = await caller.call("POST", url, content=words[words.index("-d") + 1])
                assert response.status_code == 200


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_while_idle_ends_with_0(folder: Path, stop: signal.Signals) -> None:
    with serving(folder, {}) as process:
        started = time.monotonic()
        process.signal(stop)
        assert process.exit_code() == 0
        assert time.monotonic() - started < 3
        assert "Traceback" not in process.log
        assert stop.name in process.log
        with pytest.raises(httpx.TransportError):
            process.get("/livez")


def test_a_stop_while_loading_ends_with_0(folder: Path) -> None:
    with start(folder, serve_command({"open_s": 60})) as process:
        assert process.get("/livez").status_code == 200
        started = time.monotonic()
        process.signal()
        assert process.exit_code() == 0
        assert time.monotonic() - started < CLOSE_S
        assert process.stdout == ""
        assert "Traceback" not in process.log


def test_a_stop_as_soon_as_it_listens_ends_with_0(folder: Path) -> None:
    with start(folder, serve_command({"open_s": 60})) as process:
        deadline = time.monotonic() + START_S
        while "listening on" not in process.log:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.signal()
        assert process.exit_code() == 0


@pytest.mark.parametrize("stop", STOPS)
async def test_a_stop_lets_accepted_work_finish_and_refuses_new_work_on_an_open_socket(
    folder: Path, stop: signal.Signals
) -> None:
    with serving(folder, {"step_ms": 10}, batch_size=5, max_wait_ms=60_000) as process:
        async with process.caller() as caller, await process.connect() as idle:
            await idle.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await idle.answer())[0] == 200
            tasks = [asyncio.create_task(caller.generate(prompt=f"c{index:02}", max_tokens=40)) for index in range(22)]
            await caller.wait_until_admitted(22)
            process.signal(stop)
            signalled = time.monotonic()
            await caller.wait_for_status("/readyz", 503, within_s=2)

            for path in ("/readyz", "/health"):
                assert check_error(await caller.get(path))["code"] == "shutting_down"
            assert strict_json((await caller.get("/livez")).content)["status"] == "draining"
            for path, body in (("/generate", {"prompt": "x"}), ("/batch", {"requests": [{"prompt": "x"}]})):
                async with await process.connect() as fresh:
                    await fresh.post(path, body)
                    status, headers, content = await fresh.answer()
                    assert (status, strict_json(content)["error"]["code"]) == (503, "shutting_down")
                    assert headers["connection"] == "close"
                    assert await fresh.reader.read() == b""
            await idle.post("/generate", {"prompt": "x"})
            status, headers, _ = await idle.answer()
            assert (status, headers["connection"]) == (503, "close")

            answers = await asyncio.gather(*tasks)
            assert [text_of(answer)[:3] for answer in answers] == [f"C{index:02}" for index in range(22)]
            releases = [answer["window"]["release"] for answer in answers]
            assert Counter(releases) == {"full": 20, "drain": 2}
            assert await process.ended() == 0
            took = time.monotonic() - signalled
            assert took < 5 * 0.4 + CLOSE_S


async def test_a_window_that_waits_for_others_goes_at_once_when_a_stop_comes(folder: Path) -> None:
    with serving(folder, {}, max_wait_ms=600_000) as process:
        async with process.caller() as caller:
            lone = asyncio.create_task(caller.generate(prompt="alone", max_tokens=5))
            rows = asyncio.create_task(caller.lines([{"prompt": "r", "max_tokens": 1}] * 3))
            await caller.wait_for_metric("batchserve_queue_requests", 4)
            process.signal()
            answer, lines = await asyncio.gather(lone, rows)
            assert (text_of(answer), answer["window"]["release"]) == ("ALONE", "drain")
            assert lines[-1] is not None
            assert lines[-1]["counts"]["succeeded"] == 3
            assert await process.ended() == 0


async def test_a_stop_at_load_answers_every_caller(folder: Path) -> None:
    """100 callers that never rest: each call gets its own text, a 503, or no connection after the end."""
    seen: Counter[str] = Counter()
    is_stopping = asyncio.Event()

    with serving(folder, {"step_ms": 2}) as process:
        async with process.caller() as caller:

            async def hammer(name: str) -> None:
                while True:
                    try:
                        response = await caller.call("POST", "/generate", json={"prompt": name, "max_tokens": 10})
                    except httpx.TransportError:
                        seen["no connection" if is_stopping.is_set() else "broken connection"] += 1
                        return
                    if response.status_code == 200:
                        assert text_of(response.json())[: len(name)] == name.upper()
                        seen["text"] += 1
                    else:
                        assert is_stopping.is_set()
                        assert check_error(response)["code"] == "shutting_down"
                        seen["shutting_down"] += 1
                        await asyncio.sleep(0.02)

            tasks = [asyncio.create_task(hammer(f"w{index};")) for index in range(100)]
            await asyncio.sleep(1)
            is_stopping.set()
            process.signal()
            assert await process.ended() == 0
            async with asyncio.timeout(10):
                await asyncio.gather(*tasks)
            print(dict(seen))
            assert seen["text"] > 100
            assert seen["broken connection"] == 0
            assert "Traceback" not in process.log


async def test_when_the_time_for_the_drain_has_passed_the_rest_is_503_and_the_code_is_1(folder: Path) -> None:
    with serving(folder, {"step_ms": 10}, batch_size=2, drain_timeout_s=0.7) as process:
        async with process.caller() as caller:
            tasks = [
                asyncio.create_task(caller.call("POST", "/generate", json={"prompt": "x", "max_tokens": 30}))
                for _ in range(20)
            ]
            rows = asyncio.create_task(caller.lines([{"prompt": "r", "max_tokens": 30, "priority": 50}] * 6))
            await caller.wait_until_admitted(26)
            process.signal()
            signalled = time.monotonic()
            responses = await asyncio.gather(*tasks)
            took = time.monotonic() - signalled
            seen = Counter(response.status_code for response in responses)
            assert seen.keys() == {200, 503}
            assert seen[200] >= 2
            assert {check_error(one)["code"] for one in responses if one.status_code == 503} == {"shutting_down"}
            assert took < 0.7 + 2
            lines = await rows
            assert lines[-1] is not None
            assert lines[-1]["counts"]["total"] == 6
            assert lines[-1]["counts"]["failed"] >= 1
            assert await process.ended() == 1
            assert time.monotonic() - signalled < 0.7 + CLOSE_S


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)],
    ids=["SIGTERM twice", "SIGINT twice", "one of each"],
)
async def test_a_second_signal_ends_it_at_once(folder: Path, signals: tuple[signal.Signals, signal.Signals]) -> None:
    with serving(folder, {"step_ms": 1000}) as process:
        async with process.caller() as caller:
            call = asyncio.create_task(caller.generate(prompt="x", max_tokens=60))
            await caller.wait_for_metric("batchserve_window_size_count", 1)
            process.signal(signals[0])
            await asyncio.sleep(0.3)
            assert process.popen.poll() is None
            started = time.monotonic()
            process.signal(signals[1])
            code = await process.ended()
            assert code > 0
            assert time.monotonic() - started < 1
            with pytest.raises(httpx.TransportError):
                await call


async def test_a_second_signal_while_loading_ends_it_at_once(folder: Path) -> None:
    with start(folder, serve_command({"open_s": 60})) as process:
        assert process.url
        await asyncio.sleep(0.1)
        process.signal()
        await asyncio.sleep(0.1)
        process.signal()
        started = time.monotonic()
        assert await process.ended() > 0
        assert time.monotonic() - started < 1


LONG: Json = {"requests": [{"prompt": "x", "max_tokens": 2040, "return_token_ids": True}] * 2000}
"""Its answer is larger than what sockets hold between two processes: 16 MB and more."""


class TestStuckClients:
    async def test_they_do_not_hold_up_the_end(self, folder: Path) -> None:
        """Connected and silent; half a head; half a body; one that reads nothing of a long answer."""
        drain_timeout_s = 2.0
        with serving(folder, {}, drain_timeout_s=drain_timeout_s) as process:
            silent, head, body, deaf, kept = [await process.connect() for _ in range(5)]
            await head.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-")
            await body.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            await kept.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await kept.answer())[0] == 200
            deaf.stop_reading()
            await deaf.post("/batch", LONG, headers="accept: application/x-ndjson\r\n")
            async with process.caller() as caller:
                await caller.wait_for_metric("batchserve_window_size_sum", 2000)
            process.signal()
            started = time.monotonic()
            code = await process.ended(20)
            took = time.monotonic() - started
            print(f"ended with {code} after {took:.2f} s")
            assert code == 1, "an answer was cut"
            assert took < drain_timeout_s + CLOSE_S
            for connection in (silent, head, body, deaf, kept):
                await connection.hang_up()

    @pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
    async def test_a_slow_reader_gets_its_whole_answer_within_the_time_for_the_drain(
        self, folder: Path, accept: str
    ) -> None:
        with serving(folder, {}, drain_timeout_s=20) as process:
            async with process.caller() as caller, await process.connect() as slow:
                slow.stop_reading()
                await slow.post("/batch", LONG, headers=f"accept: {accept}\r\nconnection: close\r\n")
                await caller.wait_for_metric("batchserve_window_size_sum", 2000)
                process.signal()
                await asyncio.sleep(3)
                slow.go_on_reading()
                async with asyncio.timeout(10):
                    whole = await slow.reader.read()
            code = await process.ended(20)
            assert whole.count(b'"finish_reason"') == 2000
            assert b'"counts":{"total":2000,"succeeded":2000,"failed":0}' in whole
            assert code == 0

    async def test_one_that_uploads_when_the_stop_comes_is_refused(self, folder: Path) -> None:
        with serving(folder, {"step_ms": 10}) as process:
            async with process.caller() as caller, await process.connect() as slow:
                accepted = asyncio.create_task(caller.generate(prompt="x", max_tokens=100))
                await caller.wait_for_metric("batchserve_window_size_count", 1)
                data = post_bytes("/generate", {"prompt": "late"})
                await slow.send(data[:-5])
                await asyncio.sleep(0.05)
                process.signal()
                await asyncio.sleep(0.1)
                await slow.send(data[-5:])
                status, headers, body = await slow.answer()
                assert (status, strict_json(body)["error"]["code"]) == (503, "shutting_down")
                assert headers["connection"] == "close"
                assert (await accepted)["usage"]["completion_tokens"] == 100
                assert await process.ended() == 0

    async def test_one_that_hangs_up_within_the_drain_leaves_the_code_0(self, folder: Path) -> None:
        with serving(folder, {"step_ms": 10}, batch_size=1) as process:
            async with process.caller() as caller, await process.connect() as leaves:
                accepted = asyncio.create_task(caller.generate(prompt="x", max_tokens=50))
                await caller.wait_for_metric("batchserve_window_size_count", 1)
                await leaves.post("/generate", {"prompt": "y", "max_tokens": 1000})
                await caller.wait_for_metric("batchserve_queue_requests", 1)
                process.signal()
                await asyncio.sleep(0.1)
                await leaves.hang_up()
                signalled = time.monotonic()
                await accepted
                assert await process.ended() == 0
                assert time.monotonic() - signalled < CLOSE_S


class TestPort:
    def test_a_taken_port_is_a_failed_start_that_names_it(self, folder: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            code, lines, _ = failed(serve_command(None, port=port))
        assert code == 1
        assert any(str(port) in line for line in lines)

    def test_it_can_be_had_again_at_once(self, folder: Path) -> None:
        port = free_port()
        for index, number in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
            with serving(folder / str(index), {}, port=port) as process:
                body = {"prompt": "x", "max_tokens": 1}
                assert process.post("/generate", body).status_code == 200
                process.signal(number)
                assert process.exit_code() == (0 if number == signal.SIGTERM else -signal.SIGKILL)


def failed(command: list[str], env: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """Exit code, the lines that say why, and the whole of standard error of a start that fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, cwd=ROOT, env={"PATH": "/usr/bin", **(env or {})}
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("batchserve: cannot start: ")]
    return done.returncode, lines, done.stderr


class TestFailedStart:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"backend": "nope"}, ("backend", "nope", "fake", "vllm_offline")),
            ({"port": 99_999}, ("port",)),
            ({"batch_size": 0}, ("batch_size", "0")),
            ({"max_queue_requests": 100}, ("max_queue_requests", "max_batch_requests")),
            ({"fake_config": "{bad"}, ("fake_config",)),
            ({"fake_config": '{"step": 5}'}, ("step",)),
            (
                {"fake_config": '{"faults": {"fail_open": "no such model; set --model"}}'},
                ("no such model; set --model",),
            ),
            ({"request_format": "/no/such/file.jinja"}, ("request_format", "/no/such/file.jinja")),
            ({"host": "203.0.113.1"}, ("203.0.113.1",)),
            ({"bach_size": 4}, ("batch-size",)),
        ],
        ids=lambda value: " ".join(value)[:40] if isinstance(value, dict) else "",
    )
    def test_it_ends_with_one_line_that_says_what_to_change(self, settings: Json, said: tuple[str, ...]) -> None:
        code, lines, whole = failed(serve_command(None, **settings))
        assert code > 0
        assert len(lines) == 1, whole
        assert len(lines[0]) < 1000
        for word in said:
            assert word in lines[0]
        assert "Traceback" not in whole

    def test_there_is_one_line_for_each_mistake(self) -> None:
        code, lines, _ = failed(serve_command(None, batch_size=0, max_wait_ms=-1, log_format="xml"))
        assert code > 0
        assert sorted(line.split(": ")[2] for line in lines) == ["batch_size", "log_format", "max_wait_ms"]

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("BATCHSERVE_BATCH_SIZE", "many", "batch_size"),
            ("BATCHSERVE_VLLM_CONFIG", "[1]", "vllm_config"),
            ("BATCHSERVE_BACH_SIZE", "4", "BATCHSERVE_BATCH_SIZE"),
        ],
    )
    def test_a_mistake_in_the_environment_is_told_as_well(self, name: str, value: str, said: str) -> None:
        command = [word for word in serve_command(None) if word not in ("--port", "0", "--batch-size", "8")]
        code, lines, whole = failed(command, {name: value})
        assert code > 0
        assert len(lines) == 1, whole
        assert said in lines[0]
        assert "Traceback" not in whole

    def test_a_wrong_key_is_not_shown(self) -> None:
        _, lines, whole = failed(serve_command(None, api_key="sk-é-tellnoone"))
        assert len(lines) == 1
        assert "tellnoone" not in whole

    async def test_one_that_fails_after_a_while_ends_too(self, folder: Path) -> None:
        fake = {"open_s": 0.5, "faults": {"fail_open": "out of memory; lower max_model_len"}}
        with start(folder, serve_command(fake)) as process:
            async with process.caller() as caller:
                assert check_error(await caller.get("/readyz"))["code"] == "not_ready"
            assert await process.ended() == 1
            assert "batchserve: cannot start: out of memory; lower max_model_len\n" in process.log
            assert process.log.count("cannot start") == 1
            assert process.stdout == ""


class TestWaysToStart:
    def use(self, process: Process) -> None:
        """It works, and ends when told to."""
        process.wait_ready()
        body = {"prompt": "hello", "max_tokens": 5}
        response = process.post("/generate", body)
        assert text_of(strict_json(response.content)) == "HELLO"
        process.signal()

    def test_as_a_module(self, folder: Path) -> None:
        command = [PYTHON, "-m", "app", *serve_command({})[1:]]
        with start(folder, command) as process:
            self.use(process)
            assert process.exit_code() == 0
            assert process.log.count("listening on") == 1

    def test_as_the_console_script_with_settings_from_the_environment(self, folder: Path) -> None:
        env = {
            "BATCHSERVE_BACKEND": "fake",
            "BATCHSERVE_PORT": "0",
            "BATCHSERVE_FAKE_CONFIG": json.dumps({"max_model_len": 64}),
            "BATCHSERVE_SERVED_MODEL_NAME": "from-env",
        }
        with start(folder, [serve_command()[0], "serve", "--served-model-name", "from-cli"], env=env) as process:
            process.wait_ready()
            info = process.get("/info").json()
            assert info["model"] == "from-cli"
            assert info["limits"]["max_model_len"] == 64
            self.use(process)
            assert process.exit_code() == 0

    def test_under_uvicorn(self, folder: Path) -> None:
        port = free_port()
        command = [PYTHON, "-m", "uvicorn", "--factory", "app.main:create_app", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with start(folder, command, env={"BATCHSERVE_BACKEND": "fake"}, url=url) as process:
            self.use(process)
            assert process.exit_code() in (0, -signal.SIGTERM)
            assert "Traceback" not in process.log
            assert "Application shutdown complete" in process.log

    async def test_under_uvicorn_a_stop_lets_accepted_work_finish(self, folder: Path) -> None:
        port = free_port()
        command = [PYTHON, "-m", "uvicorn", "--factory", "app.main:create_app", "--port", str(port)]
        env = {"BATCHSERVE_BACKEND": "fake", "BATCHSERVE_FAKE_CONFIG": '{"step_ms": 10}', "BATCHSERVE_BATCH_SIZE": "2"}
        with start(folder, command, env=env, url=f"http://127.0.0.1:{port}") as process:
            process.wait_ready()
            async with process.caller() as caller:
                tasks = [asyncio.create_task(caller.generate(prompt="x", max_tokens=30)) for _ in range(6)]
                await caller.wait_until_admitted(6)
                process.signal()
                assert {text_of(body) for body in await asyncio.gather(*tasks)} == {"X" * 30}
            assert await process.ended() in (0, -signal.SIGTERM)

    def test_under_uvicorn_a_failed_start_is_told(self, folder: Path) -> None:
        """The server is not ours, so the process may stay; what to change must be in its log."""
        port = free_port()
        command = [PYTHON, "-m", "uvicorn", "--factory", "app.main:create_app", "--port", str(port)]
        faults = {"faults": {"fail_open": "no such model; set it"}}
        env = {"BATCHSERVE_BACKEND": "fake", "BATCHSERVE_FAKE_CONFIG": json.dumps(faults)}
        with start(folder, command, env=env, url=f"http://127.0.0.1:{port}") as process:
            deadline = time.monotonic() + 5
            while "no such model; set it" not in process.log and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "no such model; set it" in process.log
            with contextlib.suppress(httpx.TransportError):
                assert process.get("/readyz").status_code == 503

    def test_importing_the_module_starts_nothing(self) -> None:
        script = "import threading, app.main, app.cli, app.server, app.__main__; print(threading.active_count())"
        done = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr

    def test_the_command_prints_the_same_document_that_is_served(self, shared: Process) -> None:
        done = subprocess.run([serve_command()[0], "openapi"], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 0
        assert strict_json(done.stdout) == shared.get("/openapi.json").json()

    @pytest.mark.parametrize(("words", "code"), [([], 0), (["--help"], 0), (["bogus"], 2)])
    def test_without_a_command_it_says_what_there_is(self, words: list[str], code: int) -> None:
        done = subprocess.run([serve_command()[0], *words], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == code
        assert re.search(r"batchserve serve", done.stdout + done.stderr)
