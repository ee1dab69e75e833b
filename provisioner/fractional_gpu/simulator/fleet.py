"""Many hosts: sessions get hosts at the door, on one clock, or all beforehand, and then each host runs separately.

A `PlaceRule` (docs/simulator.md) knows what a hub or an engine could know at login, and nothing that the hosts' arbiters do. Hosts share
nothing, so separate runs, even in parallel, give the same figures as one run over all hosts.
"""

import multiprocessing
import random
import signal
from array import array
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush, merge
from math import lcm
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.core.seat_packing import estimated_usage
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.hosts import Door, DoorRule, Leases
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering import RunMeter
from fractional_gpu.simulator.record import recording
from fractional_gpu.simulator.result import Result, Timeline, begin_result
from fractional_gpu.simulator.revocation import Revocation
from fractional_gpu.simulator.simulation import Progress, simulate
from fractional_gpu.simulator.traces import Session

_MILLIONTHS = 1_000_000
_PRIOR_UTIL_PERCENT = 15  # about the mean published utilisation
_PRIOR_BUSY_MS = 30 * 60_000  # the prior has the weight of cells of this total length
SUMS = (
    "busy", "held", "suspends", "resumes", "failed_swaps", "early_resumes", "vain_mib", "preemptions", "moved_mib", "out_of_memory", "lost",
)  # fmt: skip
"""The figures of a result that are added up."""


class PlaceRule(StrEnum):
    RANDOM = "random"
    COUNT = "count"
    USE = "use"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChoice:
    """How sessions get their hosts.

    A `DoorRule` chooses as they open, and all hosts run on one clock; or a `PlaceRule` chooses beforehand, drawing by `seed`, and the
    hosts run in `processes` processes.
    """

    rule: DoorRule | PlaceRule = DoorRule.FIT
    seed: int = 1
    processes: int = 1


BY_THE_DOOR = HostChoice()


def run(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    way: HostChoice,
    *,
    name: str = "fractional",
    record: Path | None = None,
    goal: Goal | None = None,
    progress: Progress | None = None,
    placing: Progress | None = None,
    meter: RunMeter | None = None,
    revocation: Revocation | None = None,
) -> Result:
    """Run the trace and return its figures under `name`. `record` is a file; each host that runs separately has one next to it.

    `progress` gets the number of ended sessions and the total; `placing` the number placed, if placed beforehand. A run that can no longer
    meet the goal stops. `meter` and `revocation` need all hosts on one clock. Raises SimulationError for a session that no host can
    serve.
    """
    if isinstance(way.rule, PlaceRule):
        if meter is not None or revocation is not None:
            raise SimulationError(
                "hosts that run separately cannot be metered, and no devices go away from them; give sessions their hosts at the door"
            )
        chosen = choose_hosts(hosts, trace, way.rule, way.seed, placing)
        return simulate_apart(
            hosts, trace, chosen, name=name, processes=way.processes, record=record, goal=goal, progress=progress
        )
    with recording(record, hosts, trace, door=way.rule, name=name) as log:
        return simulate(
            hosts,
            trace,
            name=name,
            door=Door(hosts, trace, way.rule),
            record=log,
            progress=progress,
            goal=goal,
            meter=meter,
            revocation=revocation,
        )


def choose_hosts(
    hosts: Sequence[Host], trace: Sequence[Session], rule: PlaceRule, seed: int, progress: Progress | None = None
) -> "array[int]":
    leases, load = Leases(hosts, trace), _Load(hosts, rule)
    chosen = array("l", [0]) * len(trace)
    ends: list[tuple[int, int, int]] = []  # when, which session, which cell; the number of cells: it closes

    def follow(number: int, cell: int) -> None:
        session = trace[number]
        cells = session.cells
        while cell < len(cells) and not cells[cell].gpus:
            cell += 1
        at_ms = cells[cell].start_ms + cells[cell].duration_ms if cell < len(cells) else session.close_ms
        heappush(ends, (at_ms, number, cell))

    for placed, number in enumerate(sorted(range(len(trace)), key=lambda number: trace[number].open_ms), 1):
        session = trace[number]
        able = leases.able(session)
        if rule is PlaceRule.RANDOM:  # each session has its own random numbers
            rng = random.Random(f"{seed}/place/{session.session_id}")  # noqa: S311 - a workload, not a secret
            host = rng.choices(able, weights=[len(hosts[host].devices) for host in able])[0]
        else:
            while ends and ends[0][0] <= session.open_ms:
                at_ms, other, cell = heappop(ends)
                if cell == len(trace[other].cells):
                    load.closes(at_ms, trace[other])
                else:
                    load.cell_ends(at_ms, trace[other], cell)
                    follow(other, cell + 1)
            host = min(able, key=load.rank.__getitem__)
            lease = leases.on(host, session)
            if lease is None:
                raise AssertionError("an able host has a lease for the session")
            load.opens(host, session, lease)
            follow(number, 0)
        chosen[number] = host
        if progress is not None:
            progress(placed, len(trace))
    return chosen


@dataclass(slots=True)
class _OpenSession:
    """An open session: its host, the part of the host's memory and GPUs it may use when busy (millionths), and its count."""

    host: int
    memory: int
    gpus: int
    counted: int = 0


@dataclass(slots=True)
class _User:
    open: dict[str, _OpenSession] = field(default_factory=dict)
    lived_ms: int = 0  # of closed sessions
    opened_ms: int = 0  # the sum of the open sessions' openings
    busy_ms: int = 0  # of GPU cells
    busy_util_ms: int = 0  # times percent

    def habits(self, now_ms: int) -> tuple[int, int]:
        live_ms = self.lived_ms + len(self.open) * now_ms - self.opened_ms
        duty_milli = estimated_usage(live_ms=live_ms, busy_ms=self.busy_ms, busy_mib_ms=0).duty_milli
        util_percent = (self.busy_util_ms + _PRIOR_UTIL_PERCENT * _PRIOR_BUSY_MS) // (self.busy_ms + _PRIOR_BUSY_MS)
        return duty_milli, util_percent


class _Load:
    """How full hosts are, as a rule sees it: open sessions per GPU, or their expected use."""

    def __init__(self, hosts: Sequence[Host], rule: PlaceRule) -> None:
        self._rule = rule
        self._mib = [max(1, host.leasable_mib) for host in hosts]
        self._sizes = [max(1, len(host.devices)) for host in hosts]
        self._whole = lcm(*self._sizes)  # divides evenly among any host's GPUs
        self._users: dict[str, _User] = {}
        self.rank = [0] * len(hosts)  # by host; the lowest is chosen

    def opens(self, host: int, session: Session, lease: LeaseSpec) -> None:
        user = self._users.setdefault(session.user, _User())
        memory = lease.reserve_mib * lease.devices * _MILLIONTHS // self._mib[host]
        gpus = lease.devices * _MILLIONTHS // self._sizes[host]
        user.open[session.session_id] = _OpenSession(host, memory, gpus)
        user.opened_ms += session.open_ms
        self._count(user, session.open_ms)

    def cell_ends(self, now_ms: int, session: Session, cell: int) -> None:
        user, one = self._users[session.user], session.cells[cell]
        user.busy_ms += one.duration_ms
        user.busy_util_ms += one.duration_ms * one.util_percent
        self._count(user, now_ms)

    def closes(self, now_ms: int, session: Session) -> None:
        user = self._users[session.user]
        closed = user.open.pop(session.session_id)
        self.rank[closed.host] -= closed.counted
        user.opened_ms -= session.open_ms
        user.lived_ms += now_ms - session.open_ms
        self._count(user, now_ms)

    def _count(self, user: _User, now_ms: int) -> None:
        duty_milli, util_percent = user.habits(now_ms)
        for one in user.open.values():
            use = duty_milli * (100 * one.memory + util_percent * one.gpus) // 100_000
            if self._rule is PlaceRule.COUNT:
                use = self._whole // self._sizes[one.host]
            self.rank[one.host] += use - one.counted
            one.counted = use


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
    """Run each host separately; `chosen` has each session's host.

    With more than one process, hosts run in children. `record` is a file: each host's is next to it (`record_of`). After each host,
    `progress` gets the number of sessions so far and the total. A run that can no longer meet the goal stops. Raises SimulationError for
    a session that its host cannot serve, or if a process ends early.
    """
    shares: list[list[Session]] = [[] for _ in hosts]
    for session, host in zip(trace, chosen, strict=True):
        shares[host].append(session)
    jobs = [
        (name, host, share, record_of(record, number) if record is not None else None)
        for number, (host, share) in enumerate(zip(hosts, shares, strict=True))
    ]
    whole = begin_result(name, trace, hosts, goal)
    timelines: list[Timeline] = []
    with closing(_runs(jobs, min(processes, len(jobs)))) as runs:
        for number, one in enumerate(runs):
            for figure in SUMS:
                setattr(whole, figure, getattr(whole, figure) + getattr(one, figure))
            whole.host_peak_mib = max(whole.host_peak_mib, one.host_peak_mib)
            whole.closed_ms = max(whole.closed_ms, one.closed_ms)
            whole.errors += one.errors
            whole.experience.add(one.experience, number)
            timelines.append(one.timeline)
            if progress is not None:
                progress(sum(map(len, shares[: number + 1])), len(trace))
            if whole.experience.hopeless:
                break
    timeline = whole.timeline = added_up(timelines)
    for part in timelines:  # a host's last state lasts until the last moment of the run
        rest_ms = timeline.at_ms[-1] - part.at_ms[-1]
        whole.busy += part.busy[-1] * rest_ms * 1000
        whole.held += part.devices_held[-1] * rest_ms * 1000
    # the last moment has no length, so it holds nothing
    whole.peak_devices_held = max(timeline.devices_held[:-1], default=0)
    whole.finish(trace)
    return whole


def record_of(record: Path, host: int) -> Path:
    return record.with_name(f"host-{host}.{record.name}")


_Job = tuple[str, Host, Sequence[Session], Path | None]


def _runs(jobs: Sequence[_Job], processes: int) -> Generator[Result, None, None]:
    """Yield each host's result in order, whichever process is quicker. Closing the generator ends the processes.

    Each process has its own pipe. The standard pool has one for all jobs, and Python before 3.11.5 waits forever to write a large job to it
    if the processes are gone.
    """
    if processes <= 1:
        yield from map(_alone, jobs)
        return
    context = multiprocessing.get_context("spawn")
    workers, links = [], SimpleQueue[Connection]()
    for _ in range(processes):
        link, theirs = context.Pipe()
        workers.append(context.Process(target=_serve, args=(theirs,), daemon=True))
        workers[-1].start()
        theirs.close()  # so that we read an end of file when the process ends
        links.put(link)

    def ask(job: _Job) -> Result:
        link = links.get()
        try:
            link.send(job)
            said: Result | SimulationError = link.recv()
        except (EOFError, OSError):
            raise SimulationError(
                "a process that simulated a host ended early; run fewer at the same time with --set processes=N, or on a machine with more "
                "memory"
            ) from None
        finally:
            links.put(link)
        if isinstance(said, SimulationError):
            raise said
        return said

    with ThreadPoolExecutor(processes) as threads:
        try:
            yield from threads.map(ask, jobs)
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()


def _serve(link: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all the terminal's processes
    with suppress(EOFError, OSError):
        while True:
            job = link.recv()
            try:
                said: Result | SimulationError = _alone(job)
            except SimulationError as error:
                said = error
            link.send(said)


def _alone(job: _Job) -> Result:
    name, host, sessions, record = job
    with recording(record, host, sessions, name=name) as log:
        return simulate(host, sessions, name=name, record=log)


def added_up(timelines: Sequence[Timeline]) -> Timeline:
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
    before = (0, 0, 0)
    for at_ms, held, busy, waiting in zip(*timeline.columns, strict=True):
        yield at_ms, held - before[0], busy - before[1], waiting - before[2]
        before = (held, busy, waiting)
