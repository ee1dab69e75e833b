"""A simulated host that users share: its bytes are private, are charged to whom a real device's would be, and root trusts no user's file.

These tests run as root, with a real control group of memory: another user could not share a host.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import GPUError, ProcessState
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.device_memory import DeviceMemoryServer
from fractional_gpu.gpu.simulated.host import SimulatedHost, create
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.processes import open_file, reap
from fractional_gpu.gpu.simulated.store import DATABASE, SimulatedHostError, Store
from tests.gpu_sim.kernels import KernelError, KernelProcess, eventually
from tests.support.control_group import memory_group, used_mib

pytestmark = pytest.mark.promise("shared-simulator")

MIB = 1 << 20
SIZE_MIB = 48
ADA, BOB = 65_501, 65_502  # uids that no user of the machine has
FILL = f"!b['x'] = cuda.allocate({SIZE_MIB} << 20); b['x'].fill(b'ada')"
SUM = "b['x'].sha256()"


class UsersKernel(KernelProcess):
    """A process of a user on the first device, in a control group (None: this process's)."""

    def __init__(self, simulated: SimulatedHost, uid: int, group: Path | None = None) -> None:
        super().__init__(
            "fractional_gpu.gpu.simulated.cuda",
            {
                "JUPYTER_GPU_SIMULATED_DIR": str(simulated.directory),
                "JUPYTER_GPU_SIMULATED_DEVICE": simulated.devices[0].device_id,
            },
            uid=uid,
        )
        if group is not None:
            (group / "cgroup.procs").write_text(str(self.pid))


@pytest.fixture
def simulated() -> Iterator[SimulatedHost]:
    """In memory, so that its bytes are charged to a process."""
    folder = Path(f"/dev/shm/jfg-test-{os.getpid()}-{time.monotonic_ns()}")  # noqa: S108 - made by this test alone
    made = create(folder, "1x256MiB", shared=True)
    server = DeviceMemoryServer(folder)
    yield made
    server.close()
    store = Store(folder)
    reap(store)
    store.close()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_device_memory_is_charged_to_the_host_and_saved_state_to_the_job(
    simulated: SimulatedHost, stack: ExitStack
) -> None:
    job = stack.enter_context(memory_group(200))
    kernel = stack.enter_context(UsersKernel(simulated, ADA, job))
    drives = SimulatedCheckpointer(simulated.directory)
    stack.callback(drives.close)
    kernel.run("!cuda.memory_info()")
    before = used_mib(job)
    kernel.run(FILL)
    digest = kernel.run(SUM)
    assert used_mib(job) - before < SIZE_MIB // 4, "resident bytes are no memory of the job's"
    for _ in range(2):
        drives.lock(kernel.pid, 1000)
        drives.checkpoint(kernel.pid)
        assert used_mib(job) - before >= SIZE_MIB, "saved bytes are"
        drives.restore(kernel.pid)
        drives.unlock(kernel.pid)
        assert used_mib(job) - before < SIZE_MIB // 4
        assert kernel.run(SUM) == digest


def test_a_job_without_room_for_its_saved_state_keeps_every_byte_and_every_process(
    simulated: SimulatedHost, stack: ExitStack
) -> None:
    job = stack.enter_context(memory_group(24))
    kernel = stack.enter_context(UsersKernel(simulated, ADA, job))
    drives = SimulatedCheckpointer(simulated.directory)
    stack.callback(drives.close)
    kernel.run(FILL)
    digest = kernel.run(SUM)
    drives.lock(kernel.pid, 1000)
    with pytest.raises(GPUError, match="did not fit into the control group"):
        drives.checkpoint(kernel.pid)
    assert drives.state(kernel.pid) is ProcessState.LOCKED
    drives.unlock(kernel.pid)
    assert kernel.run(SUM) == digest


def test_users_share_the_device_but_not_its_bytes(simulated: SimulatedHost, stack: ExitStack) -> None:
    ada, bob = (stack.enter_context(UsersKernel(simulated, uid)) for uid in (ADA, BOB))
    monitor = SimulatedMonitor(simulated.directory)
    stack.callback(monitor.close)
    ada.run(FILL)
    bob.run("!cuda.allocate(8 << 20)")
    use = monitor.use(simulated.devices[0].device_id)
    assert {one.pid for one in use.processes} == {ada.pid, bob.pid}
    with pytest.raises(KernelError, match="out of memory on Simulated GPU 256 MiB"):
        bob.run("!cuda.allocate(200 << 20)")
    bob.run("!cuda.launch(0.01)")  # it reads what others' work uses
    (content,) = simulated.directory.glob(f"memory/{ada.pid}-*/*.device")
    bob.run("!import os")
    with pytest.raises(KernelError) as refusal:
        bob.run(f"open({str(content)!r}).read(1)")
    assert refusal.value.name == "PermissionError"
    for path in (content.parent, simulated.directory / DATABASE):
        with pytest.raises(KernelError) as refusal:
            bob.run(f"os.rename({str(path)!r}, {str(path)!r} + '.gone')")
        assert refusal.value.name == "PermissionError"


def test_root_releases_what_a_users_dead_process_held_and_users_do_not(
    simulated: SimulatedHost, stack: ExitStack
) -> None:
    ada, bob = (stack.enter_context(UsersKernel(simulated, uid)) for uid in (ADA, BOB))
    ada.run(FILL)
    bob.run("!cuda.memory_info()")
    ada.kill()
    with pytest.raises(KernelError, match="out of memory"):
        bob.run("!cuda.allocate(150 << 20)")  # releases the dead where it may
    monitor = SimulatedMonitor(simulated.directory)
    stack.callback(monitor.close)
    assert [one.pid for one in monitor.use(simulated.devices[0].device_id).processes] == [bob.pid]
    assert not list(simulated.directory.glob(f"*/{ada.pid}-*"))
    bob.run("!cuda.allocate(150 << 20)")


# -- root's hands in users' folders ------------------------------------------------------------------------------------------


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """A file of root's."""
    file = tmp_path / "treasure"
    file.write_text("root's own")
    return file


@pytest.mark.parametrize("name", ["1.saved", "1.device", "gate", "operation"])
@pytest.mark.parametrize("how", ["link", "hard link", "pipe"])
def test_root_follows_nothing_that_a_user_planted(
    simulated: SimulatedHost, stack: ExitStack, treasure: Path, name: str, how: str
) -> None:
    kernel = stack.enter_context(UsersKernel(simulated, ADA))
    drives = SimulatedCheckpointer(simulated.directory)
    stack.callback(drives.close)
    kernel.run(FILL)
    (folder,) = simulated.directory.glob(f"memory/{kernel.pid}-*")
    (folder / name).unlink(missing_ok=True)
    if how == "link":
        (folder / name).symlink_to(treasure)
    elif how == "hard link":
        with suppress(OSError):  # another file system
            os.link(treasure, folder / name)
    else:
        os.mkfifo(folder / name)
    with suppress(GPUError):  # which of them finds it depends on the file
        drives.lock(kernel.pid, 100)
        drives.checkpoint(kernel.pid)
    assert treasure.read_text() == "root's own"


def test_a_folder_that_became_a_link_is_not_emptied(simulated: SimulatedHost, stack: ExitStack, treasure: Path) -> None:
    kernel = stack.enter_context(UsersKernel(simulated, ADA))
    kernel.run(FILL)
    (folder,) = simulated.directory.glob(f"memory/{kernel.pid}-*")
    folder.rename(simulated.directory / "trash" / "aside")
    folder.symlink_to(treasure.parent)
    (treasure.parent / "1.saved").write_text("root's too")
    monitor = SimulatedMonitor(simulated.directory)
    stack.callback(monitor.close)
    kernel.kill()
    monitor.use(simulated.devices[0].device_id)
    assert {path.name for path in treasure.parent.iterdir()} >= {"treasure", "1.saved"}
    with pytest.raises(OSError):  # noqa: PT011 - which one is the system's
        open_file(folder, "treasure", os.O_RDONLY)


def test_a_process_that_cannot_be_names_no_path(simulated: SimulatedHost) -> None:
    store = Store(simulated.directory)
    with pytest.raises(SimulatedHostError, match=r"has an invalid process key, '\.\./\.\./etc'"):
        store.process_folder("../../etc")
    store.close()


def test_a_broker_with_few_capabilities_releases_a_dead_process_and_leaves_its_files_to_the_worker(
    simulated: SimulatedHost,
) -> None:
    with UsersKernel(simulated, ADA) as kernel:
        kernel.run(FILL)
        kernel.kill()
    program = (
        "import sys; from fractional_gpu.gpu.simulated import processes, store; "
        "found = store.Store(sys.argv[1]); processes.reap(found); print(processes.processes_of(found))"
    )
    bounded = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", program]
    done = subprocess.run([*bounded, simulated.directory], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "[]\n"
    assert list(simulated.directory.glob("memory/*/*.device"))
    store = Store(simulated.directory)
    reap(store)
    store.close()
    assert not list(simulated.directory.glob("memory/*"))


def test_the_books_stay_writable_for_users_when_they_are_opened_again(
    simulated: SimulatedHost, stack: ExitStack
) -> None:
    again = create(simulated.directory, "1x256MiB", shared=True)
    assert again.devices == simulated.devices
    for file in simulated.directory.glob(f"{DATABASE}*"):
        assert file.stat().st_mode & 0o777 == 0o666, file
    stack.enter_context(UsersKernel(simulated, ADA)).run("!cuda.memory_info()")
    assert simulated.directory.stat().st_mode & 0o777 == 0o755


# -- the server --------------------------------------------------------------------------------------------------------------


def test_without_a_server_the_pages_are_the_processes_own(stack: ExitStack) -> None:
    folder = Path(f"/dev/shm/jfg-test-{os.getpid()}-{time.monotonic_ns()}")  # noqa: S108 - made by this test alone
    made = create(folder, "1x256MiB", shared=True)
    store = Store(folder)
    kernel = stack.enter_context(UsersKernel(made, ADA))
    kernel.run(FILL)
    assert kernel.run("b['x'].read(3).decode()") == "ada"
    kernel.kill()
    reap(store)
    store.close()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_the_server_reserves_files_of_the_peer_in_its_host_only(simulated: SimulatedHost, stack: ExitStack) -> None:
    kernel = stack.enter_context(UsersKernel(simulated, ADA, stack.enter_context(memory_group(200))))
    foreign = simulated.directory / "memory" / "root-file"
    foreign.write_bytes(b"\0" * 10)
    foreign.chmod(0o666)
    kernel.run("!import pathlib, os; from fractional_gpu.gpu.simulated.device_memory import reserve")
    for path, sentence in (
        (foreign, "not a regular file of this user"),
        (Path("/dev/null"), "not a regular file of this user"),
    ):
        with pytest.raises(KernelError, match=sentence):
            kernel.run(f"reserve(pathlib.Path({str(simulated.directory)!r}), pathlib.Path({str(path)!r}))")
    huge = f"{simulated.directory}/memory/huge"
    kernel.run(f"!f = open({huge!r}, 'wb'); f.truncate(300 << 20)")
    with pytest.raises(KernelError, match="more than a device has"):
        kernel.run(f"reserve(pathlib.Path({str(simulated.directory)!r}), pathlib.Path({huge!r}))")


def test_a_peer_that_sends_nothing_keeps_no_other_waiting(simulated: SimulatedHost, stack: ExitStack) -> None:
    silent = stack.enter_context(UsersKernel(simulated, BOB))
    kernel = stack.enter_context(UsersKernel(simulated, ADA, stack.enter_context(memory_group(200))))
    silent.run("!import socket; b['s'] = socket.socket(socket.AF_UNIX)")
    silent.run(f"!b['s'].connect({str(simulated.directory / 'memory.sock')!r})")
    kernel.run(FILL)
    (content,) = simulated.directory.glob(f"memory/{kernel.pid}-*/*.device")
    eventually(lambda: content.stat().st_blocks * 512 >= SIZE_MIB * MIB, "the pages are there")
