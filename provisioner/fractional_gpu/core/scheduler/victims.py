"""Which leases may leave a device for a waiting one, and what that costs.

Idle leases come first, cheapest first, and none is taken whose memory is not needed. Busy leases are taken only where the pool preempts,
and only those that the beneficiary precedes (`fairness`): the lowest priority first, then the one furthest ahead of its share. Busy leases
that leave at the end of a cell are possible victims in any pool.

The cost of a suspend is the time that the swap takes (dearer where it takes much of the host memory that is left), divided by the time
until the lease is expected to run something again. Costs within about a third of each other count as equal; then the least recently used
lease comes first.
"""

from collections.abc import Container, Iterable, Sequence

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, OccupancyKind
from fractional_gpu.core.rules.eligibility import lacks_device, steps_aside, suspendable_from_ms
from fractional_gpu.core.rules.fairness import goes_before_from_ms, preemptible_from_ms, swap_ms
from fractional_gpu.core.rules.likelihood import next_cell_in_ms


def suspend_cost(books: Books, lease: Lease) -> int:
    """Return the cost of suspending the lease, in steps of about a third."""
    need_mib = lease.host_need_mib
    # The less host memory would be left, the dearer: up to ten times, so that small leases are taken first when it is short.
    dear_milli = min(10_000, 1000 + 1000 * need_mib // max(1, books.host_left_mib - need_mib))
    cost = swap_ms(books, lease) * dear_milli * 1000 // max(1, next_cell_in_ms(books, lease))
    bits = cost.bit_length()
    return 2 * bits + (cost >> (bits - 2) & 1) if bits > 1 else bits


class Victims:
    """The candidates on each device in one pass, each list made once. `recheck_ms`: when time alone adds a candidate."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._idle: dict[str, list[Lease]] = {}
        self._busy: dict[str, list[tuple[int, Lease]]] = {}
        self.recheck_ms: int | None = None

    def recheck_at(self, at_ms: int) -> None:
        """Note a future time at which the candidates change."""
        if at_ms > self._books.now_ms and (self.recheck_ms is None or at_ms < self.recheck_ms):
            self.recheck_ms = at_ms

    def may_preempt_busy(self, lease: Lease) -> bool:
        """Return whether the lease may preempt any busy lease."""
        pool = self._books.policy(lease)
        return not lease.is_growing and (pool.preempt_equals or pool.preempt_priorities)

    def never_leaves(self, lease: Lease) -> bool:
        """Return whether the lease leaves for no other lease, even when idle."""
        return lease.is_unsuspendable or lease.pinned_until_ms > self._books.now_ms or lacks_device(self._books, lease)

    def may_leave(self, lease: Lease) -> bool:
        """Return whether the lease is idle and may be suspended now."""
        if lease.occupancy is not OccupancyKind.IDLE or lacks_device(self._books, lease):
            return False
        from_ms = suspendable_from_ms(self._books.policy(lease), lease)
        if from_ms is not None:
            self.recheck_at(from_ms)
        return from_ms is not None and from_ms <= self._books.now_ms

    def forget(self, device_ids: Iterable[str]) -> None:
        """List the candidates of devices again: a lease has come there, and may leave when it has had its chance to run."""
        for device_id in device_ids:
            self._idle.pop(device_id, None)
            self._busy.pop(device_id, None)

    # -- candidates ------------------------------------------------------------------------------------------------------

    def idle(self, device_id: str) -> list[Lease]:
        """Return the idle leases of the device that may be suspended now, cheapest first."""
        if device_id not in self._idle:
            able = [lease for lease in self._books.holders(device_id) if self.may_leave(lease)]
            order = {lease.lease_id: (suspend_cost(self._books, lease), lease.last_active_ms) for lease in able}
            self._idle[device_id] = sorted(able, key=lambda lease: (*order[lease.lease_id], lease.lease_id))
        return [
            lease for lease in self._idle[device_id] if lease.occupancy is OccupancyKind.IDLE
        ]  # some left meanwhile

    def _working(self, device_id: str) -> list[tuple[int, Lease]]:
        """Return the busy leases of the device that can be saved, and when each has had its minimum residency."""
        if device_id not in self._busy:
            found = [(preemptible_from_ms(self._books, lease), lease) for lease in self._books.holders(device_id)]
            self._busy[device_id] = [(from_ms, lease) for from_ms, lease in found if from_ms is not None]
        return [one for one in self._busy[device_id] if one[1].occupancy is OccupancyKind.BUSY]

    def _preemptible(self, device_id: str, beneficiary: Lease) -> list[Lease]:
        """Return the busy leases that may be preempted for the beneficiary now, in the order of choice."""
        books, found = self._books, []
        for from_ms, lease in self._working(device_id):
            before_ms = goes_before_from_ms(books, beneficiary, lease)
            if before_ms is None:
                continue
            self.recheck_at(max(before_ms, from_ms))
            if max(before_ms, from_ms) <= books.now_ms:
                owner, own = books.share(lease)
                found.append((lease.spec.priority, -owner, -own, suspend_cost(books, lease), lease.lease_id, lease))
        return [lease for *_, lease in sorted(found, key=lambda one: one[:-1])]

    def _yielding(self, device_id: str, beneficiary: Lease) -> list[Lease]:
        """Return the busy leases that may be asked to leave at the end of a cell, those asked already first."""
        books, found = self._books, []
        for residency_ms, lease in self._working(device_id):
            from_ms = max(residency_ms, lease.gate.open_until_ms)
            self.recheck_at(from_ms)
            if from_ms <= books.now_ms and lease.spec.priority <= beneficiary.spec.priority:
                cost = suspend_cost(books, lease)
                found.append((not lease.gate.closed, lease.spec.priority, cost, lease.lease_id, lease))
        return [lease for *_, lease in sorted(found, key=lambda one: one[:-1])]

    # -- choice ----------------------------------------------------------------------------------------------------------

    def choose(
        self,
        device_id: str,
        short_mib: int,
        beneficiary: Lease,
        taken: Container[str],
        also: Sequence[Lease] = (),
        *,
        busy: bool,
        host_mib: int,
        between_cells: bool = False,
    ) -> tuple[Lease, ...] | None:
        """Return leases whose memory covers the shortage, each of them needed; None if there are not enough.

        Idle leases that `host_mib` of host memory suffice for are enough if possible; otherwise idle leases beyond that are taken, too, so
        that the shortage of host memory is reported. `busy` adds leases that may be preempted, `between_cells` those that may be asked to
        leave at the end of a cell. Leases that are `taken`, or leave in any case (`also`), are not chosen.
        """
        if short_mib <= 0:
            return ()
        able = [lease for lease in self.idle(device_id) if steps_aside(lease, beneficiary)]
        if between_cells:
            able += self._yielding(device_id, beneficiary)
        elif busy:
            able += self._preemptible(device_id, beneficiary)
        able = [one for one in able if one.lease_id not in taken and one is not beneficiary and one not in also]
        if sum(lease.held_mib for lease in able) < short_mib:
            return None
        chosen = _enough(able, short_mib, host_mib)
        if not chosen:
            able.sort(
                key=lambda one: one.busy and one.host_need_mib > host_mib
            )  # of the busy ones, those that could be saved
            chosen = _enough(able, short_mib, None)
        return chosen or None


def _enough(able: Sequence[Lease], short_mib: int, host_mib: int | None) -> tuple[Lease, ...]:
    """Return the first leases that cover the shortage and that host memory suffices for (None: any), without spare ones; or none."""
    chosen: list[Lease] = []
    room_mib, idle_left_out = 0, False
    for lease in able:
        if lease.busy and idle_left_out:
            break  # a busy lease is not preempted because host memory is too short for an idle one
        if host_mib is not None and lease.host_need_mib > host_mib:
            idle_left_out |= not lease.busy
            continue
        if host_mib is not None:
            host_mib -= lease.host_need_mib
        chosen.append(lease)
        room_mib += lease.held_mib
        if room_mib >= short_mib:
            break
    if room_mib < short_mib:
        return ()
    spare_mib, needed = room_mib - short_mib, list[Lease]()
    for lease in reversed(chosen):  # the dearest first: one that fits into what is to spare can stay
        if lease.held_mib <= spare_mib:
            spare_mib -= lease.held_mib
        else:
            needed.append(lease)
    return tuple(needed[::-1])
