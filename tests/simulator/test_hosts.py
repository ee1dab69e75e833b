"""Several hosts: each session on one of them, each with its own arbiter, under one clock."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from fractional_gpu.core.events import LeaseRequested
from fractional_gpu.core.model import DeviceSpec, Limits, PoolSpec
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.baselines import BASELINES, run_baseline
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.hosts import Door, DoorRule
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host, SwapSpeed
from fractional_gpu.simulator.record import EventLog
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.search import fewest
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session
from tests.simulator.loads import BUSY

MINUTE_MS = 60_000
SWAP = SwapSpeed(fixed_ms=100, save_mib_per_s=1000, restore_mib_per_s=2000)


def host(count: int = 1, mib: int = 8000, **policy: object) -> Host:
    """A host with this many devices in one pool."""
    names = tuple(f"d{number}" for number in range(count))
    devices = tuple(DeviceSpec(device_id=name, name=f"{mib}", memory_mib=mib) for name in names)
    pool = PoolSpec(name="default", devices=names, idle_auto=False)
    return Host(devices=devices, pools=(replace(pool, **policy),), swap=SWAP)  # type: ignore[arg-type]


def session(name: str, open_ms: int, mib: int = 6000, *, gpus: int = 1, close_ms: int = 60 * MINUTE_MS) -> Session:
    """A session that runs one cell of ten seconds as soon as it is open."""
    cell = Cell(open_ms, 10_000, gpus, mib, 10)
    return Session(name, name, open_ms, close_ms, gpus, 0, (cell,))


class Places:
    """Takes down where sessions are placed."""

    def __init__(self) -> None:
        self.placed: dict[str, int] = {}

    def event(self, host: int, event: object, _effects: Sequence[object]) -> None:
        """Take down where a session's lease is requested."""
        if isinstance(event, LeaseRequested):
            assert event.spec.lease_id not in self.placed
            self.placed[event.spec.lease_id] = host


def places(hosts: Sequence[Host], trace: Sequence[Session], door: DoorRule = DoorRule.FIT) -> dict[str, int]:
    seen = Places()
    simulate(hosts, trace, door=Door(hosts, trace, door), record=cast("EventLog", seen))
    return seen.placed


def test_by_chance_each_session_draws_by_itself_and_large_hosts_have_more() -> None:
    trace = synthetic_sessions(300, 1, 1, BUSY)
    hosts = [host(1, 81_920), host(3, 81_920)]

    def chosen(sessions: Sequence[Session], seed: int) -> list[int]:
        door = Door(hosts, trace, DoorRule.RANDOM, seed)
        return [host for host, _ in filter(None, map(door.choose, sessions))]

    first = chosen(trace, 7)
    assert 0.7 < sum(first) / len(trace) < 0.8
    assert chosen(trace[5:], 7) == first[5:]
    assert chosen(trace, 8) != first


# -- one host, as before ------------------------------------------------------------------------------------------------


def test_one_of_several_hosts_is_one_host() -> None:
    trace = synthetic_sessions(4, 1, 6, BUSY)
    one = host(1, 81_920)
    alone = simulate(one, trace)
    assert alone.suspends > 0
    for rule in DoorRule:
        assert simulate([one], trace, door=Door([one], trace, rule)) == alone
    for name in BASELINES:
        assert run_baseline(name, [one], trace) == run_baseline(name, one, trace)


# -- the door -------------------------------------------------------------------------------------------------------------


def test_a_session_goes_where_it_fits_best_and_by_the_other_rule_where_the_most_is_free() -> None:
    # three quarters of a device each: the third fits next to none, a small one fits next to the first
    trace = [session("a", 0), session("b", 1), session("small", 2, mib=900)]
    assert places([host(), host(), host(2)], trace) == {"a": 0, "b": 1, "small": 0}
    assert places([host(), host(), host(2)], trace, DoorRule.MOST_FREE) == {"a": 2, "b": 2, "small": 0}


def test_what_a_closed_session_had_is_free_again_at_the_door() -> None:
    trace = [session("a", 0, close_ms=MINUTE_MS), session("b", 1), session("c", 2 * MINUTE_MS)]
    assert places([host(), host()], trace) == {"a": 0, "b": 1, "c": 0}


def test_a_session_that_is_turned_away_counts_nowhere() -> None:
    limited = host(user_limits=Limits(leases=1))
    trace = [replace(session(name, at), user="u") for at, name in enumerate("abcd")]
    assert places([limited, limited], trace, DoorRule.MOST_FREE) == {"a": 0, "b": 1, "c": 0, "d": 0}
    result = simulate([limited, limited], trace, door=Door([limited, limited], trace, DoorRule.MOST_FREE))
    assert (result.lost, len(result.waits.ordered)) == (2, 2)  # the limit is of each host


def test_where_none_has_room_like_goes_to_like() -> None:
    trace = [
        session("pair", 0, gpus=2),
        session("one", 1),
        session("another", 2),
        session("second-pair", 3, gpus=2),
        session("third", 4),
    ]
    # the second pair takes turns with the first, and the third of one GPU with the others of that kind
    assert places([host(2), host(2)], trace) == {"pair": 0, "one": 1, "another": 1, "second-pair": 0, "third": 1}


def test_a_session_of_several_gpus_goes_to_a_host_with_that_many() -> None:
    trace = [session("a", 0, gpus=2), session("b", 1, gpus=2)]
    for rule in DoorRule:
        assert places([host(1, 80_000), host(2), host(1, 80_000)], trace, rule) == {"a": 1, "b": 1}
    large = session("large", 0, mib=70_000)
    assert places([host(2), host(1, 80_000)], [large]) == {"large": 1}
    with pytest.raises(SimulationError, match="'a' uses 2 GPUs at once, but a lease of pool 'default' may have 1"):
        simulate([host(1), host(1)], trace)
    kinds = (*host(1).devices, replace(host(1, 9000).devices[0], device_id="other"))
    mixed = replace(host(2), devices=kinds, pools=(replace(host(2).pools[0], devices=("d0", "other")),))
    assert places([mixed, host(2)], trace) == {"a": 1, "b": 1}  # the devices of a lease are of one kind


# -- hosts next to each other ------------------------------------------------------------------------------------------------


def test_each_host_has_its_own_swap_channel_and_memory() -> None:
    # on each of two hosts a session is saved for another at the same time; on one host with two devices they take turns
    trace = [session(name, at) for at, name in ((0, "a"), (1, "b"), (MINUTE_MS, "c"), (MINUTE_MS, "d"))]
    save_ms = SWAP.save_ms(6000)
    apart, together = simulate([host(), host()], trace), simulate(host(2), trace)
    assert apart.waits.ordered == (0, 0, save_ms, save_ms)
    assert together.waits.ordered == (0, 0, save_ms, 2 * save_ms)
    assert (apart.suspends, together.suspends) == (2, 2)
    assert (apart.host_peak_mib, together.host_peak_mib) == (6_000, 12_000)  # the most on one host
    assert (apart.moved_mib, together.moved_mib) == (12_000, 12_000)
    assert (apart.hosts, apart.devices, apart.peak_devices_held) == (2, 2, 2)


def test_peaks_and_hours_are_of_all_hosts_at_the_same_time() -> None:
    trace = [
        session("a", 0, close_ms=10 * MINUTE_MS),
        session("b", 1, close_ms=10 * MINUTE_MS),
        session("c", 20 * MINUTE_MS, close_ms=30 * MINUTE_MS),
    ]
    result = simulate([host(), host()], trace)
    assert result.peak_devices_held == 2
    assert result.held == (20 * MINUTE_MS - 1 + 10 * MINUTE_MS) * 1000
    assert result.owned == 2 * 30 * MINUTE_MS * 1000
    assert max(result.timeline.devices_held) == 2


def test_a_run_on_several_hosts_is_given_up_like_any_other() -> None:
    trace = synthetic_sessions(60, 1, 7, BUSY)
    goal = Goal(p95_wait_ms=3_000)
    given_up = simulate([host(1, 81_920)] * 2, trace, goal=goal)
    assert "more than 5 % of the GPU cells' waits" in given_up.missed(goal)
    assert given_up.lost > 0
    assert len(given_up.waits.ordered) < given_up.gpu_cells


def test_the_fewest_hosts_are_found() -> None:
    tried: list[int] = []
    goal = Goal(p95_wait_ms=3_000)

    def run(count: int) -> Result:
        tried.append(count)
        return simulate([host(2)] * count, [session(name, 0) for name in "abcde"], goal=goal)

    found = fewest(run, goal, 16, counted="hosts")
    assert (found.hosts, found.devices) == (3, 6)
    assert tried == [1, 2, 4, 3]
    with pytest.raises(SimulationError, match="with 2 hosts more than 5 % of the GPU cells' waits are longer than 3 s"):
        fewest(run, goal, 2, counted="hosts")


# -- baselines ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static-fraction", "mps-pack", "reservation", "cull"])
def test_a_baseline_gives_a_session_devices_of_one_host(name: str) -> None:
    # `pair` finds a free device on each host, and waits until both of one are free
    trace = [
        session("a", 0, close_ms=30 * MINUTE_MS),
        session("b", 1, close_ms=40 * MINUTE_MS),
        session("c", 2, close_ms=20 * MINUTE_MS),
        session("pair", 10 * MINUTE_MS, gpus=2),
    ]
    apart = run_baseline(name, [host(2), host(2)], trace)
    # best fit: `a` and `b` fill the first host, `c` is on the second and closes at 20 minutes
    assert apart.doors.ordered == (0, 0, 0, 10 * MINUTE_MS)
    together = run_baseline(name, host(4), [one for one in trace if one.session_id != "c"])
    assert together.doors.ordered == (0, 0, 0)


def test_a_fraction_goes_to_the_device_with_the_least_room_of_all_hosts() -> None:
    trace = [session(name, at, mib=mib) for at, (name, mib) in enumerate({"a": 6000, "b": 3000, "c": 900}.items())]
    # `a` to the small device; `b` to the large one; `c` next to `a`: three quarters of the large one remain, and not more
    for mib, waits in ((11_000, 0), (15_000, 60 * MINUTE_MS - 3)):
        result = run_baseline("static-fraction", [host(1, 16_000), host()], [*trace, session("wide", 3, mib=mib)])
        assert result.doors.ordered == (0, 0, 0, waits)


def test_no_host_can_reserve_more_than_it_has() -> None:
    with pytest.raises(SimulationError, match="'a' reserves 3 GPUs, but a host has 2"):
        run_baseline("reservation", [host(2), host(1)], [session("a", 0, gpus=3)])
