"""Moving bytes only in the simulation; tests/gpu_behaviour has what NVIDIA's driver also does."""

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.store import Store
from tests.gpu_sim.kernels import Kernel, KernelError, answer, ask, eventually, worker_process
from tests.support import faults
from tests.support.faults import configure

S = ProcessState


def test_a_machine_without_room_for_the_copy_refuses_and_loses_nothing(
    kernel: Kernel, driver: SimulatedCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'k')")
    driver.lock(kernel.pid, 1000)
    for operation, state in ((driver.checkpoint, S.LOCKED), (driver.restore, S.CHECKPOINTED)):
        monkeypatch.setattr(Store, "available_bytes", lambda _store: 1000)
        with pytest.raises(GPUError, match="1 MiB needs that much free memory") as caught:
            operation(kernel.pid)
        assert caught.value.code is GPUErrorCode.OPERATING_SYSTEM
        assert driver.state(kernel.pid) is state
        monkeypatch.undo()
        operation(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.read() == b'k' * 2**20")


@pytest.mark.promise("race-moves")
def test_a_device_lost_in_the_middle_of_a_checkpoint_fails_the_process(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(4 << 20); x.fill(b'x')")
    driver.lock(kernel.pid, 1000)
    store = Store(simulated.directory)
    configure(store, checkpoint_mib_s=20)
    store.close()
    with worker_process(simulated) as worker:
        ask(worker, "checkpoint", kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is S.CHECKPOINTING, "the operation began")
        faults.lose_device(simulated.directory, simulated.devices[0].device_id)
        reply = answer(worker)
    assert reply["error"]["code"] == "device-lost"
    assert driver.state(kernel.pid) is S.FAILED
    with pytest.raises(KernelError, match="was lost"):
        kernel.run("x.read(1)")
