"""Swaps that fail, and suspends that find more to save than is reserved."""

from dataclasses import replace
from typing import Any

import pytest

from fractional_gpu.core.events import Event, HostMemoryNeeded, Measurement, ResumeFinished, SuspendFinished
from fractional_gpu.simulator import one_host
from fractional_gpu.simulator.simulation import simulate
from tests.simulator.by_hand import gpu_cell, host, session


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


class _Understated:
    """Measurements that say a fraction of the use, so that suspends find more to save than is reserved."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def __call__(self, **fields: Any) -> Measurement:  # noqa: ANN401 - the fields of the event
        return Measurement(**{**fields, "used_mib": max(1, fields["used_mib"] // self._parts)})


@pytest.mark.parametrize(("budget_mib", "refused"), [(24_000, False), (15_000, True)])
def test_a_suspend_that_counts_more_than_is_reserved_gets_the_difference_or_leaves_the_kernel_alone(
    monkeypatch: pytest.MonkeyPatch, budget_mib: int, refused: bool
) -> None:
    monkeypatch.setattr(one_host, "Measurement", _Understated(100))
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
