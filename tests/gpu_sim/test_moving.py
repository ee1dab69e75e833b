"""Bytes are really moved, at the speed that was set, and no death loses one."""

import os
import random
import threading
import time

import pytest

from provisioner.gpu.interface import GPUError, GPUErrorCode, ProcessState
from provisioner.gpu.simulated import checkpointer as checkpointer_module
from provisioner.gpu.simulated import host
from provisioner.gpu.simulated.checkpointer import SimulatedCheckpointer
from provisioner.gpu.simulated.monitor import SimulatedMonitor
from provisioner.gpu.simulated.processes import current_key
from provisioner.gpu.simulated.store import Store
from tests.gpu_sim.kernels import MIB, Kernel, KernelError, answer, ask, eventually, worker_process

S = ProcessState
FILL = """!
import random
chance = random.Random(7)
held = [cuda.allocate(n) for n in (1, 4096, 65537, 3 << 20, 5000)]
for buffer in held:
    buffer.write(chance.randbytes(buffer.n_bytes))
holes = cuda.allocate(16 << 20)
holes.write(b"island", 9 << 20)
held.append(holes)
"""
SUMS = "[buffer.sha256() for buffer in held]"


def blocks(simulated: host.SimulatedHost, pattern: str) -> int:
    """Return the bytes that files of this kind really occupy."""
    return sum(file.stat().st_blocks * 512 for file in (simulated.directory / "memory").glob(f"*/{pattern}"))


def test_contents_survive_many_checkpoints_on_changing_devices(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer, monitor: SimulatedMonitor
) -> None:
    kernel.run(FILL)
    before = kernel.run(SUMS)
    here, there = (device.device_id for device in simulated.devices)
    used = monitor.use(here).used_mib
    for _ in range(10):
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        assert blocks(simulated, "*.device") == 0
        assert blocks(simulated, "*.saved") > 3 * MIB
        assert monitor.use(here).used_mib == 0
        driver.restore(kernel.pid, {here: there, there: here})
        driver.unlock(kernel.pid)
        here, there = there, here
        assert blocks(simulated, "*.saved") == 0
        assert kernel.run("cuda.device().device_id") == here
        assert (monitor.use(here).used_mib, monitor.use(there).used_mib) == (used, 0)
        assert kernel.run(SUMS) == before
        kernel.run("!held[3].write(chance.randbytes(1000), 12345)")
        before = kernel.run(SUMS)


def test_a_checkpoint_moves_what_is_written_not_a_remembered_copy(
    kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(100); x.fill(b'old')")
    for word in ("new", "now"):
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        driver.restore(kernel.pid)
        driver.unlock(kernel.pid)
        kernel.run(f"x.fill(b'{word}')")
        assert kernel.run("x.read(3).decode()") == word


def test_the_room_of_a_suspended_process_serves_another(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(200 * 2**20)")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    with Kernel(simulated) as other:
        other.run("!x = cuda.allocate(200 * 2**20)")
    driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.read(1) == b'\\0'")


def test_the_bandwidth_and_latency_that_were_set_are_kept(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(20 * 2**20)")
    store = Store(simulated.directory)
    store.configure(checkpoint_mib_s=100, restore_mib_s=200, latency_ms=20)
    store.close()
    driver.lock(kernel.pid, 1000)
    began = time.monotonic()
    driver.checkpoint(kernel.pid)
    saved = time.monotonic()
    driver.restore(kernel.pid)
    assert 0.22 <= saved - began < 2
    assert 0.12 <= time.monotonic() - saved < 2


def test_devices_that_are_not_alike_do_not_exchange_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    mixed = host.create(tmp_path_factory.mktemp("mixed") / "host", "1x256MiB,1x512MiB")
    driver = SimulatedCheckpointer(mixed.directory)
    first, second = (device.device_id for device in mixed.devices)
    with Kernel(mixed) as kernel:
        kernel.run("!x = cuda.allocate(10); x.fill(b'k')")
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        for moves, code in (
            ({first: second}, GPUErrorCode.NOT_SUPPORTED),
            ({first: "SIM-x"}, GPUErrorCode.NO_SUCH_DEVICE),
        ):
            with pytest.raises(GPUError) as caught:
                driver.restore(kernel.pid, moves)
            assert caught.value.code is code
            assert driver.state(kernel.pid) is S.CHECKPOINTED
        driver.restore(kernel.pid, {first: first, second: second})
        driver.unlock(kernel.pid)
        assert kernel.run("x.read(1).decode()") == "k"
    driver.close()


def test_a_machine_without_room_for_the_copy_refuses_and_loses_nothing(
    kernel: Kernel, driver: SimulatedCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'k')")
    driver.lock(kernel.pid, 1000)
    for operation, state in ((driver.checkpoint, S.LOCKED), (driver.restore, S.CHECKPOINTED)):
        monkeypatch.setattr(checkpointer_module, "available_bytes", lambda _directory: 1000)
        with pytest.raises(GPUError, match="1 MiB needs as much again") as caught:
            operation(kernel.pid)
        assert caught.value.code is GPUErrorCode.OPERATING_SYSTEM
        assert driver.state(kernel.pid) is state
        monkeypatch.undo()
        operation(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.read() == b'k' * 2**20")


@pytest.mark.parametrize("eighths", range(0, 8, 2))
@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_a_worker_killed_in_the_middle_loses_no_byte(
    *,
    operation: str,
    eighths: int,
    simulated: host.SimulatedHost,
    kernel: Kernel,
    driver: SimulatedCheckpointer,
    monitor: SimulatedMonitor,
) -> None:
    kernel.run("!import random; x = cuda.allocate(8 << 20); x.write(random.Random(1).randbytes(8 << 20))")
    before = kernel.run("x.sha256()")
    store = Store(simulated.directory)
    store.configure(checkpoint_mib_s=40, restore_mib_s=40)
    driver.lock(kernel.pid, 1000)
    moving, settled, target = S.CHECKPOINTING, S.LOCKED, "*.saved"
    if operation == "restore":
        store.configure(checkpoint_mib_s=0)
        driver.checkpoint(kernel.pid)
        moving, settled, target = S.RESTORING, S.CHECKPOINTED, "*.device"
    device = simulated.devices[0].device_id
    with worker_process(simulated) as worker:
        ask(worker, operation, kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is moving, "the operation began")
        eventually(lambda: blocks(simulated, target) >= eighths * MIB, "so much was moved")
        assert monitor.use(device).used_mib == 40
        worker.kill()
        worker.wait()
    assert driver.state(kernel.pid) is settled
    assert monitor.use(device).used_mib == (40 if settled is S.LOCKED else 0)
    assert blocks(simulated, target) == 0
    store.configure(checkpoint_mib_s=0, restore_mib_s=0)
    store.close()
    if settled is S.LOCKED:
        driver.checkpoint(kernel.pid)
    driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.sha256()") == before


@pytest.mark.parametrize("seed", range(12))
def test_a_worker_killed_at_any_instant_leaves_a_true_state(
    seed: int, simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!import random; x = cuda.allocate(1 << 20); x.write(random.Random(1).randbytes(1 << 20))")
    before = kernel.run("x.sha256()")
    driver.lock(kernel.pid, 1000)
    operation = ("checkpoint", "restore")[seed % 2]
    if operation == "restore":
        driver.checkpoint(kernel.pid)
    instant = random.Random(seed).random() * 0.006
    with worker_process(simulated) as worker:
        ask(worker, operation, kernel.pid)
        # Any instant will do: nothing is waited for, so nothing is synchronised with.
        threading.Event().wait(instant)
        worker.kill()
        worker.wait()
    state = driver.state(kernel.pid)
    assert state in (S.LOCKED, S.CHECKPOINTED)
    if state is S.CHECKPOINTED:
        driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.sha256()") == before
    assert blocks(simulated, "*.saved") == 0


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_a_target_killed_in_the_middle_is_gone_and_holds_nothing(
    operation: str,
    simulated: host.SimulatedHost,
    kernel: Kernel,
    driver: SimulatedCheckpointer,
    monitor: SimulatedMonitor,
) -> None:
    kernel.run("!x = cuda.allocate(4 << 20); x.fill(b'x')")
    store = Store(simulated.directory)
    driver.lock(kernel.pid, 1000)
    if operation == "restore":
        driver.checkpoint(kernel.pid)
    store.configure(checkpoint_mib_s=20, restore_mib_s=20)
    store.close()
    moving = S.CHECKPOINTING if operation == "checkpoint" else S.RESTORING
    with worker_process(simulated) as worker:
        ask(worker, operation, kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is moving, "the operation began")
        kernel.kill()
        assert monitor.use(simulated.devices[0].device_id).used_mib == 0
        reply = answer(worker)
    assert reply["error"]["code"] == "no-such-process"
    assert driver.state(kernel.pid) is S.GONE
    assert not os.listdir(simulated.directory / "memory")  # noqa: PTH208
    assert not os.listdir(simulated.directory / "trash")  # noqa: PTH208


def test_a_device_lost_in_the_middle_of_a_checkpoint_fails_the_process(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(4 << 20); x.fill(b'x')")
    driver.lock(kernel.pid, 1000)
    store = Store(simulated.directory)
    store.configure(checkpoint_mib_s=20)
    store.close()
    with worker_process(simulated) as worker:
        ask(worker, "checkpoint", kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is S.CHECKPOINTING, "the operation began")
        host.lose_device(simulated.directory, simulated.devices[0].device_id)
        reply = answer(worker)
    assert reply["error"]["code"] == "device-lost"
    assert driver.state(kernel.pid) is S.FAILED
    with pytest.raises(KernelError, match="was lost"):
        kernel.run("x.read(1)")


def test_a_process_that_exits_while_suspended_gives_its_saved_bytes_back(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'x')")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    assert kernel.process.stdin is not None
    kernel.process.stdin.close()
    assert kernel.process.wait() == 0
    assert not list((simulated.directory / "memory").iterdir())
    assert current_key(kernel.pid) is None
    assert driver.state(kernel.pid) is S.GONE
