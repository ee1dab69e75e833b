"""A kernel that uses managed memory stays on its device: it is not tried, and it survives who asks for it."""

import pytest

from fractional_gpu.protocol.errors import ConflictError
from tests.support.packages import CUPY, TORCH_PROFILER, write
from tests.support.world import Server, World, until

REASON = "it uses CuPy's managed memory, which the driver cannot save"
HOLD = "from fractional_gpu.gpu.simulated import cuda; buffer = cuda.allocate(64 << 20); buffer.write(b'abc')"


def test_managed_memory_that_the_extension_sees_is_refused_and_survives(world: World, server: Server) -> None:
    write(world.notebooks, CUPY)  # what a kernel finds where its notebook lies
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD + "\nimport cupy; memory = cupy.cuda.malloc_managed(1 << 20)")
    until(lambda: world.lease(notebook.kernel_id).lease.unsuspendable_reason == REASON, "the broker knows")
    until(lambda: world.lease(notebook.kernel_id).lease.used_mib >= 64, "its memory is measured")
    with world.client() as client, pytest.raises(ConflictError, match=REASON) as refused:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    assert refused.value.reason == "not-checkpointable"
    assert REASON in str(notebook.must("%gpu").data)
    assert notebook.must("print(buffer.read(3))").text == "b'abc'\n"

    world.kill_broker()
    world.start_broker()
    until(lambda: world.lease(notebook.kernel_id).lease.unsuspendable_reason == REASON, "the next broker is told")
    notebook.restart()
    until(lambda: world.lease(notebook.kernel_id).lease.unsuspendable_reason == "", "the next process is another one")


def test_what_is_found_only_before_a_suspend_is_refused_then(world: World, server: Server) -> None:
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD)
    notebook.must(
        "import sys, types; rmm = types.ModuleType('rmm'); rmm.mr = types.SimpleNamespace()\n"
        "class ManagedMemoryResource: pass\n"
        "rmm.mr.get_current_device_resource = ManagedMemoryResource; sys.modules['rmm'] = rmm"
    )
    with world.client() as client, pytest.raises(ConflictError, match="managed memory through rmm"):
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    assert "rmm" in world.lease(notebook.kernel_id).lease.unsuspendable_reason
    assert notebook.must("print(buffer.read(3))").text == "b'abc'\n"


PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CUDA]):
    pass
"""


def test_a_kernel_that_was_profiled_stays_on_its_device_and_says_why(world: World, server: Server) -> None:
    write(world.notebooks, TORCH_PROFILER)
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD)
    notebook.must(PROFILED)
    until(lambda: "torch's profiler" in world.lease(notebook.kernel_id).lease.unsuspendable_reason, "the broker knows")
    until(lambda: world.lease(notebook.kernel_id).lease.used_mib >= 64, "its memory is measured")
    with world.client() as client, pytest.raises(ConflictError, match="CUPTI") as refused:
        client.suspend(world.lease(notebook.kernel_id).lease_id)
    assert refused.value.reason == "not-checkpointable"
    assert "until the kernel restarts" in str(notebook.must("%gpu").data)
    assert notebook.must("print(buffer.read(3))").text == "b'abc'\n"
    notebook.restart()
    until(lambda: world.lease(notebook.kernel_id).lease.unsuspendable_reason == "", "the next process has no profiler")
