"""What one user, or one group, may have of a pool.

The number of leases, and the sum of their fractions, are checked at admission. The sum of the fractions that are on devices at a time makes
a ticket wait. Such a ticket does not block others and is not passed over by them; idle leases of the same user (or group) leave for it.
"""

from collections.abc import Callable, Iterator, Sequence

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.books.records import Account, OccupancyKind, Reason
from fractional_gpu.core.model import (
    LeaseSpec,
    LeaseState,
    Limits,
    PoolSpec,
)
from fractional_gpu.core.rules.eligibility import lacks_device, steps_aside, suspendable_from_ms
from fractional_gpu.core.units import format_duration, format_fraction

__all__ = ["describe_absent", "limit_refusal", "over_limit", "victims_of_same_user", "without_process"]


def limits_for(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Iterator[tuple[str, Account, Limits]]:
    """Yield the limits that apply to a lease: "user" or "group", the account, its limits."""
    yield "user", books.accounts.owner(pool.name, spec.owner), pool.user_limits
    for name, limits in pool.group_limits:
        if name == spec.group and name:
            yield "group", books.accounts.group(pool.name, name), limits


def limit_refusal(
    books: Books, pool: PoolSpec, spec: LeaseSpec, *, instead_of: LeaseSpec | None = None
) -> Reason | None:
    """Return why a new lease, or another size instead of `instead_of`, exceeds a limit of its user or group; None: it does not."""
    for who, account, limits in limits_for(books, pool, spec):
        name = f"{who} {account.name!r}"
        if limits.leases is not None and instead_of is None and account.leases >= limits.leases:
            absent = [one for one in without_process(books, pool) if _counts_for(who, account, one)]
            others = f", among them {describe_absent(books, absent)}" if absent else ""
            return Reason(
                f"{who}-limit",
                f"{name} has {account.leases} of at most {limits.leases} kernels in pool {pool.name!r}{others}: "
                "shut one down, or ask the administrator for more",
            )
        asked = spec.fraction_milli * spec.devices
        had = account.milli - (instead_of.fraction_milli * instead_of.devices if instead_of is not None else 0)
        if (
            limits.milli is not None
            and had + asked > limits.milli
            and (instead_of is None or asked > account.milli - had)
        ):
            return Reason(
                f"{who}-limit",
                f"{_gpus(asked)} was asked, but {name} has {_gpus(had)} of at most {_gpus(limits.milli)} in pool {pool.name!r}: "
                "shut a kernel down, or ask for a smaller fraction",
            )
    return None


def _counts_for(who: str, account: Account, lease: Lease) -> bool:
    return account.name == (lease.spec.owner if who == "user" else lease.spec.group)


def without_process(books: Books, pool: PoolSpec) -> list[Lease]:
    """Return the pool's leases without a process."""
    return [lease for lease in books.by_state[LeaseState.UNATTACHED].values() if lease.spec.pool == pool.name]


def describe_absent(books: Books, leases: Sequence[Lease]) -> str:
    """Describe leases without a process, and say when the last of them expires."""
    left_ms = max((lease.expires_ms or 0) - books.now_ms for lease in leases)
    alone = len(leases) == 1
    who, has = ("a kernel", "has") if alone else (f"{len(leases)} kernels", "have")
    return f"{who} that {has} not started or {has} ended (counted for {format_duration(max(1000, left_ms))} at most)"


def _excess_milli(books: Books, lease: Lease, milli: int) -> list[tuple[str, Account, int, int]]:
    """Return the limits that `milli` more on devices would exceed: "user" or "group", account, excess, limit."""
    pool = books.policy(lease)
    return [
        (who, account, account.resident_milli + milli - limits.resident_milli, limits.resident_milli)
        for who, account, limits in limits_for(books, pool, lease.spec)
        if limits.resident_milli is not None and account.resident_milli + milli > limits.resident_milli
    ]


def over_limit(books: Books, lease: Lease, milli: int) -> Reason | None:
    """Return why limits keep a waiting lease off its device now, or None."""
    for who, account, _, most in _excess_milli(books, lease, milli):
        there = [other for other in account.holders.values() if other.spec.pool == lease.spec.pool]
        return Reason(
            f"wait.{who}-limit",
            f"{_gpus(milli)} is needed, but {who} {account.name!r} has {_gpus(account.resident_milli)} of at most "
            f"{_gpus(most)} on devices at a time: it waits until one of these kernels makes room",
            tuple(other.lease_id for other in there),
        )
    return None


def victims_of_same_user(
    books: Books, lease: Lease, milli: int, hint: Callable[[int], None]
) -> tuple[Lease, ...] | None:
    """Return idle leases of the same user (group) whose leaving brings the lease within its limits; None: there are not enough.

    Leases that are leaving count already. `hint` is called with the time when another one may be suspended.
    """
    chosen: dict[str, Lease] = {}
    for _, account, excess, _ in _excess_milli(books, lease, milli):
        left = excess - sum(
            other.milli for other in account.holders.values() if other.occupancy is OccupancyKind.SUSPENDING
        )
        left -= sum(other.milli for other in chosen.values() if other.lease_id in account.holders)
        for other in sorted(account.holders.values(), key=lambda other: (other.last_active_ms, other.lease_id)):
            if left <= 0:
                break
            may_leave = other is not lease and other.lease_id not in chosen and steps_aside(other, lease)
            if may_leave and _may_be_suspended(books, other, hint):
                chosen[other.lease_id] = other
                left -= other.milli
        if left > 0:
            return None
    return tuple(chosen.values())


def _may_be_suspended(books: Books, lease: Lease, hint: Callable[[int], None]) -> bool:
    if lease.occupancy is not OccupancyKind.IDLE or lacks_device(books, lease):
        return False
    from_ms = suspendable_from_ms(books.policy(lease), lease)
    if from_ms is not None and from_ms > books.now_ms:
        hint(from_ms)
    return from_ms is not None and from_ms <= books.now_ms


def _gpus(milli: int) -> str:
    if milli <= 1000:
        return f"{format_fraction(milli)} GPU"
    return f"{milli / 1000:g} GPUs"
