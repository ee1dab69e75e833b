"""Work without a running cell is work, and what is allocated behind a framework's back is noticed."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from fractional_gpu.protocol.status import LeaseStatus
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab, until

Note = Callable[[str, object], None]


def test_a_thread_that_computes_keeps_its_kernel_on_the_device(lab: Lab, saw: Note) -> None:
    name = lab.install(5)
    with ExitStack() as stack:
        first, second = (stack.enter_context(Kernel(lab, name)) for _ in range(2))
        first.must(lab.cells.fill(1, lab.unit_mib))
        first.must(lab.cells.work_in_background())
        cell = second.send(lab.cells.fill(2, lab.unit_mib))
        seen = lab.await_lease(str(first.manager.kernel_id), lambda one: one.working, "the work is seen")
        saw("busy", seen.busy)

        def waits(lease: LeaseStatus) -> bool:
            return lease.reason == "wait.busy-neighbour"

        lab.await_lease(str(second.manager.kernel_id), waits, "the second kernel waits for the first one's thread")
        assert first.lease.suspends == 0
        first.must("stop.set(); thread.join()")
        begun = time.perf_counter()
        assert second.wait(cell).status == "ok"
        saw("room_after_s", round(time.perf_counter() - begun, 3))
        assert first.is_intact()
        assert second.is_intact()


def test_a_computing_thread_stands_still_for_a_requested_suspend(lab: Lab, saw: Note) -> None:
    with Kernel(lab, lab.install(3)) as kernel:
        kernel.must(lab.cells.fill(5, lab.unit_mib))
        kernel.must(lab.cells.work_in_background())
        begun = time.perf_counter()
        assert kernel.suspend().state == "suspended"
        saw("suspend_s", round(time.perf_counter() - begun, 3))
        assert lab.used_by(kernel.pid) == 0
        assert kernel.resume().state == "resident"
        assert kernel.is_intact()
        kernel.must("assert thread.is_alive(); stop.set(); thread.join(60); assert not thread.is_alive()")


def test_how_long_a_kernel_counts_as_busy_after_its_cell(lab: Lab, saw: Note) -> None:
    with Kernel(lab, lab.install(2)) as kernel:
        kernel.must(lab.cells.fill(3, 64))
        times = []
        for _ in range(5):
            assert kernel.is_intact()
            begun = time.perf_counter()
            lab.await_lease(str(kernel.manager.kernel_id), lambda one: not one.busy, "it counts as idle")
            times.append(round(time.perf_counter() - begun, 3))
        saw("idle_after_s", times)
        assert max(times) < 5


def test_what_is_allocated_past_the_cap_directly_is_noticed(lab: Lab, saw: Note) -> None:
    with ExitStack() as stack:
        neighbour = stack.enter_context(Kernel(lab, lab.install(3)))
        greedy = stack.enter_context(Kernel(lab, lab.install(2)))
        neighbour.must(lab.cells.fill(4, lab.unit_mib))
        greedy.must(lab.cells.past_the_cap(3 * lab.unit_mib))

        def sentences() -> list[str]:
            with lab.client() as client:
                lines = client.story(greedy.lease.lease_id).lines
            return [line.sentence for line in lines if line.reason == "breach.warn"]

        saw("sentence", until(sentences, "the breach is noted")[0])
        lease = lab.await_lease(
            str(greedy.manager.kernel_id), lambda one: one.lease.used_mib > one.spec.reserve_mib, "it is seen"
        )
        saw("used_mib", lease.lease.used_mib)
        assert neighbour.is_intact()
