"""What an ended kernel leaves on a device keeps its room: no other kernel is let in there before it is gone."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from fractional_gpu.host.process import identify
from fractional_gpu.protocol.messages import PinRequest
from fractional_gpu.protocol.status import LeaseStatus
from tests.support.shared_server import SharedServer
from tests.support.stories import SLEEPS
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("left-behind")

NEVER = "c.GPUBroker.pools = {'default': {'preempt': 'never', 'idle_after': 'on-demand', 'min_residency': 0}}"
HOLD = "from fractional_gpu.gpu.simulated import cuda; buffer = cuda.allocate(400 << 20)"
CHILD_MIB = 332  # with its context
PROGRAM = f"""
import signal
from fractional_gpu.gpu.simulated import cuda
buffers = []
def more(number, frame):
    buffers.append(cuda.allocate(64 << 20))
signal.signal(signal.SIGUSR1, more)
buffers.append(cuda.allocate(300 << 20))
{SLEEPS}
"""
IN_A_SESSION = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {program!r}], start_new_session=True).pid)
"""
# Its parent starts it without the lease's variable, shows it to the broker while the pipe is open, and ends.
FORKED_TWICE = """
import os, subprocess, sys
father = '''
import os, subprocess, sys
clean = {{name: value for name, value in os.environ.items() if name != "JUPYTER_GPU_LEASE"}}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=clean, start_new_session=True).pid, flush=True)
sys.stdin.read()
'''
father = subprocess.Popen(
    [sys.executable, "-c", father, {program!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
)
print(int(father.stdout.readline()))
"""


@contextmanager
def child_of(world: World, notebook: Notebook, code: str = IN_A_SESSION) -> Iterator[int]:
    pid = int(notebook.must(code.format(program=PROGRAM)).text)
    pidfd = os.pidfd_open(pid)
    try:
        until(lambda: world.lease(notebook.kernel_id).lease.used_mib >= CHILD_MIB, "the child's memory is seen")
        yield pid
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def shut_down(server: Server, notebook: Notebook) -> None:
    notebook.close()
    server.request("DELETE", f"api/kernels/{notebook.kernel_id}")


def left_of(world: World, notebook: Notebook) -> LeaseStatus:
    def ask() -> LeaseStatus | None:
        lease = world.lease(notebook.kernel_id)
        return lease if lease.left else None

    return until(ask, "the kernel's end is noticed")


def waits(world: World, notebook: Notebook) -> LeaseStatus:
    def ask() -> LeaseStatus | None:
        lease = world.lease(notebook.kernel_id)
        return lease if lease.reason == "wait.busy-neighbour" else None

    return until(ask, "the kernel waits for what another left behind")


@pytest.fixture(scope="module")
def world(shared_server: SharedServer) -> Iterator[World]:
    """One broker for all tests of this file."""
    with shared_server.borrowed() as lent:
        lent.configure(NEVER)
        yield lent


@pytest.fixture
def half(world: World) -> str:
    (name,) = world.install(500)
    return name


def test_a_child_that_outlives_its_kernel_keeps_its_room_until_it_is_gone(
    world: World, server: Server, half: str
) -> None:
    """Meanwhile the neighbour fills its whole cap: if the room went to the third kernel, one of them would fail."""
    first, second, third = (server.start(half) for _ in range(3))
    second.must("from fractional_gpu.gpu.simulated import cuda; cuda.launch(0)")
    with child_of(world, first) as pid:
        lease_id = world.lease(first.kernel_id).lease_id
        shut_down(server, first)
        left = left_of(world, first)
        assert (left.lease_id, left.state, left.pid, [one.pid for one in left.left]) == (
            lease_id,
            "resident",
            None,
            [pid],
        )
        second.must(HOLD)
        with world.client() as client:
            client.pin(world.lease(second.kernel_id).lease_id, PinRequest(duration_ms=600_000))
        cell = third.send(HOLD)
        lease = waits(world, third)
        assert f"process {pid} (" in lease.sentence
        assert f"jupyter gpu end {lease_id[:8]}" in lease.sentence
        os.kill(pid, signal.SIGUSR1)  # its cap equals its kernel's: there is room for more
        until(lambda: world.lease(first.kernel_id).left[0].used_mib == CHILD_MIB + 64, "it has grown")
        assert world.lease(third.kernel_id).position == 1
        world.end(pid, signal.SIGKILL)
        assert third.wait(cell).status == "ok"
        assert first.kernel_id not in {one.kernel_id for one in world.status().leases}


def test_a_killed_kernel_and_a_killed_broker_make_no_difference(world: World, half: str) -> None:
    (most,) = world.install(750)
    with Server(world, "--KernelManager.autorestart=False") as server:
        first, other = server.start(half), server.start(most)
        with child_of(world, first, FORKED_TWICE) as pid:
            kernel = int(first.must("import os; print(os.getpid())").text)
            world.kill_broker()
            world.end(kernel, signal.SIGKILL)
            world.start_broker()
            assert [one.pid for one in left_of(world, first).left] == [pid]
            cell = other.send(HOLD)
            waits(world, other)
            world.kill_broker()
            world.start_broker()
            assert [one.pid for one in left_of(world, first).left] == [pid]
            waits(world, other)
            world.end(pid, signal.SIGKILL)
            assert other.wait(cell).status == "ok"


def test_what_a_kernel_leaves_behind_stays_over_its_restart_and_its_owner_can_end_it(
    world: World, server: Server, half: str
) -> None:
    """Leftovers that were suspended with a kernel come back when the kernel has ended."""
    notebook = server.start(half)
    with child_of(world, notebook) as pid:
        before = world.lease(notebook.kernel_id)
        running = world.command("end", before.lease_id[:8])
        assert (running.returncode, "left no processes behind" in running.stderr) == (1, True), running.stderr
        server.request("POST", f"api/kernels/{notebook.kernel_id}/restart")
        again = server.connect(notebook.kernel_id)
        again.must("from fractional_gpu.gpu.simulated import cuda; buffer = cuda.allocate(100 << 20)")
        after = world.lease(notebook.kernel_id)
        assert (after.lease_id, after.state, after.left) == (before.lease_id, "resident", [])
        assert after.pid not in (None, before.pid, pid)
        with world.client() as client:  # both are suspended and come back together
            assert client.suspend(after.lease_id).state == "suspended"
        again.must("assert len(buffer.read()) == 100 << 20")
        os.kill(pid, 0)
        again.close()
        with world.client() as client:
            client.suspend(after.lease_id)
        shut_down(server, notebook)
        left = world.await_state(notebook.kernel_id, "resident")
        assert [one.pid for one in left.left] == [pid]
        os.kill(pid, signal.SIGUSR1)
        until(lambda: world.lease(notebook.kernel_id).left[0].used_mib == CHILD_MIB + 64, "it continues")
        status = world.command("status")
        assert f"process {pid} (" in status.stdout
        assert f"`jupyter gpu end {before.lease_id[:8]}` ends it" in status.stdout
        ended = world.command("end", before.lease_id[:8])
        assert ended.returncode == 0, ended.stderr
        assert not world.status().leases


def test_a_pool_can_end_what_is_left(world: World, server: Server) -> None:
    world.start_broker()
    assert world.command("pool", "default", "after_kernel=end").returncode == 0
    (half,) = world.install(500)
    notebook = server.start(half)
    with child_of(world, notebook) as pid:
        shut_down(server, notebook)
        until(lambda: not world.status().leases, "the lease is over")
        with pytest.raises(ProcessLookupError):
            identify(pid)
