"""What people do today, on traces small enough to work out by hand."""

import pytest

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.traces import Cell, Session

HOUR_MS = 3_600_000


def session(name: str, *cells: Cell, close_ms: int = HOUR_MS, gpus: int = 1) -> Session:
    return Session(name, name, 0, close_ms, gpus, 0, cells)


def test_a_reservation_keeps_the_second_session_at_the_door() -> None:
    trace = [session("a", Cell(0, 60_000, 1, 100, 50)), session("b", Cell(10_000, 60_000, 1, 100, 50))]
    result = run_baseline("reservation", trace, [8000], slowdown=True)
    assert result.waits.ordered == (0, 0)
    assert result.doors.ordered == (0, HOUR_MS)
    assert result.lateness.cells.ordered == (0, HOUR_MS)  # the first cell of the session that waited
    assert result.owned == 2 * HOUR_MS * 1000
    assert result.held == 2 * HOUR_MS * 1000
    assert run_baseline("reservation", trace, [8000, 8000], slowdown=True).doors.ordered == (0, 0)


def test_culling_frees_the_gpu_and_loses_the_variables() -> None:
    trace = [
        session("a", Cell(0, 60_000, 1, 100, 50), Cell(3 * HOUR_MS, 60_000, 1, 100, 50), close_ms=4 * HOUR_MS),
        session("b", Cell(10_000, 60_000, 1, 100, 50), close_ms=HOUR_MS // 2),
    ]
    result = run_baseline("cull", trace, [8000], slowdown=True)
    assert result.lost == 1
    assert result.doors.ordered == (0, HOUR_MS + 60_000)
    assert result.waits.ordered == (0, 0, 0)
    assert result.lateness.cells.ordered == (0, 0, HOUR_MS + 60_000)
    assert run_baseline("reservation", trace, [8000], slowdown=True).lost == 0


def test_a_culled_kernel_waits_for_a_gpu_as_a_cell_and_not_at_the_door() -> None:
    # `a` is culled after an hour, `b` takes the only GPU from 2 h to 4 h, and `a` comes back at 3 h
    trace = [
        session("a", Cell(0, 60_000, 1, 100, 50), Cell(3 * HOUR_MS, 60_000, 1, 100, 50), close_ms=5 * HOUR_MS),
        Session("b", "b", 2 * HOUR_MS, 4 * HOUR_MS, 1, 0, (Cell(4 * HOUR_MS - 60_000, 60_000, 1, 100, 50),)),
    ]
    # `b` runs nothing for its first hour, so it is culled in turn at the moment at which `a` asks
    result = run_baseline("cull", trace, [8000], slowdown=True)
    assert result.doors.ordered == (0, 0)
    # `a` asks at 3 h and gets it at once; its cell ends at 3 h 1 min and is culled at 4 h 1 min, when `b` asked at 3 h 59 min
    assert result.waits.ordered == (0, 0, 120_000)
    assert result.waits.nonzero().ordered == (120_000,)
    assert result.waits.nonzero_percent() == pytest.approx(100 / 3, abs=0.001)


def test_time_slicing_never_waits_and_runs_out_of_memory() -> None:
    trace = [session("a", Cell(0, 60_000, 1, 6000, 50)), session("b", Cell(10_000, 60_000, 1, 6000, 50))]
    result = run_baseline("time-slice", trace, [8000], slowdown=True)
    assert result.waits.ordered == (0, 0)
    assert result.out_of_memory == 1
    assert run_baseline("time-slice", trace, [8000, 8000], slowdown=True).out_of_memory == 0


def test_time_slicing_slows_busy_neighbours_down() -> None:
    trace = [session(name, Cell(0, 60_000, 1, 100, 100)) for name in "ab"]
    assert run_baseline("time-slice", trace, [8000], slowdown=True).lateness.cells.ordered == (60_000, 60_000)
    assert run_baseline("time-slice", trace, [8000], slowdown=True).busy == 240_000 * 1000
    assert run_baseline("time-slice", trace, [8000], slowdown=False).busy == 120_000 * 1000


def test_what_a_baseline_cannot_serve_is_refused() -> None:
    with pytest.raises(SimulationError, match="'a' reserves 2 GPUs, and there are 1; simulate more with --devices"):
        run_baseline("reservation", [session("a", gpus=2)], [8000], slowdown=True)
    with pytest.raises(SimulationError, match="'a' uses 2 GPUs at once"):
        run_baseline("time-slice", [session("a", Cell(0, 1, 2, 1, 1), gpus=2)], [8000, 8000], slowdown=True)
    with pytest.raises(SimulationError, match="no baseline 'hope'; allowed: reservation, cull, time-slice"):
        run_baseline("hope", [session("a")], [8000], slowdown=True)
