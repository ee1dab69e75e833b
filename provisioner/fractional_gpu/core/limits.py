"""Whether a new lease can be admitted, and what one user or group may have.

What can never be served is refused at once, with what there is and what to do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import Pinned
from fractional_gpu.core.model import LeaseSpec, LeaseState, Limits, PoolSpec
from fractional_gpu.core.place import allowed_of
from fractional_gpu.core.revoke import REVOKED
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Account, Lease, OccupancyKind, Reason
from fractional_gpu.core.suspend import lacks_device, steps_aside, suspendable_from_ms
from fractional_gpu.core.units import format_duration, format_fraction, format_gpus, format_memory, plural


# -- limits ------------------------------------------------------------------------------------------------------------
# What one user, or one group, may have of a pool.
#
# The number of leases, and the sum of their fractions, are checked at admission. The sum of the fractions that are on devices at a time
# makes a ticket wait. Such a ticket does not block others and is not passed over by them; idle leases of the same user (or group) leave
# for it.
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
        if limits.leases is not None and instead_of is None and len(account.leases) >= limits.leases:
            absent = [one for one in without_process(books, pool) if _counts_for(who, account, one)]
            others = f", among them {describe_absent(books, absent)}" if absent else ""
            return Reason(
                f"{who}-limit",
                f"{name} has {len(account.leases)} of at most {plural(limits.leases, 'kernel')} in pool {pool.name!r}{others}: "
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
                f"{format_gpus(asked)} was asked, but {name} has {format_gpus(had)} of at most {format_gpus(limits.milli)} "
                f"in pool {pool.name!r}: shut a kernel down, or ask for a smaller fraction",
            )
    return None


def _counts_for(who: str, account: Account, lease: Lease) -> bool:
    return account.name == (lease.spec.owner if who == "user" else lease.spec.group)


def without_process(books: Books, pool: PoolSpec) -> list[Lease]:
    """Return the pool's leases without a process."""
    return [lease for lease in books.in_state(LeaseState.UNATTACHED) if lease.spec.pool == pool.name]


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


def added_milli(books: Books, lease: Lease) -> int:
    """Return what the lease's ticket adds to what its user (and group) has on devices, milli-GPU; 0 if no limit applies."""
    grows = lease.ticket.resize_to if lease.ticket is not None else None
    limits = limits_for(books, books.policy(lease), lease.spec)
    if all(limit.resident_milli is None for _, _, limit in limits):
        return 0
    return lease.milli if grows is None else max(0, grows.fraction_milli * grows.devices - lease.milli)


def over_limit(books: Books, lease: Lease, milli: int) -> Reason | None:
    """Return why limits keep a waiting lease off its device now, or None."""
    for who, account, _, most in _excess_milli(books, lease, milli):
        return Reason(
            f"wait.{who}-limit",
            f"{format_gpus(milli)} is needed, but {who} {account.name!r} has {format_gpus(account.resident_milli)} of at most "
            f"{format_gpus(most)} on devices at a time: it waits until one of these kernels makes room",
            tuple(account.holders),
        )
    return None


def victims_of_same_user(
    books: Books, lease: Lease, milli: int, hint: Callable[[int], None]
) -> tuple[Lease, ...] | None:
    """Return idle leases of the same user (group) whose leaving brings the lease within its limits, or None; `hint` gets the next time."""
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


# -- admission ---------------------------------------------------------------------------------------------------------
UNATTACHED_LIMIT = "unattached-limit"
"""The code of a refusal that ends when the owner's other kernels have started."""


def refusal(books: Books, spec: LeaseSpec) -> Reason | None:
    """Return why a new lease is refused, or None."""
    if spec.lease_id in books.leases:
        return Reason("duplicate-lease", f"lease {spec.lease_id} exists already; a new lease needs a new id")
    wrong = _bad_size(spec)
    if wrong is not None:
        return wrong
    pool = books.pools.get(spec.pool)
    if pool is None:
        names = ", ".join(sorted(books.pools)) or "none"
        return Reason("unknown-pool", f"there is no pool {spec.pool!r}; pools: {names}")
    return (
        size_refusal(books, pool, spec)
        or limit_refusal(books, pool, spec)
        or oversubscription_refusal(books, pool, spec)
        or _unattached_refusal(books, pool, spec)
    )


def _unattached_refusal(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Reason | None:
    """Return a refusal if the owner's leases without a process are as many, or were promised as much, as the pool allows."""
    there = [
        lease.spec
        for lease in books.in_state(LeaseState.UNATTACHED)
        if lease.spec.pool == spec.pool and lease.spec.owner == spec.owner
    ]
    remedy = "wait until these kernels have started, or shut down those that do not start"
    if len(there) >= pool.unattached_leases:
        return Reason(
            UNATTACHED_LIMIT,
            f"one more kernel was asked, but {spec.owner!r} has {plural(len(there), 'lease')} in pool {pool.name!r} whose kernels have not "
            f"started, of at most {pool.unattached_leases}; {remedy}",
        )
    if pool.oversubscription_milli is None or not there:
        return None
    sizes = [books.devices[device_id].spec.leasable_mib for device_id in pool.devices if device_id in books.devices]
    most_mib = sum(sizes) * pool.oversubscription_milli * pool.unattached_share_milli // 1_000_000
    promised_mib, asked_mib = sum(map(guaranteed_mib, there)), guaranteed_mib(spec)
    if promised_mib + asked_mib <= most_mib:
        return None
    return Reason(
        UNATTACHED_LIMIT,
        f"{format_memory(asked_mib)} were asked, but {spec.owner!r} was promised {format_memory(promised_mib)} of pool {pool.name!r} for "
        f"kernels that have not started, of at most {format_memory(most_mib)}; {remedy}",
    )


def _bad_size(spec: LeaseSpec) -> Reason | None:
    request_mib = spec.reserve_mib if spec.request_mib is None else spec.request_mib
    if spec.devices < 1 or (spec.devices > 1 and spec.fraction_milli != 1000):
        return Reason(
            "bad-size",
            f"{spec.devices} devices with a fraction of {format_fraction(max(1, spec.fraction_milli))} were asked; "
            "allowed: 1 or more, and several only as whole ones (fraction 1)",
        )
    if not 1 <= spec.fraction_milli <= 1000 or spec.reserve_mib < 1 or request_mib < 0:
        return Reason(
            "bad-size",
            f"a fraction of {spec.fraction_milli} thousandths with {spec.reserve_mib} MiB was asked; "
            "allowed: 1 to 1000 thousandths, and 1 MiB or more",
        )
    return None


def size_refusal(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Reason | None:
    """Return a refusal if the pool does not offer the size, or has no device as large; else None."""
    wrong = _bad_size(spec)
    if wrong is not None:
        return wrong
    if pool.fractions_milli and spec.fraction_milli not in pool.fractions_milli:
        offered = ", ".join(format_fraction(milli) for milli in pool.fractions_milli)
        return Reason(
            "fraction-not-offered",
            f"a fraction of {format_fraction(spec.fraction_milli)} was asked, but pool {pool.name!r} offers {offered}; "
            "ask for one of these",
        )
    return _too_large(books, pool, spec)


def _too_large(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Reason | None:
    sizes = [books.devices[one].spec.leasable_mib for one in allowed_of(pool, spec) if one in books.devices]
    if spec.reserve_mib > max(sizes, default=0):
        return Reason(
            "larger-than-device",
            f"{format_memory(spec.reserve_mib)} were asked, but the largest device of pool {pool.name!r} can give "
            f"{format_memory(max(sizes, default=0))}; ask for that or less",
        )
    return _too_many(books, pool, spec)


def _too_many(books: Books, pool: PoolSpec, spec: LeaseSpec) -> Reason | None:
    if spec.devices == 1:
        return None
    if spec.devices > pool.max_devices:
        return Reason(
            "too-many-devices",
            f"{spec.devices} devices were asked, pool {pool.name!r} gives one kernel at most {pool.max_devices}; ask for that or less",
        )
    devices = [books.devices[one].spec for one in allowed_of(pool, spec) if one in books.devices]
    kinds = [device.name for device in devices if device.leasable_mib >= spec.reserve_mib]
    most = max(map(kinds.count, kinds), default=0)
    if spec.devices <= most:
        return None
    return Reason(
        "too-many-devices",
        f"{spec.devices} devices were asked, but pool {pool.name!r} has {most} devices of one kind with "
        f"{format_memory(spec.reserve_mib)} each; ask for that many or less",
    )


def guaranteed_mib(spec: LeaseSpec) -> int:
    """Return what a lease is promised on all its devices: what it requests, which is never more than its cap; of several, its cap."""
    if spec.devices > 1 or spec.request_mib is None:
        return spec.reserve_mib * spec.devices
    return min(spec.request_mib, spec.reserve_mib)


def oversubscription_refusal(
    books: Books, pool: PoolSpec, spec: LeaseSpec, *, instead_of: LeaseSpec | None = None
) -> Reason | None:
    """Return a refusal if the pool may not promise so much more memory. `instead_of`: what the lease was promised before."""
    if pool.oversubscription_milli is None:
        return None
    sizes = [books.devices[device_id].spec.leasable_mib for device_id in pool.devices if device_id in books.devices]
    before = guaranteed_mib(instead_of) if instead_of is not None else 0
    there = [one.spec for one in books.leases.values() if one.spec.pool == pool.name and not one.revoked]
    promised, asked = sum(map(guaranteed_mib, there)) - before, guaranteed_mib(spec)
    if asked <= before:
        return None
    limit = sum(sizes) * pool.oversubscription_milli // 1000
    if promised + asked <= limit:
        return None
    sentence = (
        f"{format_memory(asked)} were asked, but pool {pool.name!r} has promised {format_memory(promised)} of the "
        f"{format_memory(limit)} it may promise"
    )
    remedy = "shut a kernel down, or ask for a smaller fraction"
    absent = without_process(books, pool)
    if instead_of is None and absent:
        absent_mib = sum(guaranteed_mib(lease.spec) for lease in absent)
        sentence += f", {format_memory(absent_mib)} of that to {describe_absent(books, absent)}"
        if promised - absent_mib + asked <= limit:
            remedy = "try again when they have ended, or ask for a smaller fraction"
    return Reason("pool-full", f"{sentence}; {remedy}")


# -- priorities --------------------------------------------------------------------------------------------------------
def set_priority(changes: Changes, lease: Lease, priority: int | None, sentence: str) -> bool:
    """Give the lease another priority for now, or its own one again (None). Returns whether it changed."""
    own = lease.spec.priority if lease.spec.own_priority is None else lease.spec.own_priority
    wanted = own if priority is None else priority
    spec = replace(lease.spec, priority=wanted, own_priority=None if wanted == own else own)
    if spec == lease.spec:
        return False
    changes.books.set_priority(lease, spec)
    changes.requeued.add(spec.pool)
    changes.record(lease.lease_id, "budget.lower-priority" if wanted != own else "budget.own-priority", sentence)
    return True


# -- pins --------------------------------------------------------------------------------------------------------------
_DAY_MS = 86_400_000


class Pins:
    """Pins and their budgets."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def pin(self, lease: Lease, duration_ms: int) -> None:
        """Pin the lease from now on, or decline. Replaces an earlier pin."""
        pool, account = self._books.policy(lease), self._books.accounts.of(lease)
        no_seat = (REVOKED.code, REVOKED.sentence) if lease.revoked else None
        refused = no_seat or self._refusal(lease, pool, account, duration_ms)
        if refused is not None:
            self._changes.decline(lease, *refused, about="pin")
            return
        self._settle(account, pool)
        account.pinned_ms = max(0, account.pinned_ms - self._left_ms(lease)) + duration_ms
        self._set(lease, self._changes.now_ms + duration_ms)
        self._changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=lease.pinned_until_ms))
        self._changes.record(lease.lease_id, "pin.begun", f"pinned for {format_duration(duration_ms)}")

    def _refusal(self, lease: Lease, pool: PoolSpec, account: Account, duration_ms: int) -> tuple[str, str] | None:
        if lease.state is LeaseState.UNATTACHED or lease.left_behind:
            return "not-alive", "the kernel has no process: start it, then pin it"
        if duration_ms < 1:
            return "pin-too-short", "a pin of no time was asked: ask for a second or more"
        if duration_ms > pool.max_pin_ms:
            return "pin-too-long", _too_long(duration_ms, pool)
        if pool.pin_budget_ms is None:
            return None
        left_ms = pool.pin_budget_ms - self._spent_ms(account, pool) + self._left_ms(lease)
        if duration_ms <= left_ms:
            return None
        asked, left, budget = map(format_duration, (duration_ms, max(0, left_ms), pool.pin_budget_ms))
        return "pin-budget", (
            f"a pin of {asked} was asked, {left} are left of the {budget} that {account.name!r} may pin kernels in a day: "
            "ask for less, or unpin another kernel"
        )

    def unpin(self, lease: Lease, reason: str, sentence: str) -> None:
        """End the pin, if there is one; the rest of it goes back to the budget."""
        if lease.pinned_until_ms:
            self.refund(lease)
            self._changes.record(lease.lease_id, reason, sentence)
        self._changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=0))

    def refund(self, lease: Lease) -> None:
        """End the pin of a lease that ends, without an effect."""
        account = self._books.accounts.of(lease)
        self._settle(account, self._books.policy(lease))
        account.pinned_ms = max(0, account.pinned_ms - self._left_ms(lease))
        self._set(lease, 0)

    def restore(self, lease: Lease, until_ms: int) -> None:
        """Take over a pin that a new broker found in the ledger; the rest of it counts as spent."""
        if until_ms <= self._changes.now_ms or lease.state is LeaseState.UNATTACHED:
            return
        account = self._books.accounts.of(lease)
        self._settle(account, self._books.policy(lease))
        account.pinned_ms += until_ms - self._changes.now_ms
        self._set(lease, until_ms)

    def _set(self, lease: Lease, until_ms: int) -> None:
        lease.pinned_until_ms = until_ms
        self._books.refresh(lease)

    def _left_ms(self, lease: Lease) -> int:
        return max(0, lease.pinned_until_ms - self._changes.now_ms)

    def _spent_ms(self, account: Account, pool: PoolSpec) -> int:
        """Return what is used up of the budget now, as it comes back evenly over a day."""
        passed_ms = self._changes.now_ms - account.pinned_at_ms
        back_ms = passed_ms if pool.pin_budget_ms is None else pool.pin_budget_ms * passed_ms // _DAY_MS
        return max(0, account.pinned_ms - back_ms)

    def _settle(self, account: Account, pool: PoolSpec) -> None:
        account.pinned_ms, account.pinned_at_ms = self._spent_ms(account, pool), self._changes.now_ms


def _too_long(duration_ms: int, pool: PoolSpec) -> str:
    if not pool.max_pin_ms:
        return f"pool {pool.name!r} allows no pins (max_pin is 0): ask the administrator"
    asked, most = format_duration(duration_ms), format_duration(pool.max_pin_ms)
    return f"a pin of {asked} was asked, pool {pool.name!r} allows {most} at a time: ask for that or less"
