"""Schemathesis over the OpenAPI document, against a service with a real engine."""

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import schemathesis

from tests.engine.process import ServiceProcess, service_process
from tests.service.test_schemathesis import NOT_CHECKED, UNSHRUNK, loaded

pytestmark = pytest.mark.engine

EXAMPLES = 40
schema = loaded(phases={"coverage": {"enabled": False}})  # thousands of bodies, which the fake service has seen


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServiceProcess]:
    """Its context is short: whatever is asked for, an answer takes no longer than that."""
    folder = tmp_path_factory.mktemp("schemathesis")
    with service_process(folder, tiny_model, "inline", "--tool-call-parser", "hermes", max_model_len=128) as service:
        yield service.wait_ready()


@schema.parametrize()
@hypothesis.settings(max_examples=EXAMPLES, derandomize=True, database=None, phases=UNSHRUNK)
def test_no_answer_is_outside_the_document(case: schemathesis.Case, process: ServiceProcess) -> None:
    case.call_and_validate(base_url=process.url, excluded_checks=NOT_CHECKED)
