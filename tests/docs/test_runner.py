"""How blocks are run, on small pages made up for it: what must fail fails, and says where."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.docs import runner
from tests.docs.pages import Block, read_page
from tests.docs.runner import BlockFailed, PageRun, compare, newcomers_environment

SERVE = f"{sys.executable} -m app serve --backend fake"


@pytest.fixture
def page_run(tmp_path: Path) -> Iterator[PageRun]:
    run = PageRun(tmp_path)
    yield run
    run.close()


def blocks(folder: Path, text: str) -> list[Block]:
    page = folder / "page.md"
    page.write_text(text)
    return read_page(page, folder).blocks


def run_all(page_run: PageRun, folder: Path, text: str) -> None:
    for block in blocks(folder, text):
        page_run.run(block)
        page_run.check()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_failing_block_fails_with_page_line_block_status_and_output(page_run: PageRun, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed) as failed:
        run_all(page_run, tmp_path, "# Title\n\n```bash\necho said; echo cried >&2; false; echo never\n```\n")
    message = str(failed.value)
    assert message.startswith("page.md, line 3: exit status 1\n")
    assert "echo said; echo cried >&2; false; echo never" in message
    assert message.endswith("--- its output\nsaid\ncried")


def test_of_much_output_the_end_is_shown(page_run: PageRun, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed) as failed:
        run_all(page_run, tmp_path, "```bash\nhead -c 100000 /dev/zero | tr '\\0' a; echo the end; false\n```\n")
    output = str(failed.value).partition("--- its output\n")[2]
    assert output.endswith("a" * 3900 + "the end")
    assert len(output) <= 4000


@pytest.mark.parametrize("text", ["false | true", "echo $not_set"])
def test_blocks_run_strictly(page_run: PageRun, tmp_path: Path, text: str) -> None:
    with pytest.raises(BlockFailed):
        run_all(page_run, tmp_path, f"```bash\n{text}\n```\n")


def test_blocks_run_from_the_checkout(page_run: PageRun, tmp_path: Path) -> None:
    run_all(page_run, tmp_path, "```bash\ntest -x scripts/serve\n```\n\n```python\nopen('pyproject.toml')\n```\n")


def test_a_python_block_that_raises_fails(page_run: PageRun, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed, match=r"line 1: exit status 1[\s\S]*KeyError: 'a'"):
        run_all(page_run, tmp_path, "```python\n{}['a']\n```\n")


def test_a_service_is_there_for_the_later_blocks_on_the_pages_port(page_run: PageRun, tmp_path: Path) -> None:
    page = (
        f"<!-- serves -->\n```bash\n{SERVE} --port 8000\n```\n\n"
        '```bash\ncurl -sf http://127.0.0.1:8000/readyz\n```\n<!-- shows -->\n```json\n{"status": "ready"}\n```\n\n'
        f"<!-- serves -->\n```bash\n{SERVE} --served-model-name second\n```\n\n"
        "```bash\ncurl -sf http://127.0.0.1:8000/info | grep second\n```\n"
    )
    run_all(page_run, tmp_path, page)


def test_the_service_is_gone_at_the_end_and_so_is_what_a_block_left_behind(page_run: PageRun, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    page = (
        f"```bash\nsleep 600 & echo $! >> {pids}\n```\n\n"
        f"<!-- serves -->\n```bash\nsleep 601 & echo $! >> {pids}\necho $$ >> {pids}\n{SERVE} & wait\n```\n"
    )
    run_all(page_run, tmp_path, page)
    page_run.close()
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 3
    assert all(is_gone(pid) for pid in found)


def test_a_service_may_finish_its_work_before_it_is_gone(page_run: PageRun, tmp_path: Path) -> None:
    drains = f"trap 'sleep 1; echo done > {tmp_path}/drained; exit' TERM; {SERVE} & while :; do wait; done"
    run_all(page_run, tmp_path, f'<!-- serves -->\n```bash\nbash -c "{drains}"\n```\n')
    page_run.close()
    assert (tmp_path / "drained").exists()


def test_a_service_that_cannot_start_fails_at_once(page_run: PageRun, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed, match=r"line 2: the service has ended with status 1[\s\S]*batch_size") as failed:
        run_all(page_run, tmp_path, f"<!-- serves -->\n```bash\n{SERVE} --batch-size 0\n```\n")
    assert "cannot start" in str(failed.value)


def test_a_service_that_dies_under_the_page_fails(page_run: PageRun, tmp_path: Path) -> None:
    page = (
        f"<!-- serves -->\n```bash\necho $$ > {tmp_path}/pid\nexec {SERVE}\n```\n\n"
        f"```bash\nkill -9 $(cat {tmp_path}/pid); sleep 0.5\n```\n"
    )
    with pytest.raises(BlockFailed, match="line 2: the service has ended with status -9"):
        run_all(page_run, tmp_path, page)


def test_a_service_that_never_turns_ready_fails(
    page_run: PageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "START_S", 0.5)
    with pytest.raises(BlockFailed, match="line 2: not ready after"):
        run_all(page_run, tmp_path, "<!-- serves -->\n```bash\nsleep 600\n```\n")


def test_a_block_that_does_not_end_fails(page_run: PageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BLOCK_S", 0.5)
    with pytest.raises(BlockFailed, match="line 1: not done after"):
        run_all(page_run, tmp_path, "```bash\nsleep 600\n```\n")


def test_a_block_that_shows_something_else_fails(page_run: PageRun, tmp_path: Path) -> None:
    with pytest.raises(BlockFailed, match=r"line 1: it shows something else: no line like 'b'"):
        run_all(page_run, tmp_path, "```bash\necho a\n```\n\n<!-- shows -->\n```text\nb\n```\n")


def test_the_environment_is_a_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCHSERVE_MODEL", "batchserve_batch_size", "VLLM_LOGGING_LEVEL", "LD_PRELOAD", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    environment = newcomers_environment(4711)
    assert [name for name in environment if name.upper().startswith("BATCHSERVE_")] == ["BATCHSERVE_PORT"]
    assert environment["BATCHSERVE_PORT"] == "4711"
    assert environment["PATH"] == os.environ["PATH"]
    assert not environment.keys() & {"VLLM_LOGGING_LEVEL", "LD_PRELOAD", "OMP_NUM_THREADS"}


@pytest.mark.parametrize(
    ("language", "shown", "printed"),
    [
        ("text", "ok   port 8000 … free\n\nwait 12.5 ms\n", "first\nok port 41234 is free\nwait 3 ms\nlast\n"),
        ("text", "910 MiB, of 1,024", "1,039 MiB, of 12"),
        ("json", '{"a": [{"b": 1}], "c": null}', '{"a": [{"b": 2.5, "x": 1}, 3], "c": null, "d": ""}'),
    ],
)
def test_output_is_compared_loosely(language: str, shown: str, printed: str) -> None:
    assert compare(language, shown, printed) is None


@pytest.mark.parametrize(
    ("language", "shown", "printed", "difference"),
    [
        ("text", "a\nb 1", "a\nb x", "no line like 'b 1'"),
        ("json", '{"a": {"b": 1}}', '{"a": {}}', "no .a.b"),
        ("json", '{"a": [1, 2]}', '{"a": [1]}', ".a has 1 entries"),
        ("json", '{"a": "x"}', '{"a": null}', ".a is None"),
        ("json", '{"a": "It is Rome."}', '{"a": "It is Paris."}', ".a is 'It is Paris.'"),
        ("json", '{"a": 1}', "curl: nothing", "not JSON"),
    ],
)
def test_a_difference_is_named(language: str, shown: str, printed: str, difference: str) -> None:
    assert (compare(language, shown, printed) or "").startswith(difference)


def test_a_long_line_is_compared_with_many_ellipses_in_no_time() -> None:
    start = time.process_time()
    assert compare("text", "… a … 1 … a … 1 … a … b", "a 1 " * 5000)
    assert compare("text", "a … 1 … a … 1 …", "a 1 " * 5000) is None
    assert time.process_time() - start < 2
