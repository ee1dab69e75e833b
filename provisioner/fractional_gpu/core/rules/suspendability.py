"""Which leases cannot be suspended, because their state cannot be saved.

The reason may be the process (the driver, or the kernel's extension, said that it cannot be checkpointed), the device (MIG, an old
driver) or the pool (MPS and MIG share devices without checkpoints). It is one sentence, which status and refusals repeat. It is kept on
the lease and renewed when one of the three changes; the choice of victims reads `Lease.is_unsuspendable` only.
"""

from collections.abc import Iterable

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.model import Sharing

__all__ = ["update_all_suspendability", "update_suspendability"]

_BY_SHARING = {
    Sharing.MPS: "its pool shares devices through MPS, whose clients the driver cannot checkpoint",
    Sharing.MIG: "its pool hands out MIG instances, on which the driver cannot checkpoint",
}
_UNSEEN = "no extension of ours tells what this kernel uses, and its pool suspends only kernels of which that is known"


def update_suspendability(books: Books, lease: Lease) -> None:
    """Renew the reason why the lease cannot be suspended, if there is one."""
    devices = [books.devices[device_id] for device_id in lease.device_ids if device_id in books.devices]
    by_device = next((device.spec.why_not for device in devices if device.spec.why_not), "")
    policy = books.policy(lease)
    unseen = "" if lease.spec.gated or policy.suspend_unseen else _UNSEEN
    books.mark_changed(lease)
    lease.unsuspendable_reason = lease.why_not or _BY_SHARING.get(policy.sharing, "") or by_device or unseen


def update_all_suspendability(books: Books, leases: Iterable[Lease]) -> None:
    """Renew those of several leases, and mark the devices that one lease has exclusively (MIG instances)."""
    whole = {device_id for pool in books.pools.values() if pool.sharing is Sharing.MIG for device_id in pool.devices}
    for device_id, device in books.devices.items():
        device.is_exclusive = device_id in whole
    for lease in leases:
        update_suspendability(books, lease)
        if lease.saved_mib:
            books.spread_saved(lease)
