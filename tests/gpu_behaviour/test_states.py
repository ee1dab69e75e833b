"""The driver's states and codes, every row of the table, and which call waits for which."""

import time
from collections.abc import Callable

import pytest

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, ProcessState
from tests.gpu_behaviour.hosts import CONTEXT_MIB, DEVICE_MIB, Host
from tests.gpu_sim.kernels import KernelError, KernelProcess, ask, eventually

pytestmark = pytest.mark.promise("driver-bytes")

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


def do(driver: Checkpointer, operation: str, pid: int) -> None:
    calls: dict[str, Callable[[], None]] = {
        "lock": lambda: driver.lock(pid, 1000),
        "checkpoint": lambda: driver.checkpoint(pid),
        "restore": lambda: driver.restore(pid),
        "unlock": lambda: driver.unlock(pid),
    }
    calls[operation]()


def bring_into(state: ProcessState, kernel: KernelProcess, driver: Checkpointer, host: Host) -> None:
    if state is S.GONE:
        kernel.kill()
    elif state is not S.NO_CONTEXT:
        kernel.run("!x = cuda.allocate(200 * 2**20)")
    if state in (S.LOCKED, S.CHECKPOINTED, S.FAILED):
        driver.lock(kernel.pid, 1000)
    if state in (S.CHECKPOINTED, S.FAILED):
        driver.checkpoint(kernel.pid)
    if state is S.FAILED:
        with host.kernel() as neighbour:
            neighbour.run("cuda.memory_info()")
            with pytest.raises(GPUError) as caught:
                driver.restore(kernel.pid)
            assert caught.value.code is C.OUT_OF_MEMORY
    assert driver.state(kernel.pid) is state


@pytest.mark.parametrize("state", list(TABLE))
def test_every_operation_in_every_state_answers_as_the_driver(
    state: ProcessState, driver: Checkpointer, host: Host
) -> None:
    answers = dict(zip(OPERATIONS, TABLE[state], strict=True))
    refused = {operation: code for operation, code in answers.items() if isinstance(code, GPUErrorCode)}
    done = {operation: after for operation, after in answers.items() if isinstance(after, ProcessState)}
    with host.kernel() as kernel:
        bring_into(state, kernel, driver, host)
        for operation, code in refused.items():
            with pytest.raises(GPUError) as caught:
                do(driver, operation, kernel.pid)
            assert caught.value.code is code, operation
            assert driver.state(kernel.pid) is state, operation
    for operation, after in done.items():
        with host.kernel() as kernel:
            bring_into(state, kernel, driver, host)
            do(driver, operation, kernel.pid)
            assert driver.state(kernel.pid) is after, operation


def test_a_failed_process_stays_failed_when_there_is_room_again(
    kernel: KernelProcess, driver: Checkpointer, host: Host
) -> None:
    bring_into(S.FAILED, kernel, driver, host)  # the neighbour is gone by now
    with pytest.raises(GPUError) as caught:
        driver.restore(kernel.pid)
    assert caught.value.code is C.OPERATING_SYSTEM
    for cell in ("x.read()", "cuda.allocate(1)", "cuda.memory_info()", "cuda.launch(0)"):
        with pytest.raises(KernelError, match=host.failed_process):
            kernel.run(cell)


def test_a_call_that_waits_is_told_when_its_process_fails(
    kernel: KernelProcess, driver: Checkpointer, host: Host
) -> None:
    kernel.run("!x = cuda.allocate(200 * 2**20)")
    driver.lock(kernel.pid, 1000)
    driver.checkpoint(kernel.pid)
    kernel.begin("x.read(1)")
    with host.kernel() as neighbour:
        neighbour.run("cuda.memory_info()")
        with pytest.raises(GPUError):
            driver.restore(kernel.pid)
    with pytest.raises(KernelError, match=host.failed_process):
        kernel.result()


@pytest.mark.parametrize("depth", ["locked", "checkpointed"])
def test_every_call_waits_while_the_process_is_held_and_goes_on_after(
    depth: str, kernel: KernelProcess, driver: Checkpointer
) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    calls = ("x.read(1)", "x.write(b'y')", "x.sha256()", "x.fill(b'z')", "cuda.allocate(1)", "cuda.memory_info()")
    for call in (*calls, "x.free()"):
        driver.lock(kernel.pid, 1000)
        if depth == "checkpointed":
            driver.checkpoint(kernel.pid)
        kernel.begin(f"({call}, 0)[1]")
        assert kernel.is_blocked(), call
        if depth == "checkpointed":
            driver.restore(kernel.pid)
        driver.unlock(kernel.pid)
        assert kernel.result() == 0, call


def test_python_runs_on_while_the_process_is_held(kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("!x = cuda.allocate(1000)")
    driver.lock(kernel.pid, 1000)
    assert kernel.run("1 + 1") == 2
    driver.unlock(kernel.pid)
    kernel.run("x.free()")
    assert kernel.run("cuda.memory_info()") == [(DEVICE_MIB - CONTEXT_MIB) << 20, DEVICE_MIB << 20]


def test_a_lock_waits_for_work_and_gives_up_in_time(host: Host, kernel: KernelProcess, driver: Checkpointer) -> None:
    kernel.run("cuda.memory_info()")
    kernel.begin("cuda.launch(3)")
    eventually(lambda: host.is_at_work(kernel.pid), "the work began")
    began = time.monotonic()
    with pytest.raises(GPUError) as caught:
        driver.lock(kernel.pid, 50)
    assert caught.value.code is C.NOT_READY
    assert 0.05 <= time.monotonic() - began < 3
    assert driver.state(kernel.pid) is S.RUNNING
    driver.lock(kernel.pid, 10_000)
    assert kernel.result() is None
    assert driver.state(kernel.pid) is S.LOCKED


def test_new_calls_wait_behind_a_waiting_lock(kernel: KernelProcess, driver: Checkpointer) -> None:
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


def test_a_lock_whose_maker_was_killed_is_undone(host: Host, kernel: KernelProcess) -> None:
    kernel.run("!import threading; x = cuda.allocate(10)")
    # Long enough for a worker to start on a busy machine: the lock has to find the work under way.
    kernel.run("!t = threading.Thread(target=cuda.launch, args=(20.0,), daemon=True); t.start()")
    eventually(lambda: host.is_at_work(kernel.pid), "the work began")
    with host.worker() as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=60_000)
        eventually(lambda: host.lock_waits(kernel.pid), "the lock began")
    assert kernel.run("x.read(1) == b'\\0'")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failing_driver_changes_nothing(
    operation: str, host: Host, kernel: KernelProcess, driver: Checkpointer
) -> None:
    host.fail(operation, C.NOT_PERMITTED)
    before = {"lock": S.RUNNING, "checkpoint": S.LOCKED, "restore": S.CHECKPOINTED, "unlock": S.LOCKED}[operation]
    bring_into(before, kernel, driver, host)
    with pytest.raises(GPUError) as caught:
        do(driver, operation, kernel.pid)
    assert caught.value.code is C.NOT_PERMITTED
    assert driver.state(kernel.pid) is before
    do(driver, operation, kernel.pid)  # it struck once
    assert driver.state(kernel.pid) is not before
