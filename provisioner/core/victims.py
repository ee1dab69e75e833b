"""Whom to suspend for somebody who waits.

Idle leases first, those that cost least first, then nobody in vain. What one costs is the time that its swap takes, dearer where it
takes much of the host memory that is left, against the time until it is expected to run something again. Costs that are about the
same count as the same: then the least recently used goes. Busy ones are taken only where the pool preempts, and only those that the
beneficiary goes before (`fairness`): the lowest priority, then whoever is furthest ahead.
"""

from collections.abc import Iterator, Sequence

from provisioner.core.fairness import goes_before_from_ms, preemptible_from_ms, swap_ms
from provisioner.core.records import Device, Footing
from provisioner.core.scheduling import is_lost, willing_from_ms
from provisioner.core.state import Books, Lease

__all__ = ["Victims"]

_COST_HOLDS_MS = 5_000  # so long a cost that was worked out is good enough


class Victims:
    """Candidates on each device, as they are in one pass. `hint_ms`: when somebody else becomes one by time alone."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.hint_ms: int | None = None

    def hint(self, at_ms: int) -> None:
        """Time alone changes something then."""
        if at_ms > self._books.now_ms and (self.hint_ms is None or at_ms < self.hint_ms):
            self.hint_ms = at_ms

    def takes_busy(self, lease: Lease) -> bool:
        """Whether the lease could have busy ones preempted at all."""
        pool = self._books.policy(lease)
        if lease.grows:
            return False
        if pool.preempt_equals or not pool.preempt_priorities:
            return pool.preempt_equals
        return lease.spec.priority > min(self._books.accounts.priorities[lease.spec.pool])

    def never_leaves(self, lease: Lease) -> bool:
        """Whether the lease does not step aside for anybody, idle or not."""
        return lease.staying or lease.pinned_until_ms > self._books.now_ms or is_lost(self._books, lease)

    def may_leave(self, lease: Lease) -> bool:
        """Whether the lease is idle and may be suspended now."""
        if lease.footing is not Footing.RESTING or is_lost(self._books, lease):
            return False
        from_ms = willing_from_ms(self._books.policy(lease), lease)
        if from_ms is not None and from_ms > self._books.now_ms:
            self.hint(from_ms)
        return from_ms is not None and from_ms <= self._books.now_ms

    # -- cost ------------------------------------------------------------------------------------------------------------

    def cost(self, lease: Lease) -> int:
        """What suspending the lease costs, in steps of about a third."""
        now_ms = self._books.now_ms
        if lease.cost_until_ms <= now_ms:
            lease.cost, lease.cost_until_ms = _step(self._cost(lease)), now_ms + _COST_HOLDS_MS
        return lease.cost

    def _cost(self, lease: Lease) -> int:
        books, need_mib = self._books, lease.host_need_mib
        dear_milli = 1000 + 1000 * need_mib // max(1, books.host_left_mib - need_mib)
        gap_ms = books.forecasts.gap_left_ms(lease.lease_id, books.now_ms)
        return swap_ms(books, lease) * min(dear_milli, 10_000) * 1000 // max(1, gap_ms)

    # -- choice ----------------------------------------------------------------------------------------------------------

    def choose(
        self,
        device_id: str,
        short_mib: int,
        beneficiary: Lease,
        taken: set[str],
        also: Sequence[Lease] = (),
        *,
        host_mib: int | None = None,
    ) -> tuple[Lease, ...] | None:
        """Return leases whose room covers the shortage, none of them in vain; None if there are not enough.

        Of who rests, those for which `host_mib` of host memory suffice, if there are enough of them; else the others, too.
        """
        if short_mib <= 0:
            return ()
        chosen: list[Lease] = []
        room, left_mib, too_large = 0, host_mib, False
        for other in self._candidates(device_id, beneficiary):
            if other.lease_id in taken or other is beneficiary or other in also:
                continue
            if too_large and other.busy:
                break  # nobody is preempted because the host has no memory for one who rests
            if left_mib is not None:
                if other.host_need_mib > left_mib:
                    too_large = True
                    continue
                left_mib -= other.host_need_mib
            chosen.append(other)
            room += other.held_mib
            if room >= short_mib:
                break
        if room < short_mib:
            return self.choose(device_id, short_mib, beneficiary, taken, also) if too_large else None
        return tuple(_none_in_vain(chosen, room - short_mib))

    def _candidates(self, device_id: str, beneficiary: Lease) -> Iterator[Lease]:
        for lease in self.willing(device_id):
            if lease.footing is Footing.RESTING:
                yield lease
        if self.takes_busy(beneficiary):
            yield from self._preemptible(device_id, beneficiary)

    def willing(self, device_id: str) -> list[Lease]:
        """Return who is idle on the device and may be suspended now, cheapest first; some may have begun to leave in this pass."""
        device = self._books.devices[device_id]
        willing = device.willing
        if willing is None or device.willing_until_ms <= self._books.now_ms:
            willing = self._find_willing(device)
        if device.unwilling_until_ms is not None:
            self.hint(device.unwilling_until_ms)
        return willing

    def _find_willing(self, device: Device) -> list[Lease]:
        now_ms, soonest_ms = self._books.now_ms, None
        willing = []
        for lease in () if device.lost else device.holders.values():
            if lease.footing is not Footing.RESTING or (len(lease.device_ids) > 1 and is_lost(self._books, lease)):
                continue
            from_ms = willing_from_ms(self._books.policy(lease), lease)
            if from_ms is None:
                continue
            if from_ms <= now_ms:
                willing.append(lease)
            elif soonest_ms is None or from_ms < soonest_ms:
                soonest_ms = from_ms
        if len(willing) > 1:
            willing.sort(key=lambda lease: (self.cost(lease), lease.last_active_ms, lease.lease_id))
        device.willing, device.unwilling_until_ms = willing, soonest_ms
        device.willing_until_ms = (
            now_ms + _COST_HOLDS_MS if soonest_ms is None else min(soonest_ms, now_ms + _COST_HOLDS_MS)
        )
        return willing

    def _preemptible(self, device_id: str, beneficiary: Lease) -> list[Lease]:
        """Return who is busy on the device and may be preempted for the lease now."""
        books, found = self._books, []
        for lease in books.holders(device_id):
            if lease.footing is not Footing.WORKING:
                continue
            before_ms = goes_before_from_ms(books, beneficiary, lease)
            from_ms = preemptible_from_ms(books, lease) if before_ms is not None else None
            if before_ms is None or from_ms is None:
                continue
            if max(before_ms, from_ms) <= books.now_ms:
                owner, own = books.share(lease)
                found.append((lease.spec.priority, -owner, -own, self.cost(lease), lease.lease_id, lease))
            else:
                self.hint(max(before_ms, from_ms))
        return [lease for *_, lease in sorted(found, key=lambda one: one[:-1])]


def _step(cost: int) -> int:
    """Return a number that is the same for costs within about a third of each other."""
    bits = cost.bit_length()
    return 2 * bits + (cost >> (bits - 2) & 1) if bits > 1 else bits


def _none_in_vain(chosen: list[Lease], spare_mib: int) -> list[Lease]:
    """Return the leases without those, last ones first, whose room is not needed: so much is to spare."""
    needed = []
    for lease in reversed(chosen):
        if lease.held_mib <= spare_mib:
            spare_mib -= lease.held_mib
        else:
            needed.append(lease)
    return needed[::-1]
