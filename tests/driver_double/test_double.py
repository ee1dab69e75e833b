"""What the double plays, setting by setting. A test that relies on the double relies on these."""

import os
import select
import signal
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessKind, ProcessState, ProcessUse
from tests.driver_double.conftest import StartKernel
from tests.driver_double.double import DEFAULTS, Device, DriverDouble, build
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import (
    MIB,
    KernelError,
    KernelProcess,
    WorkerProcess,
    answer,
    ask,
    backend_worker,
    eventually,
)
from tests.support.stopping import stop

S, C = ProcessState, GPUErrorCode
MANAGED = (
    "!import ctypes; p = ctypes.c_uint64(); cuda.memory_info(); cuda.do('cuMemAllocManaged', ctypes.byref(p), 2**20, 1)"
)
FORK = """!
import os, time
cuda.memory_info()
child = os.fork()
if not child:
    while True:
        time.sleep(60)
"""


def code_of(caught: pytest.ExceptionInfo[GPUError]) -> GPUErrorCode:
    return caught.value.code


def suspend(remote: Remote, pid: int) -> None:
    remote.checkpointer.lock(pid, 1000)
    remote.checkpointer.checkpoint(pid)


def answers_within(worker: WorkerProcess, seconds: float) -> bool:
    return bool(select.select([worker.channel], [], [], seconds)[0])


def number_of(kernel: KernelProcess, call: str) -> int:
    """Return the result of a call in the process."""
    found: int = kernel.run(f"cuda.driver().{call}")
    return found


def test_settings_that_there_are_not_are_refused(double: DriverDouble) -> None:
    with pytest.raises(ValueError, match="no setting 'speed'"):
        double.set(speed=1)
    with pytest.raises(ValueError, match="no 'heat'"):
        double.set_device(0, heat=1)
    with pytest.raises(TypeError, match="a number, a text"):
        double.set(context_mib=None)
    assert "context_mib" in DEFAULTS


def test_a_machine_that_cannot_compile_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(RuntimeError, match=r"needs a C compiler \(cc\): `tests/run setup`"):
        build()
    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: PathDistribution(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs cuda\.h of the package nvidia-cuda-runtime"):
        build()


# ---- devices and drivers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "version", "cuda", "moves"),
    [("570", "570.172.08", 12080, False), ("580", "580.65.06", 13000, True), ("610", "610.43.02", 13030, True)],
)
def test_a_driver_release_is_played(
    double: DriverDouble, remote: Remote, driver: str, version: str, cuda: int, *, moves: bool
) -> None:
    double.set(driver=driver)
    assert [device.checkpointable for device in remote.monitor.devices()] == [True, True]
    assert bool(remote.checkpointer.why_cannot_move) is not moves
    told = [call.arguments["version"] for call in double.calls("cuDriverGetVersion")]
    assert told == [str(cuda)]
    assert version in (double.folder / "settings").read_text()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("GPU-other", []),
        ("{1}", [1]),
        ("{1},{0}", [1, 0]),
    ],
)
def test_a_process_sees_the_devices_that_its_environment_names(
    double: DriverDouble, start: StartKernel, visible: str | None, seen: list[int]
) -> None:
    ids = [device.device_id for device in double.devices]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible.format(*ids)}
    kernel = start(**environment)
    if not seen:
        assert number_of(kernel, "cuInit(0)") == 100
        assert double.processes() == []
        return
    kernel.run("cuda.start()")
    assert kernel.run("cuda.device().device_id") == ids[seen[0]]
    kernel.run("!import ctypes; n = ctypes.c_int(); cuda.do('cuDeviceGetCount', ctypes.byref(n))")
    assert kernel.run("n.value") == len(seen)


def test_devices_of_mig_have_instances_and_cannot_be_checkpointed(
    double: DriverDouble, remote: Remote, start: StartKernel
) -> None:
    double.set(devices=[Device(mib=4096, instances=(1024, 2048)), Device()])
    found = remote.monitor.devices()
    assert [device.memory_mib for device in found] == [1024, 2048, 1024]
    assert [device.checkpointable for device in found] == [False, False, True]
    kernel = start(CUDA_VISIBLE_DEVICES="0")
    kernel.run("cuda.memory_info()")
    remote.checkpointer.lock(kernel.pid, 100)
    with pytest.raises(GPUError, match="MIG") as caught:
        remote.checkpointer.checkpoint(kernel.pid)
    assert code_of(caught) is C.OUT_OF_MEMORY


def test_a_device_that_fails_is_left_out_of_the_list(double: DriverDouble, remote: Remote) -> None:
    double.set_device(0, fails=15)
    assert [device.device_id for device in remote.monitor.devices()] == [double.devices[1].device_id]
    with pytest.raises(GPUError) as caught:
        remote.monitor.use(double.devices[0].device_id)
    assert code_of(caught) is C.DEVICE_LOST


# ---- which processes there are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("listed", ["unlisted", "zero"])
def test_a_process_that_only_started_the_driver(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, listed: str, *, known: bool
) -> None:
    double.set(init_only_known=known, init_only_listed=listed)
    kernel.run("cuda.start()")
    assert remote.checkpointer.state(kernel.pid) is (S.RUNNING if known else S.NO_CONTEXT)
    seen = [
        process for process in remote.monitor.use(double.devices[0].device_id).processes if process.pid == kernel.pid
    ]
    assert seen == ([ProcessUse(pid=kernel.pid, used_mib=0)] if listed == "zero" else [])
    if known:
        suspend(remote, kernel.pid)
        remote.checkpointer.restore(kernel.pid)
        remote.checkpointer.unlock(kernel.pid)
        assert kernel.run("cuda.memory_info()[0]") == (1024 - 32) * MIB


def test_nvml_may_hide_a_process_or_tell_it_with_nothing(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    kernel.run("!x = cuda.allocate(2**20)")
    device = double.devices[0].device_id
    assert remote.monitor.use(device).processes == (ProcessUse(pid=kernel.pid, used_mib=33),)
    double.set(nvml_tells_zero=[kernel.pid])
    assert remote.monitor.use(device).processes == (ProcessUse(pid=kernel.pid, used_mib=0),)
    double.set(nvml_hides=[kernel.pid])
    assert remote.monitor.use(device).processes == ()
    assert remote.monitor.use(device).used_mib == 33, "the memory is used all the same"
    assert remote.checkpointer.state(kernel.pid) is S.RUNNING
    double.set(nvml_hides=[], nvml_tells_zero=[], nvml_tells_memory=False)
    assert remote.monitor.use(device).processes == (ProcessUse(pid=kernel.pid, used_mib=33),)


def test_processes_of_mps_and_those_that_draw_are_in_their_lists(
    double: DriverDouble, remote: Remote, start: StartKernel
) -> None:
    computes, shares, draws = start(), start(), start()
    for kernel in (computes, shares, draws):
        kernel.run("cuda.memory_info()")
    double.set(mps=[shares.pid], graphics=[computes.pid, draws.pid], graphics_only=[draws.pid])
    kinds = {one.pid: one.kind for one in remote.monitor.use(double.devices[0].device_id).processes}
    assert kinds == {
        computes.pid: ProcessKind.COMPUTE,
        shares.pid: ProcessKind.MPS,
        draws.pid: ProcessKind.GRAPHICS,
    }
    remote.checkpointer.lock(shares.pid, 100)
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.checkpoint(shares.pid)
    assert code_of(caught) is C.NOT_SUPPORTED


USE_IN_CHILD = """!
import os
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b"%d %d" % (cuda.driver().cuInit(0), cuda.driver().cuCtxSynchronize()))
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_child_cannot_use_cuda(double: DriverDouble, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(2**20); x.fill(b'parent')")
    kernel.run(USE_IN_CHILD)
    assert kernel.run("os.read(reading, 100).decode()") == "3 3"
    assert kernel.run("x.read(6).decode()") == "parent"
    assert [one.pid for one in double.processes()] == [kernel.pid]


@pytest.mark.parametrize("known", [False, True])
def test_a_forked_child_may_be_known_to_the_driver(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, *, known: bool
) -> None:
    double.set(forked_known=known, forked_checkpoint=801)
    kernel.run(FORK)
    child = kernel.run("child")
    try:
        if known:
            eventually(lambda: double.process(child) is not None, "the child began")
        assert remote.checkpointer.state(child) is (S.RUNNING if known else S.NO_CONTEXT)
        if known:
            remote.checkpointer.lock(child, 100)
            with pytest.raises(GPUError) as caught:
                remote.checkpointer.checkpoint(child)
            assert code_of(caught) is C.NOT_SUPPORTED
            double.set(forked_checkpoint=0, forked_restore=1)
            remote.checkpointer.checkpoint(child)
            with pytest.raises(GPUError, match="INVALID_VALUE"):
                remote.checkpointer.restore(child)
        suspend(remote, kernel.pid)
    finally:
        os.kill(child, signal.SIGKILL)


# ---- what a checkpoint does not take --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoils", [False, True])
def test_managed_memory_is_refused(
    double: DriverDouble, remote: Remote, kernel: KernelProcess, *, spoils: bool
) -> None:
    double.set(refusal_spoils=spoils)
    kernel.run(MANAGED)
    remote.checkpointer.lock(kernel.pid, 100)
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.checkpoint(kernel.pid)
    assert code_of(caught) is C.NOT_SUPPORTED
    assert remote.checkpointer.state(kernel.pid) is (S.FAILED if spoils else S.LOCKED)
    if not spoils:
        remote.checkpointer.unlock(kernel.pid)
        kernel.run("cuda.do('cuMemFree_v2', p)")
        suspend(remote, kernel.pid)


def test_managed_memory_is_host_memory_to_its_program(kernel: KernelProcess) -> None:
    kernel.run(MANAGED)
    kernel.run("!ctypes.memmove(p.value, b'managed', 7)")
    kernel.run("!back = ctypes.create_string_buffer(7); cuda.do('cuMemcpyDtoH_v2', back, p, ctypes.c_size_t(7))")
    assert kernel.run("back.raw.decode()") == "managed"


SHARE = """!
import ctypes
x = cuda.allocate(2**20)
x.fill(b"s")
h = ctypes.create_string_buffer(64)
cuda.do("cuIpcGetMemHandle", h, x.pointer)
"""
OPEN = """!
import ctypes
class Handle(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * 64)]
cuda.memory_info()
theirs, given = ctypes.c_uint64(), Handle.from_buffer_copy(bytes.fromhex(TEXT))
cuda.do("cuIpcOpenMemHandle_v2", ctypes.byref(theirs), given, 1)
"""


@pytest.mark.parametrize("driver", ["580", "610"])
def test_memory_that_processes_share_is_one_memory_and_refused_before_610(
    double: DriverDouble, remote: Remote, start: StartKernel, driver: str
) -> None:
    double.set(driver=driver)
    owner, guest = start(), start()
    owner.run(SHARE)
    guest.run(OPEN.replace("TEXT", repr(owner.run("h.raw.hex()"))))
    guest.run("!cuda.do('cuMemcpyHtoD_v2', theirs, b'guest', ctypes.c_size_t(5))")
    assert owner.run("x.read(6).decode()") == "guests"
    for kernel in (owner, guest):
        remote.checkpointer.lock(kernel.pid, 100)
        if driver == "610":
            remote.checkpointer.checkpoint(kernel.pid)
            continue
        with pytest.raises(GPUError) as caught:
            remote.checkpointer.checkpoint(kernel.pid)
        assert code_of(caught) is C.NOT_SUPPORTED


def resident_kib(pid: int, kind: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{kind}:"))


def test_saved_memory_is_the_targets_own_host_memory(remote: Remote, kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(64 << 20); x.fill(b'x')")
    before = resident_kib(kernel.pid, "RssAnon")
    assert resident_kib(kernel.pid, "RssShmem") < 1024, "device memory is not in its resident set"
    suspend(remote, kernel.pid)
    assert 64 * 1024 <= resident_kib(kernel.pid, "RssAnon") - before < 66 * 1024
    remote.checkpointer.restore(kernel.pid)
    assert abs(resident_kib(kernel.pid, "RssAnon") - before) < 1024


# ---- who may, and who answers ---------------------------------------------------------------------------------------------


def test_a_caller_without_permission_is_told(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    kernel.run("cuda.memory_info()")
    double.set(not_permitted=True)
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.lock(kernel.pid, 100)
    assert code_of(caught) is C.NOT_PERMITTED
    double.set(not_permitted=False)
    suspend(remote, kernel.pid)
    double.set(not_permitted=True)
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.restore(kernel.pid)
    assert code_of(caught) is C.NOT_PERMITTED
    assert double.process(kernel.pid) is not None


def test_a_stopped_process_answers_an_error_or_nothing(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    kernel.run("cuda.memory_info()")
    stop(kernel.pid)
    double.set(stopped="999", stopped_state="600")
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.lock(kernel.pid, 100)
    assert code_of(caught) is C.UNKNOWN
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.state(kernel.pid)
    assert code_of(caught) is C.NOT_READY
    double.set(stopped="hang", stopped_state="0")
    assert remote.checkpointer.state(kernel.pid) is S.RUNNING
    with backend_worker("nvidia", double.environment()) as worker:
        ask(worker, "lock", kernel.pid, timeout_ms=100)
        assert not answers_within(worker, 0.3), "the lock's own time limit does not count while the target is stopped"
        os.kill(kernel.pid, signal.SIGCONT)
        assert "error" not in answer(worker)
    assert remote.checkpointer.state(kernel.pid) is S.LOCKED


def test_a_target_that_is_stopped_in_the_middle_makes_its_caller_wait(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    double.set(save_gb_s=0.02)
    kernel.run("!x = cuda.allocate(4 << 20); x.fill(b'x')")
    remote.checkpointer.lock(kernel.pid, 100)
    with backend_worker("nvidia", double.environment()) as worker:
        ask(worker, "checkpoint", kernel.pid)
        eventually(lambda: remote.checkpointer.state(kernel.pid) is S.CHECKPOINTING, "it began")
        stop(kernel.pid)
        moved = double.process(kernel.pid)
        assert not answers_within(worker, 0.3)
        assert double.process(kernel.pid) == moved
        os.kill(kernel.pid, signal.SIGCONT)
        assert "error" not in answer(worker)


def test_work_that_does_not_end_keeps_a_lock_out_until_it_is_told_to(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    kernel.run("cuda.memory_info()")
    kernel.run("cuda.do('driverDoubleBusy', ctypes.c_uint(2**32 - 1))".replace("ctypes", "__import__('ctypes')"))
    assert number_of(kernel, "cuStreamQuery(None)") == 600
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.lock(kernel.pid, 30)
    assert code_of(caught) is C.NOT_READY
    kernel.run("cuda.do('driverDoubleBusy', 0)")
    remote.checkpointer.lock(kernel.pid, 30)
    remote.checkpointer.unlock(kernel.pid)
    double.set(busy=[kernel.pid])
    with pytest.raises(GPUError) as caught:
        remote.checkpointer.lock(kernel.pid, 30)
    assert code_of(caught) is C.NOT_READY


def test_a_restore_needs_a_caller_that_has_started_the_driver(
    double: DriverDouble, remote: Remote, start: StartKernel, kernel: KernelProcess
) -> None:
    kernel.run("cuda.memory_info()")
    suspend(remote, kernel.pid)
    other = start()
    restore = f"cuCheckpointProcessRestore({kernel.pid}, None)"
    assert number_of(other, restore) == 3
    double.set(persistence=True)
    assert number_of(other, restore) == 0


def test_a_driver_that_starts_late_starts_at_last(double: DriverDouble, kernel: KernelProcess) -> None:
    double.fail("cuInit", 802, times=3)
    assert [number_of(kernel, "cuInit(0)") for _ in range(4)] == [802, 802, 802, 0]


# ---- time ---------------------------------------------------------------------------------------------------------------


def test_calls_take_the_time_that_was_set(double: DriverDouble, remote: Remote, kernel: KernelProcess) -> None:
    kernel.run("cuda.memory_info()")
    double.set(latency={"nvml": 3000, "cuCheckpointProcessLock": 20_000})
    remote.monitor.devices()
    remote.checkpointer.lock(kernel.pid, 100)
    assert all(call.elapsed_us >= 3000 for call in double.calls("nvmlDevice"))
    (lock,) = double.calls("cuCheckpointProcessLock")
    assert lock.elapsed_us >= 20_000


def test_a_call_can_hang_and_go_on(double: DriverDouble, start: StartKernel) -> None:
    kernel = start()
    fault = double.hang("cuInit")
    kernel.begin("cuda.start()")
    eventually(lambda: any(call.result is None for call in double.calls("cuInit")), "it hangs")
    assert kernel.is_blocked()
    fault.unlink()
    assert kernel.result() is None


# ---- robustness of the double itself ----------------------------------------------------------------------------------------


def test_processes_that_end_in_any_way_leave_no_record(
    double: DriverDouble, start: StartKernel, remote: Remote
) -> None:
    kernels = [start() for _ in range(3)]
    for kernel in kernels:
        kernel.run("!x = cuda.allocate(2**20)")
    kernels[0].kill()
    kernels[1].begin("!import os; os._exit(0)")
    kernels[1].process.wait()
    assert remote.monitor.use(double.devices[0].device_id).used_mib == 33
    left = [path.name for path in (double.folder / "processes").iterdir()]
    assert [int(name.partition(".")[0]) for name in left] == [kernels[2].pid]


def test_a_record_of_an_earlier_process_with_the_same_pid_means_nothing(
    double: DriverDouble, remote: Remote, kernel: KernelProcess
) -> None:
    kernel.run("cuda.memory_info()")
    (record,) = (double.folder / "processes").glob(f"{kernel.pid}.*")
    record.rename(record.with_name(f"{kernel.pid}.1"))
    assert remote.checkpointer.state(kernel.pid) is S.NO_CONTEXT
    assert remote.monitor.use(double.devices[0].device_id).used_mib == 0


def test_many_processes_fill_a_device_to_the_last_mib_and_no_further(start: StartKernel) -> None:
    kernels = [start() for _ in range(4)]
    for kernel in kernels:
        kernel.run("!held = []; cuda.memory_info()")
    for kernel in kernels:
        kernel.begin("!\nwhile True:\n    try: held.append(cuda.allocate(2**20))\n    except RuntimeError: break")
    for kernel in kernels:
        kernel.result()
    assert sum(kernel.run("len(held)") for kernel in kernels) == 1024 - 4 * 32


def test_device_pointers_mean_nothing_to_host_code(kernel: KernelProcess) -> None:
    kernel.run("!x = cuda.allocate(2**20)")
    with pytest.raises(AssertionError, match="died"):
        kernel.run("__import__('ctypes').string_at(x.pointer.value, 1)")


def test_calls_with_a_context_that_there_is_not_are_refused(kernel: KernelProcess) -> None:
    assert number_of(kernel, "cuCtxSynchronize()") == 3
    kernel.run("cuda.start()")
    kernel.run("!import ctypes; p = ctypes.c_uint64()")
    assert kernel.run("cuda.driver().cuMemAlloc_v2(ctypes.byref(p), 100)") == 201
    with pytest.raises(KernelError, match=r"CUDA_ERROR_INVALID_VALUE \(1\)"):
        kernel.run("cuda.allocate(0)")
