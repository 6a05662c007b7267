"""The look-up of an id: in a real child process, with a Hub on a port of the test."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.backends import hub

STATUSES = {"owner/model": 200, "owner/gated": 403, "owner/broken": 500}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = next((code for name, code in STATUSES.items() if f"/api/models/{name}" in self.path), 404)
        code = {403: "GatedRepo", 404: "RepoNotFound"}.get(status)
        body = json.dumps({"id": "owner/model", "sha": "0" * 40, "siblings": []}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HTTP_PROXY", "http_proxy", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def _a_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.usefixtures("_a_hub")
@pytest.mark.parametrize(
    ("model", "answer"),
    [
        ("owner/model", "yes"),
        ("owner/nothing", "unknown"),
        ("owner/gated", "gated"),
        ("owner/broken", "unclear"),
        ("no/id/at/all", "invalid"),
    ],
)
def test_what_the_hub_says(model: str, answer: str) -> None:
    found = hub.look_up(model, None)

    assert found.answer == answer
    assert found.folder is None


def test_a_hub_that_is_not_there_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()

    found = hub.look_up("owner/model", None)

    assert found.answer == "unreachable"
    assert "refused" in found.reason
    assert time.monotonic() - begun < 30


def test_whoever_says_offline_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    assert hub.look_up("owner/model", None) == hub.Lookup(None, "offline")


def test_what_the_cache_has_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "hf" / "hub" / "models--owner--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)

    assert hub.look_up("owner/model", None) == hub.Lookup(str(snapshot), "offline")


def test_a_child_that_fails_leaves_it_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    assert hub.look_up("owner/model", None).answer == "unclear"
