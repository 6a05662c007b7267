"""nginx with the configuration that the deployment guide shows, in front of a real service under the prefix /llm."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from app.settings import Settings
from tests.container.guide import blocks
from tests.service.support import LOCAL, Json, Process, check_error, check_generation, check_row, free_port, serving

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NGINX = shutil.which("nginx", path=PATH)

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def guide_s_configuration() -> str:
    (text,) = blocks("nginx")
    return str(text)


def main_file(folder: Path, port: int, service_port: int) -> str:
    """A whole configuration around the guide's, on free ports."""
    ours = guide_s_configuration()
    for old, new in ((" 127.0.0.1:8000 ", f" 127.0.0.1:{service_port} "), ("listen 80;", f"listen 127.0.0.1:{port};")):
        assert ours.count(old) == 1
        ours = ours.replace(old, new)
    folders = "\n".join(f"{name}_temp_path {folder}/{name};" for name in TEMPORARY)
    user = "user root;" if os.geteuid() == 0 else ""  # the folders of a test are closed to others
    return f"{user} daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {folders}\n{ours} }}"


@contextmanager
def gateway(folder: Path, service_port: int) -> Iterator[httpx.Client]:
    """A client whose calls go through nginx."""
    folder.mkdir(mode=0o755)
    port = free_port()
    (folder / "nginx.conf").write_text(main_file(folder, port, service_port))
    log = folder / "log"
    words = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(log)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as nginx:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, **LOCAL) as client:
                _wait_until_open(client, nginx)
                yield client
        finally:
            nginx.terminate()


def _wait_until_open(client: httpx.Client, nginx: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            client.get("/")
            return
        except httpx.TransportError:
            assert nginx.poll() is None, nginx.stderr and nginx.stderr.read()
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Windows of one request: rows of a batch are finished one after the other, 100 ms each."""
    folder = tmp_path_factory.mktemp("service")
    with serving(folder, {"step_ms": 50}, root_path="/llm", batch_size=1, max_wait_ms=0) as process:
        yield process


@pytest.fixture(scope="module")
def client(service: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("gateway")
    folder.chmod(0o755)
    with gateway(folder / "nginx", service.port) as client:
        yield client


def rows(count: int) -> Json:
    return {"requests": [{"prompt": f"row {number}"} for number in range(count)], "defaults": {"max_tokens": 2}}


def test_a_request_passes_with_its_id(client: httpx.Client) -> None:
    response = client.post("/llm/generate", json={"prompt": "hello", "max_tokens": 2}, headers={"x-request-id": "id-1"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "id-1"
    check_generation(response.json())


def test_nothing_but_the_prefix_is_served(client: httpx.Client) -> None:
    assert client.get("/llm/readyz").status_code == 200
    assert client.get("/readyz").is_client_error
    assert client.get("/llm/metrics").status_code == 404


def test_the_documentation_and_its_document_are_found_below_the_prefix(client: httpx.Client) -> None:
    page = client.get("/llm/docs").text
    found = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert found
    for path in (*found, "/llm/openapi.json"):
        assert client.get(path).status_code == 200, path


def test_rows_of_a_batch_arrive_one_by_one(client: httpx.Client) -> None:
    arrivals = []
    headers = {"accept": "application/x-ndjson"}
    with client.stream("POST", "/llm/batch", json=rows(4), headers=headers) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        for line in response.iter_lines():
            arrivals.append((time.monotonic(), line))
    assert len(arrivals) == 5  # four rows and the rest of the answer
    times = [at for at, _ in arrivals[:4]]
    assert all(later - earlier > 0.05 for earlier, later in pairwise(times)), times


def test_a_batch_as_one_json_passes(client: httpx.Client) -> None:
    body = client.post("/llm/batch", json=rows(3)).json()
    assert body["counts"] == {"total": 3, "succeeded": 3, "failed": 0}
    for row in body["results"]:
        check_row(row)


def test_a_body_up_to_the_service_s_limit_passes_and_a_larger_one_gets_its_form_of_413(client: httpx.Client) -> None:
    limit = Settings.model_fields["max_body_bytes"].default
    headers = {"content-type": "application/json"}
    fits = client.post("/llm/generate", content=b'{"prompt": 1}'.ljust(limit), headers=headers)
    assert check_error(fits)["param"] == "prompt"
    error = check_error(client.post("/llm/generate", content=b" " * (limit + 1), headers=headers))
    assert (error["code"], error["limit"]) == ("request_too_large", limit)


def test_a_connection_to_the_service_serves_many_requests(client: httpx.Client, service: Process) -> None:
    used = set()
    for _ in range(5):
        assert client.post("/llm/generate", json={"prompt": "hello", "max_tokens": 1}).status_code == 200
        connections = psutil.Process(service.popen.pid).net_connections("tcp")
        used |= {one.raddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED and one.raddr}
    assert len(used) == 1


def test_idle_connections_are_dropped_by_the_gateway_first() -> None:
    found = re.search(r"keepalive_timeout (\d+)s;", guide_s_configuration())
    assert found
    assert int(found[1]) < Settings.model_fields["keep_alive_s"].default


async def test_a_caller_that_hangs_up_is_noticed_by_the_service(client: httpx.Client, service: Process) -> None:
    async with httpx.AsyncClient(base_url=client.base_url, timeout=0.2, **LOCAL) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.post("/llm/batch", json=rows(8))
    deadline = time.monotonic() + 5
    while not re.search(r"^batchserve_client_disconnected_total [1-9]", service.get("/metrics").text, re.MULTILINE):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_a_request_whose_service_dies_gets_an_error_in_the_service_s_form(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    with (
        serving(tmp_path / "service", {"step_ms": 1000}, root_path="/llm") as service,
        gateway(tmp_path / "nginx", service.port) as client,
    ):
        service.popen.send_signal(signal.SIGSTOP)
        with httpx.Client(base_url=client.base_url, timeout=0.5, **LOCAL) as other, pytest.raises(httpx.ReadTimeout):
            other.get("/llm/livez")
        service.popen.kill()
        response = client.post("/llm/generate", json={"prompt": "hello"})
        assert check_error(response)["code"] == "not_ready"
