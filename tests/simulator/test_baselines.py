"""What people do today, on traces small enough to work out by hand."""

from dataclasses import replace

import pytest

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.machine import Host, SwapSpeed
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Cell, Session

HOUR_MS = 3_600_000


def host(*sizes_mib: int, slowdown: bool = True, mib_per_s: int = 1000) -> Host:
    """A machine with devices of these sizes in one pool, and swaps that take 100 ms and the bytes."""
    names = tuple(f"d{number}" for number in range(len(sizes_mib)))
    devices = tuple(
        DeviceSpec(device_id=name, name="d", memory_mib=mib) for name, mib in zip(names, sizes_mib, strict=True)
    )
    pool = PoolSpec(
        name="default",
        devices=names,
        min_residency_ms=0,
        min_residency_swaps_milli=0,
        idle_after_ms=None,
        idle_auto=False,
    )
    swap = SwapSpeed(fixed_ms=100, save_mib_per_s=mib_per_s, restore_mib_per_s=mib_per_s)
    return Host(devices=devices, pools=(pool,), swap=swap, slowdown=slowdown)


def session(name: str, *cells: Cell, close_ms: int = HOUR_MS, gpus: int = 1) -> Session:
    return Session(name, name, 0, close_ms, gpus, 0, cells)


def test_a_reservation_keeps_the_second_session_at_the_door() -> None:
    trace = [session("a", Cell(0, 60_000, 1, 100, 50)), session("b", Cell(10_000, 60_000, 1, 100, 50))]
    result = run_baseline("reservation", host(8000), trace)
    assert result.waits.ordered == (0, 0)
    assert result.doors.ordered == (0, HOUR_MS)
    assert result.lateness.cells.ordered == (0, HOUR_MS)  # the first cell of the session that waited
    assert result.owned == 2 * HOUR_MS * 1000
    assert result.held == 2 * HOUR_MS * 1000
    assert run_baseline("reservation", host(8000, 8000), trace).doors.ordered == (0, 0)


def test_culling_frees_the_gpu_and_loses_the_variables() -> None:
    trace = [
        session("a", Cell(0, 60_000, 1, 100, 50), Cell(3 * HOUR_MS, 60_000, 1, 100, 50), close_ms=4 * HOUR_MS),
        session("b", Cell(10_000, 60_000, 1, 100, 50), close_ms=HOUR_MS // 2),
    ]
    result = run_baseline("cull", host(8000), trace)
    assert result.lost == 1
    assert result.doors.ordered == (0, HOUR_MS + 60_000)
    assert result.waits.ordered == (0, 0, 0)
    assert result.lateness.cells.ordered == (0, 0, HOUR_MS + 60_000)
    assert run_baseline("reservation", host(8000), trace).lost == 0


def test_a_culled_kernel_waits_for_a_gpu_as_a_cell_and_not_at_the_door() -> None:
    # `a` is culled after an hour, `b` takes the only GPU from 2 h to 4 h, and `a` comes back at 3 h
    trace = [
        session("a", Cell(0, 60_000, 1, 100, 50), Cell(3 * HOUR_MS, 60_000, 1, 100, 50), close_ms=5 * HOUR_MS),
        Session("b", "b", 2 * HOUR_MS, 4 * HOUR_MS, 1, 0, (Cell(4 * HOUR_MS - 60_000, 60_000, 1, 100, 50),)),
    ]
    # `b` runs nothing for its first hour, so it is culled in turn at the moment at which `a` asks
    result = run_baseline("cull", host(8000), trace)
    assert result.doors.ordered == (0, 0)
    # `a` asks at 3 h and gets it at once; its cell ends at 3 h 1 min and is culled at 4 h 1 min, when `b` asked at 3 h 59 min
    assert result.waits.ordered == (0, 0, 120_000)
    assert result.waits.nonzero().ordered == (120_000,)
    assert result.waits.nonzero_percent() == pytest.approx(100 / 3, abs=0.001)


def test_time_slicing_never_waits_and_runs_out_of_memory() -> None:
    trace = [session("a", Cell(0, 60_000, 1, 6000, 50)), session("b", Cell(10_000, 60_000, 1, 6000, 50))]
    result = run_baseline("time-slice", host(8000), trace)
    assert result.waits.ordered == (0, 0)
    assert result.out_of_memory == 1
    assert run_baseline("time-slice", host(8000, 8000), trace).out_of_memory == 0


def test_time_slicing_slows_busy_neighbours_down() -> None:
    trace = [session(name, Cell(0, 60_000, 1, 100, 100)) for name in "ab"]
    assert run_baseline("time-slice", host(8000), trace).lateness.cells.ordered == (60_000, 60_000)
    assert run_baseline("time-slice", host(8000), trace).busy == 240_000 * 1000
    assert run_baseline("time-slice", host(8000, slowdown=False), trace).busy == 120_000 * 1000


def test_a_static_fraction_keeps_its_room_until_the_session_closes() -> None:
    # halves of 8,000 MiB: `a` and `b` fill the device, `c` needs a half, `d` an eighth; each session is open for its hour
    trace = [session(name, Cell(0, 60_000, 1, 3_500, 10)) for name in "abc"]
    trace.append(session("d", Cell(0, 60_000, 1, 900, 10)))
    result = run_baseline("static-fraction", host(8000), trace)
    assert result.doors.ordered == (0, 0, HOUR_MS, HOUR_MS)
    assert result.waits.ordered == (0, 0, 0, 0)
    assert result.lateness.cells.ordered == (0, 0, HOUR_MS, HOUR_MS)
    assert (result.held, result.owned) == (2 * HOUR_MS * 1000, 2 * HOUR_MS * 1000)
    assert (result.suspends, result.out_of_memory, result.lost) == (0, 0, 0)


def test_a_small_fraction_passes_a_large_one_at_the_door() -> None:
    # `a` has a half; `b` waits for a whole device, and `c` finds room for an eighth next to `a`
    cells = {"a": 4_000, "b": 8_000, "c": 900}
    trace = [
        Session(name, name, at, HOUR_MS + at, 1, 0, (Cell(at, 1_000, 1, mib, 10),))
        for at, (name, mib) in enumerate(cells.items())
    ]
    result = run_baseline("static-fraction", host(8000), trace)
    assert result.doors.ordered == (0, 0, HOUR_MS + 1)  # `b`, which came at 1 ms, begins when `c` closes


def test_the_best_fit_leaves_room_for_a_whole_device() -> None:
    # the eighth goes next to the half, not on the empty device that is larger, so the whole one fits there
    sizes = (900, 3_500, 8_000)
    trace = [Session(f"s{at}", "u", at, HOUR_MS, 1, 0, (Cell(at, 1_000, 1, mib, 10),)) for at, mib in enumerate(sizes)]
    result = run_baseline("static-fraction", host(8000, 8000), trace)
    assert result.doors.ordered == (0, 0, 0)


def test_who_asks_for_too_little_fails_and_who_asks_for_too_much_keeps_others_out() -> None:
    # eighths of 8,000 MiB: `a` needs 1,500 MiB and asks for 900, `b` needs 900 and asks for all, so `c` waits until `b` closes
    small = replace(session("a", Cell(0, 1_000, 1, 1_500, 10), close_ms=10_000), asked_mib=900)
    large = replace(session("b", Cell(20_000, 1_000, 1, 900, 10)), asked_mib=8_000, open_ms=20_000)
    third = replace(session("c", Cell(30_000, 1_000, 1, 900, 10)), open_ms=30_000)
    result = run_baseline("static-fraction", host(8000), [small, large, third])
    assert result.out_of_memory == 1
    assert result.doors.ordered == (0, 0, HOUR_MS - 30_000)
    knowing = run_baseline("static-fraction", host(8000), [replace(one, asked_mib=0) for one in (small, large, third)])
    assert (knowing.out_of_memory, knowing.doors.ordered) == (0, (0, 0, 0))
    ours = simulate(host(8000), [small, large, third])
    assert (ours.out_of_memory, ours.suspends) == (1, 1)


def test_fractions_with_several_devices_take_whole_ones() -> None:
    pair = session("pair", Cell(0, 1_000, 2, 900, 10), gpus=2)
    single = session("single", Cell(0, 1_000, 1, 900, 10))
    result = run_baseline("static-fraction", host(8000, 8000), [pair, single])
    assert result.doors.ordered == (0, HOUR_MS)
    assert result.busy == 3_000 * 1000


def test_static_fractions_slow_each_other_down_and_mps_by_what_cells_fill_only() -> None:
    trace = [session(name, Cell(0, 60_000, 1, 900, 80)) for name in "abc"]
    # the work of 2.4 devices, shared out evenly: a cell takes 2.4 times as long
    assert run_baseline("static-fraction", host(8000), trace).lateness.cells.ordered == (84_000, 84_000, 84_000)
    # half of the device each: the work of 1.2 devices
    assert run_baseline("mps-pack", host(8000), trace).lateness.cells.ordered == (12_000, 12_000, 12_000)
    full = run_baseline("mps-pack", host(8000), trace, mps_fill_percent=100)
    assert full.lateness.cells.ordered == (84_000, 84_000, 84_000)
    alone = run_baseline("mps-pack", host(8000, slowdown=False), trace)
    assert alone.lateness.cells.ordered == (0, 0, 0)


def test_whole_gpus_are_suspended_where_fractions_would_fit_side_by_side() -> None:
    trace = [session("a", Cell(0, 60_000, 1, 900, 10)), session("b", Cell(100_000, 60_000, 1, 900, 10))]
    result = run_baseline("whole-gpu-suspend", host(8000), trace)
    assert result.name == "whole-gpu-suspend"
    assert (result.suspends, result.doors.ordered) == (1, (0, 0))
    assert result.waits.ordered == (0, 1_000)  # 900 MiB at 1,000 MiB/s and 100 ms: `a` is saved for `b`
    assert result.lateness.cells.ordered == (0, 1_000)
    assert simulate(host(8000), trace).suspends == 0


def test_a_cell_on_a_whole_gpu_is_not_preempted_by_its_equals() -> None:
    trace = [session("a", Cell(0, 600_000, 1, 900, 10)), session("b", Cell(100_000, 60_000, 1, 900, 10))]
    result = run_baseline("whole-gpu-suspend", host(8000), trace)
    assert (result.preemptions, result.waits.ordered) == (0, (0, 500_000 + 1_000))
