"""How pages are read: blocks, marks, and what is wrong with them."""

from pathlib import Path

import pytest

from tests.docs.pages import Page, read_page


def read(folder: Path, text: str) -> Page:
    page = folder / "page.md"
    page.write_text(text)
    return read_page(page, folder)


def test_bash_and_python_are_blocks_and_other_fences_are_not(tmp_path: Path) -> None:
    page = read(tmp_path, "```bash\nls\n```\n\n```json\n{}\n```\n\n- item\n\n  ```python\n  print()\n  ```\n")
    assert [(block.language, block.text, block.line) for block in page.blocks] == [
        ("bash", "ls\n", 1),
        ("python", "print()\n", 11),
    ]
    assert page.mistakes == []


@pytest.mark.parametrize("info", ["bash", "Bash", 'bash title="x"', " BASH\tx"])
def test_the_language_is_the_first_word_in_small_letters(tmp_path: Path, info: str) -> None:
    page = read(tmp_path, f"```{info}\nls\n```\n")
    assert [block.language for block in page.to_run] == ["bash"]
    assert page.mistakes == []


def test_a_comment_just_before_a_block_is_its_mark(tmp_path: Path) -> None:
    page = read(
        tmp_path,
        "<!-- serves -->\n```bash\nserve\n```\n\ntext\n<!-- not run: needs\na GPU -->\n\n```bash\nrun\n```\n\n"
        "```bash\nls\n```\n<!-- shows -->\n```text\na\n```\n",
    )
    first, second, third = page.blocks
    assert (first.serves, first.reason) == (True, None)
    assert (second.serves, second.reason) == (False, "needs a GPU")
    assert (third.serves, third.reason, third.shows) == (False, None, ("text", "a\n"))
    assert page.to_run == [first, third]
    assert page.mistakes == []


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("<!-- not run -->\n```bash\nls\n```\n", "page.md:2: 'not run' gives no reason"),
        ("<!-- not run:  -->\n```bash\nls\n```\n", "page.md:2: 'not run' gives no reason"),
        ("<!-- skipped: slow -->\n```bash\nls\n```\n", "page.md:2: unknown mark 'skipped'"),
        ("<!-- serve -->\n```python\nls\n```\n", "page.md:2: unknown mark 'serve'"),
        ("<!-- serves -->\n\ntext\n\n```bash\nls\n```\n", "page.md:1: the mark 'serves' stands before no code"),
        ("text\n\n<!-- not run: a -->\n", "page.md:3: the mark 'not run' stands before no code"),
        ("<!-- serves -->\n```yaml\nls\n```\n", "page.md:2: the mark 'serves' stands before 'yaml'"),
        ("```sh\nls\n```\n", "page.md:1: a code block 'sh' is not run"),
        ("```Shell x\nls\n```\n", "page.md:1: a code block 'shell' is not run"),
        ("```bash,x\nls\n```\n", "page.md:1: a code block 'bash,x' is not run"),
        ("``` {.bash}\nls\n```\n", "page.md:1: a code block '{.bash}' is not run"),
        ("```\nls\n```\n", "page.md:1: a code block '' is not run"),
        ("text\n\n    ls\n", "page.md:3: a code block '' is not run"),
        ("<!-- shows -->\n```json\n{}\n```\n", "page.md:2: 'shows' is for one json or text block"),
        ("```bash\nls\n```\n<!-- shows -->\n```yaml\na\n```\n", "page.md:5: 'shows' is for one json or text"),
    ],
)
def test_a_wrong_mark_is_a_mistake(tmp_path: Path, text: str, mistake: str) -> None:
    (found,) = read(tmp_path, text).mistakes
    assert found.startswith(mistake)


def test_other_comments_are_let_be(tmp_path: Path) -> None:
    page = read(tmp_path, "<!-- begin: overhead -->\n\n| a |\n|---|\n\n<!-- end: overhead -->\n\n```json\n{}\n```\n")
    assert page.mistakes == []


@pytest.mark.parametrize(
    ("text", "needs_engine"),
    [
        ("scripts/serve", True),
        (".venv/bin/batchserve serve --port 8000", True),
        (".venv/bin/batchserve serve --backend fake", False),
        (".venv/bin/batchserve doctor", True),
        (".venv/bin/batchserve doctor --quick", True),
        (".venv/bin/batchserve doctor --quick --backend fake", False),
        ("curl -s http://127.0.0.1:8000/info", False),
    ],
)
def test_a_block_that_loads_vllm_is_told_by_its_text(tmp_path: Path, text: str, needs_engine: bool) -> None:
    assert read(tmp_path, f"```bash\n{text}\n```\n").blocks[0].needs_engine is needs_engine
    assert not read(tmp_path, f"<!-- not run: a -->\n```bash\n{text}\n```\n").blocks[0].needs_engine


def test_a_block_names_the_programs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/curl" if name == "curl" else None)
    page = read(
        tmp_path, "```bash\ncurl -s http://npm/ && npx tsc | .venv/bin/x -g java\n```\n\n```python\nnpm = 1\n```\n"
    )
    assert [block.missing_tools for block in page.blocks] == [["java", "npm", "npx"], []]
