"""Reports units of work, such as a batch, an epoch or a request, to `jupyter gpu measure`.

    from fractional_gpu_kernel.measure import tick

    for batch in batches:
        train(batch)
        tick()

Outside a measurement, `tick` does nothing. This module only needs the standard library. Programs in other languages can also report work:
if JUPYTER_GPU_MEASURE is set, append the line `NANOSECONDS UNITS` to the file it names, in one write, where NANOSECONDS is the
CLOCK_MONOTONIC time at which the work was done. Wait for asynchronous work on the device first; otherwise only its submission is timed.
"""

import os
import time
from typing import Final

FILE: Final = "JUPYTER_GPU_MEASURE"
MOST_UNITS: Final = 1_000_000_000


def tick(units: int = 1) -> None:
    """Report that `units` of work (1 to 1,000,000,000) have just been done. During a measurement, this takes microseconds.

    Raises ValueError if `units` is out of range, and OSError if the measurement's file cannot be written.
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
