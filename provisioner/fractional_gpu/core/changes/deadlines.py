"""When time alone changes something for a lease: one heap for all leases, brought up to date with those that changed.

An entry of the heap counts only while it agrees with its lease (`Lease.due_ms`); others are dropped when they come up. Leases whose time
has come and that could not be served yet (the swap channel is in use, host memory is short) are `ripe`, and need no alarm.
"""

from heapq import heapify, heappop, heappush

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.eligibility import lacks_device, suspendable_from_ms

__all__ = ["Deadlines", "idle_due_ms"]

_SPARE = 4  # entries per lease, before the heap is built anew


def idle_due_ms(books: Books, lease: Lease) -> int | None:
    """Return when an idle lease is suspended though no ticket needs its room; None: never, or nothing can be saved."""
    if lease.busy or lease.gate.ticket is not None or lease.state is not LeaseState.RESIDENT:
        return None
    pool = books.policy(lease)
    if pool.idle_after_ms is None:
        return None
    willing_ms = suspendable_from_ms(pool, lease)
    if willing_ms is None or lacks_device(books, lease):
        return None
    return max(lease.last_active_ms + pool.idle_after_ms, willing_ms)


class Deadlines:
    """The heap. `ripe`: leases whose time has come."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._heap: list[tuple[int, int, Lease]] = []
        self._pushed = 0
        self.ripe: dict[str, Lease] = {}

    def refresh(self, *, at_end: bool = False) -> None:
        """Take changed leases, and the clock, into account; `at_end`: nothing more is done in this event."""
        now_ms = self._books.now_ms
        for lease in self._books.changed.values():
            at_ms = self._due_ms(lease, at_end=at_end)
            if at_ms is not None and at_ms <= now_ms:
                self.ripe[lease.lease_id] = lease
            else:
                self.ripe.pop(lease.lease_id, None)
                if at_ms is not None and at_ms != lease.due_ms:
                    self._push(at_ms, lease)
            lease.due_ms = at_ms
        self._books.changed.clear()
        heap = self._heap
        while heap and (heap[0][0] <= now_ms or heap[0][2].due_ms != heap[0][0]):
            at_ms, _, lease = heappop(heap)
            if lease.due_ms == at_ms:
                self.ripe[lease.lease_id] = lease

    def next_ms(self) -> int | None:
        """Return when the next lease is due."""
        return self._heap[0][0] if self._heap else None

    def _push(self, at_ms: int, lease: Lease) -> None:
        if len(self._heap) > 64 + _SPARE * len(self._books.leases):
            # Every change of a deadline leaves an outdated entry behind: build the heap anew from those that still count.
            self._heap = list({entry[2].number: entry for entry in self._heap if entry[2].due_ms == entry[0]}.values())
            heapify(self._heap)
        self._pushed += 1
        heappush(self._heap, (at_ms, self._pushed, lease))

    def _due_ms(self, lease: Lease, *, at_end: bool) -> int | None:
        idle_ms = idle_due_ms(self._books, lease)
        if idle_ms is not None and idle_ms != lease.announced_ms:
            due_ms, idle_ms = idle_ms, idle_ms - self._books.policy(lease).warn_before_ms
            if at_end and idle_ms <= self._books.now_ms < due_ms:
                idle_ms = self._books.now_ms + 1  # the warning is late: give it at the next tick
        times = [] if lease.expires_ms is None else [lease.expires_ms]
        if lease.ends_ms is not None:
            times.append(lease.ends_ms)
        if idle_ms is not None:
            times.append(idle_ms)
        if lease.retries.resume_paused:
            times.append(lease.retries.resume_after_ms)
        if lease.pinned_until_ms:
            times.append(lease.pinned_until_ms)
        if lease.state is LeaseState.UNATTACHED and lease.has_reservation and lease.hold_until_ms > self._books.now_ms:
            times.append(lease.hold_until_ms)
        return min(times) if times else None
