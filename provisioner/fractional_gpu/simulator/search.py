"""The fewest devices that keep to a goal: runs of the same trace with more and fewer devices."""

from collections.abc import Callable, Sequence

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.felt import Goal
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.traces import Session


def fewest_devices(run: Callable[[int], Result], goal: Goal, most: int, *, least: int = 1, start: int = 1) -> Result:
    """Return the run with the fewest devices, from `least` to `most`, that keeps the goal.

    A run that keeps the goal is played to its end, one that misses it is given up early (`Felt.hopeless`), so failures are cheap. The
    search begins at `start`, which should be rather too few, adds half of the devices while they are too few, and halves the interval
    from there. That finds the fewest where more devices never make waits longer, which holds but for luck.

    Raises SimulationError where `most` devices are too few.
    """
    good: Result | None = None
    too_few, count = least - 1, max(least, min(most, start))
    while good is None or good.devices - too_few > 1:
        result = run(count)
        missed = result.missed(goal)
        if not missed:
            good = result
        elif count >= most:
            raise SimulationError(
                f"with {most} devices {missed}; allow longer waits with --p95-wait, --p99-wait or --p95-late, or quicker swaps"
            )
        else:
            too_few = count
        if good is None:
            count = min(most, count + -(-count // 2))
        elif too_few < least:
            count = max(least, good.devices * 2 // 3)
        else:
            count = (good.devices + too_few) // 2
    return good


def devices_to_start_with(trace: Sequence[Session], device_mib: int) -> int:
    """Return the devices whose memory the cells of the trace need at most at the same time, as many as fit whole.

    Rather too few for short waits: idle kernels hold memory, too, swaps take time, and fractions are rounded up.
    """
    steps: list[tuple[int, int]] = []
    for session in trace:
        for cell in session.cells:
            mib = cell.gpu_mib * cell.gpus
            steps += [(cell.start_ms, mib), (cell.start_ms + cell.duration_ms, -mib)]
    held_mib = most_mib = 0
    for _, mib in sorted(steps):
        held_mib += mib
        most_mib = max(most_mib, held_mib)
    return max(1, most_mib // device_mib)
