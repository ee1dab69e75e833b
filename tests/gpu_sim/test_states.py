"""The driver's states and codes, every row of the table, and who waits for whom."""

import os
import time
from collections.abc import Callable

import pytest

from provisioner.gpu.interface import GPUError, GPUErrorCode, ProcessState
from provisioner.gpu.simulated import faults, host
from provisioner.gpu.simulated.checkpointer import SimulatedCheckpointer
from provisioner.gpu.simulated.processes import current_key, find_process, read_gate
from provisioner.gpu.simulated.store import Store
from tests.gpu_sim.kernels import Kernel, KernelError, answer, ask, eventually, in_flight, worker_process

S, C = ProcessState, GPUErrorCode
OPERATIONS = ("lock", "checkpoint", "restore", "unlock")

# What each operation answers in each state: the state it gives, or the code it raises.
TABLE: dict[ProcessState, tuple[ProcessState | GPUErrorCode, ...]] = {
    S.GONE: (C.NO_SUCH_PROCESS, C.NO_SUCH_PROCESS, C.NO_SUCH_PROCESS, C.NO_SUCH_PROCESS),
    S.NO_CONTEXT: (C.NOT_INITIALIZED, C.NOT_INITIALIZED, C.NOT_INITIALIZED, C.NOT_INITIALIZED),
    S.RUNNING: (S.LOCKED, C.ILLEGAL_STATE, C.ILLEGAL_STATE, C.ILLEGAL_STATE),
    S.LOCKED: (C.ILLEGAL_STATE, S.CHECKPOINTED, C.ILLEGAL_STATE, S.RUNNING),
    S.CHECKPOINTED: (C.ILLEGAL_STATE, C.ILLEGAL_STATE, S.LOCKED, C.ILLEGAL_STATE),
    S.FAILED: (C.ILLEGAL_STATE, C.ILLEGAL_STATE, C.OPERATING_SYSTEM, C.ILLEGAL_STATE),
}


def do(driver: SimulatedCheckpointer, operation: str, pid: int) -> None:
    calls: dict[str, Callable[[], None]] = {
        "lock": lambda: driver.lock(pid, 1000),
        "checkpoint": lambda: driver.checkpoint(pid),
        "restore": lambda: driver.restore(pid),
        "unlock": lambda: driver.unlock(pid),
    }
    calls[operation]()


def bring_into(
    state: ProcessState, kernel: Kernel, driver: SimulatedCheckpointer, simulated: host.SimulatedHost
) -> None:
    if state is S.GONE:
        kernel.kill()
    elif state is not S.NO_CONTEXT:
        kernel.run("!x = cuda.allocate(200 * 2**20)")
    if state in (S.LOCKED, S.CHECKPOINTED, S.FAILED):
        driver.lock(kernel.pid, 1000)
    if state in (S.CHECKPOINTED, S.FAILED):
        driver.checkpoint(kernel.pid)
    if state is S.FAILED:
        with Kernel(simulated) as neighbour:
            neighbour.run("cuda.memory_info()")
            with pytest.raises(GPUError) as caught:
                driver.restore(kernel.pid)
            assert caught.value.code is C.OUT_OF_MEMORY
    assert driver.state(kernel.pid) is state


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", list(TABLE))
def test_every_operation_in_every_state_answers_as_the_driver(
    state: ProcessState, operation: str, kernel: Kernel, driver: SimulatedCheckpointer, simulated: host.SimulatedHost
) -> None:
    bring_into(state, kernel, driver, simulated)
    expected = TABLE[state][OPERATIONS.index(operation)]
    if isinstance(expected, ProcessState):
        do(driver, operation, kernel.pid)
        assert driver.state(kernel.pid) is expected
        return
    with pytest.raises(GPUError) as caught:
        do(driver, operation, kernel.pid)
    assert caught.value.code is expected
    assert driver.state(kernel.pid) is state


def test_a_failed_process_stays_failed_when_there_is_room_again(
    kernel: Kernel, driver: SimulatedCheckpointer, simulated: host.SimulatedHost
) -> None:
    bring_into(S.FAILED, kernel, driver, simulated)  # the neighbour is gone by now
    with pytest.raises(GPUError) as caught:
        driver.restore(kernel.pid)
    assert caught.value.code is C.OPERATING_SYSTEM
    for cell in ("x.read()", "cuda.allocate(1)", "cuda.memory_info()", "cuda.launch(0)"):
        with pytest.raises(KernelError, match=r"did not fit.*restart the kernel"):
            kernel.run(cell)


def test_a_call_that_waits_is_told_when_its_process_fails(
    kernel: Kernel, driver: SimulatedCheckpointer, simulated: host.SimulatedHost
) -> None:
    kernel.run("!x = cuda.allocate(200 * 2**20)")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    kernel.begin("x.read(1)")
    with Kernel(simulated) as neighbour:
        neighbour.run("cuda.memory_info()")
        with pytest.raises(GPUError):
            driver.restore(kernel.pid)
    with pytest.raises(KernelError, match="did not fit"):
        kernel.result()


@pytest.mark.parametrize(
    "cell",
    ["x.read(1)", "x.write(b'y')", "x.sha256()", "x.fill(b'z')", "cuda.allocate(1)", "cuda.memory_info()", "x.free()"],
)
@pytest.mark.parametrize("depth", ["locked", "checkpointed"])
def test_every_call_waits_while_the_process_is_held_and_goes_on_after(
    cell: str, depth: str, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    driver.lock(kernel.pid, 1000)
    if depth == "checkpointed":
        driver.checkpoint(kernel.pid)
    kernel.begin(f"({cell}, 0)[1]")
    assert kernel.is_blocked()
    if depth == "checkpointed":
        driver.restore(kernel.pid)
    driver.unlock(kernel.pid)
    assert kernel.result() == 0


def test_python_runs_on_while_the_process_is_held(kernel: Kernel, driver: SimulatedCheckpointer) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    driver.lock(kernel.pid, 1000)
    assert kernel.run("1 + 1") == 2
    kernel.run("!x = None")  # collecting a buffer does not wait either
    driver.unlock(kernel.pid)
    assert kernel.run("cuda.memory_info()") == [(256 - 32) << 20, 256 << 20]


def test_a_lock_waits_for_work_and_gives_up_in_time(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("cuda.memory_info()")
    kernel.begin("cuda.launch(1)")
    eventually(lambda: in_flight(simulated, kernel.pid), "the work began")
    began = time.monotonic()
    with pytest.raises(GPUError) as caught:
        driver.lock(kernel.pid, 50)
    assert caught.value.code is C.NOT_READY
    assert 0.05 <= time.monotonic() - began < 1
    assert driver.state(kernel.pid) is S.RUNNING
    driver.lock(kernel.pid, 10_000)
    assert kernel.result() is None
    assert driver.state(kernel.pid) is S.LOCKED


def test_new_calls_wait_behind_a_waiting_lock(kernel: Kernel, driver: SimulatedCheckpointer) -> None:
    """Calls without a pause between them, from several threads, never keep a lock out."""
    kernel.run("!x = cuda.allocate(1000)")
    kernel.run(BUSY_THREADS)
    for _ in range(5):
        driver.lock(kernel.pid, 5000)
        seen = kernel.run("list(counts)")
        # A call that was over before the lock may still be counted after it; a second one cannot have been made.
        later = [kernel.run("list(counts)") for _ in range(50)][-1]
        assert all(after - before <= 1 for before, after in zip(seen, later, strict=True))
        driver.unlock(kernel.pid)
        kernel.run(f"!while sum(counts) < {sum(later) + 10}: time.sleep(0.001)")


BUSY_THREADS = """!
import threading, time
counts = [0, 0, 0]

def work(which):
    while True:
        x.read(10)
        counts[which] += 1

for which in range(3):
    threading.Thread(target=work, args=(which,), daemon=True).start()
"""


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
    with Kernel(simulated, {"JUPYTER_GPU_SIMULATED_UNINTERRUPTIBLE": "1"}) as kernel:
        kernel.run("!x = cuda.allocate(1000)")
        driver.lock(kernel.pid, 1000)
        kernel.run("say_when_sigint_is_held()")
        kernel.begin("x.read(1)")
        assert kernel.message() == {"held": True}
        kernel.interrupt()
        assert kernel.is_blocked()
        driver.unlock(kernel.pid)
        with pytest.raises(KernelError) as caught:
            kernel.result()
        assert caught.value.name == "KeyboardInterrupt"


def test_a_lock_whose_maker_was_killed_is_undone(simulated: host.SimulatedHost, kernel: Kernel) -> None:
    store = Store(simulated.directory)
    kernel.run("!import threading; x = cuda.allocate(10)")
    kernel.run("!t = threading.Thread(target=cuda.launch, args=(0.5,)); t.start()")
    eventually(lambda: in_flight(simulated, kernel.pid), "the work began")
    with worker_process(simulated) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=60_000)
        folder = store.process_folder(str(current_key(kernel.pid)))
        eventually(lambda: read_gate(folder) != b"O", "the lock began")
    assert kernel.run("x.read(1) == b'\\0'")
    store.close()


def test_two_operations_on_one_process_take_turns(
    simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    kernel.run("!x = cuda.allocate(8 * 2**20); x.fill(b'ab')")
    driver.lock(kernel.pid, 1000)
    store = Store(simulated.directory)
    store.configure(checkpoint_mib_s=40)
    with worker_process(simulated) as worker:
        ask(worker, "checkpoint", kernel.pid)
        eventually(lambda: driver.state(kernel.pid) is S.CHECKPOINTING, "it began")
        driver.restore(kernel.pid)  # waits for the other's checkpoint, then undoes it
        assert answer(worker)["ok"]
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
        host.lose_device(simulated.directory, first.device_id)
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
        host.return_device(simulated.directory, first.device_id)
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failing_driver_changes_nothing(
    operation: str, simulated: host.SimulatedHost, kernel: Kernel, driver: SimulatedCheckpointer
) -> None:
    faults.inject(simulated.directory, operation, "fail:not-permitted")
    before = {"lock": S.RUNNING, "checkpoint": S.LOCKED, "restore": S.CHECKPOINTED, "unlock": S.LOCKED}[operation]
    bring_into(before, kernel, driver, simulated)
    with pytest.raises(GPUError) as caught:
        do(driver, operation, kernel.pid)
    assert caught.value.code is C.NOT_PERMITTED
    assert driver.state(kernel.pid) is before
    do(driver, operation, kernel.pid)  # it struck once
    assert driver.state(kernel.pid) is not before
