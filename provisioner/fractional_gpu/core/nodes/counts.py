"""How many thousandths of a device an engine (Slurm, Kubernetes) may give away on a node.

The engine gives away what its count leaves beside what is in use by its own books. So the count is

    what is in use by its books + what the pool's forecast admits - what is given away already and has no seat yet

Seats of others (a hub, a user of the machine) are not in the books; what they hold is missing from what is admitted. Where the books say
less than the seats (Slurm forgets part when its configuration is read again), they decide all the same: they are what it gives away by.

Slurm refuses a job that asks for more than the count of any node, and holds one that waits already, for good. So the count is never
below `least_milli`, the largest share on offer: where less is in use, one job may start that is not admitted, within what the pool may
promise. Without a broker the last count stays for a while, since a broker restarts within seconds; then only what is in use remains.
"""


def count_of(*, seated_milli: int, admissible_milli: int, in_use_milli: int, least_milli: int = 0) -> int:
    """Return the engine's count, milli-GPU, at least `least_milli`.

    `seated_milli`: by seats of the engine's jobs; `admissible_milli`: beside all seats; `in_use_milli`: by the engine's own books.
    """
    unseated = max(0, in_use_milli - seated_milli)
    return max(least_milli, in_use_milli + max(0, admissible_milli - unseated))


def count_without_broker(
    last: int | None, in_use_milli: int, *, silent_ms: int, patience_ms: int, least_milli: int = 0
) -> int:
    """Return the count while no broker answers: the last written, or after `patience_ms` what is in use; at least `least_milli`."""
    if last is None or silent_ms >= patience_ms:
        return max(least_milli, in_use_milli, 0)
    return max(least_milli, last, in_use_milli, 0)


def rounded_wait_ms(wait_ms: int) -> int:
    """Return the wait in steps of 1, 2 and 5 times a power of ten, rounded up, from 100 ms on: small changes are no news."""
    if wait_ms <= 0:
        return 0
    step = 100
    while True:
        for factor in (1, 2, 5):
            if wait_ms <= step * factor:
                return step * factor
        step *= 10


def rounded_memory_mib(mib: int) -> int:
    """Return the size rounded down to a sixteenth of its largest power of two, for the same reason."""
    if mib < 16:
        return max(0, mib)
    step = 1 << (mib.bit_length() - 5)
    return mib // step * step
