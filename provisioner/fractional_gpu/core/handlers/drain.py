"""Draining a device: its leases leave as soon as possible. Pins do not protect from it, nor does minimum residency.

Idle leases are suspended at once. Busy ones follow when they become idle, or at once where the administrator says so. What cannot be saved
(its process, its device, host memory) stays until it can.
"""

from fractional_gpu.core.books.books import Device, Lease
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.eligibility import lacks_device

__all__ = ["DeviceDrains"]


class DeviceDrains:
    """Drains devices. `recheck_ms`: when time alone lets another lease leave."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self.recheck_ms: int | None = None

    def begin(self, device_id: str, *, evict_busy: bool) -> None:
        """Begin to drain a device."""
        device = self._books.devices.get(device_id)
        if device is None:
            return
        device.draining, device.evict_busy = True, evict_busy
        self._books.draining[device_id] = device
        for lease in list(device.holders.values()):
            self._record_begun(lease, device)

    def end(self, device_id: str) -> None:
        """End the drain of a device."""
        device = self._books.draining.pop(device_id, None)
        if device is not None:
            device.draining = device.evict_busy = False

    def _record_begun(self, lease: Lease, device: Device) -> None:
        when = "at once" if device.evict_busy or not lease.busy else "when its cell has ended"
        if lease.is_unsuspendable:
            when = f"when it can be: {lease.unsuspendable_reason}"
        sentence = f"an administrator empties device {device.spec.device_id}: the kernel is suspended {when}"
        self._changes.record(lease.lease_id, "drain.begun", sentence)

    def suspend_ready(self) -> None:
        """Begin the suspends that can begin now."""
        self.recheck_ms = None
        for device in list(self._books.draining.values()):
            for lease in list(device.holders.values()):
                if not self._changes.channel_free:
                    return
                if lease.host_need_mib > self._books.host_left_mib:
                    self._changes.ask_to_shrink(lease)
                if self._may_leave(lease, device):
                    what = "an administrator empties its device"
                    self._changes.begin_suspend(lease, "suspend.drain", what)

    def _may_leave(self, lease: Lease, device: Device) -> bool:
        if lease.state is not LeaseState.RESIDENT or lease.is_unsuspendable or lacks_device(self._books, lease):
            return False
        if lease.busy and not device.evict_busy:
            return False
        if lease.retries.suspend_after_ms > self._changes.now_ms:
            if self.recheck_ms is None or lease.retries.suspend_after_ms < self.recheck_ms:
                self.recheck_ms = lease.retries.suspend_after_ms
            return False
        return lease.host_need_mib <= self._books.host_left_mib
