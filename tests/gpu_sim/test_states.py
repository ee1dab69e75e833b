"""States and waiting only in the simulation; tests/gpu_behaviour has what NVIDIA's driver also does."""

import os
from collections.abc import Callable

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.processes import current_key, find_process
from fractional_gpu.gpu.simulated.store import Store
from tests.gpu_sim.kernels import Kernel, KernelError, answer, ask, eventually, worker_process
from tests.support import faults
from tests.support.faults import configure
from tests.support.stories import UNINTERRUPTIBLE

S, C = ProcessState, GPUErrorCode
OPERATIONS = ("lock", "checkpoint", "restore", "unlock")


def do(driver: SimulatedCheckpointer, operation: str, pid: int) -> None:
    calls: dict[str, Callable[[], None]] = {
        "lock": lambda: driver.lock(pid, 1000),
        "checkpoint": lambda: driver.checkpoint(pid),
        "restore": lambda: driver.restore(pid),
        "unlock": lambda: driver.unlock(pid),
    }
    calls[operation]()


def test_collecting_a_buffer_does_not_wait_for_a_process_that_is_held(
    kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    driver.lock(kernel.pid, 1000)
    kernel.run("!x = None")
    driver.unlock(kernel.pid)
    assert kernel.run("cuda.memory_info()") == [(256 - 32) << 20, 256 << 20]


def test_a_wait_can_be_interrupted(kernel: Kernel, driver: SimulatedCheckpointer) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    driver.lock(kernel.pid, 1000)
    kernel.begin("x.read(1)")
    kernel.interrupt()
    with pytest.raises(KernelError) as caught:
        kernel.result()
    assert caught.value.name == "KeyboardInterrupt"
    driver.unlock(kernel.pid)
    assert kernel.run("len(x.read())") == 1000


def test_interrupted_work_does_not_keep_the_next_lock_out(kernel: Kernel, driver: SimulatedCheckpointer) -> None:
    kernel.run("cuda.memory_info()")
    for _ in range(20):
        kernel.begin("cuda.launch(60)")
        kernel.interrupt()
        with pytest.raises(KernelError) as caught:
            kernel.result()
        assert caught.value.name == "KeyboardInterrupt"
        driver.lock(kernel.pid, 0)
        driver.unlock(kernel.pid)


def test_a_wait_in_the_drivers_manner_takes_the_interrupt_only_afterwards(
    simulated: host.SimulatedHost, driver: SimulatedCheckpointer
) -> None:
    with Kernel(simulated) as kernel:
        kernel.run(f"!{UNINTERRUPTIBLE}x = cuda.allocate(1000)")
        driver.lock(kernel.pid, 1000)
        kernel.run("say_when_sigint_is_held()")
        kernel.begin("x.read(1)")
        assert kernel.message() == {"held": True}
        kernel.interrupt()
        assert kernel.is_blocked()
        driver.unlock(kernel.pid)
        with pytest.raises(KernelError, match="interrupted while it waited for the GPU") as caught:
            kernel.result()
        assert caught.value.name == "KeyboardInterrupt"


def test_two_operations_on_one_process_take_turns(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(8 * 2**20); x.fill(b'ab')")
    driver.lock(kernel.pid, 1000)
    store = Store(simulated.directory)
    configure(store, checkpoint_mib_s=40)
    with worker_process(simulated) as worker:
        ask(worker, "checkpoint", kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is S.CHECKPOINTING, "it began")
        driver.restore(kernel.pid)  # waits for the other's checkpoint, then undoes it
        assert "error" not in answer(worker)
    driver.unlock(kernel.pid)
    assert kernel.run("x.read(4).decode()") == "abab"
    store.close()


def test_a_lost_device_takes_what_it_held(simulated: host.SimulatedHost, driver: SimulatedCheckpointer) -> None:
    first, second = simulated.devices
    with Kernel(simulated) as there, Kernel(simulated) as saved, Kernel(simulated, device=1) as elsewhere:
        for kernel in (there, saved, elsewhere):
            kernel.run("!x = cuda.allocate(1000); x.fill(b'ab')")
        driver.lock(saved.pid, 1000)
        driver.checkpoint(saved.pid)
        faults.lose_device(simulated.directory, first.device_id)
        with pytest.raises(KernelError, match="was lost"):
            there.run("x.read()")
        for operation in OPERATIONS:
            with pytest.raises(GPUError) as caught:
                do(driver, operation, there.pid)
            assert caught.value.code is C.DEVICE_LOST
        with pytest.raises(GPUError) as caught:
            driver.restore(saved.pid)
        assert caught.value.code is C.DEVICE_LOST
        assert driver.state(saved.pid) is S.CHECKPOINTED
        driver.restore(saved.pid, {first.device_id: second.device_id})
        driver.unlock(saved.pid)
        assert saved.run("x.read(2).decode()") == "ab"
        assert elsewhere.run("x.read(2).decode()") == "ab"
        with Kernel(simulated) as late, pytest.raises(KernelError, match="is lost"):
            late.run("cuda.memory_info()")
        faults.return_device(simulated.directory, first.device_id)
        assert driver.state(there.pid) is S.FAILED
        with Kernel(simulated) as late:
            assert late.run("cuda.memory_info()[0]") == 224 << 20


def test_the_state_of_a_reused_pid_is_not_its_predecessors(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    store = Store(simulated.directory)
    key = str(current_key(kernel.pid))
    with store.transaction() as db:
        for table, column in (("processes", "key"), ("allocations", "process")):
            db.execute(f"UPDATE {table} SET {column}='{kernel.pid}-1-before'")  # noqa: S608
    store.process_folder(key).rename(store.memory / f"{kernel.pid}-1-before")
    assert driver.state(kernel.pid) is S.NO_CONTEXT
    assert find_process(store, f"{kernel.pid}-1-before") is None
    assert os.listdir(store.memory) == []  # noqa: PTH208
    store.close()
