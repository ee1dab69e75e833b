"""What the leases in the way of a ticket are doing, one clause each: why they stay where they are, and until when.

A kernel of the same owner is named by its label; a kernel of another owner is "another user's kernel", and what the driver or its process
said about it is left out. The same rule holds for `neighbours` in a lease's status. Of what an ended kernel left behind the owner is
named: the owner may not know of it.
"""

from collections.abc import Callable, Sequence

from provisioner.core.model import LeaseState
from provisioner.core.records import Lease
from provisioner.core.scheduling import willing_from_ms
from provisioner.core.state import Books
from provisioner.core.units import format_duration

__all__ = ["MOST_TOLD", "Moment", "in_the_way", "name_of", "named_for"]

Moment = Callable[[int], str]
"""Says a moment (the arbiter's ms) as a time of day."""

MOST_TOLD = 4
_LONGEST_NAME = 60
_MINUTE_MS = 60_000
_DOING = {
    LeaseState.SUSPENDING: "is being suspended",
    LeaseState.RESUMING: "is being brought back to its device",
    LeaseState.UNATTACHED: "is starting",
    LeaseState.QUARANTINED: "is in doubt: its state is being examined",
}


def in_the_way(
    books: Books, lease: Lease, told: Sequence[Lease], moment: Moment | None = None, *, besides: int = 0
) -> str:
    """Return why these leases do not give their room to the ticket's lease now, a clause each; `besides`: so many more do not.

    Without `moment`, times are said from now on ("for 25 min more").
    """
    clauses: dict[str, int] = {}
    for other in told:
        mine = other.spec.owner == lease.spec.owner
        if other.left:
            clauses[_left_behind(other, mine=mine)] = 1
            continue
        clause = f"{name_of(other) if mine else _OTHERS} {_doing(books, other, mine=mine, moment=moment)}"
        clauses[clause] = clauses.get(clause, 0) + 1
    said = [clause if count == 1 else f"{clause} (and {count - 1} more)" for clause, count in clauses.items()]
    if besides > 0:
        said.append(f"{besides} more {'kernel is' if besides == 1 else 'kernels are'} in the way")
    return "; ".join(said)


_OTHERS = "another user's kernel"


def named_for(reader: Lease, other: Lease) -> str:
    """Return what the story of `reader` calls another lease: its notebook where it is of the same owner, else nothing that tells whose."""
    return name_of(other) if other.spec.owner == reader.spec.owner else _OTHERS


def name_of(lease: Lease) -> str:
    """Return what the lease's owner calls it: its notebook, else the beginning of its id."""
    label = lease.spec.label
    if not label:
        return f"kernel {lease.lease_id[:8]}"
    return label if len(label) <= _LONGEST_NAME else label[: _LONGEST_NAME - 3] + "..."


def _left_behind(lease: Lease, *, mine: bool) -> str:
    """Say what an ended kernel left on the device, whose it is, and how to end it: its owner can do so, and has no cell to be told."""
    owner = lease.spec.owner
    whose = name_of(lease) if mine else f"a kernel of {owner}"
    who = "end it" if mine else f"{owner} or an administrator can end it"
    return f"{whose} has ended, but left {lease.left} with device memory: {who} with `jupyter gpu end {lease.lease_id[:8]}`"


def _doing(books: Books, lease: Lease, *, mine: bool, moment: Moment | None) -> str:
    """Say what a lease does, or what keeps it where it is."""
    now_ms = books.now_ms
    if lease.state is not LeaseState.RESIDENT:
        return _DOING.get(lease.state, f"is {lease.state}")
    pinned = ""
    if lease.pinned_until_ms > now_ms:
        left = _about(lease.pinned_until_ms - now_ms)
        pinned = f"is pinned for {left} more" if moment is None else f"is pinned until {moment(lease.pinned_until_ms)}"
    if lease.busy:
        lasts_ms = now_ms - lease.last_active_ms
        runs = (
            f"has been running a cell for {format_duration(lasts_ms)}"
            if lasts_ms >= _MINUTE_MS
            else "is running a cell"
        )
        if lease.staying:
            return f"{runs} and cannot be suspended: {lease.stays}"
        return f"{runs} and {pinned}" if pinned else runs
    if lease.staying:
        return f"cannot be suspended: {lease.stays}"
    if pinned:
        return pinned
    return _waits_for(books, lease, mine=mine)


def _waits_for(books: Books, lease: Lease, *, mine: bool) -> str:
    """Say why an idle lease that can be suspended is not suspended now."""
    now_ms, willing_ms = books.now_ms, willing_from_ms(books.policy(lease), lease)
    if willing_ms is None or willing_ms <= now_ms:
        return "is idle"
    left = _about(willing_ms - now_ms)
    if lease.retry_ms == willing_ms:
        why = (
            f" ({lease.sentence.rstrip('.')})"
            if mine and lease.reason.startswith("suspend.") and lease.sentence
            else ""
        )
        return f"could not be suspended{why}; the next attempt follows within {left}"
    return f"came onto the device a moment ago and may run for {left} more"


def _about(ms: int) -> str:
    """Return how long it is until then, in words that change rarely: a waiting cell hears of each change."""
    if ms < _MINUTE_MS:
        return "10 s" if ms <= 10_000 else "a minute"
    return format_duration(ms + _MINUTE_MS - 1)
