"""TypeScript: types and a client made from the document, checked by the compiler and driven by node."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.clients.generators import TYPESCRIPT, run, typescript_project
from tests.clients.support import KEY, check_report
from tests.service.support import Process

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return typescript_project(tmp_path_factory.mktemp("typescript"))


def test_the_generated_client_drives_the_service(project: Path, service: Process) -> None:
    run("node_modules/.bin/tsc", "-p", "tsconfig.json", cwd=project)
    report = json.loads(run("node", "out/drive.js", service.url, KEY, cwd=project))
    check_report(report)
    assert report["lines"] == {"rows": [0, 1], "succeeded": 2}


def test_the_compiler_refuses_what_the_service_would(project: Path) -> None:
    options = ("--strict", "--noEmit", "--skipLibCheck", "--target", "es2022", "--moduleResolution", "bundler")
    printed = run("node_modules/.bin/tsc", *options, "--module", "esnext", "wrong.ts", cwd=project, code=2)
    refused = {int(line) for line in re.findall(r"^wrong\.ts\((\d+),", printed, re.MULTILINE)}
    lines = (TYPESCRIPT / "wrong.ts").read_text().splitlines()
    assert refused == {number for number, line in enumerate(lines, 1) if line.endswith("// wrong")}, printed
