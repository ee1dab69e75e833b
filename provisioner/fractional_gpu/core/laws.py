"""Checks that the arbiter's books are consistent by recomputing every sum from scratch."""

from collections.abc import Iterator

from fractional_gpu.core.model import HOLDING, LeaseState
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, Operation

_IN_OPERATION = (LeaseState.SUSPENDING, LeaseState.RESUMING)
_ON_THE_WAY = (LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING)
_MAY_HAVE_SAVED = (LeaseState.SUSPENDED, LeaseState.RESUMING, LeaseState.QUARANTINED)


class InvariantError(AssertionError):
    """Raised when the books are inconsistent, which is a bug in the arbiter. The message lists every inconsistency."""


def check_devices(books: Books, device_ids: set[str]) -> None:
    """Check the devices on which an event granted room. Raise InvariantError if any of them is over-committed."""
    for device_id in device_ids:
        device = books.devices[device_id]
        if device.free_mib < 0:
            raise InvariantError(f"device {device_id} is over-committed: {device}")


def validate(books: Books, operations: dict[int, Operation]) -> None:
    """Check the whole state. Raise InvariantError with a list of all inconsistencies if there are any."""
    broken = [*_sums(books), *_queue(books)]
    for lease in books.leases.values():
        found = [
            *_reservation(books, lease),
            *_host_memory(lease),
            *_waiting(lease),
            *_rights(lease),
            *_operation(lease, operations),
        ]
        broken += [f"lease {lease.lease_id} ({lease.state}) {what}" for what in found]
    if broken:
        raise InvariantError("; ".join(broken))


def _sums(books: Books) -> Iterator[str]:
    for device_id, device in books.devices.items():
        there = {lease.lease_id for lease in books.leases.values() if device_id in lease.occupied_ids}
        if there != set(device.holders):
            yield f"device {device_id}: lists holders {sorted(device.holders)}, but {sorted(there)} hold it"
        known, device.known_sums = device.known_sums, None
        if known not in (None, device.sums):
            yield f"device {device_id}: cached sums are {known}, actual sums {device.sums}"
    saved = sum(lease.saved_mib for lease in books.leases.values())
    reserved = sum(lease.host_mib for lease in books.leases.values())
    if (saved, reserved) != (books.host_saved_mib, books.host_reserved_mib):
        yield f"host: running totals {books.host_saved_mib}, {books.host_reserved_mib} MiB, actual sums {saved}, {reserved} MiB"


def _queue(books: Books) -> Iterator[str]:
    if set(books.waiting) != {lease.lease_id for lease in books.leases.values() if lease.ticket is not None}:
        yield "the queue and the leases disagree about which leases have a ticket"
    for lease in books.parked.values():
        if lease.state is not LeaseState.UNATTACHED or lease.has_reservation or lease.ticket is not None:
            yield f"lease {lease.lease_id} ({lease.state}) is parked but does not wait for others to start"


def _reservation(books: Books, lease: Lease) -> Iterator[str]:
    state = lease.state
    if state is LeaseState.ENDED:
        yield "is still in the books"
    may_hold = state in HOLDING or state is LeaseState.UNATTACHED  # reserved before its start
    if lease.has_reservation and not may_hold:
        yield "holds a reservation"
    if state in HOLDING - {LeaseState.QUARANTINED} and not lease.has_reservation:
        yield "has no reservation"
    # During an operation it holds what was reserved when the operation began, even if the policy has changed since.
    least_mib = lease.saved_each_mib if state in _IN_OPERATION else _least_mib(books, lease)
    # A revoked lease keeps its size and does not wait to grow.
    is_settled = state is not LeaseState.QUARANTINED and not lease.is_growing and not lease.revoked
    if lease.has_reservation and lease.held_mib < least_mib and is_settled:
        yield f"holds {lease.held_mib} MiB but needs {lease.need_mib} MiB"
    if (lease.expires_ms is not None) != (state is LeaseState.UNATTACHED):
        yield f"expires at {lease.expires_ms}"


def _least_mib(books: Books, lease: Lease) -> int:
    """Return the minimum memory a lease must hold on each of its devices, in MiB: either its cap or its guaranteed memory."""
    spec = lease.spec
    if books.reserves_cap(lease) or spec.request_mib is None:
        return spec.reserve_mib
    return min(spec.request_mib, spec.reserve_mib)


def _host_memory(lease: Lease) -> Iterator[str]:
    if lease.host_mib and lease.state not in (LeaseState.SUSPENDING, LeaseState.QUARANTINED):
        yield f"has {lease.host_mib} MiB of host memory reserved"
    if lease.saved_mib and lease.state not in _MAY_HAVE_SAVED:
        yield f"has {lease.saved_mib} MiB saved"


def _waiting(lease: Lease) -> Iterator[str]:
    state, ticket = lease.state, lease.ticket
    if ticket is not None and ticket.resize_to is None:
        has_its_room = state is LeaseState.UNATTACHED and lease.has_reservation
        if state is LeaseState.RESIDENT or has_its_room:
            yield "waits for room that it already has"
    if lease.target_ids and (state not in _ON_THE_WAY or ticket is None):
        yield f"is moving to {lease.target_ids} without a ticket"
    if lease.suspend_requested and state is not LeaseState.RESIDENT:
        yield "has a request to suspend it"
    if lease.gate.closed and state is not LeaseState.RESIDENT:
        yield "has a closed gate"
    if lease.gate.ticket is not None and not lease.gate.closed:
        yield "has a cell waiting at an open gate"


def _rights(lease: Lease) -> Iterator[str]:
    """Check the restrictions on a lease whose kernel or seat has ended."""
    state = lease.state
    if lease.left_behind:
        if state is LeaseState.UNATTACHED or not lease.busy or lease.pinned_until_ms:
            yield f"is unattached, idle or pinned, though its kernel left {lease.left_behind} behind"
        if state is LeaseState.SUSPENDED and lease.ticket is None and not lease.revoked:
            yield f"is saved without a ticket, though no cell can resume {lease.left_behind}"
    if lease.revoked:
        if lease.ticket is not None or lease.gate.ticket is not None or lease.pinned_until_ms or lease.target_ids:
            yield "has no seat, but waits, is pinned or is moving"
        if state is LeaseState.UNATTACHED:
            yield "has neither a seat nor a process"


def _operation(lease: Lease, operations: dict[int, Operation]) -> Iterator[str]:
    operation = lease.operation
    if (operation is not None) != (lease.state in _IN_OPERATION):
        yield f"has {operation}"
    if operation is not None and operations.get(operation.operation_id) is not operation:
        yield f"has {operation}, which holds no swap channel"
