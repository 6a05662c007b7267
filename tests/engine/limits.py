"""A limit of memory as a container has it: a memory cgroup (version 1) made by hand."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")


def can_make_memory_cgroups() -> bool:
    return os.geteuid() == 0 and (GROUPS / "memory.limit_in_bytes").exists() and os.access(GROUPS, os.W_OK)


@contextmanager
def memory_cgroup(limit_mib: int) -> Iterator[list[str]]:
    """A group with this limit; words that put the command behind them into it."""
    group = GROUPS / f"batchserve-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_mib << 20))
        yield ["bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-"]
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 5
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):  # busy, until the kernel has seen its processes off
            group.rmdir()
        time.sleep(0.05)
