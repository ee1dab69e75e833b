"""Faults of the simulation; what they do to processes with any driver is in tests/gpu_behaviour."""

import threading
import time
from collections.abc import Callable

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from tests.gpu_sim.kernels import Kernel, eventually
from tests.support import faults

S = ProcessState


def in_background(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_failure_strikes_as_often_as_it_was_told(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    faults.inject(simulated.directory, "lock", "fail:unknown", times=2)
    for _ in range(2):
        with pytest.raises(GPUError) as caught:
            driver.lock(kernel.pid, 100)
        assert caught.value.code is GPUErrorCode.UNKNOWN
    driver.lock(kernel.pid, 100)
    assert [(fault.left, fault.taken) for fault in faults.listed(simulated.directory)] == [(0, 2)]


def test_a_hanging_operation_goes_on_when_the_fault_is_removed(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    fault = faults.inject(simulated.directory, "lock", "hang")
    thread = in_background(lambda: driver.lock(kernel.pid, 100))
    eventually(lambda: faults.listed(simulated.directory)[0].taken == 1, "it hangs")
    assert driver.state(kernel.pid) is S.RUNNING
    faults.remove(simulated.directory, fault)
    thread.join()
    assert driver.state(kernel.pid) is S.LOCKED


def test_a_late_answer_comes_after_the_deed(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    fault = faults.inject(simulated.directory, "lock", "late")
    thread = in_background(lambda: driver.lock(kernel.pid, 100))
    eventually(lambda: driver.state(kernel.pid) is S.LOCKED, "it was done")
    assert thread.is_alive()
    faults.remove(simulated.directory, fault)
    thread.join()


@pytest.mark.parametrize("fault", ["slow:60", "late:60"])
def test_a_slow_operation_takes_its_time(
    fault: str, simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    faults.inject(simulated.directory, "lock", fault)
    began = time.monotonic()
    driver.lock(kernel.pid, 100)
    assert time.monotonic() - began >= 0.06
    assert driver.state(kernel.pid) is S.LOCKED


def test_a_lie_answers_success_and_does_nothing(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    driver.lock(kernel.pid, 100)
    faults.inject(simulated.directory, "checkpoint", "lie")
    driver.checkpoint(kernel.pid)
    assert driver.state(kernel.pid) is S.LOCKED
    faults.inject(simulated.directory, "state", "lie:checkpointed")
    assert driver.state(kernel.pid) is S.CHECKPOINTED
    assert driver.state(kernel.pid) is S.LOCKED


@pytest.mark.parametrize(
    ("operation", "fault", "times"),
    [
        ("reset", "hang", 1),
        ("lock", "explode", 1),
        ("lock", "fail", 1),
        ("lock", "fail:nonsense", 1),
        ("lock", "slow", 1),
        ("lock", "slow:x", 1),
        ("lock", "late:", 1),
        ("lock", "hang:5", 1),
        ("lock", "lie:running", 1),
        ("state", "lie", 1),
        ("lock", "hang", 0),
    ],
)
def test_a_fault_that_is_none_is_refused(simulated: host.SimulatedHost, operation: str, fault: str, times: int) -> None:
    with pytest.raises(SimulatedHostError):
        faults.inject(simulated.directory, operation, fault, times=times)
    assert faults.listed(simulated.directory) == []
