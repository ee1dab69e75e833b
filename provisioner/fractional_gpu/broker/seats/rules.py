"""The rules of seats: which seat a server may have, and which kernels a seat allows. Errors say what was asked, what there is, what to do.

A refusal (an error of the protocol) concerns the request itself: another group's pool, closed, over a limit, larger than any device.
Waiting does not help. `PoolFull` concerns the seats that exist: the request may wait until some end.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.config.hub import GroupTerms, HubPool
from fractional_gpu.core.model import LeaseView, Limits, PoolSpec
from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NoRoomError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.names import describe_unprintable
from fractional_gpu.protocol.seats import SeatRequest

__all__ = [
    "PoolFull",
    "SeatUsage",
    "check_limits",
    "check_request",
    "check_seat_usage",
    "check_terms",
    "counted_group",
    "guaranteed_full",
    "minute_of_week",
    "percent",
    "total_usage",
]

_MOST_GROUPS = 4096


@dataclass(frozen=True, slots=True)
class PoolFull:
    """The reason why a pool has no room for another seat now."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatUsage:
    """What one kernel draws on its seat, or all kernels of a seat together. Fractions in milli-GPU, memory in MiB."""

    fraction_milli: int
    memory_mib: int
    kernels: int = 1


def minute_of_week(wall_s: float) -> int:
    """Return the minute of the week in the machine's local time, Monday first."""
    local = time.localtime(wall_s)
    return (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min


def percent(milli: int) -> str:
    """Return thousandths as `2.5 %`."""
    return f"{milli / 10:g} %"


def check_request(request: SeatRequest, pool: PoolSpec) -> None:
    """Check the fields of the request against the pool. Raises BadRequestError."""
    _check_name("user", request.owner, "ask your administrator to rename the user at the hub")
    _check_name("server", request.server, "start a server with another name")
    if len(request.hub) > MAX_NAME or not request.hub.isprintable():
        raise BadRequestError(f"hub has more than {MAX_NAME} characters, or some that cannot be printed")
    if not request.owner:
        raise BadRequestError("owner is empty; it is the hub's name of the user")
    if len(request.groups) > _MOST_GROUPS:
        raise BadRequestError(f"groups has {len(request.groups)} names; allowed: {_MOST_GROUPS}")
    if not 1 <= request.fraction_milli <= 1000:
        raise BadRequestError(f"fraction_milli is {request.fraction_milli}; allowed: 1 to 1000", reason="bad-fraction")
    if pool.fractions_milli and request.fraction_milli not in pool.fractions_milli:
        offered = ", ".join(format_fraction(milli) for milli in pool.fractions_milli)
        raise BadRequestError(
            f"a fraction of {format_fraction(request.fraction_milli)} was asked, but pool {pool.name!r} offers {offered}; "
            "choose one of these",
            reason="fraction-not-offered",
        )
    if request.ttl_ms < 1 or request.wait_ms < 0:
        raise BadRequestError(
            f"ttl_ms is {request.ttl_ms} and wait_ms is {request.wait_ms}; allowed: a ttl_ms of 1 or more, a wait_ms of 0 or more"
        )


def _check_name(whose: str, name: str, remedy: str) -> None:
    if len(name) > MAX_NAME:
        raise BadRequestError(f"the name of the {whose} has {len(name)} characters; allowed: {MAX_NAME}; {remedy}")
    if found := describe_unprintable(name):
        raise BadRequestError(
            f"the name of the {whose}, {name!a}, has {found}, which could change how lists and logs show it; a name may have no "
            f"character that cannot be printed; {remedy}, or start the server without a GPU (fraction 'none')",
            reason="unprintable-name",
        )


def check_terms(pool: str, hub: HubPool, groups: Iterable[str], wall_s: float) -> tuple[str, GroupTerms]:
    """Return the group through which the user may use the pool, and its terms. Raises ForbiddenError, or NoRoomError (closed)."""
    named = sorted(groups)
    found = hub.terms(named)
    if found is None:
        allowed = ", ".join(sorted(hub.groups or ()))
        yours = f"you are in {', '.join(named)}" if named else "you are in none"
        raise ForbiddenError(
            f"pool {pool!r} is for members of {allowed}, and {yours}; choose another pool, or ask your administrator",
            reason="pool-group",
        )
    minute = minute_of_week(wall_s)
    if hub.hours is not None and not hub.hours.is_open(minute):
        raise NoRoomError(
            f"pool {pool!r} is closed now; it is open {hub.hours.text} and opens next on {hub.hours.next_opening(minute)}; "
            "come back then, or choose another pool",
            reason="pool-closed",
        )
    return found


def counted_group(group: str, groups: Iterable[str], pool: PoolSpec) -> str:
    """Return the group whose limits a seat counts for: `group`, through which it is given, else the user's first group with limits."""
    mine = set(groups)
    return group or next((name for name, _ in pool.group_limits if name in mine), "")


def check_limits(
    request: SeatRequest, group: str, pool: PoolSpec, seats: Sequence[SeatRecord], revoked: Sequence[LeaseView] = ()
) -> None:
    """Check the limits of the user and the group, with their other seats. Raises NoRoomError.

    `revoked`: the user's leases whose seats have ended; they count for the user.
    """
    own = [seat.fraction_milli for seat in seats if seat.owner == request.owner]
    own += [view.spec.fraction_milli * view.spec.devices for view in revoked]
    _check_limit("you", request.fraction_milli, sum(own), pool.user_limits)
    limits = dict(pool.group_limits).get(group)
    if limits is not None:
        all_of = [seat.fraction_milli for seat in seats if seat.group_name == group]
        _check_limit(f"group {group!r}", request.fraction_milli, sum(all_of), limits)


def _check_limit(who: str, milli: int, there_milli: int, limits: Limits) -> None:
    if limits.milli is None or there_milli + milli <= limits.milli:
        return
    you = who == "you"
    there, remedy = "", "choose a smaller fraction"
    if there_milli:
        there = f", and {'your other servers have' if you else 'its servers have'} {_gpus(there_milli)}"
        remedy = f"{'stop one of them' if you else 'wait until one of them ends'}, or {remedy}"
    raise NoRoomError(
        f"{format_fraction(milli)} GPU was asked; {who} may have {_gpus(limits.milli)} in this pool{there}; {remedy}",
        reason="user-limit" if you else "group-limit",
    )


def _gpus(milli: int) -> str:
    if milli > 1000:
        return f"{milli / 1000:g} GPUs"
    return f"{format_fraction(milli)} GPU"


def guaranteed_full(pool: PoolSpec, memory_mib: int, promised_mib: int, capacity_mib: int) -> PoolFull | None:
    """Return why the pool may not promise `memory_mib` more, or None. The pool honours what it promised, so it never promises too much."""
    if pool.oversubscription_milli is None:
        return None
    limit_mib = capacity_mib * pool.oversubscription_milli // 1000
    if promised_mib + memory_mib <= limit_mib:
        return None
    return PoolFull(
        "pool-full",
        f"pool {pool.name!r} has promised {format_memory(promised_mib)} of the {format_memory(limit_mib)} that it may promise, "
        f"and {format_memory(memory_mib)} more were asked",
    )


def check_seat_usage(
    seat: SeatRecord, pool: str, priority: int, asked: SeatUsage, held: SeatUsage, *, earlier: Sequence[str] = ()
) -> None:
    """Check that the seat has room for a kernel beside those that it `held`. Raises ForbiddenError or NoRoomError.

    `earlier`: the seat's leases whose kernels an earlier server started.
    """
    has = f"this server has {format_fraction(seat.fraction_milli)} GPU with {format_memory(seat.memory_mib)} of pool {seat.pool!r}"
    if pool != seat.pool:
        raise ForbiddenError(
            f"a kernel of pool {pool!r} was asked, but {has}; choose a kernel of that pool, or start the server again "
            "with another choice",
            reason="seat-pool",
        )
    if priority > seat.priority:
        raise ForbiddenError(
            f"priority {priority} was asked, but this server has {seat.priority}; leave priority out of the kernelspec",
            reason="seat-priority",
        )
    more = "shut one of them down, or start the server again with more" if held.kernels else "ask for that or less"
    if earlier:
        named = " or ".join(f"`jupyter gpu end {lease_id[:8]}`" for lease_id in earlier)
        more += f"; {named}, in a terminal of this server, ends one that an earlier run of the server has left"
    if held.fraction_milli + asked.fraction_milli > seat.fraction_milli:
        others = f", of which its other kernels have {format_fraction(held.fraction_milli)}" if held.kernels else ""
        raise NoRoomError(
            f"a kernel of {format_fraction(asked.fraction_milli)} GPU was asked, but {has}{others}; {more}",
            reason="seat-full",
        )
    if held.memory_mib + asked.memory_mib > seat.memory_mib:
        others = f", of which its other kernels have {format_memory(held.memory_mib)}" if held.kernels else ""
        raise NoRoomError(
            f"a kernel with {format_memory(asked.memory_mib)} was asked, but {has}{others}; {more}",
            reason="seat-memory",
        )
    if held.kernels >= seat.max_kernels:
        raise NoRoomError(
            f"this server has {held.kernels} kernels with a GPU, the most it may have; {more}",
            reason="seat-kernels",
        )


def total_usage(draws: Iterable[SeatUsage]) -> SeatUsage:
    """Return the sum."""
    there = list(draws)
    return SeatUsage(
        fraction_milli=sum(one.fraction_milli for one in there),
        memory_mib=sum(one.memory_mib for one in there),
        kernels=len(there),
    )
