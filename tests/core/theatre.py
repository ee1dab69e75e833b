"""Kernels with habits around one arbiter, in virtual time: each play says when a kernel wants the GPU, and measures the outcome.

A kernel wants the GPU, runs a cell once it is let in, rests for its gap, and wants the GPU again. A driver carries out suspends and
resumes in a time that depends on their size. As in reality, a pause between two cells may be too short for the kernel to count as
idle, and a cell that finds its gate open asks for nothing (`Actor.quiet_ms`). Only a habit's own seed makes anything random.
Every event goes through an `Observer`, so every play also checks the laws.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import CloseGate, Effect, Granted, Resume, Suspend, WakeAt
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    Wanted,
)
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec
from tests.core.observer import Observer

__all__ = ["FOR_EVER", "Actor", "Theatre"]

FOR_EVER = 10**12


@dataclass(slots=True, eq=False)
class Actor:
    """A kernel and its habit; times in milliseconds."""

    spec: LeaseSpec
    cell_ms: Callable[[], int]
    gap_ms: Callable[[], int] = lambda: 0
    cells: int = FOR_EVER  # it shuts down after this many
    quiet_ms: int = 0  # how long after a cell it is reported idle; with 0 at once, and each cell asks
    reaches_ms: int | None = (
        None  # how long after giving its room back in mid-cell its cell uses the GPU; None: at once
    )
    is_open: bool = False  # whether it has a gate; without the extension, its next cell is not announced
    asks: bool = False  # its cell has not begun yet
    number: int = 0  # of its cells
    left_ms: int = 0  # of the current cell; 0: none
    began_ms: int | None = None  # when it began to run this time
    wanted_ms: int = 0
    ran_ms: int = 0  # in all
    waits_ms: list[int] = field(default_factory=list)
    suspends: int = 0
    preempted: int = 0


class Theatre:
    """One arbiter, its devices and its actors. `swap_ms` returns how long it takes to move that many MiB."""

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        pools: Sequence[PoolSpec],
        *,
        host_mib: int = 10**9,
        swap_ms: Callable[[int], int] = lambda mib: 100 + mib,
        parallel_swaps: int = 1,
        whole_every: int = 20,
    ) -> None:
        self.arbiter = Arbiter(parallel_swaps=parallel_swaps)
        self.observer = Observer(self.arbiter, parallel_swaps=parallel_swaps)
        self.actors: dict[str, Actor] = {}
        self.now = 0
        self.ended: list[Actor] = []
        self.swaps: Counter[str] = Counter()
        self._swap_ms = swap_ms
        self._whole_every = whole_every
        self._handled = 0
        self._number = 0
        self._acts: list[tuple[int, int, Callable[[], None]]] = []
        self._wake: int | None = None
        for device in devices:
            self.send(DeviceSeen(at_ms=0, device=device))
        for pool in pools:
            self.send(PoolConfigured(at_ms=0, pool=pool))
        self.send(HostMemorySeen(at_ms=0, budget_mib=host_mib))

    # -- what a test says ----------------------------------------------------------------------------------------------------------

    def enter(self, actor: Actor, at_ms: int = 0) -> Actor:
        """Start an actor's kernel at a time; it wants the GPU at once."""
        self.at(at_ms, lambda: self._start(actor))
        return actor

    def at(self, at_ms: int, act: Callable[[], None]) -> None:
        """Schedule an action at a time."""
        self._number += 1
        heapq.heappush(self._acts, (max(at_ms, self.now), self._number, act))

    def run(self, until_ms: int) -> None:
        """Play until a time. Raises LawBrokenError or InvariantError."""
        while True:
            due = self._acts[0][0] if self._acts else until_ms + 1
            if self._wake is not None and self._wake < due:
                if self._wake > until_ms:
                    break
                self.now, self._wake = max(self.now, self._wake), None
                self.send(Tick(at_ms=self.now))
                continue
            if due > until_ms:
                break
            self.now = due
            heapq.heappop(self._acts)[2]()
        self.now = until_ms

    def ran_ms(self, actor: Actor) -> int:
        return actor.ran_ms + (self.now - actor.began_ms if actor.began_ms is not None else 0)

    def send(self, event: Event) -> list[Effect]:
        """Pass an event to the arbiter, check the effects, and carry them out."""
        effects = self.arbiter.handle(event)
        self._handled += 1
        self.observer.see(event, effects, whole=self._handled % self._whole_every == 0)
        for effect in effects:
            match effect:
                case Granted(lease_id=lease_id) if lease_id in self.actors:
                    self.actors[lease_id].is_open = True
                    self._let_in(self.actors[lease_id])
                case CloseGate(lease_id=lease_id) if lease_id in self.actors:
                    self.actors[lease_id].is_open = False
                case Suspend():
                    self._suspend(effect)
                case Resume():
                    self.swaps["resume"] += 1
                    self.at(
                        self.now + self._swap_ms(self.observer.leases[effect.lease_id].saved), self._restored(effect)
                    )
                case WakeAt(at_ms=at_ms):
                    self._wake = at_ms
                case _:
                    pass
        return effects

    # -- kernels ---------------------------------------------------------------------------------------------------------------------

    def _start(self, actor: Actor) -> None:
        self.actors[actor.spec.lease_id] = actor
        self.send(LeaseRequested(at_ms=self.now, spec=actor.spec))
        self.send(Attached(at_ms=self.now, lease_id=actor.spec.lease_id, gated=actor.spec.gated))
        self._next_cell(actor)

    def _next_cell(self, actor: Actor) -> None:
        actor.left_ms, actor.wanted_ms, actor.asks = actor.cell_ms(), self.now, True
        actor.number += 1
        passes = actor.quiet_ms > 0 and (actor.is_open or not actor.spec.gated)
        if passes and self.state(actor) is LeaseState.RESIDENT:
            self._let_in(actor)
            if actor.is_open:
                return
        self.send(Wanted(at_ms=self.now, lease_id=actor.spec.lease_id))

    def _ask_again(self, actor: Actor) -> None:
        if actor.began_ms is None and actor.left_ms > 0:
            self.send(Wanted(at_ms=self.now, lease_id=actor.spec.lease_id))

    def _let_in(self, actor: Actor) -> None:
        """The gate opens: the cell begins, or continues where it was interrupted."""
        if actor.left_ms == 0 or actor.began_ms is not None:
            return
        actor.began_ms = self.now
        if actor.asks:
            actor.asks = False
            actor.waits_ms.append(self.now - actor.wanted_ms)
        if not self.observer.leases[actor.spec.lease_id].busy:
            self.at(self.now, lambda: self._begin(actor))
        self._end_later(actor)

    def _begin(self, actor: Actor) -> None:
        if actor.began_ms is not None:
            self.send(BusyChanged(at_ms=self.now, lease_id=actor.spec.lease_id, busy=True))

    def _end_later(self, actor: Actor) -> None:
        began = actor.began_ms

        def end() -> None:
            if actor.began_ms == began and began is not None:
                self._end(actor)

        if actor.left_ms < FOR_EVER:
            self.at(self.now + actor.left_ms, end)

    def _end(self, actor: Actor) -> None:
        self._stop(actor)
        actor.left_ms = 0
        actor.cells -= 1
        if actor.quiet_ms == 0:
            self.send(BusyChanged(at_ms=self.now, lease_id=actor.spec.lease_id, busy=False))
        else:
            self._rest_later(actor)
        if actor.cells <= 0:
            del self.actors[actor.spec.lease_id]
            self.ended.append(actor)
            self.send(LeaseReleased(at_ms=self.now, lease_id=actor.spec.lease_id))
            return
        self.at(self.now + actor.gap_ms(), lambda: self._next_cell(actor))

    def _rest_later(self, actor: Actor) -> None:
        number = actor.number

        def rest() -> None:
            if actor.number == number and actor.spec.lease_id in self.actors:
                self.send(BusyChanged(at_ms=self.now, lease_id=actor.spec.lease_id, busy=False))

        self.at(self.now + actor.quiet_ms, rest)

    def _stop(self, actor: Actor) -> None:
        if actor.began_ms is not None:
            actor.ran_ms += self.now - actor.began_ms
            actor.left_ms -= self.now - actor.began_ms if actor.left_ms < FOR_EVER else 0
            actor.began_ms = None

    # -- the driver --------------------------------------------------------------------------------------------------------------------

    def _suspend(self, effect: Suspend) -> None:
        self.swaps["preempt" if effect.preempt else "suspend"] += 1
        actor = self.actors.get(effect.lease_id)
        if actor is not None:
            actor.suspends += 1
            actor.is_open = False
        if actor is not None and actor.reaches_ms is not None:
            self._bar(actor, effect)
            return
        if actor is not None:
            actor.preempted += effect.preempt
            self._stop(actor)
            if actor.left_ms > 0 and not effect.preempt:  # a cell was about to begin, so its gate asks again
                self.at(self.now, lambda: self._ask_again(actor))
        mib = self.observer.leases[effect.lease_id].held
        self.at(self.now + self._swap_ms(mib), self._suspended(effect, SuspendOutcome.SAVED, mib))

    def _bar(self, actor: Actor, effect: Suspend) -> None:
        """Its cell cannot reach the GPU, so it continues without room and counts as idle until it wants the GPU."""
        reaches_ms, actor.reaches_ms = actor.reaches_ms or 0, None

        def rest() -> None:
            self.send(BusyChanged(at_ms=self.now, lease_id=actor.spec.lease_id, busy=False))

        def reach() -> None:
            self._stop(actor)
            actor.wanted_ms, actor.asks = self.now, True
            self.send(Wanted(at_ms=self.now, lease_id=actor.spec.lease_id))

        self.at(self.now, rest)
        self.at(self.now + 1, self._suspended(effect, SuspendOutcome.NOTHING_TO_SAVE, 0))
        if reaches_ms < FOR_EVER:
            self.at(self.now + 2 + reaches_ms, reach)

    def _suspended(self, effect: Suspend, outcome: SuspendOutcome, mib: int) -> Callable[[], None]:
        def suspended() -> None:
            self.send(
                SuspendFinished(
                    at_ms=self.now,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=outcome,
                    saved_mib=mib,
                )
            )

        return suspended

    def _restored(self, effect: Resume) -> Callable[[], None]:
        def restored() -> None:
            self.send(
                ResumeFinished(
                    at_ms=self.now,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=ResumeOutcome.RESTORED,
                )
            )

        return restored

    def state(self, actor: Actor) -> LeaseState | None:
        """Return the state of the actor's lease; None: it has ended."""
        view = self.arbiter.lease(actor.spec.lease_id)
        return None if view is None else view.state
