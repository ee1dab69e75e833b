"""The policies that steer kernels in the middle of their work: nothing they do loses a byte, or a cell."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.protocol.messages import LeaseStatus
from tests.support.world import Notebook, Server, World, new_world, until

FILL = """
import hashlib, pathlib, random
from provisioner.gpu.simulated import cuda
data = random.Random({seed}).randbytes(1 << 20) * {mib}
buffer = cuda.allocate(len(data))
buffer.write(data)
digest = hashlib.sha256(data).hexdigest()
del data
"""
# Works on the GPU until it is told to end, and tells how far it came.
WORK = """
end, turns = pathlib.Path({end!r}), 0
while not end.exists():
    cuda.launch(0.02)
    turns += 1
assert buffer.sha256() == digest, "the bytes differ"
print("intact")
"""
CHECK = 'assert buffer.sha256() == digest, "the bytes differ"'


def command(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `jupyter gpu` in the world."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "provisioner.commands.main", *words],
        env=world.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def begin_work(world: World, notebook: Notebook, end: Path) -> str:
    """Start a cell that works until the file `end` is there, and return its message's id once it works."""
    cell = notebook.send(WORK.format(end=str(end)))
    until(lambda: world.lease(notebook.kernel_id).busy, "the cell runs")
    return cell


@pytest.fixture
def two() -> Iterator[World]:
    """A world with two devices between which kernels may move."""
    with new_world("2x1GiB") as made:
        made.configure("c.GPUBroker.pools = {'default': {'may_move': True, 'min_residency': 0}}")
        yield made


def test_a_kernel_leaves_a_device_that_is_emptied_in_the_middle_of_its_cell(two: World) -> None:
    (name,) = two.install(250)
    with Server(two) as server:
        notebook = server.start(name)
        notebook.must(FILL.format(seed=1, mib=64))
        before = two.lease(notebook.kernel_id)
        end = two.folder / "end"
        cell = begin_work(two, notebook, end)
        done = command(two, "drain", before.device_id or "", "--evict-busy", "--wait", "60s")
        assert done.returncode == 0, done.stderr

        def elsewhere() -> LeaseStatus | None:
            lease = two.lease(notebook.kernel_id)
            return lease if lease.state == "resident" and lease.device_id != before.device_id else None

        lease = until(elsewhere, "the kernel goes on, on the other device")
        assert (lease.suspends, lease.resumes) == (1, 1)
        end.touch()
        reply = notebook.wait(cell)
        assert (reply.status, reply.text) == ("ok", "intact\n")
        told = command(two, "explain", lease.lease_id).stdout
        assert "suspend.drain" in told
        assert "draining" in command(two, "status").stdout
        assert command(two, "undrain", before.device_id or "").returncode == 0
        assert "draining" not in command(two, "status").stdout
        notebook.must(CHECK)


def test_an_emptied_device_stays_empty_over_a_restart_of_the_broker(two: World) -> None:
    (name,) = two.install(1000)
    with Server(two) as server:
        first = server.start(name)
        first.must(FILL.format(seed=1, mib=64))
        home = two.lease(first.kernel_id).device_id or ""
        other = next(device.device_id for device in two.status().devices if device.device_id != home)
        assert command(two, "drain", other).returncode == 0
        two.kill_broker()
        two.start_broker()
        assert [device.device_id for device in two.status().devices if device.draining] == [other]
        second = server.start(name)
        second.must(FILL.format(seed=2, mib=64))
        assert two.lease(second.kernel_id).device_id == home
        assert two.lease(first.kernel_id).state == "suspended"


def test_a_pinned_kernel_keeps_its_place_until_the_pin_ends_over_a_restart_too(world: World, server: Server) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'min_residency': 0, 'pin_budget': '2h'}}")
    (name,) = world.install(750)
    first, second = server.start(name), server.start(name)
    first.must(FILL.format(seed=1, mib=64))
    done = command(world, "pin", first.kernel_id, "3h")
    assert (done.returncode, "2 h are left of the 2 h" in done.stderr) == (1, True), done.stderr
    done = command(world, "pin", first.kernel_id, "1h")
    assert done.returncode == 0, done.stderr
    cell = second.send(FILL.format(seed=2, mib=64))
    until(lambda: world.lease(second.kernel_id).position == 1, "the second kernel waits")
    assert "pinned for" in command(world, "status").stdout
    assert world.lease(first.kernel_id).suspends == 0
    world.kill_broker()
    world.start_broker()
    lease = world.lease(first.kernel_id)
    assert (lease.state, lease.pinned_ms > 3_000_000) == ("resident", True)
    until(lambda: world.lease(second.kernel_id).position == 1, "the second kernel waits again")
    assert world.lease(first.kernel_id).suspends == 0
    assert command(world, "unpin", first.kernel_id).returncode == 0
    assert second.wait(cell).status == "ok"
    first.must(CHECK)


def test_a_pin_ends_by_itself(world: World, server: Server) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'min_residency': 0}}")
    (name,) = world.install(750)
    first, second = server.start(name), server.start(name)
    first.must(FILL.format(seed=1, mib=64))
    assert command(world, "pin", first.kernel_id, "2s").returncode == 0
    second.must(FILL.format(seed=2, mib=64))
    lease = world.lease(first.kernel_id)
    assert (lease.suspends, lease.pinned_ms) == (1, 0)
    told = command(world, "explain", first.kernel_id).stdout
    assert told.index("pin.begun") < told.index("suspend.")
    first.must(CHECK)
