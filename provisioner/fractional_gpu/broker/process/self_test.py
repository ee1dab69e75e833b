"""May we checkpoint at all? Tried once, on a process of our own, when a broker starts on real devices that nobody uses yet.

The checkpoint worker is the only part that needs privileges, and whether it has them the driver tells only when asked about a real CUDA
process. What it refuses for good becomes the devices' reason: their kernels stay resident, and everybody is told why, instead of each
kernel being tried. Anything else that goes wrong (no room, a slow machine) is written to the log and proves nothing.

The process's memory is known, too: if its device counts it under the pid that it has here, devices count processes by these pids.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.core.events import DeviceSeen
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.driver_environment import cleaned
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import identify

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker
    from fractional_gpu.broker.swap.swap import Swaps

__all__ = ["Trial"]

log = logging.getLogger(__name__)

_START_S: Final = 60.0
_LOCK_MS: Final = 5000
_MOVE_S: Final = 60.0
_FOR_GOOD: Final = frozenset({GPUErrorCode.NOT_PERMITTED, GPUErrorCode.NOT_SUPPORTED})


class Trial:
    """One attempt. `specs` are the broker's devices by id: what is found out is written there, where its eyes look, too."""

    def __init__(
        self, broker: "Broker", swaps: "Swaps", worker: WorkerLink, specs: MutableMapping[str, DeviceSpec]
    ) -> None:
        self._broker = broker
        self._swaps = swaps
        self._worker = worker
        self._specs = specs

    async def make(self) -> str:
        """Try it if that disturbs nobody; return what was found, a sentence for the log. Cancellation ends the process."""
        device_id = self._idle_device()
        if device_id is None:
            return "checkpointing was not tried: no device is free for it"
        try:
            async with self._victim(device_id) as pid:
                identity = identify(pid)
                use = await asyncio.to_thread(self._broker.monitor.use, device_id)
                if any(one.pid == pid and one.used_mib for one in use.processes):
                    self._swaps.inspector.set_counts_processes()
                took_us = await self._worker.lock(identity, _LOCK_MS)
                took_us += await self._worker.checkpoint(identity, _MOVE_S)
                took_us += await self._worker.restore(identity, None, _MOVE_S)
                took_us += await self._worker.unlock(identity)
        except GPUError as error:
            if error.code in _FOR_GOOD:
                self._give_up(str(error))
            return f"checkpointing was tried on a process of our own: {error}"
        except (TimeoutError, ProcessLookupError, _NoVictimError) as error:
            return f"checkpointing could not be tried: {error or 'the process did not answer in time'}"
        return f"checkpointing was tried on a process of our own: it works, and took {took_us / 1e6:.2f} s"

    def _idle_device(self) -> str | None:
        """Return a device that can be checkpointed and is mostly free, if no kernel is there that could miss the room."""
        if self._broker.kernels:
            return None
        for device_id, spec in self._specs.items():
            if not spec.why_not and self._broker.used_mib.get(device_id, 0) < spec.memory_mib // 2:
                return device_id
        return None

    def _give_up(self, sentence: str) -> None:
        views = {device.device_id: device for device in self._broker.arbiter.devices()}
        for device_id, spec in list(self._specs.items()):
            if spec.why_not:
                continue
            self._specs[device_id] = replace(spec, why_not=sentence)
            view = views.get(device_id)
            if view is None or not view.lost:  # a lost one is told of when it is seen again
                stranger_mib = view.stranger_mib if view is not None else 0
                self._broker.dispatch(
                    DeviceSeen(at_ms=now_ms(), device=self._specs[device_id], stranger_mib=stranger_mib)
                )

    @asynccontextmanager
    async def _victim(self, device_id: str) -> AsyncIterator[int]:
        """The pid of a process with device memory, which is killed at the end."""
        monitor = self._broker.monitor
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "fractional_gpu.gpu.probe_process", monitor.kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=cleaned(os.environ, keep=monitor.kernel_environment(device_id)),
        )
        self._broker.enforcement.exempt_pids.add(process.pid)
        try:
            async with asyncio.timeout(_START_S):
                said = (await process.stdout.readline()).decode(errors="replace").strip() if process.stdout else ""
            if said != "ready":
                raise _NoVictimError(
                    f"no device memory could be had for it: {said.removeprefix('failed: ') or 'it ended'}"
                )
            yield process.pid
        finally:
            self._broker.enforcement.exempt_pids.discard(process.pid)
            if process.returncode is None:
                process.kill()
            await process.communicate()


class _NoVictimError(Exception):
    """There is no process to try it on; the sentence says why."""
