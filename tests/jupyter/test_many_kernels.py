"""Kernels in parallel, in threads, under the managers that servers use; and kernels that die and are started again."""

import asyncio
import concurrent.futures
import os
import signal
from collections.abc import Callable

import pytest
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from jupyter_client.manager import KernelManager
from jupyter_client.multikernelmanager import AsyncMultiKernelManager, MultiKernelManager

from fractional_gpu.protocol.errors import NoRoomError
from tests.jupyter.conftest import Places
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import KERNEL_DEADLINE_S


async def happens(broker: FakeBroker, condition: Callable[[], object]) -> None:
    """Wait for something that the broker sees, while the event loop (and the restarter in it) runs on."""
    await asyncio.to_thread(broker.wait_for, condition)


async def is_ready(manager: KernelManager) -> None:
    ready = manager.ready
    await (asyncio.wrap_future(ready) if isinstance(ready, concurrent.futures.Future) else ready)


async def test_kernels_started_at_once_have_a_lease_each(places: Places, broker: FakeBroker) -> None:
    name = places.write_gpu_spec()
    manager = AsyncMultiKernelManager()
    ids = await asyncio.gather(*(manager.start_kernel(kernel_name=name) for _ in range(4)))
    assert {lease.request["kernel_id"] for lease in broker.leases.values()} == set(ids)
    assert len({lease.attach["pid"] for lease in broker.leases.values()}) == 4
    await manager.shutdown_all(now=True)
    assert [lease.state for lease in broker.leases.values()] == ["ended"] * 4


def test_a_failed_start_leaves_no_kernel_in_the_servers_list(places: Places, broker: FakeBroker) -> None:
    broker.fail["create"] = NoRoomError("nothing is free")
    manager = MultiKernelManager()
    with pytest.raises(NoRoomError, match="nothing is free"):
        manager.start_kernel(kernel_name=places.write_gpu_spec())
    assert manager.list_kernel_ids() == []


async def test_with_pending_kernels_the_error_waits_in_ready(places: Places, broker: FakeBroker) -> None:
    broker.fail["create"] = NoRoomError("nothing is free")
    manager = AsyncMultiKernelManager(use_pending_kernels=True)
    kernel_id = await manager.start_kernel(kernel_name=places.write_gpu_spec())
    with pytest.raises(NoRoomError, match="nothing is free"):
        await is_ready(manager.get_kernel(kernel_id))


async def started(name: str) -> AsyncIOLoopKernelManager:
    manager = AsyncIOLoopKernelManager(kernel_name=name)
    await manager.start_kernel()
    restarter = manager._restarter
    restarter.stop()
    restarter.time_to_dead = 0.1
    restarter._pcallback = None
    restarter.start()
    return manager


async def test_a_kernel_that_dies_while_there_is_no_room_comes_back_without(places: Places, broker: FakeBroker) -> None:
    manager = await started(places.write_gpu_spec())
    lease = broker.leases["lease-1"]
    pid, lease.state = lease.attach["pid"], "ended"
    broker.fail["create"] = NoRoomError("nothing is free")
    os.kill(pid, signal.SIGKILL)
    await happens(broker, lambda: broker.routes().count("create") == 2)
    await is_ready(manager)
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=KERNEL_DEADLINE_S)
    client.stop_channels()
    assert await manager.is_alive()
    await manager.shutdown_kernel(now=True)
