"""The benchmarks of the simulator: their figures are those of the runs, and their tables name what they measured."""

import json
from pathlib import Path

import pytest

from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks import sensitivity, sharing
from tests.benchmarks.simulated import FIGURES, GOAL, cell, machine

ONE_GPU = Load(several_percent=0)


def test_the_usual_load_runs_on_the_fewest_devices_that_keep_the_goal() -> None:
    found = sensitivity.measure(sensitivity.Task(ONE_GPU, 1, 20))
    devices, trace = int(found["devices needed"]), synthetic_sessions(20, 1, 1, ONE_GPU)
    assert found["p95 wait, s"] == simulate(machine(devices), trace).waits.percentile_ms(95) / 1000 <= 3
    assert devices > 1
    assert simulate(machine(devices - 1), trace).missed(GOAL)


def test_a_turned_switch_is_measured_on_the_devices_of_the_usual_load() -> None:
    one = sensitivity.Task(ONE_GPU, 1, 20, devices=2)
    found = sensitivity.measure(one)
    assert (
        found["p95 wait, s"]
        == simulate(machine(2), synthetic_sessions(20, 1, 1, ONE_GPU)).waits.percentile_ms(95) / 1000
    )
    few = sensitivity.measure(sensitivity.Task(Load(), 1, 20, devices=2))  # too few for its largest session
    assert few["devices needed"] >= 8
    assert sensitivity.differences([found], [few])["devices needed"] == [
        few["devices needed"] - found["devices needed"]
    ]


def test_the_table_of_switches_has_them_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--seeds", "1", "--users", "4", "--jobs", "1", "--json", str(tmp_path / "found.json")]
    assert sensitivity.main(arguments) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| load", "| usual", *(f"| {name}" for name in sensitivity.SWITCHES)]
    assert {len(row) for row in rows} == {1 + len(FIGURES)}
    assert list(json.loads((tmp_path / "found.json").read_text())) == ["seeds", "usual", *sensitivity.SWITCHES]


def test_all_ways_of_sharing_run_on_the_devices_of_fixed_fractions() -> None:
    found = sharing.measure(sharing.Task(seed=2, users=12, several_percent=0))
    devices = {one["devices"] for one in found.values()}
    assert devices == {found["static-fraction"]["devices needed"]}
    for name, way in sharing.WAYS.items():
        needs, trace = int(found[name]["devices needed"]), synthetic_sessions(12, 1, 2, ONE_GPU)
        assert not way(needs, trace, None).missed(GOAL)
    assert found["ours, as shipped"]["devices needed"] <= found["static-fraction"]["devices needed"]


def test_a_cell_of_a_table_has_an_interval_where_there_are_seeds_enough() -> None:
    assert cell([1.0, 2.0, 3.0]) == "2"
    assert cell([-0.001] * 6) == "0 (0 to 0)"
    assert cell([float(value) for value in range(1, 21)]) == "10.50 (6 to 15)"
