"""Kernels on UNIX sockets: the broker reads their messages as it does over TCP, and they take turns like other kernels."""

from collections.abc import Iterator

import pytest
from jupyter_client.manager import KernelManager

from fractional_gpu.protocol.errors import FractionalGPUError
from tests.support.managed import client_of, entered, must
from tests.support.stories import CHECK, fill
from tests.support.world import World, new_world, until

pytestmark = pytest.mark.promise("other-programs")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One broker for all tests of this file."""
    with new_world() as made:
        yield made


@pytest.fixture
def name(world: World) -> str:
    (installed,) = world.install(750)
    return installed


def test_a_kernel_that_listens_on_all_addresses_starts_and_is_heard(world: World, name: str) -> None:
    with entered(world):
        manager = KernelManager(kernel_name=name, ip="0.0.0.0")  # noqa: S104 - what a container's image sets
        manager.start_kernel(cwd=str(world.notebooks))
        try:
            with client_of(manager) as client:
                must(client, fill(1))
                until(
                    lambda: not any(lease.busy for lease in world.status().leases), "the broker hears that it is idle"
                )
                assert must(client, CHECK) == "intact\n"
        finally:
            manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("ip", ["beside-the-connection-file", "relative"])
def test_two_kernels_on_unix_sockets_take_turns_and_restart(world: World, name: str, ip: str) -> None:
    with entered(world):
        managers = [KernelManager(kernel_name=name, transport="ipc") for _ in range(2)]
        for number, manager in enumerate(managers):
            manager.connection_file = str(world.folder / "run" / f"kernel-{number}.json")
            if ip == "relative":
                manager.ip = f"sockets-{number}"
        try:
            for manager in managers:
                manager.start_kernel(cwd=str(world.folder / "run") if ip == "relative" else str(world.notebooks))
                if ip == "relative":  # jupyter_client takes it from its own folder
                    manager.ip = str(world.folder / "run" / manager.ip)
            for number, manager in enumerate(managers):
                with client_of(manager) as client:
                    must(client, fill(number))
            for manager in managers:
                with client_of(manager) as client:
                    assert must(client, CHECK) == "intact\n"
            assert sorted(lease.state for lease in world.status().leases) == ["resident", "suspended"]
            until(lambda: not any(lease.busy for lease in world.status().leases), "the broker hears that they are idle")
            managers[0].restart_kernel()
            with client_of(managers[0]) as client:
                must(client, fill(3))
                assert must(client, CHECK) == "intact\n"
        finally:
            for manager in managers:
                manager.shutdown_kernel(now=True)
        until(lambda: world.status().leases == [], "no lease is left")


def test_sockets_where_others_could_put_theirs_are_refused_and_no_kernel_stays(world: World, name: str) -> None:
    (world.notebooks / "everybodys").mkdir()
    (world.notebooks / "everybodys").chmod(0o1777)
    with entered(world):
        manager = KernelManager(kernel_name=name, transport="ipc", ip=str(world.notebooks / "everybodys" / "kernel"))
        with pytest.raises(FractionalGPUError, match="can be written to by other users"):
            manager.start_kernel(cwd=str(world.notebooks))
        manager.cleanup_resources()
        assert not manager.has_kernel or not manager.is_alive()
    assert world.status().leases == []
