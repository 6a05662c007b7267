"""What all tests share."""

import os
import signal
from collections.abc import Generator

import hypothesis
import pytest

# Shared machines are slow at times; what is tested is behaviour.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# A shell that runs this in the background has Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI every tool is there: a skipped test has not shown what it should."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _no_settings_from_the_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the shell that runs the tests must not reach them."""
    for name in list(os.environ):
        if name.upper().startswith("BATCHSERVE_"):
            monkeypatch.delenv(name)
