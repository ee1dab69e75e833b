"""Reports units of work, such as a batch, an epoch or a request, to `jupyter gpu measure`.

    from fractional_gpu_kernel.measure import tick

    for batch in batches:
        train(batch)
        tick()

Outside a measurement, this does nothing. It needs only the standard library. A program in another language can do the same: if
JUPYTER_GPU_MEASURE is set, append the line `NANOSECONDS UNITS` to that file in one write, with the time of CLOCK_MONOTONIC when the work
was done. Wait for asynchronous work on the device first; otherwise only its submission is timed.
"""

import os
import time
from typing import Final

FILE: Final = "JUPYTER_GPU_MEASURE"
MOST_UNITS: Final = 1_000_000_000


def tick(units: int = 1) -> None:
    """Report that `units` of work (1 to 1,000,000,000) have just been done. During a measurement, this takes microseconds.

    Raises ValueError if `units` is out of range, and OSError if the file of the measurement cannot be written.
    """
    if not isinstance(units, int) or isinstance(units, bool) or not 1 <= units <= MOST_UNITS:
        raise ValueError(f"cannot report {units!r} units of work; give a whole number from 1 to {MOST_UNITS:,}")
    path = os.environ.get(FILE)
    if not path:
        return
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(file, b"%d %d\n" % (time.monotonic_ns(), units))
    finally:
        os.close(file)
