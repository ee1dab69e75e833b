"""Which host each session is given, chosen for the whole trace before anything runs.

A rule knows what a hub or an engine could know at login, and nothing of what the hosts' arbiters do: what each session asks for, when it
opens, when it closes in the trace, and what its user did up to then in the trace. So the hosts can run one by one, or beside each other.

- `random`: a host by chance, each of the GPUs with the same chance. Every session draws from random numbers of its own.
- `count`: the host with the fewest open sessions for each of its GPUs.
- `use`: the host with the least expected use by its open sessions. A session is expected to use, of the host's memory, what its lease may
  use while its kernel is busy, and of the host's compute its cells' utilisation; both for the share of the time in which its user's kernels
  are busy. That share and that utilisation are learnt from the cells that the user's sessions have ended so far. They are drawn towards
  those of the published trace while there is little of that, in the way in which a hub packs seats (`core.seat_packing`).

A host that can never serve a session (with too few devices of one kind, or too small ones) is left out. Among equals the first host is
taken.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import accumulate
from math import lcm
from typing import Protocol

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.core.seat_packing import estimated_usage
from fractional_gpu.simulator.hosts import Leases
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.traces import Session

_MILLIONTHS = 1_000_000
_PRIOR_UTIL_PERCENT = 15  # about the mean of the published utilisations
_PRIOR_BUSY_MS = 30 * 60_000  # counts as much as so long a time of cells


class PlaceRule(StrEnum):
    """How hosts are chosen beforehand."""

    RANDOM = "random"
    COUNT = "count"
    USE = "use"


def choose_hosts(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    rule: PlaceRule,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> "array[int]":
    """Return the host of each session, in the trace's order. `progress` is given the sessions that have their host, and all.

    Raises SimulationError for a session that no host can serve.
    """
    leases = Leases(hosts, trace)
    able = _Able(leases, len(hosts))
    chosen = array("l", bytes(array("l").itemsize * len(trace)))
    if rule is PlaceRule.RANDOM:
        pairs: Iterable[tuple[int, int]] = enumerate(_by_chance(hosts, trace, able, seed))
    else:
        load: _Load = _Counted(hosts) if rule is PlaceRule.COUNT else _Used(hosts)
        pairs = _Placing(trace, leases, able, load).chosen()
    for placed, (number, host) in enumerate(pairs, 1):
        chosen[number] = host
        if progress is not None:
            progress(placed, len(trace))
    return chosen


class _Able:
    """Which hosts can serve a session; sessions of one kind share the answer."""

    def __init__(self, leases: Leases, hosts: int) -> None:
        self._leases, self._all = leases, range(hosts)
        self._known: dict[tuple[bool, ...], list[int]] = {}

    def hosts(self, session: Session) -> list[int]:
        """Return the hosts, in their order; there is at least one."""
        kinds = tuple(size is not None for size in self._leases.size(session))
        found = self._known.get(kinds)
        if found is None:
            found = [host for host in self._all if self._leases.on(host, session) is not None]
            self._known[kinds] = found
        return found


def _by_chance(hosts: Sequence[Host], trace: Sequence[Session], able: _Able, seed: int) -> Iterator[int]:
    weights: dict[int, list[int]] = {}
    for session in trace:
        among = able.hosts(session)
        summed = weights.get(id(among))  # `able` keeps the list, so its id stays its own
        if summed is None:
            summed = weights[id(among)] = list(accumulate(len(hosts[host].devices) for host in among))
        rng = random.Random(f"{seed}/place/{session.session_id}")  # noqa: S311 - a workload, not a secret
        yield rng.choices(among, cum_weights=summed)[0]


class _Load(Protocol):
    """How full hosts are, as a rule sees it."""

    rank: list[int]  # by host; the lowest is chosen

    def opens(self, now_ms: int, host: int, session: Session, lease: LeaseSpec) -> None:
        """Count a session there from now on."""

    def ends(self, now_ms: int, session: Session, cell: int) -> None:
        """Learn from a GPU cell that ends now in the trace."""

    def closes(self, now_ms: int, session: Session) -> None:
        """Count the session no more."""


class _Placing:
    """The trace, session by session and cell by cell, up to where each host is chosen."""

    def __init__(self, trace: Sequence[Session], leases: Leases, able: _Able, load: _Load) -> None:
        self._trace, self._leases, self._able, self._load = trace, leases, able, load
        self._heap: list[
            tuple[int, int, int]
        ] = []  # when, which session, which of its cells ends; their number: it closes

    def chosen(self) -> Iterator[tuple[int, int]]:
        """Yield each session's number in the trace and its host, in the order in which they open."""
        trace = self._trace
        for number in sorted(range(len(trace)), key=lambda number: trace[number].open_ms):
            session = trace[number]
            self._until(session.open_ms)
            host = min(self._able.hosts(session), key=self._load.rank.__getitem__)
            lease = self._leases.on(host, session)
            if lease is None:
                raise AssertionError("an able host has a lease for the session")
            self._load.opens(session.open_ms, host, session, lease)
            self._follow(number, 0)
            yield number, host

    def _follow(self, number: int, cell: int) -> None:
        """Plan the end of the session's next GPU cell, or the session's end."""
        session = self._trace[number]
        cells = session.cells
        while cell < len(cells) and not cells[cell].gpus:
            cell += 1
        at_ms = cells[cell].start_ms + cells[cell].duration_ms if cell < len(cells) else session.close_ms
        heappush(self._heap, (at_ms, number, cell))

    def _until(self, now_ms: int) -> None:
        """Let all end that ends up to then."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            at_ms, number, cell = heappop(heap)
            session = self._trace[number]
            if cell == len(session.cells):
                self._load.closes(at_ms, session)
            else:
                self._load.ends(at_ms, session, cell)
                self._follow(number, cell + 1)


class _Counted:
    """The open sessions of each host, for each of its GPUs."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        sizes = [max(1, len(host.devices)) for host in hosts]
        whole = lcm(*sizes)  # of this much, each GPU's part is a whole number
        self._each = [whole // size for size in sizes]
        self._host: dict[str, int] = {}
        self.rank = [0] * len(hosts)

    def opens(self, now_ms: int, host: int, session: Session, lease: LeaseSpec) -> None:  # noqa: ARG002 - a rule that looks at neither
        self._host[session.session_id] = host
        self.rank[host] += self._each[host]

    def ends(self, now_ms: int, session: Session, cell: int) -> None:
        """Cells do not count."""

    def closes(self, now_ms: int, session: Session) -> None:  # noqa: ARG002 - a rule that looks at no time
        host = self._host.pop(session.session_id)
        self.rank[host] -= self._each[host]


@dataclass(slots=True)
class _Open:
    """An open session: its host, what of the host's memory and GPUs it may use while it is busy, millionths, and what it is counted as."""

    host: int
    memory: int
    gpus: int
    counted: int = 0


class _User:
    """What is known of a user so far."""

    __slots__ = ("busy_ms", "busy_util_ms", "lived_ms", "open", "opened_ms")

    def __init__(self) -> None:
        self.open: dict[str, _Open] = {}
        self.lived_ms = self.opened_ms = 0  # of closed sessions; the sum of the openings of those that are open
        self.busy_ms = self.busy_util_ms = 0  # of GPU cells; times percent

    def habits(self, now_ms: int) -> tuple[int, int]:
        """Return in how much of the time the user's kernels are busy, thousandths, and the utilisation meanwhile, percent."""
        live_ms = self.lived_ms + len(self.open) * now_ms - self.opened_ms
        duty_milli = estimated_usage(live_ms=live_ms, busy_ms=self.busy_ms, busy_mib_ms=0).duty_milli
        util_percent = (self.busy_util_ms + _PRIOR_UTIL_PERCENT * _PRIOR_BUSY_MS) // (self.busy_ms + _PRIOR_BUSY_MS)
        return duty_milli, util_percent


class _Used:
    """What the open sessions of each host are expected to use of it."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._mib = [max(1, host.leasable_mib) for host in hosts]
        self._users: dict[str, _User] = {}
        self.rank = [0] * len(hosts)

    def opens(self, now_ms: int, host: int, session: Session, lease: LeaseSpec) -> None:
        user = self._users.setdefault(session.user, _User())
        memory = lease.reserve_mib * lease.devices * _MILLIONTHS // self._mib[host]
        gpus = lease.devices * _MILLIONTHS // max(1, len(self._hosts[host].devices))
        user.open[session.session_id] = _Open(host, memory, gpus)
        user.opened_ms += session.open_ms
        self._count(user, now_ms)

    def ends(self, now_ms: int, session: Session, cell: int) -> None:
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
        """Count the user's open sessions as they are expected now."""
        duty_milli, util_percent = user.habits(now_ms)
        for one in user.open.values():
            use = duty_milli * (100 * one.memory + util_percent * one.gpus) // 100_000
            self.rank[one.host] += use - one.counted
            one.counted = use
