"""Promises of NvidiaCheckpointer, against a double of the driver and real processes as its targets."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from unittest.mock import patch

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.nvidia.checkpointer import NvidiaCheckpointer
from tests.gpu_nvidia.fake_driver import CHECKPOINTED, FAILED, LOCKED, RUNNING, FakeDriver, FakeProcess, StateNumber

pytestmark = pytest.mark.promise("driver-answers")

PHASES: dict[str, tuple[str, Callable[[NvidiaCheckpointer, int], None]]] = {
    "lock": ("cuCheckpointProcessLock", lambda one, pid: one.lock(pid, 100)),
    "checkpoint": ("cuCheckpointProcessCheckpoint", lambda one, pid: one.checkpoint(pid)),
    "restore": ("cuCheckpointProcessRestore", lambda one, pid: one.restore(pid)),
    "unlock": ("cuCheckpointProcessUnlock", lambda one, pid: one.unlock(pid)),
}

CODES = {
    1: GPUErrorCode.UNKNOWN,
    2: GPUErrorCode.OUT_OF_MEMORY,
    3: GPUErrorCode.NOT_INITIALIZED,
    214: GPUErrorCode.DEVICE_LOST,
    304: GPUErrorCode.OPERATING_SYSTEM,
    401: GPUErrorCode.ILLEGAL_STATE,
    600: GPUErrorCode.NOT_READY,
    800: GPUErrorCode.NOT_PERMITTED,
    801: GPUErrorCode.NOT_SUPPORTED,
    999: GPUErrorCode.UNKNOWN,
}


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A checkpointer cleans the environment of its process, and this process has other tests."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def target() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def pid(target: subprocess.Popen[bytes]) -> int:
    return target.pid


@pytest.fixture
def driver(pid: int) -> FakeDriver:
    driver = FakeDriver(devices=3)
    driver.processes[pid] = FakeProcess()
    driver.devices[0].free_mib -= 1_000
    return driver


@pytest.fixture
def one(driver: FakeDriver) -> NvidiaCheckpointer:
    return NvidiaCheckpointer(driver=driver, has_driver=lambda _pid: True)


def fails(code: GPUErrorCode, match: str, call: Callable[[], object]) -> None:
    with pytest.raises(GPUError, match=match) as caught:
        call()
    assert caught.value.code is code


def test_a_process_goes_through_the_whole_round(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    seen = [one.state(pid)]
    for step in PHASES.values():
        step[1](one, pid)
        seen.append(one.state(pid))
    running, locked, checkpointed = ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED
    assert seen == [running, locked, checkpointed, locked, running]
    assert driver.called("cuInit") == 1
    arguments = {call.name: call.arguments[1] for call in driver.calls if len(call.arguments) == 2}
    assert arguments["cuCheckpointProcessRestore"] is None  # nothing moved


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", CODES)
def test_each_error_in_each_phase_has_its_code_and_says_what_happened(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, phase: str, number: int
) -> None:
    call, act = PHASES[phase]
    driver.answers[call] = (number,)
    fails(
        CODES[number],
        rf"cannot {phase} the CUDA state of process {pid}: CUDA_ERROR_\w+ \({number}\)",
        lambda: act(one, pid),
    )


def test_a_lock_always_has_a_time_limit(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    driver.processes[pid].busy = True
    fails(GPUErrorCode.NOT_READY, "did not finish in time; it keeps running", lambda: one.lock(pid, 250))
    assert one.state(pid) is ProcessState.RUNNING
    arguments = driver.calls[-2].arguments[1]
    assert getattr(arguments, "timeoutMs", None) == 250


@pytest.mark.parametrize("timeout_ms", [0, -1, 2**32])
def test_a_lock_without_a_usable_time_limit_is_refused(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, timeout_ms: int
) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 4294967295 ms, got {timeout_ms}"):
        one.lock(pid, timeout_ms)
    assert driver.called("cuCheckpointProcessLock") == 0


@pytest.mark.parametrize(
    ("phase", "state"), [("lock", LOCKED), ("checkpoint", RUNNING), ("restore", LOCKED), ("unlock", CHECKPOINTED)]
)
def test_a_step_from_the_wrong_state_is_told_and_changes_nothing(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, phase: str, state: int
) -> None:
    driver.processes[pid].state = state
    fails(GPUErrorCode.ILLEGAL_STATE, "in the wrong state for this operation", lambda: PHASES[phase][1](one, pid))
    assert driver.processes[pid].state == state


@pytest.mark.parametrize("phase", PHASES)
def test_a_process_without_cuda_is_told(one: NvidiaCheckpointer, driver: FakeDriver, pid: int, phase: str) -> None:
    driver.processes.clear()
    fails(GPUErrorCode.NOT_INITIALIZED, "it is not a CUDA process", lambda: PHASES[phase][1](one, pid))
    assert one.state(pid) is ProcessState.NO_CONTEXT


def test_a_restore_without_room_is_told_as_fatal_and_is(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    one.lock(pid, 100)
    one.checkpoint(pid)
    driver.devices[0].free_mib = 10
    fails(GPUErrorCode.OUT_OF_MEMORY, "cannot retry", lambda: one.restore(pid))
    driver.devices[0].free_mib = 80_000
    fails(GPUErrorCode.OPERATING_SYSTEM, "cannot be restored", lambda: one.restore(pid))
    fails(GPUErrorCode.ILLEGAL_STATE, "unlock", lambda: one.unlock(pid))


def test_a_checkpoint_that_fails_leaves_a_process_that_is_not_called_sound(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int
) -> None:
    driver.processes[pid].managed = True
    one.lock(pid, 100)
    fails(GPUErrorCode.NOT_SUPPORTED, "managed memory.*may be damaged", lambda: one.checkpoint(pid))
    assert one.state(pid) is ProcessState.FAILED
    assert driver.processes[pid].state == FAILED


def test_a_mig_device_answers_out_of_memory(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    driver.processes[pid].mig = True
    one.lock(pid, 100)
    fails(GPUErrorCode.OUT_OF_MEMORY, "host memory.*MIG", lambda: one.checkpoint(pid))


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "state"), list(enumerate(list(ProcessState)[1:7])))
def test_each_state_of_the_driver_has_its_word(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, number: int, state: ProcessState
) -> None:
    driver.processes[pid].state = StateNumber(number)
    assert one.state(pid) is state
    assert driver.called("cuCheckpointProcessGetRestoreThreadId") == 0


@pytest.mark.parametrize("answer", [(0, 77), (0, None), ValueError("6 is not a valid CUprocessState")])
def test_a_state_that_is_not_known_is_unknown(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, answer: tuple[int, int] | ValueError
) -> None:
    driver.answers["cuCheckpointProcessGetState"] = answer
    assert one.state(pid) is ProcessState.UNKNOWN


def test_bindings_that_cannot_read_a_refusal_still_tell_a_process_without_cuda(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int
) -> None:
    driver.answers["cuCheckpointProcessGetState"] = ValueError("1837190 is not a valid CUprocessState")
    driver.processes.clear()
    assert one.state(pid) is ProcessState.NO_CONTEXT


@pytest.mark.parametrize("number", [1, 3])
def test_a_process_without_cuda_is_told_in_two_ways(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, number: int
) -> None:
    driver.answers["cuCheckpointProcessGetState"] = (number, 0)
    assert one.state(pid) is ProcessState.NO_CONTEXT
    driver.answers["cuCheckpointProcessGetState"] = (304, 0)
    driver.answers["cuCheckpointProcessGetRestoreThreadId"] = (number, 0)
    assert one.state(pid) is ProcessState.NO_CONTEXT


def test_a_process_that_has_not_loaded_the_driver_is_not_asked_about(driver: FakeDriver, pid: int) -> None:
    driver.answers["cuCheckpointProcessGetState"] = ValueError("it is asked")
    assert NvidiaCheckpointer(driver=driver).state(pid) is ProcessState.NO_CONTEXT


@pytest.mark.parametrize("number", [304, 401, 800, 801, 999])
def test_an_ambiguous_refusal_is_settled_by_asking_for_the_restore_thread(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, number: int
) -> None:
    driver.answers["cuCheckpointProcessGetState"] = (number, 0)
    fails(CODES[number], rf"cannot read .*\({number}\)", lambda: one.state(pid))
    driver.answers["cuCheckpointProcessGetRestoreThreadId"] = ValueError("1234 is not a valid CUresult")
    fails(CODES[number], rf"\({number}\)", lambda: one.state(pid))
    del driver.answers["cuCheckpointProcessGetRestoreThreadId"]
    driver.processes.clear()
    assert one.state(pid) is ProcessState.NO_CONTEXT


# ---- which process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_process_that_is_gone_is_never_given_to_the_driver(
    one: NvidiaCheckpointer, driver: FakeDriver, target: subprocess.Popen[bytes], phase: str
) -> None:
    target.kill()
    os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)  # a zombie first
    fails(GPUErrorCode.NO_SUCH_PROCESS, "has exited", lambda: PHASES[phase][1](one, target.pid))
    target.wait()
    fails(
        GPUErrorCode.NO_SUCH_PROCESS, f"no process has the id {target.pid}", lambda: PHASES[phase][1](one, target.pid)
    )
    assert one.state(target.pid) is ProcessState.GONE
    assert [call.name for call in driver.calls] == ["cuInit"]


def test_a_process_that_ends_during_a_call_is_told_as_gone(
    one: NvidiaCheckpointer, driver: FakeDriver, target: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_arguments: object) -> tuple[int, None]:
        target.kill()
        target.wait()
        return (304, None)

    monkeypatch.setattr(driver, "cuCheckpointProcessLock", end)
    fails(GPUErrorCode.NO_SUCH_PROCESS, r"304.*no process has the id", lambda: one.lock(target.pid, 100))


def test_a_process_that_ends_while_its_state_is_asked_is_gone(
    one: NvidiaCheckpointer, driver: FakeDriver, target: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_arguments: object) -> tuple[int, None]:
        target.kill()
        target.wait()
        return (1, None)

    monkeypatch.setattr(driver, "cuCheckpointProcessGetState", end)
    assert one.state(target.pid) is ProcessState.GONE


@pytest.mark.parametrize("phase", [*PHASES, "state"])
def test_a_thread_is_refused(one: NvidiaCheckpointer, driver: FakeDriver, phase: str) -> None:
    act = one.state if phase == "state" else lambda tid: PHASES[phase][1](one, tid)
    with ThreadPoolExecutor(1) as living:
        tid = living.submit(threading.get_native_id).result()
        fails(GPUErrorCode.WRONG_IDENTITY, f"is a thread of process {os.getpid()}", lambda: act(tid))
    assert [call.name for call in driver.calls] == ["cuInit"]


# ---- moving ----------------------------------------------------------------------------------------------------------


def suspended(one: NvidiaCheckpointer, pid: int) -> None:
    one.lock(pid, 100)
    one.checkpoint(pid)


def ids(driver: FakeDriver) -> list[str]:
    return [device.uuid for device in driver.devices]


def test_a_process_moves_to_another_device(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    suspended(one, pid)
    one.restore(pid, {ids(driver)[0]: ids(driver)[2]})
    assert driver.processes[pid].device == 2
    assert [device.free_mib for device in driver.devices] == [80_000, 80_000, 79_000]


def test_case_does_not_matter_and_staying_is_not_a_move(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    suspended(one, pid)
    first = ids(driver)[0]
    one.restore(pid, {first: first.upper()})
    assert driver.calls[-1].arguments == (pid, None)


def test_a_move_in_a_circle_names_every_device_once(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    suspended(one, pid)
    a, b, c = ids(driver)
    one.restore(pid, {a: b, b: c, c: a})
    assert driver.processes[pid].device == 1


def test_a_chain_of_moves_is_completed(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    suspended(one, pid)
    a, b, c = ids(driver)
    one.restore(pid, {a: b, b: c})
    assert driver.processes[pid].device == 1


def test_the_drivers_refusal_of_another_chip_is_passed_on(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int
) -> None:
    suspended(one, pid)
    driver.devices[1].chip = "A100"
    fails(GPUErrorCode.UNKNOWN, "INVALID_VALUE", lambda: one.restore(pid, {ids(driver)[0]: ids(driver)[1]}))
    assert driver.processes[pid].state == CHECKPOINTED


@pytest.mark.parametrize("cause", ["bindings", "bindings 13.3.0", "driver", "silence"])
def test_what_cannot_move_is_refused_before_anything_is_tried(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended(one, pid)
    assert one.why_cannot_move == ""
    if cause == "bindings":
        monkeypatch.delattr(FakeDriver, "CUcheckpointGpuPair")
        sentence = "cuda-bindings has no CUcheckpointGpuPair .*: pip install"
    elif cause == "bindings 13.3.0":
        monkeypatch.delattr(FakeDriver, "CUcheckpointRestoreArgs")
        sentence = "cuda-bindings has no CUcheckpointRestoreArgs .*: pip install"
    elif cause == "driver":
        driver.version = 12080
        sentence = "supports CUDA 12.8, but 13.0 is needed; install driver 580"
    else:
        driver.answers["cuDriverGetVersion"] = (999, 0)
        sentence = "does not report its version"
    a, b, _ = ids(driver)
    fails(
        GPUErrorCode.NOT_SUPPORTED,
        f"cannot move a process to another device: .*{sentence}",
        lambda: one.restore(pid, {a: b}),
    )
    assert driver.called("cuCheckpointProcessRestore") == 0
    one.restore(pid)  # at home it can always be
    assert driver.processes[pid].state == LOCKED


def test_a_device_that_is_not_there_is_refused(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    suspended(one, pid)
    a, b, _ = ids(driver)
    for moves in ({a: "GPU-other"}, {"GPU-other": b}):
        fails(
            GPUErrorCode.NO_SUCH_DEVICE, f"no device GPU-other; known devices: .*{a}", partial(one.restore, pid, moves)
        )
    driver.answers["cuDeviceGetCount"] = (999, 0)
    fails(GPUErrorCode.UNKNOWN, "cuDeviceGetCount returned CUDA_ERROR_UNKNOWN", lambda: one.restore(pid, {a: b}))
    assert driver.called("cuCheckpointProcessRestore") == 0


def test_two_devices_cannot_move_to_one(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    suspended(one, pid)
    a, b, c = ids(driver)
    with pytest.raises(ValueError, match="two devices to the same one"):
        one.restore(pid, {a: c, b: c})


# ---- starting --------------------------------------------------------------------------------------------------------


def test_every_device_is_visible_to_it_whatever_the_environment_says(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    NvidiaCheckpointer(driver=driver)
    assert not driver.hidden_at_start


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (100, GPUErrorCode.NO_SUCH_DEVICE),
        (802, GPUErrorCode.SYSTEM_NOT_READY),
        (803, GPUErrorCode.NOT_SUPPORTED),
        (804, GPUErrorCode.NOT_SUPPORTED),
        (999, GPUErrorCode.UNKNOWN),
    ],
)
def test_a_driver_that_does_not_start_is_told(driver: FakeDriver, number: int, code: GPUErrorCode) -> None:
    driver.answers["cuInit"] = (number,)
    fails(code, rf"could not be initialised: CUDA_ERROR_\w+ \({number}\)", lambda: NvidiaCheckpointer(driver=driver))


def test_a_missing_driver_is_told(driver: FakeDriver) -> None:
    driver.answers["cuInit"] = RuntimeError("libcuda.so.1 was not found")
    fails(GPUErrorCode.NOT_SUPPORTED, "missing or older than 570: libcuda", lambda: NvidiaCheckpointer(driver=driver))


def test_a_driver_without_the_checkpoint_calls_is_told(one: NvidiaCheckpointer, driver: FakeDriver, pid: int) -> None:
    driver.answers["cuCheckpointProcessLock"] = RuntimeError('Function "cuCheckpointProcessLock" not found')
    fails(GPUErrorCode.NOT_SUPPORTED, "cannot call cuCheckpointProcessLock", lambda: one.lock(pid, 100))


@pytest.mark.parametrize("failure", [ValueError("1234 is not a valid CUresult"), KeyError(1234)])
@pytest.mark.parametrize("phase", PHASES)
def test_a_result_that_the_bindings_do_not_know_is_unknown(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, phase: str, failure: Exception
) -> None:
    call, act = PHASES[phase]
    driver.answers[call] = failure
    fails(GPUErrorCode.UNKNOWN, f"cannot {phase} .*unknown to this version .1234", lambda: act(one, pid))


def test_a_number_that_has_no_name_is_shown_as_it_is(
    one: NvidiaCheckpointer, driver: FakeDriver, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cuCheckpointProcessLock", lambda _pid, _args: (1234,))
    fails(GPUErrorCode.UNKNOWN, "CUDA error 1234$", lambda: one.lock(pid, 100))


def test_missing_bindings_are_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    fails(GPUErrorCode.NOT_SUPPORTED, r"pip install 'jupyter-fractional-gpu\[cuda\]'", NvidiaCheckpointer)


def test_bindings_without_the_checkpoint_calls_are_told() -> None:
    old = ModuleType("old")
    fails(GPUErrorCode.NOT_SUPPORTED, "install 12.8 or newer.*pip install", lambda: NvidiaCheckpointer(driver=old))


def test_bindings_that_cannot_restore_are_refused_before_anything_is_saved(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeDriver, "cuCheckpointProcessRestore")
    fails(
        GPUErrorCode.NOT_SUPPORTED,
        r"does not provide cuCheckpointProcessRestore; .* except 13\.0\.0 and 13\.0\.1",
        lambda: NvidiaCheckpointer(driver=driver),
    )
    assert driver.calls == []
