"""Memory caps: a lease that uses more of its device than its cap.

Frameworks limit themselves; this acts on what allocates past their limits. An excess shorter than `GRACE_MS` is ignored, and so is what
rounding adds (`SLACK_MIB`). After that the kernel is informed, once for each excess, and the pool's choice (`Breach`) is carried out.
That is no preemption, so minimum residency does not protect from it.
"""

from dataclasses import dataclass

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


@dataclass(slots=True, eq=False)
class _Excess:
    """A lease over its cap, since when, and whether its kernel was informed."""

    lease: Lease
    since_ms: int
    reported: bool = False


class MemoryCaps:
    """Watches the caps of resident leases."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._over: dict[str, _Excess] = {}

    def measured(self, lease: Lease) -> bool:
        """Take a new measurement into account; return whether the lease went over its cap, or came back under it."""
        device = self._changes.books.devices.get(lease.device_id or "")
        capped = lease.state is LeaseState.RESIDENT and device is not None and not device.is_exclusive
        is_over = capped and lease.used_mib > _cap_mib(lease) + SLACK_MIB
        if is_over == (lease.lease_id in self._over):
            return False
        if is_over:
            self._over[lease.lease_id] = _Excess(lease, self._changes.now_ms)
        else:
            del self._over[lease.lease_id]
        return True

    def enforce(self) -> list[Lease]:
        """Report excesses whose grace is over; return the idle leases that are to be suspended for theirs."""
        due, leases = [], self._changes.books.leases
        for lease_id, excess in list(self._over.items()):
            lease = excess.lease
            if lease.state is not LeaseState.RESIDENT or leases.get(lease_id) is not lease:
                del self._over[lease_id]
            elif excess.since_ms + GRACE_MS <= self._changes.now_ms:
                action = self._changes.books.policy(lease).breach
                if not excess.reported:
                    self._report(excess, action)
                if action is Breach.SUSPEND and not lease.busy and not lease.is_unsuspendable:
                    due.append(lease)
        return due

    def due_ms(self) -> int | None:
        """Return when the next grace, or pause after a failed suspend, is over; None if there is none."""
        times = [excess.since_ms + GRACE_MS for excess in self._over.values()]
        times += [excess.lease.retries.suspend_after_ms for excess in self._over.values() if excess.reported]
        return min((at_ms for at_ms in times if at_ms > self._changes.now_ms), default=None)

    def _report(self, excess: _Excess, action: Breach) -> None:
        lease, excess.reported = excess.lease, True
        used, cap = format_memory(lease.used_mib), format_memory(_cap_mib(lease))
        sentence = f"this kernel uses {used} of device memory, more than its cap of {cap}; {_WHAT_FOLLOWS[action]}"
        self._changes.record(lease.lease_id, f"breach.{action}", sentence)
        self._changes.effects.append(CapBreached(lease_id=lease.lease_id, action=action, sentence=sentence))
        if action is Breach.KILL:  # a lease whose use does not fall has another grace, and is reported again
            excess.since_ms, excess.reported = self._changes.now_ms, False


def _cap_mib(lease: Lease) -> int:
    return lease.spec.reserve_mib * max(1, lease.spec.devices)
