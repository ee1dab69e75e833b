"""Decides whether to admit a new lease, and how much a single user or group may have.

- **Admission** (`refusal`). A lease is refused immediately if it can never be served, or if it would exceed a limit or the pool's allowed
  oversubscription. The refusal says what is available and what the user can do.
- **User and group limits.** The number of leases and the total of their fractions are checked at admission. The total on devices at any one
  time is checked later: a ticket that would exceed this limit waits (`over_limit`). In the meantime, it neither blocks others nor counts as
  passed over, and idle leases of the same user or group are suspended for it.
- **Priorities** and **pins.** A pin keeps an idle lease on its device, and is charged to its owner's daily budget. A claim is pinned until
  it ends.
"""

from collections.abc import Iterator
from dataclasses import replace

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import Pinned
from fractional_gpu.core.model import LeaseSpec, LeaseState, Limits, PoolSpec
from fractional_gpu.core.place import allowed_of
from fractional_gpu.core.revoke import REVOKED
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Account, Lease, OccupancyKind, Reason
from fractional_gpu.core.suspend import may_leave, steps_aside
from fractional_gpu.core.units import format_duration, format_fraction, format_gpus, format_memory, plural

UNATTACHED_LIMIT = "unattached-limit"
"""The refusal code for requests that can be retried once the owner's other kernels have started."""


# -- admission ---------------------------------------------------------------------------------------------------------
def refusal(books: Books, spec: LeaseSpec) -> Reason | None:
    if spec.lease_id in books.leases:
        return Reason("duplicate-lease", f"lease {spec.lease_id} already exists; a new lease needs a new id")
    wrong = _bad_size(spec)
    if wrong is not None:
        return wrong
    pool = books.pools.get(spec.pool)
    if pool is None:
        names = ", ".join(sorted(books.pools)) or "none"
        return Reason("unknown-pool", f"there is no pool named {spec.pool!r}; pools: {names}")
    too_long = _length_refusal(books, pool, spec, spec.claim_ms) if spec.claim_ms else None
    return (
        size_refusal(books, pool, spec)
        or too_long
        or share_refusal(books, pool, spec)
        or _unattached_refusal(books, pool, spec)
    )


def _bad_size(spec: LeaseSpec) -> Reason | None:
    request_mib = spec.reserve_mib if spec.request_mib is None else spec.request_mib
    if spec.devices < 1 or (spec.devices > 1 and spec.fraction_milli != 1000):
        return Reason(
            "bad-size",
            f"{spec.devices} devices with a fraction of {format_fraction(max(1, spec.fraction_milli))} were requested; "
            "ask for one device, or for several whole ones (fraction 1)",
        )
    if not 1 <= spec.fraction_milli <= 1000 or spec.reserve_mib < 1 or request_mib < 0:
        return Reason(
            "bad-size",
            f"a fraction of {spec.fraction_milli} thousandths with {spec.reserve_mib} MiB was requested; "
            "ask for 1 to 1000 thousandths, and 1 MiB or more",
        )
    return None


def size_refusal(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Reason | None:
    """Return the reason for refusing this size if the pool does not offer it or has no devices for it. Otherwise return None."""
    wrong = _bad_size(spec)
    if wrong is not None:
        return wrong
    if pool.fractions_milli and spec.fraction_milli not in pool.fractions_milli:
        offered = ", ".join(format_fraction(milli) for milli in pool.fractions_milli)
        return Reason(
            "fraction-not-offered",
            f"a fraction of {format_fraction(spec.fraction_milli)} was requested, but pool {pool.name!r} offers {offered}; "
            "ask for one of these",
        )
    devices = [books.devices[one].spec for one in allowed_of(pool, spec) if one in books.devices]
    largest_mib = max((device.leasable_mib for device in devices), default=0)
    if spec.reserve_mib > largest_mib:
        return Reason(
            "larger-than-device",
            f"{format_memory(spec.reserve_mib)} was requested, but the largest device of pool {pool.name!r} can give "
            f"{format_memory(largest_mib)}; ask for that or less",
        )
    if spec.devices > pool.max_devices:
        return Reason(
            "too-many-devices",
            f"{spec.devices} devices were requested, but pool {pool.name!r} gives a kernel at most {pool.max_devices}; "
            "ask for that or less",
        )
    kinds = [device.name for device in devices if device.leasable_mib >= spec.reserve_mib]
    most = max(map(kinds.count, kinds), default=0)
    if spec.devices > most:
        return Reason(
            "too-many-devices",
            f"{spec.devices} devices were requested, but pool {pool.name!r} has {most} devices of one kind with "
            f"{format_memory(spec.reserve_mib)} each; ask for that many or less",
        )
    return None


def share_refusal(
    books: Books, pool: PoolSpec, spec: LeaseSpec, *, instead_of: LeaseSpec | None = None
) -> Reason | None:
    """Return a refusal if this lease would exceed a limit of its user, group or pool, otherwise None. It replaces `instead_of`, if any."""
    by_limit = _limit_refusal(books, pool, spec, instead_of)
    return by_limit or _oversubscription_refusal(books, pool, spec, instead_of)


def _limit_refusal(books: Books, pool: PoolSpec, spec: LeaseSpec, instead_of: LeaseSpec | None) -> Reason | None:
    for who, account, limits in _limits_for(books, pool, spec):
        name = f"{who} {account.name!r}"
        if limits.leases is not None and instead_of is None and len(account.leases) >= limits.leases:
            absent = [
                lease
                for lease in _without_process(books, pool)
                if account.name == (lease.spec.owner if who == "user" else lease.spec.group)
            ]
            others = f", among them {_describe_absent(books, absent)}" if absent else ""
            return Reason(
                f"{who}-limit",
                f"{name} has {len(account.leases)} of at most {plural(limits.leases, 'kernel')} in pool {pool.name!r}{others}: "
                "shut one down, or ask the administrator for more",
            )
        asked = spec.fraction_milli * spec.devices
        before = instead_of.fraction_milli * instead_of.devices if instead_of is not None else 0
        had = account.milli - before
        if limits.milli is not None and had + asked > limits.milli and asked > before:
            return Reason(
                f"{who}-limit",
                f"{format_gpus(asked)} was requested, but {name} has {format_gpus(had)} of at most {format_gpus(limits.milli)} "
                f"in pool {pool.name!r}: shut a kernel down, or ask for a smaller fraction",
            )
    return None


def _oversubscription_refusal(
    books: Books, pool: PoolSpec, spec: LeaseSpec, instead_of: LeaseSpec | None
) -> Reason | None:
    before = _guaranteed_mib(instead_of) if instead_of is not None else 0
    there = [lease.spec for lease in books.leases.values() if lease.spec.pool == pool.name and not lease.revoked]
    promised, asked = sum(map(_guaranteed_mib, there)) - before, _guaranteed_mib(spec)
    if pool.oversubscription_milli is None or asked <= before:
        return None
    limit = pool_mib(books, pool) * pool.oversubscription_milli // 1000
    if promised + asked <= limit:
        return None
    sentence = (
        f"{format_memory(asked)} was requested, but pool {pool.name!r} has promised {format_memory(promised)} of the "
        f"{format_memory(limit)} that it may promise"
    )
    remedy = "shut a kernel down, or ask for a smaller fraction"
    absent = _without_process(books, pool)
    if instead_of is None and absent:
        absent_mib = sum(_guaranteed_mib(lease.spec) for lease in absent)
        sentence += f", {format_memory(absent_mib)} of that to {_describe_absent(books, absent)}"
        if promised - absent_mib + asked <= limit:
            remedy = "try again when they have ended, or ask for a smaller fraction"
    return Reason("pool-full", f"{sentence}; {remedy}")


def _unattached_refusal(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Reason | None:
    """Return a refusal if too many of the owner's leases in the pool have no process, or if they have been promised too much memory."""
    there = [lease.spec for lease in _without_process(books, pool) if lease.spec.owner == spec.owner]
    remedy = "wait until these kernels have started, or shut down those that do not start"
    if len(there) >= pool.unattached_leases:
        return Reason(
            UNATTACHED_LIMIT,
            f"one more kernel was requested, but {spec.owner!r} has {plural(len(there), 'lease')} in pool {pool.name!r} whose kernels "
            f"have not started (at most {pool.unattached_leases} allowed); {remedy}",
        )
    if pool.oversubscription_milli is None or not there:
        return None
    most_mib = pool_mib(books, pool) * pool.oversubscription_milli * pool.unattached_share_milli // 1_000_000
    promised_mib, asked_mib = sum(map(_guaranteed_mib, there)), _guaranteed_mib(spec)
    if promised_mib + asked_mib <= most_mib:
        return None
    return Reason(
        UNATTACHED_LIMIT,
        f"{format_memory(asked_mib)} was requested, but {spec.owner!r} was promised {format_memory(promised_mib)} of pool {pool.name!r} "
        f"for kernels that have not started (at most {format_memory(most_mib)} allowed); {remedy}",
    )


def _guaranteed_mib(spec: LeaseSpec) -> int:
    """Return the total memory guaranteed to a lease across all its devices, in MiB.

    This is the memory it requests, up to its cap. A lease on several devices is guaranteed its whole cap.
    """
    if spec.devices > 1 or spec.request_mib is None:
        return spec.reserve_mib * spec.devices
    return min(spec.request_mib, spec.reserve_mib)


def pool_mib(books: Books, pool: PoolSpec) -> int:
    """Return how much memory on the pool's devices can be leased in total, in MiB."""
    return sum(books.devices[one].spec.leasable_mib for one in pool.devices if one in books.devices)


def _without_process(books: Books, pool: PoolSpec) -> list[Lease]:
    return [lease for lease in books.in_state(LeaseState.UNATTACHED) if lease.spec.pool == pool.name]


def _describe_absent(books: Books, leases: list[Lease]) -> str:
    """Describe leases without a process, and say when the last of them expires."""
    left_ms = max((lease.expires_ms or 0) - books.now_ms for lease in leases)
    who, has = ("a kernel", "has") if len(leases) == 1 else (f"{len(leases)} kernels", "have")
    return f"{who} that {has} not started or {has} ended (counted for up to {format_duration(max(1000, left_ms))} more)"


# -- limits of users and groups ----------------------------------------------------------------------------------------
def _limits_for(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Iterator[tuple[str, Account, Limits]]:
    """Yield each set of limits that applies to a lease, as a tuple of "user" or "group", the account, and the limits."""
    yield "user", books.accounts.owner(pool.name, spec.owner), pool.user_limits
    for name, limits in pool.group_limits:
        if name == spec.group and name:
            yield "group", books.accounts.group(pool.name, name), limits


def added_milli(books: Books, lease: Lease) -> int:
    """Return how many milli-GPU serving the lease's ticket would add to its user's total on devices. Return 0 if no limit applies."""
    grows = lease.ticket.resize_to if lease.ticket is not None else None
    limits = _limits_for(books, books.policy(lease), lease.spec)
    if all(limit.resident_milli is None for _, _, limit in limits):
        return 0
    return lease.milli if grows is None else max(0, grows.fraction_milli * grows.devices - lease.milli)


def over_limit(books: Books, lease: Lease, milli: int) -> Reason | None:
    """Return the reason to wait if `milli` more on devices would put the user or group over a limit. Otherwise return None."""
    for who, account, _, most in _exceeded_limits(books, lease, milli):
        return Reason(
            f"wait.{who}-limit",
            f"{format_gpus(milli)} is needed, but {who} {account.name!r} has {format_gpus(account.resident_milli)} of at most "
            f"{format_gpus(most)} on devices at the same time: this kernel waits until another kernel of the {who} makes room",
            tuple(account.holders),
        )
    return None


def _exceeded_limits(books: Books, lease: Lease, milli: int) -> list[tuple[str, Account, int, int]]:
    """Return the limits exceeded if the lease gets `milli`, as tuples of "user" or "group", the account, the excess, and the limit."""
    return [
        (who, account, account.resident_milli + milli - limits.resident_milli, limits.resident_milli)
        for who, account, limits in _limits_for(books, books.policy(lease), lease.spec)
        if limits.resident_milli is not None and account.resident_milli + milli > limits.resident_milli
    ]


def victims_of_same_user(books: Books, lease: Lease, milli: int) -> tuple[Lease, ...] | None:
    """Return the user's or group's idle leases to suspend so that the lease stays within its limits. Return None if there are too few."""
    chosen: dict[str, Lease] = {}
    for _, account, excess, _ in _exceeded_limits(books, lease, milli):
        leaving = [
            other
            for other in account.holders.values()
            if other.occupancy is OccupancyKind.SUSPENDING or other.lease_id in chosen
        ]
        left = excess - sum(other.milli for other in leaving)
        for other in sorted(account.holders.values(), key=lambda other: (other.last_active_ms, other.lease_id)):
            if left <= 0:
                break
            free = other is not lease and other.lease_id not in chosen
            if free and steps_aside(other, lease) and may_leave(books, other):
                chosen[other.lease_id] = other
                left -= other.milli
        if left > 0:
            return None
    return tuple(chosen.values())


# -- priorities and pins -----------------------------------------------------------------------------------------------
def set_priority(changes: Changes, lease: Lease, priority: int | None, sentence: str) -> None:
    """Set a different priority for the lease, or restore its own priority if `priority` is None."""
    own = lease.spec.priority if lease.spec.own_priority is None else lease.spec.own_priority
    wanted = own if priority is None else priority
    spec = replace(lease.spec, priority=wanted, own_priority=None if wanted == own else own)
    if spec == lease.spec:
        return
    changes.books.set_priority(lease, spec)
    changes.requeued.add(spec.pool)
    changes.record(lease.lease_id, "budget.lower-priority" if wanted != own else "budget.own-priority", sentence)


def pin(changes: Changes, lease: Lease, duration_ms: int) -> None:
    """Pin the lease to its device for `duration_ms` from now, or decline the request if this is not allowed."""
    refused = REVOKED if lease.revoked else _pin_refusal(changes, lease, duration_ms)
    if refused is not None:
        changes.decline(lease, refused.code, refused.sentence, about="pin")
        return
    changes.set_pin(lease, changes.now_ms + duration_ms)
    changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=lease.pinned_until_ms))
    changes.record(lease.lease_id, "pin.begun", f"pinned for {format_duration(duration_ms)}")


def _pin_refusal(changes: Changes, lease: Lease, duration_ms: int) -> Reason | None:
    pool = changes.books.policy(lease)
    if lease.state is LeaseState.UNATTACHED or lease.left_behind:
        return Reason("not-alive", "the kernel has no process: start it, then pin it")
    returned_ms = max(0, lease.pinned_until_ms - changes.now_ms)
    return _length_refusal(changes.books, pool, lease.spec, duration_ms, returned_ms)


def _length_refusal(
    books: Books, pool: PoolSpec, spec: LeaseSpec, duration_ms: int, returned_ms: int = 0
) -> Reason | None:
    """Return the reason for refusing a pin or claim of this length, or None if it is allowed.

    `returned_ms` is the unused time of the pin being replaced, which goes back to the budget.
    """
    what, key, most_ms = (
        ("claim", "longest_claim", pool.longest_claim_ms) if spec.claim_ms else ("pin", "max_pin", pool.max_pin_ms)
    )
    if duration_ms < 1:
        return Reason(f"{what}-too-short", f"a {what} must last at least a second")
    asked = format_duration(duration_ms)
    if duration_ms > most_ms:
        most = format_duration(most_ms)
        sentence = (
            f"a {what} of {asked} was requested, but pool {pool.name!r} allows at most {most}: ask for that or less"
        )
        if not most_ms:
            sentence = f"pool {pool.name!r} allows no {what}s ({key} is 0): ask the administrator"
        return Reason(f"{what}-too-long", sentence)
    if pool.pin_budget_ms is None:
        return None
    account = books.accounts.owner(pool.name, spec.owner)
    waiting_ms = sum(one.spec.claim_ms for one in account.leases.values() if not one.pinned_until_ms)
    left_ms = pool.pin_budget_ms - account.spent_pin_ms(pool, books.now_ms) + returned_ms - waiting_ms
    if duration_ms <= left_ms:
        return None
    left, budget = format_duration(max(0, left_ms)), format_duration(pool.pin_budget_ms)
    return Reason(
        "pin-budget",
        f"a {what} of {asked} was requested, but {account.name!r} has {left} left of the {budget} allowed a day: "
        "ask for less, or unpin another kernel",
    )


def unpin(changes: Changes, lease: Lease, by: str) -> None:
    """End the lease's pin on request. The request is answered even if there is no pin."""
    if lease.pinned_until_ms:
        end_pin(changes, lease, f"its pin ended because of {by}")
    else:
        changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=0))


def end_pin(changes: Changes, lease: Lease, sentence: str, reason: str = "pin.ended") -> None:
    """End the lease's pin, if it has one, and return the unused time to the owner's budget."""
    if lease.pinned_until_ms:
        changes.set_pin(lease, 0)
        changes.record(lease.lease_id, reason, sentence)
        changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=0))
