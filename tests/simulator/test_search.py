"""The search for the fewest devices, and where it begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal, UserExperience
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.search import (
    devices_for_cells,
    devices_for_sessions,
    fewest,
    fewest_for_each,
    gpus_reserved_at_once,
)
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


# -- for several seeds -----------------------------------------------------------------------------------------------------------


class Runs:
    """Runs whose outcomes are given: `enough[trace][count - 1]` says whether a trace meets the goal with this number of devices."""

    def __init__(self, enough: list[list[bool]]) -> None:
        self.enough, self.made = enough, list[tuple[int, int]]()

    def __call__(self, trace: int, count: int) -> Result:
        self.made.append((trace, count))
        hopeless = "" if self.enough[trace][count - 1] else "waits are too long"
        return Result(
            name="", experience=UserExperience([]), sessions=0, cells=0, gpu_cells=0, devices=count, hopeless=hopeless
        )

    def search(self, start: int = 1) -> tuple[int, list[int]]:
        found, counts = fewest_for_each(self, len(self.enough), Goal(), len(self.enough[0]), start=start)
        assert len(found) == len(self.enough)
        assert not any(one.hopeless for one in found)
        return found[0].devices, counts


OUTCOMES = st.integers(1, 24).flatmap(
    lambda most: st.lists(st.lists(st.booleans(), min_size=most, max_size=most), min_size=1, max_size=4)
)
"""More devices do not always mean shorter waits. Only the largest number is always enough."""


@given(outcomes=OUTCOMES, start=st.integers(1, 30))
def test_the_number_found_is_enough_for_each_seed_and_one_less_is_too_few_for_one(
    outcomes: list[list[bool]], start: int
) -> None:
    runs = Runs([[*one[:-1], True] for one in outcomes])
    count, counts = runs.search(start)
    for enough, own in zip(runs.enough, counts, strict=True):
        assert enough[count - 1]
        assert enough[own - 1]
        assert own == 1 or not enough[own - 2], "one device fewer misses the goal"
    assert count >= max(counts)
    assert all(not all(enough[less - 1] for enough in runs.enough) for less in range(max(counts), count))
    assert len(set(runs.made)) == len(runs.made), "no run is made twice"
    assert Runs(runs.enough).search(start) == (count, counts)


@given(fewest_of_each=st.lists(st.integers(1, 24), min_size=1, max_size=4), start=st.integers(1, 30))
def test_the_number_found_is_the_fewest_if_more_devices_never_mean_longer_waits(
    fewest_of_each: list[int], start: int
) -> None:
    runs = Runs([[count >= needed for count in range(1, 25)] for needed in fewest_of_each])
    assert runs.search(start) == (max(fewest_of_each), fewest_of_each)


def test_a_number_that_suffices_for_each_seed_alone_may_be_too_few_for_all() -> None:
    assert Runs([[False, True, False, True], [False, False, True, True]]).search() == (4, [2, 3])
    with pytest.raises(SimulationError, match="with 3 devices waits are too long; allow longer waits"):
        Runs([[False, True, False], [False, False, True]]).search()
