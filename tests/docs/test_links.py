"""Links between the pages lead somewhere."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, images_without_alt_text, links

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def broken(page: Path) -> list[str]:
    """The relative links of a page whose file or heading is not there."""
    wrong = []
    for line, target in links(page):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if target.startswith("/") or not file.exists():
            wrong.append(f"{page.name}:{line}: {target}: no such file")
        elif anchor and anchor not in anchors(file):
            wrong.append(f"{page.name}:{line}: {target}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_relative_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_image_says_what_it_shows(page: Path) -> None:
    assert images_without_alt_text(page) == []


def test_each_guide_is_linked_from_the_readme() -> None:
    linked = {target.partition("#")[0] for _, target in links(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b` c, d!\n\n# Same\n\n# Same\n")
    page = tmp_path / "page.md"
    good = "[a](other.md#a-b-c-d) [b](#top) [c](other.md#same-1) [d](https://example.org/x)"
    page.write_text(
        f"# Top\n\n{good}\n\n| [e](gone.md) | ![f](gone.svg) |\n|---|---|\n\n[g](other.md#gone) [h](/etc)\n"
    )
    assert [line.split(": ")[1] for line in broken(page)] == ["gone.md", "gone.svg", "other.md#gone", "/etc"]


def test_an_image_without_words_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("![](a.svg) ![a picture](b.svg)\n")
    assert images_without_alt_text(page) == ["a.svg"]
