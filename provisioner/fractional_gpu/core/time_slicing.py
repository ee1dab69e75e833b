"""How kernels that run on one device at the same time slow each other down: the model of contention. Integers only.

A kernel that would use the part u of its device if it were alone leaves the device idle for 1 - u of its time. Next to others, its work on
the device takes k times as long, and the rest as long as before: a cell takes 1 - u + u * k times as long as alone, and uses
u / (1 - u + u * k) of the device. While the kernels together want no more than the device has, they fit into each other's pauses, and k is
1. Beyond that the device is never idle, so k is where their uses add up to the whole device. There is exactly one such k, as each use falls
when k grows. Costs of switching contexts and of contended caches are left out.
"""

from collections.abc import Iterable

WHOLE_MILLI = 1000
"""A whole device, in thousandths."""
_PARTS = 10**9  # uses are summed in these parts of a device


def stretch_milli(wants_milli: Iterable[int], capacity_milli: int = WHOLE_MILLI) -> int:
    """Return k, in thousandths: 1000 if the wants fit, else the least whole number for which the uses add up to no more than the capacity.

    `wants_milli`: what each kernel would use alone, thousandths of a device, at most 1000 each. `capacity_milli`: how much can be used at
    the same time; more than 1000 where one kernel alone cannot fill the device (MPS).
    """
    wants = [want for want in wants_milli if want]
    total_milli = sum(wants)
    if total_milli <= capacity_milli:
        return WHOLE_MILLI
    # Newton's method for the reciprocal of the sum of uses. It is concave in k (a harmonic mean), so from a lower bound, the sum of the
    # wants, no step goes beyond the solution. Steps are rounded down; one of less than a thousandth ends at the next whole number.
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
    """Return how long a cell that wants this much of a device takes with this k, thousandths of its time alone, rounded up."""
    return WHOLE_MILLI - want_milli + -(-want_milli * k_milli // WHOLE_MILLI)


def most_wanted_milli(use_milli: int, largest_milli: int) -> int:
    """Return the most that a kernel using this much of a full device may want, thousandths, if one kernel uses `largest_milli`.

    No kernel wants more than the whole device, so the largest use bounds k: it is at most 1 / largest. What the kernel would use alone then
    follows from what it uses: u = use / (1 - use * (k - 1)). It wants no less than it uses.
    """
    largest_milli = max(use_milli, largest_milli, 1)
    rest = WHOLE_MILLI * largest_milli - use_milli * (WHOLE_MILLI - largest_milli)
    return min(WHOLE_MILLI, -(-use_milli * largest_milli * WHOLE_MILLI // rest))
