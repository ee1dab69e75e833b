"""The simulator against traces small enough to work out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.core.effects import Effect, Granted
from fractional_gpu.core.events import Event, HostMemoryNeeded, LeaseMeasured, ResumeFinished, SuspendFinished
from fractional_gpu.core.model import DeviceSpec, Limits, PoolSpec, ReserveBy
from fractional_gpu.simulator import SimulationError, simulation
from fractional_gpu.simulator.felt import Goal
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.machine import Host, SwapSpeed, fraction_for
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.search import devices_for_cells, devices_for_sessions, fewest, gpus_reserved_at_once
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session, read_sessions, write_sessions
from tests.simulator.loads import BUSY

SWAP = SwapSpeed(fixed_ms=100, save_mib_per_s=1000, restore_mib_per_s=2000)


def host(count: int = 1, mib: int = 8000, **policy: object) -> Host:
    """Devices of that size in one pool whose leases are suspended only when somebody needs the room."""
    devices = tuple(DeviceSpec(device_id=f"d{number}", name="d", memory_mib=mib) for number in range(count))
    names = tuple(device.device_id for device in devices)
    pool = PoolSpec(
        name="default", devices=names, idle_after_ms=None, preempt_equals=False, min_residency_swaps_milli=4_000
    )
    return Host(devices=devices, pools=(replace(pool, **policy),), swap=SWAP)  # type: ignore[arg-type]


def session(name: str, *cells: Cell, open_ms: int = 0, close_ms: int = 1_000_000) -> Session:
    return Session(name, name, open_ms, close_ms, 1, 0, cells)


def gpu_cell(start_ms: int, duration_ms: int, mib: int = 6000, util: int = 10) -> Cell:
    return Cell(start_ms, duration_ms, 1, mib, util)


def test_a_session_alone_never_waits() -> None:
    trace = [session("a", gpu_cell(1_000, 10_000), gpu_cell(60_000, 10_000))]
    result = simulate(host(), trace)
    assert result.waits.ordered == (0, 0)
    assert (result.suspends, result.resumes, result.out_of_memory, result.lost) == (0, 0, 0, 0)
    assert result.busy == 20_000 * 1000
    assert result.reserved == 1_000_000 * 1000


def test_a_wait_is_the_neighbours_suspend_and_the_own_restore() -> None:
    # `a` ran, idles and is saved for `b`; then `a` comes back, for which `b` is saved.
    trace = [
        session("a", gpu_cell(0, 10_000), gpu_cell(200_000, 1_000)),
        session("b", gpu_cell(100_000, 10_000)),
    ]
    result = simulate(host(), trace)
    save_ms, restore_ms = SWAP.save_ms(6000), SWAP.restore_ms(6000)
    assert result.waits.ordered == (0, save_ms, save_ms + restore_ms)
    assert (result.suspends, result.resumes) == (2, 1)
    assert result.moved_mib == 3 * 6000
    assert result.host_peak_mib == 12_000  # `b` is saved before `a` leaves the host
    assert result.out_of_memory == 0


def test_a_wait_delays_the_cells_behind_it_and_not_the_thinking() -> None:
    # `b` waits for the whole of `a`'s cell; its second cell comes five seconds after its first, as in the trace.
    began: list[int] = []
    trace = [
        session("a", gpu_cell(0, 50_000), close_ms=50_000),
        session("b", gpu_cell(10_000, 1_000), gpu_cell(16_000, 1_000)),
    ]
    result = simulate(
        host(),
        trace,
        watch=lambda event, _effects: (
            began.append(event.at_ms)
            if type(event).__name__ == "BusyChanged" and getattr(event, "lease_id", "") == "b"
            else None
        ),
    )
    assert result.waits.ordered == (0, 0, 40_000)
    assert began == [10_000, 51_000, 56_000, 57_000]


def test_a_cell_without_a_gpu_waits_only_if_every_cell_asks() -> None:
    trace = [
        session("a", gpu_cell(0, 50_000), close_ms=50_000),
        session("b", Cell(10_000, 1_000, 0, 0, 0), close_ms=20_000),
    ]
    asked: list[str] = []

    def watch(event: object, _effects: object) -> None:
        if type(event).__name__ == "Wanted":
            asked.append(getattr(event, "lease_id", ""))

    result = simulate(host(), trace, watch=watch)
    assert asked == ["a"]
    assert (result.cells, result.gpu_cells, len(result.waits.ordered)) == (2, 1, 1)
    asked.clear()
    simulate(replace(host(), every_cell_asks=True), trace, watch=watch)
    assert asked == ["a", "b"]


def test_neighbours_slow_each_other_down_only_past_a_whole_device() -> None:
    light = [session(name, gpu_cell(0, 10_000, mib=900, util=50), close_ms=10_000) for name in "ab"]
    heavy = [session(name, gpu_cell(0, 10_000, mib=900, util=100), close_ms=10_000) for name in "ab"]
    assert simulate(host(), light).busy == 20_000 * 1000
    assert simulate(host(), heavy).busy == 40_000 * 1000
    assert simulate(replace(host(), slowdown=False), heavy).busy == 20_000 * 1000


def test_lateness_is_the_wait_and_what_neighbours_add() -> None:
    # alone 10 s each; together U = 2 for as long as both run, so each takes twice as long
    heavy = [session(name, gpu_cell(0, 10_000, mib=900, util=100), close_ms=10_000) for name in "ab"]
    both = simulate(host(), heavy)
    assert both.lateness.cells.ordered == (10_000, 10_000)
    assert both.waits.ordered == (0, 0)
    # `b` waits for 40 s and runs alone then; `a` is not late at all
    behind = [
        session("a", gpu_cell(0, 50_000), close_ms=50_000),
        session("b", gpu_cell(10_000, 1_000), gpu_cell(16_000, 1_000)),
    ]
    result = simulate(host(), behind)
    assert result.lateness.cells.ordered == (0, 0, 40_000)
    assert result.lateness.of_users() == {"median": 0.0, "p95": 40.0, "worst": 40.0}
    assert result.lateness.jain() == 0.5  # one of two users bears all of it
    # a cell of 1 s counts as one of 10 s in its stretch: (1 s + 40 s) / 10 s
    assert result.lateness.stretch_of_users() == {"median": 1.0, "p95": 4.1, "worst": 4.1}
    assert both.lateness.stretch_of_users() == {"median": 2.0, "p95": 2.0, "worst": 2.0}
    assert result.waits.nonzero().ordered == (40_000,)
    assert result.waits.nonzero_percent() == pytest.approx(33.333)
    assert result.doors.ordered == (0, 0)
    assert result.owned == 1_040_000 * 1000  # `b` closes as much later as its first cell began later


def test_a_preempted_cell_is_late_by_the_time_it_was_away() -> None:
    # `b` is urgent: `a` is saved for it at 10 s, and goes on where it was when `b` has been saved
    a, b = session("a", gpu_cell(0, 50_000)), session("b", gpu_cell(10_000, 5_000))
    result = simulate(host(min_residency_ms=0, min_residency_swaps_milli=0), [a, replace(b, priority=1)])
    assert result.preemptions == 1
    save_ms, restore_ms = SWAP.save_ms(6000), SWAP.restore_ms(6000)
    assert result.waits.ordered == (0, save_ms)
    assert result.lateness.cells.ordered == (save_ms, save_ms + 5_000 + save_ms + restore_ms)


def test_what_a_cell_uses_of_its_device_is_measured_while_it_runs_and_when_it_ends() -> None:
    # `a` and `b` want 0.5 and 0.9 of the device while both run: k = 1.539, so `a` takes 1.2695 times as long and `b` 1.4851 times
    trace = [
        session("a", gpu_cell(0, 10_000, mib=900, util=50)),
        session("b", gpu_cell(0, 20_000, mib=900, util=90)),
        session("short", gpu_cell(100_000, 1_500, mib=900, util=90)),
    ]
    seen: dict[str, list[tuple[int, int]]] = {}

    def watch(event: Event, _effects: object) -> None:
        if isinstance(event, LeaseMeasured) and event.util_milli is not None:
            seen.setdefault(event.lease_id, []).append((event.at_ms, event.util_milli))

    simulate(host(), trace, watch=watch)
    # alone again after 12.695 s, `b` has 20 - 12.695 / 1.4851 = 11.452 s left: it ends at 24.147 s, having used 18 s of the device
    assert seen == {
        "a": [(2_000, 393), (12_695, 393)],
        "b": [(2_000, 606), (24_147, 745)],
    }


def test_no_user_is_late_where_none_waits() -> None:
    result = simulate(host(2), [session(name, gpu_cell(0, 10_000)) for name in "ab"])
    assert result.lateness.cells.ordered == (0, 0)
    assert result.lateness.jain() == 1.0
    assert result.lateness.stretch_of_users() == {"median": 1.0, "p95": 1.0, "worst": 1.0}
    assert simulate(host(), []).lateness.stretch_of_users() == {"median": 0.0, "p95": 0.0, "worst": 0.0}


def test_a_swap_that_fails_takes_the_fixed_time_changes_nothing_and_is_tried_again() -> None:
    trace = [
        session("a", gpu_cell(0, 10_000), gpu_cell(200_000, 1_000)),
        session("b", gpu_cell(100_000, 10_000)),
    ]
    ended: list[tuple[int, str]] = []

    def watch(event: Event, _effects: object) -> None:
        if isinstance(event, SuspendFinished | ResumeFinished):
            ended.append((event.at_ms, str(event.outcome)))

    sound = simulate(host(), trace)
    swaps = [replace(host(), failed_swaps_percent=50, seed=seed) for seed in range(1, 30)]
    results = [simulate(one, trace, watch=watch) for one in swaps]
    assert all((one.lost, one.out_of_memory, len(one.waits.ordered)) == (0, 0, 3) for one in results)
    assert {outcome for _, outcome in ended} == {"saved", "restored", "aborted", "not-started"}
    for result in results:
        assert result.moved_mib == 6_000 * (result.suspends + result.resumes - result.failed_swaps)
        assert (result == sound) is (result.failed_swaps == 0)
    assert sum(sum(one.waits.ordered) for one in results) > len(results) * sum(sound.waits.ordered)


def test_a_cell_beyond_its_cap_fails_at_once() -> None:
    # it asks for an eighth of 8,000 MiB, and its second cell needs more
    small = replace(session("a", gpu_cell(0, 10_000, mib=900), gpu_cell(60_000, 10_000, mib=1_100)), asked_mib=900)
    result = simulate(host(), [small])
    assert (result.out_of_memory, result.lost) == (1, 0)
    assert result.waits.ordered == (0, 0)
    assert result.owned == (1_000_000 - 10_000) * 1000  # the cell takes no time


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


def test_a_run_that_cannot_reach_its_goal_is_given_up_at_the_first_cell_too_many() -> None:
    # beside `b`, 3 of the 40 cells of `a` are some 100 ms late, and the 3 of `b` up to 1 s: of 2 users none may be late
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


@pytest.mark.parametrize(("devices", "seed"), [(3, 1), (2, 2), (1, 3)])
def test_waits_are_foreseen_within_their_bounds(devices: int, seed: int) -> None:
    result = simulate(host(devices, 81_920, may_move=True), synthetic_sessions(18 * devices, 1, seed, BUSY))
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


def test_several_whole_gpus_are_all_held_or_none() -> None:
    pair = Session("pair", "u", 0, 300_000, 2, 4000, (Cell(20_000, 10_000, 2, 4000, 50),))
    single = session("single", gpu_cell(0, 10_000), gpu_cell(60_000, 10_000), close_ms=300_000)
    held: list[tuple[str, ...]] = []

    def watch(_event: object, effects: Sequence[Effect]) -> None:
        held.extend(
            effect.device_ids for effect in effects if isinstance(effect, Granted) and effect.lease_id == "pair"
        )

    result = simulate(host(2), [single, pair], watch=watch)
    assert held == [("d0", "d1")]
    assert (result.out_of_memory, result.lost, result.suspends) == (0, 0, 2)
    save_ms = SWAP.save_ms(6000)
    assert result.waits.ordered == (0, save_ms, SWAP.save_ms(8000) + SWAP.restore_ms(6000))
    assert result.busy == (10_000 + 20_000 + 10_000) * 1000


def test_a_cell_that_outgrows_its_reservation_waits_for_more_or_fails() -> None:
    # caps of 8,000 and 4,000 MiB, of which a quarter is guaranteed: `b` needs more than `a` leaves, so `a` is saved first
    trace = [session("a", gpu_cell(0, 10_000, mib=3_900)), session("b", gpu_cell(60_000, 10_000, mib=6_000))]
    growing = replace(host(reserve_by=ReserveBy.USE, headroom_mib=100, min_residency_ms=0), request_percent=25)
    patient = simulate(growing, trace)
    assert (patient.out_of_memory, patient.lost, patient.suspends, patient.preemptions) == (0, 0, 1, 0)
    assert patient.waits.ordered == (0, SWAP.save_ms(3_900))
    assert patient.busy == 20_000 * 1000
    hasty = simulate(replace(growing, patience_ms=0), trace)
    assert (hasty.out_of_memory, hasty.lost) == (1, 0)
    assert hasty.busy == 10_000 * 1000
    whole = simulate(replace(growing, request_percent=100), trace)
    assert (whole.out_of_memory, whole.waits.ordered) == (0, (0, SWAP.save_ms(3_900)))


def test_a_resident_kernel_grows_as_far_as_there_is_room() -> None:
    # a quarter of its cap of 4,000 MiB is guaranteed; alone on the device, it gets the rest in steps of the headroom
    trace = [session("a", gpu_cell(0, 10_000, mib=900), gpu_cell(60_000, 10_000, mib=3_900))]
    machine = replace(host(reserve_by=ReserveBy.USE, headroom_mib=100), request_percent=25)
    result = simulate(machine, trace)
    assert (result.out_of_memory, result.waits.ordered) == (0, (0, 0))


def test_a_cell_that_is_preempted_while_it_is_short_of_memory_has_its_whole_patience_again() -> None:
    # `low` is short beside `long` from 10 s on, gives way to `high` at 40 s, and comes back at 51 s to be short until 100 s
    trace = [
        session("long", gpu_cell(0, 100_000, mib=3_900), close_ms=100_000),
        session("mid", gpu_cell(0, 45_000, mib=900), close_ms=45_000),
        session("low", gpu_cell(10_000, 10_000, mib=5_900)),
        session("high", gpu_cell(40_000, 5_000, mib=900), close_ms=45_000),
    ]
    trace = [replace(one, priority=int(one.session_id != "low")) for one in trace]
    machine = host(
        reserve_by=ReserveBy.USE,
        headroom_mib=100,
        min_residency_ms=0,
        min_residency_swaps_milli=0,
        preempt_priorities=True,
    )
    result = simulate(replace(machine, request_percent=25), trace)
    assert (result.preemptions, result.out_of_memory, result.lost) == (1, 0, 0)
    assert result.waits.ordered[-1] == 90_000


def test_reserving_by_use_lets_more_kernels_be_resident() -> None:
    trace = synthetic_sessions(20, 1, 4, BUSY)
    by_cap, by_use = (
        simulate(replace(host(1, 81_920, may_move=True, reserve_by=by, headroom_mib=1024), request_percent=25), trace)
        for by in ReserveBy
    )
    assert by_use.suspends < by_cap.suspends / 2
    assert by_use.waits.percentile_ms(95) < by_cap.waits.percentile_ms(95)
    assert by_use.lost == by_cap.lost == 0


class _Understated:
    """Measurements that say a fraction of the use, so that suspends find more to save than is reserved."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def __call__(self, **fields: Any) -> LeaseMeasured:  # noqa: ANN401 - the fields of the event
        return LeaseMeasured(**{**fields, "used_mib": max(1, fields["used_mib"] // self._parts)})


@pytest.mark.parametrize(("budget_mib", "refused"), [(24_000, False), (15_000, True)])
def test_a_suspend_that_counts_more_than_is_reserved_gets_the_difference_or_leaves_the_kernel_alone(
    monkeypatch: pytest.MonkeyPatch, budget_mib: int, refused: bool
) -> None:
    monkeypatch.setattr(simulation, "LeaseMeasured", _Understated(100))
    trace = [
        session(name, *(gpu_cell(start + 100_000 * turn, 5_000) for turn in range(4)))
        for start, name in ((0, "a"), (20_000, "b"), (40_000, "c"))
    ]
    seen: list[Event] = []
    one = replace(host(), host_memory_mib=budget_mib)
    result = simulate(one, trace, watch=lambda event, _effects: seen.append(event))
    asked = [event for event in seen if isinstance(event, HostMemoryNeeded)]
    aborted = [event for event in seen if isinstance(event, SuspendFinished) and event.outcome == "aborted"]
    assert asked
    assert {event.need_mib for event in asked} | {event.need_mib for event in aborted} == {6_000}
    assert bool(aborted) == refused
    assert result.host_peak_mib <= budget_mib
    assert result.lost == 0
    if not refused:
        assert len(result.waits.ordered) == 12
