"""The synthetic users have the statistics that are published of real ones."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fractional_gpu.simulator.traces import Session, synthetic_sessions


@pytest.fixture(scope="module")
def trace() -> list[Session]:
    return synthetic_sessions(600, 1, 1)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def test_gpu_cells_last_as_long(trace: list[Session]) -> None:
    minutes = [cell.duration_ms / 60_000 for session in trace for cell in session.cells if cell.gpus]
    assert quantile(minutes, 0.5) == pytest.approx(2, rel=0.1)
    assert quantile(minutes, 0.75) == pytest.approx(5, rel=0.1)


def test_gaps_between_gpu_cells_are_as_long(trace: list[Session]) -> None:
    gaps: list[float] = []
    for session in trace:
        cells = [cell for cell in session.cells if cell.gpus]
        gaps += [(after.start_ms - before.start_ms - before.duration_ms) / 60_000 for before, after in pairwise(cells)]
    for share, minutes in ((0.25, 1), (0.5, 3), (0.75, 8), (0.9, 41)):
        assert quantile(gaps, share) == pytest.approx(minutes, rel=0.15)


def test_they_hold_as_much_memory_and_use_the_gpu_as_little(trace: list[Session]) -> None:
    cells = [cell for session in trace for cell in session.cells if cell.gpus]
    gigabytes = [cell.gpu_mib * 2**20 / 10**9 for cell in cells]
    for share, expected in ((0.5, 2.3), (0.75, 4.6), (0.9, 18), (0.99, 38)):
        assert quantile(gigabytes, share) == pytest.approx(expected, rel=0.25)
    percents = [float(cell.util_percent) for cell in cells]
    assert quantile(percents, 0.5) == pytest.approx(8.5, abs=1)
    assert quantile(percents, 0.9) == pytest.approx(36, abs=4)


def test_reserved_gpus_are_busy_a_quarter_of_the_time_and_most_sessions_hardly_at_all(trace: list[Session]) -> None:
    busy = [sum(cell.duration_ms for cell in session.cells if cell.gpus) for session in trace]
    reserved = [session.close_ms - session.open_ms for session in trace]
    assert sum(busy) / sum(reserved) == pytest.approx(0.257, abs=0.02)
    light = sum(20 * used <= length for used, length in zip(busy, reserved, strict=True))
    assert light / len(trace) == pytest.approx(0.75, abs=0.02)


def test_a_seed_is_a_trace(trace: list[Session]) -> None:
    assert synthetic_sessions(600, 1, 1) == trace
    assert synthetic_sessions(600, 1, 2) != trace


def test_cells_lie_inside_their_sessions_and_after_one_another(trace: list[Session]) -> None:
    for session in trace:
        ends = [cell.start_ms + cell.duration_ms for cell in session.cells]
        starts = [cell.start_ms for cell in session.cells]
        assert session.open_ms <= starts[0]
        assert ends[-1] <= session.close_ms
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_so_many_of_the_users_are_urgent_and_do_what_they_would_do_anyway(trace: list[Session]) -> None:
    ranked = synthetic_sessions(600, 1, 1, urgent_percent=15)
    urgent = {session.user for session in ranked if session.priority == 1}
    assert len(urgent) == 90
    assert {session.priority for session in ranked} == {0, 1}
    assert [replace(session, priority=0) for session in ranked] == trace
