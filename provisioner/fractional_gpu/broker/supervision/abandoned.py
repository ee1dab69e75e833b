"""Ends leases whose kernels no process can start again.

A lease without a process is kept for the next process of its kernel. Only one process starts that: the lease's server, which is a Jupyter
server, a script that uses jupyter_client, or a launcher that becomes the kernel.

- The server of a lease is the process that asked for the lease, and from each `attach` on the process that attached the kernel. A server
  that takes over a kernel attaches it again.
- If the kernel's process has ended and the server has ended, the lease ends at once. While the server lives it may start the kernel again:
  the lease is kept for `unattached_ttl`.
- If no process was attached and the server has ended, the server may have started a process before it ended. The lease ends when no
  process carries its id.
- A server that is unknown (it is in another pid namespace, or the lease was taken back without a record) ends nothing.
"""

import asyncio
import logging
from typing import Final

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE
from fractional_gpu.broker.runtime import Runtime
from fractional_gpu.core.events import LeaseReleased
from fractional_gpu.core.model import LeaseState
from fractional_gpu.host.process import is_alive
from fractional_gpu.host.tree import scan

__all__ = ["ABANDONED", "AbandonedLeases", "has_lost_server"]

log = logging.getLogger(__name__)

ABANDONED: Final = "abandoned"
"""The reason of a lease's end in its story and in the counters."""
_EVERY_S: Final = 1.0


def has_lost_server(kernel: Kernel) -> bool:
    """Return whether the lease's server is known and has ended. A server that may not be looked at counts as alive."""
    try:
        return kernel.launch.server is not None and not is_alive(kernel.launch.server)
    except PermissionError:
        return False


class AbandonedLeases:
    """Finds and ends such leases of one broker."""

    def __init__(self, broker: Runtime) -> None:
        self._broker = broker

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """End what is abandoned now. Cancelled: some of it is ended."""
        lost = [kernel for kernel in self._broker.kernels.values() if self._is_abandoned(kernel)]
        if any(not kernel.launch.had_process for kernel in lost):
            try:
                carried = set(await asyncio.to_thread(_carried))
            except OSError as error:
                log.warning(
                    "the processes of abandoned leases cannot be looked for: %s; they are looked for again", error
                )
                return
            lost = [kernel for kernel in lost if kernel.launch.had_process or kernel.lease_id not in carried]
        for kernel in lost:
            # A server may have been named, or a process attached, while the processes were read.
            if self._is_abandoned(kernel):
                self._broker.dispatch(LeaseReleased(at_ms=now_ms(), lease_id=kernel.lease_id, reason=ABANDONED))

    def _is_abandoned(self, kernel: Kernel) -> bool:
        """Whether the lease has neither a process, nor anything that its last one left behind, nor a server."""
        if kernel.identity is not None or kernel.ending.task is not None or not has_lost_server(kernel):
            return False
        view = self._broker.arbiter.lease(kernel.lease_id)
        return view is not None and view.state is LeaseState.UNATTACHED


def _carried() -> list[str]:
    """Return the ids of the leases that processes carry in their environment. Blocks. Raises OSError."""
    return list(scan(LEASE_VARIABLE).marked())
