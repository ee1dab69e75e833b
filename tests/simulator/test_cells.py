"""Cells: their waits, their memory and their neighbours, in traces small enough to work out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Effect, Granted
from fractional_gpu.core.events import Event, LeasesMeasured
from fractional_gpu.core.model import ReserveBy
from fractional_gpu.simulator.load import synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session
from tests.simulator.by_hand import SWAP, gpu_cell, host, session
from tests.simulator.loads import BUSY


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
    # alone 10 s each; together U = 2 while both run, so each takes twice as long
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
    # `b` is urgent: `a` is saved for it at 10 s, and continues where it was when `b` has been saved
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
        for one in event.measurements if isinstance(event, LeasesMeasured) else ():
            if one.util_milli is not None:
                seen.setdefault(one.lease_id, []).append((event.at_ms, one.util_milli))

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


def test_a_cell_beyond_its_cap_fails_at_once() -> None:
    # it asks for an eighth of 8,000 MiB, and its second cell needs more
    small = replace(session("a", gpu_cell(0, 10_000, mib=900), gpu_cell(60_000, 10_000, mib=1_100)), asked_mib=900)
    result = simulate(host(), [small])
    assert (result.out_of_memory, result.lost) == (1, 0)
    assert result.waits.ordered == (0, 0)
    assert result.owned == (1_000_000 - 10_000) * 1000  # the cell takes no time


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
    # `low` is short next to `long` from 10 s on, gives way to `high` at 40 s, and comes back at 51 s to be short until 100 s
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
    trace = synthetic_sessions(12, 1, 4, BUSY)
    by_cap, by_use = (
        simulate(replace(host(1, 81_920, may_move=True, reserve_by=by, headroom_mib=1024), request_percent=25), trace)
        for by in ReserveBy
    )
    assert by_use.suspends < by_cap.suspends / 2
    assert by_use.waits.percentile_ms(95) < by_cap.waits.percentile_ms(95)
    assert by_use.lost == by_cap.lost == 0
