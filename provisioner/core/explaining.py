"""Why a ticket waits: the code at little cost after every pass, the sentence and the kernels in the way only when somebody reads it."""

from collections.abc import Sequence

from provisioner.core.model import FAILED, LeaseState
from provisioner.core.records import Footing, Lease, Ticket, Wait
from provisioner.core.scheduling import candidates
from provisioner.core.state import Books
from provisioner.core.units import format_memory

__all__ = ["cause", "destinations", "explain", "not_yet", "why"]


def explain(books: Books, lease: Lease, ticket: Ticket) -> Wait:
    """Say why the lease waits, as of the last pass over the queue."""
    bucket = lease.bucket
    if bucket is None:
        return not_yet(lease)
    if ticket.wait is not None and ticket.passes == books.passes:
        return ticket.wait
    if bucket.key.paused:
        return Wait("wait.retry", f"{lease.sentence}; it is tried again in a moment")
    if bucket.wait is not None and bucket.passes == books.passes:
        return bucket.wait
    return why(books, lease, destinations(books, lease), bucket.key.need_mib)


def destinations(books: Books, lease: Lease) -> tuple[str, ...]:
    """Return the devices on which its ticket can be served: the same for all in one bucket, but for those that grow where they are."""
    bucket = lease.bucket
    if bucket is not None and bucket.devices is not None:
        return bucket.devices
    if lease.grows:
        there = [books.devices[device_id] for device_id in lease.device_ids if device_id in books.devices]
        admits = len(there) == len(lease.device_ids) and not any(device.lost or device.draining for device in there)
        return lease.device_ids if admits else ()
    if bucket is None:
        return candidates(books, books.policy(lease), lease)
    key = (bucket.key.pool, bucket.key.where)
    known = books.destinations.get(key)
    if known is None:
        known = books.destinations[key] = candidates(books, books.policy(lease), lease)
    bucket.devices = known
    return known


def not_yet(lease: Lease) -> Wait:
    """Say why a ticket cannot be served whatever room there is: its lease is in an operation, in doubt, or has not started."""
    match lease.state:
        case LeaseState.SUSPENDING if lease.target_ids:
            return Wait("wait.own-suspend", "this kernel is being moved to another device")
        case LeaseState.SUSPENDING:
            return Wait("wait.own-suspend", "this kernel is being suspended; it comes back right after")
        case LeaseState.RESUMING:
            return Wait("wait.restoring", f"its {format_memory(lease.saved_mib)} are being brought back to the device")
        case LeaseState.QUARANTINED if lease.reason == FAILED:
            return Wait("wait.failed", lease.sentence)
        case LeaseState.QUARANTINED:
            return Wait(
                "wait.quarantine", "nobody knows for certain what state this kernel is in; it is being looked at again"
            )
        case _:
            return Wait("wait.no-process", "the kernel has not started yet")


def cause(books: Books, lease: Lease, devices: Sequence[str], need_mib: int) -> str:
    """Return the code of the reason why a ticket that fits nowhere, and that nobody idle can make room for, waits."""
    if not devices:
        return _nowhere(books, lease)
    free = possible = strangers = working = 0
    for device_id in devices:
        device = books.devices[device_id]
        free += device.free_mib >= need_mib
        possible += device.roomiest_mib >= need_mib
        strangers += device.stranger_mib > 0
        working += device.footing_count[Footing.WORKING]
    count = lease.count
    if free >= count:
        return "wait.older-ticket"
    if possible < count:
        return "wait.stranger" if strangers else "wait.too-large"
    if working:
        return "wait.busy-neighbour"
    holders = [other for device_id in devices for other in books.devices[device_id].holders.values()]
    if holders and all(other.staying for other in holders):
        return "wait.cannot-be-suspended"
    return "wait.unwilling-neighbour"


def _nowhere(books: Books, lease: Lease) -> str:
    if lease.spec.pool not in books.pools:
        return "wait.no-pool"
    possible = lease.home_ids or books.policy(lease).devices
    draining = [device_id for device_id in possible if device_id in books.devices and books.devices[device_id].draining]
    return "wait.device-draining" if draining else "wait.device-lost"


def why(books: Books, lease: Lease, devices: Sequence[str], need_mib: int) -> Wait:
    """Say the same with a sentence and the leases in the way."""
    reason, need = cause(books, lease, devices, need_mib), format_memory(need_mib)
    if lease.count > 1:
        need += f" on each of {lease.count} devices"
    free_mib = max([books.devices[device_id].free_mib for device_id in devices], default=0)
    short = f"{need} are needed, {format_memory(max(0, free_mib))} are free on the roomiest device"
    holders = [
        other for device_id in devices for other in books.devices[device_id].holders.values() if other is not lease
    ]
    blockers: tuple[str, ...] = ()
    match reason:
        case "wait.no-pool":
            sentence = f"pool {lease.spec.pool!r} is not configured any more: ask the administrator"
        case "wait.device-lost":
            sentence = f"{need} are needed, but no device that this kernel may use is there now"
        case "wait.device-draining":
            sentence = f"{need} are needed, but an administrator is emptying the device that this kernel may use"
        case "wait.older-ticket":
            sentence = f"{need} are needed; the room there is is kept for a kernel that has waited longer"
        case "wait.stranger":
            sentence = f"{short}; processes that hold no lease use the rest"
        case "wait.too-large":
            sentence = f"{need} are needed, more than any device that this kernel may use has"
        case "wait.busy-neighbour":
            blockers = _ids([other for other in holders if other.busy])
            kernels = "1 kernel is" if len(blockers) == 1 else f"{len(blockers)} kernels are"
            sentence = f"{short}; {kernels} running a cell"
        case "wait.cannot-be-suspended":
            stays, blockers = next((other.stays for other in holders), ""), _ids(holders)
            sentence = f"{short}; the kernels there cannot be suspended ({stays}): it waits until one ends"
        case _:
            sentence, blockers = f"{short}; the kernels there are idle but cannot be suspended just now", _ids(holders)
    return Wait(reason, sentence, blockers)


def _ids(holders: Sequence[Lease]) -> tuple[str, ...]:
    """Each once, also of one that is on several devices."""
    return tuple(dict.fromkeys([other.lease_id for other in holders]))
