"""The broker's provisioner behaves as jupyter_client expects, with any kernel manager."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.multikernelmanager import AsyncMultiKernelManager

from fractional_gpu.protocol.status import LeaseStatus
from tests.support.managed import client_of, entered, must
from tests.support.stories import CHECK, SLEEPS, fill
from tests.support.world import DEADLINE_S, World, new_world

MANY = 2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One broker for all tests of this file."""
    with new_world() as made:
        yield made


@pytest.fixture
def name(world: World) -> Iterator[str]:
    (installed,) = world.install(750)
    with entered(world):
        yield installed


def only_lease(world: World) -> LeaseStatus:
    (lease,) = world.status().leases
    return lease


def assert_nothing_is_left(world: World) -> None:
    status = world.status()
    assert status.leases == []
    assert [device.reserved_mib for device in status.devices] == [0]
    assert status.host_saved_mib == 0
    assert list(world.folder.rglob("*.token")) == []


def test_a_kernel_is_started_interrupted_restarted_and_shut_down(world: World, name: str) -> None:
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    with client_of(manager) as client:
        must(client, fill(1))
        first = only_lease(world)
        assert (first.state, first.kernel_id, first.gated) == ("resident", manager.kernel_id, True)
        # without stop_on_error: ipykernel aborts requests that come just after a failed cell's reply
        code = f"print('sleeps', flush=True)\n{SLEEPS}"
        client.execute(code, store_history=False, stop_on_error=False)
        while client.get_iopub_msg(timeout=DEADLINE_S)["content"].get("text") != "sleeps\n":
            pass
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=DEADLINE_S)["content"]["ename"] == "KeyboardInterrupt"
        assert must(client, CHECK) == "intact\n"
    manager.restart_kernel()
    with client_of(manager) as client:
        second = only_lease(world)
        assert (second.lease_id, second.state) == (first.lease_id, "unarmed")
        assert second.pid != first.pid
        must(client, fill(2))
        assert must(client, CHECK) == "intact\n"
    manager.shutdown_kernel()
    assert_nothing_is_left(world)
    manager.cleanup_resources()  # twice, as some callers do
    assert_nothing_is_left(world)


async def test_many_kernels_of_one_async_manager_start_restart_and_end_at_the_same_time(
    world: World, name: str
) -> None:
    managers = AsyncMultiKernelManager()
    ids = await asyncio.gather(*(managers.start_kernel(kernel_name=name) for _ in range(MANY)))
    try:
        leases = {kernel_id: (await asyncio.to_thread(world.lease, kernel_id)).lease_id for kernel_id in ids}
        assert len(set(leases.values())) == MANY
        await asyncio.gather(*(tell(managers.get_kernel(kernel_id), fill(seed)) for seed, kernel_id in enumerate(ids)))
        await asyncio.gather(*(tell(managers.get_kernel(kernel_id), CHECK) for kernel_id in ids))
        await asyncio.gather(*(managers.restart_kernel(kernel_id) for kernel_id in ids))
        for kernel_id in ids:
            assert (await asyncio.to_thread(world.lease, kernel_id)).lease_id == leases[kernel_id]
        await asyncio.gather(*(tell(managers.get_kernel(kernel_id), fill(seed)) for seed, kernel_id in enumerate(ids)))
    finally:
        await managers.shutdown_all(now=True)
    await asyncio.to_thread(assert_nothing_is_left, world)


async def tell(manager: KernelManager, code: str) -> None:
    assert isinstance(manager, AsyncKernelManager)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=DEADLINE_S)
        reply = await client.execute_interactive(code, timeout=DEADLINE_S, output_hook=lambda _message: None)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()


def test_a_kernel_shut_down_while_it_waits_or_right_after_its_start_leaves_nothing(world: World, name: str) -> None:
    resident, waiter = KernelManager(kernel_name=name), KernelManager(kernel_name=name)
    resident.start_kernel()
    try:
        with client_of(resident) as client:
            must(client, fill(1))
            waiter.start_kernel()
            waiter.shutdown_kernel(now=True)
            waiter = KernelManager(kernel_name=name)
            waiter.start_kernel()
            pid = world.lease(waiter.kernel_id).pid
            waiter.shutdown_kernel()
            assert not Path(f"/proc/{pid}").exists()
            assert must(client, CHECK) == "intact\n"
    finally:
        resident.shutdown_kernel(now=True)
    assert_nothing_is_left(world)
