"""Starts the checkpoint worker, and retries in the background until the driver works or refuses for good.

Rules:

- NOT_SUPPORTED and NOT_PERMITTED are final: only a new broker retries.
- Every other failure may be temporary: a fabric manager that is still starting (CUDA error 802), a worker that hangs or dies, a lack of
  memory. The next attempt follows after a second, then after twice as long each time, up to a minute.
- Until an attempt succeeds, the broker serves without suspending: kernels share devices and stay on them. `Swaps.off` and the devices'
  `why_not` hold the driver's reason and the time of the next attempt, so status, refusals and the doctor repeat both.
- When an attempt succeeds, both are cleared, leases that stayed for that reason only may be suspended, leases whose state only the driver
  knows are examined at once, and the self-test runs.
- While the worker of an earlier broker still runs an operation, there is no reason yet, and the first attempt waits for its end.
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
    """Starts the worker of one broker. `specs`: the broker's devices by id, whose `why_not` it keeps up to date."""

    def __init__(self, worker: WorkerLink, specs: MutableMapping[str, DeviceSpec]) -> None:
        self.off = ""  # the reason why nothing can be suspended now, a sentence; empty: no reason is known
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
            self._publish(broker, swaps, before)
        if not self.off and broker.monitor.kind != "simulated":
            log.info("%s", await SelfTest(broker, swaps, self._worker, self._specs).run())
        await asyncio.Event().wait()  # a service of the broker: its end would end the broker

    async def _is_alone(self) -> bool:
        """Wait a moment for the worker of a killed broker to end, and return whether it has. It completes an operation without a broker."""
        try:
            async with asyncio.timeout(_ORPHAN_PATIENCE_S):
                await self._worker.wait_for_previous_worker()
        except TimeoutError:
            log.warning(
                "the worker of an earlier broker is still running an operation; the state of its kernel is unknown until it is done"
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
            # For example, the filesystem has no locks: the attempt fails with the same error and reports it.
            log.warning("cannot check for an earlier checkpoint worker: %s", error)

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
        """Update the devices' `why_not`, and return the ids of those that changed."""
        changed = []
        for device_id, spec in self._as_found.items():
            told = replace(spec, why_not=spec.why_not or self.off)
            if told != self._specs[device_id]:
                self._specs[device_id] = told
                changed.append(device_id)
        return changed

    def _publish(self, broker: Broker, swaps: Swaps, before: str) -> None:
        """Replace the reason `before` by the present one in swaps, devices and leases."""
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
