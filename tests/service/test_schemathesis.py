"""Schemathesis over the OpenAPI document, against the live service: right and wrong data for every operation.

Each answer must have a documented status, content type, headers and shape, and none may be a failure of the service.
"""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.service.support import ROOT, Process, events_of, serving

DOCUMENT = json.loads((ROOT / "openapi" / "openapi.json").read_text())
NOT_CHECKED: list[Any] = [
    # A body may be right by its schema and still be a documented 400: two prompts, a token that no vocabulary has.
    positive_data_acceptance,
    # More is taken than is documented, on purpose: parts of a message as plain strings, wrong rows of a batch.
    negative_data_rejection,
]
EXAMPLES = 60
UNSHRUNK = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
"""The smallest body that fails is found by hand: looking for it takes minutes."""


def loaded(**config: Any) -> BaseSchema:
    """The document, with right and wrong data to be made of it."""
    settings = SchemathesisConfig.from_dict({"generation": {"mode": "all"}, **config})
    return schemathesis.openapi.from_dict(DOCUMENT, config=settings)


schema = loaded()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A service whose tokens take no time: a chat without `max_tokens` goes to the end of the context."""
    with serving(tmp_path_factory.mktemp("schemathesis")) as process:
        yield process


@schemathesis.deserializer("text/event-stream")
def events(_: schemathesis.DeserializationContext, response: schemathesis.Response) -> object:
    """What the schema of a stream describes: the data of each event."""
    found, is_ended = events_of(response.content)
    assert is_ended
    return found


@schema.parametrize()
@hypothesis.settings(max_examples=EXAMPLES, derandomize=True, database=None, phases=UNSHRUNK)
def test_no_answer_is_outside_the_document(case: schemathesis.Case, process: Process) -> None:
    case.call_and_validate(base_url=process.url, excluded_checks=NOT_CHECKED)
