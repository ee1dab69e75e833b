"""Faults do what they promise, as often as they promise, to the processes that they name."""

import select
import time

import pytest

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, ProcessState
from tests.gpu_behaviour.hosts import Host
from tests.gpu_sim.kernels import KernelProcess, WorkerProcess, answer, ask, eventually

pytestmark = pytest.mark.promise("driver-bytes")

S = ProcessState


def is_readable(worker: WorkerProcess) -> bool:
    return bool(select.select([worker.channel], [], [], 0)[0])


def test_a_failure_strikes_as_often_as_it_was_told(host: Host, kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("cuda.memory_info()")
    host.fail("lock", GPUErrorCode.UNKNOWN, times=2)
    for _ in range(2):
        with pytest.raises(GPUError) as caught:
            driver.lock(kernel.pid, 100)
        assert caught.value.code is GPUErrorCode.UNKNOWN
    driver.lock(kernel.pid, 100)


def test_a_fault_for_one_process_spares_the_others(host: Host, driver: Checkpointer) -> None:
    with host.kernel() as struck, host.kernel() as spared:
        struck.run("cuda.memory_info()")
        spared.run("cuda.memory_info()")
        host.fail("lock", GPUErrorCode.NOT_SUPPORTED, times=None, pid=struck.pid)
        driver.lock(spared.pid, 100)
        for _ in range(3):
            with pytest.raises(GPUError):
                driver.lock(struck.pid, 100)
        host.end_faults()
        driver.lock(struck.pid, 100)


@pytest.mark.parametrize("late", [False, True])
def test_a_hanging_operation_goes_on_when_the_fault_is_removed(
    *, late: bool, host: Host, kernel: KernelProcess, driver: Checkpointer
) -> None:
    kernel.run("cuda.memory_info()")
    release = host.hang("lock", late=late)
    with host.worker() as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=100)
        eventually(lambda: host.hangs("lock"), "it hangs")
        if late:
            eventually(lambda: driver.state(kernel.pid) is S.LOCKED, "it was done")
        else:
            assert driver.state(kernel.pid) is S.RUNNING
        assert not is_readable(worker), "it has answered"
        release()
        assert "error" not in answer(worker)
    assert driver.state(kernel.pid) is S.LOCKED


def test_a_slow_operation_takes_its_time(host: Host, kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("cuda.memory_info()")
    host.slow("lock", 60)
    began = time.monotonic()
    driver.lock(kernel.pid, 100)
    assert time.monotonic() - began >= 0.06
    assert driver.state(kernel.pid) is S.LOCKED


def test_a_lie_answers_success_and_does_nothing(host: Host, kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("cuda.memory_info()")
    driver.lock(kernel.pid, 100)
    host.lie("checkpoint")
    driver.checkpoint(kernel.pid)
    assert driver.state(kernel.pid) is S.LOCKED
    driver.checkpoint(kernel.pid)
    assert driver.state(kernel.pid) is S.CHECKPOINTED
