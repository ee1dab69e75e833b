"""Starts the checkpoint worker, and tries again in the background until the driver works or refuses for good.

The rules:
- NOT_SUPPORTED and NOT_PERMITTED are final: only a new broker tries again.
- Every other failure may pass: a fabric manager that still starts (CUDA error 802), a worker that hangs or dies, a lack of memory. The
  next attempt follows after a second, then after twice as long each time, up to a minute.
- Until an attempt succeeds the broker serves all the same. Devices are shared and kernels stay on them; `Swaps.off` and the devices'
  `why_not` hold the driver's reason and the time of the next attempt, so status, refusals and the doctor repeat both.
- When an attempt succeeds, both are cleared, leases that stayed for that reason only may be suspended, leases whose state only the driver
  knows are examined at once, and the self-test runs.
- While the worker of an earlier broker is still at work nothing is known yet: no reason is given, and the first attempt waits for its end.
"""

import asyncio
import logging
import time
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Final

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.process.self_test import SelfTest
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.events import Checkpointable, DeviceSeen
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.worker_link import WorkerLink

__all__ = ["DriverStart"]

log = logging.getLogger(__name__)

_FINAL: Final = frozenset({GPUErrorCode.NOT_SUPPORTED, GPUErrorCode.NOT_PERMITTED})
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_ORPHAN_PATIENCE_S: Final = 2.0


class DriverStart:
    """Attempts to start the worker of one broker. `specs` are the broker's devices by id; their `why_not` is kept up to date there."""

    def __init__(self, worker: WorkerLink, specs: MutableMapping[str, DeviceSpec]) -> None:
        self.off = ""  # why nothing can be suspended now, a sentence; empty: nothing is known against it
        self._worker = worker
        self._specs = specs
        self._as_found = dict(specs)
        self._attempts = 0
        self._error = ""
        self._pending = True  # neither started nor refused for good

    async def begin(self) -> str:
        """Make the first attempt and return `off`. Blocks for as long as the driver takes to start, a minute at most.

        Cancellation stops the waiting.
        """
        if all(spec.why_not for spec in self._specs.values()):
            self._pending = False
            self.off = next((spec.why_not for spec in self._specs.values()), "no device can be checkpointed")
            log.warning("no kernel can be suspended, all stay resident: %s", self.off)
        elif await self._is_alone():
            await self._attempt()
            self._describe()
        return self.off

    async def run(self, broker: Broker, swaps: Swaps) -> None:
        """Try until the driver works or refuses for good, then run the self-test on real devices. Returns only by cancellation."""
        while self._pending:
            await self._pause()
            before = self.off
            await self._attempt()
            self._tell(broker, swaps, before)
        if not self.off and broker.monitor.kind != "simulated":
            log.info("%s", await SelfTest(broker, swaps, self._worker, self._specs).run())
        await asyncio.Event().wait()  # a service of the broker: its end would end the broker

    async def _is_alone(self) -> bool:
        """Give the worker of a killed broker a moment to end. One that is in an operation goes on without a broker."""
        try:
            async with asyncio.timeout(_ORPHAN_PATIENCE_S):
                await self._worker.wait_for_previous_worker()
        except TimeoutError:
            log.warning(
                "the worker of an earlier broker is still at work: what it works on is unknown until it is done"
            )
            return False
        return True

    async def _pause(self) -> None:
        if self._attempts:
            await asyncio.sleep(self._pause_s)
            return
        try:
            await self._worker.wait_for_previous_worker()
        except OSError as error:
            # No locks on this filesystem, say: the attempt meets the same and gives it as its reason.
            log.warning("whether an earlier checkpoint worker is at work cannot be found out: %s", error)

    @property
    def _pause_s(self) -> float:
        return min(_FIRST_PAUSE_S * 2.0 ** min(self._attempts - 1, 16), _LONGEST_PAUSE_S)

    async def _attempt(self) -> None:
        self._attempts += 1
        try:
            await self._worker.start()
        except GPUError as error:
            self._failed(error)
        else:
            if self.off:
                log.info("the CUDA driver works now, after %d attempts: kernels can be suspended", self._attempts)
            self._pending, self.off = False, ""

    def _failed(self, error: GPUError) -> None:
        news, self._error = str(error) != self._error, str(error)
        if error.code in _FINAL:
            self._pending, self.off = False, self._error
        else:
            # An absolute time stays true for as long as the sentence stands in status.
            at = time.strftime("%H:%M:%S %Z", time.localtime(time.time() + self._pause_s))
            self.off = f"{self._error} (attempt {self._attempts}; the next one is at {at})"
        log.log(
            logging.WARNING if news else logging.INFO, "no kernel can be suspended, all stay resident: %s", self.off
        )

    def _describe(self) -> list[str]:
        """Bring the devices' `why_not` up to date, and return the devices that changed."""
        changed = []
        for device_id, spec in self._as_found.items():
            told = replace(spec, why_not=spec.why_not or self.off)
            if told != self._specs[device_id]:
                self._specs[device_id] = told
                changed.append(device_id)
        return changed

    def _tell(self, broker: Broker, swaps: Swaps, before: str) -> None:
        """Have everything that refuses because of `before` go by what is known now."""
        swaps.set_off(self.off)
        views = {view.device_id: view for view in broker.arbiter.devices()}
        for device_id in self._describe():
            view = views[device_id]
            if not view.lost:  # else the event would call it found; the sampler tells the new reason when it is
                spec = self._specs[device_id]
                broker.dispatch(DeviceSeen(at_ms=now_ms(), device=spec, stranger_mib=view.stranger_mib))
        for kernel, lease in broker.views():
            if (
                before and lease.unsuspendable_reason == before
            ):  # its suspend was under way when the devices got their reason
                broker.dispatch(Checkpointable(at_ms=now_ms(), lease_id=kernel.lease_id))
        if not self.off:
            broker.driver_started()
