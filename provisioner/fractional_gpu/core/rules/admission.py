"""Whether a new lease can be admitted. What can never be served is refused at once, with what there is and what to do."""

from fractional_gpu.core.books.accounts import guaranteed_mib
from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Reason
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.core.rules.limits import describe_absent, limit_refusal, without_process
from fractional_gpu.core.units import format_fraction, format_memory

__all__ = ["UNATTACHED_LIMIT", "oversubscription_refusal", "refusal", "size_refusal"]

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
        for lease in books.by_state[LeaseState.UNATTACHED].values()
        if lease.spec.pool == spec.pool and lease.spec.owner == spec.owner
    ]
    remedy = "wait until these kernels have started, or shut down those that do not start"
    if len(there) >= pool.unattached_leases:
        return Reason(
            UNATTACHED_LIMIT,
            f"one more kernel was asked, but {spec.owner!r} has {len(there)} leases in pool {pool.name!r} whose kernels have not "
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
    sizes = [books.devices[device_id].spec.leasable_mib for device_id in pool.devices if device_id in books.devices]
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
    devices = [books.devices[device_id].spec for device_id in pool.devices if device_id in books.devices]
    kinds = [device.name for device in devices if device.leasable_mib >= spec.reserve_mib]
    most = max(map(kinds.count, kinds), default=0)
    if spec.devices <= most:
        return None
    return Reason(
        "too-many-devices",
        f"{spec.devices} devices were asked, but pool {pool.name!r} has {most} devices of one kind with "
        f"{format_memory(spec.reserve_mib)} each; ask for that many or less",
    )


def oversubscription_refusal(
    books: Books, pool: PoolSpec, spec: LeaseSpec, *, instead_of: LeaseSpec | None = None
) -> Reason | None:
    """Return a refusal if the pool may not promise so much more memory. `instead_of`: what the lease was promised before."""
    if pool.oversubscription_milli is None:
        return None
    sizes = [books.devices[device_id].spec.leasable_mib for device_id in pool.devices if device_id in books.devices]
    before = guaranteed_mib(instead_of) if instead_of is not None else 0
    promised, asked = books.accounts.promised_mib.get(pool.name, 0) - before, guaranteed_mib(spec)
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
