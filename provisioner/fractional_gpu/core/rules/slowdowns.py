"""How much neighbours slow a lease's cells down, for people: a forecast with its bounds.

It begins with what each lease was learnt to need while it is busy (`contention`), and is corrected by what cells took with and without
neighbours (`forecasts.company`).

For a lease that waits, the estimate is of the device that busy leases leave most of, of those that it may come to, and of the leases that
can stay there: where it needs the memory of others, the largest leave. For one that is being resumed for a cell, it is of the device to
which it comes. Kernels of other owners are not named (`wait_reasons.name_for`).
"""

from collections.abc import Sequence

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Device, Lease, OccupancyKind
from fractional_gpu.core.model import LeaseState, Slowdown
from fractional_gpu.core.rules.contention import beside, busy_others
from fractional_gpu.core.rules.wait_reasons import allowed_devices, name_for

_WAITING = (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT)


def describe_slowdown(books: Books, lease: Lease) -> Slowdown:
    """Return how many times as long as alone the lease's cell takes, or would take where it waits to go, and beside whom."""
    devices = books.devices
    if lease.state is LeaseState.RESUMING and lease.let_in:
        there = [(devices[one], busy_others(devices[one], lease)) for one in lease.occupied_ids if one in devices]
    elif lease.ticket is not None and lease.state in _WAITING:
        there = [(devices[one], _staying(devices[one], lease)) for one in allowed_devices(books, lease)]
    elif lease.occupancy is OccupancyKind.BUSY:
        there = [(devices[one], busy_others(devices[one], lease)) for one in lease.occupied_ids if one in devices]
        worst = max(there, key=lambda one: beside(lease.busy_milli, one[1]), default=None)
        return Slowdown() if worst is None else _described(books, lease, lease.busy_milli, worst)
    else:
        return Slowdown()
    if len(there) < lease.count:
        return Slowdown()
    # Of the devices that the lease gets, the one with most of these neighbours; it gets those with least.
    worst = sorted(there, key=lambda one: sum(other.busy_milli for other in one[1]))[lease.count - 1]
    return _described(books, lease, lease.demand_milli, worst, runs="would run")


def _staying(device: Device, lease: Lease) -> list[Lease]:
    """Return the busy leases that fit on the device beside this one, the smallest first."""
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
    """Return the forecast for a cell that needs so much of the device, with its neighbours there."""
    device, others = where
    if not others:
        return Slowdown()
    span = books.forecasts.slowdown_span(
        lease.lease_id, device.spec.name, len(others), beside(want_milli, list(others))
    )
    if _tenths(span.expected_ms) <= 10:
        return Slowdown()
    first, *more = sorted(others, key=lambda one: (-one.busy_milli, one.number))
    expected, low, high = (f"{_tenths(one) / 10}" for one in (span.expected_ms, span.low_ms, span.high_ms))
    beside_whom = name_for(lease, first) + (f" and {len(more)} more" if more else "")
    times = f"about {expected} times as long as alone" + (f" ({low} to {high})" if low != high else "")
    return Slowdown(
        milli=span.expected_ms,
        low_milli=span.low_ms,
        high_milli=span.high_ms,
        brief=f"{runs} beside {beside_whom}, {times}",
    )


def _tenths(milli: int) -> int:
    return (milli + 50) // 100
