"""Whole runs: what is refused, what is foreseen, and when a run is given up."""

from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.core.model import Limits
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import fraction_for
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session, read_sessions, write_sessions
from tests.simulator.by_hand import gpu_cell, host, session
from tests.simulator.loads import BUSY


def test_the_smallest_fraction_that_covers_the_peak_is_taken() -> None:
    pool = host().pools[0]
    assert fraction_for(session("a", gpu_cell(0, 1, mib=1000)), pool, 8000) == (125, 1000)
    assert fraction_for(session("a", gpu_cell(0, 1, mib=1001)), pool, 8000) == (250, 2000)
    assert fraction_for(session("a"), pool, 8000) == (125, 1000)
    asks = replace(session("a", gpu_cell(0, 1, mib=1000)), asked_mib=3000)
    assert fraction_for(asks, pool, 8000) == (500, 4000)
    assert fraction_for(replace(asks, asked_mib=9000), pool, 8000) == (1000, 8000)
    any_size = replace(pool, fractions_milli=())
    assert fraction_for(session("a", gpu_cell(0, 1, mib=801)), any_size, 8000) == (101, 808)


def test_what_cannot_be_served_is_refused_in_one_sentence() -> None:
    with pytest.raises(SimulationError, match=r"'a' holds up to 8\.8 GiB.*larger devices with --devices"):
        simulate(host(), [session("a", gpu_cell(0, 1, mib=9000))])
    with pytest.raises(SimulationError, match=r"'a' uses 2 GPUs at once, but a lease .* may have 1"):
        simulate(host(), [session("a", Cell(0, 1, 2, 10, 10))])
    with pytest.raises(SimulationError, match="'b' was refused"):
        simulate(host(oversubscription_milli=1000), [session(name, gpu_cell(0, 1)) for name in "ab"])


def test_who_has_too_many_already_is_turned_away() -> None:
    trace = [replace(session(name, gpu_cell(0, 1_000, mib=900)), user="u") for name in "abc"]
    result = simulate(host(user_limits=Limits(leases=2)), trace)
    assert (result.lost, len(result.waits.ordered)) == (1, 2)


def test_a_crowd_loses_nothing_and_never_runs_out_of_memory() -> None:
    trace = synthetic_sessions(24, 1, 7, BUSY)
    result = simulate(host(2, 81_920, may_move=True), trace)
    assert (result.lost, result.out_of_memory) == (0, 0)
    assert result.suspends >= result.resumes > 0
    assert len(result.waits.ordered) == result.gpu_cells
    assert result.peak_devices_held == 2
    assert result.busy >= sum(cell.duration_ms * 1000 for one in trace for cell in one.cells if cell.gpus)


def test_one_trace_gives_one_result() -> None:
    trace = synthetic_sessions(5, 1, 3, BUSY)
    assert simulate(host(1, 81_920), trace) == simulate(host(1, 81_920), trace)


def test_a_run_that_cannot_reach_its_goal_is_given_up_at_the_first_cell_too_many() -> None:
    # next to `b`, 3 of the 40 cells of `a` are some 100 ms late, and the 3 of `b` up to 1 s: of 2 users none may be late
    cells = [gpu_cell(at * 20_000, 10_000, mib=900, util=10) for at in range(40)]
    rivals = [gpu_cell(at * 20_000, 10_000, mib=900, util=100) for at in range(3)]
    trace = [session("a", *cells), session("b", *rivals)]
    whole = simulate(host(), trace)
    late_ms = whole.lateness.percentile_of_users_ms(95)
    assert late_ms > whole.lateness.percentile_of_users_ms(50) > 0
    kept, missed = Goal(p95_late_ms=late_ms), Goal(p95_late_ms=late_ms - 1)
    assert simulate(host(), trace, goal=kept).missed(kept) == ""
    given_up = simulate(host(), trace, goal=missed)
    assert "more than 5 % of the users have a lateness" in given_up.missed(missed)
    assert "more than 5 % of the users have a lateness" in whole.missed(missed)
    assert len(given_up.waits.ordered) < len(whole.waits.ordered) == 43


def test_a_run_is_given_up_while_the_cells_too_many_still_wait() -> None:
    # `b` and `c` wait for the whole of the first cell, so a 95th percentile of 3 s is lost 3 s after `b` asked
    trace = [session("a", gpu_cell(0, 500_000)), *(session(name, gpu_cell(10_000, 1_000)) for name in "bc")]
    seen: list[int] = []

    def run(goal: Goal) -> Result:
        seen.clear()
        return simulate(host(), trace, goal=goal, watch=lambda event, _effects: seen.append(event.at_ms))

    missed = run(Goal(p95_wait_ms=3_000))
    assert "more than 5 % of the GPU cells' waits are longer than 3 s" in missed.hopeless
    assert max(seen) < 13_001
    kept = run(Goal(p95_wait_ms=600_000))
    assert (kept.hopeless, len(kept.waits.ordered)) == ("", 3)


@pytest.fixture(scope="module")
def crowded() -> tuple[list[Session], Result]:
    trace = synthetic_sessions(8, 1, 5, BUSY)
    return trace, simulate(host(1, 81_920, may_move=True), trace)


@pytest.mark.parametrize("limit_ms", [1, 2_000, 10_000, 100_000])
@pytest.mark.parametrize("kind", ["p95_wait_ms", "p99_wait_ms", "p95_late_ms"])
def test_giving_up_early_never_changes_the_answer(
    limit_ms: int, kind: str, crowded: tuple[list[Session], Result]
) -> None:
    trace, whole = crowded
    goal = Goal(**{kind: limit_ms})
    given_up = simulate(host(1, 81_920, may_move=True), trace, goal=goal)
    assert bool(given_up.missed(goal)) is bool(whole.missed(goal))
    assert bool(given_up.hopeless) is bool(whole.missed(goal))


@pytest.mark.parametrize(("devices", "seed"), [(2, 2), (1, 3)])
def test_waits_are_foreseen_within_their_bounds(devices: int, seed: int) -> None:
    result = simulate(host(devices, 81_920, may_move=True), synthetic_sessions(12 * devices, 1, seed, BUSY))
    waits, swaps = result.forecast_error["wait"], result.forecast_error["suspend"]
    assert waits["count"] > 100
    assert waits["median_relative"] < 0.5
    assert 0.7 <= waits["within_bounds"] <= 1
    assert swaps["median_relative"] < 0.1
    assert 0.65 <= result.forecast_error["cell"]["within_bounds"] <= 0.95


def test_a_priority_survives_the_files_and_matters(tmp_path: Path) -> None:
    files = (tmp_path / "sessions.csv", tmp_path / "cells.csv")
    write_sessions(synthetic_sessions(10, 1, 1, replace(BUSY, urgent_percent=30)), *files)
    trace = read_sessions(*files)
    assert trace == synthetic_sessions(10, 1, 1, replace(BUSY, urgent_percent=30))
    assert "priority" in files[0].read_text().splitlines()[0]
    assert simulate(host(1, 81_920), trace) != simulate(host(1, 81_920), synthetic_sessions(10, 1, 1, BUSY))
