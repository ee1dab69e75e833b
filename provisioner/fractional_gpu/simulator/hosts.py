"""Simulates several hosts that share one clock, and the door that assigns each session to a host.

docs/simulator.md describes the door's rules. A host's room is the memory its devices offer in the session's pool, minus what the leases of
open sessions may use. The door does not know how much memory kernels currently hold or how busy devices are.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from heapq import heappop, heappush
from typing import TypeAlias

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.machine import Host, lease_for
from fractional_gpu.simulator.traces import Session

Machine: TypeAlias = Host | Sequence[Host]
"""The host or hosts that a trace runs on. Device names are unique only within a host."""


def hosts_of(machine: Machine) -> tuple[Host, ...]:
    return (machine,) if isinstance(machine, Host) else tuple(machine)


class Moments:
    """The virtual time of all hosts, and a heap of scheduled events. Events with the same time happen in the order they were scheduled."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._order = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def at(self, at_ms: int, act: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._heap, (max(at_ms, self.now_ms), self._order, act))

    def run(self, passing: Callable[[int], None] | None = None, until: Callable[[], bool] = lambda: False) -> None:
        while self._heap and not until():
            at_ms, _, act = heappop(self._heap)
            if passing is not None:
                passing(at_ms)
            self.now_ms = at_ms
            act()


class Leases:
    """The lease each session requests on each host, or None if the host can never serve the session.

    Raises SimulationError if no host can serve a session.
    """

    def __init__(self, hosts: Sequence[Host], trace: Sequence[Session]) -> None:
        kinds = {host: at for at, host in enumerate(dict.fromkeys(hosts))}
        self._kinds = [kinds[host] for host in hosts]
        self._asked = {session.session_id: _asked(tuple(kinds), session) for session in trace}

    def on(self, host: int, session: Session) -> LeaseSpec | None:
        return self._asked[session.session_id][self._kinds[host]]

    def size(self, session: Session) -> tuple[tuple[int, int] | None, ...]:
        asked = self._asked[session.session_id]
        return tuple((lease.reserve_mib, lease.devices) if lease is not None else None for lease in asked)


def _asked(kinds: Sequence[Host], session: Session) -> list[LeaseSpec | None]:
    asked: list[LeaseSpec | None] = []
    refusals: list[SimulationError] = []
    for host in kinds:
        try:
            asked.append(lease_for(host, session))
        except SimulationError as error:
            asked.append(None)
            refusals.append(error)
    if refusals and not any(asked):
        raise refusals[0]
    return asked


class DoorRule(StrEnum):
    FIT = "fit"
    MOST_FREE = "most-free"
    RANDOM = "random"
    SLURM_COUNT = "slurm-count"  # `engine_door`
    SLURM_SHARDS = "slurm-shards"  # the baseline `static-fraction`


class Door:
    """The door that chooses each session's host. `seed` is for the rule `RANDOM`, which gives more sessions to hosts with more devices."""

    notice_ms = 0  # from a session's end until a waiting session may get its room

    def __init__(
        self, hosts: Sequence[Host], trace: Sequence[Session], rule: DoorRule = DoorRule.FIT, seed: int = 1
    ) -> None:
        self.rule, self._seed = rule, seed
        self.queue: list[Session] = []  # sessions without a host
        self._sizes = [len(host.devices) for host in hosts]
        self._leases = Leases(hosts, trace)
        self._room_mib = [{pool.name: sum(host.leasable_in(pool)) for pool in host.pools} for host in hosts]
        self._singles, self._several = (
            [0] * len(hosts),
            [0] * len(hosts),
        )  # open sessions with one GPU, and with several

    def admitted(self) -> Iterator[tuple[Session, int, LeaseSpec]]:
        """Yield the queued sessions that get a host, and remove them from the queue. Sessions may overtake earlier ones that don't fit."""
        for session in list(self.queue):
            if (chosen := self.choose(session)) is not None:
                self.queue.remove(session)
                yield session, *chosen

    def choose(self, session: Session) -> tuple[int, LeaseSpec] | None:
        """Return the session's host and lease, or None if it has to wait until another session ends."""
        able = self._able(session)
        host = self._choose(session, able)
        self._count(host, able[host], 1)
        return host, able[host]

    def _able(self, session: Session) -> dict[int, LeaseSpec]:
        each = ((host, self._leases.on(host, session)) for host in range(len(self._room_mib)))
        return {host: lease for host, lease in each if lease is not None}

    def _choose(self, session: Session, able: Mapping[int, LeaseSpec]) -> int:
        if self.rule is DoorRule.RANDOM:  # each session has its own random numbers
            rng = random.Random(f"{self._seed}/place/{session.session_id}")  # noqa: S311 - a workload, not a secret
            return rng.choices(list(able), weights=[self._sizes[host] for host in able])[0]
        return min(able, key=lambda host: (self._rank(host, able[host]), host))

    def _rank(self, host: int, lease: LeaseSpec) -> tuple[int, ...]:
        """Return a host's rank for a lease. The host with the lowest rank is chosen.

        If no host has enough room, the kernel will take turns with others on its devices. Sharing with kernels of the same size is better:
        an 8-GPU kernel would delay just one other 8-GPU kernel, but many 1-GPU kernels.
        """
        room_mib = self._room_mib[host][lease.pool]
        if self.rule is DoorRule.MOST_FREE:
            return (-room_mib,)
        if lease.reserve_mib * lease.devices <= room_mib:
            return 0, room_mib
        if lease.devices > 1:
            return 1, self._singles[host], self._several[host], -room_mib
        return 1, self._several[host], -room_mib

    def closed(self, host: int, lease: LeaseSpec) -> None:
        self._count(host, lease, -1)

    def _count(self, host: int, lease: LeaseSpec, sign: int) -> None:
        self._room_mib[host][lease.pool] -= sign * lease.reserve_mib * lease.devices
        (self._several if lease.devices > 1 else self._singles)[host] += sign
