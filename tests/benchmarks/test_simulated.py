"""The benchmarks of the simulator: their figures come from the runs, and their tables name what they measured."""

from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks import policies, sensitivity, sharing
from tests.benchmarks.simulated import GOAL, machine

ONE_GPU = Load(several_percent=0)


def test_the_usual_load_runs_on_the_fewest_devices_that_keep_the_goal() -> None:
    found = sensitivity.measure(sensitivity.Task(ONE_GPU, 1, 20))
    devices, trace = int(found["devices needed"]), synthetic_sessions(20, 1, 1, ONE_GPU)
    assert found["p95 wait, s"] == simulate(machine(devices), trace).waits.percentile_ms(95) / 1000 <= 3
    assert devices > 1
    assert simulate(machine(devices - 1), trace).missed(GOAL)


def test_all_ways_of_sharing_run_on_the_devices_of_fixed_fractions() -> None:
    found = sharing.measure(sharing.Task(seed=2, users=12, several_percent=0))
    devices = {one["devices"] for one in found.values()}
    assert devices == {found["static-fraction"]["devices needed"]}
    for name, way in sharing.WAYS.items():
        needs, trace = machine(int(found[name]["devices needed"])), synthetic_sessions(12, 1, 2, ONE_GPU)
        assert not way(needs, trace, None).missed(GOAL)
    assert found["ours, as shipped"]["devices needed"] <= found["static-fraction"]["devices needed"]


def test_every_setting_runs_on_the_hosts_of_the_shipped_pool() -> None:
    found = policies.measure(policies.Task(seed=1, users=12, several_percent=0, each=2))
    assert list(found) == list(policies.GRID)
    trace, shipped = synthetic_sessions(12, 1, 1, ONE_GPU), found[policies.DEFAULT]
    assert {one["devices"] for one in found.values()} == {shipped["devices"]}
    whole = simulate(machine(int(shipped["devices"]), each=2), trace)
    assert not whole.missed(GOAL)
    assert shipped["worst user's p95 late, s"] == whole.lateness.percentile_of_users_ms(100) / 1000
    assert len({tuple(one.values()) for one in found.values()}) > 5  # settings that change something
