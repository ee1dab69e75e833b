"""A kernel that is ended while it is suspended: by a shutdown, a restart, SIGKILL. It leaves nothing; its neighbour notices nothing."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab, until, wait_for_end

Note = Callable[[str, object], None]

ENDINGS: dict[str, Callable[[Kernel], None]] = {
    "shutdown": lambda kernel: kernel.manager.shutdown_kernel(),
    "shutdown at once": lambda kernel: kernel.manager.shutdown_kernel(now=True),
    "SIGKILL": lambda kernel: wait_for_end(kernel.pid, signal.SIGKILL),
}


@contextmanager
def suspended_beside_another(lab: Lab) -> Iterator[tuple[Kernel, Kernel]]:
    """A suspended kernel, and a neighbour that is on the device."""
    with ExitStack() as stack:
        kernel = stack.enter_context(Kernel(lab, lab.install(4)))
        neighbour = stack.enter_context(Kernel(lab, lab.install(3)))
        neighbour.must(lab.cells.fill(2, lab.unit_mib))
        kernel.must(lab.cells.fill(1, 2 * lab.unit_mib))
        assert kernel.suspend().state == "suspended"
        yield kernel, neighbour


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_suspended_kernel_that_is_ended_leaves_nothing_behind(lab: Lab, saw: Note, ending: str) -> None:
    before_mib = lab.used_mib()
    with suspended_beside_another(lab) as (kernel, neighbour):
        lease_id, pid = kernel.lease.lease_id, kernel.pid
        begun = time.perf_counter()
        ENDINGS[ending](kernel)
        wait_for_end(pid)
        saw("process_gone_s", round(time.perf_counter() - begun, 3))

        def lease_gone() -> bool:
            return all(lease.lease_id != lease_id for lease in lab.status().leases)

        if (
            ending == "SIGKILL"
        ):  # its manager is still there and may restart it: the lease waits for that, without memory
            until(lambda: lease_gone() or kernel.lease.state == "unattached", "the lease holds nothing")
        else:
            until(lease_gone, "the lease is gone")
        saw("lease_settled_s", round(time.perf_counter() - begun, 3))
        assert lab.used_by(pid) == 0
        assert neighbour.is_intact()
        assert neighbour.lease.state == "resident"
    until(lambda: lab.used_mib() - before_mib < lab.cells.context_mib, "the device's memory is given back")
    saw("left_mib", lab.used_mib() - before_mib)


def test_a_suspended_kernel_that_is_restarted_comes_back_empty_and_works(lab: Lab, saw: Note) -> None:
    with suspended_beside_another(lab) as (kernel, neighbour):
        old = kernel.pid
        begun = time.perf_counter()
        kernel.restart()
        saw("restart_s", round(time.perf_counter() - begun, 3))
        wait_for_end(old)
        assert kernel.run("buffer").status == "error", "the restarted kernel has the old one's variables"
        kernel.must(lab.cells.fill(3, lab.unit_mib))
        assert kernel.is_intact()
        assert kernel.pid != old
        assert lab.used_by(old) == 0
        kernel.suspend()
        assert kernel.is_intact()
        assert neighbour.is_intact()
