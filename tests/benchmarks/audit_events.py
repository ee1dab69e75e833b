"""What the barrier's audit hook adds to Python's events while nothing is barred: times with and without it, in processes that take turns.

    python tests/benchmarks/audit_events.py [--events 200000] [--rounds 7]

The hook is there from the first time that the broker wants the room of a kernel whose cell runs and has not used the GPU.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WORK: dict[str, Callable[[], object]] = {
    "sys._getframe()": sys._getframe,
    "an event of its own": lambda: sys.audit("benchmark"),
    "open a file and close it": lambda: os.close(os.open(__file__, os.O_RDONLY)),
    "compile '1'": lambda: compile("1", "cell", "eval"),
}


def install() -> None:
    """Have the hook of a barrier that bars nothing."""
    from fractional_gpu_kernel.cells.barrier import Barrier  # noqa: PLC0415 - only where it is measured
    from fractional_gpu_kernel.cells.gate import Gate  # noqa: PLC0415 - as above

    shell: Any = SimpleNamespace(kernel=None)
    Barrier(shell, Gate(lambda _: None), cast("Any", None), cast("Any", None))._install()


def nanoseconds(work: Callable[[], object], events: int) -> float:
    """The processor time of one event."""
    start = time.process_time_ns()
    for _ in range(events):
        work()
    return (time.process_time_ns() - start) / events


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=200_000, help="events of each kind in a round (default: 200000)")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind (default: 7)")
    parser.add_argument("--one", choices=["plain", "hooked"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        if arguments.one == "hooked":
            install()
        print(*(nanoseconds(work, arguments.events) for work in WORK.values()))
        return
    taken: dict[str, list[list[float]]] = {"plain": [], "hooked": []}
    for _ in range(arguments.rounds):
        for kind, rounds in taken.items():
            command = [sys.executable, __file__, "--one", kind, "--events", str(arguments.events)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rounds.append([float(word) for word in out.split()])
    for number, name in enumerate(WORK):
        plain, hooked = (statistics.median(one[number] for one in rounds) for rounds in taken.values())
        print(f"{name:26} {plain:9.0f} ns plain {hooked:9.0f} ns hooked {hooked - plain:+9.0f} ns")


if __name__ == "__main__":
    main()
