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
from provisioner.broker.sight import Scene
from provisioner.core.arbiter import Arbiter
from provisioner.gpu.interface import ProcessKind
from provisioner.host.mappings import maps
from provisioner.host.process import ProcessIdentity

__all__ = ["Screen"]

_NCCL_SEGMENT = "/dev/shm/nccl-"  # noqa: S108 - a name to look for
_FEWEST_MEMBERS = 2  # of a collective


class Screen:
    """Screens kernels before they are suspended."""

    def __init__(self, arbiter: Arbiter) -> None:
        self._arbiter = arbiter

    async def refusal(self, kernel: Kernel, processes: Collection[ProcessIdentity], scene: Scene) -> str:
        """Return why these CUDA processes of the kernel cannot be checkpointed, a sentence; empty if nothing speaks against it."""
        view = self._arbiter.lease(kernel.lease_id)
        if view is not None and view.stays:
            return view.stays
        pids = [process.pid for process in processes]
        clients = {one.pid for use in scene.uses.values() for one in use.processes if one.kind is ProcessKind.MPS}
        if of_ours := clients.intersection(pids):
            return f"process {min(of_ours)} computes through the MPS server, whose clients the driver cannot checkpoint"
        if len(pids) < _FEWEST_MEMBERS:
            return ""
        members = await asyncio.to_thread(
            lambda: [pid for pid in pids if maps(pid, lambda path: path.startswith(_NCCL_SEGMENT))]
        )
        if len(members) >= _FEWEST_MEMBERS:
            return (
                f"its processes {', '.join(map(str, sorted(members)))} share memory of NCCL: checkpointing one member of a collective "
                "hangs the others"
            )
        return ""
