"""Jobs for processes of the simulator. Such a process imports their module, so this one imports hardly anything."""

import os
import signal
from collections.abc import Callable

from fractional_gpu.simulator import SimulationError


def double(job: int, ended: Callable[[], None]) -> int:
    ended()
    return 2 * job


def refuse(job: int, ended: Callable[[], None]) -> int:
    ended()
    if job == 3:
        raise SimulationError("three is not allowed")
    return job


def end_early(job: int, _ended: Callable[[], None]) -> int:
    if job == 2:
        raise SystemExit(7)
    if job == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return job
