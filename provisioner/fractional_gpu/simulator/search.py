"""Finds the fewest devices or hosts that meet a goal, by running the same trace with different numbers of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.machine import Host, lease_for
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.traces import Session

_FIRST_STEP = 8  # the first step is an eighth of the devices that the search starts with
_STAYS_MS = 120_000  # how long a kernel counts as on its device after a cell


def fewest(
    run: Callable[[int], Result], goal: Goal, most: int, *, least: int = 1, start: int = 1, counted: str = "devices"
) -> Result:
    """Return the run that meets the goal with the fewest devices (or other `counted` units), from `least` to `most`.

    The search begins at `start`. It first goes up or down by an eighth of `start`, then doubles the step each time until it has a number
    that meets the goal and a smaller one that misses it. It then bisects between the two. More devices do not always mean shorter waits
    (docs/simulator.md), so a much smaller number might also meet the goal. Raises SimulationError if even `most` are too few.
    """
    good: Result | None = None
    enough, too_few, count = most, least - 1, max(least, min(most, start))
    step = max(1, count // _FIRST_STEP)
    while good is None or enough - too_few > 1:
        result = run(count)
        missed = result.missed(goal)
        if not missed:
            good, enough = result, count
        elif count >= most:
            raise SimulationError(_too_few(most, counted, missed))
        else:
            too_few = count
        if good is None:
            count, step = min(most, count + step), 2 * step
        elif too_few < least:
            count, step = max(least, enough - step), 2 * step
        else:
            count = (enough + too_few) // 2
    return good


def fewest_for_each(
    run: Callable[[int, int], Result],
    traces: int,
    goal: Goal,
    most: int,
    *,
    least: int = 1,
    start: int = 1,
    counted: str = "devices",
) -> tuple[list[Result], list[int]]:
    """Find the fewest devices that are enough for every trace. Return each trace's run with that number, and each trace's own fewest.

    `run` is called with the trace's index and the number of devices (or other `counted` units). Each trace is searched first. The common
    search then begins at the largest number found, and goes up while any trace misses the goal. Raises the same errors as `fewest`.
    """
    runs, counts = cache(run), list[int]()
    for trace in range(traces):
        start = counts[-1] if counts else start
        one = fewest(partial(runs, trace), goal, most, least=least, start=start, counted=counted)
        counts.append(one.hosts if counted == "hosts" else one.devices)
    missed = ""
    for enough in range(max(counts), most + 1):
        found = [runs(trace, enough) for trace in range(traces)]
        missed = next((said for one in found if (said := one.missed(goal))), "")
        if not missed:
            return found, counts
    raise SimulationError(_too_few(most, counted, missed))


def _too_few(most: int, counted: str, missed: str) -> str:
    return f"with {most} {counted} {missed}; allow longer waits (p95_wait, p99_wait, p95_late) or simulate faster swaps"


def devices_for_cells(trace: Sequence[Session], host: Host, *, whole: bool = False, stays_ms: int = _STAYS_MS) -> int:
    """Return the largest number of devices that cells need at any one time. This is roughly how many it takes to keep waits short.

    Each cell occupies its session's fraction until `stays_ms` after it ends. If it uses several GPUs, or `whole` is set, it occupies whole
    GPUs. Raises SimulationError for a session that the host cannot serve.
    """
    most = _most_at_once(
        (cell.start_ms, cell.start_ms + cell.duration_ms + stays_ms, milli if cell.gpus <= 1 else 1000 * cell.gpus)
        for session in trace
        for milli in [_milli(session, host, whole=whole)]
        for cell in session.cells
        if cell.gpus
    )
    return max(1, most)


def devices_for_sessions(trace: Sequence[Session], host: Host) -> int:
    """Return the largest number of devices that the fractions of open sessions need at any one time.

    Raises SimulationError for a session that the host cannot serve.
    """
    most = _most_at_once(
        (session.open_ms, session.close_ms, session.gpus * _milli(session, host, whole=False)) for session in trace
    )
    return max(1, most)


def gpus_reserved_at_once(trace: Sequence[Session]) -> int:
    return _most_at_once((session.open_ms, session.close_ms, 1000 * session.gpus) for session in trace)


def _milli(session: Session, host: Host, *, whole: bool) -> int:
    return 1000 if whole or session.most_gpus > 1 else lease_for(host, session).fraction_milli


def _most_at_once(uses: Iterable[tuple[int, int, int]]) -> int:
    steps: list[tuple[int, int]] = []
    for since_ms, until_ms, milli in uses:
        steps += [(since_ms, milli), (until_ms, -milli)]
    used = most = 0
    for _, milli in sorted(steps):
        used += milli
        most = max(most, used)
    return most // 1000
