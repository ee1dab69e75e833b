"""A move that an administrator asks for: an idle lease goes to another device of its pool, or stays, with the reason.

It begins at once or not at all: room that is kept for others on their way, or is being made for a ticket, is not taken, and where another
swap is under way whoever asked tries again. From then on it is a move like any other (`moving`).
"""

from provisioner.core.changes import Changes
from provisioner.core.model import LeaseState
from provisioner.core.moving import begin_move, kept_mib
from provisioner.core.records import Footing, Wait
from provisioner.core.revoked import REVOKED
from provisioner.core.scheduling import elsewhere
from provisioner.core.state import Lease
from provisioner.core.units import format_memory

__all__ = ["BUSY_CHANNEL", "move"]

BUSY_CHANNEL = "swap-channel"
"""The reason of a refusal that is over as soon as another kernel's swap is."""


def move(changes: Changes, lease: Lease, device_id: str | None) -> Wait | None:
    """Begin the move. Returns why the lease stays where it is, or None. Whether it can be suspended at all is asked before."""
    refused = REVOKED if lease.revoked else _not_movable(changes, lease)
    if refused is not None:
        return refused
    there = elsewhere(changes.books, lease)
    if device_id is not None and device_id not in there:
        return _not_there(changes, lease, device_id)
    chosen, most_mib = _roomiest(changes, (device_id,) if device_id is not None else there)
    if chosen is None or most_mib < lease.held_mib:
        left = (
            f"{format_memory(max(0, most_mib))} are free there" if device_id is not None else "no other device has them"
        )
        return Wait(
            "no-room", f"{format_memory(lease.held_mib)} are reserved for the kernel, and {left}: make room first"
        )
    if not changes.channel_free or changes.books.devices[chosen].footing_mib[Footing.LEAVING]:
        return Wait(BUSY_CHANNEL, "another kernel is being moved or saved just now: try again in a moment")
    begin_move(changes, lease, (chosen,), "move.asked", "an administrator has it go to another device")
    return None


def _not_movable(changes: Changes, lease: Lease) -> Wait | None:
    pool = changes.books.policy(lease)
    if lease.state is not LeaseState.RESIDENT:
        return Wait("not-resident", f"the kernel is {lease.state}: only one that is on a device can be moved")
    if lease.busy:
        return Wait("busy", "a cell is running: interrupt it, or try again when it has ended")
    if lease.count > 1:
        return Wait("several-devices", "the kernel has several devices, and only kernels on one are moved")
    if not pool.may_move:
        return Wait(
            "may-not-move",
            f"pool {pool.name!r} moves no kernels: its may_move is off, and is for drivers that can (580 or newer)",
        )
    if lease.ticket is not None:
        return Wait("grows", "the kernel waits for room to grow where it is: try again when it has it")
    return None


def _not_there(changes: Changes, lease: Lease, device_id: str) -> Wait:
    books = changes.books
    device, pool = books.devices.get(device_id), books.policy(lease)
    if device_id in lease.device_ids:
        return Wait("there-already", "the kernel is on that device already")
    if device is None or device_id not in pool.devices:
        return Wait("other-pool", f"that device is not one of pool {pool.name!r}: choose one of the pool's")
    if device.lost or device.draining:
        return Wait("device-closed", "that device is being emptied, or answers nothing: choose another one")
    return Wait("other-kind", "that device is of another kind, and saved state comes back on a like one only")


def _roomiest(changes: Changes, devices: tuple[str, ...]) -> tuple[str | None, int]:
    """Return where most is free that is kept for nobody, and how much, MiB."""
    kept: dict[str, int] = {}
    for other in changes.books.leases.values():
        for device_id in other.ticket.kept_on if other.ticket is not None else ():
            kept[device_id] = kept.get(device_id, 0) + max(kept_mib(other), other.held_mib)
    free = {device_id: changes.books.devices[device_id].free_mib - kept.get(device_id, 0) for device_id in devices}
    best = max(devices, key=free.__getitem__, default=None)
    return best, free[best] if best is not None else 0
