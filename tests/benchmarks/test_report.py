"""How figures get into the docs, and that what is there is what was measured."""

import statistics
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import backends, callers, overhead, report, versus_vllm_serve, window_life
from benchmarks.backends_tables import VLLM

BENCHMARKS: dict[str, ModuleType] = {
    module.NAME: module for module in (backends, callers, overhead, versus_vllm_serve, window_life)
}
DRAWN = {name: module for name, module in BENCHMARKS.items() if hasattr(module, "draw")}
PAGE = """# Page

<!-- one: written by python -m benchmarks.one -->
old
<!-- end of one -->

<!-- two: written by python -m benchmarks.two -->
<!-- end of two -->
"""


def test_a_block_is_replaced_and_what_is_around_it_stays() -> None:
    page = report.with_block(report.with_block(PAGE, "two", "second"), "one", "new\nlines")
    assert report.block(page, "one") == "new\nlines"
    assert report.block(page, "two") == "second"
    assert (
        report.with_block(report.with_block(page, "one", "old"), "two", "").replace("\n\n<!-- end", "\n<!-- end")
        == PAGE
    )


def test_a_page_without_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no block <!-- three"):
        report.with_block(PAGE, "three", "text")


def test_a_spread_is_the_median_with_least_and_greatest() -> None:
    assert report.spread([3.0, 1.0, 2000.0], 1) == "3.0 (1.0 – 2,000.0)"


def test_writing_puts_report_plot_and_table_in_place(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text(PAGE)
    report.write(tmp_path, "one", {"figure": 1.5}, "| table |", plot="<svg/>")
    assert report.read(tmp_path, "one") == {"figure": 1.5}
    assert (tmp_path / "figures" / "one.svg").read_text() == "<svg/>"
    assert report.block((tmp_path / "benchmarks.md").read_text(), "one") == "| table |"


def test_every_figure_of_the_docs_belongs_to_a_benchmark() -> None:
    files = {path.name for path in (report.DOCS / "figures").iterdir()}
    assert files == {f"{name}.json" for name in BENCHMARKS} | {f"{name}.svg" for name in DRAWN}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_table_in_the_docs_is_what_its_report_says(name: str) -> None:
    page = (report.DOCS / getattr(BENCHMARKS[name], "PAGE", "benchmarks.md")).read_text()
    again = f"write it again: python -m benchmarks.{name}"
    assert report.block(page, name) == BENCHMARKS[name].render(report.read(report.DOCS, name)), again


@pytest.mark.parametrize("name", DRAWN)
def test_the_plot_in_the_docs_is_what_its_report_says(name: str) -> None:
    drawn = (report.DOCS / "figures" / f"{name}.svg").read_text()
    assert drawn == DRAWN[name].draw(report.read(report.DOCS, name))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_report_says_where_and_with_what_it_was_measured(name: str) -> None:
    machine = report.read(report.DOCS, name)["machine"]
    assert len(machine["commit"].split()[0]) == 40
    assert machine["cpu"]
    assert machine["cores"] > 0
    assert {"batchserve", "vllm", "torch"} <= machine["versions"].keys()


def test_the_overhead_was_measured_often_enough_and_says_with_which_settings() -> None:
    for case in report.read(report.DOCS, "overhead")["cases"]:
        counts = {side: len(runs) for side, runs in case["seconds"].items()}
        assert counts.keys() == {"direct", "batch", "generate"}
        assert len(set(counts.values())) == 1
        assert counts["direct"] >= 5
        assert case["engine_args"]["kv_cache_memory_bytes"] > 0
        assert case["service_settings"]["batch_size"] == 32


def test_vllms_server_was_measured_often_enough_beside_each_service_and_with_the_same_engine() -> None:
    result = report.read(report.DOCS, "versus_vllm_serve")
    assert result["repeats"] >= 3
    assert [case["name"] for case in result["cases"]] == [case.name for case in versus_vllm_serve.CASES]
    for case, planned in zip(result["cases"], versus_vllm_serve.CASES, strict=True):
        assert result["vllm_config"].items() <= case["engine_args"].items()
        assert case["service_settings"]["service_64"]["batch_size"] == 64
        assert {cell["callers"] for cell in case["cells"]} == planned.requests.keys() == {1, 32, 64, 256}
        for measured in (*case["cells"], case["guidellm"]):
            assert {len(runs) for runs in measured["runs"].values()} == {result["repeats"]}


def test_both_backends_were_measured_often_enough_beside_vllms_server_and_with_as_many_sequences() -> None:
    result = report.read(report.DOCS, "backends")
    assert result["repeats"] >= 3
    assert [case["name"] for case in result["cases"]] == [case.name for case in backends.CASES]
    for case, planned in zip(result["cases"], backends.CASES, strict=True):
        assert case["engine_args"]["max_num_seqs"] == 64
        assert case["service_settings"].keys() == set(planned.sides) - {VLLM} == {"offline_64", "python"}
        for side, settings in case["service_settings"].items():
            assert settings["backend"] == ("vllm_python" if side == "python" else "vllm_offline")
            assert settings["batch_size"] == 64
        empty = [{**cell, "runs": None} for cell in backends.cells_of(planned)]
        assert [{**cell, "runs": None} for cell in case["cells"]] == empty
        for measured in (*case["cells"], case["guidellm"]):
            assert {len(runs) for runs in measured["runs"].values()} == {result["repeats"]}


def test_a_missed_target_is_told() -> None:
    case = {
        "name": "made up",
        "targets": {"batch": 0.97, "generate": 0.95},
        "seconds": {"direct": [1.0, 1.0, 1.0], "batch": [1.01, 2.0, 1.02], "generate": [1.2, 1.0, 1.1]},
        "alone_ms": {"direct": [100.0, 100.0, 100.0], "generate": [119.0, 121.0, 125.0]},
    }
    lines = overhead.missed({"cases": [case], "max_wait_ms": 10})
    assert len(lines) == 2
    assert "64 × `POST /generate` reaches 0.909" in lines[0]
    assert "21.0 ms slower" in lines[1]


def test_the_durations_of_a_drawn_row_add_up() -> None:
    for row in report.read(report.DOCS, "window_life")["rows"]:
        assert sum(row[part] for part in window_life.PARTS) == pytest.approx(row["e2e_ms"], abs=0.01)


def test_ratios_compare_runs_of_the_same_repeat() -> None:
    case = {"seconds": {"direct": [2.0, 3.0], "batch": [1.0, 6.0]}}
    assert overhead.ratios(case, "batch") == [2.0, 0.5]
    assert statistics.median(overhead.ratios(case, "batch")) == 1.25
