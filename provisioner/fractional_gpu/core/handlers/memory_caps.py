"""The backstop: a lease that uses more of its device than its cap. Frameworks limit themselves; this is for what goes past them.

A moment over the cap is forgiven (`GRACE_MS`), and so is what rounding adds (`SLACK_MIB`). After that the kernel is told, once for each
time it goes over, and the pool's choice is carried out. It is no preemption: minimum residency does not protect from it.
"""

from fractional_gpu.core.books.books import Lease
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.effects import CapBreached
from fractional_gpu.core.model import Breach, LeaseState
from fractional_gpu.core.units import format_memory

__all__ = ["GRACE_MS", "SLACK_MIB", "MemoryCaps"]

GRACE_MS = 5000
SLACK_MIB = 16  # each process's use is rounded up

_WHAT_FOLLOWS = {
    Breach.WARN: "free something: other kernels may run out of memory because of it",
    Breach.SUSPEND: "it is suspended when it is idle, and comes back where all of it fits: free something, or ask for a larger share",
    Breach.KILL: "its processes on the device are ended, as this pool demands: ask for a larger share",
}


class MemoryCaps:
    """Watches the caps of resident leases."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._over: dict[str, Lease] = {}

    def measured(self, lease: Lease) -> bool:
        """Take a new measurement into account; return whether the lease went over its cap, or came back under it."""
        device = self._changes.books.devices.get(lease.device_id or "")
        capped = lease.state is LeaseState.RESIDENT and device is not None and not device.is_exclusive
        is_over = capped and lease.used_mib > _cap_mib(lease) + SLACK_MIB
        if is_over == (lease.lease_id in self._over):
            return False
        if is_over:
            self._over[lease.lease_id] = lease
            lease.over_since_ms, lease.over_told = self._changes.now_ms, False
        else:
            self._forget(lease)
        return True

    def enforce(self) -> list[Lease]:
        """Tell those that are over for too long; return the idle ones that are to be suspended for it."""
        due = []
        for lease in list(self._over.values()):
            if lease.state is not LeaseState.RESIDENT or self._changes.books.leases.get(lease.lease_id) is not lease:
                self._forget(lease)
            elif lease.over_since_ms is not None and lease.over_since_ms + GRACE_MS <= self._changes.now_ms:
                action = self._changes.books.policy(lease).breach
                self._report(lease, action)
                if action is Breach.SUSPEND and not lease.busy and not lease.is_unsuspendable:
                    due.append(lease)
        return due

    def due_ms(self) -> int | None:
        """Return when the next grace is over, if any is to come."""
        times = [lease.over_since_ms + GRACE_MS for lease in self._over.values() if lease.over_since_ms is not None]
        times += [lease.retry_ms for lease in self._over.values() if lease.over_told]
        return min((at_ms for at_ms in times if at_ms > self._changes.now_ms), default=None)

    def _report(self, lease: Lease, action: Breach) -> None:
        if lease.over_told:
            return
        lease.over_told = True
        used, cap = format_memory(lease.used_mib), format_memory(_cap_mib(lease))
        sentence = f"this kernel uses {used} of device memory, more than its cap of {cap}; {_WHAT_FOLLOWS[action]}"
        self._changes.record(lease.lease_id, f"breach.{action}", sentence)
        self._changes.effects.append(CapBreached(lease_id=lease.lease_id, action=action, sentence=sentence))
        if action is Breach.KILL:  # whoever survives it is over its cap anew
            lease.over_since_ms, lease.over_told = self._changes.now_ms, False

    def _forget(self, lease: Lease) -> None:
        self._over.pop(lease.lease_id, None)
        lease.over_since_ms, lease.over_told = None, False


def _cap_mib(lease: Lease) -> int:
    return lease.spec.reserve_mib * max(1, lease.spec.devices)
