"""A process that uses a simulated device without a lease, for tests.

    python -P tests/support/stranger.py DIRECTORY DEVICE MIB

It allocates that much on the device (by id or index), says `holding PID` on standard output and holds it until its standard input ends.
A line there with another number of MiB makes it hold that much instead; it says `holding PID` again, or why it cannot.
"""

import os
import sys

from fractional_gpu.gpu.simulated import cuda
from fractional_gpu.gpu.simulated.store import MIB


def main(arguments: list[str]) -> int:
    """Hold the memory until standard input ends; 1 when it cannot be had, 2 for wrong arguments."""
    if len(arguments) != 3 or not arguments[2].isdigit() or int(arguments[2]) < 1:
        sys.stderr.write("usage: stranger DIRECTORY DEVICE MIB (1 or more)\n")
        return 2
    # A process without a lease has no cap: the caller's variables do not apply.
    for name in ("JUPYTER_GPU_LEASE", "JUPYTER_GPU_MEMORY_MIB"):
        os.environ.pop(name, None)
    os.environ["JUPYTER_GPU_SIMULATED_DIR"], os.environ["JUPYTER_GPU_SIMULATED_DEVICE"] = arguments[0], arguments[1]
    try:
        held = cuda.allocate(int(arguments[2]) * MIB)
        _say(f"holding {os.getpid()}")
        for line in sys.stdin:
            held.free()
            held = cuda.allocate(int(line) * MIB)
            _say(f"holding {os.getpid()}")
    except cuda.SimulatedCudaError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
