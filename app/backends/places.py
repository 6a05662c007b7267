"""Where the engine runs: its processes, their shared memory and threads, and the folders it writes to."""

import contextlib
import getpass
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from app import machine
from app.backends.args import VLLMArgs, VLLMPythonArgs
from app.finding import Finding
from app.machine import can_write, mebibytes
from app.settings import engine_cache, engine_variable

SHARED_BYTES = 240 * 2**20
"""The largest ring buffer that vLLM 0.32 asks for at once: 10 chunks of 24 MiB, from a worker to its engine core."""
MOST_CORES = 4096
SHARED_ADVICE = (
    "give the container more (docker run --shm-size=1g; in Kubernetes an emptyDir with medium Memory at /dev/shm)"
)


def is_inline(args: VLLMArgs, *, is_cpu: bool) -> bool:
    """Whether the engine core runs in this process: with ``auto`` on a CPU with one worker; never with ``AsyncLLM``."""
    if isinstance(args, VLLMPythonArgs):
        return False
    if args.engine_process != "auto":
        return args.engine_process == "inline"
    return is_cpu and workers(args) == 1


def workers(args: VLLMArgs) -> int:
    """Processes that hold a part of the model; 1 where a value is no number, which vLLM refuses."""
    count = 1
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        value = args.vllm_config.get(size, 1)
        count *= value if isinstance(value, int) and value > 0 else 1
    return count


def check_shared_memory(args: VLLMArgs, *, is_cpu: bool, folder: Path = Path("/dev/shm")) -> Finding:
    """An engine core in a process of its own talks to its workers through ring buffers there."""
    name = "shared memory"
    if workers(args) == 1 and (is_inline(args, is_cpu=is_cpu) or not is_cpu):
        return Finding(name, "ok", "not needed: the engine has no worker processes")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(name, "warn", f"{folder} cannot be looked at: {error.strerror}", "mount a tmpfs there")
    found = f"{folder} has {mebibytes(free)} free"
    inline = ", or set engine_process to inline" if workers(args) == 1 else ""
    if free < SHARED_BYTES:
        needed = f"; an engine with worker processes needs {mebibytes(SHARED_BYTES)}"
        return Finding(name, "fail", found + needed, SHARED_ADVICE + inline)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"user id {os.geteuid()} may not write {folder}", SHARED_ADVICE + inline)
    return Finding(name, "ok", found)


def check_threads(args: VLLMArgs, *, is_cpu: bool) -> Finding:
    """Whether the threads that compute have cores of their own."""
    check, allowed, quota = "threads", machine.cores(), machine.cpu_quota()
    asked = engine_variable("OMP_NUM_THREADS")
    threads = asked or ("1" if is_cpu else None)
    places = f"{len(allowed)} cores" + ("" if quota is None else f", time of {quota:g} of them (the container's limit)")
    found = f"OMP_NUM_THREADS={threads or 'not set'}{'' if asked else ' (the default here)'}, {places}"
    if threads is not None and not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", threads):
        return Finding(check, "warn", found, "set OMP_NUM_THREADS to a number of cores")
    if strangers := _cores_out_of_reach(allowed):
        bound = f"VLLM_CPU_OMP_THREADS_BIND names cores that this process may not use: {strangers}; {places}"
        return Finding(check, "warn", bound, f"name some of {allowed}, or unset it")
    usable = len(allowed) if quota is None else min(len(allowed), max(1, round(quota)))
    total = int((threads or "1").partition(",")[0]) * workers(args)
    if is_cpu and total > usable:
        advice = (
            f"set OMP_NUM_THREADS to {max(1, usable // workers(args))}: threads that share a core wait for each other"
        )
        return Finding(check, "warn", f"{found}, {workers(args)} worker(s)", advice)
    if quota is not None and quota < 1:
        return Finding(check, "warn", found, "give the container at least one core (docker run --cpus=1)")
    return Finding(check, "ok", found)


def _cores_out_of_reach(allowed: list[int]) -> list[int]:
    named = engine_variable("VLLM_CPU_OMP_THREADS_BIND") or ""
    wanted: set[int] = set()
    for first, last in re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", named):
        wanted |= set(range(int(first), min(int(last or first), MOST_CORES) + 1))
    return sorted(wanted - set(allowed))[:16]


def environment_for_user() -> dict[str, str]:
    """Variables for a user whose home cannot be written, or who is in no list of users, as in containers."""
    wanted = {}
    if not can_write(engine_cache()):
        wanted["VLLM_CACHE_ROOT"] = str(_own_temporary_folder())
    try:
        getpass.getuser()
    except (KeyError, OSError):  # torch asks for it, to name its folder of compiled kernels
        wanted["USER"] = f"uid-{os.geteuid()}"
    return wanted


def _own_temporary_folder() -> Path:
    """A folder for caches that nobody else can have filled: what vLLM finds there it runs."""
    folder = Path(tempfile.gettempdir(), f"batchserve-cache-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="batchserve-cache-"))
