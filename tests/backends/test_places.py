"""Processes, shared memory, threads and folders of an engine."""

import os
import shutil
import stat
import types
from pathlib import Path
from typing import Any

import pytest

from app.backends import places
from app.backends.args import VLLMOfflineArgs

MIB = 2**20


def make_args(**values: Any) -> VLLMOfflineArgs:
    return VLLMOfflineArgs.model_validate({"model": "m", "served_model_name": "served", **values})


SEPARATE = {"engine_process": "separate"}
TWO_WORKERS = {"vllm_config": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize(
    ("args", "is_cpu", "is_needed"),
    [
        ({}, True, False),
        (SEPARATE, True, True),
        (TWO_WORKERS, True, True),
        ({**TWO_WORKERS, "engine_process": "inline"}, True, True),
        ({}, False, False),
        (SEPARATE, False, False),
        (TWO_WORKERS, False, True),
    ],
    ids=str,
)
def test_shared_memory_is_needed_where_there_are_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: dict[str, Any], is_cpu: bool, is_needed: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=64 * MIB))

    finding = places.check_shared_memory(make_args(**args), is_cpu=is_cpu, folder=tmp_path)

    assert finding.status == ("fail" if is_needed else "ok")
    if is_needed:
        assert "64 MiB free" in finding.found
        assert "240 MiB" in finding.found
        assert "--shm-size=1g" in finding.advice


def test_shared_memory_of_240_mib_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=240 * MIB))

    assert places.check_shared_memory(make_args(**SEPARATE), is_cpu=True, folder=tmp_path).status == "ok"


def test_shared_memory_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    assert places.check_shared_memory(make_args(**SEPARATE), is_cpu=True, folder=tmp_path / "no").status == "warn"


# --- threads ---


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four cores, no quota, no variables; called with others, it has those."""
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)

    def have(cores: int = 4, quota: float | None = None, **variables: str) -> None:
        monkeypatch.setattr("app.machine.cores", lambda: list(range(cores)))
        monkeypatch.setattr("app.machine.cpu_quota", lambda: quota)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    have()
    return have


@pytest.mark.parametrize(
    ("have", "args", "status", "word"),
    [
        ({}, {}, "ok", "OMP_NUM_THREADS=1 (the default here), 4 cores"),
        ({"OMP_NUM_THREADS": "4"}, {}, "ok", "OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "5"}, {}, "warn", "set OMP_NUM_THREADS to 4"),
        ({"OMP_NUM_THREADS": "3"}, TWO_WORKERS, "warn", "set OMP_NUM_THREADS to 2"),
        ({"OMP_NUM_THREADS": "4", "quota": 2.0}, {}, "warn", "set OMP_NUM_THREADS to 2"),
        ({"OMP_NUM_THREADS": "many"}, {}, "warn", "a number of cores"),
        ({"OMP_NUM_THREADS": "0"}, {}, "warn", "a number of cores"),
        ({"quota": 0.5}, {}, "warn", "--cpus=1"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, {}, "ok", "4 cores"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, {}, "ok", "4 cores"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1|6-7"}, {}, "warn", "may not use: [6, 7]"),
    ],
    ids=str,
)
def test_threads_have_cores(machine: Any, have: dict[str, Any], args: dict[str, Any], status: str, word: str) -> None:
    machine(**have)

    finding = places.check_threads(make_args(**args), is_cpu=True)

    assert finding.status == status
    assert word in f"{finding.found} -> {finding.advice}"


# --- folders and users ---


def test_a_cache_that_can_be_written_and_a_user_with_a_name_need_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("LOGNAME", "somebody")

    assert places.environment_for_user() == {}


def test_a_cache_that_cannot_be_written_is_moved_to_a_private_temp_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    folder = Path(places.environment_for_user()["VLLM_CACHE_ROOT"])

    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert places.environment_for_user()["VLLM_CACHE_ROOT"] == str(folder)  # the next start finds what this one left


@pytest.mark.parametrize("is_link", [True, False], ids=["a link", "open to all"])
def test_a_temp_folder_that_somebody_else_can_fill_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_link: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trap = tmp_path / f"batchserve-cache-{os.geteuid()}"
    if is_link:
        trap.symlink_to(tmp_path)
    else:
        trap.mkdir()
        trap.chmod(0o777)

    folder = places._own_temporary_folder()

    assert folder != trap
    assert folder.stat().st_mode & 0o077 == 0


def test_a_user_in_no_list_of_users_gets_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nobody)

    assert places.environment_for_user()["USER"] == f"uid-{os.geteuid()}"
