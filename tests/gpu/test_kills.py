"""The broker is killed in each phase of a swap: the next one finds out what is true, and no byte is lost.

On hardware there is nothing to hold an operation up, so the ledger is watched and the kill follows the first sight of the move; how far
the driver has come by then differs from run to run, and is noted.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from fractional_gpu.protocol.errors import FractionalGPUError
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab, until, wait_for_end

Note = Callable[[str, object], None]

PHASES = [("suspend", "lock"), ("suspend", "checkpoint"), ("resume", "restore")]
_SLOW_MS = 400
_SETTLED = ("resident", "suspended")


@contextmanager
def begun(act: Callable[[], object]) -> Iterator[None]:
    """Let another thread ask for something whose answer never comes, because who is asked is killed."""

    def ask() -> None:
        with suppress(FractionalGPUError):
            act()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize(("kind", "operation"), PHASES, ids=[operation for _, operation in PHASES])
def test_a_broker_killed_in_a_phase_loses_nothing(lab: Lab, saw: Note, kind: str, operation: str) -> None:
    with Kernel(lab, lab.install(6)) as kernel:
        kernel.must(lab.cells.fill(8, 4 * lab.unit_mib))
        if kind == "resume":
            kernel.suspend()
        broker = lab.broker_pid()  # asked before: the operation may be over while one asks
        assert broker is not None
        with lab.slowed(operation, _SLOW_MS), begun(kernel.suspend if kind == "suspend" else kernel.resume):
            state = {"suspend": "suspending", "resume": "resuming"}[kind]  # the ledger may lag behind an earlier move
            until(lambda: state in lab.moving(), f"the {kind} has begun", longest_pause_s=0.002)
            wait_for_end(broker, signal.SIGKILL)
        left = lab.moving()
        saw("ledger_at_the_kill", sorted(left))
        assert left, "the operation was over before the kill: nothing was shown"
        killed = time.perf_counter()
        lab.start_broker()
        kernel_id = str(kernel.manager.kernel_id)
        lease = lab.await_lease(kernel_id, lambda lease: lease.state in _SETTLED, "the truth is known")
        saw("then", {"state": lease.state, "after_s": round(time.perf_counter() - killed, 3)})
        assert kernel.is_intact()
        kernel.suspend()
        assert lab.used_by(kernel.pid) == 0
        assert kernel.is_intact()
        (device,) = lab.status().devices
        assert not device.over_committed
