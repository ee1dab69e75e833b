"""Many hosts behind an engine (Slurm, Kubernetes) that knows only counts: which node a job gets, and how long jobs queue.

docs/cluster-simulation.md describes what the engine counts (`EngineDoor`): how many more thousandths a node's broker would grant, by the
forecast that places a hub's seats (`core.seat_packing`). A running job is a seat on the device that the forecast chooses. Cells that have
ended on the node teach it the user's habits.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.core.seat_packing import (
    PRIOR_USAGE,
    SeatDevice,
    SeatLoad,
    admissible_milli,
    choose_device,
    estimated_usage,
    least_waiting,
    more_seats_in,
)
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.experience import Spread
from fractional_gpu.simulator.hosts import Door, Leases, Moments
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session

WAIT_TARGET_MS = 30_000
WAIT_BOUND_MILLI = 50
"""The usual `wait_target` and `wait_bound` of a pool: one cell in twenty may wait longer than half a minute."""
_ANY_FRACTIONS = (125, 250, 500, 750, 1000)  # of a pool that offers any
_MOST_ON_A_DEVICE_MILLI = 16_000
_DUTY_STEP = 10  # thousandths: similar loads share a forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTerms:
    target_ms: int = WAIT_TARGET_MS
    bound_milli: int = WAIT_BOUND_MILLI


@dataclass(slots=True)
class _User:
    lived_ms: int = 0  # of jobs that have ended
    busy_ms: int = 0


@dataclass(slots=True)
class _Seat:
    session: Session  # as it runs: from when it begins
    mib: int
    devices: tuple[int, ...]


@dataclass(slots=True)
class Node:
    host: Host
    terms: WaitTerms
    _seats: dict[str, _Seat] = field(default_factory=dict)
    _users: dict[str, _User] = field(default_factory=dict)

    def seat(self, session: Session, lease: LeaseSpec, now_ms: int) -> None:
        """Count a job on the devices where the forecast places it. `session` has its actual times."""
        places = self._places(now_ms)
        load = self._load(session.user, lease.reserve_mib, now_ms)
        taken: list[int] = []
        for _ in range(lease.devices):
            left = [place for number, place in enumerate(places) if number not in taken]
            device_id, _ = choose_device(load, left, target_ms=self.terms.target_ms, bound_milli=self.terms.bound_milli)
            if device_id is None:
                place, _ = least_waiting(load, left)
                device_id = (place or left[0]).device_id
            taken.append(next(number for number, place in enumerate(places) if place.device_id == device_id))
        self._seats[session.session_id] = _Seat(session, lease.reserve_mib, tuple(taken))

    def unseat(self, session_id: str) -> None:
        session = self._seats.pop(session_id).session
        user = self._users.setdefault(session.user, _User())
        user.lived_ms += session.close_ms - session.open_ms
        user.busy_ms += sum(cell.duration_ms for cell in session.cells if cell.gpus)

    def admissible_milli(self, now_ms: int) -> int:
        pool = self.host.pools[0]
        places, counts = self._places(now_ms), {}
        for milli in pool.fractions_milli or _ANY_FRACTIONS:
            mib = max(1, self.host.device_mib * milli // 1000)
            counts[milli] = more_seats_in(
                places,
                SeatLoad(mib=mib, duty_milli=PRIOR_USAGE.duty_milli),
                target_ms=self.terms.target_ms,
                bound_milli=self.terms.bound_milli,
                most=_MOST_ON_A_DEVICE_MILLI // milli,
            )
        return admissible_milli(counts)

    def _places(self, now_ms: int) -> list[SeatDevice]:
        pool = self.host.pools[0]
        loads: list[list[SeatLoad]] = [[] for _ in self.host.devices]
        for seat in self._seats.values():
            for number in seat.devices:
                loads[number].append(self._load(seat.session.user, seat.mib, now_ms))
        return [
            SeatDevice(
                device_id=device.device_id,
                capacity_mib=device.leasable_mib,
                loads=tuple(there),
                kind=device.name if pool.may_move and not device.why_no_move else "",
            )
            for device, there in zip(self.host.devices, loads, strict=True)
        ]

    def _load(self, user: str, mib: int, now_ms: int) -> SeatLoad:
        known = self._users.get(user, _User())
        live_ms, busy_ms = known.lived_ms, known.busy_ms
        for seat in self._seats.values():
            if seat.session.user == user:
                live_ms += now_ms - seat.session.open_ms
                busy_ms += _busy_ms(seat.session, now_ms)
        duty_milli = estimated_usage(live_ms=live_ms, busy_ms=busy_ms, busy_mib_ms=0).duty_milli
        return SeatLoad(mib=mib, duty_milli=min(1000, -(-duty_milli // _DUTY_STEP) * _DUTY_STEP))


def _busy_ms(session: Session, now_ms: int) -> int:
    return sum(
        min(cell.duration_ms, now_ms - cell.start_ms) for cell in session.cells if cell.gpus and cell.start_ms < now_ms
    )


AGENT_MS = 2_000  # from a job's begin or end until the node's agent has updated the count
LOOK_MS = 60_000  # how often to write all counts while jobs wait: forecasts change as cells end


def later(session: Session, by_ms: int) -> Session:
    if not by_ms:
        return session
    cells = tuple(replace(cell, start_ms=cell.start_ms + by_ms) for cell in session.cells)
    return replace(session, open_ms=session.open_ms + by_ms, close_ms=session.close_ms + by_ms, cells=cells)


class Queue:
    """The engine's books and its queue over time, after a run.

    `hosts` has each session's host (-1: no count is ever enough), and `waited_ms` how long the session waited. Raises SimulationError for
    a session that no host can serve.
    """

    def __init__(self, hosts: Sequence[Host], trace: Sequence[Session], terms: WaitTerms) -> None:
        self._trace = trace
        self._leases = Leases(hosts, trace)
        self._nodes = [Node(host, terms) for host in hosts]
        self._moments = Moments()
        self._left = [node.admissible_milli(0) for node in self._nodes]  # by node: what the count leaves
        self._due = [False] * len(hosts)  # whether a count is about to be written
        self._waiting: list[int] = []
        self._looking = False
        self._open = 0
        self.hosts, self.waited_ms = array("q", [-1]) * len(trace), array("q", [0]) * len(trace)

    def run(self) -> None:
        for number in sorted(range(len(self._trace)), key=lambda number: self._trace[number].open_ms):
            self._moments.at(self._trace[number].open_ms, partial(self._asks, number))
        self._moments.run()

    def _asks(self, number: int) -> None:
        self._waiting.append(number)
        self._serve()

    def _serve(self) -> None:
        self._waiting = [number for number in self._waiting if not self._begins(number)]
        if self._waiting and not self._looking and self._open:
            self._looking = True
            self._moments.at(self._moments.now_ms + LOOK_MS, self._look)

    def _begins(self, number: int) -> bool:
        session = self._trace[number]
        able = [
            (-self._left[host], host, lease)
            for host in range(len(self._nodes))
            if (lease := self._leases.on(host, session)) is not None and self._left[host] >= _milli(lease)
        ]
        if not able:
            return False
        _, host, lease = min(able, key=lambda one: one[:2])
        now_ms = self._moments.now_ms
        runs = later(session, now_ms - session.open_ms)
        self.hosts[number], self.waited_ms[number] = host, now_ms - session.open_ms
        self._left[host] -= _milli(lease)
        self._nodes[host].seat(runs, lease, now_ms)
        self._open += 1
        self._moments.at(runs.close_ms, partial(self._ends, host, session.session_id))
        self._write_soon(host)
        return True

    def _ends(self, host: int, session_id: str) -> None:
        self._nodes[host].unseat(session_id)
        self._open -= 1
        self._write_soon(host)

    def _write_soon(self, host: int) -> None:
        if not self._due[host]:
            self._due[host] = True
            self._moments.at(self._moments.now_ms + AGENT_MS, partial(self._write, host))

    def _write(self, host: int) -> None:
        self._due[host] = False
        self._left[host] = self._nodes[host].admissible_milli(self._moments.now_ms)
        self._serve()

    def _look(self) -> None:
        self._looking = False
        self._left = [node.admissible_milli(self._moments.now_ms) for node in self._nodes]
        self._serve()


def _milli(lease: LeaseSpec) -> int:
    return lease.fraction_milli * lease.devices


class AssignedHosts(Door):
    """Gives each session the host that was chosen beforehand."""

    def __init__(self, hosts: Sequence[Host], trace: Sequence[Session], chosen: Sequence[int]) -> None:
        super().__init__(hosts, trace)
        self._chosen = {session.session_id: host for session, host in zip(trace, chosen, strict=True)}

    def _choose(self, session: Session, able: Mapping[int, LeaseSpec]) -> int:  # noqa: ARG002 - the choice is made
        return self._chosen[session.session_id]


class EngineDoor(StrEnum):
    WHOLE = "engine-whole"  # its GPUs without a job
    SHARDS = "engine-shards"  # what jobs leave of each GPU: a job's share stays on one GPU
    COUNT = "engine-count"  # how many thousandths its broker would still grant


_BASELINES = {EngineDoor.WHOLE: "reservation", EngineDoor.SHARDS: "static-fraction"}


def run_engine(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    door: EngineDoor,
    *,
    terms: WaitTerms | None = None,
) -> Result:
    """Run the trace behind the engine; the result's `doors` are the waits in its queue.

    `terms`: the pool's, for the counts. Raises SimulationError for a session that no host can serve, or that no count ever admits.
    """
    if door in _BASELINES:
        result = run_baseline(_BASELINES[door], hosts, trace)
        result.name = door.value
        return result
    queue = Queue(hosts, trace, terms if terms is not None else WaitTerms())
    queue.run()
    for session, host in zip(trace, queue.hosts, strict=True):
        if host < 0:
            raise SimulationError(
                f"session {session.session_id!r} never starts, because no node's count ever covers its request; simulate larger hosts, "
                "allow longer waits (wait_bound), or leave such sessions out"
            )
    begun = [later(session, waited) for session, waited in zip(trace, queue.waited_ms, strict=True)]
    result = simulate(hosts, begun, name=door.value, door=AssignedHosts(hosts, begun, queue.hosts))
    result.doors = Spread.of(queue.waited_ms)
    return result
