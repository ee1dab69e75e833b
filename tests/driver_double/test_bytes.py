"""What the driver's libraries receive from this project: each call's bytes, in order, by the real bindings.

The oldest and the newest supported release of cuda-bindings in each run; with JUPYTER_GPU_ALL_BINDINGS=1 (`tests/run bindings`) every
supported release that the package index offers for this Python.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, ProcessState
from tests.driver_double import releases
from tests.driver_double.double import Call, Device, DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import KernelProcess

pytestmark = pytest.mark.promise("driver-bytes")

ALL: Final = bool(os.environ.get("JUPYTER_GPU_ALL_BINDINGS"))
RELEASES: Final = releases.installed() if ALL else [releases.oldest(), releases.newest()]
ZEROS: Final = "00" * 64


@pytest.fixture
def double(tmp_path: Path) -> DriverDouble:
    """Four devices of one kind."""
    double = DriverDouble(tmp_path / "host", [Device() for _ in range(4)])
    double.set(context_mib=32)
    return double


@pytest.fixture(scope="module", params=RELEASES)
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One process for each release."""
    double = DriverDouble(tmp_path_factory.mktemp("first") / "host")
    with Remote(double, bindings=request.param) as remote:
        yield remote


@pytest.fixture
def remote(process: Remote, double: DriverDouble) -> Remote:
    process.use(double)
    return process


def can_move(remote: Remote) -> bool:
    return int(remote.bindings.partition(".")[0]) >= 13 and remote.bindings != "13.3.0"


def raw(device_id: str) -> str:
    """Return a device's UUID as its bytes lie in memory."""
    return uuid.UUID(device_id.removeprefix("GPU-")).hex


def by_remote(double: DriverDouble, remote: Remote) -> list[Call]:
    return [call for call in double.calls("cu") if call.pid == remote.pid]


def only(double: DriverDouble, remote: Remote, name: str) -> Call:
    (call,) = [call for call in by_remote(double, remote) if call.name == name]
    return call


def suspend(driver: Checkpointer, pid: int) -> None:
    driver.lock(pid, 1000)
    driver.checkpoint(pid)


@pytest.mark.parametrize("release", RELEASES)
def test_a_whole_round_arrives_as_it_should(release: str, double: DriverDouble, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(2**20)")
    with Remote(double, bindings=release) as remote:
        driver = remote.checkpointer
        driver.lock(kernel.pid, 0x0A0B0C)
        driver.checkpoint(kernel.pid)
        driver.restore(kernel.pid)
        driver.unlock(kernel.pid)
        assert driver.state(kernel.pid) is ProcessState.RUNNING
    pid = str(kernel.pid)
    assert [(call.name, call.arguments, call.result) for call in by_remote(double, remote)] == [
        ("cuInit", {"flags": "0", "CUDA_VISIBLE_DEVICES": "NULL"}, 0),
        # The time limit in the first four bytes, little end first; the rest is reserved and must be zero.
        ("cuCheckpointProcessLock", {"pid": pid, "args": "0c0b0a00" + "00" * 60}, 0),
        ("cuCheckpointProcessCheckpoint", {"pid": pid, "args": "NULL"}, 0),
        ("cuCheckpointProcessRestore", {"pid": pid, "args": "NULL", "pairs": "NULL"}, 0),
        ("cuCheckpointProcessUnlock", {"pid": pid, "args": "NULL"}, 0),
        ("cuCheckpointProcessGetState", {"pid": pid, "state": "0"}, 0),
    ]


@pytest.mark.parametrize("timeout_ms", [1, 5000, 2**32 - 1])
def test_a_locks_time_limit_is_what_was_asked_for(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, timeout_ms: int
) -> None:
    kernel.run("cuda.memory_info()")
    remote.checkpointer.lock(kernel.pid, timeout_ms)
    given = bytes.fromhex(only(double, remote, "cuCheckpointProcessLock").arguments["args"])
    assert given == timeout_ms.to_bytes(4, "little") + bytes(60)


MOVES: Final[dict[str, Callable[[list[str]], dict[str, str]]]] = {
    "to the second": lambda d: {d[0]: d[1]},
    "to the last": lambda d: {d[0]: d[3]},
    "two change places": lambda d: {d[0]: d[1], d[1]: d[0]},
    "in a circle": lambda d: {d[0]: d[1], d[1]: d[2], d[2]: d[0]},
    "a chain": lambda d: {d[0]: d[1], d[1]: d[2]},
}


@pytest.mark.parametrize("moves", MOVES)
def test_a_move_names_every_device_once_on_either_side(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, moves: str
) -> None:
    ids = [device.device_id for device in double.devices]
    given = MOVES[moves](ids)
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'moved')")
    suspend(remote.checkpointer, kernel.pid)
    if not can_move(remote):
        with pytest.raises(GPUError, match=r"cuda-bindings (are older than 13\.0|has no )") as caught:
            remote.checkpointer.restore(kernel.pid, given)
        assert caught.value.code is GPUErrorCode.NOT_SUPPORTED
        assert "cuCheckpointProcessRestore" not in {call.name for call in by_remote(double, remote)}
        return
    remote.checkpointer.restore(kernel.pid, given)
    remote.checkpointer.unlock(kernel.pid)
    call = only(double, remote, "cuCheckpointProcessRestore")
    assert bytes.fromhex(call.arguments["args"])[8:] == len(ids).to_bytes(4, "little") + bytes(52), (
        "pointer, number, nothing"
    )
    text = call.arguments["pairs"]
    pairs = {text[at : at + 32]: text[at + 32 : at + 64] for at in range(0, len(text), 64)}
    assert sorted(pairs) == sorted(pairs.values()) == sorted(map(raw, ids))
    assert pairs.items() >= {raw(old): raw(new) for old, new in given.items()}.items()
    assert kernel.run("cuda.device().device_id") == given[ids[0]]
    assert kernel.run("x.read(10).decode()") == "movedmoved"


def test_staying_is_no_move(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    kernel.run("cuda.memory_info()")
    suspend(remote.checkpointer, kernel.pid)
    first = double.devices[0].device_id
    remote.checkpointer.restore(kernel.pid, {first: first.upper()})
    assert only(double, remote, "cuCheckpointProcessRestore").arguments["args"] == "NULL"


def test_an_older_driver_is_not_asked_to_move(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    double.set(driver="570")
    kernel.run("cuda.memory_info()")
    suspend(remote.checkpointer, kernel.pid)
    first, second, *_ = (device.device_id for device in double.devices)
    with pytest.raises(GPUError, match="cannot move a process") as caught:
        remote.checkpointer.restore(kernel.pid, {first: second})
    assert caught.value.code is GPUErrorCode.NOT_SUPPORTED
    remote.checkpointer.restore(kernel.pid)
    remote.checkpointer.unlock(kernel.pid)
    assert kernel.run("cuda.device().device_id") == first


def test_the_caller_sees_every_device_whatever_the_environment_says(
    double: DriverDouble, kernel: KernelProcess
) -> None:
    with Remote(double, CUDA_VISIBLE_DEVICES="") as remote:
        assert remote.checkpointer.state(kernel.pid) is ProcessState.NO_CONTEXT
        assert only(double, remote, "cuInit").arguments["CUDA_VISIBLE_DEVICES"] == "NULL"


@pytest.mark.parametrize("state", list(ProcessState)[1:7])
def test_every_state_is_read(double: DriverDouble, remote: Remote, kernel: KernelProcess, state: ProcessState) -> None:
    kernel.run("!x = cuda.allocate(2**20)")
    double.force_state(kernel.pid, state.value)
    known = f"CU_PROCESS_STATE_{state.value.upper()}" in remote.known_states()
    assert known or state in (ProcessState.CHECKPOINTING, ProcessState.RESTORING), "older bindings lack these two"
    assert remote.checkpointer.state(kernel.pid) is (state if known else ProcessState.UNKNOWN)


@pytest.mark.parametrize("number", [1, 2, 3, 100, 304, 401, 600, 800, 801, 999, 1234])
def test_every_result_is_read(double: DriverDouble, remote: Remote, kernel: KernelProcess, number: int) -> None:
    """1234 is no number of CUDA's: a newer driver may have more of them than the bindings."""
    kernel.run("cuda.memory_info()")
    double.fail("cuCheckpointProcessLock", number)
    named = rf"unknown to this version|CUDA_ERROR_\w+ \({number}\)|CUDA error {number}"
    with pytest.raises(GPUError, match=named):
        remote.checkpointer.lock(kernel.pid, 10)
    assert only(double, remote, "cuCheckpointProcessLock").result == number


@pytest.mark.parametrize("number", [304, 401, 800, 801, 999])
def test_a_state_that_is_refused_is_no_state(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, number: int
) -> None:
    """The bindings' 12.8.0 may fail at what a refused call left in the state's place, before the result is seen."""
    kernel.run("cuda.memory_info()")
    double.fail("cuCheckpointProcessGetState", number, times=None)
    if remote.bindings == "12.8.0":
        assert state_or_number(remote, kernel.pid) in (ProcessState.UNKNOWN, number)
    else:
        assert state_or_number(remote, kernel.pid) == number
    double.fail("cuCheckpointProcessGetRestoreThreadId", 3)
    assert remote.checkpointer.state(kernel.pid) is ProcessState.NO_CONTEXT


def state_or_number(remote: Remote, pid: int) -> ProcessState | int:
    try:
        return remote.checkpointer.state(pid)
    except GPUError as error:
        found = re.search(r"\((\d+)\)", str(error))
        return int(found[1]) if found else -1
