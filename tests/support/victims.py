"""Who can be killed in a world, and what must be true of it when the dust has settled."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fractional_gpu.gpu.simulated.processes import OPEN, processes_of, read_gate
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.status import HostStatus, LeaseStatus
from tests.support import faults
from tests.support.world import World, until

__all__ = [
    "anybody",
    "await_held",
    "brokers",
    "is_held",
    "is_settled",
    "kill_all",
    "new_broker",
    "released",
    "runs_without_gpu",
    "settled",
    "stopped_or_traced",
    "wait_for_end",
    "workers",
]


def brokers(world: World) -> list[int]:
    """Return the pids of the world's brokers, including those that are starting or ending."""
    return _with_words("fractional_gpu.broker", world.socket)


def workers(world: World) -> list[int]:
    """Return the pids of the checkpoint workers that live on the world's simulated GPUs."""
    return _with_words("fractional_gpu.gpu.worker", f"simulated:{world.simulated_folder}")


def anybody(world: World) -> list[int]:
    """Return the pids of everything that was started with the world's socket in its environment."""
    return [
        pid for pid in _pids() if f"JUPYTER_GPU_SOCKET={world.socket}".encode() in _read(pid, "environ").split(b"\0")
    ]


def runs_without_gpu(world: World, kernel_id: str) -> bool:
    """Whether the kernel has a process that was started without a GPU."""
    return any(
        word.startswith(b"JUPYTER_GPU_NOTICE=")
        for pid in _with_words(f"kernel-{kernel_id}.json", str(world.folder))
        for word in _read(pid, "environ").split(b"\0")
    )


def _with_words(*words: str) -> list[int]:
    return [pid for pid in _pids() if all(word.encode() in _read(pid, "cmdline") for word in words)]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    """Return a file of the process, empty for one that is gone, a zombie or not ours."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def kill_all(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Signal all of them before waiting for any, so that none sees another one end."""
    descriptors = []
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
            os.kill(pid, number)
    for descriptor in descriptors:
        wait_for_end(descriptor)


def wait_for_end(descriptor: int) -> None:
    """Wait until the process behind a pidfd has ended, and close it."""
    ready, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    assert ready, "a killed process did not end"


def new_broker(world: World, old: int | None) -> int:
    """Wait until a broker serves that is not the old one, and return its pid."""

    def ask() -> int | None:
        pid = world.broker_pid()
        return pid if pid not in (None, old) else None

    return until(ask, "a new broker serves")


@contextmanager
def stopped_or_traced(world: World, operation: str, fault: str) -> Iterator[None]:
    """Hold up the next such operation by the fault; it continues when the block ends."""
    number = faults.inject(world.simulated_folder, operation, fault)
    try:
        yield
    finally:
        faults.remove(world.simulated_folder, number)


def await_held(world: World) -> None:
    """Wait until a fault holds an operation up."""
    until(lambda: is_held(world), "the operation is held up")


def is_held(world: World) -> bool:
    return any(fault.taken for fault in faults.listed(world.simulated_folder))


def settled(world: World) -> HostStatus:
    """Wait until no operation is under way, and return the status. Fails if status and driver disagree."""

    def ask() -> HostStatus | None:
        with suppress(BrokerUnavailableError):
            status = world.status()
            return status if all(is_settled(lease) for lease in status.leases) else None
        return None

    status = until(ask, "every lease is resident, suspended, unarmed or without a process")
    check_books(status)
    check_driver(world, status)
    return status


def is_settled(lease: LeaseStatus) -> bool:
    """Whether the lease has no operation and no unknown state."""
    return lease.state in ("resident", "suspended", "unarmed", "unattached")


def check_books(status: HostStatus) -> None:
    """Exactly the resident leases have reservations, and they fit."""
    for device in status.devices:
        mine = [
            lease for lease in status.leases if lease.lease.device_id == device.device_id and lease.state == "resident"
        ]
        assert device.reserved_mib == sum(lease.spec.reserve_mib for lease in mine), (device, mine)
        assert not device.over_committed, (device, status.leases)


def check_driver(world: World, status: HostStatus) -> None:
    """Nothing is locked, and a process is saved exactly if its lease is suspended."""
    store = Store(world.simulated_folder)
    try:
        states = {lease.lease_id: lease.state for lease in status.leases}
        for process in processes_of(store):
            if process.lease not in states or not Path(f"/proc/{process.pid}").exists():
                continue  # its process is dying or dead, and so its context
            state = states[process.lease]
            expected = {"suspended": "saved", "resident": "device"}
            assert process.phase == expected.get(state), f"the driver says {process.phase} of a {state} lease"
            gate = read_gate(store.process_folder(process.key))
            assert (gate == OPEN) == (state == "resident"), f"gate {gate!r} of a {state} lease"
    finally:
        store.close()


def released(world: World) -> bool:
    """Whether no lease and no reservation is left."""
    try:
        status = world.status()
    except FractionalGPUError:
        return False
    return not status.leases and all(device.reserved_mib == 0 for device in status.devices)
