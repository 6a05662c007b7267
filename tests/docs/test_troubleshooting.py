"""The lines that docs/troubleshooting.md explains are lines that the service and its scripts print."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"


def quoted_lines() -> list[str]:
    """What stands in code style in the first cells of the tables whose first column is `line`."""
    tables = re.findall(r"^\| line \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    return re.findall(r"^\| `([^`]+)` \|", "".join(tables), re.MULTILINE)


def strings(node: ast.AST) -> Iterator[str]:
    """The texts of a module, with an ellipsis for what is filled in."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in child.values)


def printed() -> list[str]:
    """All that the service and its set-up may print."""
    modules = [ast.parse(path.read_text()) for path in sorted((ROOT / "app").rglob("*.py"))]
    return [text for module in modules for text in strings(module)] + [(ROOT / "scripts" / "setup").read_text()]


def is_printed(line: str, texts: list[str]) -> bool:
    """Whether some text holds the parts of the line in their order."""
    pattern = re.compile(".*?".join(re.escape(part) for part in line.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_each_quoted_line_is_one_that_is_printed() -> None:
    lines, texts = quoted_lines(), printed()
    assert len(lines) > 30
    assert [line for line in lines if not is_printed(line, texts)] == []


def test_a_line_that_nobody_prints_is_found() -> None:
    texts = printed()
    assert is_printed("cannot listen on … port …", texts)
    assert not is_printed("cannot listen at … port …", texts)


@pytest.mark.parametrize("code", sorted(set(re.findall(r"^\| \d{3} `(\w+)`", PAGE.read_text(), re.MULTILINE))))
def test_each_code_is_one_of_the_services(code: str) -> None:
    from app import errors

    assert code in {getattr(kind, "code", None) for kind in vars(errors).values()}
