"""Policies that act on kernels in the middle of their work: they lose no byte and no cell."""

import json
from pathlib import Path

import pytest

from fractional_gpu.protocol.status import LeaseStatus
from tests.support.world import Notebook, Server, World, until

FILL = """
import hashlib, random
from fractional_gpu.gpu.simulated import cuda
data = random.Random({seed}).randbytes(1 << 20) * {mib}
buffer = cuda.allocate(len(data))
buffer.write(data)
digest = hashlib.sha256(data).hexdigest()
del data
"""
# Works on the GPU until it is told to end, and reports how far it came.
WORK = """
import pathlib
end, turns = pathlib.Path({end!r}), 0
end.with_suffix(".begun").touch()
while not end.exists():
    cuda.launch(0.02)
    turns += 1
assert buffer.sha256() == digest, "the bytes differ"
print("intact")
"""
CHECK = 'assert buffer.sha256() == digest, "the bytes differ"'


def begin_work(world: World, notebook: Notebook, end: Path) -> str:
    cell = notebook.send(WORK.format(end=str(end)))
    # The broker may still count the previous cell as busy, so the cell itself reports that it works.
    until(end.with_suffix(".begun").exists, "the cell works")
    until(lambda: world.lease(notebook.kernel_id).busy, "the broker counts it as busy")
    return cell


@pytest.fixture
def two(world: World) -> World:
    world.configure("c.GPUBroker.pools = {'default': {'may_move': True, 'min_residency': 0}}")
    world.start_broker("2x1GiB")
    return world


@pytest.mark.promise("race-moves")
def test_kernels_leave_devices_that_are_emptied_or_needed_and_come_back_to_all_of_theirs(
    two: World, server: Server
) -> None:
    (name,) = two.install(1000)
    notebook = server.start(name)
    notebook.must(FILL.format(seed=1, mib=16))
    before = two.lease(notebook.kernel_id)
    end = two.folder / "end"
    cell = begin_work(two, notebook, end)
    done = two.command("drain", before.lease.device_id or "", "--evict-busy", "--wait", "60s")
    assert done.returncode == 0, done.stderr

    def elsewhere() -> LeaseStatus | None:
        lease = two.lease(notebook.kernel_id)
        return lease if lease.state == "resident" and lease.lease.device_id != before.lease.device_id else None

    lease = until(elsewhere, "the kernel continues on the other device")
    assert (lease.suspends, lease.resumes) == (1, 1)
    end.touch()
    reply = notebook.wait(cell)
    assert (reply.status, reply.text) == ("ok", "intact\n")
    told = two.command("explain", lease.lease_id).stdout
    assert "suspend.drain" in told
    assert "draining" in two.command("status").stdout
    assert two.command("undrain", before.lease.device_id or "").returncode == 0
    assert "draining" not in two.command("status").stdout
    notebook.must(CHECK)
    assert two.command("drain", before.lease.device_id or "").returncode == 0
    two.kill_broker()
    two.start_broker()
    assert [device.device_id for device in two.status().devices if device.draining] == [before.lease.device_id]
    second = server.start(name)
    second.must(FILL.format(seed=2, mib=16))
    assert two.lease(second.kernel_id).lease.device_id == lease.lease.device_id
    assert two.lease(notebook.kernel_id).state == "suspended"
    notebook.must(CHECK)
    notebook.shut_down()
    assert two.command("undrain", before.lease.device_id or "").returncode == 0
    a_kernel_with_two_devices_leaves_and_comes_back_to_both(two, server, second)


def respecified(world: World, name: str, **config: object) -> str:
    spec = json.loads((world.kernels_dir / name / "kernel.json").read_text())
    spec["metadata"]["kernel_provisioner"]["config"] |= config
    changed = f"{name}-changed"
    (world.kernels_dir / changed).mkdir()
    (world.kernels_dir / changed / "kernel.json").write_text(json.dumps(spec))
    return changed


# A child on the second device, as in distributed training: it fills memory, and checks it on request.
CHILD = """
import subprocess, sys
devices = os.environ["JUPYTER_GPU_SIMULATED_DEVICE"].split(",")
program = FILL_TEXT + '''
print(cuda.device().device_id, flush=True)
for line in sys.stdin:
    print(buffer.sha256() == digest, flush=True)
'''
child = subprocess.Popen([sys.executable, "-c", "import sys" + program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    text=True, env={**os.environ, "JUPYTER_GPU_SIMULATED_DEVICE": devices[1]})
print(len(devices), child.stdout.readline().strip() == devices[1])
"""
CHECK_CHILD = """
child.stdin.write("check\\n")
child.stdin.flush()
print(child.stdout.readline().strip())
"""


def a_kernel_with_two_devices_leaves_and_comes_back_to_both(two: World, server: Server, second: Notebook) -> None:
    (whole,) = two.install(1000)
    first = server.start(respecified(two, whole, devices=2))
    fill = FILL.format(seed=1, mib=16)
    first.must(fill + "import os")
    reply = first.must(f"FILL_TEXT = {FILL.format(seed=2, mib=8)!r}\n" + CHILD)
    assert reply.text == "2 True\n"
    lease = two.lease(first.kernel_id)
    assert sorted(lease.lease.device_ids) == sorted(device.device_id for device in two.status().devices)
    assert [device.reserved_mib for device in two.status().devices] == [1024, 1024]
    second.must(FILL.format(seed=3, mib=16))
    assert two.await_state(first.kernel_id, "suspended").lease.saved_mib >= 24
    assert sorted(device.reserved_mib for device in two.status().devices) == [0, 1024]
    two.kill_broker()
    two.start_broker()
    assert two.lease(first.kernel_id).state == "suspended"
    reply = first.must(CHECK + CHECK_CHILD)
    assert reply.text == "True\n"
    lease = two.lease(first.kernel_id)
    assert (lease.state, len(lease.lease.device_ids)) == ("resident", 2)
    two.kill_broker()
    two.start_broker()
    again = two.lease(first.kernel_id)
    assert (again.state, again.lease.device_ids) == ("resident", lease.lease.device_ids)
    assert [device.reserved_mib for device in two.status().devices] == [1024, 1024]
    second.must(CHECK)
    first.must(CHECK + CHECK_CHILD)


TAKE = """
import os
taken = globals().get("taken", [])
taken.append(cuda.allocate({mib} << 20))
print(os.environ["JUPYTER_GPU_MEMORY_MIB"])
"""


def test_where_use_is_reserved_a_kernel_grows_step_by_step_and_idle_neighbours_make_room(
    world: World, server: Server
) -> None:
    policy = "{'reserve': 'use', 'headroom': '128MiB', 'min_residency': 0}"
    world.configure(f"c.GPUBroker.pools = {{'default': {policy}}}")
    (quarter,) = world.install(250)
    roomy = respecified(world, quarter, memory="1000MiB")
    first, second = server.start(roomy), server.start(roomy)
    for seed, notebook in enumerate((first, second)):
        notebook.must(FILL.format(seed=seed, mib=64))
        assert world.lease(notebook.kernel_id).spec.request_mib == 256

    def may_use(mib: int) -> bool:
        """The kernel is told a moment after the broker has reserved it."""
        return int(first.must('print(os.environ["JUPYTER_GPU_MEMORY_MIB"])').text) >= mib

    assert first.must(TAKE.format(mib=110)).text == "256\n"
    held = 32 + 64 + 110  # with the context
    for step in (120, 120, 120, 120):
        until(lambda: may_use(held + step), "it holds what it uses and nearly all of the headroom")  # noqa: B023 - asked at once
        first.must(TAKE.format(mib=step))
        held += step
    until(lambda: may_use(held + 100), "it may use more than before")
    assert world.await_state(second.kernel_id, "suspended").suspends == 1, "there was no room next to it"
    assert int(first.must(TAKE.format(mib=1)).text) >= 768
    first.must(CHECK)
    first.must("for buffer_of_mine in taken: buffer_of_mine.free()\ndel taken, buffer_of_mine")
    until(lambda: world.lease(first.kernel_id).lease.reserved_mib < 400, "it gives back what it does not use")
    second.must(CHECK)
    assert world.lease(first.kernel_id).suspends == 0, "both fit again"
    first.must(CHECK)
