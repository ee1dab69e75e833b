"""Models how much kernels sharing a device slow each other down, using only integers.

A kernel that uses a fraction u of its device when running alone leaves the device idle for 1 - u of the time. When it shares the device,
its work there takes k times as long, and its other work is unaffected. A cell then takes 1 - u + u * k times as long as it does alone, and
uses u / (1 - u + u * k) of the device. If the kernels' total demand is at most the whole device, each runs during the others' pauses, and k
is 1. Otherwise the device is never idle, and k is the value at which the kernels' uses add up to the whole device. There is exactly one
such value, because each use falls as k grows. The model ignores the costs of context switches and shared caches.
"""

from collections.abc import Iterable

WHOLE_MILLI = 1000
"""A whole device, in thousandths."""
_PARTS = 10**9  # unit of sums of uses, parts of a device


def stretch_milli(wants_milli: Iterable[int], capacity_milli: int = WHOLE_MILLI) -> int:
    """Return k, the factor by which work on a shared device slows down, in thousandths. It is 1000 if all demands fit on the device.

    `wants_milli` lists each kernel's use when running alone, in thousandths of a device (at most 1000). `capacity_milli` is the highest
    possible total use. It is more than 1000 if one kernel alone cannot fill the device (MPS).
    """
    wants = [want for want in wants_milli if want]
    total_milli = sum(wants)
    if total_milli <= capacity_milli:
        return WHOLE_MILLI
    # Newton's method for the reciprocal of the total use. It is concave in k (a harmonic mean), so no step from a lower bound (the total
    # demand) overshoots the solution. Steps are rounded down, but are at least a thousandth.
    k_milli, most = -(-total_milli * WHOLE_MILLI // capacity_milli), capacity_milli * _PARTS // WHOLE_MILLI
    terms = [((WHOLE_MILLI - want) * WHOLE_MILLI, want, want * WHOLE_MILLI * _PARTS) for want in wants]
    while True:
        used = squares = 0
        for rest, want, numerator in terms:
            use = numerator // (rest + want * k_milli)
            used += use
            squares += use * use
        if used <= most:
            return k_milli
        k_milli += max(1, (used - most) * used * _PARTS * WHOLE_MILLI // (squares * most))


def slowed_milli(want_milli: int, k_milli: int) -> int:
    """Return how long a cell takes if its device work is slowed down by k, in thousandths (rounded up) of its time when run alone."""
    return WHOLE_MILLI - want_milli + -(-want_milli * k_milli // WHOLE_MILLI)


def most_wanted_milli(use_milli: int, largest_milli: int) -> int:
    """Return an upper bound on the demand of a kernel that uses `use_milli` of a full device, if no kernel uses more than `largest_milli`.

    No demand exceeds the whole device, so k is at most 1 / largest. The demand u follows from the use: u = use / (1 - use * (k - 1)). The
    result is never less than the use.
    """
    largest_milli = max(use_milli, largest_milli, 1)
    rest = WHOLE_MILLI * largest_milli - use_milli * (WHOLE_MILLI - largest_milli)
    return min(WHOLE_MILLI, -(-use_milli * largest_milli * WHOLE_MILLI // rest))
