"""A world whose broker is in its NVIDIA mode, on a double of the driver's libraries: what its tests start, kill and compare.

Broker, worker, NVIDIA's Python packages, Jupyter and the kernels are real. The kernels call libcuda with ctypes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.status import HostStatus
from tests.driver_double.double import Call, Device, DriverDouble
from tests.driver_double.releases import newest, python_path
from tests.support.victims import anybody, check_books, is_settled, kill_all
from tests.support.world import Notebook, Server, World, new_world, until

__all__ = [
    "CHECK",
    "CONTEXT_MIB",
    "DATA_MIB",
    "DEVICE_MIB",
    "GREEDY",
    "NvidiaMode",
    "Pair",
    "fill",
    "nvidia_mode",
    "run_command",
]

DEVICE_MIB = 1024
CONTEXT_MIB = 16
DATA_MIB = 8
MIB = 1 << 20
CONFIG = """
c.GPUBroker.device_overhead = "64MiB"
policy = {"preempt": "priorities", "idle_after": "on-demand", "min_residency": "0s", "retry_refused": "200ms", "may_move": True}
c.GPUBroker.pools = {"default": policy}
"""
GREEDY = """
import subprocess, sys
child = "from tests.driver_double import device; device.allocate({mib} << 20); print('took it', flush=True); input()"
taker = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(taker.stdout.read() if {waits} else taker.stdout.readline())
"""
CHECK = 'assert buffer.sha256() == digest, "the bytes differ"\nprint("intact")'


def fill(seed: int) -> str:
    """Code that puts `DATA_MIB` of noise on the device as `buffer` and keeps its digest."""
    return f"""
import hashlib, random
from tests.driver_double import device as cuda
data = random.Random({seed}).randbytes({DATA_MIB * MIB})
buffer = cuda.allocate(len(data))
buffer.write(data)
digest = hashlib.sha256(data).hexdigest()
del data
"""


class NvidiaMode:
    """The world, and the double of its driver. Two kernels of `fraction_milli` do not fit on a device together."""

    fraction_milli = 750

    def __init__(self, world: World, devices: Sequence[Device], driver: str) -> None:
        self.world = world
        del world.environment["JUPYTER_GPU_SIMULATE"]
        world.configure(CONFIG)
        self.double = DriverDouble(world.folder / "driver", devices, driver=driver)
        self._driver = driver
        self._serves: tuple[str, int] | None = None
        self.reset()
        given = self.double.environment()
        nvml = python_path("nvidia-ml-py", newest("nvidia-ml-py"))
        paths = (given.pop("PYTHONPATH"), str(nvml), world.environment["PYTHONPATH"])
        world.environment |= {**given, "PYTHONPATH": os.pathsep.join(paths)}

    def serve(self, driver: str, devices: int) -> None:
        """Let a broker serve that many devices of this driver: the one that runs, if it does."""
        if (driver, devices) == self._serves:
            return
        if self._serves is not None:
            self.world.kill_broker()
        if devices != len(self.double.devices):
            self.double.set(devices=[Device(mib=DEVICE_MIB) for _ in range(devices)])
        self._driver = driver
        self.reset()
        self.world.start_broker()
        self._serves = driver, devices

    def reset(self) -> None:
        """Reset the double to its initial behaviour; its devices stay."""
        self.double.clear_faults()
        self.double.reset()
        self.double.set(driver=self._driver, context_mib=CONTEXT_MIB, reserved_mib=0)

    def start(self, server: Server) -> Notebook:
        (name,) = self.world.install(self.fraction_milli)
        return server.start(name)

    def pid(self, notebook: Notebook) -> int:
        pid = self.world.lease(notebook.kernel_id).pid
        assert pid is not None, "the lease has no process"
        return pid

    def suspend(self, notebook: Notebook) -> None:
        """Return when the kernel is suspended. Raises ConflictError with the reason if it is not."""
        with self.world.client() as client:
            client.suspend(self.world.lease(notebook.kernel_id).lease_id)

    def story(self, notebook: Notebook) -> list[str]:
        """Return the kernel's story, the newest sentence last."""
        with self.world.client() as client:
            return [line.sentence for line in client.story(self.world.lease(notebook.kernel_id).lease_id).lines]

    def calls(self, name: str, pid: int | None = None) -> list[Call]:
        """Return the calls of this name that ended, only about one process if its pid is given."""
        called = [call for call in self.double.calls(name) if call.result is not None]
        return [call for call in called if pid is None or call.arguments.get("pid") == str(pid)]

    def state(self, pid: int) -> str:
        """Return the driver's state of a process, "" if it has none."""
        process = self.double.process(pid)
        return process.state if process is not None else ""

    # -- kills ----------------------------------------------------------------------------------------------------------

    def brokers(self) -> list[int]:
        return self._running("fractional_gpu.broker")

    def workers(self) -> list[int]:
        return self._running("fractional_gpu.gpu.worker")

    def _running(self, module: str) -> list[int]:
        found = []
        for pid in anybody(self.world):
            with suppress(OSError):
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    @contextmanager
    def held(self, call: str, *, late: bool) -> Iterator[Callable[[], object]]:
        """Hold up the next such call, before or after (`late`) its effect; yields a function that waits until it is held.

        The call continues when the block ends.
        """
        before = self._hanging(call)
        fault = self.double.hang(call, late=late)
        try:
            yield lambda: until(lambda: self._hanging(call) > before, f"{call} is held up")
        finally:
            fault.unlink()

    def _hanging(self, call: str) -> int:
        return sum(one.result is None for one in self.double.calls(call))

    def settled(self) -> HostStatus:
        """Wait until no operation is under way, and return the status. Fails if status and driver disagree."""

        def ask() -> HostStatus | None:
            with suppress(BrokerUnavailableError):
                status = self.world.status()
                return status if all(is_settled(lease) for lease in status.leases) else None
            return None

        status = until(ask, "every lease is resident, suspended or without a context")
        check_books(status)
        by_pid = {lease.pid: lease.state for lease in status.leases}
        wanted = {"resident": "running", "suspended": "checkpointed"}
        states = {one.pid: one.state for one in self.double.processes() if one.pid in by_pid}
        assert states == {pid: wanted[by_pid[pid]] for pid in states}, (states, by_pid)
        return status


class Pair:
    """Two kernels with data that take turns on one device."""

    def __init__(self, mode: NvidiaMode, server: Server) -> None:
        self.mode = mode
        self.resident, self.suspended = mode.start(server), mode.start(server)
        self.suspended.must(fill(1))
        self.resident.must(fill(2))
        mode.world.await_state(self.suspended.kernel_id, "suspended")

    def begin_turn(self) -> str:
        """Run a cell in the suspended kernel: the other one must make room."""
        return self.suspended.send(CHECK)

    def end_turn(self, cell: str) -> None:
        """Wait for that cell, compare the bytes, and change places."""
        reply = self.suspended.wait(cell)
        assert reply.text == "intact\n", (reply.status, reply.error, reply.text)
        self.resident, self.suspended = self.suspended, self.resident

    def saved(self) -> None:
        """Check that the driver also has one of them saved and the other one running."""
        states = {one.pid: (one.state, one.saved_mib) for one in self.mode.double.processes()}
        assert states[self.mode.pid(self.suspended)] == ("checkpointed", DATA_MIB)
        assert states[self.mode.pid(self.resident)] == ("running", 0)


@contextmanager
def nvidia_mode(*, driver: str = "580", devices: int = 1) -> Iterator[NvidiaMode]:
    with new_world() as world:
        mode = NvidiaMode(world, [Device(mib=DEVICE_MIB) for _ in range(devices)], driver)
        try:
            yield mode
        finally:
            mode.double.clear_faults()
            for pid in mode.brokers():
                world.end(pid, signal.SIGTERM)
            kill_all(mode.workers())


def run_command(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", *words],
        env=world.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
