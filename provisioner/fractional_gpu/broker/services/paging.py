"""Moves saved state to the machine's swap space some time after a suspend (`c.GPUBroker.page_out_after`), to free host memory.

State in swap space does not count towards `host_memory`. A resume reads it back at the speed of the swap device.
"""

import asyncio
import logging
import os
import time

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.core.units import format_memory
from fractional_gpu.host.paging import large_ranges, page_out, swapped_mib
from fractional_gpu.host.process import ProcessIdentity, is_alive

log = logging.getLogger(__name__)

_LONGEST_PERIOD_S = 30.0


class Pager:
    """Pages out kernels that have been suspended for `after_ms`."""

    def __init__(self, broker: Broker, after_ms: int) -> None:
        self._broker = broker
        self._after_ms = after_ms
        self._tried: dict[str, int] = {}  # by lease: the generation of the suspend whose state was paged out
        self.swapped_mib = 0  # how much saved state is in swap space

    async def run(self) -> None:
        """Page out suspended kernels until cancelled. If this process lacks permission, log that once and do nothing more."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(min(_LONGEST_PERIOD_S, max(0.2, self._after_ms / 4_000)))
        except PermissionError as error:
            self.swapped_mib = 0
            log.warning(
                "cannot move saved state to swap space (page_out_after): %s; this needs CAP_SYS_NICE and CAP_SYS_PTRACE",
                error,
            )
            await asyncio.Event().wait()  # the broker ends with its first task

    async def look(self) -> None:
        """Page out the kernels that are due, and measure how much saved state is in swap space. Raises PermissionError."""
        suspended = [(kernel, view) for kernel, view in self._broker.views() if view.state is LeaseState.SUSPENDED]
        self._tried = {view.spec.lease_id: view.generation for _, view in suspended if self._was_tried(view)}
        for kernel, view in suspended:
            if not self._was_tried(view) and now_ms() - view.since_ms >= self._after_ms:
                await self._page_out(kernel, view)
        self.swapped_mib = await asyncio.to_thread(
            _swapped, [(_saved(kernel), view.saved_mib) for kernel, view in suspended]
        )

    def _was_tried(self, view: LeaseView) -> bool:
        return self._tried.get(view.spec.lease_id) == view.generation

    async def _page_out(self, kernel: Kernel, view: LeaseView) -> None:
        self._tried[view.spec.lease_id] = view.generation
        begun_s = time.monotonic()
        for identity in _saved(kernel):
            try:
                pidfd = os.pidfd_open(identity.pid)
            except ProcessLookupError:
                continue
            try:
                if is_alive(identity):  # the descriptor is of this process, and not of a later one with its number
                    for start, length in await asyncio.to_thread(large_ranges, identity.pid):
                        now = self._broker.arbiter.lease(view.spec.lease_id)
                        if now is None or now.generation != view.generation:
                            return  # it is being resumed
                        await asyncio.to_thread(page_out, pidfd, start, length)
            except PermissionError:
                raise
            except OSError as error:  # it ended or changed its memory
                log.debug("process %d was not paged out: %s", identity.pid, error)
            finally:
                os.close(pidfd)
        moved_mib = await asyncio.to_thread(_swapped, [(_saved(kernel), view.saved_mib)])
        name, seconds = view.spec.lease_id[:8], time.monotonic() - begun_s
        if moved_mib:
            log.info(
                "lease %s: %s of its state is in swap space, after %.1f s", name, format_memory(moved_mib), seconds
            )
        else:
            log.warning(
                "lease %s: its state stays in memory, because no swap space is free for it (`swapon --show`, memory.swap.max)",
                name,
            )


def _saved(kernel: Kernel) -> list[ProcessIdentity]:
    return list(kernel.checkpoint.sizes) or ([kernel.identity] if kernel.identity is not None else [])


def _swapped(groups: list[tuple[list[ProcessIdentity], int]]) -> int:
    """Return how many MiB of saved state are in swap space, counting no more for each kernel than it saved."""
    total_mib = 0
    for identities, saved_mib in groups:
        group_mib = 0
        for identity in identities:
            try:
                group_mib += swapped_mib(identity.pid)
            except (OSError, ValueError):
                continue  # it ended
        total_mib += min(group_mib, saved_mib)
    return total_mib
