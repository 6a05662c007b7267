"""What the kernel still grants this process: memory, processors, a folder for temporary files.

In a container the machine's own figures are not those that hold: its control groups (cgroups) have limits.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import psutil

from app.finding import Finding

_PROC = Path("/proc/self")


def available_memory() -> int:
    """Bytes that this process may still take: the machine's free memory, or less where a cgroup says so."""
    groups = (_free_in(folder) for folder in _groups("memory"))
    return max(0, min([psutil.virtual_memory().available, *(free for free in groups if free is not None)]))


def memory_limit() -> int | None:
    """Bytes that the tightest cgroup grants to all of its processes; None when the machine's memory is the limit."""
    limits = [limit for folder in _groups("memory") if (limit := _limit_of(folder)) is not None]
    return min(limits, default=None)


def describe_memory() -> str:
    """What may be used, and the container's limit where there is one, as part of a sentence."""
    limit = memory_limit()
    container = "" if limit is None else f" (the container's limit is {mebibytes(limit)})"
    return f"{mebibytes(available_memory())} may be used{container}"


def mebibytes(count: int) -> str:
    """Bytes for a person."""
    return f"{round(Fraction(count, 2**20)):,} MiB"


def cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota() -> float | None:
    """How many cores' worth of time the tightest cgroup grants; None: no limit."""
    quotas = [quota for folder in _groups("cpu") if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def check_temporary_folder() -> Finding:
    """A folder for temporary files, which vLLM wants when it is imported."""
    name = "temp folder"
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written (in a container: mount a tmpfs at /tmp)"
        return Finding(name, "fail", f"no folder for temporary files can be written: {error.strerror or error}", advice)
    return Finding(name, "ok", folder)


def can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, which may be there or not."""
    place = next((part for part in (folder, *folder.parents) if os.path.lexists(part)), Path("/"))
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


# --- cgroups, version 2 and version 1 ---


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups, from its own up to the outermost that can be seen."""
    with contextlib.suppress(OSError, ValueError):
        own = _memberships()
        for line in (_PROC / "mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            kind, _, options = rest.split(" ")[:3]
            root, point = mount.split(" ")[3:5]
            is_ours = kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))
            path = own.get("" if kind == "cgroup2" else controller)
            if is_ours and path is not None:
                yield from _upward(Path(point), path, root)


def _memberships() -> dict[str, str]:
    """The path of this process's group by controller; version 2 has one for all of them, under ``""``."""
    lines = (line.split(":", 2) for line in (_PROC / "cgroup").read_text().splitlines())
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _upward(point: Path, path: str, root: str) -> Iterator[Path]:
    """From the group to where the hierarchy is mounted; in a container that is often the group itself."""
    relative = path.removeprefix(root if root != "/" else "").lstrip("/")
    folder = point / relative
    if ".." in relative.split("/") or not folder.is_dir():
        folder = point
    yield folder
    while folder != point:
        folder = folder.parent
        yield folder


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says ``max``."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _limit_of(folder: Path) -> int | None:
    """Bytes; version 1 writes no limit as a number beyond any memory."""
    limits = (_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return next((limit for limit in limits if limit is not None and limit < psutil.virtual_memory().total), None)


def _free_in(folder: Path) -> int | None:
    """Bytes left of the group's limit; the page cache in it can be dropped and counts as free."""
    limit = _limit_of(folder)
    usages = (_number(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))
    usage = next((usage for usage in usages if usage is not None), None)
    return None if limit is None or usage is None else limit - max(0, usage - _page_cache(folder))


def _page_cache(folder: Path) -> int:
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    prefix = "total_" if "total_active_file" in stat else ""  # version 1: with the groups below
    return sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
