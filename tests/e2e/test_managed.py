"""A kernel that uses managed memory stays on its device: no checkpoint is tried, and it survives requests to suspend it."""

import pytest

from fractional_gpu.protocol.errors import ConflictError
from tests.support.packages import CUPY, write
from tests.support.world import Server, World, until

REASON = "it uses CuPy's managed memory, which the driver cannot save"
HOLD = "from fractional_gpu.gpu.simulated import cuda; buffer = cuda.allocate(64 << 20); buffer.write(b'abc')"


def test_managed_memory_that_the_extension_sees_is_refused_and_survives(world: World, server: Server) -> None:
    write(world.notebooks, CUPY)  # what a kernel finds next to its notebook
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
    until(
        lambda: world.lease(notebook.kernel_id).lease.unsuspendable_reason == REASON, "the next broker knows the reason"
    )
    notebook.restart()
    until(lambda: world.lease(notebook.kernel_id).lease.unsuspendable_reason == "", "the next process is another one")
