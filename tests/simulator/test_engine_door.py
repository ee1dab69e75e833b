"""Hosts behind an engine that counts: where jobs start, how long they queue, that nothing is lost, and what a node's count covers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.engine_door import AGENT_MS, EngineDoor
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session
from tests.simulator.loads import ONE_GPU

HOUR = 3_600_000


def host(devices: int = 1, *, oversubscription_milli: int | None = None) -> Host:
    specs = tuple(DeviceSpec(device_id=f"d{number}", name="gpu", memory_mib=8000) for number in range(devices))
    pool = PoolSpec(
        name="default",
        devices=tuple(spec.device_id for spec in specs),
        fractions_milli=(250, 500, 1000),
        oversubscription_milli=oversubscription_milli,
    )
    return Host(devices=specs, pools=(pool,))


def session(name: str, open_ms: int, mib: int, *, hours: int = 1, gpus: int = 1) -> Session:
    cells = tuple(Cell(open_ms + at_ms, 600_000, gpus, mib, 10) for at_ms in (60_000, 1_200_000))
    return Session(name, name, open_ms, open_ms + hours * HOUR, gpus, mib, cells)


def strict(hosts: Sequence[Host], trace: Sequence[Session]) -> EngineDoor:
    """Return a door whose counts cover only what never waits."""
    return EngineDoor(hosts, trace, target_ms=0, bound_milli=0)


def run(hosts: Sequence[Host], trace: Sequence[Session], door: EngineDoor | None = None) -> Result:
    result = simulate(hosts, trace, door=door if door is not None else strict(hosts, trace))
    assert (result.lost, len(result.doors.ordered)) == (0, len(trace))
    return result


def test_a_job_starts_on_the_node_with_the_most_room_and_waits_if_no_count_covers_it() -> None:
    hosts, trace = (host(), host()), [session(name, at, 4000) for at, name in enumerate("abcde")]
    door = strict(hosts, trace)
    chosen = [door.choose(one) for one in trace]
    assert [one[0] if one is not None else None for one in chosen] == [0, 1, 0, 1, None]
    waited_ms = run(hosts, trace).doors.ordered
    assert waited_ms[:4] == (0, 0, 0, 0)
    assert waited_ms[4] == HOUR - 4 + AGENT_MS, "until the first has ended and its node's agent has updated the count"


def test_a_later_job_that_fits_passes_one_that_does_not() -> None:
    trace = [session("half", 0, 4000, hours=2), session("whole", 1, 8000), session("quarter", 2, 2000)]
    assert run((host(),), trace).doors.ordered == (0, 0, 2 * HOUR - 1 + AGENT_MS)


def test_a_job_that_starts_later_runs_as_in_the_trace_and_its_first_cell_is_late() -> None:
    trace = [session("first", 0, 8000), session("second", 0, 8000)]
    result = run((host(),), trace)
    assert result.closed_ms == 2 * HOUR + AGENT_MS
    assert result.waits.ordered == (0, 0, 0, 0)
    assert result.lateness.cells.ordered == (0, 0, 0, HOUR + AGENT_MS)


def test_a_count_covers_more_than_fits_at_once_within_the_bound_and_the_oversubscription() -> None:
    def seats(one: Host, bound_milli: int = 50) -> int:
        trace = [session(f"s{number}", 0, 4000) for number in range(100)]
        door = EngineDoor((one,), trace, target_ms=30_000, bound_milli=bound_milli)
        return sum(door.choose(job) is not None for job in trace)

    assert seats(host(4), 0) == 8, "two halves on each device never wait"
    assert seats(host(4)) > seats(host(4), 1) > 8
    assert seats(host(4, oversubscription_milli=1500)) == 12


def test_an_ended_job_leaves_its_whole_room() -> None:
    hosts, trace = (host(2),), [session("pair", 0, 8000, gpus=2), session("single", 0, 8000)]
    door = strict(hosts, trace)
    for _ in range(2):
        pair = door.choose(trace[0])
        assert pair is not None
        assert door.choose(trace[1]) is None
        door.closed(*pair)
        single = door.choose(trace[1])
        assert single is not None
        door.closed(*single)


def test_a_job_that_no_node_can_serve_is_an_error_that_names_it() -> None:
    with pytest.raises(SimulationError, match="uses 2 GPUs at once"):
        strict((host(),), [session("two", 0, 4000, gpus=2)])


def test_every_session_runs_to_its_end_and_equal_runs_have_equal_results() -> None:
    trace = synthetic_sessions(20, 1, 1, ONE_GPU)
    big = replace(host(2), devices=tuple(replace(device, memory_mib=81_920) for device in host(2).devices))

    def results() -> Result:
        return run((big, big), trace, EngineDoor((big, big), trace, target_ms=30_000, bound_milli=50))

    assert results() == results()
