"""A full device makes a resume wait, a wait can be interrupted, and a cap holds."""

from collections.abc import Callable
from contextlib import ExitStack

from fractional_gpu.protocol.status import LeaseStatus
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab, until

Note = Callable[[str, object], None]


def waits(lab: Lab, kernel: Kernel) -> str:
    """Wait until the kernel's lease has a place in the queue and a reason, and return that."""
    kernel_id = str(kernel.manager.kernel_id)

    def has_reason(lease: LeaseStatus) -> bool:
        return lease.position is not None and lease.sentence != "the request has just been made"

    return lab.await_lease(kernel_id, has_reason, "the kernel waits").sentence


def test_a_device_that_strangers_fill_makes_a_resume_wait_instead_of_fail(lab: Lab, saw: Note) -> None:
    with Kernel(lab, lab.install(4)) as kernel:
        kernel.must(lab.cells.fill(3, 2 * lab.unit_mib))
        kernel.suspend()
        with lab.stranger(leave_mib=lab.unit_mib):
            until(lambda: lab.status().devices[0].stranger_mib > 0, "the broker sees the stranger")
            cell = kernel.send(lab.cells.check())
            saw("sentence", waits(lab, kernel))
            assert kernel.lease.state == "suspended"
        reply = kernel.wait(cell)
        assert (reply.status, reply.text) == ("ok", "intact\n"), reply.error
        assert kernel.lease.resumes == 1


def test_a_busy_kernel_makes_another_wait_and_the_wait_can_be_interrupted(lab: Lab, saw: Note) -> None:
    name = lab.install(5)
    go = lab.folder / "go"
    with ExitStack() as stack:
        first, second = (stack.enter_context(Kernel(lab, name)) for _ in range(2))
        first.must(lab.cells.fill(1, lab.unit_mib))
        second.must(lab.cells.fill(2, lab.unit_mib))
        busy = second.send(lab.cells.busy_until(str(go)))
        lab.await_lease(str(second.manager.kernel_id), lambda lease: lease.busy, "the second kernel is busy")
        cell = first.send(lab.cells.check())
        saw("sentence", waits(lab, first))
        first.interrupt()
        reply = first.wait(cell)
        assert reply.status == "error", "the cell was not interrupted"
        saw("interrupted_with", reply.error)
        assert second.lease.state == "resident"
        go.touch()
        assert second.wait(busy).text == "intact\n"
        assert first.is_intact()
        assert second.is_intact()


def test_a_kernel_gets_its_cap_and_no_more_and_its_neighbour_notices_nothing(lab: Lab, saw: Note) -> None:
    cap_units = 3
    step_mib = lab.unit_mib // 8
    with ExitStack() as stack:
        neighbour = stack.enter_context(Kernel(lab, lab.install(4)))
        greedy = stack.enter_context(Kernel(lab, lab.install(cap_units)))
        neighbour.must(lab.cells.fill(4, 2 * lab.unit_mib))
        got_mib = int(greedy.must(lab.cells.grab(step_mib)))
        saw("cap_mib", cap_units * lab.unit_mib)
        saw("got_mib", got_mib)
        saw("refusal", greedy.must("print(refusal)")[:300])
        assert got_mib <= cap_units * lab.unit_mib, "the cap did not hold"
        assert got_mib >= cap_units * lab.unit_mib // 2, "the cap leaves too little"
        assert int(greedy.must(lab.cells.grab(step_mib))) == got_mib, "after a refusal the same is there again"
        assert neighbour.lease.state == "resident"
        assert neighbour.is_intact()
