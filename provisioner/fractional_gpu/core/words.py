"""Explains to users why cells wait and what slows them down.

The reason for a wait consists of a code, a sentence and the leases in the way. It is taken from the first of these that applies: the state
of the ticket's lease, the last pass over the queue, a pause after a failed resume, or the room on its devices. The sentence has a clause
for each lease in the way, saying what that lease is doing and until when. The user's own kernels are named by their labels. Any other
kernel is called "another user's kernel", and messages from its driver or process are left out. Its owner is named only if the kernel has
ended and left processes behind, because the owner might not know about them.
"""

from collections.abc import Sequence
from itertools import accumulate

from fractional_gpu.core.model import FOUND_FAILED, LeaseState, Slowdown
from fractional_gpu.core.place import allowed_devices, allowed_of, beside, busy_others
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease, OccupancyKind, Reason, Ticket
from fractional_gpu.core.suspend import preempts_from_ms, suspendable_from_ms
from fractional_gpu.core.units import format_duration, format_memory

STRANGERS_HOLD = "processes without a lease use the rest"
"""Says what is in the way when the reason code is `wait.stranger`. The broker replaces it with the names of the processes."""

_MOST_DESCRIBED = 4
_LONGEST_NAME = 60
_MINUTE_MS = 60_000
_OTHERS = "another user's kernel"
_DOING = {
    LeaseState.SUSPENDING: "is being suspended",
    LeaseState.RESUMING: "is being resumed",
    LeaseState.UNATTACHED: "is starting",
    LeaseState.QUARANTINED: "is in an unknown state, which is being checked",
}


def wait_reason(books: Books, lease: Lease, ticket: Ticket) -> Reason:
    """Return why the lease is waiting, according to the last pass over the queue."""
    if not lease.waits_for_room:
        return _state_reason(lease)
    if ticket.wait is not None:
        return ticket.wait
    if lease.retries.resume_after_ms > books.now_ms:
        return Reason("wait.retry", f"{lease.sentence}; it will be tried again in a moment")
    return _room_reason(books, lease, allowed_devices(books, lease), lease.ask_mib)


def wait_code(books: Books, lease: Lease, ticket: Ticket) -> str:
    """Return just the code from `wait_reason`, which is faster to compute."""
    if not lease.waits_for_room or ticket.wait is not None or lease.retries.resume_after_ms > books.now_ms:
        return wait_reason(books, lease, ticket).code
    return reason_code(books, lease, allowed_devices(books, lease), lease.ask_mib)


def _state_reason(lease: Lease) -> Reason:
    """Return why a ticket can't be served even if there is room: its lease is being swapped, is in quarantine or hasn't started."""
    if lease.state is LeaseState.QUARANTINED and lease.reason == FOUND_FAILED:
        return Reason("wait.failed", lease.sentence)
    code = {
        LeaseState.SUSPENDING: "wait.own-suspend",
        LeaseState.RESUMING: "wait.restoring",
        LeaseState.QUARANTINED: "wait.quarantine",
    }.get(lease.state, "wait.no-process")
    return Reason(code, f"this kernel {_DOING.get(lease.state, f'is {lease.state}')}")


def _room_reason(books: Books, lease: Lease, devices: Sequence[str], need_mib: int) -> Reason:
    """Return why there is no room for the lease: a code from `reason_code`, a sentence and the leases in the way."""
    reason, need = reason_code(books, lease, devices, need_mib), format_memory(need_mib)
    if lease.count > 1:
        need += f" on each of {lease.count} devices"
    free_mib = max([books.devices[device_id].free_mib for device_id in devices], default=0)
    short = f"{need} is needed, {format_memory(max(0, free_mib))} is free on the roomiest device"
    without_blockers = {
        "wait.no-pool": f"pool {lease.spec.pool!r} is no longer configured: ask the administrator",
        "wait.device-lost": f"{need} is needed, but no device that this kernel may use is available now",
        "wait.device-draining": f"{need} is needed, but an administrator is emptying the device that this kernel may use",
        "wait.older-ticket": f"{need} is needed; the free room is kept for a kernel that has waited longer",
        "wait.stranger": f"{short}; {STRANGERS_HOLD}",
        "wait.too-large": f"{need} is needed, more than any device that this kernel may use has",
    }
    if reason in without_blockers:
        return Reason(reason, without_blockers[reason])
    on_devices = [other for device_id in devices for other in books.devices[device_id].holders.values()]
    holders = [other for other in dict.fromkeys(on_devices) if other is not lease]
    blockers = _blockers(books, holders)
    sentence = f"{short}; {_describe_blockers(books, lease, blockers)}"
    if reason == "wait.cannot-be-suspended":
        sentence += "; this kernel waits until one of them ends"
    return Reason(reason, sentence, tuple([other.lease_id for other in blockers]))


def reason_code(books: Books, lease: Lease, devices: Sequence[str], need_mib: int) -> str:
    """Return a code for the reason there is no room for the lease."""
    if not devices:
        return _no_device_code(books, lease)
    free = possible = strangers = working = 0
    for device_id in devices:
        device = books.devices[device_id]
        free += device.free_mib >= need_mib
        possible += device.lease_capacity_mib >= need_mib
        strangers += device.stranger_mib > 0
        working += bool(device.mib(OccupancyKind.BUSY))
    count = lease.count
    if free >= count:
        return "wait.older-ticket"
    if possible < count:
        return "wait.stranger" if strangers else "wait.too-large"
    if working:
        return "wait.busy-neighbour"
    holders = [other for device_id in devices for other in books.devices[device_id].holders.values()]
    if holders and all(other.is_unsuspendable for other in holders):
        return "wait.cannot-be-suspended"
    return "wait.unwilling-neighbour"


def stranger_devices(books: Books, lease: Lease) -> list[str]:
    """Return the devices that could have room for the waiting lease if processes without a lease freed their memory."""
    if lease.ticket is None:
        return []
    code, ask_mib = wait_code(books, lease, lease.ticket), lease.ask_mib
    if code not in ("wait.stranger", "wait.busy-neighbour", "wait.cannot-be-suspended", "wait.unwilling-neighbour"):
        return []
    devices = [books.devices[device_id] for device_id in allowed_devices(books, lease)]
    room_mib = {one: one.lease_capacity_mib if code == "wait.stranger" else one.free_mib for one in devices}
    return [one.spec.device_id for one, mib in room_mib.items() if mib < ask_mib <= mib + one.stranger_mib]


def turns_end_ms(books: Books, lease: Lease) -> int | None:
    """Return the time at which enough busy leases can be preempted to make room for the lease, or None if waiting won't help."""
    if not lease.waits_for_room:
        return None
    found = list[int]()
    for device_id in allowed_devices(books, lease):
        device = books.devices[device_id]
        lacks_mib = lease.ask_mib - device.free_or_idle_mib
        busy = [other for other in device.holders.values() if other.busy and other is not lease]
        turns = [(preempts_from_ms(books, lease, other), other.held_mib) for other in busy]
        ends = sorted((end_ms, mib) for end_ms, mib in turns if end_ms is not None)
        freed_mib = accumulate(mib for _, mib in ends)
        found += [end_ms for (end_ms, _), mib in zip(ends, freed_mib, strict=True) if mib >= lacks_mib][:1]
    return sorted(found)[lease.count - 1] if len(found) >= lease.count else None


def _no_device_code(books: Books, lease: Lease) -> str:
    if lease.spec.pool not in books.pools:
        return "wait.no-pool"
    possible = lease.home_ids or allowed_of(books.policy(lease), lease.spec)
    draining = [device_id for device_id in possible if device_id in books.devices and books.devices[device_id].draining]
    return "wait.device-draining" if draining else "wait.device-lost"


def _blockers(books: Books, holders: Sequence[Lease]) -> Sequence[Lease]:
    """Return the leases the ticket is waiting for: busy leases (longest-running first), then others that cannot leave now."""
    busy = sorted((other for other in holders if other.busy), key=lambda one: (one.last_active_ms, one.number))
    return [*busy, *(other for other in holders if not other.busy and _does_not_leave(books, other))] or holders


def _does_not_leave(books: Books, lease: Lease) -> bool:
    if lease.state is not LeaseState.RESIDENT:
        return True
    willing_ms = suspendable_from_ms(books.policy(lease), lease)
    return willing_ms is None or willing_ms > books.now_ms


def _describe_blockers(books: Books, lease: Lease, blockers: Sequence[Lease]) -> str:
    """Return why the blockers are not making room for the lease now, with a clause for each of the first few."""
    clauses: dict[str, int] = {}
    for other in blockers[:_MOST_DESCRIBED]:
        mine = other.spec.is_same_user(lease.spec)
        if other.left_behind:
            clauses[_left_behind(other, mine=mine)] = 1
            continue
        clause = f"{display_name(other) if mine else _OTHERS} {_doing(books, other, mine=mine)}"
        clauses[clause] = clauses.get(clause, 0) + 1
    said = [clause if count == 1 else f"{clause} (and {count - 1} more)" for clause, count in clauses.items()]
    if (besides := len(blockers) - _MOST_DESCRIBED) > 0:
        said.append(f"{besides} more {'kernel is' if besides == 1 else 'kernels are'} in the way")
    return "; ".join(said)


def _doing(books: Books, lease: Lease, *, mine: bool) -> str:
    now_ms = books.now_ms
    if lease.state is not LeaseState.RESIDENT:
        return _DOING.get(lease.state, f"is {lease.state}")
    pinned = ""
    if lease.pinned_until_ms > now_ms:
        what, end = ("claimed", "release") if lease.spec.claim_ms else ("pinned", "unpin")
        pinned = f"is {what} for {_about(lease.pinned_until_ms - now_ms)} more"
        if mine:
            pinned += f" (`jupyter gpu {end} {lease.lease_id[:8]}` ends it)"
    if lease.spec.claim_ms:
        return pinned
    if lease.busy:
        lasts_ms = now_ms - lease.last_active_ms
        runs = (
            f"has been running a cell for {format_duration(lasts_ms)}"
            if lasts_ms >= _MINUTE_MS
            else "is running a cell"
        )
        if lease.is_unsuspendable:
            return f"{runs} and cannot be suspended: {lease.unsuspendable_reason}"
        if lease.is_measured and not lease.used_mib and lease.spec.gated:  # it could start to use the GPU at any time
            remedy = "interrupt it and start it with %%cpu, or have an" if mine else "its user can interrupt it, or an"
            return f"{runs} that has not used the GPU, and keeps its room until the cell ends: {remedy} administrator evict the kernel"
        return f"{runs} and {pinned}" if pinned else runs
    if lease.is_unsuspendable:
        return f"cannot be suspended: {lease.unsuspendable_reason}"
    if pinned:
        return pinned
    return _waits_for(books, lease, mine=mine)


def _waits_for(books: Books, lease: Lease, *, mine: bool) -> str:
    """Return why an idle lease that can be suspended hasn't been suspended yet."""
    now_ms, willing_ms = books.now_ms, suspendable_from_ms(books.policy(lease), lease)
    if willing_ms is None or willing_ms <= now_ms:
        return "is idle"
    left = _about(willing_ms - now_ms)
    if lease.retries.suspend_after_ms == willing_ms:
        detail = f" ({lease.sentence.rstrip('.')})" if mine and lease.reason.startswith("suspend.") else ""
        return f"could not be suspended{detail}; the next attempt follows within {left}"
    return f"got its room a moment ago and may keep it for {left} more"


def _about(ms: int) -> str:
    """Return the duration in coarse steps, because a waiting cell is redrawn whenever the text changes."""
    if ms < _MINUTE_MS:
        return "10 s" if ms <= 10_000 else "a minute"
    return format_duration(ms + _MINUTE_MS - 1)


def _left_behind(lease: Lease, *, mine: bool) -> str:
    """Describe which processes outlived their kernel, who owned the kernel, and how to end the processes.

    The message names the owner even to other users, because the ended kernel has no cell where its owner could see the message.
    """
    owner = lease.spec.owner
    whose = display_name(lease) if mine else f"a kernel of {owner}"
    who = "end it" if mine else f"{owner} or an administrator can end it"
    return f"{whose} has ended, but left {lease.left_behind} with device memory: {who} with `jupyter gpu end {lease.lease_id[:8]}`"


def name_for(reader: Lease, other: Lease) -> str:
    """Return the name for `other` in messages to `reader`: the notebook's name if both have the same user, else "another user's kernel"."""
    return display_name(other) if other.spec.is_same_user(reader.spec) else _OTHERS


def display_name(lease: Lease) -> str:
    """Return the lease's name as shown to its owner: the notebook's name without folders, or the first digits of the lease's id."""
    label = lease.spec.label
    if not label:
        return f"kernel {lease.lease_id[:8]}"
    # A kernel's name can have a slash, too: "Python 3 · 1/4 GPU".
    is_path = label.startswith("/") or label.endswith(".ipynb")
    name = label.rpartition("/")[2] if is_path else label
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def describe_slowdown(books: Books, lease: Lease) -> Slowdown:
    """Describe how much neighbours slow down the lease's cell, and say who they are.

    For a waiting lease, describe how much neighbours would slow it down on the device where busy leases leave the most compute, not
    counting leases that must leave first. The estimate is based on busy leases' learnt demand (`place`), and is corrected using the times
    that cells took with and without neighbours (`forecasts`).
    """
    devices = books.devices
    if lease.state is LeaseState.RESUMING and lease.let_in:
        there = [(devices[one], busy_others(devices[one], lease)) for one in lease.occupied_ids if one in devices]
    elif lease.ticket is not None and lease.state in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT):
        there = [(devices[one], _staying(devices[one], lease)) for one in allowed_devices(books, lease)]
    elif lease.occupancy is OccupancyKind.BUSY:
        there = [(devices[one], busy_others(devices[one], lease)) for one in lease.occupied_ids if one in devices]
        worst = max(there, key=lambda one: beside(lease.busy_milli, one[1]), default=None)
        return Slowdown() if worst is None else _described(books, lease, lease.busy_milli, worst)
    else:
        return Slowdown()
    if len(there) < lease.count:
        return Slowdown()
    # The lease gets the least loaded devices. The most loaded of these determines the slowdown.
    worst = sorted(there, key=lambda one: sum(other.busy_milli for other in one[1]))[lease.count - 1]
    return _described(books, lease, lease.demand_milli, worst, runs="would run")


def _staying(device: Device, lease: Lease) -> list[Lease]:
    """Return the busy leases that fit on the device alongside this lease, smallest first."""
    left_mib = device.lease_capacity_mib - lease.size_mib
    staying = []
    for other in sorted(busy_others(device, lease), key=lambda one: (one.held_mib, one.number)):
        left_mib -= other.held_mib
        if left_mib >= 0:
            staying.append(other)
    return staying


def _described(
    books: Books, lease: Lease, want_milli: int, where: tuple[Device, Sequence[Lease]], runs: str = "runs"
) -> Slowdown:
    """Describe how much the neighbours on this device slow down a cell that has this compute demand."""
    device, others = where
    if not others:
        return Slowdown()
    span = books.forecasts.slowdown_span(device.spec.name, len(others), beside(want_milli, list(others)))
    if _tenths(span.expected_ms) <= 10:
        return Slowdown()
    first, *more = sorted(others, key=lambda one: (-one.busy_milli, one.number))
    expected, low, high = (f"{_tenths(one) / 10}" for one in (span.expected_ms, span.low_ms, span.high_ms))
    neighbours = name_for(lease, first) + (f" and {len(more)} more" if more else "")
    times = f"about {expected} times as long as alone" + (f" ({low} to {high})" if low != high else "")
    return Slowdown(
        milli=span.expected_ms,
        low_milli=span.low_ms,
        high_milli=span.high_ms,
        brief=f"{runs} next to {neighbours}, {times}",
    )


def _tenths(milli: int) -> int:
    return (milli + 50) // 100
