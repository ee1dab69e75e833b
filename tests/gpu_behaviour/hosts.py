"""What the tests of a device's behaviour run against.

The simulated device, the product's NVIDIA classes over the driver's double, and a kind of device that another package offers.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest.mock import patch

from fractional_gpu.gpu.interface import Checkpointer, GPUErrorCode, Monitor, ProcessState
from fractional_gpu.gpu.open import open_checkpointer, open_monitor
from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.processes import current_key, read_gate
from fractional_gpu.gpu.simulated.store import Store
from tests.driver_double.double import Device, DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import (
    MIB,
    KernelProcess,
    WorkerProcess,
    backend_worker,
    eventually,
    in_flight,
    worker_process,
)
from tests.gpu_sim.kernels import Kernel as SimulatedKernel
from tests.support import faults

__all__ = ["CONTEXT_MIB", "DEVICE_MIB", "DoubleHost", "Host", "OutsideDevices", "SimulatedDevices"]

DEVICE_MIB: Final = 256
CONTEXT_MIB: Final = 32
_CALLS: Final = {
    "state": "cuCheckpointProcessGetState",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
    "sensors": "nvmlDeviceGetTotalEnergyConsumption",
}
_NUMBERS: Final = {
    GPUErrorCode.OPERATING_SYSTEM: 304,
    GPUErrorCode.NOT_PERMITTED: 800,
    GPUErrorCode.NOT_SUPPORTED: 801,
    GPUErrorCode.UNKNOWN: 999,
}


class Host(ABC):
    """Devices of DEVICE_MIB (two alike, unless told otherwise), on which a context takes CONTEXT_MIB."""

    devices: list[str]
    checkpointer: Checkpointer
    monitor: Monitor
    backend: str  # as the worker's --backend
    unlike_devices: GPUErrorCode  # what a restore onto an unlike device answers
    failed_process: str  # what calls of a process say whose restore did not fit
    out_of_memory: str  # what they say on a full device

    @abstractmethod
    def kernel(self, device: int = 0) -> KernelProcess:
        """Start a process that is bound to a device and has no context yet."""

    @abstractmethod
    def worker(self) -> AbstractContextManager[WorkerProcess]:
        """Start a checkpoint worker."""

    @abstractmethod
    def set_speed(self, *, checkpoint_mib_s: int = 0, restore_mib_s: int = 0) -> None:
        """Set how fast memory is moved; 0: as fast as it goes."""

    @abstractmethod
    def device_bytes(self, pid: int) -> int:
        """Return how much of a process's device memory really occupies room."""

    @abstractmethod
    def saved_bytes(self, pid: int) -> int:
        """Return how much of it has been moved to host memory."""

    @abstractmethod
    def is_at_work(self, pid: int) -> bool:
        """Return whether a call of the process is at work on the device."""

    @abstractmethod
    def lock_waits(self, pid: int) -> bool:
        """Return whether a lock waits for the process's work."""

    @abstractmethod
    def left_behind(self) -> list[int]:
        """Return the pids of the processes of which anything is left, contents or saved bytes."""

    @abstractmethod
    def wait_quiet(self, pid: int) -> None:
        """Wait until an operation whose caller was killed is over."""

    @abstractmethod
    def wait_settled(self, pid: int, state: ProcessState) -> None:
        """Wait until an operation whose caller was killed is over; it must end in this state."""

    @abstractmethod
    def fail(self, operation: str, code: GPUErrorCode, *, times: int | None = 1, pid: int | None = None) -> None:
        """Let the next operations fail and do nothing."""

    @abstractmethod
    def lie(self, operation: str) -> None:
        """Let the next operation answer success and do nothing."""

    @abstractmethod
    def slow(self, operation: str, ms: int) -> None:
        """Let operations take so long."""

    @abstractmethod
    def hang(self, operation: str, *, late: bool = False) -> Callable[[], None]:
        """Let the next operation hang, before what it does or after it; return what lets it continue."""

    @abstractmethod
    def hangs(self, operation: str) -> bool:
        """Return whether an operation hangs so."""

    @abstractmethod
    def lose(self, device: int) -> None:
        """Let a device fall off the bus."""

    @abstractmethod
    def end_faults(self) -> None:
        """Let nothing fail any more."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class SimulatedDevices(Host):
    """The product's simulation."""

    unlike_devices = GPUErrorCode.NOT_SUPPORTED
    failed_process = r"did not fit.*restart the kernel"
    out_of_memory = "out of memory|MiB are free"

    def __init__(self, folder: Path, sizes: tuple[int, ...] = (DEVICE_MIB, DEVICE_MIB)) -> None:
        self.simulated = host.create(folder, ",".join(f"1x{size}MiB" for size in sizes))
        self.devices = [device.device_id for device in self.simulated.devices]
        self.backend = f"simulated:{folder}"
        self.checkpointer = SimulatedCheckpointer(folder)
        self.monitor = SimulatedMonitor(folder)
        self._folder = folder
        self._store = Store(folder)

    def kernel(self, device: int = 0) -> KernelProcess:
        return SimulatedKernel(self.simulated, device=device)

    def worker(self) -> AbstractContextManager[WorkerProcess]:
        return worker_process(self.simulated)

    def set_speed(self, *, checkpoint_mib_s: int = 0, restore_mib_s: int = 0) -> None:
        faults.configure(self._store, checkpoint_mib_s=checkpoint_mib_s, restore_mib_s=restore_mib_s)

    def _occupied(self, pid: int, pattern: str) -> int:
        files = (self._folder / "memory" / str(current_key(pid))).glob(pattern)
        return sum(file.stat().st_blocks * 512 for file in files)

    def device_bytes(self, pid: int) -> int:
        return self._occupied(pid, "*.device")

    def saved_bytes(self, pid: int) -> int:
        return self._occupied(pid, "*.saved")

    def is_at_work(self, pid: int) -> bool:
        return in_flight(self.simulated, pid)

    def lock_waits(self, pid: int) -> bool:
        return read_gate(self._store.process_folder(str(current_key(pid)))) != b"O"

    def left_behind(self) -> list[int]:
        assert not list((self._folder / "trash").iterdir())
        return [int(one.name.partition("-")[0]) for one in (self._folder / "memory").iterdir()]

    def wait_quiet(self, pid: int) -> None:
        """Nothing: the next reader of the state undoes what a dead caller began."""

    def wait_settled(self, pid: int, state: ProcessState) -> None:
        assert self.checkpointer.state(pid) is state, "the next reader of the state undoes what a dead caller began"

    def fail(self, operation: str, code: GPUErrorCode, *, times: int | None = 1, pid: int | None = None) -> None:
        faults.inject(self._folder, operation, f"fail:{code.value}", times=times, pid=pid)

    def lie(self, operation: str) -> None:
        faults.inject(self._folder, operation, "lie")

    def slow(self, operation: str, ms: int) -> None:
        faults.inject(self._folder, operation, f"slow:{ms}")

    def hang(self, operation: str, *, late: bool = False) -> Callable[[], None]:
        fault = faults.inject(self._folder, operation, "late" if late else "hang")
        return lambda: faults.remove(self._folder, fault)

    def hangs(self, operation: str) -> bool:
        return any(fault.taken == 1 and fault.operation == operation for fault in faults.listed(self._folder))

    def lose(self, device: int) -> None:
        faults.lose_device(self._folder, self.devices[device])

    def end_faults(self) -> None:
        faults.clear(self._folder)

    def close_drivers(self) -> None:
        """Close what reads and drives the devices."""
        assert isinstance(self.checkpointer, SimulatedCheckpointer)
        self.checkpointer.close()
        self.monitor.close()

    def close(self) -> None:
        self.close_drivers()
        self._store.close()


class OutsideDevices(SimulatedDevices):
    """The kind of device of examples/device-kind, opened by its entry point as the broker and its worker do."""

    def __init__(self, folder: Path, sizes: tuple[int, ...], path: str) -> None:
        super().__init__(folder, sizes)
        super().close_drivers()
        self.backend = "kind:example"
        self._environment = {"EXAMPLE_DEVICES": str(folder), "PYTHONPATH": path}
        with patch.dict(os.environ, self._environment):
            self.checkpointer, self.monitor = open_checkpointer(self.backend), open_monitor(self.backend)

    def worker(self) -> AbstractContextManager[WorkerProcess]:
        return backend_worker(self.backend, self._environment)


class DoubleHost(Host):
    """NvidiaCheckpointer and NvidiaMonitor over the double of the driver, in the process `remote`."""

    unlike_devices = GPUErrorCode.UNKNOWN  # NVIDIA's driver: INVALID_VALUE, which tells no more
    failed_process = r"CUDA_ERROR_\w+"  # NVIDIA documents no number
    out_of_memory = r"CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    backend = "nvidia"

    def __init__(self, double: DriverDouble, remote: Remote) -> None:
        self.double = double
        self._caller = remote.pid
        self.devices = [device.device_id for device in double.devices]
        remote.use(double)
        self.checkpointer: Checkpointer = remote.checkpointer
        self.monitor: Monitor = remote.monitor

    @classmethod
    def make_double(cls, folder: Path, sizes: tuple[int, ...] = (DEVICE_MIB, DEVICE_MIB)) -> DriverDouble:
        """Make the double; devices of different sizes are of different chips."""
        like = Device(mib=DEVICE_MIB)
        double = DriverDouble(folder, [replace(Device(mib=size), chip=f"{like.chip}-{size}") for size in sizes])
        double.set(context_mib=CONTEXT_MIB)
        return double

    def kernel(self, device: int = 0) -> KernelProcess:
        environment = self.double.environment()
        visible = {"CUDA_VISIBLE_DEVICES": self.devices[device]}
        return KernelProcess("tests.driver_double.device", {**environment, **visible})

    def worker(self) -> AbstractContextManager[WorkerProcess]:
        return backend_worker("nvidia", self.double.environment())

    def set_speed(self, *, checkpoint_mib_s: int = 0, restore_mib_s: int = 0) -> None:
        self.double.set(save_gb_s=checkpoint_mib_s * MIB / 1e9, load_gb_s=restore_mib_s * MIB / 1e9)

    def device_bytes(self, pid: int) -> int:
        folder = Path(f"/proc/{pid}/fd")
        files = [one for one in folder.iterdir() if "device memory" in os.readlink(one)]  # noqa: PTH115 (it leads nowhere)
        return sum(file.stat().st_blocks * 512 for file in files)

    def saved_bytes(self, pid: int) -> int:
        process = self.double.process(pid)
        return process.saved_mib * MIB if process else 0

    def is_at_work(self, pid: int) -> bool:
        process = self.double.process(pid)
        return process is not None and process.at_work

    def lock_waits(self, pid: int) -> bool:
        process = self.double.process(pid)
        return process is not None and process.lock_waits

    def left_behind(self) -> list[int]:
        return [process.pid for process in self.double.processes() if process.pid != self._caller]

    def wait_quiet(self, pid: int) -> None:
        def is_over() -> bool:
            process = self.double.process(pid)
            return process is None or not process.in_operation

        eventually(is_over, "the target noticed that its caller died")

    def wait_settled(self, pid: int, state: ProcessState) -> None:
        self.wait_quiet(pid)
        assert self.checkpointer.state(pid) is state

    def fail(self, operation: str, code: GPUErrorCode, *, times: int | None = 1, pid: int | None = None) -> None:
        self.double.fail(_CALLS[operation], _NUMBERS[code], times=times, pid=pid)

    def lie(self, operation: str) -> None:
        self.double.fail(_CALLS[operation], 0)

    def slow(self, operation: str, ms: int) -> None:
        self.double.set(latency={_CALLS[operation]: ms * 1000})

    def hang(self, operation: str, *, late: bool = False) -> Callable[[], None]:
        return self.double.hang(_CALLS[operation], late=late).unlink

    def hangs(self, operation: str) -> bool:
        return any(call.result is None for call in self.double.calls(_CALLS[operation]))

    def lose(self, device: int) -> None:
        self.double.set_device(device, fails=15)

    def end_faults(self) -> None:
        self.double.clear_faults()

    def close(self) -> None:
        """Nothing: processes give back what they hold when they end."""
