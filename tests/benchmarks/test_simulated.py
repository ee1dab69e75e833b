"""The benchmarks of the simulator: their figures come from the runs, and their tables name what they measured."""

import json
from pathlib import Path

import pytest

from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks import policies, sensitivity, sharing
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
    arguments = ["--seeds", "1", "--users", "4", "--jobs", "1", "--week", "1", "--json", str(tmp_path / "found.json")]
    assert sensitivity.main(arguments) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    named = ["usual", *sensitivity.SWITCHES, "usual, for a week", *sensitivity.WEEKENDS]
    assert [row[0] for row in rows] == ["| load", *(f"| {name}" for name in named)]
    assert {len(row) for row in rows} == {1 + len(FIGURES)}
    assert list(json.loads((tmp_path / "found.json").read_text())) == ["seeds", *named]


def test_all_ways_of_sharing_run_on_the_devices_of_fixed_fractions() -> None:
    found = sharing.measure(sharing.Task(seed=2, users=12, several_percent=0))
    devices = {one["devices"] for one in found.values()}
    assert devices == {found["static-fraction"]["devices needed"]}
    for name, way in sharing.WAYS.items():
        needs, trace = machine(int(found[name]["devices needed"])), synthetic_sessions(12, 1, 2, ONE_GPU)
        assert not way(needs, trace, None).missed(GOAL)
    assert found["ours, as shipped"]["devices needed"] <= found["static-fraction"]["devices needed"]


def test_a_cell_of_a_table_has_an_interval_where_there_are_seeds_enough() -> None:
    assert cell([1.0, 2.0, 3.0]) == "2"
    assert cell([-0.001] * 6) == "0 (0 to 0)"
    assert cell([float(value) for value in range(1, 21)]) == "10.50 (6 to 15)"


def test_every_setting_runs_on_the_hosts_of_the_shipped_pool() -> None:
    found = policies.measure(policies.Task(seed=1, users=12, several_percent=0, each=2))
    assert list(found) == list(policies.GRID)
    trace, shipped = synthetic_sessions(12, 1, 1, ONE_GPU), found[policies.DEFAULT]
    assert {one["devices"] for one in found.values()} == {shipped["devices"]}
    whole = simulate(machine(int(shipped["devices"]), each=2), trace)
    assert not whole.missed(GOAL)
    assert shipped["worst user's p95 late, s"] == whole.lateness.percentile_of_users_ms(100) / 1000
    assert len({tuple(one.values()) for one in found.values()}) > 5  # settings that change something


def test_a_setting_that_beats_the_shipped_pool_is_named_unless_it_is_luck() -> None:
    def seed(better: float, name: str = "compute pack", out_of_memory: float = 0.0) -> dict[str, dict[str, float]]:
        found = {one: dict.fromkeys(policies.COLUMNS, 10.0) for one in policies.GRID}
        for one in found.values():
            one["out of memory"] = 0.0
        found[name]["mean late, s"] = 10.0 * (1 - better)
        found[name]["out of memory"] = out_of_memory
        return found

    said, beaten = policies.verdict([seed(0.2)] * 14)
    assert beaten
    assert "compute pack by 20 %, lower in 14 seeds and higher in 0: BEATS the shipped pool" in said
    assert said.endswith("A setting BEATS the shipped pool by more than 10 %.\n")
    for done, listed in (
        ([seed(0.9), *[seed(0.1)] * 3, *[seed(-0.01)] * 3], True),  # one good day
        ([seed(0.08)] * 14, False),
        ([seed(0.9), *[seed(-0.1)] * 13], False),
        ([seed(0.5, out_of_memory=1.0)] * 14, False),
        ([seed(0.5, "any fraction")] * 14, False),
    ):
        said, beaten = policies.verdict(done)
        assert not beaten
        assert ("compute pack by 17 %, lower in 4 seeds and higher in 3: may be luck" in said) is listed
        assert said.endswith("No setting is better than the shipped pool by more than 10 % beyond luck.\n")


def test_hosts_have_so_many_devices_and_settings_are_of_all_of_them() -> None:
    hosts = machine(20, each=8)
    assert [len(host.devices) for host in hosts] == [8, 8, 8]
    assert [len(host.devices) for host in machine(20)] == [20]
    moved = policies.hosts_for("may_move off", hosts)
    assert {host.pools[0].may_move for host in moved} == {False}
    assert {host.pools[0].devices for host in moved} == {host.pools[0].devices for host in hosts}
