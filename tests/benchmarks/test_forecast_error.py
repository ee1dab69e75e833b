"""The benchmark of forecasts counts what it says: of the second half, each predictor before it knows."""

import json
from pathlib import Path

import pytest

from fractional_gpu.core.forecasts.outcomes import CELL, Judged
from fractional_gpu.core.model import Span
from fractional_gpu.simulator.load import Habit
from tests.benchmarks.forecast_error import LAST, MEAN, OURS, Judge, as_table, main, of_habit, of_swaps


def test_naive_predictors_know_what_came_before_of_the_same_kernel() -> None:
    judge, stated = Judge(), Span(expected_ms=900, low_ms=800, high_ms=1_000)
    for lease_id, happened in (("a", 1_000), ("a", 3_000), ("b", 500_000)):
        judge(Judged(CELL, "H", lease_id, stated, happened))
    assert not judge.scores, "the first half only teaches"
    judge.counts = True
    judge(Judged(CELL, "H", "a", stated, 1_000))
    found = {name: score.figures() for name, score in judge.scores[CELL].items()}
    assert {name: one["median_error"] for name, one in found.items()} == {OURS: 0.1, LAST: 2.0, MEAN: 1.0}
    assert {name: one["coverage"] for name, one in found.items()} == {OURS: 1, LAST: 1, MEAN: 1}
    assert found[OURS]["width"] == pytest.approx(0.2)
    assert judge.figures() == {}, "one outcome is no row"


def test_forecasts_of_a_habit_are_counted_with_their_coverage() -> None:
    figures = of_habit(Habit.TEACHING_LAB, 8, 2, 1).figures()
    ours = figures[CELL][OURS]
    assert ours["count"] >= 30
    assert 0.6 <= ours["coverage"] <= 1
    row = as_table({"lab": figures}).splitlines()[2]
    assert row.startswith("| lab | cell | ")


def test_swaps_of_a_device_that_becomes_slower_are_learnt() -> None:
    found = of_swaps(2)["device that becomes slower"].figures()
    for figures in found.values():
        assert figures[OURS]["median_error"] < 0.15 < figures[MEAN]["median_error"]
        assert 0.7 <= figures[OURS]["coverage"] <= 0.92


def test_a_list_of_pods_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pods.csv"
    file.write_text("name\n")
    with pytest.raises(SystemExit):
        main(["--users", "1", "--days", "2", "--pods", str(file), "--json", str(tmp_path / "found.json")])
    assert "pods.csv" in capsys.readouterr().err


def test_the_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert main(["--users", "1", "--days", "2", "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith("| load | forecast |")
    assert json.loads(file.read_text())["steady device"]["suspend"][OURS]["count"] == 300
