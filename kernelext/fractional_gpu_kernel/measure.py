"""Reports units of work to `jupyter gpu measure`: a batch, an epoch, a request.

    from fractional_gpu_kernel.measure import tick

    for batch in batches:
        train(batch)
        tick()

Outside of a measurement it does nothing. Standard library only.

The protocol, for other languages: where the variable JUPYTER_GPU_MEASURE is set, it names a file; for each unit of work the program appends
one line in one write, `NANOSECONDS UNITS`, with the time of CLOCK_MONOTONIC at which the work was done. What runs asynchronously on the
device has to be waited for first, or the times are those of its submission.
"""

import os
import time
from typing import Final

FILE: Final = "JUPYTER_GPU_MEASURE"
MOST_UNITS: Final = 1_000_000_000


def tick(units: int = 1) -> None:
    """Say that so many units of work have just been done. Raises ValueError for anything but a whole number from 1 to 1,000,000,000.

    It takes some microseconds in a measurement. Raises OSError if the measurement's file cannot be written.
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
