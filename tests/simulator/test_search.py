"""The search for the fewest devices, and where it begins."""

import pytest

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.search import devices_for_cells, devices_for_sessions, fewest, gpus_reserved_at_once
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session
from tests.simulator.by_hand import gpu_cell, host, session


def test_the_search_finds_the_fewest() -> None:
    tried: list[int] = []
    goal = Goal(p95_wait_ms=3_000)

    def run(count: int) -> Result:
        tried.append(count)
        trace = [session(name, gpu_cell(0, 60_000), close_ms=60_000) for name in "abcde"]
        return simulate(host(count), trace, goal=goal)

    assert fewest(run, goal, 64).devices == 5
    assert tried == [1, 2, 4, 8, 6, 5]
    tried.clear()
    assert fewest(run, goal, 64, start=20).devices == 5
    assert tried == [20, 18, 14, 6, 1, 3, 4, 5]
    tried.clear()
    assert fewest(run, goal, 64, least=5).devices == 5
    assert tried == [5]
    with pytest.raises(
        SimulationError, match="with 4 devices more than 5 % of the GPU cells' waits are longer than 3 s"
    ):
        fewest(run, goal, 4)


def test_the_search_starts_with_the_fractions_that_are_in_use_at_the_same_time() -> None:
    # three cells of 6,000 MiB at once, three quarters each of devices of 8,000 MiB; two minutes later they count no more
    trace = [session(name, gpu_cell(0, 60_000), gpu_cell(500_000, 1_000)) for name in "abc"]
    assert devices_for_cells(trace, host()) == 2
    assert devices_for_cells(trace, host(), whole=True) == 3
    assert devices_for_cells([session("idle")], host()) == 1
    late = session("late", gpu_cell(170_000, 1_000, mib=8_000))
    assert devices_for_cells([*trace, late], host()) == 3
    assert devices_for_cells([*trace, late], host(), stays_ms=0) == 2
    pair = Session("pair", "u", 0, 1_000, 2, 4000, (Cell(0, 10, 2, 4000, 50),))
    assert devices_for_cells([*trace, pair], host(2)) == 4
    # from open to close: three quarters three times, and two whole ones
    assert devices_for_sessions([*trace, pair], host(2)) == 4
    assert gpus_reserved_at_once([*trace, pair]) == 5
    assert gpus_reserved_at_once([]) == 0
