"""Learns what contexts take on each kind of device, so that frameworks' limits leave room for them.

A kernel's extension says what the frameworks' allocators hold when it has given caches back (the answer to `shrink`); the device says what
it charges to the process. Both are known of one moment at each suspend, where the process is locked. A kernel over its cap is asked as
soon as it is idle, too: where nothing is ever suspended, this is where a limit that left too little room shows.

What is learned reaches kernels with the variables of their next grant; one that was over its cap gets it at once.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fractional_gpu.broker.kernels.gate import GateLink
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.runtime import Runtime
from fractional_gpu.core.forecasts.context_sizes import FLOOR_MIB, ContextSize, ContextSizes
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.protocol.messages import GateVerb

__all__ = ["ContextLearner"]

log = logging.getLogger(__name__)

_SHRINK_TIMEOUT_S: Final = 10.0
_AGAIN_S: Final = 5.0
_NO_USER: Final = -1  # a uid that no user has


class ContextLearner:
    """Learns from the kernels of one broker. All methods run on its loop."""

    def __init__(self, broker: Runtime, sizes: ContextSizes) -> None:
        self.sizes = sizes
        self._broker = broker
        self._asking: dict[str, asyncio.Task[None]] = {}  # by lease

    def context_mib(self, lease_id: str, device_ids: Sequence[str]) -> int:
        """Return what a context takes in the lease's kernel on these devices, the largest, MiB."""
        devices, kernel = self._broker.devices, self._broker.kernels.get(lease_id)
        uid = kernel.uid if kernel is not None else _NO_USER
        known = [self.sizes.estimate_mib(devices[one].name, uid) for one in device_ids if one in devices]
        return max(known, default=FLOOR_MIB)

    def suspended(self, kernel: Kernel) -> None:
        """Learn from a suspend that is over. One that failed is ignored."""
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or view.state is not LeaseState.SUSPENDED or kernel.identity is None or kernel.link is None:
            return
        if kernel.identity in kernel.checkpoint.sizes:
            self._learn(kernel, kernel.checkpoint.homes, kernel.checkpoint.sizes[kernel.identity])

    def breached(self, kernel: Kernel) -> None:
        """Ask a kernel that is over its cap as soon as it is idle. Returns at once."""
        if kernel.lease_id not in self._asking:
            task = asyncio.get_running_loop().create_task(self._ask(kernel))
            self._asking[kernel.lease_id] = task
            task.add_done_callback(lambda _: self._asking.pop(kernel.lease_id, None))

    async def close(self) -> None:
        """Ask no more."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, kernel: Kernel) -> None:
        """Have caches given back as soon as the kernel is idle, then compare. Cancellation stops it at any moment."""
        while True:
            change = kernel.change()
            if kernel.busy:
                await change.wait()
                continue
            link, device_ids = kernel.link, self._broker.records.may_use(kernel)
            if link is None or not device_ids:
                return  # it ended, or is being suspended, from which the same is learned
            word = await link.ask(GateVerb.SHRINK, _SHRINK_TIMEOUT_S)
            if word != "busy":  # a cell began before the main loop came to it
                break
            await asyncio.sleep(_AGAIN_S)
        if word == "done" and await self._compare(kernel, link, device_ids):
            link.send(GateVerb.LIMIT, environment=self._broker.environment(kernel.lease_id, device_ids))

    async def _compare(self, kernel: Kernel, link: GateLink, device_ids: Sequence[str]) -> bool:
        """Learn from what the device charges to an idle kernel now; return whether that was possible."""
        try:
            use = await asyncio.to_thread(self._broker.monitor.use, device_ids[0])
        except GPUError:
            return False  # the next breach, or a suspend, repeats the chance
        if kernel.in_use or kernel.identity is None or kernel.link is not link:
            return False  # the device counted a later moment than the answer's
        used_mib = sum(one.used_mib for one in use.processes if one.pid == kernel.identity.pid)
        self._learn(kernel, device_ids, used_mib)
        return device_ids == self._broker.records.may_use(kernel)

    def _learn(self, kernel: Kernel, device_ids: Sequence[str], used_mib: int) -> None:
        """Learn from what the kernel's own process has on its only device. Of several devices it is unknown which holds what."""
        reserved_mib = kernel.link.reserved_mib if kernel.link is not None else None
        view = self._broker.arbiter.lease(kernel.lease_id)
        device = self._broker.devices.get(device_ids[0]) if len(device_ids) == 1 else None
        if reserved_mib is None or view is None or device is None or not used_mib:
            return
        figure = ContextSize(kernel.uid, used_mib - reserved_mib)
        if self.sizes.saw(device.name, kernel.lease_id, figure, view.spec.reserve_mib):
            context_mib = self.context_mib(kernel.lease_id, device_ids)
            log.info("a context on %s takes %d MiB beside its framework (uid %d)", device.name, context_mib, kernel.uid)
