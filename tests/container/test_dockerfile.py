"""What the Dockerfile says, for both targets: `gpu` cannot be built where there is no registry, so it is read."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.container.dockerfile import DOCKERFILE, ROOT, default_of, image, last, stages

HADOLINT = Path(sys.executable).with_name("hadolint")
TARGETS = ("cpu", "gpu")


def packages_of(target: str) -> set[str]:
    """Debian's packages that a target's image installs over its base."""
    commands = [step.text for step in image(target) if step.name == "RUN"]
    lists = [found for command in commands for found in re.findall(r"apt-get install ([^&|;]+)", command)]
    return {word for found in lists for word in found.split() if not word.startswith("-")}


def test_the_linter_finds_nothing() -> None:
    assert HADOLINT.exists(), "hadolint is not installed: scripts/setup --dev"
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_both_targets_run_the_same_way(target: str) -> None:
    assert last(target, "ENTRYPOINT") == '["tini", "--", "batchserve"]'
    assert last(target, "CMD") == '["serve"]'
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    assert last(target, "EXPOSE") == "8000"
    assert "/readyz" in last(target, "HEALTHCHECK")


@pytest.mark.parametrize("target", TARGETS)
def test_both_targets_run_as_a_user_whose_number_a_cluster_can_check(target: str) -> None:
    assert int(last(target, "USER")) > 0
    assert stages()[target].instructions[-1].name == "USER"


@pytest.mark.parametrize("target", TARGETS)
def test_both_targets_have_the_libraries_that_torch_and_vllm_load(target: str) -> None:
    assert {"libgomp1", "libnuma1", "tini"} <= packages_of(target)


def test_the_gpu_target_keeps_the_compiler_that_triton_needs() -> None:
    assert {"gcc", "libc6-dev"} <= packages_of("gpu")
    environment = " ".join(step.text for step in image("gpu") if step.name == "ENV")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in environment


def test_the_cpu_target_has_no_build_tools() -> None:
    assert packages_of("cpu") == {"libgomp1", "libnuma1", "tini"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_change_of_the_code_installs_no_package_again(target: str) -> None:
    stage = stages()[f"packages-{target}"]
    copied = [step.text for name in (stage.origin, stage.name) for step in stages()[name].instructions]
    assert not [text for text in copied if text.startswith(("app", "pyproject", ". "))]
    installs = [step.text for step in stage.instructions if step.name == "RUN"]
    assert any(f"pip install --no-deps -r {target}.lock" in text for text in installs)


def test_the_project_is_copied_after_the_packages_that_change_less() -> None:
    for target in TARGETS:
        copies = [step.text for step in stages()[target].instructions if step.name == "COPY"]
        assert copies == [f"--from=packages-{target} /opt/venv /opt/venv", "--from=project /out /"]


def test_torch_for_a_cpu_comes_from_where_the_scripts_have_it() -> None:
    found = re.search(r"^torch_cpu_index=(\S+)$", (ROOT / "scripts/setup").read_text(), re.MULTILINE)
    assert found
    assert f"--index-url {found[1]} " in DOCKERFILE.read_text()


def test_the_version_on_the_label_is_the_project_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert default_of("VERSION") == project["version"]
    assert DOCKERFILE.read_text().count("ARG VERSION=") == DOCKERFILE.read_text().count(f"VERSION={project['version']}")


def test_the_base_is_a_python_that_the_locks_are_for() -> None:
    assert default_of("BASE").startswith("python:3.11-slim-")


def test_only_what_is_copied_is_sent_to_the_builder() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    copied = {
        word
        for stage in stages().values()
        for step in stage.instructions
        if step.name == "COPY" and "--from" not in step.text
        for word in step.text.split()[:-1]
    }
    assert copied == allowed
    assert any(fnmatch.fnmatch("app/__pycache__", line) for line in lines)


def test_nothing_that_is_sent_is_missing() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert not [line for line in lines if line.startswith("!") and not (ROOT / line[1:]).exists()]
