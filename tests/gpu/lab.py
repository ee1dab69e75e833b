"""A private broker on the first GPU of this machine, or on a simulated one, with the kernels of one test.

The rules:
- The same tests drive both, and a double of the driver. What differs is here: how large things are, what a cell that uses the device looks
  like, who is a stranger.
- The pool's capacity is eight units on any device: a unit is 1 GiB on hardware, 64 MiB elsewhere.
- It needs only this project, pytest, jupyter_client and ipykernel, and torch in the kernels.
"""

import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fractional_gpu.broker.process.driver_start import simulated_folder
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.gpu.interface import DeviceInfo, Monitor
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.gpu.open import open_monitor
from fractional_gpu.gpu.simulated.host import destroy
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.jupyter.kernelspecs import install
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.status import HostStatus, LeaseStatus
from tests.gpu.cells import Cells, DriverCells, SimulatedCells, TorchCells
from tests.gpu.driver import DOUBLE
from tests.support import faults
from tests.support.paths import PYTHONPATH

__all__ = ["CAPACITY_UNITS", "DEADLINE_S", "Lab", "open_lab", "until", "wait_for_end"]

T = TypeVar("T")

DEADLINE_S = 120.0
CAPACITY_UNITS = 8
_UNIT_MIB, _SMALL_UNIT_MIB = 1024, 64
_CONFIG = """\
c.GPUBroker.devices = [0]
c.GPUBroker.device_overhead = "{overhead}MiB"
c.GPUBroker.pools = {{"default": {{"fractions": "any", "idle_after": "on-demand", "min_residency": "0s", "retry_refused": "0s"}}}}
"""


def until(ask: Callable[[], T | None], what: str, *, longest_pause_s: float = 0.1) -> T:
    """Ask another process again and again until it answers something true. Only for facts that nothing signals."""
    end = time.monotonic() + DEADLINE_S
    pause = 0.002
    while not (answer := ask()):
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause_s)
    return answer


def wait_for_end(pid: int, number: signal.Signals | None = None) -> None:
    """Signal a process, if asked to, and return when it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if number is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        watched = select.poll()
        watched.register(descriptor, select.POLLIN)
        assert watched.poll(DEADLINE_S * 1000), f"process {pid} did not end"
    finally:
        os.close(descriptor)


class Lab:
    """Folders, a broker, its device and kernelspecs. Memory in MiB. Make one with `open_lab`."""

    def __init__(self, folder: Path, device_mib: int | None) -> None:
        """`device_mib`: what the real device holds; None for a simulated one of just the capacity."""
        self.folder = folder
        self.simulated = device_mib is None
        self.double = os.environ.get(DOUBLE, "")  # the folder of a double of the driver
        self.unit_mib = _unit_mib(simulated=self.simulated)
        self.capacity_mib = CAPACITY_UNITS * self.unit_mib
        self.cells: Cells = SimulatedCells() if self.simulated else DriverCells() if self.double else TorchCells()
        self.socket = str(folder / "broker.sock")
        overhead_mib = 0 if device_mib is None else device_mib - self.capacity_mib
        (folder / "config").mkdir(mode=0o700)
        (folder / "config" / "jupyter_gpu_config.py").write_text(_CONFIG.format(overhead=overhead_mib))
        self.environment = self._environment()

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JUPYTER", "IPYTHON", "JPY_"))
            or name in ("JUPYTER_GPU_HARDWARE", "JUPYTER_GPU_RESULTS")
        }
        # A relative entry, as in PYTHONPATH=., would be lost on kernels, which start in other folders.
        paths = [
            *PYTHONPATH.split(os.pathsep),
            *(str(Path(path).absolute()) for path in sys.path if path and Path(path).is_dir()),
        ]
        made = {
            **kept,
            "JUPYTER_DATA_DIR": str(self.folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.folder / "run"),
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_PATH": str(self.folder / "data"),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "JUPYTER_GPU_SOCKET": self.socket,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        if self.simulated:
            made["JUPYTER_GPU_SIMULATE"] = f"1x{self.capacity_mib}MiB"
        return made

    # -- the broker ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def client(self) -> Iterator[BrokerClient]:
        """A client of the broker that runs (it is not started)."""
        with closing(BrokerClient(self.socket, timeout_s=DEADLINE_S)) as client:
            yield client

    def start_broker(self) -> None:
        """Return when a broker serves."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "fractional_gpu.commands.main",
            "broker",
            "--detach",
            "--socket",
            self.socket,
        ]
        done = subprocess.run(command, env=self.environment, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def broker_pid(self) -> int | None:
        """The pid of the broker that serves, if any."""
        with self.client() as client, suppress(BrokerUnavailableError):
            return client.ping().pid
        return None

    def status(self) -> HostStatus:
        """The broker's status of the host."""
        with self.client() as client:
            return client.status()

    def lease(self, kernel_id: str) -> LeaseStatus:
        """The lease of a kernel."""
        (found,) = [lease for lease in self.status().leases if lease.kernel_id == kernel_id]
        return found

    def await_lease(self, kernel_id: str, true: Callable[[LeaseStatus], bool], what: str) -> LeaseStatus:
        """Wait until this is true of the kernel's lease."""

        def ask() -> LeaseStatus | None:
            with suppress(BrokerUnavailableError):
                lease = self.lease(kernel_id)
                return lease if true(lease) else None
            return None

        return until(ask, what)

    def moving(self) -> set[str]:
        """The states of leases that are between the device and the host, from the ledger, whether or not a broker lives."""
        name = "ledger-simulated.sqlite" if self.simulated else "ledger.sqlite"
        (path,) = (self.folder / "state" / "jupyter-gpu").glob(f"*/*/{name}")
        ask = "SELECT json_extract(document, '$.state') FROM leases WHERE ended_ms IS NULL"
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            return {state for (state,) in connection.execute(ask) if state in ("suspending", "resuming")}

    @contextmanager
    def slowed(self, operation: str, milliseconds: int) -> Iterator[None]:
        """Give such operations of a simulated device or a double the time that real ones take anyway."""
        if self.double:
            settings = Path(self.double, "settings")
            before = settings.read_text()
            _replace(settings, f"{before}latency.cuCheckpointProcess{operation.title()}={milliseconds * 1000}\n")
            try:
                yield
            finally:
                _replace(settings, before)
            return
        if not self.simulated:
            yield
            return
        number = faults.inject(simulated_folder(self.socket), operation, f"slow:{milliseconds}")
        try:
            yield
        finally:
            faults.remove(simulated_folder(self.socket), number)

    # -- the device ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def monitor(self) -> Iterator[Monitor]:
        """NVML, or the simulated host's accounts: the device's true state, independent of the broker."""
        with closing(open_monitor(self.backend)) as monitor:
            yield monitor

    @property
    def backend(self) -> str:
        """The backend's name, as for a checkpoint worker."""
        return f"simulated:{simulated_folder(self.socket)}" if self.simulated else "nvidia"

    def device(self) -> DeviceInfo:
        """The device that the broker manages."""
        with self.monitor() as monitor:
            return min(monitor.devices(), key=lambda device: device.index)

    def used_mib(self) -> int:
        """What the device holds, by anybody."""
        with self.monitor() as monitor:
            return monitor.use(self.device().device_id).used_mib

    def used_by(self, *pids: int) -> int:
        """What the device holds for these processes."""
        with self.monitor() as monitor:
            return sum(one.used_mib for one in monitor.use(self.device().device_id).processes if one.pid in pids)

    @contextmanager
    def stranger(self, leave_mib: int) -> Iterator[int]:
        """A process without a lease that holds all that is free on the device but `leave_mib`; yields what it holds."""
        device = self.device()
        mib = device.memory_mib - self.used_mib() - leave_mib - self.cells.stranger_context_mib
        assert mib > 0, "the device is too full already"
        command = self.cells.stranger(self.backend, device.device_id, mib)
        environment = {**self.environment, "CUDA_VISIBLE_DEVICES": device.device_id}
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("holding"), "the stranger did not get its memory"
            yield mib
        finally:
            process.communicate()

    # -- kernels ------------------------------------------------------------------------------------------------------------

    def install(self, memory_units: int) -> str:
        """Install a kernelspec whose kernels may have this many units of device memory, and return its name."""
        directory = self.folder / "data" / "kernels"
        milli = 1000 * memory_units // CAPACITY_UNITS
        (spec,) = install("default", [milli], directory=str(directory), simulated=self.simulated)
        file = spec.folder / "kernel.json"
        content: dict[str, Any] = json.loads(file.read_text())
        content["metadata"]["kernel_provisioner"]["config"]["memory"] = f"{memory_units * self.unit_mib}MiB"
        file.write_text(json.dumps(content))
        return spec.name

    def logs(self) -> dict[str, str]:
        """The end of the broker's logs."""
        files = [self.folder / "broker.log", self.folder / "broker.err"]
        return {file.name: file.read_text(errors="replace")[-20_000:] for file in files if file.exists()}

    def close(self) -> None:
        """Stop the broker and remove everything."""
        pid = self.broker_pid()
        if pid is not None:
            wait_for_end(pid, signal.SIGTERM)
        if self.simulated and simulated_folder(self.socket).exists():
            with suppress(FileNotFoundError):
                until(self._destroyed, "the simulated host has no users")
        shutil.rmtree(self.folder)

    def _destroyed(self) -> bool:
        folder = simulated_folder(self.socket)
        try:
            destroy(folder)
        except SimulatedHostError:
            return not folder.exists()
        return True


@contextmanager
def open_lab(*, simulated: bool) -> Iterator[Lab]:
    """A lab whose broker serves and whose environment is this process's until the block ends."""
    device_mib = None if simulated else _first_device_mib()
    before = dict(os.environ)
    lab = Lab(Path(tempfile.mkdtemp(prefix="jgl-")), device_mib)
    os.environ.clear()
    os.environ.update(lab.environment)
    try:
        lab.start_broker()
        yield lab
    finally:
        try:
            lab.close()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(file)


def _unit_mib(*, simulated: bool) -> int:
    return _SMALL_UNIT_MIB if simulated or os.environ.get(DOUBLE) else _UNIT_MIB


def _first_device_mib() -> int:
    with closing(NvidiaMonitor()) as monitor:
        devices = monitor.devices()
        assert devices, f"no GPU was found: {monitor.why_none}"
        first = min(devices, key=lambda device: device.index)
    assert first.checkpointable, first.why_not
    capacity_mib = CAPACITY_UNITS * _unit_mib(simulated=False)
    assert first.memory_mib > capacity_mib, f"the device holds less than the pool's capacity of {capacity_mib} MiB"
    return first.memory_mib
