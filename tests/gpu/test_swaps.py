"""Suspend and resume: a hundred rounds, and two kernels that take turns on a pool which holds one of them."""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab
from tests.gpu.look import host_memory

Note = Callable[[str, object], None]

ROUNDS = 100
TURNS = 6


def holds(lab: Lab, kernel: Kernel) -> dict[str, float]:
    """What the kernel holds on the device and on the host, MiB."""
    return {"device_mib": lab.used_by(kernel.pid), "host_mib": float(host_memory(kernel.pid)["Rss"])}


@pytest.mark.timeout(420)
def test_a_hundred_rounds_keep_every_byte(lab: Lab, saw: Note) -> None:
    suspends: list[float] = []
    resumes: list[float] = []
    with Kernel(lab, lab.install(2)) as kernel:
        kernel.must(lab.cells.fill(1, 64))
        assert kernel.is_intact()
        kernel.suspend()  # the first one brings what stays
        assert kernel.is_intact()
        held = [holds(lab, kernel)]
        for number in range(ROUNDS):
            begun = time.perf_counter()
            assert kernel.suspend().state == "suspended"
            suspends.append(time.perf_counter() - begun)
            if number % 10 == 0:
                assert lab.used_by(kernel.pid) == 0, "memory stayed on the device"
            begun = time.perf_counter()
            assert kernel.resume().state == "resident"
            resumes.append(time.perf_counter() - begun)
            assert kernel.is_intact()
        held.append(holds(lab, kernel))
        lease = kernel.lease
        assert (lease.suspends, lease.resumes) == (ROUNDS + 1, ROUNDS + 1)
    saw("held_before_and_after", held)
    for name, seconds in (("suspend", suspends), ("resume", resumes)):
        spread = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
        saw(f"{name}_s", {key: round(value, 4) for key, value in spread.items()})


def test_two_kernels_that_do_not_fit_together_take_turns(lab: Lab, saw: Note) -> None:
    before_mib = lab.used_mib()
    name = lab.install(5)
    held_mib = 3 * lab.unit_mib
    with ExitStack() as stack:
        kernels = [stack.enter_context(Kernel(lab, name)) for _ in range(2)]
        for seed, kernel in enumerate(kernels):
            kernel.must(lab.cells.fill(seed, held_mib))
        seen = []
        for turn in range(TURNS):
            running, other = kernels[turn % 2], kernels[1 - turn % 2]
            begun = time.perf_counter()
            assert running.is_intact()
            waited_s = time.perf_counter() - begun
            assert other.lease.state == "suspended"
            held, left = lab.used_by(running.pid), lab.used_by(other.pid)
            total_mib = lab.used_mib() - before_mib
            seen.append({"cell_s": round(waited_s, 3), "held_mib": held, "left_mib": left, "device_mib": total_mib})
            assert left == 0, "a suspended kernel holds device memory"
            assert held >= held_mib, "the driver does not count it under its process id: see `jupyter gpu doctor`"
            assert total_mib <= lab.capacity_mib, "the two together hold more than the pool's capacity"
        saw("turns", seen)
        saw("held_mib_each", held_mib)
        assert all(kernel.lease.suspends >= TURNS // 2 for kernel in kernels)
    assert lab.status().leases == []


def test_memory_is_really_free_while_a_kernel_is_suspended(lab: Lab, saw: Note) -> None:
    held_mib = 4 * lab.unit_mib
    before_mib = lab.used_mib()
    with Kernel(lab, lab.install(6)) as kernel:
        kernel.must(lab.cells.fill(5, held_mib))
        resident_mib = lab.used_mib()
        lease = kernel.suspend()
        suspended_mib = lab.used_mib()
        saw("used_mib", {"before": before_mib, "resident": resident_mib, "suspended": suspended_mib})
        saw("saved_mib", lease.lease.saved_mib)
        assert lab.used_by(kernel.pid) == 0
        assert resident_mib - suspended_mib >= held_mib
        assert suspended_mib - before_mib <= lab.cells.context_mib
        assert lease.lease.saved_mib >= held_mib
        with lab.stranger(leave_mib=lab.unit_mib) as others_mib:
            saw("given_to_others_mib", others_mib)
        assert kernel.is_intact()
