"""The `cpu` image: built, then run as guides and clusters run it."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.container.guide import GUIDE
from tests.container.images import IMAGE, Container, Store, container, missing
from tests.service.support import LOCAL, check_generation

pytestmark = [pytest.mark.container, pytest.mark.engine]
if reason := missing():
    pytestmark.append(pytest.mark.skip(reason=reason))

USER = 10001
OTHER = "12345:12345"
SHUT = ("--read-only", "--tmpfs=/tmp")
"""Nothing of the container can be written but its volumes and /tmp."""
BUILD_TOOLS = "gcc g++ cc c++ clang ld as make cmake ninja git pip pip3 pip3.11 cargo rustc".split()  # noqa: SIM905
SOON_S = 30.0


def volume(source: Path, target: str, *options: str) -> str:
    """The option that mounts a folder of this machine."""
    return f"--volume={source}:{target}" + "".join(f":{option}" for option in options)


@pytest.fixture(scope="module")
def running(images: Store, shared_cache: Path) -> Iterator[Container]:
    """The embedded model under the image's own user and command."""
    with container(images, *SHUT, "--memory=4g", volume(shared_cache, "/cache")) as started:
        yield started.wait_ready()


class TestRunning:
    """The embedded model under the image's own user and command, all shut but /cache and /tmp."""

    def test_it_answers_a_batch(self, running: Container) -> None:
        rows = [{"messages": [{"role": "user", "content": "What is the capital of France?"}]}, {"prompt": "2 + 2 ="}]
        response = running.post("/batch", {"requests": rows, "defaults": {"temperature": 0, "max_tokens": 16}})
        body = response.json()
        assert response.status_code == 200
        assert body["counts"] == {"total": 2, "succeeded": 2, "failed": 0}
        assert "Paris" in body["results"][0]["response"]["outputs"][0]["text"]

    def test_it_takes_the_memory_that_the_guide_says(self, running: Container) -> None:
        """Ahead of tests that run more in the container: a peak never falls."""
        names = "/sys/fs/cgroup/memory/memory.max_usage_in_bytes /sys/fs/cgroup/memory.peak"
        peak = int(running.inside("sh", "-c", f"cat {names} 2>/dev/null || true"))
        assert peak == pytest.approx(figure_of_the_guide(r"takes (\S+) GB at its peak"), rel=0.1)

    def test_it_is_healthy(self, running: Container) -> None:
        assert running.is_healthy()

    def test_nothing_runs_as_root(self, running: Container) -> None:
        users = running.inside("sh", "-c", "id -u; grep -h ^Uid: /proc/[0-9]*/status").split()
        assert {user for user in users if user.isdigit()} == {str(USER)}

    def test_its_root_cannot_be_written(self, running: Container) -> None:
        done = running.inside("sh", "-c", "touch /opt/venv/x /x 2>&1 || true")
        assert done.count("Read-only file system") == 2

    def test_tini_is_process_1_and_reaps_orphans(self, running: Container) -> None:
        assert running.inside("cat", "/proc/1/comm") == "tini"
        running.inside("sh", "-c", "sleep 0.1 & exit 0")
        time.sleep(1)
        assert "Z" not in re.findall(r"State:\s+(\S)", running.inside("sh", "-c", "cat /proc/[0-9]*/status"))

    def test_no_build_tools_are_inside(self, running: Container) -> None:
        words = " ".join(BUILD_TOOLS)
        assert running.inside("sh", "-c", f"for tool in {words}; do command -v $tool || true; done") == ""
        for python in ("python", "/usr/bin/python3"):
            assert running.inside(python, "-c", "import importlib.util as u; print(u.find_spec('pip'))") == "None"

    def test_the_license_is_inside(self, running: Container) -> None:
        assert "Apache License" in running.inside("cat", "/licenses/LICENSE")

    def test_its_bytecode_is_there_since_it_could_not_be_kept(self, running: Container) -> None:
        code = (
            "import importlib.util as u, os; origins = [u.find_spec(name).origin for name in ('app', 'torch', 'vllm')];"
            "print([os.path.exists(u.cache_from_source(origin)) for origin in origins])"
        )
        assert running.inside("python", "-c", code) == "[True, True, True]"

    def test_it_has_the_size_that_the_guide_says(self, images: Store) -> None:
        (found,) = json.loads(images.podman("image", "inspect", IMAGE))
        assert found["Size"] == pytest.approx(figure_of_the_guide(r"^`cpu` is (\S+) GB"), rel=0.1)

    def test_labels_and_settings_of_the_image(self, images: Store, running: Container) -> None:
        config = json.loads(images.buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
        assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert config["Labels"]["org.opencontainers.image.version"] == _version_of(running)
        assert config["User"] == str(USER)
        assert config["Entrypoint"] == ["tini", "--", "batchserve"]
        assert config["Cmd"] == ["serve"]
        assert config["StopSignal"] == "SIGTERM"
        assert config["Healthcheck"]["StartPeriod"] >= 600 * 10**9
        assert list(config["ExposedPorts"]) == ["8000/tcp"]
        assert list(config["Volumes"]) == ["/cache"]


def figure_of_the_guide(pattern: str) -> float:
    """A number of gigabytes in the deployment guide, in bytes."""
    found = re.search(pattern, GUIDE.read_text(), re.MULTILINE)
    assert found
    return float(found[1]) * 1e9


def _version_of(running: Container) -> str:
    return str(httpx.get(f"{running.url}/info", **LOCAL).json()["version"])


class TestLife:
    def test_a_health_check_fails_while_the_model_loads(self, images: Store) -> None:
        with container(images, backend="fake", fake_config='{"open_s": 6}') as loading:
            assert not loading.is_healthy()
            loading.wait_ready()
            assert loading.is_healthy()

    def test_as_another_user_with_a_process_for_the_engine_it_finishes_its_work_on_a_signal(
        self, images: Store, models: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
        mounts = (volume(models, "/models", "ro"), volume(tmp_path / "cache", "/cache"))
        command = ("serve", "--model", "/models/tiny", "--engine-process", "separate")
        user = ("--user", OTHER, "--shm-size=1g")
        with container(images, *SHUT, *user, *mounts, arguments=command) as running:
            running.wait_ready()
            answer = _begin_long_batch(running)
            running.stop(within_s=35)
            assert running.exit_code() == 0
            body = answer.result(SOON_S).json()
            assert body["counts"] == {"total": 4, "succeeded": 4, "failed": 0}
            check_generation(body["results"][0]["response"])
            assert "finishing accepted work" in running.log
            assert not running.inspect()["State"]["OOMKilled"]


def _begin_long_batch(running: Container) -> "Future[httpx.Response]":
    """The answer to come to a batch that the engine has begun; one that ends before that is seen is begun again."""
    rows = [{"prompt": f"Count from {number}:"} for number in range(4)]
    body = {"requests": rows, "defaults": {"max_tokens": 1500, "ignore_eos": True}}
    for _ in range(3):
        answer: Future[httpx.Response] = Future()
        before, deadline = _releases(running), time.monotonic() + SOON_S
        threading.Thread(target=_post, args=(running, body, answer), daemon=True).start()
        while _releases(running) == before and not answer.done():
            assert time.monotonic() < deadline, "the batch did not begin"
            time.sleep(0.05)
        if not answer.done():
            return answer
        said = answer.result().text
        assert answer.result().json().get("counts") == {"total": 4, "succeeded": 4, "failed": 0}, said + running.log
    raise AssertionError("three batches of 1,500 tokens a row have ended before it was seen that they had begun")


def _post(running: Container, body: dict[str, Any], answer: "Future[httpx.Response]") -> None:
    try:
        answer.set_result(running.post("/batch", body))
    except Exception as error:
        answer.set_exception(error)


def _releases(running: Container) -> float:
    """How many windows have gone."""
    counts = re.findall(r"^batchserve_window_releases_total\{.*\} (\S+)$", _metrics(running), re.MULTILINE)
    return sum(map(float, counts))


def _metrics(running: Container) -> str:
    return httpx.get(f"{running.url}/metrics", timeout=5, **LOCAL).text


class TestFailedStarts:
    """Each ends by itself, with one line that says what to change, and no stack trace."""

    def test_too_little_memory(self, images: Store, shared_cache: Path) -> None:
        line = complaint(images, "--memory=400m", volume(shared_cache, "/cache"))
        assert "memory" in line
        assert "--memory" in line

    def test_too_little_shared_memory(self, images: Store, models: Path) -> None:
        mount = volume(models, "/models", "ro")
        line = complaint(images, "--shm-size=64m", mount, model="/models/tiny", engine_process="separate")
        assert "/dev/shm" in line
        assert "--shm-size=1g" in line

    def test_a_model_folder_that_it_may_not_read(self, images: Store, models: Path, tmp_path: Path) -> None:
        private = shutil.copytree(models / "tiny", tmp_path / "private")
        private.chmod(0o700)
        line = complaint(images, volume(private, "/models/private", "ro"), model="/models/private")
        assert "/models/private" in line
        assert "ermission" in line or "may not" in line

    def test_a_mount_that_it_may_not_enter(self, images: Store, models: Path, tmp_path: Path) -> None:
        shutil.copytree(models / "tiny", tmp_path / "models" / "tiny")
        (tmp_path / "models").chmod(0o700)
        line = complaint(images, volume(tmp_path / "models", "/models", "ro"), model="/models/tiny")
        assert "/models" in line
        assert "ermission" in line or "may not" in line

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_a_file_of_the_model_that_it_may_not_read(
        self, images: Store, models: Path, tmp_path: Path, name: str
    ) -> None:
        private = shutil.copytree(models / "tiny", tmp_path / "private")
        (private / name).chmod(0o600)
        line = complaint(images, volume(private, "/models/private", "ro"), model="/models/private")
        assert f"/models/private/{name}" in line
        assert "ermission" in line or "may not" in line

    @pytest.mark.parametrize("options", [("ro",), ()], ids=["read-only", "another user's"])
    def test_a_cache_that_it_may_not_write(self, images: Store, tmp_path: Path, options: tuple[str, ...]) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o755)
        line = complaint(images, *SHUT, volume(tmp_path / "cache", "/cache", *options))
        assert "/cache" in line
        assert "XDG_CACHE_HOME" in line

    def test_no_model_at_the_mount_point(self, images: Store) -> None:
        assert "/models/absent" in complaint(images, model="/models/absent")

    def test_a_model_in_a_folder_needs_no_cache(self, images: Store, models: Path, tmp_path: Path) -> None:
        mounts = (volume(models, "/models", "ro"), volume(tmp_path, "/cache", "ro"))
        with container(images, *SHUT, *mounts, model="/models/tiny") as running:
            running.wait_ready()
            assert "Traceback" not in running.log


def complaint(images: Store, *options: str, **settings: Any) -> str:
    """The one line with which the start ends."""
    with container(images, *options, **settings) as started:
        code = started.exit_code(within_s=90)
        lines = started.complaints()
        assert (code, len(lines)) == (1, 1), started.log[-3000:]
        assert "Traceback" not in started.log, started.log[-3000:]
        return lines[0]
