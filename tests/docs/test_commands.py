"""Every command block of README.md and docs/*.md runs as it stands."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Page, all_pages
from tests.docs.runner import PageRun

BENCHMARK = "minutes on a quiet machine; tests/benchmarks run it"
NOT_RUN: list[tuple[str, str]] = [
    ("README.md", "it is what runs this test"),
    ("README.md", "needs a model that takes images"),
    ("README.md", "needs a LoRA adapter"),
    ("docs/backends.md", BENCHMARK),
    ("docs/benchmarks.md", BENCHMARK),
    ("docs/benchmarks.md", BENCHMARK),
    ("docs/benchmarks.md", BENCHMARK),
    ("docs/deployment.md", "needs a container engine and a registry"),
    ("docs/deployment.md", "needs a container engine, a registry and a mirror"),
    ("docs/deployment.md", "needs a container engine"),
    ("docs/deployment.md", "needs a container engine and a model of yours"),
    ("docs/deployment.md", "needs a container engine and a GPU"),
    ("docs/offline-backend.md", "needs two GPUs, and a model from the Hugging Face hub"),
]
"""Page and reason of each block that is not run here, in order. Whoever adds one has to say so here as well."""
WITHOUT_COMMANDS: set[str] = set()
"""Pages that need no command block."""
PAGES = all_pages()


def with_mark(page: Page) -> object:
    marks = [pytest.mark.engine] if any(block.needs_engine for block in page.blocks) else []
    return pytest.param(page, id=page.name, marks=marks)


@pytest.fixture
def page_run(tmp_path: Path) -> Iterator[PageRun]:
    run = PageRun(tmp_path)
    yield run
    run.close()


@pytest.mark.parametrize("page", [with_mark(page) for page in PAGES if page.to_run])
def test_the_blocks_of_a_page_run_in_order(page: Page, page_run: PageRun) -> None:
    missing = sorted({tool for block in page.to_run for tool in block.missing_tools})
    for block in page.to_run:
        if not block.missing_tools:
            page_run.run(block)
            page_run.check()
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed, so blocks that call them were left out")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_marks_of_a_page_are_right(page: Page) -> None:
    assert page.mistakes == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_command_blocks(page: Page) -> None:
    assert bool(page.blocks) is (page.name not in WITHOUT_COMMANDS)


def test_the_blocks_that_are_not_run_are_these() -> None:
    listed = [(block.page, block.reason) for page in PAGES for block in page.blocks if block.reason is not None]
    print("\n".join(f"not run: {page}: {reason}" for page, reason in listed))
    assert sorted(listed) == sorted(NOT_RUN)
