"""Many hosts, each simulated separately: sessions placed beforehand, processes, and figures as of one run over all hosts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fractional_gpu.core.model import DeviceSpec, LeaseSpec, Limits, PoolSpec
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.fleet import (
    SUMS,
    HostChoice,
    PlaceRule,
    added_up,
    choose_hosts,
    record_of,
    run,
    simulate_apart,
)
from fractional_gpu.simulator.hosts import Door, DoorRule, Leases
from fractional_gpu.simulator.load import Signs, synthetic_sessions
from fractional_gpu.simulator.machine import Host, SwapSpeed
from fractional_gpu.simulator.record import replay
from fractional_gpu.simulator.result import Result, Timeline
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session
from tests.simulator.loads import BUSY, ONE_GPU

MINUTE_MS = 60_000


def host(count: int = 1, mib: int = 81_920, **policy: object) -> Host:
    """A host with this many devices in one pool."""
    names = tuple(f"d{number}" for number in range(count))
    devices = tuple(DeviceSpec(device_id=name, name=f"{mib}", memory_mib=mib) for name in names)
    pool = PoolSpec(name="default", devices=names)
    return Host(devices=devices, pools=(replace(pool, **policy),), swap=SwapSpeed())  # type: ignore[arg-type]


def session(name: str, open_ms: int, mib: int = 6000, *, gpus: int = 1, close_ms: int = 60 * MINUTE_MS) -> Session:
    """A session that runs one cell of ten seconds as soon as it is open."""
    return Session(name, name, open_ms, close_ms, gpus, 0, (Cell(open_ms, 10_000, gpus, mib, 10),))


def spread_evenly(trace: Sequence[Session], hosts: int) -> list[int]:
    return [number % hosts for number in range(len(trace))]


class Chosen(Door):
    """A door at which sessions get the hosts that were chosen beforehand."""

    def __init__(self, hosts: Sequence[Host], trace: Sequence[Session], chosen: Sequence[int]) -> None:
        super().__init__(hosts, trace)
        self.leases = Leases(hosts, trace)
        self.chosen = {session.session_id: host for session, host in zip(trace, chosen, strict=True)}

    def choose(self, session: Session) -> tuple[int, LeaseSpec]:
        host = self.chosen[session.session_id]
        lease = self.leases.on(host, session)
        assert lease is not None
        self._count(host, lease, 1)
        return host, lease


def on_one_clock(hosts: Sequence[Host], trace: Sequence[Session], chosen: Sequence[int]) -> Result:
    return simulate(hosts, trace, door=Chosen(hosts, trace, chosen))


# -- the same figures as one run over all hosts -------------------------------------------------------------------------


def eventful() -> tuple[list[Session], list[Host]]:
    """A load under which every figure moves: swaps fail, cells lack memory, sessions are turned away, signs deceive."""
    load = replace(BUSY, several_percent=20, urgent_percent=20, ask_error_percent=60)
    trace = synthetic_sessions(36, 1, 5, load)
    crowded = replace(
        host(4, user_limits=Limits(leases=1)),
        failed_swaps_percent=8,
        signs=Signs(foresight_ms=20_000, false_percent=60),
        request_percent=50,
    )
    return [one for one in trace if one.most_gpus <= 4], [crowded, host(6), replace(crowded, seed=2)]


def test_hosts_apart_and_on_one_clock_give_equal_figures() -> None:
    trace, hosts = eventful()
    chosen = spread_evenly(trace, len(hosts))
    together = on_one_clock(hosts, trace, chosen)
    apart = simulate_apart(hosts, trace, chosen)
    assert apart == together
    assert apart.as_json() == together.as_json()
    still = [name for name in SUMS if not getattr(together, name)]
    assert not still, f"the load moves none of {still}: what is compared says nothing about them"
    assert min(together.peak_devices_held, together.host_peak_mib, together.lateness.jain()) > 0
    split = {one.user for one, at in zip(trace, chosen, strict=True) if at} & {
        one.user for one, at in zip(trace, chosen, strict=True) if not at
    }
    assert split, "no user has sessions on different hosts"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(1, 10_000),
    users=st.integers(1, 5),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    foresight_ms=st.sampled_from((0, 20_000)),
    data=st.data(),
)
def test_any_placement_gives_equal_figures(
    seed: int, users: int, counts: list[int], foresight_ms: int, data: st.DataObject
) -> None:
    trace = synthetic_sessions(users, 1, seed, BUSY)
    signs = Signs(foresight_ms=foresight_ms, false_percent=30)
    hosts = [replace(host(count), signs=signs, failed_swaps_percent=5) for count in counts]
    chosen = [data.draw(st.integers(0, len(hosts) - 1)) for _ in trace]
    assert simulate_apart(hosts, trace, chosen) == on_one_clock(hosts, trace, chosen)


@pytest.mark.parametrize("rule", PlaceRule)
def test_by_every_rule_a_run_is_that_of_the_hosts_that_the_rule_chooses(rule: PlaceRule) -> None:
    trace = synthetic_sessions(12, 1, 4, BUSY)
    hosts = [host(1) for _ in range(5)]
    chosen = choose_hosts(hosts, trace, rule, 1)
    assert run(hosts, trace, HostChoice(rule=rule, processes=1)) == on_one_clock(hosts, trace, chosen)


def test_processes_change_nothing_and_say_how_far_they_are() -> None:
    trace = synthetic_sessions(12, 1, 4, BUSY)
    hosts = [host(1) for _ in range(5)]
    seen: list[tuple[int, int]] = []
    way = HostChoice(rule=PlaceRule.USE, processes=2)
    beside = run(hosts, trace, way, progress=lambda ended, of: seen.append((ended, of)))
    assert beside == run(hosts, trace, replace(way, processes=1))
    assert (len(seen), seen[-1]) == (len(hosts), (len(trace), len(trace)))


def test_hosts_without_sessions_count_as_devices_and_in_nothing_else() -> None:
    trace = [session("a", MINUTE_MS), session("b", 2 * MINUTE_MS)]
    hosts = [host(), host(2), host()]
    apart = simulate_apart(hosts, trace, [1, 1])
    assert apart == on_one_clock(hosts, trace, [1, 1])
    assert (apart.hosts, apart.devices, apart.owned) == (3, 4, 4 * 59 * MINUTE_MS * 1000)
    assert simulate_apart(hosts, [], []) == on_one_clock(hosts, [], [])


def test_timelines_are_added_up_moment_by_moment() -> None:
    def timeline(*points: tuple[int, int, int, int]) -> Timeline:
        made = Timeline()
        for point in points:
            made.add(*point)
        return made

    one = timeline((0, 0, 0, 0), (10, 1, 1, 0), (30, 0, 0, 0))
    other = timeline((0, 1, 0, 0), (10, 0, 0, 1), (20, 1, 1, 0), (25, 1, 1, 0))
    whole = list(zip(*added_up([one, other]).columns, strict=True))
    assert whole == [(0, 1, 0, 0), (10, 1, 1, 1), (20, 2, 2, 0), (30, 1, 1, 0)]


# -- which host -----------------------------------------------------------------------------------------------------------


def test_by_count_a_session_goes_where_the_fewest_are_open_for_each_gpu() -> None:
    trace = [session(name, at) for at, name in enumerate("abcde")]
    assert list(choose_hosts([host(1), host(3)], trace, PlaceRule.COUNT, 1)) == [0, 1, 1, 1, 0]
    left = [session("a", 0, close_ms=10), session("b", 5), session("c", 10)]
    assert list(choose_hosts([host(), host()], left, PlaceRule.COUNT, 1)) == [0, 1, 0]


def test_by_chance_each_session_draws_by_itself_and_large_hosts_have_more() -> None:
    trace = synthetic_sessions(300, 1, 1, BUSY)
    hosts = [host(1), host(3)]
    chosen = choose_hosts(hosts, trace, PlaceRule.RANDOM, 7)
    assert 0.7 < sum(chosen) / len(trace) < 0.8
    assert list(choose_hosts(hosts, trace[5:], PlaceRule.RANDOM, 7)) == list(chosen[5:])
    assert list(choose_hosts(hosts, trace, PlaceRule.RANDOM, 8)) != list(chosen)


def test_by_use_memory_that_is_asked_for_counts() -> None:
    trace = [session("large", 0, mib=40_000), *(session(name, at, mib=900) for at, name in enumerate("abcde", 1))]
    # a half of a device against eighths; each is expected to use the same part of its compute
    assert list(choose_hosts([host(), host()], trace, PlaceRule.USE, 1)) == [0, 1, 1, 1, 0, 1]


def test_by_use_users_who_compute_more_count_more() -> None:
    def worker(user: str, minutes: int, open_ms: int, name: str) -> Session:
        cell = Cell(open_ms, minutes * MINUTE_MS, 1, 6000, 50)
        return Session(name, user, open_ms, open_ms + 600 * MINUTE_MS, 1, 0, (cell,))

    day = [worker("busy", 599, 0, "b0"), worker("idle", 1, 1, "i0")]
    next_day = 700 * MINUTE_MS
    back = [worker("busy", 599, next_day, "b1"), worker("idle", 1, next_day + 1, "i1")]
    more = [worker(f"new{number}", 1, next_day + 2 + number, f"n{number}") for number in range(2)]
    chosen = list(choose_hosts([host(), host()], [*day, *back, *more], PlaceRule.USE, 1))
    assert chosen[2:4] == [0, 1]
    assert chosen[4:] == [1, 1], "the busy user's host is the fuller one, whatever the new ones do"
    assert list(choose_hosts([host(), host()], [*day, *back, *more], PlaceRule.COUNT, 1))[4:] == [0, 1]


@pytest.mark.parametrize("rule", PlaceRule)
def test_hosts_that_cannot_serve_a_session_are_left_out(rule: PlaceRule) -> None:
    trace = [session(name, at, gpus=2) for at, name in enumerate("abcd")]
    assert list(choose_hosts([host(1), host(2), host(1)], trace, rule, 1)) == [1, 1, 1, 1]
    with pytest.raises(SimulationError, match="'a' uses 2 GPUs at once, but a lease of pool 'default' may have 1"):
        choose_hosts([host(1), host(1)], trace, rule, 1)
    with pytest.raises(SimulationError, match="session 'a'"):
        simulate_apart([host(1), host(2)], trace, [0, 1, 1, 1])


def test_use_spreads_better_than_chance_where_the_hosts_are_tight() -> None:
    trace = synthetic_sessions(120, 1, 2, ONE_GPU)
    hosts = [host(3) for _ in range(4)]
    results = {rule: run(hosts, trace, HostChoice(rule=rule)) for rule in (PlaceRule.USE, PlaceRule.RANDOM)}
    worst = {rule: max(result.host_p95_ms) for rule, result in results.items()}
    assert worst[PlaceRule.USE] < worst[PlaceRule.RANDOM]
    assert all(len(result.host_p95_ms) == 4 for result in results.values())


# -- goals, records, baselines ------------------------------------------------------------------------------------------


def test_a_goal_that_is_out_of_reach_ends_the_run_after_a_host() -> None:
    trace = synthetic_sessions(8, 1, 7, BUSY)
    hosts = [host(1, 40_960), *(host(2) for _ in range(3))]
    goal = Goal(p95_wait_ms=1_000)
    half = len(trace) // 2
    crowded = [0] * half + [1 + number % 3 for number in range(len(trace) - half)]
    given_up = simulate_apart(hosts, trace, crowded, goal=goal)
    whole = simulate_apart(hosts, trace, crowded)
    assert "more than 5 % of the GPU cells' waits" in given_up.missed(goal)
    assert whole.missed(goal)
    assert len(given_up.waits.ordered) < len(whole.waits.ordered) == whole.gpu_cells
    kept = Goal(p95_wait_ms=whole.waits.percentile_ms(95))
    assert not simulate_apart(hosts, trace, crowded, goal=kept).missed(kept)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_host_is_recorded_in_a_file_of_its_own_that_can_be_replayed(tmp_path: Path, processes: int) -> None:
    trace = synthetic_sessions(6, 1, 3, BUSY)
    hosts, record = [host(), host()], tmp_path / "run.log.gz"
    chosen = spread_evenly(trace, 2)
    plain = simulate_apart(hosts, trace, chosen)
    assert simulate_apart(hosts, trace, chosen, processes=processes, record=record) == plain
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host-0.run.log.gz", "host-1.run.log.gz"]
    for number in range(2):
        events, effects = replay(record_of(record, number))
        assert min(events, effects) > 0


def test_the_record_of_a_host_is_that_of_one_host_alone(tmp_path: Path) -> None:
    trace = synthetic_sessions(4, 1, 3, BUSY)
    chosen = spread_evenly(trace, 2)
    simulate_apart([host(), host()], trace, chosen, record=tmp_path / "run.log")
    run([host()], trace[1::2], HostChoice(), record=tmp_path / "alone.log")
    assert (tmp_path / "host-1.run.log").read_bytes() == (tmp_path / "alone.log").read_bytes()
    head = json.loads((tmp_path / "alone.log").read_text().splitlines()[0])
    assert (head["door"], len(head["hosts"])) == (DoorRule.FIT, 1)


def test_a_record_that_cannot_be_written_ends_the_run_in_any_process(tmp_path: Path) -> None:
    trace, record = [session("a", 0), session("b", 1)], tmp_path / "absent" / "run.log"
    for processes in (1, 2):
        with pytest.raises(SimulationError, match=r"the log .*host-0\.run\.log cannot be written: No such file"):
            simulate_apart([host(), host()], trace, [0, 1], processes=processes, record=record)


# -- processes --------------------------------------------------------------------------------------------------------------


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(
        "import os, signal\n"
        "from tests.simulator.test_fleet import host, simulate_apart, synthetic_sessions, BUSY\n"
        "if __name__ == '__main__':\n"
        "    trace = synthetic_sessions(4, 1, 4, BUSY)\n"
        "    chosen = [number % 3 for number in range(len(trace))]\n"
        "    simulate_apart([host()] * 3, trace, chosen, processes=2, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    # the workers have the pipe's writing end, too: it ends with the last of them
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, program], env=environment, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
