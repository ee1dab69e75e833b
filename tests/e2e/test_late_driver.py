"""A broker in NVIDIA mode, on doubles of the driver's libraries: a driver that starts late, and memory that runs out.

Broker, worker, NVIDIA's Python packages, Jupyter, kernels, the control group and the out-of-memory killer are real.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fractional_gpu.host import memory
from fractional_gpu.protocol.status import DeviceStatus
from tests.driver_double.double import Device, DriverDouble
from tests.driver_double.releases import newest, python_path
from tests.support.control_group import memory_group, set_limit, used_mib
from tests.support.world import Notebook, Server, World, new_world, until

MIB = 1 << 20
HELD_MIB, SMALL_MIB = 200, 16
LEFT_MIB = 150
GROUP_MIB = 1200
RAISED = 600  # the kernels' adjustment at their start, so that any broker may lower it
NOT_READY = 802

HOLD = """
from cuda.bindings import driver
def do(call, *arguments):
    result, *values = getattr(driver, call)(*arguments)
    assert int(result) == 0, (call, result)
    return values[0] if values else None
do("cuInit", 0)
do("cuCtxSetCurrent", do("cuDevicePrimaryCtxRetain", do("cuDeviceGet", 0)))
held = do("cuMemAlloc", {mib} << 20)
do("cuMemsetD32", held, 0x5A5A5A5A, {mib} << 18)
"""
# In pieces: reading back must not need much memory.
LOOK = """
piece, whole = bytearray(1 << 20), True
for at in range({mib}):
    do("cuMemcpyDtoH", (__import__("ctypes").c_char * (1 << 20)).from_buffer(piece), int(held) + (at << 20), 1 << 20)
    whole &= piece == b"\x5a" * (1 << 20)
print(whole)
"""


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        del made.environment["JUPYTER_GPU_SIMULATE"]
        made.configure(
            "c.GPUBroker.pools = {'default': {'preempt': 'priorities', 'idle_after': 'on-demand', 'min_residency': '0s'}}"
        )
        yield made


@pytest.fixture
def double(world: World) -> DriverDouble:
    """The machine's driver, for every process of the world."""
    made = DriverDouble(world.folder / "driver", [Device(mib=4096)])
    nvml = python_path("nvidia-ml-py", newest("nvidia-ml-py"))
    given = made.environment()
    paths = (given.pop("PYTHONPATH"), str(nvml), world.environment["PYTHONPATH"])
    world.environment |= {**given, "PYTHONPATH": os.pathsep.join(paths)}
    return made


@contextmanager
def grouped_server(world: World) -> Iterator[tuple[Path, Server]]:
    """A server whose kernels are in a control group of memory, which is given too."""
    with memory_group(GROUP_MIB) as group, Server(world) as server:
        Path(f"/proc/{server.process.pid}/oom_score_adj").write_text(str(RAISED))
        (group / "cgroup.procs").write_text(str(server.process.pid))  # processes that it starts from now on are in it
        yield group, server


def device(world: World) -> DeviceStatus:
    (found,) = world.status().devices
    return found


def suspended(world: World, notebook: Notebook) -> int:
    lease = world.lease(notebook.kernel_id)
    with world.client() as client:
        client.suspend(lease.lease_id)
    assert lease.pid is not None
    return lease.pid


def test_a_driver_that_becomes_ready_while_the_broker_serves_is_used_from_then_on_and_what_was_saved_is_whole(
    world: World, double: DriverDouble
) -> None:
    double.fail("cuInit", NOT_READY, times=None)
    world.start_broker()
    assert "CUDA_ERROR_SYSTEM_NOT_READY (802)" in device(world).why_not
    double.clear_faults()
    until(lambda: not device(world).why_not, "the broker has tried again")
    with grouped_server(world) as (group, server):
        notebook = server.start(world.install(250)[0])
        notebook.must(HOLD.format(mib=SMALL_MIB))
        pid = suspended(world, notebook)
        assert {one.pid: one.saved_mib for one in double.processes() if one.saved_mib} == {pid: SMALL_MIB}
        assert notebook.must(LOOK.format(mib=SMALL_MIB)).text == "True\n"

        # What an earlier broker saved is intact after a start without the driver.
        suspended(world, notebook)
        world.kill_broker()
        double.fail("cuInit", NOT_READY, times=None)
        world.start_broker()
        assert world.lease(notebook.kernel_id).state == "quarantined"
        double.clear_faults()
        world.await_state(notebook.kernel_id, "suspended")
        assert notebook.must(LOOK.format(mib=SMALL_MIB)).text == "True\n"
        server.clear()
        a_kernel_that_fills_the_group_is_taken_and_the_suspended_ones_come_back_whole(world, double, group, server)


def a_kernel_that_fills_the_group_is_taken_and_the_suspended_ones_come_back_whole(
    world: World, double: DriverDouble, group: Path, server: Server
) -> None:
    double.set(context_mib=16)
    (name,) = world.install(250)
    saved = [server.start(name) for _ in range(2)]
    neighbour = server.start(name)
    pids = []
    for notebook in saved:
        notebook.must(HOLD.format(mib=HELD_MIB))
        pids.append(suspended(world, notebook))
    assert {one.pid for one in double.processes() if one.saved_mib == HELD_MIB} == set(pids)
    until(lambda: all(memory.adjustment(pid) < RAISED for pid in pids), "what is saved is protected")
    lease = world.lease(neighbour.kernel_id)
    neighbour.must("pass")
    # So little is left that the neighbour, once it has filled that, is smaller than a suspended kernel.
    set_limit(group, used_mib(group) + LEFT_MIB)
    neighbour.send(f"filled = b'x' * {GROUP_MIB * MIB}")
    world.await_restart(neighbour.kernel_id, lease.pid)
    with world.client() as client:
        said = [line.sentence for line in client.story(lease.lease_id).lines]
    assert any("out-of-memory killer ended this kernel" in line for line in said), said
    shown = server.connect(neighbour.kernel_id).shows("out-of-memory killer ended this kernel")
    assert str(group) in shown
    for notebook, pid in zip(saved, pids, strict=True):
        assert world.lease(notebook.kernel_id).pid == pid
        set_limit(group, GROUP_MIB)
        assert notebook.must(LOOK.format(mib=HELD_MIB)).text == "True\n"
    until(lambda: all(memory.adjustment(pid) == RAISED for pid in pids), "the protection is over")
