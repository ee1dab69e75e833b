"""Early resumes: while host memory is short and a device has room, saved leases come back before they are wanted.

That happens only while no ticket waits, and for no more than host memory lacks. Leases whose own control group is short come first, then
the most recently active one, which is likely to run next. A lease that came back early is not saved again before host memory allows it.
"""

from fractional_gpu.core.books.books import Lease
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.eligibility import eligible_devices
from fractional_gpu.core.rules.limits import over_limit
from fractional_gpu.core.units import format_memory

__all__ = ["HostMemoryRelief"]


class HostMemoryRelief:
    """Begins early resumes."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def relieve(self) -> None:
        """Begin early resumes while host memory is short, swap channels are free and a saved lease fits on a device."""
        books = self._books
        while not books.waiting and self._changes.channel_free:
            excess_mib = books.host_saved_mib - books.host_budget_mib
            if excess_mib > 0:  # leases that are resuming leave host memory soon
                excess_mib -= sum(lease.saved_mib for lease in books.by_state[LeaseState.RESUMING].values())
            if (excess_mib <= 0 and not books.under_host_pressure) or not self._begin(excess_mib):
                return

    def _begin(self, excess_mib: int) -> bool:
        """Begin one early resume if possible; return whether it began."""
        for lease in self._order(any_lease=excess_mib > 0):
            device_ids = self._devices_for(lease)
            if device_ids and over_limit(self._books, lease, lease.milli) is None:
                why = "where its saved state lies" if lease.under_host_pressure else f"by {format_memory(excess_mib)}"
                sentence = f"host memory is short {why}, and a device has room: it comes back early"
                self._changes.resume_early(lease, device_ids, sentence)
                return True
        return False

    def _order(self, *, any_lease: bool) -> list[Lease]:
        now_ms = self._changes.now_ms
        saved = [
            lease
            for lease in self._books.by_state[LeaseState.SUSPENDED].values()
            if (any_lease or lease.under_host_pressure)
            and lease.retries.resume_after_ms <= now_ms
            and not lease.revoked
        ]
        return sorted(saved, key=lambda lease: (not lease.under_host_pressure, -lease.last_active_ms, lease.lease_id))

    def _devices_for(self, lease: Lease) -> tuple[str, ...]:
        """Return its home if there is room, else the allowed devices with the least room to spare; empty: none."""
        able = [
            device_id
            for device_id in eligible_devices(self._books, self._books.policy(lease), lease)
            if self._books.devices[device_id].free_mib >= lease.need_mib
        ]
        if lease.home_ids and all(device_id in able for device_id in lease.home_ids):
            return lease.home_ids
        able.sort(key=lambda device_id: (self._books.devices[device_id].free_mib, device_id))
        return tuple(able[: lease.count]) if len(able) >= lease.count else ()
