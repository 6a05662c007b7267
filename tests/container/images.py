"""The image, built with buildah and run with podman and runc: Debian's packages, and no container engine.

No registry is needed either: the base is made with mmdebstrap, under the name that the Dockerfile asks for.
"""

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.container.dockerfile import DOCKERFILE, ROOT, default_of
from tests.service.support import LOCAL, free_port

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
TOOLS = ("buildah", "podman", "runc", "mmdebstrap")
IMAGE = "localhost/batchserve:cpu"
READY_S = 180.0
# What the official image has beyond Debian's, as far as the Dockerfile can tell: a pip of its own in /usr/local.
BASE_PACKAGES = "apt,ca-certificates,passwd,python3,python3-venv"
PIP_INTO_BASE = (
    "set -e; rm /usr/lib/python3*/EXTERNALLY-MANAGED; cd /usr/share/python-wheels; "
    "export PYTHONPATH=$(echo pip-*.whl); "
    "python3 -m pip install --root-user-action ignore --no-index --find-links . pip setuptools"
)


def missing() -> str | None:
    """Why images cannot be built and run here, if they cannot."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)}: not installed"
    return None if os.geteuid() == 0 else "building and running images without an engine needs root"


def call(*words: str | Path, timeout_s: float = 600, **options: Any) -> str:
    """A command's output; fails with its last lines when it does."""
    done = subprocess.run(
        list(map(str, words)),
        env={**os.environ, "PATH": PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{words[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
    return done.stdout.strip()


class Store:
    """Images and containers in a folder of their own, so that nothing of the machine's is touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = ("--root", folder / "store", "--runroot", folder / "run", "--storage-driver", "overlay")

    def buildah(self, *words: str | Path) -> str:
        """Run buildah on this store."""
        return call("buildah", *self._places, *words, cwd=ROOT)

    def podman(self, *words: str | Path, timeout_s: float = 60) -> str:
        """Run podman on this store."""
        return call(*self.podman_words(*words), timeout_s=timeout_s)

    def podman_words(self, *words: str | Path) -> list[str]:
        """The words of a podman command on this store."""
        return list(map(str, ["podman", *self._places, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *words]))

    def has(self, image: str) -> bool:
        """Whether the image is here."""
        return bool(self.buildah("images", "--quiet", "--filter", f"reference={image}"))

    def remove(self) -> None:
        """End and remove all that is in it, and the folder."""
        with contextlib.suppress(AssertionError):
            self.podman("rm", "--all", "--force", "--time", "0")
            self.buildah("rm", "--all")
            self.buildah("rmi", "--all", "--force")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def store() -> Iterator[Store]:
    """A store that is removed at the end; a folder in CONTAINER_STORE is kept, with the layers of earlier builds."""
    kept = os.environ.get("CONTAINER_STORE")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="batchserve-images-", dir="/var/tmp"))
    opened = Store(folder.absolute())
    try:
        yield opened
    finally:
        if not kept:
            opened.remove()


def make_base(into: Store) -> None:
    """The image that the Dockerfile starts from, made of Debian's packages."""
    name = f"docker.io/library/{default_of('BASE')}"
    if into.has(name):
        return
    suite = name.rsplit("-", 1)[1]
    with tempfile.TemporaryDirectory(dir=into.folder) as work:
        tar = Path(work) / "base.tar"
        call("mmdebstrap", "--quiet", "--mode=root", "--variant=essential", f"--include={BASE_PACKAGES}", suite, tar)
        base = into.buildah("from", "scratch")
        into.buildah("add", "--quiet", base, tar, "/")
        into.buildah("run", "--isolation", "chroot", base, "sh", "-c", PIP_INTO_BASE)
        into.buildah("commit", "--quiet", "--rm", base, name)


def build(into: Store, target: str) -> str:
    """Build a target of the Dockerfile; the image's name."""
    make_base(into)
    with tempfile.TemporaryDirectory() as work:
        into.buildah(
            *("build", "--isolation", "chroot", "--pull-never", "--format", "docker", "--target", target),
            f"--layers={'true' if os.environ.get('CONTAINER_STORE') else 'false'}",
            *_pip_of_this_machine(Path(work)),
            *("--tag", IMAGE, "--file", DOCKERFILE, "."),
        )
    return IMAGE


def _pip_of_this_machine(work: Path) -> list[str | Path]:
    """Hand this machine's own pip configuration to the build, as the guide says, with the files that it names."""
    settings = _pip_settings()
    words: list[str | Path] = []
    if certificates := settings.get("cert"):
        words += ["--secret", f"id=ca.crt,src={certificates}"]
        settings["cert"] = "/run/secrets/ca.crt"
    lines = [f"{name} = {' '.join(value.split())}" for name, value in settings.items()]
    (work / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    for place in _places_in(settings):
        words += ["--volume", f"{place}:{place}:ro"]
    return [*words, "--secret", f"id=pip.conf,src={work / 'pip.conf'}"]


def _pip_settings() -> dict[str, str]:
    """What ``pip config list`` says, the environment's last as it wins."""
    lines = call(sys.executable, "-m", "pip", "config", "list").splitlines()
    pairs = [line.partition("=")[::2] for line in sorted(lines, key=lambda line: line.startswith(":env:"))]
    wanted = [(key, value) for key, value in pairs if key.startswith(("global.", "install.", ":env:."))]
    return {key.partition(".")[2]: str(ast.literal_eval(value)) for key, value in wanted}


def _places_in(settings: dict[str, str]) -> set[Path]:
    """The files and folders of this machine that pip's settings name; an index in a folder has its files beside it."""
    urls = [urlsplit(word) for value in settings.values() for word in value.split()]
    paths = [Path(url.path).parent if url.scheme else Path(url.path) for url in urls if url.scheme in ("", "file")]
    return {path for path in paths if path.is_absolute() and path.exists()}


class Container:
    """A container that runs the image on the host's network, on a port of its own."""

    def __init__(self, images: Store, *options: str, arguments: Sequence[str] = (), **settings: Any) -> None:
        self._images = images
        self.port = free_port()
        values = {"port": self.port, **settings}
        environment = [f"--env=BATCHSERVE_{name.upper()}={value}" for name, value in values.items()]
        limits = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")  # not above this machine's own
        self.began = time.monotonic()
        self.id = images.podman(
            *("run", "--detach", "--network=host", *limits, *environment, *options, IMAGE, *arguments)
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it printed, on both streams."""
        done = subprocess.run(
            self._images.podman_words("logs", self.id),
            env={**os.environ, "PATH": PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def inspect(self) -> dict[str, Any]:
        """All that podman knows of it."""
        (found,) = json.loads(self._images.podman("inspect", self.id))
        return dict(found)

    @property
    def has_ended(self) -> bool:
        return not self.inspect()["State"]["Running"]

    def wait_ready(self) -> "Container":
        """Until ``/readyz`` says so."""
        while not self.is_ready():
            assert not self.has_ended, self.log[-3000:]
            assert time.monotonic() < self.began + READY_S, self.log[-3000:]
            time.sleep(0.2)
        return self

    def is_ready(self) -> bool:
        """What ``/readyz`` says."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", timeout=5, **LOCAL).status_code == 200
        return False

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """A POST."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **LOCAL)

    def inside(self, *words: str) -> str:
        """A command's output in the container."""
        return self._images.podman("exec", self.id, *words)

    def is_healthy(self) -> bool:
        """What the image's health check says."""
        words = self._images.podman_words("healthcheck", "run", self.id)
        environment = {**os.environ, "PATH": PATH}
        return subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False).returncode == 0

    def stop(self, within_s: int) -> None:
        """SIGTERM, and SIGKILL when that time is over."""
        self._images.podman("stop", "--time", str(within_s), self.id, timeout_s=within_s + 60)

    def exit_code(self, within_s: float = READY_S) -> int:
        """Its exit code, once it has ended."""
        return int(self._images.podman("wait", self.id, timeout_s=within_s))

    def complaints(self) -> list[str]:
        """The lines with which a start ends that has failed."""
        return [line for line in self.log.splitlines() if line.startswith("batchserve: cannot start: ")]

    def remove(self) -> None:
        """End it."""
        self._images.podman("rm", "--force", "--time", "0", "--volumes", self.id)


@contextlib.contextmanager
def container(images: Store, *options: str, arguments: Sequence[str] = (), **settings: Any) -> Iterator[Container]:
    """A container that is removed at the end.

    Args:
        images: where the image is.
        options: of ``podman run``.
        arguments: of the image's entrypoint; none: its own.
        settings: the service's, handed over in the environment.
    """
    started = Container(images, *options, arguments=arguments, **settings)
    try:
        yield started
    finally:
        started.remove()
