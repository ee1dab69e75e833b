"""Hosts behind an engine: how long jobs queue, that nothing is lost, and what each node's forecast gives away."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.hosts import Leases
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.traces import Cell, Session
from tests.benchmarks.engine_queue import AGENT_MS, EngineDoor, Node, Queue, WaitTerms, later, run_engine
from tests.simulator.loads import ONE_GPU

HOUR = 3_600_000
STRICT = WaitTerms(target_ms=0, bound_milli=0)


def host(devices: int = 1, *, may_move: bool = True) -> Host:
    specs = tuple(DeviceSpec(device_id=f"d{number}", name="gpu", memory_mib=8000) for number in range(devices))
    names = tuple(spec.device_id for spec in specs)
    pool = PoolSpec(name="default", devices=names, fractions_milli=(250, 500, 1000), may_move=may_move)
    return Host(devices=specs, pools=(pool,))


def session(name: str, open_ms: int, mib: int, *, hours: int = 1, user: str = "") -> Session:
    cells = (Cell(open_ms + 60_000, 600_000, 1, mib, 10), Cell(open_ms + 1_200_000, 600_000, 1, mib, 10))
    return Session(name, user or name, open_ms, open_ms + hours * HOUR, 1, mib, cells)


def waits(hosts: Sequence[Host], trace: Sequence[Session], terms: WaitTerms = STRICT) -> list[tuple[int, int]]:
    queue = Queue(hosts, trace, terms)
    queue.run()
    return list(zip(queue.hosts, queue.waited_ms, strict=True))


def test_a_job_begins_where_most_is_left_and_waits_where_no_node_has_enough() -> None:
    trace = [session(name, at, 4000) for at, name in enumerate("abcde")]
    found = waits((host(), host()), trace)
    assert [one[0] for one in found] == [0, 1, 0, 1, 0]
    assert [one[1] for one in found[:4]] == [0, 0, 0, 0]
    waited_ms = found[4][1] - (HOUR - 4)
    assert 0 < waited_ms <= AGENT_MS, "until the first has ended and its node's agent has written the count"


def test_a_later_job_that_fits_passes_one_that_does_not() -> None:
    trace = [session("half", 0, 4000, hours=2), session("whole", 1, 8000), session("quarter", 2, 2000)]
    found = waits((host(),), trace)
    assert found[2] == (0, 0)
    assert found[1][1] >= 2 * HOUR - 1


def test_what_a_count_gave_away_is_not_given_again_before_it_is_rewritten() -> None:
    trace = [session(f"job-{number}", 0, 4000) for number in range(3)]
    assert [one[1] == 0 for one in waits((host(),), trace)] == [True, True, False]


def test_a_job_that_begins_later_runs_as_in_the_trace() -> None:
    one = session("a", 0, 1000)
    moved = later(one, 5000)
    assert (moved.open_ms, moved.close_ms) == (5000, HOUR + 5000)
    assert [cell.start_ms for cell in moved.cells] == [cell.start_ms + 5000 for cell in one.cells]
    assert later(one, 0) is one


def test_a_job_for_which_no_count_is_ever_enough_is_an_error_that_names_it() -> None:
    busy = replace(host(), pools=(replace(host().pools[0], fractions_milli=(250, 1000)),))
    trace = [session("first", 0, 2000, hours=2), replace(session("never", 1, 2000), gpus=1)]
    assert run_engine((busy,), trace, EngineDoor.COUNT, terms=STRICT).lost == 0
    with pytest.raises(SimulationError, match="uses 2 GPUs at once"):
        Queue((host(),), [_of_two_gpus()], STRICT)


def _of_two_gpus() -> Session:
    one = session("two", 0, 4000)
    return replace(one, gpus=2, cells=tuple(replace(cell, gpus=2) for cell in one.cells))


def test_like_devices_admit_more_than_the_same_devices_one_by_one() -> None:
    terms = WaitTerms()

    def seats(node: Node) -> int:
        count = 0
        while (milli := node.admissible_milli(0)) >= 500:
            assert milli % 250 == 0
            one = session(f"s{count}", 0, 4000)
            (lease,) = [Leases((node.host,), [one]).on(0, one)]
            assert lease is not None
            node.seat(one, lease, 0)
            count += 1
        return count

    together, apart = seats(Node(host(4), terms)), seats(Node(host(4, may_move=False), terms))
    assert together > apart >= 8, "two halves on each device never wait"


@pytest.mark.parametrize("door", list(EngineDoor))
def test_every_session_runs_to_its_end_behind_each_door(door: EngineDoor) -> None:
    trace = synthetic_sessions(6, 1, 1, ONE_GPU)
    big = replace(host(2), devices=tuple(replace(device, memory_mib=81_920) for device in host(2).devices))
    result = run_engine((big, big), trace, door)
    assert (result.name, result.lost, result.sessions) == (door.value, 0, len(trace))
    assert len(result.doors.ordered) == len(trace)
    assert result.waits.ordered
