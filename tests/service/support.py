"""What the service tests share: strict reading of answers, a client that checks each, a service as a real process."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI

from app.api.schemas import (
    BatchResponse,
    BatchRow,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorBody,
    ErrorObject,
    GenerateResponse,
)
from app.main import create_app
from app.settings import Settings

Json = dict[str, Any]

PYTHON = sys.executable
BATCHSERVE = str(Path(PYTHON).with_name("batchserve"))
ROOT = Path(__file__).resolve().parents[2]

STATUS_OF = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_too_large": 413,
    "queue_full": 429,
    "queue_timeout": 504,
    "request_timeout": 504,
    "generation_failed": 500,
    "internal_error": 500,
    "not_ready": 503,
    "shutting_down": 503,
    "engine_dead": 503,
}
TYPE_OF = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SEVEN = ("resolve_ms", "window_wait_ms", "submit_ms", "engine_queue_ms", "prefill_ms", "decode_ms", "window_tail_ms")
IN_ORDER = (
    "received_at",
    "admitted_at",
    "dispatched_at",
    "queued_at",
    "scheduled_at",
    "first_token_at",
    "last_token_at",
    "completed_at",
)
MAX_ERROR_BYTES = 4096
OFFSET_PRECISION_S = 1e-3
START_S = 20.0
CALL_S = 30.0
LOCAL: Json = {"trust_env": False, "verify": False}
"""Of every HTTP client here: no proxy of the desk, and no list of authorities to read for a plain connection."""


# --- reading answers -------------------------------------------------------------------------------------------------


def strict_json(raw: bytes | str) -> Any:
    """JSON as the standard has it: no NaN or infinity, no key twice, UTF-8, nothing behind the value."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Json:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), f"a key stands twice in {names}"
    return dict(pairs)


def check_error_object(error: Json) -> None:
    """The inner error object: OpenAI's four members, the type and the extras that go with its code."""
    ErrorObject.model_validate(error, strict=True)
    assert {"message", "type", "code", "param"} <= error.keys()
    assert error["message"].strip()
    status = STATUS_OF[error["code"]]
    assert error["type"] == TYPE_OF.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if error["code"] in ("queue_full", "request_too_large", "context_length_exceeded"):
        assert isinstance(error["limit"], int)
    if error["code"] == "queue_full":
        assert isinstance(error["queue_depth"], int)
    if error["code"] == "context_length_exceeded":
        assert error["prompt_tokens"] >= error["limit"]
    assert len(json.dumps(error).encode()) < MAX_ERROR_BYTES


def check_error(response: httpx.Response) -> Json:
    """An error answer in full: shape, size, headers, the status that belongs to its code. Its inner object."""
    assert len(response.content) < MAX_ERROR_BYTES
    assert response.headers["content-type"].startswith("application/json")
    body = strict_json(response.content)
    ErrorBody.model_validate(body, strict=True)
    error: Json = body["error"]
    check_error_object(error)
    assert response.status_code == STATUS_OF[error["code"]]
    if response.status_code in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    if response.status_code == 405:
        assert response.headers["allow"]
    if response.status_code == 401:
        assert response.headers["www-authenticate"].startswith("Bearer")
    return error


def check_timings(times: Json) -> None:
    """The promises of a request's timings: none negative, in order, the seven add up to the whole."""
    for name, value in times.items():
        if isinstance(value, float):
            assert math.isfinite(value), name
        if name.endswith("_ms") and value is not None:
            assert value >= 0, name
    stamps = [times[name] for name in IN_ORDER]
    assert None not in stamps
    for earlier, later in itertools.pairwise(stamps):
        assert later >= earlier - OFFSET_PRECISION_S
    assert math.isclose(sum(times[name] for name in SEVEN), times["e2e_ms"], abs_tol=0.01)
    assert times["ttft_ms"] <= times["e2e_ms"] + 0.01
    assert times["clock_anomaly"] is False


def check_generation(body: Json) -> None:
    """A `/generate` answer in full."""
    GenerateResponse.model_validate(body, strict=True)
    check_timings(body["timings"])
    usage, window = body["usage"], body["window"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [output["index"] for output in body["outputs"]] == list(range(len(body["outputs"])))
    check_window(window)


def check_window(window: Json | None) -> None:
    """The `window` of an answer: a place in it, but where each request goes by itself."""
    if window is None:
        return
    assert window["size"] >= 1
    if window["release"] == "rolling":
        assert window["position"] is None
    else:
        assert 0 <= window["position"] < window["size"]


def check_row(row: Json) -> None:
    """One row of a `/batch` answer: exactly one of response and error, the status that goes with it."""
    BatchRow.model_validate(row, strict=True)
    if row["status"] == 200:
        assert row["error"] is None
        check_generation(row["response"])
    else:
        assert row["response"] is None
        check_error_object(row["error"])
        assert row["status"] == STATUS_OF[row["error"]["code"]]


def check_batch(body: Json) -> None:
    """A `/batch` answer in full: rows in order, counts and windows that agree with them."""
    BatchResponse.model_validate(body, strict=True)
    rows = body["results"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    for row in rows:
        check_row(row)
    good = [row["response"] for row in rows if row["response"] is not None]
    assert body["counts"] == {"total": len(rows), "succeeded": len(good), "failed": len(rows) - len(good)}
    shown = {window["id"]: window for window in body["windows"]}
    assert len(shown) == len(body["windows"])
    in_windows = [response for response in good if (response["window"] or {}).get("release", "rolling") != "rolling"]
    assert shown.keys() == {response["window"]["id"] for response in in_windows}
    for response in in_windows:
        assert shown[response["window"]["id"]] == {key: response["window"][key] for key in ("id", "size", "release")}
    assert body["timings"]["completion_tokens"] == sum(response["usage"]["completion_tokens"] for response in good)
    assert body["timings"]["prompt_tokens"] == sum(response["usage"]["prompt_tokens"] for response in good)


VLLM_METRICS = {
    "time_to_first_token_ms": "prefill_ms",
    "queue_time_ms": "engine_queue_ms",
    "generation_time_ms": "decode_ms",
    "mean_itl_ms": "itl_ms",
    "tokens_per_second": "tokens_per_s",
}
"""vLLM's names for what a request took, and which timing each is."""


def check_metrics(metrics: Json, *, prompts: int, n: int) -> None:
    """The `metrics` of an OpenAI answer: vLLM's names, timings and window; the first prompt's, and all in order."""
    each = metrics.get("requests", [metrics])
    assert len(each) == prompts
    assert ("requests" in metrics) == (prompts > 1)
    assert {name: value for name, value in metrics.items() if name != "requests"} == each[0]
    for one in each:
        check_timings(one["timings"])
        check_window(one["window"])
        for name, timing in VLLM_METRICS.items():
            assert one[name] == (one["timings"][timing] if n == 1 else None)


def check_openai(body: Json, *, prompts: int = 1, n: int = 1) -> None:
    """An answer of one of OpenAI's routes in full."""
    is_chat = body["object"] == "chat.completion"
    (ChatCompletion if is_chat else Completion).model_validate(body, strict=True)
    assert body["id"].startswith("chatcmpl-" if is_chat else "cmpl-")
    assert [choice["index"] for choice in body["choices"]] == list(range(prompts * n))
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    check_metrics(body["metrics"], prompts=prompts, n=n)
    assert body["created"] == int(body["metrics"]["timings"]["received_at"])


def check_events(events: list[Json], *, prompts: int = 1, n: int = 1) -> None:
    """The data of a stream in full, without its end mark."""
    is_chat = events[0]["object"] == "chat.completion.chunk"
    for event in events:
        (ChatCompletionChunk if is_chat else CompletionChunk).model_validate(event, strict=True)
        assert {key: event[key] for key in ("id", "created", "model", "object")} == {
            key: events[0][key] for key in ("id", "created", "model", "object")
        }
    assert ["metrics" in event for event in events] == [False] * (len(events) - 1) + [True]
    check_metrics(events[-1]["metrics"], prompts=prompts, n=n)


def events_of(raw: bytes | str) -> tuple[list[Json], bool]:
    """The data of each event of a stream, and whether the end mark came, last."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    assert text.endswith("\n\n")
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert "[DONE]" not in data[:-1]
    is_ended = data[-1:] == ["[DONE]"]
    return [strict_json(one) for one in data[: -1 if is_ended else None]], is_ended


def text_of(body: Json) -> str:
    """The first text of a `/generate` answer."""
    text: str = body["outputs"][0]["text"]
    return text


def fake_text(prompt: str, max_tokens: int) -> str:
    """What the fake backend answers: the prompt in capitals, over and over, one byte a token."""
    data = prompt.upper().encode()
    return (data * (max_tokens // len(data) + 1))[:max_tokens].decode(errors="replace")


def metric(exposition: str, name: str, **labels: str) -> float:
    """One sample of a Prometheus text; 0 where it is not there yet."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in exposition.splitlines():
        found = re.fullmatch(r"([a-zA-Z0-9_:]+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name and wanted == set(filter(None, (found[2] or "").split(","))):
            return float(found[3])
    return 0.0


# --- a client that checks every answer -------------------------------------------------------------------------------


class Caller:
    """An HTTP client that holds every answer to the contract before the test sees it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Any call; errors are checked in full, and every answer carries one request id."""
        response = await self.http.request(method, path, **options)
        assert len(response.headers.get_list("x-request-id")) == 1
        if response.status_code >= 400:
            check_error(response)
        return response

    async def get(self, path: str, **options: Any) -> httpx.Response:
        """A GET."""
        return await self.call("GET", path, **options)

    async def generate(self, body: Any = None, /, *, status: int = 200, **fields: Any) -> Json:
        """A `/generate`: the answer, or the inner error object when another status is awaited."""
        response = await self.call("POST", "/generate", json=fields if body is None else body)
        assert response.status_code == status, response.text
        return self._read(response, check_generation)

    async def batch(self, requests: Any, /, *, status: int = 200, **fields: Any) -> Json:
        """A `/batch`: the answer, or the inner error object when another status is awaited."""
        response = await self.call("POST", "/batch", json={"requests": requests, **fields})
        assert response.status_code == status, response.text
        return self._read(response, check_batch)

    async def openai(self, route: str, body: Json, *, status: int = 200) -> Json:
        """A call of `/v1/…`: the answer, or the inner error object when another status is awaited."""
        response = await self.call("POST", f"/v1/{route}", json=body)
        assert response.status_code == status, response.text
        prompts, n = _prompts_in(body), body.get("n") or 1
        return self._read(response, lambda found: check_openai(found, prompts=prompts, n=n))

    async def completion(self, *, status: int = 200, **fields: Any) -> Json:
        """A `/v1/completions`."""
        return await self.openai("completions", {"prompt": "x", **fields}, status=status)

    async def chat(self, *, status: int = 200, **fields: Any) -> Json:
        """A `/v1/chat/completions`."""
        messages = [{"role": "user", "content": "x"}]
        return await self.openai("chat/completions", {"messages": messages, **fields}, status=status)

    async def events(self, route: str, body: Json) -> list[Json]:
        """The data of a stream that ends well."""
        response = await self.call("POST", f"/v1/{route}", json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events, is_ended = events_of(response.content)
        assert is_ended
        check_events(events, prompts=_prompts_in(body), n=body.get("n") or 1)
        return events

    @staticmethod
    def _read(response: httpx.Response, check: Any) -> Json:
        body: Json = strict_json(response.content)
        if response.status_code != 200:
            inner: Json = body["error"]
            return inner
        check(body)
        return body

    async def lines(self, requests: list[Json], **fields: Any) -> list[Json | None]:
        """A `/batch` as NDJSON: each line as it came, an empty one as None."""
        options: Json = {"json": {"requests": requests, **fields}, "headers": {"accept": "application/x-ndjson"}}
        async with self.http.stream("POST", "/batch", **options) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("application/x-ndjson")
            return [strict_json(line) if line else None async for line in response.aiter_lines()]

    async def metric(self, name: str, **labels: str) -> float:
        """One sample of `/metrics`."""
        return metric((await self.get("/metrics")).text, name, **labels)

    async def wait_for_metric(self, name: str, value: float, *, within_s: float = 5.0, **labels: str) -> None:
        """Until a sample of `/metrics` has a value; a counter or the count of a histogram may have passed it."""
        may_pass = name.endswith(("_total", "_count", "_sum"))
        deadline = time.monotonic() + within_s
        while (now := await self.metric(name, **labels)) != value and not (may_pass and now > value):
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}, after {within_s} s"
            await asyncio.sleep(0.01)

    async def wait_until_admitted(self, count: int, *, within_s: float = 10.0) -> None:
        """Until so many requests have been admitted since the start; they wait, run or have run."""
        deadline = time.monotonic() + within_s
        while True:
            text = (await self.get("/metrics")).text
            if metric(text, "batchserve_queue_requests") + metric(text, "batchserve_window_size_sum") >= count:
                return
            assert time.monotonic() < deadline, f"{count} were not admitted within {within_s} s"
            await asyncio.sleep(0.01)

    async def wait_for_status(self, path: str, status: int, *, within_s: float = 10.0) -> None:
        """Until a route answers with a status."""
        deadline = time.monotonic() + within_s
        while (await self.get(path)).status_code != status:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    async def wait_ready(self) -> None:
        """Until `/readyz` says 200."""
        await self.wait_for_status("/readyz", 200)


def _prompts_in(body: Json) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


# --- the application in this process ---------------------------------------------------------------------------------


def fake_settings(**settings: Any) -> Settings:
    """Settings with the fake backend, windows of 8 that wait 5 ms."""
    values: Json = {"backend": "fake", "model": "fake-model", "batch_size": 8, "max_wait_ms": 5, **settings}
    return Settings(**values)


@contextlib.asynccontextmanager
async def running(app: FastAPI, *, is_awaited: bool = True, root: str = "") -> AsyncIterator[Caller]:
    """The application with its lifespan, and a caller of it without sockets."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=f"http://service{root}", timeout=CALL_S, **LOCAL) as http,
    ):
        caller = Caller(http)
        if is_awaited:
            await caller.wait_ready()
        yield caller


@contextlib.asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[Caller]:
    """A ready service in this process."""
    async with running(create_app(fake_settings(**settings))) as caller:
        yield caller


# --- the service as a process of its own -----------------------------------------------------------------------------


class Process:
    """A service in a process of its own, with its output in files; ended by its own pid."""

    def __init__(self, popen: "subprocess.Popen[bytes]", folder: Path, url: str | None = None) -> None:
        self.popen = popen
        self.folder = folder
        self._url = url

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return (self.folder / "stdout").read_text()

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return (self.folder / "stderr").read_text()

    async def wait_for_log(self, text: str, *, within_s: float = 5.0) -> None:
        """Until it has logged a text; the line about a call follows its answer."""
        deadline = time.monotonic() + within_s
        while text not in self.log:
            assert time.monotonic() < deadline, f"{text!r} was not logged"
            await asyncio.sleep(0.01)

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        while self._url is None:
            if found := re.search(r"listening on (http://\S+?);", self.log):
                self._url = found[1]
            else:
                self._pause("listen")
        return self._url

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rsplit(":", 1)[1])

    def wait_ready(self) -> None:
        """Until it says so on `/readyz`."""
        while not self._is_ready():
            self._pause("turn ready")

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.get("/readyz").status_code == 200
        return False

    def get(self, path: str) -> httpx.Response:
        """A GET, for tests without an event loop."""
        return httpx.get(f"{self.url}{path}", timeout=5, **LOCAL)

    def post(self, path: str, body: Json) -> httpx.Response:
        """A POST, for tests without an event loop."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=CALL_S, **LOCAL)

    _deadline = 0.0

    def _pause(self, what: str) -> None:
        self._deadline = self._deadline or time.monotonic() + START_S
        assert self.popen.poll() is None, f"it ended with {self.popen.returncode} and did not {what}:\n{self.log}"
        assert time.monotonic() < self._deadline, f"it did not {what}:\n{self.log}"
        time.sleep(0.02)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to this process alone."""
        self.popen.send_signal(number)

    def exit_code(self, within_s: float = 10.0) -> int:
        """The exit code; fails when the process does not end in time."""
        return self.popen.wait(within_s)

    async def ended(self, within_s: float = 10.0) -> int:
        """The same for a test that keeps its event loop running."""
        return await asyncio.to_thread(self.exit_code, within_s)

    def end(self) -> None:
        """End it, whatever it does."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)

    @contextlib.asynccontextmanager
    async def caller(self, **options: Any) -> AsyncIterator[Caller]:
        """A caller over real sockets."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=CALL_S, limits=limits, **LOCAL, **options) as http:
            yield Caller(http)

    async def connect(self) -> "Connection":
        """A bare connection."""
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port))


class Connection:
    """A bare TCP connection: for callers that do what no HTTP client does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: Any, *, headers: str = "") -> None:
        """The bytes of a POST; the answer is not awaited."""
        await self.send(post_bytes(path, body, headers=headers))

    async def answer(self, within_s: float = 10.0) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer with a content length."""
        async with asyncio.timeout(within_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(head[0].split()[1]), headers, body

    def stop_reading(self) -> None:
        """Take nothing more from the socket: what comes fills the buffers between the processes."""
        self._transport.pause_reading()

    def go_on_reading(self) -> None:
        """Take what comes again."""
        self._transport.resume_reading()

    @property
    def _transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self.writer.transport)

    async def hang_up(self) -> None:
        """Go away without a word."""
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()


def post_bytes(path: str, body: Any, *, headers: str = "") -> bytes:
    """A POST as it goes over the wire."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: service\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def serve_command(fake: Json | None = None, /, **settings: Any) -> list[str]:
    """`batchserve serve` on a free port with the fake backend; settings under their own names."""
    values: Json = {"backend": "fake", "port": 0, "batch_size": 8, "max_wait_ms": 5, **settings}
    words = [BATCHSERVE, "serve"]
    if fake is not None:
        words += ["--fake-config", json.dumps(fake)]
    for name, value in values.items():
        for one in value if isinstance(value, tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", str(one)]
    return words


@contextlib.contextmanager
def start(folder: Path, command: list[str], *, env: dict[str, str] | None = None, url: str = "") -> Iterator[Process]:
    """A process that runs ``command`` from ``folder``, with a clean set of settings."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith("BATCHSERVE_")}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT, env={**clean, **(env or {})}
        )
    process = Process(popen, folder, url or None)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def serving(folder: Path, fake: Json | None = None, /, **settings: Any) -> Iterator[Process]:
    """A ready service in a process of its own."""
    with start(folder, serve_command(fake, **settings)) as process:
        process.wait_ready()
        yield process
