"""What is always true of the books (the laws that hold at one moment), recomputed from scratch."""

from fractional_gpu.core.books.accounts import guaranteed_mib
from fractional_gpu.core.books.books import Books, resting_milli
from fractional_gpu.core.books.records import Device, Lease, Operation
from fractional_gpu.core.model import HOLDING, LeaseState
from fractional_gpu.core.rules.eligibility import eligible_devices
from fractional_gpu.core.scheduler.victims import device_preemptible_from_ms, device_suspendable_from_ms


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
    broken += [*_kept_ready(books), *(line for device in books.devices.values() for line in _ranks(books, device))]
    if broken:
        raise InvariantError("; ".join(broken))


def _totals(books: Books) -> list[str]:
    broken = []
    for device_id, device in books.devices.items():
        total = sum(lease.held_mib for lease in books.leases.values() if device_id in lease.device_ids)
        left_mib = device.spec.leasable_mib - total - device.stranger_mib
        left_mib = min(0, left_mib) if device.lost or (device.is_exclusive and total) else left_mib
        if left_mib != device.free_mib:
            broken.append(f"device {device_id}: {device.free_mib} MiB are said to be free, {left_mib} MiB are")
        here = [lease for lease in books.leases.values() if lease.held_mib and device_id in lease.device_ids]
        busy = [lease for lease in here if lease.state is LeaseState.RESIDENT and lease.is_working]
        coming = [
            lease
            for lease in here
            if lease.let_in and lease.state in (LeaseState.RESIDENT, LeaseState.RESUMING) and lease not in busy
        ]
        demands = (
            sum(lease.busy_milli for lease in busy),
            sum(lease.demand_milli for lease in coming),
            sum(resting_milli(lease, lease.occupancy) for lease in here),
        )
        if demands != (device.demand_milli, device.coming_milli, device.resting_milli):
            kept = f"{device.demand_milli}, {device.coming_milli} and {device.resting_milli}"
            broken.append(f"device {device_id}: demands of {kept} thousandths are kept, sums are {demands}")
        if len(busy) != device.busy_time.leases:
            broken.append(f"device {device_id}: {device.busy_time.leases} leases are counted as busy, {len(busy)} are")
        if total != device.reserved_mib:
            broken.append(f"device {device_id}: running total {device.reserved_mib} MiB, sum {total} MiB")
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
    line = books.waiting_leases()
    if {lease.lease_id for lease in line} != {lease.lease_id for lease in books.leases.values() if lease.ticket}:
        broken.append("the queue and the leases disagree about which leases have a ticket")
    if len(line) != books.waiting:
        broken.append(f"{len(line)} leases wait, {books.waiting} were counted")
    broken += [
        f"lease {lease.lease_id} ({lease.state}) waits for what it has" for lease in line if not _may_wait(lease)
    ]
    broken += [
        f"lease {lease.lease_id} ({lease.state}) is parked and does not wait for the start of others"
        for lease in books.parked.values()
        if lease.state is not LeaseState.UNATTACHED or lease.has_reservation or lease.ticket is not None
    ]
    for pool in books.lines:
        places = [books.queue.place(lease) for lease in books.queue.line(pool)]
        if places != list(range(1, len(places) + 1)):
            broken.append(f"the queue of pool {pool} is out of order")
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


def _kept_ready(books: Books) -> list[str]:
    """Check that kept results equal what would be computed now."""
    broken = []
    for bucket in books.queue.buckets.values():
        for lease in bucket.members if bucket.devices is not None else ():
            now = eligible_devices(books, books.policy(lease), lease)
            if now != bucket.devices:
                broken.append(f"lease {lease.lease_id} may go to {now}, its bucket says {bucket.devices}")
    broken += _buckets(books)
    lowest: dict[str, int] = {}
    for lease in books.leases.values():
        lowest[lease.spec.pool] = min(lease.spec.priority, lowest.get(lease.spec.pool, lease.spec.priority))
    if lowest != books.accounts.lowest_priority:
        broken.append(f"the lowest priorities are {lowest}, not {books.accounts.lowest_priority}")
    return broken


def _buckets(books: Books) -> list[str]:
    """Check what buckets keep of their tickets and accounts, and the indexes of buckets."""
    queue, broken = books.queue, []
    found = {**queue.unshaped}
    for shape in queue.shapes.values():
        found |= shape.buckets
        if any(bucket.shape is not shape for bucket in shape.buckets.values()):
            broken.append("a bucket is kept with a shape that is not its own")
        heads = [bucket.members[0] for bucket in shape.buckets.values() if shape.devices is not None]
        lost = [head for head in heads if eligible_devices(books, books.policy(head), head) != shape.devices]
        broken += [f"lease {head.lease_id} may not go where its shape says: {shape.devices}" for head in lost]
    if sorted(found) != sorted(bucket.number for bucket in queue.buckets.values()):
        broken.append("buckets without a shape, and those of all shapes, are not all buckets")
    for bucket in queue.buckets.values():
        head, orders = bucket.members[0], [one.ticket.order for one in bucket.members if one.ticket is not None]
        if bucket.oldest_order not in (None, min(orders)):
            broken.append(f"the oldest ticket beside {head.lease_id} is {min(orders)}, {bucket.oldest_order} was kept")
        account = books.accounts.of(head)
        if bucket.turn is not None and not account.busy_milli and bucket.turn_version == account.version:
            now = (*books.share(head), orders[0])
            if bucket.turn[-3:] != now or bucket.account is not account:
                broken.append(f"lease {head.lease_id} has its turn by {now}, {bucket.turn} was kept")
    return broken


def _ranks(books: Books, device: Device) -> list[str]:
    ranks, broken = device.victim_ranking, []
    if ranks is None:
        return []
    ranked = {lease_id for *_, lease_id, _ in ranks.ranked}
    is_current = ranks.swaps_learnt == books.forecasts.swaps_learnt
    for lease_id, lease in device.holders.items():
        if lease_id in ranks.changed:
            continue
        from_ms = device_suspendable_from_ms(books, device, lease)
        kept_ms = 0 if lease_id in ranked else ranks.later[lease_id][0] if lease_id in ranks.later else None
        if kept_ms != from_ms and (kept_ms is None or from_ms is None or max(kept_ms, from_ms) > books.now_ms):
            broken.append(f"lease {lease_id} may be suspended from {from_ms}, it was ranked for {kept_ms}")
        at_work_ms = device_preemptible_from_ms(books, device, lease)
        kept_ms = ranks.busy[lease_id][0] if lease_id in ranks.busy else None
        if kept_ms != at_work_ms and ((kept_ms is None) != (at_work_ms is None) or is_current):
            broken.append(f"lease {lease_id} has had its residency at {at_work_ms}, {kept_ms} was kept")
    known = ranks.yield_candidates
    if (
        is_current
        and not ranks.changed
        and known is not None
        and (known.next_ms is None or known.next_ms > books.now_ms)
    ):
        yielding = {
            lease.lease_id
            for from_ms, lease in ranks.busy.values()
            if max(from_ms, lease.gate.open_until_ms) <= books.now_ms
        }
        if {lease.lease_id for lease in known.leases} != yielding:
            broken.append(f"leases {sorted(yielding)} may be asked to yield, {known.leases} were kept")
    strangers = {*ranked, *ranks.later, *ranks.busy} - {*device.holders, *ranks.changed}
    return broken + [f"lease {lease_id} is ranked on a device where it is not" for lease_id in sorted(strangers)]


def _may_wait(lease: Lease) -> bool:
    if lease.ticket is not None and lease.ticket.resize_to is not None:
        return lease.state is not LeaseState.ENDED
    return lease.state in _QUEUEING and not (lease.state is LeaseState.UNATTACHED and lease.has_reservation)
