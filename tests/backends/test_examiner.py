"""The parent's side of the checkup: small Python files stand in for the child."""

import json
import sys
from pathlib import Path

import pytest

from app.backends import examiner
from app.backends.args import VLLMOfflineArgs
from app.finding import Finding

ARGS = VLLMOfflineArgs(model="m", served_model_name="served")
STAGES = ("vllm", "statistics", "engine")
OK = """
import json, os, signal, sys, time
question = json.loads(sys.stdin.readline())
def say(stage, status="ok"):
    print(json.dumps({"check": stage, "status": status, "found": "f", "advice": "a"}), flush=True)
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a child with this text behind ``OK``; its findings."""

    def run(text: str, *, log_level: str = "info") -> list[Finding]:
        script = tmp_path / "child"
        script.write_text(f"#!{sys.executable}\n{OK}{text}")
        script.chmod(0o755)
        monkeypatch.setattr(examiner, "COMMAND", [str(script)])
        return list(examiner.ask(ARGS, STAGES, is_offline=True, log_level=log_level))

    return run


def test_findings_come_as_the_child_gives_them(ask) -> None:
    findings = ask("for stage in question['stages']: say(stage)")

    assert [finding.check for finding in findings] == list(STAGES)


def test_the_child_is_told_what_a_start_would_have(ask, tmp_path: Path) -> None:
    ask(f"open({str(tmp_path / 'question')!r}, 'w').write(json.dumps(question))")

    question = json.loads((tmp_path / "question").read_text())
    assert VLLMOfflineArgs.model_validate(question["args"]) == ARGS
    assert not VLLMOfflineArgs.model_validate(question["args"]).is_template_asked_for
    assert question["is_offline"] is True


def test_a_child_that_stops_of_itself_leaves_the_rest_unsaid(ask) -> None:
    findings = ask("say('vllm', 'fail')")

    assert [finding.status for finding in findings] == ["fail"]


@pytest.mark.parametrize(
    ("end", "found", "advice"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed", "want of memory"),
        ("os.kill(os.getpid(), signal.SIGILL)", "lacks instructions", "AVX2"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV", "scripts/setup"),
        ("raise ImportError('libnuma.so.1: cannot open')", "libnuma.so.1", "scripts/setup"),
        ("os._exit(3)", "ended with status 3: no message", "--log-level debug"),
    ],
)
def test_a_crash_becomes_a_finding_of_its_stage(ask, end: str, found: str, advice: str) -> None:
    findings = ask(f"say('vllm'); {end}")

    assert [finding.check for finding in findings] == ["vllm", "statistics"]
    assert findings[1].status == "fail"
    assert found in findings[1].found
    assert advice in findings[1].advice


def test_a_child_that_hangs_is_given_up(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "ENGINE_TIMEOUT_S", 0.2)

    findings = ask("say('vllm'); time.sleep(60)")
    assert "no end within" in findings[1].found


def test_what_libraries_say_is_shown_only_when_asked_for(ask, capfd: pytest.CaptureFixture[str]) -> None:
    ask("print('chatter', file=sys.stderr)")
    assert "chatter" not in capfd.readouterr().err

    ask("print('chatter', file=sys.stderr)", log_level="debug")
    assert "chatter" in capfd.readouterr().err
