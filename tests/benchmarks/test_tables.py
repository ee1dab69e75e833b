"""The tables of the documents are what the results say, and a run of a benchmark replaces them."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import tables
from tests.support.paths import ROOT


@pytest.mark.parametrize("page", sorted({table.page for table in tables.TABLES.values()}))
def test_a_page_has_the_figures_of_the_results(page: str) -> None:
    shown = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert shown == tables.written(page), "`python -m tests.benchmarks.tables` writes them"
    assert {line.count(" | ") for line in shown.splitlines() if line.startswith("| ")} <= {1, 2}, "too wide for a phone"


def test_what_a_benchmark_prints_becomes_the_result_and_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables.Table("page.md", "python -m some.benchmark", {"a": "{name}", "b": "{late, s}"}, at=-1, rows=("two",))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n<!-- table: one -->\nold\n<!-- end of one -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TABLES", {"one": table})
    out = tmp_path / "out.txt"
    out.write_text(
        "| x |\n|---|\n| 1 |\n\nsaid\n| name | late, s |\n|---|---:|\n| one | 3 |\n| two | -4.5 (-5 to 6) |\n"
    )
    assert tables.main(["--from", str(out), "one"]) == 0
    assert json.loads((tmp_path / "one.json").read_text())[1] == {"name": "two", "late, s": "-4.5 (-5 to 6)"}
    assert (tmp_path / "docs" / "page.md").read_text() == (
        "# Page\n\n<!-- table: one -->\n\n| a | b |\n| --- | ---: |\n| two | -4.5 |\n\n"
        "Measured by `python -m some.benchmark`.\n\n<!-- end of one -->\n"
    )
