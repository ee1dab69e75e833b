"""The fewest devices that keep waits short: runs of the same trace with more and fewer devices."""

from collections.abc import Callable

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.result import Result

__all__ = ["fewest_devices"]


def fewest_devices(run: Callable[[int], Result], p95_wait_ms: int, most: int, *, least: int = 1) -> Result:
    """Return the run with the fewest devices, from `least` to `most`, whose 95th percentile of waits is at most `p95_wait_ms`.

    Doubles the number of devices until the waits are short enough, then halves the interval; that finds the fewest where more devices
    never make waits longer, which holds but for luck. Raises SimulationError where `most` devices are too few.
    """
    count, too_few = least, least - 1
    good: Result | None = None
    while good is None:
        result = run(count)
        if result.waits.percentile_ms(95) <= p95_wait_ms:
            good = result
        elif count >= most:
            waits_s = result.waits.percentile_ms(95) / 1000
            raise SimulationError(
                f"with {most} devices the 95th percentile of waits is still {waits_s:g} s, and {p95_wait_ms / 1000:g} s were asked; "
                "allow longer waits with --p95-wait, or quicker swaps"
            )
        else:
            too_few, count = count, min(most, count * 2)
    while good.devices - too_few > 1:
        result = run((good.devices + too_few) // 2)
        if result.waits.percentile_ms(95) <= p95_wait_ms:
            good = result
        else:
            too_few = result.devices
    return good
