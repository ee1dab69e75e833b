"""Is this kernel checkpointable at all? Asked once its gate is shut, before anything is locked.

The driver promises nothing about a process whose checkpoint failed, so what is known not to work is not tried. Each refusal has its own
reason, and the lease simply stays resident:

- what the arbiter knows already: its device, its pool, what its extension or an earlier attempt said;
- a process that is a client of the MPS server;
- several CUDA processes that share memory of NCCL: checkpointing one member of a collective hangs the others. Communicators
  within one machine map segments in /dev/shm, which is what is looked for. What cannot be seen: a collective with a process outside
  of the kernel's tree (of another kernel, on another machine), and one without shared memory (`NCCL_SHM_DISABLE=1`).
"""

import asyncio
from collections.abc import Collection

from provisioner.broker.kernels import Kernel
from provisioner.core.arbiter import Arbiter
from provisioner.gpu.interface import GPUError, Monitor, ProcessKind
from provisioner.host.mappings import maps
from provisioner.host.process import ProcessIdentity

__all__ = ["Screen"]

_NCCL_SEGMENT = "/dev/shm/nccl-"  # noqa: S108 - a name to look for


class Screen:
    """Screens kernels before they are suspended."""

    def __init__(self, arbiter: Arbiter, monitor: Monitor) -> None:
        self._arbiter = arbiter
        self._monitor = monitor

    async def refusal(self, kernel: Kernel, processes: Collection[ProcessIdentity]) -> str:
        """Return why these CUDA processes of the kernel cannot be checkpointed, a sentence; empty if nothing speaks against it."""
        view = self._arbiter.lease(kernel.lease_id)
        if view is not None and view.stays:
            return view.stays
        return await asyncio.to_thread(self._look, [process.pid for process in processes])

    def _look(self, pids: list[int]) -> str:
        clients = self._mps_clients() & set(pids)
        if clients:
            return f"process {min(clients)} computes through the MPS server, whose clients the driver cannot checkpoint"
        members = [pid for pid in pids if maps(pid, lambda path: path.startswith(_NCCL_SEGMENT))]
        if len(members) > 1:
            return (
                f"its processes {', '.join(map(str, sorted(members)))} share memory of NCCL: checkpointing one member of a collective "
                "hangs the others"
            )
        return ""

    def _mps_clients(self) -> set[int]:
        found: set[int] = set()
        for device in self._monitor.devices():
            try:
                use = self._monitor.use(device.device_id)
            except GPUError:
                continue  # a device that cannot be read is somebody else's trouble: what is saved is measured again
            found |= {process.pid for process in use.processes if process.kind is ProcessKind.MPS}
        return found
