"""How much neighbours slow a lease's cells down, for people: an estimate from what each lease was learnt to need while it is busy.

For a lease that waits, the estimate is of the device that busy leases leave most of, of those that it may come to. Kernels of other owners
are not named (`wait_reasons.name_for`).
"""

from collections.abc import Sequence

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease
from fractional_gpu.core.model import LeaseState, Slowdown
from fractional_gpu.core.rules.contention import beside, busy_others, slowdown
from fractional_gpu.core.rules.wait_reasons import allowed_devices, name_for
from fractional_gpu.core.time_slicing import WHOLE_MILLI

_MOST_NAMED = 3
_WAITING = (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT)


def describe_slowdown(books: Books, lease: Lease) -> Slowdown:
    """Return how many times as long as alone the lease's cell takes, or would take where it waits to go, and beside whom."""
    if lease.ticket is not None and lease.state in _WAITING:
        milli, others = _expected(books, lease)
        return _described(lease, milli, others, "on the least busy GPU that it may use, its cell would take")
    milli, others = slowdown(books, lease)
    return _described(lease, milli, others, "its cell takes")


def _expected(books: Books, lease: Lease) -> tuple[int, Sequence[Lease]]:
    devices = [books.devices[device_id] for device_id in allowed_devices(books, lease)]
    if len(devices) < lease.count:
        return WHOLE_MILLI, ()
    device = sorted(devices, key=lambda one: one.demand_milli)[lease.count - 1]  # the fullest of those that it gets
    others = busy_others(device, lease)
    return beside(lease.demand_milli, others), sorted(others, key=lambda one: (-one.demand_milli, one.number))


def _described(lease: Lease, milli: int, others: Sequence[Lease], says: str) -> Slowdown:
    tenths = (milli + 50) // 100
    if tenths <= 10 or not others:
        return Slowdown()
    named = [f"{name_for(lease, other)} ({other.demand_milli // 10} % of it)" for other in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        named.append(f"{len(others) - _MOST_NAMED} more")
    sentence = f"{says} about {tenths // 10}.{tenths % 10} times as long as alone, beside {' and '.join(named)}"
    return Slowdown(milli=milli, sentence=sentence)
