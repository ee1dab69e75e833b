"""Whom to suspend for somebody who waits.

Idle leases first, least cost first (ties: least recently used), then nobody in vain. Busy ones only where the pool preempts, and only those
that the beneficiary goes before.
"""

from collections.abc import Sequence

from provisioner.core.records import Footing
from provisioner.core.scheduling import willing_from_ms
from provisioner.core.state import Books, Lease

__all__ = ["Victims"]


class Victims:
    """Candidates on each device, as they are in one pass. `hint_ms`: when somebody else becomes one by time alone."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._idle: dict[str, list[Lease]] = {}
        self.hint_ms: int | None = None

    def takes_busy(self, lease: Lease) -> bool:  # noqa: ARG002 - no pool preempts yet
        """Whether the lease could have busy ones preempted at all."""
        return False

    def cost(self, lease: Lease) -> int:  # noqa: ARG002 - all cost the same yet
        """What suspending the lease costs."""
        return 1

    def never_leaves(self, lease: Lease) -> bool:
        """Whether the lease does not step aside for anybody, idle or not."""
        return lease.staying or lease.pinned_until_ms > self._books.now_ms

    def choose(
        self, device_id: str, short_mib: int, beneficiary: Lease, taken: set[str], also: Sequence[Lease] = ()
    ) -> tuple[Lease, ...] | None:
        """Return leases whose room covers the shortage, none of them in vain; None if there are not enough."""
        if short_mib <= 0:
            return ()
        chosen: list[Lease] = []
        room = 0
        for other in self.willing(device_id):
            if room >= short_mib:
                break
            if other.footing is not Footing.RESTING or other.lease_id in taken or other is beneficiary or other in also:
                continue
            chosen.append(other)
            room += other.held_mib
        if room < short_mib:
            return None
        for other in list(reversed(chosen)):
            if room - other.held_mib >= short_mib:
                chosen.remove(other)
                room -= other.held_mib
        return tuple(chosen)

    def willing(self, device_id: str) -> list[Lease]:
        """Return who is idle on the device and may be suspended now, cheapest first."""
        willing = self._idle.get(device_id)
        if willing is None:
            willing, now_ms = [], self._books.now_ms
            for lease in self._books.devices[device_id].holders.values():
                if lease.footing is not Footing.RESTING:
                    continue
                from_ms = willing_from_ms(self._books.policy(lease), lease)
                if from_ms is None:
                    continue
                if from_ms <= now_ms:
                    willing.append(lease)
                else:
                    self.hint(from_ms)
            willing.sort(key=lambda lease: (self.cost(lease), lease.last_active_ms, lease.lease_id))
            self._idle[device_id] = willing
        return willing

    def hint(self, at_ms: int) -> None:
        """Time alone changes something then."""
        if self.hint_ms is None or at_ms < self.hint_ms:
            self.hint_ms = at_ms
