"""The committed OpenAPI document is the one that the service serves."""

import json
from pathlib import Path

from app.main import create_app
from app.settings import Settings

COMMITTED = Path(__file__).parent.parent / "openapi" / "openapi.json"


def test_the_committed_document_is_the_live_one() -> None:
    live = create_app(Settings(backend="fake")).openapi()
    assert json.loads(COMMITTED.read_text()) == live, "write it again: batchserve openapi > openapi/openapi.json"


def test_operations_are_named_for_their_routes() -> None:
    paths = json.loads(COMMITTED.read_text())["paths"]
    names = {operation["operationId"] for methods in paths.values() for operation in methods.values()}
    assert names == {"generate", "batch", "livez", "readyz", "health", "info", "metrics"}


def test_a_client_learns_how_to_send_a_key_and_where_none_is_asked_for() -> None:
    document = json.loads(COMMITTED.read_text())
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        is_open = path in ("/livez", "/readyz", "/health")
        assert all(("security" in operation) != is_open for operation in operations.values()), path


def test_rows_by_the_line_are_documented() -> None:
    content = json.loads(COMMITTED.read_text())["paths"]["/batch"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/x-ndjson"}
