"""The comparison of divisions of energy: each division gives away all of it, by its rule, and errors are counted for each lease and day."""

import json
from pathlib import Path

import pytest

from fractional_gpu.core.metering.meter import Holding
from fractional_gpu.core.metering.usage import Party
from fractional_gpu.simulator.load import Load, Memory, Pace
from fractional_gpu.simulator.metering import BEGINS_MS
from tests.benchmarks import energy_division
from tests.benchmarks.energy_division import (
    BUSY,
    BY_SHARE,
    BY_WORK,
    DIVISIONS,
    FIGURES,
    NOISES,
    NONE,
    OURS,
    SHARE,
    SOME,
    TIME,
    Compared,
    Measured,
    Shape,
    Task,
    errors,
    given_to,
    is_in_the_half,
    measure,
    of_days,
    truths,
)
from tests.support.simulated_draw import Draw

HALF, OTHER_HALF = (next(name for name in "abcdefgh" if is_in_the_half(name) is known) for known in (True, False))
SMALL = {
    "short cells": Shape(load=Load(pace=Pace.SHORT, memory=Memory.CELL, several_percent=0), users=5, devices=1),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_division, "LOADS", SMALL)


@pytest.fixture(scope="module")
def measured() -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy_division, "LOADS", SMALL)
        return measure(Task("short cells", 0, 1))


def holding(milli: int, *, busy: bool) -> Holding:
    return Holding(party=Party(pool="p"), milli=milli, devices=("d",), busy=busy)


def test_each_division_by_hand() -> None:
    """10 s at 75 W and 225 W of work. One lease has 3/4 of the device and works 2 s, the other 1/4 and works 4 s, on twice the use."""
    meter = Compared()
    meter.add_device(0, "d", "p", idle_mw=75_000)
    meter.read_energy(0, BEGINS_MS, "d", counter_mj=0)
    for at_ms, large, small in ((0, True, True), (2_000, False, True), (4_000, False, False)):
        meter.set_lease(at_ms, BEGINS_MS + at_ms, HALF, holding(750, busy=large))
        meter.set_lease(at_ms, BEGINS_MS + at_ms, OTHER_HALF, holding(250, busy=small))
    use = {HALF: 300, OTHER_HALF: 600}
    meter.read_energy(10_000, BEGINS_MS + 10_000, "d", counter_mj=3_000_000, utilisation=use)
    end = (10_000, BEGINS_MS + 10_000)
    rows = {OURS: meter.take(*end)} | {name: other.take(*end) for name, other in meter.others.items()}
    found = {name: of_days(one) for name, one in rows.items()}
    idle, work = 562_500, 2_250_000  # of the large lease; of both
    of_the_large = {name: one[0, HALF] for name, one in found.items()}
    assert of_the_large == {
        OURS: idle + work // 5,
        SOME: idle + round(work * 600 / (600 + 1000)),
        NONE: idle + round(work * 1500 / (1500 + 1000)),
        TIME: idle + work // 3,
        SHARE: 3_000_000 * 3 // 4,
        BUSY: 3_000_000 // 3,
    }
    assert {sum(one.values()) for one in found.values()} == {3_000_000}


def test_what_no_cell_drew_is_the_pools_by_busy_time_and_the_holders_by_share() -> None:
    meter = Compared()
    meter.add_device(0, "d", "p")
    meter.read_energy(0, BEGINS_MS, "d", counter_mj=0)
    meter.set_lease(5_000, BEGINS_MS + 5_000, "a", holding(250, busy=False))
    meter.read_energy(10_000, BEGINS_MS + 10_000, "d", counter_mj=1_000_000, quiet=True)
    end = (10_000, BEGINS_MS + 10_000)
    assert of_days(meter.others[BUSY].take(*end)) == {(0, ""): 1_000_000, (0, "a"): 0}
    assert of_days(meter.others[SHARE].take(*end)) == {(0, ""): 500_000, (0, "a"): 500_000}


def test_errors_and_shares_by_hand() -> None:
    wh = 3_600_000
    true = {(0, "a"): 100 * wh, (0, "b"): 20 * wh, (0, "c"): wh, (0, ""): 79 * wh}
    given = {(0, "a"): 90 * wh, (0, "b"): 30 * wh, (0, "c"): 2 * wh, (0, ""): 78 * wh}
    found = errors(given, true)
    assert found[FIGURES[0]] == pytest.approx(5.5)
    assert found[FIGURES[1]] == pytest.approx(10)
    assert found[FIGURES[2]] == pytest.approx(46)  # of 10, 10 and 50 %: c counts as 10 Wh
    assert found[FIGURES[3]] == pytest.approx(10)
    draw = Draw(work={(0, "a"): 7, (0, "b"): 3})
    assert list(given_to(given, draw).values()) == pytest.approx([39, 1, 15, 45, 0])
    by_work = truths(Draw(work={(0, "a"): 5_000_000}, idle_by_work={(0, "a"): 2_000_000, (0, ""): 9_000_000}))[BY_WORK]
    assert by_work == {(0, "a"): 7, (0, ""): 9}


def test_the_meter_is_nearly_right_where_all_use_is_measured_and_better_than_the_others(measured: Measured) -> None:
    off = {name: measured.errors[BY_SHARE][name]["misplaced, %"] for name in DIVISIONS}
    assert off[OURS] < 0.1
    assert off[OURS] < off[SOME] < off[NONE] < off[SHARE]
    assert off[OURS] < off[BUSY]
    for shares in measured.shares.values():
        assert sum(shares.values()) == pytest.approx(100)


def test_the_report_names_all_that_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert energy_division.main(["--seeds", "1", "--jobs", "1", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [one["task"]["noise"] for one in found] == list(NOISES)
    for name in (*DIVISIONS, *SMALL, BY_SHARE, BY_WORK):
        assert name in shown
    lines = [line for line in shown.splitlines() if line.startswith(f"| {OURS} |")]
    assert len(lines) == 3
    first = found[0]["errors"][BY_SHARE][OURS][FIGURES[0]]
    assert lines[0].split("|")[2].strip() == f"{round(first, 2) or 0:g}"
