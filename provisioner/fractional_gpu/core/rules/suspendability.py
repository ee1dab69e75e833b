"""Who stays on its device: leases whose state cannot be saved are nobody's victims, and nobody tries again and again.

A lease stays because of its process (the driver, or its extension, said that it cannot be checkpointed), its device (MIG, an old
driver) or its pool (MPS and MIG share without checkpoints). The reason is one sentence, which status and refusals repeat. It is kept on the
lease and renewed when one of the three changes: who chooses victims looks at `Lease.staying` only.
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
    """Write down why the lease stays, if it does."""
    devices = [books.devices[device_id] for device_id in lease.device_ids if device_id in books.devices]
    by_device = next((device.spec.why_not for device in devices if device.spec.why_not), "")
    policy = books.policy(lease)
    unseen = "" if lease.spec.gated or policy.suspend_unseen else _UNSEEN
    books.mark_changed(lease)
    lease.unsuspendable_reason = lease.why_not or _BY_SHARING.get(policy.sharing, "") or by_device or unseen


def update_all_suspendability(books: Books, leases: Iterable[Lease]) -> None:
    """Do so for several, and say which devices one lease has as a whole."""
    whole = {device_id for pool in books.pools.values() if pool.sharing is Sharing.MIG for device_id in pool.devices}
    for device_id, device in books.devices.items():
        device.is_exclusive = device_id in whole
    for lease in leases:
        update_suspendability(books, lease)
        if lease.saved_mib:
            books.spread_saved(lease)
