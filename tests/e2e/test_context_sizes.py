"""A device with larger contexts than assumed: the first kernel teaches the broker, and honest kernels stay within their caps."""

import signal

import pytest

from fractional_gpu.gpu.simulated.store import Store
from tests.support.faults import configure
from tests.support.packages import write
from tests.support.world import Notebook, Server, World

CONTEXT_MIB = 700
CAP_MIB = 1024
SLACK_MIB = 16  # a breach is more than this over the cap

# As much of torch as its allocator's limit needs, on the simulated device. A driver knows no cap, so it is hidden
# from the device.
TORCH = """
import os
from fractional_gpu.gpu.simulated import cuda as device
class OutOfMemoryError(RuntimeError): pass
class cuda:
    held, fraction, queued, initialized = [], 1.0, [], False
    @staticmethod
    def _lazy_call(call): (call() if cuda.initialized else cuda.queued.append(call))
    @staticmethod
    def is_initialized(): return cuda.initialized
    @staticmethod
    def init():
        if not cuda.initialized:
            cuda.initialized = True
            for call in cuda.queued: call()
    @staticmethod
    def device_count(): return 1
    @staticmethod
    def get_allocator_backend(): return "native"
    @staticmethod
    def get_device_properties(index):
        import types; return types.SimpleNamespace(total_memory=device.memory_info()[1])
    @staticmethod
    def set_per_process_memory_fraction(fraction, index): cuda.fraction = fraction
    @staticmethod
    def memory_reserved(index=0): return sum(size for size, _ in cuda.held)
    @staticmethod
    def empty_cache(): pass
def allocate(mib):
    cuda.init()
    if cuda.memory_reserved() + (mib << 20) > cuda.fraction * device.memory_info()[1]: raise OutOfMemoryError(mib)
    cap = os.environ.pop("JUPYTER_GPU_MEMORY_MIB")
    try: cuda.held.append((mib << 20, device.allocate(mib << 20)))
    finally: os.environ["JUPYTER_GPU_MEMORY_MIB"] = cap
def fill():
    while True:
        try: allocate(16)
        except OutOfMemoryError: break
"""
FILL = "import torch; torch.fill()"


@pytest.fixture
def world(world: World) -> World:
    write(world.notebooks, {"torch.py": TORCH})
    world.start_broker("1x8GiB")
    store = Store(world.simulated_folder)
    configure(store, context_mib=CONTEXT_MIB)
    store.close()
    return world


def filled(world: World, notebook: Notebook) -> int:
    notebook.must(FILL)
    with world.client() as client:  # again: the broker's last sample may be from before it was full
        leases = client.status(fresh=True).leases
    return next(lease.lease.used_mib for lease in leases if lease.kernel_id == notebook.kernel_id)


def test_the_next_kernels_leave_room_for_what_the_first_one_s_context_took(world: World, server: Server) -> None:
    (name,) = world.install(125)
    first = server.start(name)
    assert world.lease(first.kernel_id).spec.reserve_mib == CAP_MIB
    assert filled(world, first) == CONTEXT_MIB + CAP_MIB - 512, "more than its cap: 512 MiB were assumed"
    with world.client() as client:
        client.suspend(world.lease(first.kernel_id).lease_id)
    world.await_state(first.kernel_id, "suspended")

    second = server.start(name)
    assert CONTEXT_MIB < filled(world, second) <= CAP_MIB + SLACK_MIB
    assert second.must("import os; print(os.environ['JUPYTER_GPU_CONTEXT_MIB'])").text == "704\n"

    pid = world.broker_pid()
    assert pid is not None
    world.end(pid, signal.SIGTERM)
    world.start_broker()
    third = server.start(name)
    assert CONTEXT_MIB < filled(world, third) <= CAP_MIB + SLACK_MIB, "the next broker knows it, too"
