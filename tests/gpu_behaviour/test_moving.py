"""Bytes are really moved, at the speed that was set, and no death loses one."""

import os
import random
import threading
import time

import pytest

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, Monitor, ProcessState
from tests.gpu_behaviour.conftest import MakeHost
from tests.gpu_behaviour.hosts import Host
from tests.gpu_sim.kernels import MIB, KernelProcess, answer, ask, eventually

pytestmark = pytest.mark.promise("race-moves", "driver-bytes")

S = ProcessState
ALL = bool(os.environ.get("JUPYTER_GPU_ALL_KINDS"))
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


def test_contents_survive_many_checkpoints_on_changing_devices(
    host: Host, kernel: KernelProcess, driver: Checkpointer, monitor: Monitor
) -> None:
    kernel.run(FILL)
    before = kernel.run(SUMS)
    here, there = host.devices
    used = monitor.use(here).used_mib
    for _ in range(3):
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        assert host.device_bytes(kernel.pid) == 0
        assert host.saved_bytes(kernel.pid) > 3 * MIB
        assert monitor.use(here).used_mib == 0
        driver.restore(kernel.pid, {here: there, there: here})
        driver.unlock(kernel.pid)
        here, there = there, here
        assert host.saved_bytes(kernel.pid) == 0
        assert kernel.run("cuda.device().device_id") == here
        assert (monitor.use(here).used_mib, monitor.use(there).used_mib) == (used, 0)
        assert kernel.run(SUMS) == before
        kernel.run("!held[3].write(chance.randbytes(1000), 12345)")
        before = kernel.run(SUMS)


def test_a_checkpoint_moves_what_is_written_not_a_remembered_copy(kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("!x = cuda.allocate(100); x.fill(b'old')")
    for word in ("new", "now"):
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        driver.restore(kernel.pid)
        driver.unlock(kernel.pid)
        kernel.run(f"x.fill(b'{word}')")
        assert kernel.run("x.read(3).decode()") == word


def test_the_room_of_a_suspended_process_serves_another(
    host: Host, kernel: KernelProcess, driver: Checkpointer
) -> None:
    kernel.run("!x = cuda.allocate(200 * 2**20)")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    with host.kernel() as other:
        other.run("!x = cuda.allocate(200 * 2**20)")
    driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.read(1) == b'\\0'")


def test_the_bandwidth_that_was_set_is_kept(host: Host, kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("!x = cuda.allocate(20 * 2**20)")
    host.set_speed(checkpoint_mib_s=100, restore_mib_s=200)
    driver.lock(kernel.pid, 1000)
    began = time.monotonic()
    driver.checkpoint(kernel.pid)
    saved = time.monotonic()
    driver.restore(kernel.pid)
    assert 0.2 <= saved - began < 20
    assert 0.1 <= time.monotonic() - saved < 20


def test_devices_that_are_not_alike_do_not_exchange_processes(make_host: MakeHost) -> None:
    """NVIDIA's driver gives no reason for it; the simulation does."""
    host = make_host((256, 512))
    driver = host.checkpointer
    first, second = host.devices
    with host.kernel() as kernel:
        kernel.run("!x = cuda.allocate(10); x.fill(b'k')")
        driver.lock(kernel.pid, 1000)
        driver.checkpoint(kernel.pid)
        for moves, code in (
            ({first: second}, host.unlike_devices),
            ({first: "SIM-x"}, GPUErrorCode.NO_SUCH_DEVICE),
        ):
            with pytest.raises(GPUError) as caught:
                driver.restore(kernel.pid, moves)
            assert caught.value.code is code
            assert driver.state(kernel.pid) is S.CHECKPOINTED
        driver.restore(kernel.pid, {first: first, second: second})
        driver.unlock(kernel.pid)
        assert kernel.run("x.read(1).decode()") == "k"


@pytest.mark.parametrize("eighths", range(0, 8, 2) if ALL else (0, 4))
@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_a_worker_killed_in_the_middle_loses_no_byte(
    *, operation: str, eighths: int, host: Host, kernel: KernelProcess, driver: Checkpointer, monitor: Monitor
) -> None:
    """NVIDIA documents nothing for this; the double plays a target that recovers."""
    kernel.run("!import random; x = cuda.allocate(8 << 20); x.write(random.Random(1).randbytes(8 << 20))")
    before = kernel.run("x.sha256()")
    host.set_speed(checkpoint_mib_s=20, restore_mib_s=20)
    driver.lock(kernel.pid, 1000)
    moving, settled, target = S.CHECKPOINTING, S.LOCKED, host.saved_bytes
    if operation == "restore":
        host.set_speed(restore_mib_s=20)
        driver.checkpoint(kernel.pid)
        moving, settled, target = S.RESTORING, S.CHECKPOINTED, host.device_bytes
    device = host.devices[0]
    with host.worker() as worker:
        ask(worker, operation, kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is moving, "the operation began")
        assert monitor.use(device).used_mib == 40
        eventually(lambda: target(kernel.pid) >= eighths * MIB, "so much was moved")
        worker.process.kill()
        worker.process.wait()
    host.wait_settled(kernel.pid, settled)
    assert monitor.use(device).used_mib == (40 if settled is S.LOCKED else 0)
    assert target(kernel.pid) == 0
    host.set_speed()
    if settled is S.LOCKED:
        driver.checkpoint(kernel.pid)
    driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.sha256()") == before


@pytest.mark.parametrize("seed", range(12 if ALL else 4))
def test_a_worker_killed_at_any_instant_leaves_a_true_state(
    seed: int, host: Host, kernel: KernelProcess, driver: Checkpointer
) -> None:
    kernel.run("!import random; x = cuda.allocate(1 << 20); x.write(random.Random(1).randbytes(1 << 20))")
    before = kernel.run("x.sha256()")
    driver.lock(kernel.pid, 1000)
    operation = ("checkpoint", "restore")[seed % 2]
    if operation == "restore":
        driver.checkpoint(kernel.pid)
    instant = random.Random(seed).random() * 0.006
    with host.worker() as worker:
        ask(worker, operation, kernel.pid)
        # Any instant will do: nothing is waited for, so nothing is synchronised with.
        threading.Event().wait(instant)
        worker.process.kill()
        worker.process.wait()
    host.wait_quiet(kernel.pid)
    state = driver.state(kernel.pid)
    assert state in (S.LOCKED, S.CHECKPOINTED)
    if state is S.CHECKPOINTED:
        driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.run("x.sha256()") == before
    assert host.saved_bytes(kernel.pid) == 0


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_a_target_killed_in_the_middle_is_gone_and_holds_nothing(
    operation: str, host: Host, kernel: KernelProcess, driver: Checkpointer, monitor: Monitor
) -> None:
    kernel.run("!x = cuda.allocate(4 << 20); x.fill(b'x')")
    driver.lock(kernel.pid, 1000)
    if operation == "restore":
        driver.checkpoint(kernel.pid)
    host.set_speed(checkpoint_mib_s=20, restore_mib_s=20)
    moving = S.CHECKPOINTING if operation == "checkpoint" else S.RESTORING
    with host.worker() as worker:
        ask(worker, operation, kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is moving, "the operation began")
        kernel.kill()
        assert monitor.use(host.devices[0]).used_mib == 0
        reply = answer(worker)
    assert reply["error"]["code"] == "no-such-process"
    assert driver.state(kernel.pid) is S.GONE
    assert host.left_behind() == []


def test_a_process_that_exits_while_suspended_gives_its_saved_bytes_back(
    host: Host, kernel: KernelProcess, driver: Checkpointer
) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'x')")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    assert kernel.end() == 0
    assert host.left_behind() == []
    assert driver.state(kernel.pid) is S.GONE
