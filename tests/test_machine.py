"""What may still be used, where the files of the kernel are small ones of the test."""

import shutil
import types
from pathlib import Path

import pytest

from app import machine

MIB = 2**20


class Kernel:
    """A machine of 8 GiB with 6 GiB available, whose /proc/self and cgroups are in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.proc.mkdir()
        self.write("proc/cgroup", "")
        self.write("proc/mountinfo", "20 1 0:5 / / rw - ext4 /dev/sda rw\n")

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def is_in(self, path: str, *, kind: str, root: str = "/") -> None:
        """The process is in this group of cgroup version 2 or 1, whose hierarchy is mounted at ``groups``."""
        lines = f"0::{path}\n" if kind == "cgroup2" else f"3:cpu,cpuacct:{path}\n7:memory:{path}\n"
        options = "rw" if kind == "cgroup2" else "rw,memory,cpu"
        self.write("proc/cgroup", lines)
        point = self.root / "groups"
        self.write("proc/mountinfo", f"30 23 0:28 {root} {point} rw,relatime shared:1 - {kind} cgroup {options}\n")

    def group(self, path: str, **files: object) -> None:
        for name, text in files.items():
            self.write(f"groups{path}/{name.replace('__', '.')}", f"{text}\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(machine, "_PROC", kernel.proc)
    memory = types.SimpleNamespace(available=6 * 1024 * MIB, total=8 * 1024 * MIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    return kernel


def test_without_cgroups_the_machines_free_memory_counts(kernel: Kernel) -> None:
    assert machine.available_memory() == 6 * 1024 * MIB
    assert machine.memory_limit() is None
    assert machine.describe_memory() == "6,144 MiB may be used"


def test_a_kernel_that_tells_nothing_is_no_failure(kernel: Kernel) -> None:
    shutil.rmtree(kernel.proc)

    assert machine.available_memory() == 6 * 1024 * MIB
    assert machine.cpu_quota() is None


def test_version_2_in_a_namespace_of_its_own_as_docker_has_it(kernel: Kernel) -> None:
    kernel.is_in("/", kind="cgroup2")
    kernel.group("", memory__max=512 * MIB, memory__current=100 * MIB)

    assert machine.available_memory() == 412 * MIB
    assert machine.describe_memory() == "412 MiB may be used (the container's limit is 512 MiB)"


def test_version_2_without_a_limit(kernel: Kernel) -> None:
    kernel.is_in("/", kind="cgroup2")
    kernel.group("", memory__max="max", memory__current=100 * MIB)

    assert machine.available_memory() == 6 * 1024 * MIB


def test_the_page_cache_can_be_dropped_and_counts_as_free(kernel: Kernel) -> None:
    kernel.is_in("/", kind="cgroup2")
    stat = f"anon 1\nactive_file {50 * MIB}\ninactive_file {150 * MIB}\nshmem 7"
    kernel.group("", memory__max=512 * MIB, memory__current=300 * MIB, memory__stat=stat)

    assert machine.available_memory() == 412 * MIB


def test_the_tightest_of_the_groups_above_counts(kernel: Kernel) -> None:
    kernel.is_in("/pods/mine", kind="cgroup2")
    kernel.group("/pods/mine", memory__max="max", memory__current=10 * MIB)
    kernel.group("/pods", memory__max=1024 * MIB, memory__current=900 * MIB)

    assert machine.available_memory() == 124 * MIB
    assert machine.memory_limit() == 1024 * MIB


def test_version_1_with_its_own_names(kernel: Kernel) -> None:
    kernel.is_in("/docker/abc", kind="cgroup")
    stat = f"active_file 1\ntotal_active_file {5 * MIB}\ntotal_inactive_file {15 * MIB}"
    kernel.group(
        "/docker/abc",
        memory__limit_in_bytes=256 * MIB,
        memory__usage_in_bytes=120 * MIB,
        memory__stat=stat,
    )
    kernel.group("", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)

    assert machine.available_memory() == 156 * MIB


def test_version_1_in_a_container_shows_the_group_itself_as_the_top(kernel: Kernel) -> None:
    kernel.is_in("/docker/abc", kind="cgroup", root="/docker/abc")
    kernel.group("", memory__limit_in_bytes=256 * MIB, memory__usage_in_bytes=56 * MIB)

    assert machine.available_memory() == 200 * MIB


def test_a_group_outside_of_what_is_mounted_is_taken_for_the_top(kernel: Kernel) -> None:
    kernel.is_in("/../elsewhere", kind="cgroup2")
    kernel.group("", memory__max=256 * MIB, memory__current=56 * MIB)

    assert machine.available_memory() == 200 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(kernel: Kernel) -> None:
    kernel.is_in("/", kind="cgroup2")
    kernel.group("", memory__max=100 * MIB, memory__current=120 * MIB)

    assert machine.available_memory() == 0


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("cgroup2", {"cpu__max": "150000 100000"}, 1.5),
        ("cgroup2", {"cpu__max": "max 100000"}, None),
        ("cgroup", {"cpu__cfs_quota_us": "50000", "cpu__cfs_period_us": "100000"}, 0.5),
        ("cgroup", {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, None),
        ("cgroup2", {}, None),
    ],
    ids=str,
)
def test_the_quota_of_processor_time(kernel: Kernel, kind: str, files: dict[str, str], expected: float | None) -> None:
    kernel.is_in("/", kind=kind)
    kernel.group("", **files)

    assert machine.cpu_quota() == expected


def test_a_real_kernel_gives_sane_figures() -> None:
    assert 0 < machine.available_memory() < 2**50
    assert machine.cores()
    quota = machine.cpu_quota()
    assert quota is None or quota > 0


# --- folders ---


def test_a_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert machine.check_temporary_folder().as_dict() == {
        "check": "temp folder",
        "status": "ok",
        "found": str(tmp_path),
        "advice": "",
    }


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))

    finding = machine.check_temporary_folder()
    assert finding.status == "fail"
    assert "TMPDIR" in finding.advice


def test_a_folder_that_is_not_there_can_be_written_where_it_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert machine.can_write(tmp_path)
    assert machine.can_write(tmp_path / "a" / "b")
    assert not machine.can_write(tmp_path / "file" / "b")
