"""A kernel holds its ports from their choice to its end: no other process gets one in the meantime, and all are free afterwards."""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
from jupyter_client.connect import KernelConnectionInfo, LocalPortCache
from jupyter_client.manager import AsyncKernelManager, KernelManager

from fractional_gpu.jupyter import kernel_process
from fractional_gpu.jupyter.kernel_process import KernelPorts
from fractional_gpu.jupyter.kernel_record import RecordFile
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.errors import FractionalGPUError, NoRoomError
from tests.jupyter.conftest import Places
from tests.jupyter.test_many_kernels import happens, is_ready, started
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import KERNEL_DEADLINE_S, evaluate, running_kernel, talking_to
from tests.support.paths import PYTHONPATH
from tests.support.robber import rob

pytestmark = pytest.mark.promise("ports")

LOG = logging.getLogger(__name__)


@pytest.fixture
def thefts(places: Places) -> Path:
    return places.work / "thefts"


@pytest.fixture
def robbed(places: Places, broker: FakeBroker, thefts: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    assert broker.leases == {}
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    return places.write_gpu_spec(
        "robbed", [sys.executable, "-m", "tests.support.robbed_kernel", "{connection_file}", str(thefts)]
    )


def held_here(ports: list[int]) -> list[int]:
    found = []
    for name in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # no socket, or closed by now
            one = socket.socket(fileno=int(name.name))
            try:
                if one.family == socket.AF_INET and one.getsockname()[1] in ports:
                    found.append(one.getsockname()[1])
            finally:
                one.detach()
    return sorted(found)


def is_over(ports: list[int]) -> bool:
    return not held_here(ports) and not LocalPortCache.instance().currently_used_ports.intersection(ports)


def lines(thefts: Path) -> list[object]:
    return [json.loads(line) for line in thefts.read_text().splitlines()]


@pytest.mark.parametrize("now", [False, True], ids=["politely", "now"])
def test_no_other_process_gets_a_kernels_ports_before_it_listens_also_at_a_restart(
    robbed: str, thefts: Path, now: bool
) -> None:
    with running_kernel(robbed) as manager:
        with talking_to(manager) as client:
            client.execute("1", reply=True, timeout=KERNEL_DEADLINE_S)
        ports = manager.ports
        assert len(set(ports)) == 5
        manager.restart_kernel(now=now)
        assert manager.ports == ports
        with talking_to(manager) as client:
            client.execute("1", reply=True, timeout=KERNEL_DEADLINE_S)
        assert held_here(ports) == sorted(ports)
        assert lines(thefts) == [[], []]
    assert is_over(ports)


async def test_a_kernel_that_dies_finds_its_ports_when_the_server_starts_it_again(
    robbed: str, thefts: Path, broker: FakeBroker
) -> None:
    manager = await started(robbed)
    ports = manager.ports
    pid = broker.leases["lease-1"].attach["pid"]
    os.kill(pid, signal.SIGKILL)
    await happens(broker, lambda: any(lease.attach.get("pid", pid) != pid for lease in broker.leases.values()))
    await is_ready(manager)
    assert manager.ports == ports
    assert await answers(manager)
    assert lines(thefts)[-1] == []
    await manager.shutdown_kernel(now=True)
    assert is_over(ports)


async def test_a_kernel_that_is_started_no_more_lets_its_ports_and_its_lease_go(
    robbed: str, broker: FakeBroker
) -> None:
    manager = await started(robbed)
    ports = manager.ports
    dead = asyncio.Event()
    manager.add_restart_callback(dead.set, "dead")
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = ["/bin/false"]
    os.kill(broker.leases["lease-1"].attach["pid"], signal.SIGKILL)
    await dead.wait()
    assert held_here(ports) == []  # the server forgets it now, and cleans nothing up
    await happens(broker, lambda: {lease.state for lease in broker.leases.values()} == {"ended"})
    await manager.shutdown_kernel(now=True)
    assert is_over(ports)


async def answers(manager: AsyncKernelManager) -> bool:
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=KERNEL_DEADLINE_S)
    client.stop_channels()
    return True


async def test_a_kernel_of_an_earlier_server_has_its_ports_held_from_its_next_start_on(
    robbed: str, thefts: Path, places: Places
) -> None:
    manager = AsyncKernelManager(kernel_name=robbed)
    await manager.start_kernel()
    assert await answers(manager)
    ports, first = manager.ports, manager.provisioner
    assert isinstance(first, FractionalGPUProvisioner)
    info, process = await first.get_provisioner_info(), first.process
    assert process is not None
    first.leave_to_next_server()
    assert is_over(ports)
    second = FractionalGPUProvisioner(kernel_id=first.kernel_id, kernel_spec=first.kernel_spec, parent=manager)
    record = RecordFile(places.work / "record", -1)
    second.take_over(info, manager.get_connection_info(), record)
    manager.provisioner = second
    assert held_here(ports) == []  # the kernel listens: they can be neither taken nor held
    assert LocalPortCache.instance().currently_used_ports.issuperset(ports)
    await manager.restart_kernel(now=True)
    assert process.wait() == -signal.SIGKILL
    assert manager.ports == ports
    assert held_here(ports) == sorted(ports)
    assert await answers(manager)
    await manager.shutdown_kernel(now=True)
    assert lines(thefts) == [[], []]
    assert is_over(ports)


def test_a_taken_over_kernel_is_started_on_its_port_even_if_that_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, ports = KernelManager(), KernelPorts(LOG)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        connection: KernelConnectionInfo = {"shell_port": taken}
        manager.shell_port = taken
        ports.adopt(connection)
        assert ports.secure(manager)
        assert manager.shell_port == taken  # its clients know no other
    assert f"Could not hold port {taken} of kernel" in caplog.text
    ports.release()


@pytest.mark.parametrize("ip", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - one of the addresses a kernel may have
def test_a_held_port_is_not_handed_out_and_refuses_connections(ip: str) -> None:
    manager, ports = KernelManager(ip=ip), KernelPorts(LOG)
    assert ports.secure(manager)
    assert rob("127.0.0.1", manager.ports) == []
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", manager.shell_port)) != 0
    assert not any(os.get_inheritable(one.fileno()) for one in ports._held.values() if one is not None)
    ports.release()
    ports.release()
    thieves = rob("127.0.0.1", manager.ports)
    assert [thief.getsockname()[1] for thief in thieves] == manager.ports  # so it can be seen when one is not held
    for thief in thieves:
        thief.close()


_CHOOSE = """
import logging, sys
from jupyter_client.manager import KernelManager
from fractional_gpu.jupyter.kernel_process import KernelPorts
kept = [(KernelManager(), KernelPorts(logging.getLogger())) for _ in range(100)]
print("ready", flush=True)
sys.stdin.readline()
for manager, ports in kept:
    assert ports.secure(manager)
print(*[port for manager, _ in kept for port in manager.ports], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["subprocess.Popen[str]"]]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    with ExitStack() as stack:
        command = [sys.executable, "-c", _CHOOSE]
        yield [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(3)
        ]


def test_servers_that_choose_at_once_never_share_a_port(servers: list["subprocess.Popen[str]"]) -> None:
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("\n")
        server.stdin.flush()
    chosen = [port for server in servers if server.stdout is not None for port in server.stdout.readline().split()]
    assert len(chosen) == 1500
    assert len(set(chosen)) == 1500


def test_a_port_that_jupyter_promised_to_another_kernel_of_this_server_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[socket.socket] = []
    promised: set[int] = set()
    bound = kernel_process._bound

    def watched(ip: str, port: int) -> socket.socket:
        found.append(bound(ip, port))
        if len(found) == 1:  # the first that is found is another's
            promised.add(found[0].getsockname()[1])
            LocalPortCache.instance().currently_used_ports.update(promised)
        return found[-1]

    manager, ports = KernelManager(), KernelPorts(LOG)
    monkeypatch.setattr(kernel_process, "_can_listen_on_held", lambda _ip: True)
    monkeypatch.setattr(kernel_process, "_bound", watched)
    assert ports.secure(manager)
    assert not promised.intersection(manager.ports)
    assert found[0].fileno() == -1
    ports.release()
    assert LocalPortCache.instance().currently_used_ports.issuperset(promised)
    LocalPortCache.instance().currently_used_ports.difference_update(promised)


def test_a_port_that_was_asked_for_is_the_kernels(places: Places, broker: FakeBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = server.getsockname()[1]
    manager = KernelManager(kernel_name=places.write_gpu_spec(), shell_port=wanted)
    manager.start_kernel()
    try:
        assert manager.shell_port == wanted
        assert broker.only_lease()[1].attach["connection"]["shell_port"] == wanted
        others = [port for port in manager.ports if port != wanted]
        assert held_here(manager.ports) == sorted(others)
        with talking_to(manager) as client:
            assert evaluate(client, "1 + 1") == "2"
    finally:
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize(
    "manager", [KernelManager(transport="ipc"), KernelManager(cache_ports=False), KernelManager(ip="192.0.2.1")]
)
def test_other_transports_addresses_and_managers_that_reserve_nothing_are_left_alone(manager: KernelManager) -> None:
    assert not KernelPorts(LOG).secure(manager)
    assert manager.ports == [0] * 5


def test_where_a_held_port_cannot_be_listened_on_jupyter_chooses(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_KEEPALIVE)
    kernel_process._can_listen_on_held.cache_clear()
    try:
        with running_kernel(places.write_gpu_spec()) as manager, talking_to(manager) as client:
            assert evaluate(client, "1 + 1") == "2"
            assert held_here(manager.ports) == []
            assert broker.only_lease()[1].attach["connection"]["shell_port"] == manager.shell_port
        assert is_over(manager.ports)
    finally:
        kernel_process._can_listen_on_held.cache_clear()


def test_a_manager_that_restarts_has_its_ports_again_or_others_if_they_are_taken(robbed: str, thefts: Path) -> None:
    with zmq.Context() as context:
        manager = KernelManager(kernel_name=robbed, context=context)
        manager.start_kernel()
        first = manager.ports
        manager.shutdown_kernel(now=True)
        assert is_over(first)
        with socket.socket() as other:  # the port of the heartbeat, to which no client has connected
            other.bind(("127.0.0.1", manager.hb_port))
            manager.start_kernel()
            assert [port for port in manager.ports if port not in first] == [manager.hb_port]
            with talking_to(manager) as client:
                client.execute("1", reply=True, timeout=KERNEL_DEADLINE_S)
        manager.shutdown_kernel(now=True)
    assert lines(thefts)[-1] == []
    assert is_over(manager.ports)


def refused(manager: KernelManager, broker: FakeBroker) -> type[Exception]:
    assert manager.kernel_name
    broker.fail["attach"] = NoRoomError("nothing is free")
    return NoRoomError


def unwritable(manager: KernelManager, broker: FakeBroker) -> type[Exception]:
    del broker
    manager.connection_file = "/nowhere/kernel.json"
    return OSError


def missing(manager: KernelManager, broker: FakeBroker) -> type[Exception]:
    del broker
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = ["/nowhere/kernel"]
    return FileNotFoundError


def ends(manager: KernelManager, broker: FakeBroker) -> type[Exception]:
    broker.fail["attach"] = FractionalGPUError("it is not there")
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = ["/bin/false"]
    return FractionalGPUError


def test_failed_first_starts_leave_no_port_behind_and_the_next_one_succeeds(places: Places, broker: FakeBroker) -> None:
    name = places.write_gpu_spec()
    for fails in (refused, unwritable, missing, ends):
        manager = KernelManager(kernel_name=name)
        with pytest.raises(fails(manager, broker)):
            manager.start_kernel()
        assert all(manager.ports), fails
        assert is_over(manager.ports), fails
        manager.shutdown_kernel(now=True)  # as some clients do after a failed start
        broker.fail.clear()
    with running_kernel(name) as another, talking_to(another) as client:
        assert evaluate(client, "1 + 1") == "2"


def test_a_manager_that_is_forgotten_lets_its_ports_go() -> None:
    manager, ports = KernelManager(), KernelPorts(LOG)
    assert ports.secure(manager)
    chosen = manager.ports
    assert held_here(chosen) == sorted(chosen)
    del ports
    gc.collect()
    assert is_over(chosen)
