"""Kernels on devices that cannot be checkpointed still share them, and are never suspended."""

import ast
import subprocess
import sys

import pytest

from fractional_gpu.gpu.simulated.host import create
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import ConflictError
from tests.support.faults import configure
from tests.support.world import Server, World, until

HOLD = "from fractional_gpu.gpu.simulated import cuda; buffer = cuda.allocate(64 << 20); buffer.write(b'abc')"


def without_checkpoints(world: World) -> None:
    create(world.simulated_folder, world.simulate)
    store = Store(world.simulated_folder)
    configure(store, checkpointable=0)
    store.close()


def test_kernels_stay_where_the_driver_cannot_checkpoint_and_the_reason_is_told(world: World, server: Server) -> None:
    without_checkpoints(world)
    (name,) = world.install(750)
    first, second = server.start(name), server.start(name)
    first.must(HOLD)
    lease = until(lambda: _used(world, first.kernel_id), "its memory is measured")
    reason = "the simulated driver was told that it cannot checkpoint"
    assert world.lease(first.kernel_id).lease.unsuspendable_reason == reason
    with world.client() as client, pytest.raises(ConflictError, match=reason) as refused:
        client.suspend(lease)
    assert refused.value.reason == "not-checkpointable"
    assert reason in str(first.must("%gpu").data)

    waiting = second.send(HOLD)
    said = until(lambda: _reason(world, second.kernel_id), "the second one says why it waits")
    assert said == "wait.cannot-be-suspended"
    first.shut_down()
    assert second.wait(waiting).status == "ok"
    assert (world.lease(second.kernel_id).suspends, world.lease(second.kernel_id).resumes) == (0, 0)


def _used(world: World, kernel_id: str) -> str:
    lease = world.lease(kernel_id)
    return lease.lease_id if lease.lease.used_mib >= 64 else ""


def _reason(world: World, kernel_id: str) -> str:
    lease = world.lease(kernel_id)
    return lease.reason if lease.reason == "wait.cannot-be-suspended" else ""


def test_a_pool_that_shares_through_mps_limits_its_kernels_and_suspends_none(world: World, server: Server) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'sharing': 'mps', 'idle_after': 0}}")
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD)
    said = notebook.must("import os; print({name: os.environ[name] for name in os.environ if 'MPS' in name})").text
    limit = f"{world.lease(notebook.kernel_id).lease.device_id}=256M"
    assert ast.literal_eval(said) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limit,
    }
    lease = until(lambda: _used(world, notebook.kernel_id), "its memory is measured")
    assert "MPS" in world.lease(notebook.kernel_id).lease.unsuspendable_reason
    with world.client() as client, pytest.raises(ConflictError, match="MPS"):
        client.suspend(lease)
    assert world.lease(notebook.kernel_id).suspends == 0


def test_a_broker_that_is_to_preload_what_is_not_there_does_not_start(world: World) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'hami_library': '/nowhere/libvgpu.so'}}")
    argv = [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--detach", "--socket", world.socket]
    started = subprocess.run(argv, env=world.environment, capture_output=True, text=True, check=False)
    assert started.returncode == 1
    assert "'/nowhere/libvgpu.so', which does not exist: install HAMi-core" in started.stderr
