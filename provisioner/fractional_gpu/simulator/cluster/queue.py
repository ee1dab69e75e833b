"""The queue of an engine that knows of each node a count of thousandths, which the node's agent writes anew.

- A job asks for its share (of several devices: all of them). It begins on a node whose count, less what has been given away since the count
  was written, is enough: the one with the most left, as Kubernetes' scheduler spreads pods by default.
- While no node has enough, the job waits. A later job that fits passes it, as with Kubernetes' scheduler and with Slurm's backfill.
- The agent writes the count anew `AGENT_MS` after a job began or ended on its node, and every `LOOK_MS` while jobs wait, because what is
  known of users changes as their cells end.
- A job that began late runs as in the trace, later by its wait. Waits of its cells are seconds, and do not move its end here.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.simulator.cluster.node import Node, WaitTerms
from fractional_gpu.simulator.hosts import Leases, Moments
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.traces import Session

__all__ = ["AGENT_MS", "LOOK_MS", "Starts", "later", "starts"]

AGENT_MS = 2_000
LOOK_MS = 60_000
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Starts:
    """The host of each session of the trace, by number, and how long it waited in the engine's queue, ms. Host -1: it never began."""

    hosts: "array[int]"
    waited_ms: "array[int]"


def later(session: Session, by_ms: int) -> Session:
    """Return the session as it runs if it begins so much later."""
    if not by_ms:
        return session
    cells = tuple(replace(cell, start_ms=cell.start_ms + by_ms) for cell in session.cells)
    return replace(session, open_ms=session.open_ms + by_ms, close_ms=session.close_ms + by_ms, cells=cells)


def starts(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    terms: WaitTerms,
    progress: Callable[[int, int], None] | None = None,
) -> Starts:
    """Return when and where each session begins. `progress` is given the sessions that have ended, and all.

    Raises SimulationError for a session that no host can serve. A session that no count is ever enough for does not begin.
    """
    return _Engine(hosts, trace, terms, progress).run()


class _Engine:
    """The engine's books and its queue, moment by moment."""

    def __init__(
        self,
        hosts: Sequence[Host],
        trace: Sequence[Session],
        terms: WaitTerms,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._trace = trace
        self._leases = Leases(hosts, trace)
        self._nodes = [Node(host, terms) for host in hosts]
        self._moments = Moments()
        self._left = [node.admissible_milli(0) for node in self._nodes]  # by node: what its count leaves
        self._due = [False] * len(hosts)  # whether a count is about to be written
        self._queue: list[int] = []
        self._looking = False
        self._open = 0
        self._starts = Starts(array("q", [-1]) * len(trace), array("q", [0]) * len(trace))
        self._ended, self._progress = 0, progress

    def run(self) -> Starts:
        """Run to the end."""
        moments = self._moments
        for number in sorted(range(len(self._trace)), key=lambda number: self._trace[number].open_ms):
            moments.at(self._trace[number].open_ms, partial(self._asks, number))
        moments.run()
        for number in self._queue:
            self._starts.waited_ms[number] = _NEVER
        return self._starts

    # -- jobs ------------------------------------------------------------------------------------------------------------

    def _asks(self, number: int) -> None:
        self._queue.append(number)
        self._serve()

    def _serve(self) -> None:
        """Begin each job of the queue for which a node has enough."""
        self._queue = [number for number in self._queue if not self._begins(number)]
        if self._queue and not self._looking and self._open:
            self._looking = True
            self._moments.at(self._moments.now_ms + LOOK_MS, self._look)

    def _begins(self, number: int) -> bool:
        session = self._trace[number]
        able = [
            (self._left[host], -host, lease)
            for host in range(len(self._nodes))
            if (lease := self._leases.on(host, session)) is not None and self._left[host] >= _milli(lease)
        ]
        if not able:
            return False
        _, negative, lease = max(able, key=lambda one: one[:2])
        host, now_ms = -negative, self._moments.now_ms
        runs = later(session, now_ms - session.open_ms)
        self._starts.hosts[number], self._starts.waited_ms[number] = host, now_ms - session.open_ms
        self._left[host] -= _milli(lease)
        self._nodes[host].seat(runs, lease, now_ms)
        self._open += 1
        self._moments.at(runs.close_ms, partial(self._ends, host, session.session_id))
        self._write_soon(host)
        return True

    def _ends(self, host: int, session_id: str) -> None:
        self._nodes[host].unseat(session_id)
        self._open -= 1
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, len(self._trace))
        self._write_soon(host)

    # -- counts ----------------------------------------------------------------------------------------------------------

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
