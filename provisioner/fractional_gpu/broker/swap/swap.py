"""Suspending and resuming kernels, one operation at a time, with the checkpoint worker.

- The driver says what is true; the ledger only says what was meant.
- Where the driver cannot checkpoint at all (`off`), it is not asked: what the devices say is all there is.
- Each part has a module: closing the gate (`gates`), the suspend and its point of no return (`suspend`), the way back (`rollback`), the
  resume (`resume`), and finding out what a kernel is after something went wrong (`truth`).
- Only the devices concerned are read: the lease's own, and others on which its processes were seen.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import HostSnapshot, ProcessInspector
from fractional_gpu.broker.swap.resume import Restoration, Truth, TruthFinder
from fractional_gpu.broker.swap.steps import Journal, ProcessesSeen, Suspended, SwapTimes
from fractional_gpu.broker.swap.suspend import SHRINK_TIMEOUT_S, CheckpointCheck, Gates, IsQuiet, Suspension
from fractional_gpu.core.effects import Resume, Suspend
from fractional_gpu.core.events import ResumeOutcome
from fractional_gpu.gpu.interface import GPUError, Monitor
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.messages import GateVerb

log = logging.getLogger(__name__)


async def _nothing_against(_kernel: Kernel, _processes: Collection[ProcessIdentity], _host: HostSnapshot) -> str:
    return ""


class Swaps:
    """Carries out one operation at a time with the checkpoint worker.

    `overhead_mib` is what no lease may have of each device: a restore leaves a margin free, and no more than that. `check` says of each
    kernel whether it can be checkpointed; `off` why nothing can.
    """

    def __init__(
        self,
        monitor: Monitor,
        worker: WorkerLink,
        times: SwapTimes,
        overhead_mib: Mapping[str, int] | None = None,
        *,
        check: CheckpointCheck = _nothing_against,
        off: str = "",
    ) -> None:
        self.inspector = ProcessInspector(monitor, worker, off=off)
        self._worker = worker
        self._gates = Gates(times)
        self._suspension = Suspension(self.inspector, worker, times, self._gates, check)
        self._restoration = Restoration(self.inspector, worker, times, overhead_mib or {})
        self._truth = TruthFinder(self.inspector, worker, self._restoration)

    def connect(self, *, roots: Callable[[], list[ProcessIdentity]], is_quiet: IsQuiet | None = None) -> None:
        """Connect to what knows all kernels. To be called once, before the first operation.

        `roots` returns the processes of all kernels: a kernel that was started by another one has a lease of its own. `is_quiet` decides
        about kernels whose extension does not answer; without it they count as quiet.
        """
        self.inspector.connect(roots)
        if is_quiet is not None:
            self._gates.connect(is_quiet)

    @property
    def off(self) -> str:
        """Why the driver cannot checkpoint at all, a sentence; empty: it can."""
        return self.inspector.off

    def set_off(self, why: str) -> None:
        """Set why the driver cannot checkpoint at all, a sentence; empty: it can from now on."""
        self.inspector.set_off(why)

    async def suspend(self, kernel: Kernel, effect: Suspend, journal: Journal) -> Suspended:
        """Return the outcome, MiB and a sentence. The MiB are what was saved, or what would have to be, if too little was reserved.

        Cancellation may leave locks behind: only at the broker's end.
        """
        return await self._suspension.suspend(kernel, effect, journal)

    async def resume(
        self, kernel: Kernel, effect: Resume, saved_mib: int, journal: Journal, seen: ProcessesSeen | None = None
    ) -> tuple[ResumeOutcome, str]:
        """Return the outcome and a sentence. `seen` a moment ago saves a pass over /proc.

        Cancellation may leave a half-done resume: only at the broker's end.
        """
        return await self._restoration.resume(kernel, effect, saved_mib, journal, seen)

    async def glance(self) -> ProcessesSeen | None:
        """Read the processes, for a `resume` that follows; None if that fails."""
        at_s = time.monotonic()
        try:
            return ProcessesSeen(await self.inspector.scan_processes(), at_s)
        except GPUError:
            return None  # the operation reads them by itself, and says what is wrong

    async def truth(
        self, kernel: Kernel, device_id: str | None, saved_mib: int, host: HostSnapshot | None = None
    ) -> Truth | None:
        """Find out what the kernel is, and finish or undo half-done work where that is safe. None: still unknown; look again later.

        `device_id` and `saved_mib` are what is known of the lease. A snapshot that was taken a moment ago saves the first one.
        """
        return await self._truth.find(kernel, device_id, saved_mib, host)

    async def shrink(self, kernel: Kernel) -> int | None:
        """Have an idle kernel give cached memory back; return what its processes use then, MiB.

        None if it could not, or if it is not known what they use. Cancellation leaves it to the kernel.
        """
        if kernel.link is None or kernel.busy or await kernel.link.ask(GateVerb.SHRINK, SHRINK_TIMEOUT_S) != "done":
            return None
        try:
            return await self.inspector.used_mib(kernel) or None
        except GPUError as error:
            log.info("lease %s: what is left after shrinking cannot be read: %s", kernel.lease_id[:8], error)
            return None

    async def wait_for_previous_worker(self) -> None:
        """Return when no checkpoint worker of an earlier broker is at work any more. Cancellation stops the waiting."""
        await self._worker.wait_for_previous_worker()
