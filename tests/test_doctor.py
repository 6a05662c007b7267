"""``batchserve doctor``: which checks there are, in which order, and what one that fails does to the others."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app import doctor
from app.backends import checkup
from app.backends.args import BackendArgs
from app.backends.model_files import ModelFiles
from app.finding import Finding
from app.models import embedded

ALL = [
    "settings",
    "packages",
    "temp folder",
    "model",
    "memory",
    "shared memory",
    "threads",
    "port",
    "vllm",
    "statistics",
    "engine arguments",
    "chat template",
    "engine",
]


class Child:
    """Takes the place of the process that imports vLLM.

    Attributes:
        fails: stages that fail; behind the first one, unless it is ``statistics``, there is nothing more.
        asked: what it was asked for.
    """

    def __init__(self) -> None:
        self.fails: tuple[str, ...] = ()
        self.asked: list[Sequence[str]] = []
        self.args: BackendArgs | None = None

    def __call__(
        self, args: BackendArgs, stages: Sequence[str], *, is_offline: bool, log_level: str
    ) -> Iterator[Finding]:
        self.asked.append(list(stages))
        self.args = args
        for stage in stages:
            yield Finding(stage, "fail" if stage in self.fails else "ok", "found", "advice")
            if stage in self.fails and stage != checkup.STATISTICS:
                return


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    child = Child()
    monkeypatch.setattr(doctor, "ask", child)
    return child


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole file of weights, with none in it."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def examine(child: Child, model: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines a sound case, whose packages are there; the findings by check, in order."""
    monkeypatch.setattr(doctor, "check_packages", lambda: Finding("packages", "ok", "all"))
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: True)

    def run(*options: str, quick: bool = False) -> dict[str, Finding]:
        findings = list(doctor.examine(["--model", str(model), "--port", "0", *options], is_quick=quick))
        assert len({finding.check for finding in findings}) == len(findings)
        return {finding.check: finding for finding in findings}

    return run


def failing(check: str) -> Callable[..., Finding]:
    return lambda *_, **__: Finding(check, "fail", "found", "advice")


def unchecked(findings: dict[str, Finding]) -> list[str]:
    return [check for check, finding in findings.items() if finding.found.startswith("not checked: ")]


def test_all_checks_of_a_sound_case_are_ok_and_the_engine_comes_last(examine: Examine) -> None:
    findings = examine()

    assert list(findings) == ALL
    assert {finding.status for finding in findings.values()} == {"ok"}


def test_a_quick_one_leaves_the_engine_out(examine: Examine, child: Child) -> None:
    assert list(examine(quick=True)) == ALL[:-1]
    assert child.asked == [list(checkup.STAGES[:-1])]


def test_the_child_gets_what_a_start_would(examine: Examine, child: Child) -> None:
    examine("--vllm-config", '{"max_model_len": 64}', "--batch-size", "3")

    assert child.args is not None
    assert child.args.batch_size == 3
    assert child.args.model_dump()["vllm_config"] == {"max_model_len": 64}


# --- one that fails ---


def test_wrong_settings_are_a_line_each_and_the_rest_is_checked_where_it_can_be(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_packages", lambda: Finding("packages", "ok", "all"))

    findings = list(doctor.examine(["--batch-size", "0", "--prot", "1"], is_quick=False))

    wrong = [finding for finding in findings if finding.check == "settings"]
    assert [finding.status for finding in wrong] == ["fail", "fail"]
    assert "--port" in wrong[0].advice
    assert child.asked == [["vllm", "statistics"]]
    rest = {finding.check: finding for finding in findings if finding.check != "settings"}
    assert rest.keys() == set(ALL[1:])
    assert sorted(unchecked(rest)) == sorted(
        ["model", "memory", "shared memory", "threads", "port", "engine arguments", "chat template", "engine"]
    )


@pytest.mark.parametrize(
    ("name", "blocked"),
    [
        ("check_packages", ["vllm", "statistics", "engine arguments", "chat template", "engine"]),
        ("find_model", ["engine arguments", "chat template", "engine"]),
        ("check_memory", ["vllm", "statistics", "engine arguments", "chat template", "engine"]),
        ("check_shared_memory", ["engine"]),
        ("check_threads", []),
        ("check_port", []),
    ],
)
def test_a_check_that_fails_stops_only_what_it_makes_impossible(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, name: str, blocked: list[str]
) -> None:
    checks = {"find_model": "model"}
    check = checks.get(name, name.removeprefix("check_").replace("_", " "))
    outcome: Any = failing(check)
    if name == "find_model":
        files = ModelFiles(Finding("model", "fail", "found", "advice"))
        outcome = lambda args: files  # noqa: E731
    monkeypatch.setattr(doctor, name, outcome)

    findings = examine()

    assert list(findings) == ALL
    assert findings[check].status == "fail"
    assert unchecked(findings) == blocked


def test_without_a_temp_folder_vllm_is_not_imported(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.machine.check_temporary_folder", failing("temp folder"))

    findings = examine()
    assert findings["vllm"].found == "not checked: vLLM needs a temp folder"


@pytest.mark.parametrize(
    ("stage", "blocked"),
    [
        ("vllm", ["statistics", "engine arguments", "chat template", "engine"]),
        ("statistics", []),
        ("engine arguments", ["chat template", "engine"]),
        ("chat template", ["engine"]),
        ("engine", []),
    ],
)
def test_a_stage_that_fails_is_named_by_those_behind_it(
    examine: Examine, child: Child, stage: str, blocked: list[str]
) -> None:
    child.fails = (stage,)

    findings = examine()

    assert findings[stage].status == "fail"
    assert unchecked(findings) == blocked
    assert {findings[check].found for check in blocked} <= {f"not checked: {stage!r} has failed"}


def test_without_vllm_what_depends_on_its_build_is_not_checked(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.errors import StartError

    def none() -> bool:
        raise StartError("vLLM is not installed: run scripts/setup")

    monkeypatch.setattr(doctor, "is_cpu_build", none)
    monkeypatch.setattr(doctor, "check_packages", failing("packages"))

    findings = examine()
    assert {"memory", "threads", "vllm"} <= set(unchecked(findings))
    assert findings["port"].status == "ok"


def test_a_port_that_is_taken_fails_with_what_to_do(examine: Examine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = examine("--port", str(taken.getsockname()[1]))["port"]

    assert finding.status == "fail"
    assert finding.advice == "choose another with --port or --host"


# --- the embedded model ---


def test_the_embedded_model_that_is_not_built_is_left_so_by_a_quick_one(
    child: Child, examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "check_can_build", lambda: None)

    findings = examine("--model", "embedded:smollm2-135m", quick=True)

    assert findings["model"].status == "ok"
    assert "can be" in findings["model"].found
    assert unchecked(findings) == ["engine arguments", "chat template"]


def test_the_embedded_model_that_cannot_be_had_fails(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(report: object) -> Path:
        raise embedded.EmbeddedModelError("cannot keep the embedded model in /x: Read-only file system: set another")

    monkeypatch.setattr(embedded, "prepare", fail)

    finding = examine("--model", "embedded:smollm2-135m")["model"]
    assert (finding.status, finding.advice) == ("fail", "set another")


def test_the_embedded_model_is_built_as_a_start_would_and_looked_at(
    child: Child, examine: Examine, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(embedded, "folder", lambda: model)
    monkeypatch.setattr(embedded, "prepare", lambda report: model)

    assert examine("--model", "embedded:smollm2-135m")["model"].status == "ok"
    assert child.args is not None
    assert child.args.model == str(model)


# --- the fake backend ---


def test_the_fake_backend_needs_no_vllm(child: Child) -> None:
    findings = list(doctor.examine(["--backend", "fake", "--port", "0"], is_quick=False))

    assert {finding.check for finding in findings} == set(ALL)
    assert {finding.status for finding in findings} == {"ok"}
    assert findings[-1].check == "engine"
    assert child.asked == []
    assert sum("not needed" in finding.found for finding in findings) == 9


def test_a_fake_engine_that_does_not_open_fails() -> None:
    options = ["--backend", "fake", "--port", "0", "--fake-config", '{"faults": {"fail_open": "no luck"}}']

    *_, engine = doctor.examine(options, is_quick=False)
    assert (engine.status, engine.found) == ("fail", "no luck")


# --- what is printed ---


def test_a_line_has_status_name_what_was_found_and_what_to_do() -> None:
    assert doctor.as_line(Finding("port", "fail", "it is\ntaken", "choose another")) == (
        "fail  port              it is taken -> choose another"
    )
    assert doctor.as_line(Finding("temp folder", "ok", "/tmp")) == "ok    temp folder       /tmp"


@pytest.mark.parametrize("status", ["ok", "warn", "fail"])
def test_only_what_has_failed_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: Any
) -> None:
    given: list[Any] = []

    def examine(options: Sequence[str], *, is_quick: bool) -> list[Finding]:
        given.extend((list(options), is_quick))
        return [Finding("port", status, "found", "advice"), Finding("memory", "ok", "found")]

    monkeypatch.setattr(doctor, "examine", examine)

    assert doctor.run(["--port", "1", "--quick"]) == (1 if status == "fail" else 0)
    assert given == [["--port", "1"], True]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("way", ["option", "equals", "environment", "beside a mistake"])
def test_json_is_an_object_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    monkeypatch.setattr(
        doctor, "examine", lambda options, *, is_quick: [Finding("port", "warn", "found\nit", "advice")]
    )
    if way == "environment":
        monkeypatch.setenv("BATCHSERVE_LOG_FORMAT", "json")
    options = {
        "option": ["--log-format", "json"],
        "equals": ["--log-format=json"],
        "beside a mistake": ["--log-format", "json", "--prot", "1"],
    }.get(way, [])

    assert doctor.run(options) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"check": "port", "status": "warn", "found": "found\nit", "advice": "advice"}


def test_a_check_that_breaks_off_is_a_line_and_the_others_go_on(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Finding:
        raise OverflowError("too\nlarge")

    monkeypatch.setattr(doctor, "check_memory", broken)

    found = examine()
    assert found["memory"].status == "fail"
    assert found["memory"].found == "the check broke off: OverflowError: too large"
    assert found["port"].status == "ok"
