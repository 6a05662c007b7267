"""``batchserve doctor``: what a start needs, a line for each check, with the settings that the start would have."""

import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app import machine
from app.backends import checkup
from app.backends.args import BackendArgs, VLLMArgs, VLLMOfflineArgs
from app.backends.examiner import ask
from app.backends.memory import check_memory
from app.backends.model_files import ModelFiles, find_model
from app.backends.packages import check_packages, is_cpu_build
from app.backends.places import check_shared_memory, check_threads
from app.backends.registry import Backend
from app.errors import StartError
from app.finding import Finding, not_checked
from app.listening import listen
from app.main import backend_args
from app.models import embedded
from app.settings import EMBEDDED, Settings, asked_log_format, load_settings

OF_VLLM = ("packages", "model", "memory", "shared memory", "threads", *checkup.STAGES[:-1])
"""What a backend without vLLM does not need."""


@dataclass(slots=True)
class Case:
    """What the checks look at, and what earlier ones leave for later ones.

    Attributes:
        settings: those of a start.
        args: what its backend would be built from.
        is_quick: whether to leave the engine out.
        is_cpu: whether vLLM's build for the CPU is installed; None when none is.
        files: where the model's files are, once found.
        blocked: a stage of the checkup, and why neither it nor those behind it can be.
    """

    settings: Settings
    args: VLLMArgs
    is_quick: bool
    is_cpu: bool | None = None
    files: ModelFiles | None = None
    blocked: dict[str, str] = field(default_factory=dict)

    def block(self, stage: str, reason: str) -> None:
        """The first reason stands."""
        self.blocked.setdefault(stage, reason)

    @property
    def folder(self) -> Path | None:
        """The model's folder, where it is known."""
        return self.files.folder if self.files else None


def run(arguments: Sequence[str]) -> int:
    """Check, print a line for each finding as it comes, and tell by the exit code: 1 when a check has failed."""
    is_quick = "--quick" in arguments
    options = [word for word in arguments if word != "--quick"]
    is_json = asked_log_format(options) == "json"
    has_failed = False
    for finding in examine(options, is_quick=is_quick):
        print(json.dumps(finding.as_dict()) if is_json else as_line(finding), flush=True)
        has_failed |= finding.status == "fail"
    return 1 if has_failed else 0


def as_line(finding: Finding) -> str:
    """Status, name, what was found, and behind an arrow what to do."""
    advice = f" -> {finding.advice}" if finding.advice else ""
    text = f"{finding.status:<4}  {finding.check:<16}  {finding.found}{advice}"
    return " ".join(text.splitlines())


def examine(options: Sequence[str], *, is_quick: bool) -> Iterator[Finding]:
    """All findings, one after the other; the engine comes last."""
    try:
        settings = load_settings(options, program="batchserve doctor [--quick]")
        args = backend_args(settings)
    except StartError as error:
        yield from _without_settings(str(error))
        return
    yield Finding("settings", "ok", f"model {settings.model}, backend {settings.backend}")
    if isinstance(args, VLLMArgs):
        yield from _examine_vllm(Case(settings, args, is_quick))
    else:
        yield from _examine_other(settings, args, is_quick=is_quick)


def _without_settings(mistakes: str) -> Iterator[Finding]:
    """What can be checked while the settings are wrong."""
    for mistake in mistakes.splitlines():
        found, _, advice = mistake.partition("; ")
        yield Finding("settings", "fail", found, advice or "batchserve doctor --help lists the settings")
    first = (check_packages(), machine.check_temporary_folder())
    yield from first
    seen = {finding.check for finding in first}
    if all(finding.status != "fail" for finding in first):
        nothing = VLLMOfflineArgs(model=EMBEDDED, served_model_name=EMBEDDED)
        for finding in ask(nothing, (checkup.VLLM, checkup.STATISTICS), is_offline=False, log_level="info"):
            seen.add(finding.check)
            yield finding
    for check in (*OF_VLLM, "port", checkup.ENGINE):
        if check not in seen:
            yield not_checked(check, "the settings are wrong")


def _examine_other(settings: Settings, args: BackendArgs, *, is_quick: bool) -> Iterator[Finding]:
    """A backend that needs no vLLM."""
    for check in OF_VLLM:
        yield Finding(check, "ok", f"not needed by the backend {settings.backend}")
    yield check_port(settings)
    yield machine.check_temporary_folder()
    if not is_quick:
        yield _build_here(args)


def _examine_vllm(case: Case) -> Iterator[Finding]:
    checks: dict[str, Callable[[Case], Finding]] = {
        "packages": _packages,
        "temp folder": _temporary_folder,
        "model": _model,
        "memory": _memory,
        "shared memory": _shared_memory,
        "threads": _threads,
        "port": lambda case: check_port(case.settings),
    }
    for name, check in checks.items():
        yield _outcome(name, check, case)
    yield from _examine_with_vllm(case)


def _outcome(name: str, check: Callable[[Case], Finding], case: Case) -> Finding:
    """What the check finds; one that breaks off has found something too, and the others go on."""
    try:
        return check(case)
    except Exception as error:
        found = " ".join(f"the check broke off: {type(error).__name__}: {error}".split())[:300]
        return Finding(name, "fail", found, "look at what it names; a start may break off there as well")


# --- checks in this process ---


def check_port(settings: Settings) -> Finding:
    """Listens as a start does, and lets go."""
    try:
        listener = listen(settings.host, settings.port)
    except StartError as error:
        found, _, advice = str(error).rpartition("; ")
        return Finding("port", "fail", found, advice)
    port = listener.getsockname()[1]
    listener.close()
    chosen = ", as any free one will do" if settings.port == 0 else ""
    return Finding("port", "ok", f"{settings.host} port {port} is free{chosen}")


def _packages(case: Case) -> Finding:
    finding = check_packages()
    with suppress(StartError):
        case.is_cpu = is_cpu_build()
    if finding.status == "fail":
        case.block(checkup.VLLM, "packages are missing")
    return finding


def _temporary_folder(case: Case) -> Finding:
    finding = machine.check_temporary_folder()
    if finding.status == "fail":
        case.block(checkup.VLLM, "vLLM needs a temp folder")
    return finding


def _model(case: Case) -> Finding:
    finding = _embedded_model(case) if case.args.model == EMBEDDED else _other_model(case)
    if finding.status == "fail":
        case.block(checkup.ARGUMENTS, "the model cannot be read")
    return finding


def _other_model(case: Case) -> Finding:
    case.files = find_model(case.args)
    return case.files.finding


def _embedded_model(case: Case) -> Finding:
    """Built or not; without ``--quick`` it is built now, as a start would."""
    try:
        folder = embedded.folder()
        if case.is_quick and not embedded.is_intact(folder):
            embedded.check_can_build()
            case.block(checkup.ARGUMENTS, "the embedded model is not built yet; without --quick it is")
            return Finding("model", "ok", f"{EMBEDDED} is not built yet, and can be, in {folder} (once, about 20 s)")
        embedded.prepare(lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True))
    except embedded.EmbeddedModelError as error:
        found, _, advice = str(error).rpartition(": ")
        return Finding("model", "fail", found, advice)
    case.args = case.args.model_copy(update={"model": str(folder)})
    case.files = find_model(case.args)
    return Finding("model", "ok", f"{EMBEDDED} is intact in {folder}")


def _memory(case: Case) -> Finding:
    if case.is_cpu is None:
        return not_checked("memory", "vLLM is not installed")
    finding = check_memory(case.args, case.folder, is_cpu=case.is_cpu)
    if finding.status == "fail":
        case.block(checkup.VLLM, "there is too little memory")
    return finding


def _shared_memory(case: Case) -> Finding:
    if case.is_cpu is None:
        return not_checked("shared memory", "vLLM is not installed")
    finding = check_shared_memory(case.args, is_cpu=case.is_cpu)
    if finding.status == "fail":
        case.block(checkup.ENGINE, "there is too little shared memory")
    return finding


def _threads(case: Case) -> Finding:
    if case.is_cpu is None:
        return not_checked("threads", "vLLM is not installed")
    return check_threads(case.args, is_cpu=case.is_cpu)


def _build_here(args: BackendArgs) -> Finding:
    async def build() -> None:
        backend = Backend.create(args)
        try:
            await backend.open()
            await backend.validate()
        finally:
            await backend.close()

    try:
        asyncio.run(build())
    except StartError as error:
        return Finding(checkup.ENGINE, "fail", str(error), "see fake_config")
    return Finding(checkup.ENGINE, "ok", "opened, generated, closed")


# --- checks in a child that imports vLLM ---


def _examine_with_vllm(case: Case) -> Iterator[Finding]:
    """What the checkup finds; where it cannot go on, the rest is said not to be checked."""
    stages = checkup.STAGES[:-1] if case.is_quick else checkup.STAGES
    possible = list(itertools.takewhile(lambda stage: stage not in case.blocked, stages))
    seen = 0
    if possible:
        is_offline = case.files is not None and case.files.is_offline
        log_level = case.settings.log_level
        for seen, finding in enumerate(ask(case.args, possible, is_offline=is_offline, log_level=log_level), start=1):
            yield finding
            if finding.status == "fail":
                case.block(next(iter(stages[seen:]), ""), f"{finding.check!r} has failed")
    reason = "the checks before it have failed"
    for stage in stages[seen:]:
        reason = case.blocked.get(stage, reason)
        yield not_checked(stage, reason)
