"""Administrators' actions on users' leases: move a kernel to another device, or evict it.

- A move begins at once or is refused with the reason. If another kernel's swap is under way, the move is retried for `PATIENCE_S`.
- An eviction is the only action that loses a kernel's state on purpose, so the request must confirm it. Every process of the kernel's
  tree gets SIGTERM, and SIGKILL after a grace period. Each is identified by its start time and signalled through its pidfd, so that a
  reused pid is never hit; the tree is read again until no process is left. Only then the lease ends: processes that cannot be ended
  keep it.
"""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import Final

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.ending import EVICTED, Evictions, end_processes
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import members_of
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.lanes import SWAPS
from fractional_gpu.broker.services.status import lease_status, view_of
from fractional_gpu.core.effects import Declined
from fractional_gpu.core.events import MoveRequested
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.scheduler.migration import BUSY_CHANNEL
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.errors import BadRequestError, ConflictError
from fractional_gpu.protocol.messages import EvictRequest
from fractional_gpu.protocol.status import LeaseStatus

log = logging.getLogger(__name__)

PATIENCE_S: Final = 30.0
_IDLE_PATIENCE_S = 10.0  # as for a suspend: the kernel may be about to become idle
_ON_THE_WAY = frozenset({LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING})


class AdminService:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.evictions = Evictions()

    async def move(self, kernel: Kernel, device_id: str | None) -> LeaseStatus:
        """Move an idle kernel to the device (None: any other of its pool); return when it is there.

        Raises ConflictError with the reason if it stays. Cancelled: a move that has begun goes on.
        """
        kernel.requests.suspend_waiters += 1  # an explicit request: only a running cell prevents it
        try:
            self._broker.sync_busy_state(kernel)
            await self._until_idle(kernel)
            before = view_of(self._broker, kernel).device_ids
            await self._begin(kernel, device_id)
            why_not: tuple[str, str] | None = None
            while (view := view_of(self._broker, kernel)).state in _ON_THE_WAY:
                if view.reason == "resume.not-started":  # it may return to its old device; this is the reason
                    why_not = view.reason, view.sentence
                await kernel.change().wait()
        finally:
            kernel.requests.suspend_waiters -= 1
            self._broker.sync_busy_state(kernel)
        if view.state is not LeaseState.RESIDENT or view.device_ids == before:
            reason, sentence = why_not or (view.reason, view.sentence)
            raise ConflictError(f"the kernel was not moved: {sentence}", reason=reason)
        return lease_status(self._broker, kernel, view)

    async def _until_idle(self, kernel: Kernel) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_PATIENCE_S):
                while kernel.busy:
                    await kernel.change().wait()

    async def _begin(self, kernel: Kernel, device_id: str | None) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            declined = self._ask(MoveRequested(at_ms=now_ms(), lease_id=kernel.lease_id, device_id=device_id))
            if declined is None:
                return
            left_s = deadline_s - time.monotonic()
            if declined.reason != BUSY_CHANNEL or left_s <= 0:
                raise ConflictError(declined.sentence, reason=declined.reason)
            # Take the event after the request: the request itself has set the one before.
            anything_changed = self._broker.anything_changed
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await anything_changed.wait()

    def _ask(self, event: MoveRequested) -> Declined | None:
        for effect in self._broker.dispatch(event):
            if isinstance(effect, Declined) and (effect.lease_id, effect.about) == (event.lease_id, "move"):
                return effect
        return None

    async def evict(self, peer: Peer, kernel: Kernel, request: EvictRequest) -> None:
        """End the kernel's processes and its lease. Raises BadRequestError without `confirm`, ConflictError if a process does not end.

        Jupyter may start the kernel again before its last process has ended: from the beginning of the eviction, the new kernel gets
        another lease and its processes are not ended. Cancelled: processes that were asked to end do so, and the lease stays.
        """
        if not request.confirm:
            raise BadRequestError(
                "evicting ends the kernel, and all its variables are lost; send confirm = true if that is meant (suspend keeps them)",
                reason="not-confirmed",
            )
        log.warning("lease %s: evicted by an administrator", kernel.lease_id[:8])
        sentence = self.evictions.begin(kernel, peer, request.why)
        try:
            await self._end_tree(kernel)
        except ConflictError:
            self.evictions.failed(kernel)
            raise
        self._broker.record_line(kernel.lease_id, EVICTED, sentence)
        await self._broker.survivors.release(kernel, EVICTED)

    async def end_kernel(self, kernel: Kernel) -> None:
        await self._end_tree(kernel)
        await self._broker.survivors.release(kernel)

    async def _end_tree(self, kernel: Kernel) -> None:
        kernel.requests.evictions += 1
        try:
            await end_processes(partial(self._tree, kernel, kernel.identity), "process {pid} of the kernel")
        finally:
            kernel.requests.evictions -= 1

    async def _tree(self, kernel: Kernel, root: ProcessIdentity | None) -> list[ProcessIdentity]:
        snapshot = await SWAPS.run(self._broker.scans.take)
        return members_of(kernel, root, snapshot, self._broker.roots()) if root is not None else []
