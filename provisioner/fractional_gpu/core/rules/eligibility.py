"""Where a lease may go, when it may be suspended for others, and which leases cannot be suspended at all."""

from collections.abc import Iterable

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec, Sharing


def eligible_devices(books: Books, pool: PoolSpec, lease: Lease) -> tuple[str, ...]:
    """Return the devices the lease may go to now.

    Saved state goes home, even if its home has left the pool. Where the pool moves leases and has enough devices like its home, it may go
    to those, too, and its home comes first. State that was saved from devices of several kinds only goes home. A device that drains or
    is lost admits no lease. None goes to a device that it is not allowed on, not even to its home.
    """
    allowed = allowed_of(pool, lease.spec)
    if lease.state is not LeaseState.SUSPENDED:
        bound = lease.bound_ids
        return tuple(one for one in allowed if _admits(books, one) and (not bound or one in bound))
    homes = tuple(device_id for device_id in lease.home_ids if device_id in books.devices)
    if not homes or len(homes) < len(lease.home_ids):
        return ()  # a device that its state came from is unknown here: a restore elsewhere could kill the process
    kinds = {books.devices[device_id].spec.name for device_id in homes}
    moves = pool.may_move and len(kinds) == 1 and not any(books.devices[home].spec.why_no_move for home in homes)
    like = tuple(
        device_id
        for device_id in (allowed if moves else ())
        if device_id not in homes and _admits(books, device_id) and books.devices[device_id].spec.name in kinds
    )
    only = lease.spec.allowed_devices
    home = tuple(one for one in homes if _admits(books, one) and (not only or one in only))
    # A home that has left the pool is used only where the pool alone has too few devices.
    stays = tuple(device_id for device_id in home if device_id in pool.devices)
    return (*stays, *like) if like and len(stays) + len(like) >= lease.count else home


def other_devices(books: Books, lease: Lease) -> tuple[str, ...]:
    """Return the devices like its own to which a resident lease could be moved."""
    pool = books.policy(lease)
    here = books.devices.get(lease.device_id or "")
    if here is None or here.lost or not pool.may_move or here.spec.why_no_move:
        return ()
    return tuple(
        device_id
        for device_id in allowed_of(pool, lease.spec)
        if device_id not in lease.device_ids
        and _admits(books, device_id)
        and books.devices[device_id].spec.name == here.spec.name
    )


def allowed_of(pool: PoolSpec, spec: LeaseSpec) -> tuple[str, ...]:
    """Return the devices of the pool that the lease may ever go to, in the pool's order."""
    if not spec.allowed_devices:
        return pool.devices
    return tuple(device_id for device_id in pool.devices if device_id in spec.allowed_devices)


def _admits(books: Books, device_id: str) -> bool:
    device = books.devices.get(device_id)
    return device is not None and not device.lost and not device.draining


def lacks_device(books: Books, lease: Lease) -> bool:
    """Return whether a device of the lease is missing or lost, so that nothing can be saved from it."""
    for device_id in lease.device_ids:
        device = books.devices.get(device_id)
        if device is None or device.lost:
            return True
    return not lease.device_ids


def suspendable_from_ms(pool: PoolSpec, lease: Lease) -> int | None:
    """Return when a resident, idle lease may be suspended for others; None while it is busy or cannot be saved.

    A lease is left alone while it is pinned, after a failed suspend, and until it has had a chance to run. One whose next cell waits at
    its closed gate counts as idle once its minimum residency is over. The caller checks its devices (`lacks_device`).
    """
    if lease.is_working or lease.is_unsuspendable:
        return None
    chance_ms = 0 if lease.has_run and lease.gate.ticket is None else lease.since_ms + max(1, pool.min_residency_ms)
    return max(lease.retries.suspend_after_ms, chance_ms, lease.pinned_until_ms)


def steps_aside(lease: Lease, beneficiary: Lease) -> bool:
    """Return whether an idle lease leaves for the beneficiary. One whose next cell waits leaves only for a ticket that precedes it."""
    place, ticket = lease.gate.ticket, beneficiary.ticket
    if place is None or ticket is None:
        return place is None
    return (-beneficiary.spec.priority, ticket.order) < (-lease.spec.priority, place.order)


# -- suspendability ----------------------------------------------------------------------------------------------------
# Which leases cannot be suspended, because their state cannot be saved.
#
# The reason may be the process (the driver, or the kernel's extension, said that it cannot be checkpointed), the device (MIG, an old
# driver) or the pool (MPS and MIG share devices without checkpoints). It is one sentence, which status and refusals repeat. It is kept on
# the lease and renewed when one of the three changes; the choice of victims reads `Lease.is_unsuspendable` only.


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
