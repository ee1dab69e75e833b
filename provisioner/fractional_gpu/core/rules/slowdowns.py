"""How much neighbours slow a lease's cells down, for people: an estimate from what each lease was learnt to need while it is busy.

For a lease that waits, the estimate is of the device that busy leases leave most of, of those that it may come to, and of the leases that
can stay there: where it needs the memory of others, the largest leave. For one that is being resumed for a cell, it is of the device to
which it comes. Kernels of other owners are not named (`wait_reasons.name_for`).
"""

from collections.abc import Sequence

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Device, Lease
from fractional_gpu.core.model import LeaseState, Slowdown
from fractional_gpu.core.rules.contention import beside, busy_others, slowdown
from fractional_gpu.core.rules.wait_reasons import allowed_devices, name_for
from fractional_gpu.core.time_slicing import WHOLE_MILLI

_MOST_NAMED = 3
_WAITING = (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT)


def describe_slowdown(books: Books, lease: Lease) -> Slowdown:
    """Return how many times as long as alone the lease's cell takes, or would take where it waits to go, and beside whom."""
    if lease.state is LeaseState.RESUMING and lease.let_in:
        milli, others = _expected(
            lease, [busy_others(books.devices[one], lease) for one in lease.occupied_ids if one in books.devices]
        )
        return _described(lease, milli, others, "on the GPU to which it comes, its cell would take", "would run")
    if lease.ticket is not None and lease.state in _WAITING:
        milli, others = _expected(lease, [_staying(books.devices[one], lease) for one in allowed_devices(books, lease)])
        return _described(
            lease, milli, others, "on the least busy GPU that it may use, its cell would take", "would run"
        )
    milli, others = slowdown(books, lease)
    return _described(lease, milli, others, "its cell takes", "runs")


def _expected(lease: Lease, neighbours: Sequence[Sequence[Lease]]) -> tuple[int, Sequence[Lease]]:
    """Return the slowdown and its causes on the devices that the lease gets: those with least of these neighbours."""
    if len(neighbours) < lease.count:
        return WHOLE_MILLI, ()
    others = sorted(neighbours, key=lambda there: sum(one.busy_milli for one in there))[lease.count - 1]
    return beside(lease.demand_milli, others), sorted(others, key=lambda one: (-one.demand_milli, one.number))


def _staying(device: Device, lease: Lease) -> list[Lease]:
    """Return the busy leases that fit on the device beside this one, the smallest first."""
    left_mib = device.lease_capacity_mib - lease.size_mib
    staying = []
    for other in sorted(busy_others(device, lease), key=lambda one: (one.occupied_mib, one.number)):
        left_mib -= other.occupied_mib
        if left_mib >= 0:
            staying.append(other)
    return staying


def _described(lease: Lease, milli: int, others: Sequence[Lease], says: str, runs: str) -> Slowdown:
    tenths = (milli + 50) // 100
    if tenths <= 10 or not others:
        return Slowdown()
    named = [f"{name_for(lease, other)} ({other.demand_milli // 10} % of it)" for other in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        named.append(f"{len(others) - _MOST_NAMED} more")
    first = name_for(lease, others[0])
    short = first.rpartition("/")[2] if first.startswith("/") else first  # of a path, the notebook
    times = f"about {tenths // 10}.{tenths % 10} times as long as alone"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return Slowdown(
        milli=milli,
        sentence=f"{says} {times}, beside {' and '.join(named)}",
        brief=f"{runs} beside {short}{more}, {times}",
    )
