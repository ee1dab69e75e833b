"""Which leases to suspend for a waiting one, and what that costs.

Idle leases come first, cheapest first (`suspend_cost`), and none is taken whose memory is not needed. Busy leases are taken only where the
pool preempts, and only those that the beneficiary precedes (`fairness`): the lowest priority first, then the one furthest ahead of its
share. Busy leases that leave at the end of a cell are possible victims in any pool (`yielding`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Device, Lease, OccupancyKind, VictimRanking, YieldCandidates
from fractional_gpu.core.rules.eligibility import lacks_device, steps_aside, suspendable_from_ms
from fractional_gpu.core.rules.fairness import goes_before_from_ms, had_residency_ms, preemptible_from_ms, swap_ms
from fractional_gpu.core.rules.likelihood import next_cell_in_ms

# -- victim cost -------------------------------------------------------------------------------------------------------
# Which leases of a device may be suspended, cheapest first: kept between decisions, and computed anew only where something changed.
#
# The cost of a suspend is the time that the swap takes (dearer where it takes much of the host memory that is left), divided by the time
# until the lease is expected to run something again. Costs within about a third of each other count as equal; then the least recently used
# lease comes first.
#
# Kept with them: the busy leases of the device, and when each has had its minimum residency. That depends only on the lease and on how
# long swaps take, so it is computed anew only for leases that changed, or after a swap was learnt from.


_COST_HOLDS_MS = 5_000  # a computed cost is used for this long
_RENEWED_AHEAD_MS = 1_000  # between decisions, costs are renewed so long before they are out of date
_KEPT_MS = 10_000  # a device's ranking is kept up to date for so long after its last use


def suspend_cost(books: Books, lease: Lease) -> int:
    """Return the cost of suspending the lease, in steps of about a third."""
    if lease.cost_until_ms <= books.now_ms:
        lease.cost, lease.cost_until_ms = _step(_cost(books, lease)), books.now_ms + _COST_HOLDS_MS
    return lease.cost


def _cost(books: Books, lease: Lease) -> int:
    need_mib = lease.host_need_mib
    dear_milli = 1000 + 1000 * need_mib // max(1, books.host_left_mib - need_mib)
    # The less host memory would be left, the dearer: up to ten times, so that small leases are taken first when it is short.
    return swap_ms(books, lease) * min(dear_milli, 10_000) * 1000 // max(1, next_cell_in_ms(books, lease))


def _step(cost: int) -> int:
    """Return a number that is the same for costs within about a third of each other."""
    bits = cost.bit_length()
    return 2 * bits + (cost >> (bits - 2) & 1) if bits > 1 else bits


def victim_ranking(books: Books, device: Device) -> VictimRanking:
    """Return the ranking of the device, up to date; some of its leases may have begun to leave in this pass."""
    found, now_ms = device.victim_ranking, books.now_ms
    if found is None:
        found = device.victim_ranking = VictimRanking(
            changed=dict(device.holders), swaps_learnt=books.forecasts.swaps_learnt
        )
    if (
        found.changed
        or now_ms >= found.costs_until_ms
        or (found.next_ready_ms is not None and now_ms >= found.next_ready_ms)
    ):
        _renew(books, device, found)
    found.last_used_ms = now_ms
    return found


def busy_candidates(books: Books, found: VictimRanking) -> Collection[tuple[int, Lease]]:
    """Return the busy leases on the device of this ranking that can be saved, and when each has had its minimum residency."""
    if found.swaps_learnt != books.forecasts.swaps_learnt:
        _renew_working(books, found)
    return found.busy.values()


def yield_candidates(books: Books, found: VictimRanking, priority: int) -> YieldCandidates:
    """Return the busy leases that may be asked to leave for a ticket of this priority: those asked before, then by priority and cost."""
    leases, now_ms = busy_candidates(books, found), books.now_ms
    if found.highest_priority > priority:
        return _yielders(books, [one for one in leases if one[1].spec.priority <= priority])
    known = found.yield_candidates
    if known is None or known.costs_until_ms <= now_ms or (known.next_ms is not None and known.next_ms <= now_ms):
        known = found.yield_candidates = _yielders(books, leases)
    return known


def _yielders(books: Books, leases: Collection[tuple[int, Lease]]) -> YieldCandidates:
    ready, later_ms = _by_residency(books, leases)
    order = sorted(
        [
            (not lease.gate.closed, lease.spec.priority, suspend_cost(books, lease), lease.lease_id)
            for lease in ready.values()
        ]
    )
    return YieldCandidates(
        leases=[ready[lease_id] for *_, lease_id in order],
        mib=sum([lease.held_mib for lease in ready.values()]),
        costs_until_ms=min([lease.cost_until_ms for lease in ready.values()], default=books.now_ms + _COST_HOLDS_MS),
        next_ms=min(later_ms, default=None),
    )


def _by_residency(books: Books, leases: Collection[tuple[int, Lease]]) -> tuple[dict[str, Lease], list[int]]:
    """Return the leases that may be asked to leave at the end of their cells now, and when each of the others may."""
    now_ms, ready, later_ms = books.now_ms, dict[str, Lease](), list[int]()
    for residency_ms, lease in leases:
        from_ms = lease.gate.open_until_ms if lease.gate.open_until_ms > residency_ms else residency_ms  # noqa: FURB136 - computed for every lease
        if from_ms <= now_ms:
            ready[lease.lease_id] = lease
        else:
            later_ms.append(from_ms)
    return ready, later_ms


def _renew_working(books: Books, found: VictimRanking) -> None:
    """Compute all residencies anew, after swaps are expected to take longer, or shorter, than before."""
    found.swaps_learnt, known = books.forecasts.swaps_learnt, found.yield_candidates
    found.busy.update([(one, (had_residency_ms(books, lease), lease)) for one, (_, lease) in found.busy.items()])
    if known is not None:
        ready, later_ms = _by_residency(books, found.busy.values())
        same = len(ready) == len(known.leases) and all(lease.lease_id in ready for lease in known.leases)
        found.yield_candidates = replace(known, next_ms=min(later_ms, default=None)) if same else None


def renew_rankings(books: Books) -> None:
    """Bring the rankings that were used lately up to date between two decisions, so that the next decision need not."""
    now_ms = books.now_ms
    for device in books.devices.values():
        found = device.victim_ranking
        if found is None:
            continue
        if found.last_used_ms + _KEPT_MS < now_ms:
            device.victim_ranking = None
        elif found.changed or found.costs_until_ms <= now_ms + _RENEWED_AHEAD_MS:
            _renew(books, device, found, _RENEWED_AHEAD_MS)
        if found.swaps_learnt != books.forecasts.swaps_learnt:
            _renew_working(books, found)


def _renew(books: Books, device: Device, found: VictimRanking, ahead_ms: int = 0) -> None:
    """Rank the leases that changed, or whose time has come, anew."""
    now_ms, changed, later, ranked = books.now_ms, found.changed, found.later, []
    for one in found.ranked:
        lease = one[3]
        if lease.lease_id in changed:
            continue  # the changed one counts: it may be another lease, with the id of one that ended
        if lease.cost_until_ms <= now_ms + ahead_ms:
            lease.cost_until_ms = 0
            changed[lease.lease_id] = lease
        else:
            ranked.append(one)
    if later:
        due = {lease_id: lease for lease_id, (at_ms, lease) in later.items() if at_ms <= now_ms}
        changed.update({lease_id: lease for lease_id, lease in due.items() if lease_id not in changed})
    works = found.busy
    # A changed lease is in at most one of three places: ranked, suspendable later, or busy. It is put there anew.
    for lease_id, lease in changed.items():
        later.pop(lease_id, None)
        from_ms = device_suspendable_from_ms(books, device, lease)
        if from_ms is not None and from_ms <= now_ms:
            ranked.append((suspend_cost(books, lease), lease.last_active_ms, lease_id, lease))
        elif from_ms is not None:
            later[lease_id] = from_ms, lease
        at_work_ms = device_preemptible_from_ms(books, device, lease)
        if at_work_ms is not None:
            works[lease_id] = at_work_ms, lease
        else:
            works.pop(lease_id, None)
    found.yield_candidates = None
    found.highest_priority = max([lease.spec.priority for _, lease in works.values()], default=0)
    ranked.sort()  # no two have the same id, so leases are not compared
    found.ranked, found.ready = ranked, [one[3] for one in ranked]
    found.ready_mib = sum([lease.held_mib for lease in found.ready])
    found.next_ready_ms = min([at_ms for at_ms, _ in later.values()], default=None)
    found.costs_until_ms = min([one[3].cost_until_ms for one in ranked], default=now_ms + _COST_HOLDS_MS)
    changed.clear()


def device_suspendable_from_ms(books: Books, device: Device, lease: Lease) -> int | None:
    """Return when a lease on the device may be suspended; None if it is not there, is busy, or cannot be saved."""
    if lease.occupancy is not OccupancyKind.IDLE or device.lost or lease.lease_id not in device.holders:
        return None
    if len(lease.device_ids) > 1 and lacks_device(books, lease):
        return None
    return suspendable_from_ms(books.policy(lease), lease)


def device_preemptible_from_ms(books: Books, device: Device, lease: Lease) -> int | None:
    """Return when a busy lease on the device has had its minimum residency; None for any other, and if it cannot be saved."""
    if lease.occupancy is not OccupancyKind.BUSY or lease.lease_id not in device.holders:
        return None
    return preemptible_from_ms(books, lease)


# -- victims -----------------------------------------------------------------------------------------------------------


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
            fitting_first = sorted(able(), key=lambda one: one.busy and one.host_need_mib > (host_mib or 0))
            chosen, _ = _enough(iter(fitting_first), short_mib, {*taken, beneficiary.lease_id}, also, None)
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
    chosen, too_large, room = list[Lease](), list[Lease](), 0
    for other in able:
        if other.lease_id in taken or other in also:
            continue
        if other.busy and too_large and not too_large[0].busy:
            break  # a busy lease is not preempted because host memory is too short for an idle one
        if host_mib is not None:
            need_mib = other.host_need_mib
            if need_mib > host_mib:
                too_large.append(other)
                continue
            host_mib -= need_mib
        chosen.append(other)
        room += other.held_mib
        if room >= short_mib:
            return tuple(_without_spare(chosen, room - short_mib)), bool(too_large)
    return (), bool(too_large)


def _without_spare(chosen: list[Lease], spare_mib: int) -> list[Lease]:
    """Return the leases without those that fit into what is to spare, dropping the last (dearest) first."""
    needed = []
    for lease in reversed(chosen):
        if lease.held_mib <= spare_mib:
            spare_mib -= lease.held_mib
        else:
            needed.append(lease)
    return needed[::-1]
