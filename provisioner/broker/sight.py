"""What is true of kernels right now, as the operating system, the driver and the devices tell it.

One `Scene` is one pass over /proc and one reading of each device: whoever asks about several kernels, or asks several things about
one, takes one scene for all. What happened after it was taken is not in it: certainty needs a new one.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from provisioner.broker.kernels import Kernel
from provisioner.gpu.interface import DeviceUse, GPUError, GPUErrorCode, Monitor, ProcessState
from provisioner.gpu.worker_link import WorkerLink
from provisioner.host.process import ProcessIdentity
from provisioner.host.tree import Snapshot, scan

__all__ = ["ENDED", "LEASE_VARIABLE", "Scene", "Sight"]

LEASE_VARIABLE = "JUPYTER_GPU_LEASE"
ENDED = (GPUErrorCode.NO_SUCH_PROCESS, GPUErrorCode.WRONG_IDENTITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The machine at about one moment. `uses` by device, `memory_mib` each device's whole memory."""

    snapshot: Snapshot
    uses: Mapping[str, DeviceUse]
    memory_mib: Mapping[str, int]

    def used_mib(self, pid: int) -> int:
        """Return the memory that the process has on all devices; 0 where none counts it."""
        return sum(one.used_mib for use in self.uses.values() for one in use.processes if one.pid == pid)

    def free_mib(self, device_id: str) -> int:
        """Return what is free on the device. Raises GPUError if there is no such device."""
        if device_id not in self.uses:
            raise GPUError(GPUErrorCode.NO_SUCH_DEVICE, f"device {device_id} is not there")
        return self.memory_mib[device_id] - self.uses[device_id].used_mib

    def is_alone(self, pids: Collection[int], device_id: str) -> bool:
        """Return whether nobody but these processes uses the device. Raises GPUError if there is no such device."""
        self.free_mib(device_id)
        return all(one.pid in pids for one in self.uses[device_id].processes)

    def homes(self, pids: Collection[int]) -> tuple[str, ...]:
        """Return the devices that hold memory of these processes, the one that holds most first."""
        mine = {
            device_id: sum(one.used_mib for one in use.processes if one.pid in pids)
            for device_id, use in self.uses.items()
        }
        return tuple(sorted((device for device, mib in mine.items() if mib), key=lambda device: -mine[device]))


class Sight:
    """Looks. `roots` returns the processes of all kernels: one that was started by another has a lease of its own."""

    def __init__(self, monitor: Monitor, worker: WorkerLink) -> None:
        self._monitor = monitor
        self._worker = worker
        self.roots: Callable[[], list[ProcessIdentity]] = list
        self.off = ""  # why the driver cannot be asked, a sentence: what the devices say is what there is

    async def scene(self) -> Scene:
        """Look at the whole machine. Raises GPUError, also where the system is short of what a look takes."""
        try:
            return await asyncio.to_thread(self._scene)
        except (OSError, RuntimeError) as error:  # descriptors, memory, threads: a step that failed, with its way back
            sentence = f"the machine could not be looked at: {error}"
            raise GPUError(GPUErrorCode.OPERATING_SYSTEM, sentence) from error

    def _scene(self) -> Scene:
        snapshot = scan(LEASE_VARIABLE)
        devices = self._monitor.devices()
        uses: dict[str, DeviceUse] = {}
        for device in devices:
            try:
                uses[device.device_id] = self._monitor.use(device.device_id)
            except GPUError as error:
                if error.code not in (GPUErrorCode.DEVICE_LOST, GPUErrorCode.NO_SUCH_DEVICE):
                    raise  # of a lost device nothing is known: whoever needs it finds it missing
        return Scene(
            snapshot=snapshot, uses=uses, memory_mib={device.device_id: device.memory_mib for device in devices}
        )

    def tree(self, kernel: Kernel, scene: Scene) -> list[ProcessIdentity]:
        """Return the kernel's processes."""
        if kernel.identity is None:
            return []
        return scene.snapshot.tree(kernel.identity, (LEASE_VARIABLE, kernel.lease_id), apart=self.roots())

    async def states(self, kernel: Kernel, scene: Scene) -> dict[ProcessIdentity, ProcessState]:
        """Return the CUDA state, now, of every process of the kernel in the scene that has one. Raises GPUError."""
        states: dict[ProcessIdentity, ProcessState] = {}
        for identity in self.tree(kernel, scene):
            if self.off:
                if scene.used_mib(identity.pid):
                    states[identity] = ProcessState.RUNNING
                continue
            try:
                state = await self._worker.state(identity)
            except GPUError as error:
                if error.code in ENDED:
                    continue  # it ended while we looked
                raise
            if state not in (ProcessState.NO_CONTEXT, ProcessState.GONE):
                states[identity] = state
        return states

    async def use(self, kernel: Kernel) -> dict[ProcessIdentity, int]:
        """Return the device memory, MiB, of every CUDA process of the kernel (0 where no device counts it). Raises GPUError."""
        scene = await self.scene()
        return {identity: scene.used_mib(identity.pid) for identity in await self.states(kernel, scene)}
