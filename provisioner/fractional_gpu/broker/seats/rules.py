"""Decides which seats servers may have and which kernels those seats allow, and lets administrators change pool settings.

Error messages say what was requested, what is available, and what the user can do.

A protocol error means that the request itself is refused: the pool is closed or for other groups, a limit would be exceeded, or no device
is large enough. Waiting does not help. `PoolFull` means that existing seats use up the pool: the request may wait until some of them end.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.config.hub import GroupTerms
from fractional_gpu.config.pools import POOL_KEYS, Pool
from fractional_gpu.config.values import config_error
from fractional_gpu.core.events import PoolConfigured
from fractional_gpu.core.model import LeaseView, Limits, PoolSpec
from fractional_gpu.core.units import format_fraction, format_gpus, format_memory, plural
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NoRoomError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import KUBERNETES, SLURM
from fractional_gpu.protocol.names import describe_unprintable
from fractional_gpu.protocol.seats import PoolChange, PoolKeys, PoolList, SeatRequest

log = logging.getLogger(__name__)

_WORKLOAD_IDS = {
    SLURM: (re.compile(r"[1-9][0-9]{0,18}", re.ASCII), "the number of a job, such as 1234"),
    KUBERNETES: (
        re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", re.ASCII),
        "the UID of a pod, such as 0f2f5bd5-9ac2-4a4b-8e0e-2a4f8fd7a3a8 (of a static pod, 32 hexadecimal digits)",
    ),
}


@dataclass(frozen=True, slots=True)
class PoolFull:
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatUsage:
    fraction_milli: int
    memory_mib: int
    kernels: int = 1


def minute_of_week(wall_s: float) -> int:
    local = time.localtime(wall_s)
    return (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min


def percent(milli: int) -> str:
    return f"{milli / 10:g} %"


def is_of_same_server(seat: SeatRecord, request: SeatRequest) -> bool:
    """Return whether the request comes from the seat's own server and would replace the seat. Hub, owner and server name must match."""
    return (seat.hub, seat.owner, seat.server) == (request.hub, request.owner, request.server)


def check_request(request: SeatRequest, pool: PoolSpec) -> None:
    _check_name("user", request.owner, "ask your administrator to rename the user at the hub")
    _check_name("server", request.server, "start a server with another name")
    if len(request.hub) > MAX_NAME or not request.hub.isprintable():
        raise BadRequestError(f"hub is longer than {MAX_NAME} characters or contains an unprintable character")
    if not request.owner:
        raise BadRequestError("owner is empty; it must be the user's name at the hub")
    if not 1 <= request.fraction_milli <= 1000:
        raise BadRequestError(f"fraction_milli is {request.fraction_milli}; expected 1 to 1000", reason="bad-fraction")
    if pool.fractions_milli and request.fraction_milli not in pool.fractions_milli:
        offered = ", ".join(format_fraction(milli) for milli in pool.fractions_milli)
        raise BadRequestError(
            f"a fraction of {format_fraction(request.fraction_milli)} was requested, but pool {pool.name!r} offers {offered}; "
            "choose one of these",
            reason="fraction-not-offered",
        )
    if request.ttl_ms < 1 or request.wait_ms < 0:
        raise BadRequestError(
            f"ttl_ms is {request.ttl_ms} and wait_ms is {request.wait_ms}; ttl_ms must be 1 or more, and wait_ms 0 or more"
        )
    check_workload(request, pool)


def check_workload(request: SeatRequest, pool: PoolSpec) -> None:
    if (only := request.allowed_devices) is not None:
        if not only:
            raise BadRequestError("allowed_devices is empty; leave it out to allow all devices of the pool")
        if unknown := [one for one in only if one not in pool.devices]:
            there = ", ".join(pool.devices) or "none"
            raise BadRequestError(
                f"allowed_devices names {unknown[0][:MAX_NAME]!a}, which is not a device of pool {pool.name!r}; its devices: {there}",
                reason="unknown-device",
            )
    if (workload := request.workload) is None:
        return
    if workload.engine not in (SLURM, KUBERNETES):
        raise BadRequestError(
            f"workload.engine is {workload.engine[:MAX_NAME]!a}; expected {SLURM} or {KUBERNETES}",
            reason="bad-workload",
        )
    pattern, form = _WORKLOAD_IDS[workload.engine]
    if pattern.fullmatch(workload.id) is None:
        raise BadRequestError(f"workload.id is {workload.id[:MAX_NAME]!a}; expected {form}", reason="bad-workload")
    parts = PurePosixPath(workload.control_group).parts
    if workload.control_group and (parts[:1] != ("/",) or ".." in parts or not workload.control_group.isprintable()):
        raise BadRequestError(
            f"workload.control_group is {workload.control_group[:MAX_NAME]!a}; expected a path from the root of the hierarchy, such as "
            "/slurm/uid_1000/job_12, without `..`",
            reason="bad-workload",
        )


def _check_name(whose: str, name: str, remedy: str) -> None:
    if len(name) > MAX_NAME:
        raise BadRequestError(
            f"the {whose} name is too long ({len(name)} characters); the maximum is {MAX_NAME}; {remedy}"
        )
    if found := describe_unprintable(name):
        raise BadRequestError(
            f"the {whose} name {name!a} contains {found}, which could garble lists and logs; names may only contain "
            f"printable characters; {remedy}, or start the server without a GPU (fraction 'none')",
            reason="unprintable-name",
        )


def check_terms(pool: str, hub: Pool, groups: Iterable[str], wall_s: float) -> tuple[str, GroupTerms]:
    named = sorted(groups)
    found = hub.terms(named)
    if found is None:
        allowed = ", ".join(sorted(hub.groups or ()))
        yours = f"you are in {', '.join(named)}" if named else "you are not in any group"
        raise ForbiddenError(
            f"pool {pool!r} is for members of {allowed}, but {yours}; choose another pool, or ask your administrator",
            reason="pool-group",
        )
    minute = minute_of_week(wall_s)
    if hub.hours is not None and not hub.hours.is_open(minute):
        raise NoRoomError(
            f"pool {pool!r} is currently closed; it is open {hub.hours.text} and next opens on {hub.hours.next_opening(minute)}; "
            "come back then, or choose another pool",
            reason="pool-closed",
        )
    return found


def counted_group(group: str, groups: Iterable[str], pool: PoolSpec) -> str:
    """Return the group whose limits apply to a seat.

    This is `group`, which entitles the user to the seat. If that is empty, it is the first of the user's groups with limits, or "".
    """
    mine = set(groups)
    return group or next((name for name, _ in pool.group_limits if name in mine), "")


def check_limits(
    request: SeatRequest, group: str, pool: PoolSpec, seats: Sequence[SeatRecord], revoked: Sequence[LeaseView] = ()
) -> None:
    """Raise NoRoomError if the user or the group would exceed its limit. The user's `revoked` leases count towards the user's limit."""
    own = [seat.fraction_milli for seat in seats if seat.owner == request.owner]
    own += [view.spec.fraction_milli * view.spec.devices for view in revoked]
    _check_limit("you", request.fraction_milli, sum(own), pool.user_limits)
    limits = dict(pool.group_limits).get(group)
    if limits is not None:
        all_of = [seat.fraction_milli for seat in seats if seat.group == group]
        _check_limit(f"group {group!r}", request.fraction_milli, sum(all_of), limits)


def _check_limit(who: str, milli: int, there_milli: int, limits: Limits) -> None:
    if limits.milli is None or there_milli + milli <= limits.milli:
        return
    you = who == "you"
    there, remedy = "", "choose a smaller fraction"
    if there_milli:
        there = f", and {'your other servers have' if you else 'its servers have'} {format_gpus(there_milli)}"
        remedy = f"{'stop one of them' if you else 'wait until one of them ends'}, or {remedy}"
    raise NoRoomError(
        f"{format_fraction(milli)} GPU was requested; {who} may have {format_gpus(limits.milli)} in this pool{there}; {remedy}",
        reason="user-limit" if you else "group-limit",
    )


def guaranteed_full(pool: PoolSpec, memory_mib: int, promised_mib: int, capacity_mib: int) -> PoolFull | None:
    """Return why the pool can't promise another `memory_mib`, or None if it can. The pool's `oversubscription` sets the limit."""
    if pool.oversubscription_milli is None:
        return None
    limit_mib = capacity_mib * pool.oversubscription_milli // 1000
    if promised_mib + memory_mib <= limit_mib:
        return None
    return PoolFull(
        "pool-full",
        f"pool {pool.name!r} has promised {format_memory(promised_mib)} of the {format_memory(limit_mib)} that it may promise, "
        f"and {format_memory(memory_mib)} more was requested",
    )


def check_seat_usage(
    seat: SeatRecord, pool: str, priority: int, asked: SeatUsage, held: SeatUsage, *, earlier: Sequence[str] = ()
) -> None:
    """Check that the seat has room for `asked` on top of `held`. Errors name any leases left by an earlier server (`earlier`).

    Raises ForbiddenError or NoRoomError.
    """
    has = f"this server has {format_fraction(seat.fraction_milli)} GPU with {format_memory(seat.memory_mib)} of pool {seat.pool!r}"
    if pool != seat.pool:
        raise ForbiddenError(
            f"a kernel of pool {pool!r} was requested, but {has}; choose a kernel of that pool, or start the server again "
            "with another choice",
            reason="seat-pool",
        )
    if priority > seat.priority:
        raise ForbiddenError(
            f"priority {priority} was requested, but this server's maximum is {seat.priority}; leave priority out of the kernelspec",
            reason="seat-priority",
        )
    more = "shut one of them down, or start the server again with more" if held.kernels else "request that or less"
    if earlier:
        named = " or ".join(f"`jupyter gpu end {lease_id[:8]}`" for lease_id in earlier)
        more += f"; {named}, in a terminal of this server, ends a kernel left behind by an earlier run of the server"
    if held.fraction_milli + asked.fraction_milli > seat.fraction_milli:
        others = f", and its other kernels hold {format_fraction(held.fraction_milli)}" if held.kernels else ""
        raise NoRoomError(
            f"a kernel with {format_fraction(asked.fraction_milli)} GPU was requested, but {has}{others}; {more}",
            reason="seat-full",
        )
    if held.memory_mib + asked.memory_mib > seat.memory_mib:
        others = f", and its other kernels hold {format_memory(held.memory_mib)}" if held.kernels else ""
        raise NoRoomError(
            f"a kernel with {format_memory(asked.memory_mib)} was requested, but {has}{others}; {more}",
            reason="seat-memory",
        )
    if held.kernels >= seat.max_kernels:
        raise NoRoomError(
            f"this server already has {plural(held.kernels, 'kernel')} with a GPU, its maximum; {more}",
            reason="seat-kernels",
        )


def total_usage(draws: Iterable[SeatUsage]) -> SeatUsage:
    there = list(draws)
    return SeatUsage(
        fraction_milli=sum(one.fraction_milli for one in there),
        memory_mib=sum(one.memory_mib for one in there),
        kernels=len(there),
    )


class PoolEditor:
    """Changes settings in `pools` until the broker restarts. `note` returns a warning for administrators about a pool ("" for none).

    Existing leases and seats keep their size, seat, pool and place in the queue, even if the changed pool would now refuse them.
    """

    def __init__(
        self,
        broker: Broker,
        pools: dict[str, Pool],
        changed: Callable[[Pool], None],
        note: Callable[[PoolSpec], str],
    ) -> None:
        self._broker = broker
        self._configured = dict(pools)
        self._pools = pools
        self._changed = changed
        self._note = note

    def listing(self) -> PoolList:
        return PoolList(pools=[self._keys(pool) for _, pool in sorted(self._pools.items())])

    def change(self, name: str, change: PoolChange, *, uid: int) -> PoolKeys:
        pool = self._pools.get(name)
        if pool is None:
            names = ", ".join(sorted(self._pools))
            raise NotFoundError(f"there is no pool named {name[:MAX_NAME]!r}; pools: {names}", reason="unknown-pool")
        if "devices" in change.keys:
            raise BadRequestError(
                "devices cannot be changed while the broker runs: change the configuration and start the broker again "
                "(`jupyter gpu drain` empties a device)",
                reason="devices",
            )
        try:
            fresh = Pool(name, {**pool.raw, **change.keys})
        except ValueError as error:
            raise BadRequestError(
                str(config_error(f"pools[{name!r}]", change.keys, error)), reason="bad-pool"
            ) from None
        if not change.keys:
            return self._keys(pool)
        spec = self._broker.arbiter.pools()[name]
        self._pools[name] = fresh
        log.warning("pool %r was changed by uid %d: %s", name, uid, ", ".join(sorted(change.keys)))
        self._broker.dispatch(PoolConfigured(at_ms=now_ms(), pool=fresh.spec(spec.devices)))
        self._changed(fresh)
        return self._keys(fresh)

    def _keys(self, pool: Pool) -> PoolKeys:
        now = _effective(pool)
        configured = _effective(self._configured[pool.name])
        spec = self._broker.arbiter.pools().get(pool.name)
        return PoolKeys(
            pool=pool.name,
            devices=list(spec.devices) if spec is not None else [],
            keys=now,
            changed=sorted(key for key in now if now[key] != configured[key]),
            note=self._note(spec) if spec is not None else "",
        )


def _effective(pool: Pool) -> dict[str, Any]:
    return {key: pool.raw.get(key, rule.default_value) for key, rule in POOL_KEYS.items() if key != "devices"}
