"""Where a lease may go, and when it may be suspended for others."""

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.books.records import Reason
from fractional_gpu.core.model import LeaseState, PoolSpec

__all__ = ["Reason", "eligible_devices", "lacks_device", "other_devices", "steps_aside", "suspendable_from_ms"]


def eligible_devices(books: Books, pool: PoolSpec, lease: Lease) -> tuple[str, ...]:
    """Return the devices the lease may go to now.

    Saved state goes home, even if its home has left the pool. Where the pool moves leases and has enough devices like its home, it may go
    to those, too, and its home comes first. State that was saved from devices of several kinds only goes home. A device that drains or
    is lost admits no lease.
    """
    if lease.state is not LeaseState.SUSPENDED:
        return tuple(device_id for device_id in pool.devices if _admits(books, device_id))
    homes = tuple(device_id for device_id in lease.home_ids if device_id in books.devices)
    if not homes or len(homes) < len(lease.home_ids):
        return ()
    kinds = {books.devices[device_id].spec.name for device_id in homes}
    like = tuple(
        device_id
        for device_id in (pool.devices if pool.may_move and len(kinds) == 1 else ())
        if device_id not in homes and _admits(books, device_id) and books.devices[device_id].spec.name in kinds
    )
    home = tuple(device_id for device_id in homes if _admits(books, device_id))
    stays = tuple(device_id for device_id in home if device_id in pool.devices)
    return (*stays, *like) if like and len(stays) + len(like) >= lease.count else home


def other_devices(books: Books, lease: Lease) -> tuple[str, ...]:
    """Return the devices like its own to which a resident lease could be moved."""
    pool = books.policy(lease)
    here = books.devices.get(lease.device_id or "")
    if here is None or here.lost or not pool.may_move:
        return ()
    return tuple(
        device_id
        for device_id in pool.devices
        if device_id not in lease.device_ids
        and _admits(books, device_id)
        and books.devices[device_id].spec.name == here.spec.name
    )


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
