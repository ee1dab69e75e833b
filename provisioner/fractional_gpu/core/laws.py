"""What is always true of the books (the laws that hold at one moment), recomputed from scratch."""

from fractional_gpu.core.model import HOLDING, LeaseState
from fractional_gpu.core.state.accounts import guaranteed_mib
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, Operation


class InvariantError(AssertionError):
    """The books are wrong: a bug in the arbiter. The message lists everything that is broken."""


_BESIDE_HOLDING = frozenset({LeaseState.UNATTACHED})  # may hold a reservation before its start


_IN_OPERATION = frozenset({LeaseState.SUSPENDING, LeaseState.RESUMING})


_QUEUEING = frozenset(
    {
        LeaseState.UNATTACHED,
        LeaseState.NO_CONTEXT,
        LeaseState.SUSPENDING,
        LeaseState.SUSPENDED,
        LeaseState.RESUMING,
        LeaseState.QUARANTINED,
    }
)


def check_devices(books: Books, device_ids: set[str]) -> None:
    """Law 1, cheaply, for the devices an event granted room on. Raises InvariantError."""
    for device_id in device_ids:
        device = books.devices[device_id]
        if device.free_mib < 0:
            raise InvariantError(f"device {device_id} was given away beyond its memory: {device}")


def validate(books: Books, operations: dict[int, Operation]) -> None:
    """Check the whole state. Raises InvariantError."""
    broken = [
        *_totals(books),
        *_leases(books),
        *_gates(books),
        *_left_behind(books),
        *_revoked(books),
        *_queue(books),
        *_moves(books),
        *_operations(books, operations),
        *books.forecasts.broken(),
    ]
    if broken:
        raise InvariantError("; ".join(broken))


def _totals(books: Books) -> list[str]:
    broken = []
    for device_id, device in books.devices.items():
        there = {lease.lease_id for lease in books.leases.values() if device_id in lease.occupied_ids}
        if there != set(device.holders):
            broken.append(f"device {device_id}: {sorted(device.holders)} are said to be there, {sorted(there)} are")
        known, device.known_sums = device.known_sums, None
        if known not in (None, device.sums):
            broken.append(f"device {device_id}: {known} was kept, sums are {device.sums}")
    saved = sum(lease.saved_mib for lease in books.leases.values())
    reserved = sum(lease.host_mib for lease in books.leases.values())
    if (saved, reserved) != (books.host_saved_mib, books.host_reserved_mib):
        broken.append(
            f"host: running totals {books.host_saved_mib}, {books.host_reserved_mib} MiB, sums {saved}, {reserved} MiB"
        )
    for state, members in books.by_state.items():
        if any(lease.state is not state for lease in members.values()):
            broken.append(f"the index of {state} leases is wrong")
    if sum(map(len, books.by_state.values())) != len(books.leases):
        broken.append("the indexes by state do not add up")
    return broken


def _leases(books: Books) -> list[str]:
    broken = []
    for lease in books.leases.values():
        name = f"lease {lease.lease_id} ({lease.state})"
        if lease.has_reservation and lease.state not in HOLDING | _BESIDE_HOLDING:
            broken.append(f"{name} holds a reservation")
        if lease.state in HOLDING - {LeaseState.QUARANTINED} and not lease.has_reservation:
            broken.append(f"{name} has no reservation")
        # During an operation it holds what was reserved at the beginning, even if the policy has changed since.
        least_mib = lease.saved_each_mib if lease.state in _IN_OPERATION else _least_mib(books, lease)
        # A revoked lease keeps its size, and waits for no more.
        settled = lease.state is not LeaseState.QUARANTINED and not lease.is_growing and not lease.revoked
        if lease.has_reservation and lease.held_mib < least_mib and settled:
            broken.append(f"{name} holds {lease.held_mib} MiB and needs {lease.need_mib} MiB")
        if lease.host_mib and lease.state not in (LeaseState.SUSPENDING, LeaseState.QUARANTINED):
            broken.append(f"{name} has {lease.host_mib} MiB of host memory reserved")
        if lease.suspend_requested and lease.state is not LeaseState.RESIDENT:
            broken.append(f"{name} is still to be suspended")
        if (lease.expires_ms is not None) != (lease.state is LeaseState.UNATTACHED):
            broken.append(f"{name} expires at {lease.expires_ms}")
        if lease.saved_mib and lease.state not in (LeaseState.SUSPENDED, LeaseState.RESUMING, LeaseState.QUARANTINED):
            broken.append(f"{name} has {lease.saved_mib} MiB saved")
        if lease.state is LeaseState.ENDED:
            broken.append(f"{name} is kept")
    return broken


def _gates(books: Books) -> list[str]:
    broken = []
    for lease in books.leases.values():
        name = f"lease {lease.lease_id} ({lease.state})"
        if lease.gate.closed != (lease.lease_id in books.gates_closed) or (
            lease.gate.closed and lease.state is not LeaseState.RESIDENT
        ):
            broken.append(f"{name}: its gate is {'closed' if lease.gate.closed else 'open'}, the index says otherwise")
        if lease.gate.ticket is not None and not lease.gate.closed:
            broken.append(f"{name}: its next cell waits at an open gate")
    return broken


def _left_behind(books: Books) -> list[str]:
    broken = []
    for lease in books.leases.values():
        name = f"lease {lease.lease_id} ({lease.state})"
        if lease.left_behind and (lease.state is LeaseState.UNATTACHED or not lease.busy or lease.pinned_until_ms):
            broken.append(f"{name} is at rest or pinned, though its kernel left {lease.left_behind} behind")
        if lease.left_behind and lease.state is LeaseState.SUSPENDED and lease.ticket is None and not lease.revoked:
            broken.append(
                f"{name} is saved and waits for nothing, though no cell can ask for what {lease.left_behind} has"
            )
    return broken


def _revoked(books: Books) -> list[str]:
    broken = []
    for lease in books.leases.values():
        name = f"lease {lease.lease_id} ({lease.state})"
        if not (lease.revoked == (lease.ends_ms is not None) == (lease.lease_id in books.revoked)):
            broken.append(f"{name}: the index of revoked leases says otherwise, or its end at {lease.ends_ms} does")
        if not lease.revoked:
            continue
        if lease.ticket is not None or lease.gate.ticket is not None or lease.pinned_until_ms or lease.target_ids:
            broken.append(f"{name} has no seat, and waits for a device, is pinned to one or on its way to one")
        if lease.state is LeaseState.UNATTACHED:
            broken.append(f"{name} has neither a seat nor a process")
    promised: dict[str, int] = {}
    for lease in books.leases.values():
        if not lease.revoked:
            promised[lease.spec.pool] = promised.get(lease.spec.pool, 0) + guaranteed_mib(lease.spec)
    if {pool: mib for pool, mib in promised.items() if mib} != books.accounts.promised_mib:
        broken.append(f"{promised} MiB are promised, not {books.accounts.promised_mib}")
    return broken


def _least_mib(books: Books, lease: Lease) -> int:
    """Return what a lease holds at least on each of its devices: its cap, or its guaranteed memory."""
    spec = lease.spec
    if books.reserves_cap(lease) or spec.request_mib is None:
        return spec.reserve_mib
    return min(spec.request_mib, spec.reserve_mib)


def _queue(books: Books) -> list[str]:
    broken = []
    line = list(books.waiting.values())
    if set(books.waiting) != {lease.lease_id for lease in books.leases.values() if lease.ticket}:
        broken.append("the queue and the leases disagree about which leases have a ticket")
    broken += [
        f"lease {lease.lease_id} ({lease.state}) waits for what it has" for lease in line if not _may_wait(lease)
    ]
    broken += [
        f"lease {lease.lease_id} ({lease.state}) is parked and does not wait for the start of others"
        for lease in books.parked.values()
        if lease.state is not LeaseState.UNATTACHED or lease.has_reservation or lease.ticket is not None
    ]
    return broken


def _operations(books: Books, operations: dict[int, Operation]) -> list[str]:
    broken = []
    for lease in books.leases.values():
        operation = lease.operation
        if (operation is not None) != (lease.state in _IN_OPERATION):
            broken.append(f"lease {lease.lease_id} is {lease.state} with {operation}")
        if operation is not None and operations.get(operation.operation_id) is not operation:
            broken.append(f"lease {lease.lease_id}: {operation} holds no swap channel")
    return broken


def _moves(books: Books) -> list[str]:
    broken = []
    on_the_way = (LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING)
    for lease in books.leases.values():
        if bool(lease.target_ids) != (lease.lease_id in books.moving):
            broken.append(f"lease {lease.lease_id}: the index of moves does not agree with {lease.target_ids}")
        if lease.target_ids and (lease.state not in on_the_way or lease.ticket is None):
            broken.append(
                f"lease {lease.lease_id} ({lease.state}) is on its way to {lease.target_ids} and waits for nothing"
            )
    return broken


def _may_wait(lease: Lease) -> bool:
    if lease.ticket is not None and lease.ticket.resize_to is not None:
        return lease.state is not LeaseState.ENDED
    return lease.state in _QUEUEING and not (lease.state is LeaseState.UNATTACHED and lease.has_reservation)
