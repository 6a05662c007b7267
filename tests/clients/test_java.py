"""Java: the generator finds nothing wrong with the document, and its client compiles and drives the service."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.clients.generators import BIN, SCHEMA_MAPPINGS, java_classes, run
from tests.clients.support import DOCUMENT, KEY, ROOT, check_report
from tests.service.support import Process

GUIDE = ROOT / "docs" / "clients.md"

pytestmark = pytest.mark.skipif(shutil.which("javac") is None, reason="a Java development kit is not installed")


def test_the_generator_accepts_the_document() -> None:
    printed = run(BIN / "openapi-generator-cli", "validate", "--recommend", "-i", DOCUMENT)
    assert "No validation issues detected." in printed


def test_the_generator_refuses_a_document_that_is_broken(tmp_path: Path) -> None:
    document = json.loads(DOCUMENT.read_text())
    del document["paths"]["/generate"]["post"]["responses"]
    document["info"].pop("title")
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(document))
    run(BIN / "openapi-generator-cli", "validate", "-i", broken, code=1)


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory, service: Process) -> str:
    """The generated client with the programs that use it: ours, and the guide's."""
    work = tmp_path_factory.mktemp("java")
    found = re.search(r"```java\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    program = work / "Ask.java"
    program.write_text(found[1].replace("http://127.0.0.1:8000", service.url).replace("Bearer any", f"Bearer {KEY}"))
    return java_classes(work, program)


def test_the_generated_client_compiles_and_drives_the_service(class_path: str, service: Process) -> None:
    check_report(json.loads(run("java", "-cp", class_path, "Drive", service.url, KEY)))


def test_the_guides_program_does_what_it_says(class_path: str) -> None:
    assert run("java", "-cp", class_path, "Ask").splitlines() == ["ONE", "invalid_request"]
    assert f"--schema-mappings {SCHEMA_MAPPINGS}" in GUIDE.read_text()
