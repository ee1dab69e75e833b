"""Which leases to suspend for a waiting one.

Idle leases come first, cheapest first (`victim_cost`), and none is taken whose memory is not needed. Busy leases are taken only where the
pool preempts, and only those that the beneficiary precedes (`fairness`): the lowest priority first, then the one furthest ahead of its
share. Busy leases that leave at the end of a cell are possible victims in any pool (`yielding`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.books.records import OccupancyKind, VictimRanking, YieldCandidates
from fractional_gpu.core.rules.eligibility import lacks_device, steps_aside, suspendable_from_ms
from fractional_gpu.core.rules.fairness import goes_before_from_ms
from fractional_gpu.core.rules.victim_cost import (
    busy_candidates,
    suspend_cost,
    victim_ranking,
    yield_candidates,
)

__all__ = ["Victims"]


class Victims:
    """The candidates on each device in one pass. `recheck_ms`: when time alone adds one."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.recheck_ms: int | None = None

    def recheck_at(self, at_ms: int) -> None:
        """Note a future time at which the candidates change."""
        if at_ms > self._books.now_ms and (self.recheck_ms is None or at_ms < self.recheck_ms):
            self.recheck_ms = at_ms

    def may_preempt_busy(self, lease: Lease) -> bool:
        """Return whether the lease may preempt any busy lease."""
        pool = self._books.policy(lease)
        if lease.is_growing:
            return False
        if pool.preempt_equals or not pool.preempt_priorities:
            return pool.preempt_equals
        return lease.spec.priority > self._books.accounts.lowest_priority[lease.spec.pool]

    def never_leaves(self, lease: Lease) -> bool:
        """Return whether the lease leaves for no other lease, even when idle."""
        return lease.is_unsuspendable or lease.pinned_until_ms > self._books.now_ms or lacks_device(self._books, lease)

    def may_leave(self, lease: Lease) -> bool:
        """Return whether the lease is idle and may be suspended now."""
        if lease.occupancy is not OccupancyKind.IDLE or lacks_device(self._books, lease):
            return False
        from_ms = suspendable_from_ms(self._books.policy(lease), lease)
        if from_ms is not None and from_ms > self._books.now_ms:
            self.recheck_at(from_ms)
        return from_ms is not None and from_ms <= self._books.now_ms

    # -- choice ----------------------------------------------------------------------------------------------------------

    def choose(
        self,
        device_id: str,
        short_mib: int,
        beneficiary: Lease,
        taken: set[str],
        also: Sequence[Lease] = (),
        *,
        busy: bool,
        host_mib: int | None = None,
        between_cells: bool = False,
    ) -> tuple[Lease, ...] | None:
        """Return leases whose memory covers the shortage, each of them needed; None if there are not enough.

        Idle leases that `host_mib` of host memory suffice for are enough if possible; otherwise idle leases beyond that are taken, too.
        `busy` adds leases that may be preempted, `between_cells` those that may be asked to leave at the end of a cell.
        """
        if short_mib <= 0:
            return ()
        found = self._ranks(device_id)
        # Two attempts: idle leases that host memory suffices for, then all idle ones, so that the shortage of host memory is reported.
        if self._is_too_little(found, short_mib, beneficiary, busy=busy, between_cells=between_cells):
            return None
        able = partial(self._candidates, found, beneficiary, busy=busy, between_cells=between_cells)
        chosen, too_large = _enough(able(), short_mib, {*taken, beneficiary.lease_id}, also, host_mib)
        if not chosen and too_large:
            chosen, _ = _enough(able(), short_mib, {*taken, beneficiary.lease_id}, also, None)
        return chosen or None

    def _is_too_little(
        self, found: VictimRanking, short_mib: int, beneficiary: Lease, *, busy: bool, between_cells: bool
    ) -> bool:
        """Return whether all candidates together fall short. That is the most frequent outcome, and known from totals."""
        short_mib -= found.ready_mib
        if between_cells:
            return short_mib > 0 and self._yielders(found, beneficiary).mib < short_mib
        return not busy and short_mib > 0

    def _candidates(
        self, found: VictimRanking, beneficiary: Lease, *, busy: bool, between_cells: bool
    ) -> Iterator[Lease]:
        for lease in found.ready:
            if lease.occupancy is OccupancyKind.IDLE and (lease.gate.ticket is None or steps_aside(lease, beneficiary)):
                yield lease
        if between_cells:
            yield from self._yielders(found, beneficiary).leases
        elif busy:
            yield from self._preemptible(found, beneficiary)

    def _yielders(self, found: VictimRanking, beneficiary: Lease) -> YieldCandidates:
        """Return the busy leases that may be asked to leave at the end of a cell, those asked already first."""
        known = yield_candidates(self._books, found, beneficiary.spec.priority)
        if known.next_ms is not None:
            self.recheck_at(known.next_ms)
        return known

    def idle_victims(self, device_id: str) -> list[Lease]:
        """Return the idle leases of the device that may be suspended, cheapest first; some may have begun to leave in this pass."""
        return self._ranks(device_id).ready

    def _ranks(self, device_id: str) -> VictimRanking:
        found = victim_ranking(self._books, self._books.devices[device_id])
        if found.next_ready_ms is not None and (self.recheck_ms is None or found.next_ready_ms < self.recheck_ms):
            self.recheck_at(found.next_ready_ms)
        return found

    def _preemptible(self, ranked: VictimRanking, beneficiary: Lease) -> list[Lease]:
        """Return the busy leases that may be preempted for the beneficiary now, in the order of choice."""
        books, found = self._books, []
        for from_ms, lease in busy_candidates(books, ranked):
            before_ms = goes_before_from_ms(books, beneficiary, lease)
            if before_ms is None:
                continue
            if max(before_ms, from_ms) <= books.now_ms:
                owner, own = books.share(lease)
                found.append((lease.spec.priority, -owner, -own, suspend_cost(books, lease), lease.lease_id, lease))
            else:
                self.recheck_at(max(before_ms, from_ms))
        return [lease for *_, lease in sorted(found, key=lambda one: one[:-1])]


def _enough(
    able: Iterator[Lease], short_mib: int, taken: set[str], also: Sequence[Lease], host_mib: int | None
) -> tuple[tuple[Lease, ...], bool]:
    """Return the first leases that cover the shortage, or none, and whether one was left out for want of host memory."""
    chosen: list[Lease] = []
    room, too_large = 0, False
    for other in able:
        if other.lease_id in taken or other in also:
            continue
        if too_large and other.busy:
            break  # a busy lease is not preempted because host memory is too short for an idle one
        if host_mib is not None:
            need_mib = other.host_need_mib
            if need_mib > host_mib:
                too_large = True
                continue
            host_mib -= need_mib
        chosen.append(other)
        room += other.held_mib
        if room >= short_mib:
            return tuple(_without_spare(chosen, room - short_mib)), too_large
    return (), too_large


def _without_spare(chosen: list[Lease], spare_mib: int) -> list[Lease]:
    """Return the leases without those that fit into what is to spare, dropping the last (dearest) first."""
    needed = []
    for lease in reversed(chosen):
        if lease.held_mib <= spare_mib:
            spare_mib -= lease.held_mib
        else:
            needed.append(lease)
    return needed[::-1]
