"""The caller dies in the middle of a checkpoint or a restore: what may become of the target, since NVIDIA documents nothing for it."""

from dataclasses import dataclass

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import KernelError, KernelProcess, ask, backend_worker, eventually

S = ProcessState


@dataclass(frozen=True)
class Ending:
    state: ProcessState
    used_mib: int  # of the 40 MiB on the device


ENDINGS = {
    ("checkpoint", "back"): Ending(S.LOCKED, 40),
    ("checkpoint", "done"): Ending(S.CHECKPOINTED, 0),
    ("checkpoint", "failed"): Ending(S.FAILED, 0),
    ("restore", "back"): Ending(S.CHECKPOINTED, 0),
    ("restore", "done"): Ending(S.LOCKED, 40),
    ("restore", "failed"): Ending(S.FAILED, 40),
}


@pytest.mark.parametrize(("operation", "how"), ENDINGS)
def test_what_becomes_of_the_target_is_a_setting(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, operation: str, how: str
) -> None:
    driver, ending = remote.checkpointer, ENDINGS[operation, how]
    kernel.run("!x = cuda.allocate(8 << 20); x.fill(b'kept')")
    driver.lock(kernel.pid, 1000)
    if operation == "restore":
        driver.checkpoint(kernel.pid)
    double.set(save_gb_s=0.04, load_gb_s=0.04, caller_death=how)
    moving = S.CHECKPOINTING if operation == "checkpoint" else S.RESTORING
    with backend_worker("nvidia", double.environment()) as worker:
        ask(worker, operation, kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is moving, "the operation began")
        worker.process.kill()
        worker.process.wait()
    double.set(save_gb_s=0, load_gb_s=0)
    eventually(lambda: driver.state(kernel.pid) is not moving, "the target noticed")
    assert driver.state(kernel.pid) is ending.state
    assert remote.monitor.use(double.devices[0].device_id).used_mib == ending.used_mib
    if ending.state is S.FAILED:
        with pytest.raises(GPUError) as caught:
            driver.restore(kernel.pid)
        assert caught.value.code is GPUErrorCode.OPERATING_SYSTEM
        with pytest.raises(KernelError):
            kernel.run("x.read(4)")
        return
    if ending.state is S.CHECKPOINTED:
        driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.read() == b'kept' * (2 << 20)")


def test_a_restore_to_another_device_that_is_undone_leaves_that_device(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    driver = remote.checkpointer
    first, second = (device.device_id for device in double.devices)
    kernel.run("!x = cuda.allocate(8 << 20); x.fill(b'kept')")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    double.set(load_gb_s=0.04)
    with backend_worker("nvidia", double.environment()) as worker:
        ask(worker, "restore", kernel.pid, moves={first: second})
        eventually(lambda: driver.state(kernel.pid) is S.RESTORING, "the operation began")
        assert remote.monitor.use(second).used_mib == 40
        worker.process.kill()
        worker.process.wait()
    eventually(lambda: driver.state(kernel.pid) is S.CHECKPOINTED, "the target noticed")
    assert remote.monitor.use(second).used_mib == 0
    double.set(load_gb_s=0)
    driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("cuda.device().device_id") == first
    assert kernel.run("x.read() == b'kept' * (2 << 20)")


def test_two_callers_do_not_work_on_one_process(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    """What NVIDIA's driver does with a second caller is not known; the double refuses it."""
    driver = remote.checkpointer
    kernel.run("!x = cuda.allocate(8 << 20)")
    driver.lock(kernel.pid, 1000)
    double.set(save_gb_s=0.01)
    with backend_worker("nvidia", double.environment()) as worker:
        ask(worker, "checkpoint", kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is S.CHECKPOINTING, "the operation began")
        with pytest.raises(GPUError) as caught:
            driver.unlock(kernel.pid)
        assert caught.value.code is GPUErrorCode.ILLEGAL_STATE
    eventually(lambda: driver.state(kernel.pid) is S.LOCKED, "the target noticed that its caller was killed")
