"""The README says what the code does: its tables are compared with what they describe."""

import json
import re
from pathlib import Path

from app import errors
from app.api.schemas import Timings
from app.settings import Settings

README = (Path(__file__).parent.parent / "README.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^#{{1,2}} |\Z)", README, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no section {title}"
    return match[2]


def rows(title: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([a-z_0-9]+)`", cell)


def written(default: object) -> str:
    if default is None or default in ("", ()):
        return "none"
    return f"`{json.dumps(default) if isinstance(default, dict) else default}`".replace("|", "\\|")


def test_the_settings_table_holds_each_setting_with_its_default_and_description() -> None:
    expected = [
        [f"`{name}`", written(field.get_default(call_default_factory=True)), field.description]
        for name, field in Settings.model_fields.items()
    ]
    assert rows("Settings") == expected


def test_the_timings_table_holds_each_field_of_an_answer() -> None:
    assert [name for row in rows("Timings") for name in names(row[0])] == sorted(
        Timings.model_fields, key=[name for row in rows("Timings") for name in names(row[0])].index
    )


def test_the_errors_table_holds_each_code_with_its_status() -> None:
    def leaves(kind: type[errors.ServiceError]) -> list[type[errors.ServiceError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]

    kinds = [kind for kind in leaves(errors.ServiceError) if kind not in (errors.ServiceError, errors.Unavailable)]
    listed = {(code, int(row[1])) for row in rows("Errors") for code in names(row[0])}
    assert listed == {(kind.code, kind.status) for kind in kinds}


def test_the_quickstart_is_valid_for_the_service() -> None:
    from app.api.validation import batch_body

    command = re.search(r"/batch .*? -d '(.*?)'\n```", section("Quickstart"), re.DOTALL)
    assert command is not None
    body = batch_body(json.loads(command[1]), 4096, 2**20)
    assert not [row for row in body.rows if isinstance(row, Exception)]
