"""Many hosts, each simulated by itself: what comes out is what one run over all hosts would give.

A session stays on its host, hosts share nothing, and the arbiters see the same events at the same times. So a host's run is the same
alone as beside the others, and the figures of all hosts follow from those of each:

- What is counted (hours, swaps, losses) is added up, `host_peak_mib` is the largest. GPU time beyond a host's last moment counts as that
  moment does.
- What users felt is put together cell by cell, each user's from all hosts; percentiles and Jain's index are of that.
- What happens at the same time (devices held, cells that run or wait) is added up moment by moment; `peak_devices_held` is of that sum.
- Devices are owned from the first opening on any host to the last closing on any.
- Forecast errors are means weighted by their counts, as in one run (`result.merged_errors`).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

from fractional_gpu.core.forecasts.estimators import ErrorView
from fractional_gpu.simulator.felt import Felt, Goal
from fractional_gpu.simulator.fleet.workers import in_processes
from fractional_gpu.simulator.hosts import Door, DoorRule
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.record import EventLog
from fractional_gpu.simulator.result import Part, Result, Timeline, begin_result, finished
from fractional_gpu.simulator.simulation import Progress, simulate_part
from fractional_gpu.simulator.traces import Session

SUMS = (
    "busy",
    "held",
    "suspends",
    "resumes",
    "failed_swaps",
    "early_resumes",
    "vain_mib",
    "preemptions",
    "moved_mib",
    "out_of_memory",
    "lost",
)  # fmt: skip
"""The figures of a result that are added up."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One host, its sessions, and where its record goes."""

    name: str
    host: Host
    sessions: Sequence[Session]
    record: Path | None


def simulate_apart(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    chosen: Sequence[int],
    *,
    name: str = "fractional",
    processes: int = 1,
    record: Path | None = None,
    goal: Goal | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run each host by itself with the sessions that `chosen` gives it: its host for each session of the trace.

    One process runs all hosts here; more of them run beside this one. `record` is a file: each host's goes beside it (`record_of`).
    `progress` is given the sessions that ended, and all. A run that cannot reach the goal any more is given up after a host.
    Raises SimulationError for a session that its host cannot serve, and for a process that ends early.
    """
    shares: list[list[Session]] = [[] for _ in hosts]
    for session, host in zip(trace, chosen, strict=True):
        shares[host].append(session)
    jobs = [
        _Job(name, host, share, record_of(record, number) if record is not None else None)
        for number, (host, share) in enumerate(zip(hosts, shares, strict=True))
    ]
    ended = 0

    def ends() -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, len(trace))

    whole = _Whole(name, trace, hosts, goal)
    with closing(_parts(jobs, min(processes, len(jobs)), ends)) as parts:
        for part in parts:
            whole.add(part)
            if whole.felt.hopeless:
                break
    return whole.result(trace)


def record_of(record: Path, host: int) -> Path:
    """Return the file beside `record` that takes down one host: `host-3.run.log` for `run.log`."""
    return record.with_name(f"host-{host}.{record.name}")


def _parts(jobs: Sequence[_Job], processes: int, ended: Callable[[], None]) -> Generator[Part, None, None]:
    if processes > 1:
        yield from in_processes(_run, jobs, processes, ended)
        return
    for job in jobs:
        yield _run(job, ended)


def _run(job: _Job, ended: Callable[[], None]) -> Part:
    """Simulate a host."""
    with ExitStack() as stack:
        log = None
        if job.record is not None:
            log = stack.enter_context(EventLog(job.record, job.host, job.sessions, name=job.name))
        hosts = (job.host,)
        door = Door(hosts, job.sessions, DoorRule.FIT)
        return simulate_part(hosts, job.sessions, door, record=log, progress=lambda *_: ended())


class _Whole:
    """The figures of all hosts, added up host by host in their order."""

    def __init__(self, name: str, trace: Sequence[Session], hosts: Sequence[Host], goal: Goal | None) -> None:
        self._result = begin_result(name, trace, hosts)
        self.felt = Felt(trace, goal)
        self._errors: list[Sequence[ErrorView]] = []
        self._timelines: list[Timeline] = []
        self._closed_ms = 0

    def add(self, part: Part) -> None:
        """Add what the next host's run came to."""
        number, whole, one = len(self._timelines), self._result, part.result
        for figure in SUMS:
            setattr(whole, figure, getattr(whole, figure) + getattr(one, figure))
        whole.host_peak_mib = max(whole.host_peak_mib, one.host_peak_mib)
        self._timelines.append(one.timeline)
        self._errors += part.errors
        self._closed_ms = max(self._closed_ms, part.closed_ms)
        self.felt.add(part.felt, number)

    def result(self, trace: Sequence[Session]) -> Result:
        """Return the figures of the hosts that were added."""
        whole = self._result
        timeline = whole.timeline = added_up(self._timelines)
        end_ms = timeline.at_ms[-1]
        for one in self._timelines:  # a host's last state goes on until the last moment of all
            rest_ms = end_ms - one.at_ms[-1]
            whole.busy += one.busy[-1] * rest_ms * 1000
            whole.held += one.devices_held[-1] * rest_ms * 1000
        # the last moment has no length: what is held from then on is held for no time
        whole.peak_devices_held = max(timeline.devices_held[:-1], default=0)
        return finished(Part(result=whole, felt=self.felt, errors=self._errors, closed_ms=self._closed_ms), trace)


def added_up(timelines: Sequence[Timeline]) -> Timeline:
    """Return the sum of timelines that each begin at 0, moment by moment; it ends with the last moment of all."""
    whole = Timeline()
    now_ms = held = busy = waiting = 0
    for at_ms, more_held, more_busy, more_waiting in merge(*map(_changes, timelines)):
        if at_ms != now_ms:
            whole.add_changed(now_ms, held, busy, waiting)
            now_ms = at_ms
        held, busy, waiting = held + more_held, busy + more_busy, waiting + more_waiting
    whole.add(now_ms, held, busy, waiting)
    return whole


def _changes(timeline: Timeline) -> Iterator[tuple[int, int, int, int]]:
    """Yield the moments of a timeline: when, and how much more there is then of each of its counts."""
    before = (0, 0, 0)
    for at_ms, held, busy, waiting in zip(*timeline.columns, strict=True):
        yield at_ms, held - before[0], busy - before[1], waiting - before[2]
        before = (held, busy, waiting)
