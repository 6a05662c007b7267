"""`scripts/guidellm-env`: an environment of its own, made once from a lock that is complete."""

import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.scripts.test_scripts import Checkout

LOCK = ROOT / "requirements" / "guidellm.lock"


def pins(lock: Path) -> set[str]:
    lines = (line.strip().lower().replace("_", "-") for line in lock.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def pip(program: Path, *arguments: str) -> list[str]:
    command = [str(program.with_name("python")), "-I", "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout.splitlines()


def test_torch_comes_first_then_the_lock_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)

    first, installs = checkout.run("scripts/guidellm-env"), checkout.installs()
    second, nothing = checkout.run("scripts/guidellm-env"), checkout.installs()

    assert [line.split()[-1].rpartition("/")[2] for line in installs] == ["torch==2.13.0+cpu", "guidellm.lock"]
    assert first.out == second.out == f"{checkout.root}/.venv-guidellm/bin/guidellm\n"
    assert (first.status, second.status, second.err, nothing) == (0, 0, "", [])


def test_a_run_that_failed_is_taken_up_again(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)

    failed = checkout.run("scripts/guidellm-env", FAKE_PIP="[[ $* != *guidellm.lock ]]")
    checkout.calls()
    again = checkout.run("scripts/guidellm-env")

    assert (failed.status, failed.out) == (1, "")
    assert again.status == 0
    assert checkout.installs()[-1].endswith("requirements/guidellm.lock")


def test_guidellm_has_the_torch_of_the_service() -> None:
    (torch,) = [pin for pin in pins(LOCK) if pin.startswith("torch==")]

    assert torch in pins(ROOT / "requirements" / "cpu.lock")


@pytest.mark.engine
def test_the_environment_is_the_lock_and_nothing_is_missing_from_it(guidellm: Path) -> None:
    installed = {line.lower().replace("_", "-") for line in pip(guidellm, "list", "--format", "freeze")}

    assert {pin for pin in installed if not pin.startswith("pip==")} == pins(LOCK)
    assert pip(guidellm, "check") == ["No broken requirements found."]
