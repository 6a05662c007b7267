"""docs/clients.md names the versions of generators that the tests use, and its rule is the program's."""

import json
import re

import pytest

from tests.clients.generators import TYPESCRIPT
from tests.clients.support import ROOT

GUIDE = (ROOT / "docs" / "clients.md").read_text()
LOCK = (ROOT / "requirements" / "dev.lock").read_text().splitlines()
PACKAGES = json.loads((TYPESCRIPT / "package.json").read_text())["devDependencies"]


@pytest.mark.parametrize("name", ["openapi-python-client", "openapi-generator-cli"])
def test_the_generators_from_pypi_are_those_of_the_lock(name: str) -> None:
    pins = re.findall(rf"{name}==[0-9.]+[0-9]", GUIDE)
    assert pins
    assert set(pins) <= set(LOCK)


def test_the_generator_from_npm_is_that_of_the_lock() -> None:
    assert re.findall(r"@hey-api/openapi-ts@([0-9.]+)", GUIDE) == [PACKAGES["@hey-api/openapi-ts"]]
    for name in ("typescript", "@types/node"):
        major = re.findall(rf"{name}@([0-9]+)\b", GUIDE)
        assert major == [PACKAGES[name].split(".")[0]]


def test_each_status_that_the_document_knows_is_in_the_table_of_retries() -> None:
    document = json.loads((ROOT / "openapi" / "openapi.json").read_text())
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    statuses = {status for operation in operations for status in operation["responses"]} - {"200"}
    table = GUIDE[GUIDE.index("## When to try again") : GUIDE.index("The rows of a `/batch`")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    assert statuses <= {status for cell in cells for status in re.findall(r"\d{3}", cell)}
