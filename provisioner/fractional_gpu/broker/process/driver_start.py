"""Starts the driver for a new broker: opens the devices, and retries the checkpoint worker until the driver works or permanently refuses.

- NOT_SUPPORTED and NOT_PERMITTED are final. Any other failure may be temporary, for example because a fabric manager is still starting or a
  worker has died. The next attempt follows after one second, and the pause doubles up to a minute.
- Until an attempt succeeds, the broker runs but suspends no kernels. `Swaps.off` and the devices' `why_not` contain the reason and the time
  of the next attempt.
- After a success, these reasons are cleared, leases whose state only the driver knows are examined, and the self-test runs. If the first
  attempt succeeds, the self-test runs before the API starts to answer.
- The first attempt waits while an earlier broker's worker is still running an operation.
"""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.events import Checkpointable, DeviceSeen
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.checkpoint_trial import try_checkpoint
from fractional_gpu.gpu.interface import DeviceInfo, GPUError, GPUErrorCode, Monitor
from fractional_gpu.gpu.limit_trial import try_memory_limit
from fractional_gpu.gpu.open import NVIDIA, backend_name, open_monitor
from fractional_gpu.gpu.simulated.device_memory import DeviceMemoryServer
from fractional_gpu.gpu.simulated.host import choose_directory, create, destroy
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.gpu.worker_link import WorkerLink

log = logging.getLogger(__name__)

DRIVER_REFUSES: Final = frozenset({GPUErrorCode.NOT_PERMITTED, GPUErrorCode.NOT_SUPPORTED})
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_ORPHAN_PATIENCE_S: Final = 2.0
_SELF_TEST_S: Final = 20.0


class DriverStart:
    def __init__(self, worker: WorkerLink, specs: MutableMapping[str, DeviceSpec]) -> None:
        self.off = ""  # a sentence that explains why nothing can be suspended now, or "" without a known reason
        self._worker = worker
        self._specs = specs
        self._as_found = dict(specs)
        self._attempts = 0
        self._error = ""
        self._pending = True  # the driver has neither started nor refused for good

    async def begin(self) -> str:
        """Try to start the driver, for at most a minute. Return why kernels cannot be suspended yet, or "" if they can."""
        if all(spec.why_not for spec in self._specs.values()):
            self._pending = False
            self.off = next((spec.why_not for spec in self._specs.values()), "no device can be checkpointed")
            log.warning("no kernel can be suspended, so all stay on their GPUs: %s", self.off)
        elif await self._is_alone():
            await self._attempt()
            for device_id, spec in self._as_found.items():
                self._specs[device_id] = replace(spec, why_not=spec.why_not or self.off)
        return self.off

    async def run(self, broker: Broker, swaps: Swaps) -> None:
        while self._pending:
            await self._pause()
            before = self.off
            await self._attempt()
            self._publish(broker, swaps, before)
            await self.try_checkpoint(broker, swaps)
        await asyncio.Event().wait()  # the broker ends when one of its tasks ends

    async def try_checkpoint(self, broker: Broker, swaps: Swaps) -> None:
        """Run the self-test on NVIDIA devices if the driver works. The test has a time limit, because the API waits for it at startup."""
        if self._pending or self.off or broker.monitor.kind != NVIDIA:
            return
        try:
            async with asyncio.timeout(_SELF_TEST_S):
                log.info("%s", await self.self_test(broker, swaps))
        except TimeoutError:
            log.warning("the checkpoint self-test took more than %g s", _SELF_TEST_S)

    async def self_test(self, broker: Broker, swaps: Swaps) -> str:
        """Try a checkpoint on a mostly free device. Return a sentence for the log. Cancellation kills the test process.

        Only a real CUDA process shows whether the driver accepts the worker's privileges. If the driver permanently refuses, the reason
        becomes the devices' `why_not`.
        """
        idle = (
            device_id
            for device_id, spec in self._specs.items()
            if not spec.why_not and broker.used_mib.get(device_id, 0) < spec.memory_mib // 2
        )
        device_id = next(idle, None)
        if device_id is None or broker.kernels:  # the kernels may need the memory
            return "checkpoint self-test skipped: no device is free for it"
        result = await try_checkpoint(
            self._worker, broker.monitor, device_id, exempt_pids=broker.enforcement.exempt_pids
        )
        if result.before_mib:
            # The process was counted under its pid in this namespace, so the device counts kernels under their pids, too.
            swaps.inspector.counts_processes = True
        if result.code in DRIVER_REFUSES:
            for one, spec in list(self._specs.items()):
                if not spec.why_not:
                    self._tell(broker, one, result.wrong)
        if not result.wrong:
            limited = await try_memory_limit(
                self._worker,
                broker.monitor,
                device_id,
                self._specs[device_id].memory_mib,
                exempt_pids=broker.enforcement.exempt_pids,
            )
            broker.hard_caps.tried(limited)
        outcome = result.wrong or f"it works, and took {sum(result.phases_us.values()) / 1e6:.2f} s"
        return f"checkpoint self-test: {outcome}"

    async def _is_alone(self) -> bool:
        """Wait briefly for a killed broker's worker to exit, and return whether it has. The worker finishes its operation first."""
        try:
            async with asyncio.timeout(_ORPHAN_PATIENCE_S):
                await self._worker.wait_for_previous_worker()
        except TimeoutError:
            log.warning(
                "the checkpoint worker of an earlier broker is still suspending or resuming a kernel; until it "
                "finishes, the state of that kernel is unknown"
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
            # If the filesystem has no locks, for example, the attempt fails with the same error and reports it.
            log.warning("cannot check for an earlier checkpoint worker: %s", error)

    @property
    def _pause_s(self) -> float:
        return min(_FIRST_PAUSE_S * 2.0 ** min(self._attempts - 1, 16), _LONGEST_PAUSE_S)

    async def _attempt(self) -> None:
        self._attempts += 1
        try:
            await self._worker.start()
        except GPUError as error:
            news, self._error = str(error) != self._error, str(error)
            if error.code in DRIVER_REFUSES:
                self._pending, self.off = False, self._error
            else:
                # Status shows the sentence for some time, so it needs an absolute time.
                at = time.strftime("%H:%M:%S %Z", time.localtime(time.time() + self._pause_s))
                self.off = f"{self._error} (attempt {self._attempts}; the next one is at {at})"
            level = logging.WARNING if news else logging.INFO
            log.log(level, "no kernel can be suspended, so all stay on their GPUs: %s", self.off)
        else:
            if self.off:
                log.info("the CUDA driver works now, after %d attempts: kernels can be suspended", self._attempts)
            self._pending, self.off = False, ""

    def _publish(self, broker: Broker, swaps: Swaps, before: str) -> None:
        swaps.inspector.off = self.off
        for device_id, spec in self._as_found.items():
            why_not = spec.why_not or self.off
            if why_not != self._specs[device_id].why_not:
                self._tell(broker, device_id, why_not)
        for kernel, lease in broker.views():
            # The lease's suspend was under way when the devices got their reason.
            if before and lease.unsuspendable_reason == before:
                broker.dispatch(Checkpointable(at_ms=now_ms(), lease_id=kernel.lease_id))
        if not self.off:
            broker.operations.look_now()  # the driver can answer from now on

    def _tell(self, broker: Broker, device_id: str, why_not: str) -> None:
        """Record why kernels on the device cannot be suspended, or "" if they can, and inform the arbiter unless the device is lost."""
        spec = self._specs[device_id] = replace(self._specs[device_id], why_not=why_not)
        view = next((one for one in broker.arbiter.devices() if one.device_id == device_id), None)
        if view is None or not view.lost:
            stranger_mib = view.stranger_mib if view is not None else 0
            broker.dispatch(DeviceSeen(at_ms=now_ms(), device=spec, stranger_mib=stranger_mib))


# Terminals, server logs and JupyterLab's dialogs show this text. An environment variable works for all of them.
_WITHOUT: Final = (
    "to try things out without one, set JUPYTER_GPU_SIMULATE=1x2GiB in the environment before you start Jupyter"
)


class BackendError(Exception):
    """Raised if there are no devices to manage. The message explains why, and what to do."""


class NoDeviceError(BackendError):
    """Raised if the machine has no usable GPU. `why` is the reason given by the driver."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no GPU was found: {why}; {_WITHOUT}")
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    name: str  # "nvidia", "simulated:DIR" or "kind:NAME"
    monitor: Monitor
    devices: tuple[DeviceInfo, ...]
    folder: Path | None  # of the simulated host
    is_new: bool = False  # whether the simulated host is new

    @property
    def simulated(self) -> bool:
        return self.monitor.kind == "simulated"

    def remove_if_unused(self) -> None:
        if self.folder is not None:
            try:
                destroy(self.folder)
            except SimulatedHostError as error:
                log.info("cannot remove the simulated devices: %s", error)


@contextmanager
def open_backend(
    simulate: str | None, socket: str, *, patient: bool = False, device_kind: str = ""
) -> Iterator[Backend]:
    """Open the devices. Simulated devices take precedence. Raises BackendError, GPUError, or ValueError for an invalid `simulate`.

    With `patient`, block until the machine has a device, because a system service may start before the driver is loaded.
    """
    if simulate is None:
        name, folder, is_new = backend_name(device_kind), None, False
    else:
        folder = simulated_folder(socket)
        is_new = not folder.exists()
        try:
            create(folder, simulate, shared=os.geteuid() == 0)
        except (SimulatedHostError, ValueError) as error:
            raise BackendError(str(error)) from None
        name = f"simulated:{folder}"
    monitor = open_monitor(name)
    memory = None
    if folder is not None and os.geteuid() == 0:
        try:
            memory = DeviceMemoryServer(folder)
        except OSError as error:
            log.warning(
                "the server for simulated device memory in %s did not start (%s), so this memory is charged to the kernels' processes",
                folder,
                error,
            )
    try:
        devices = _awaited(monitor) if patient and simulate is None else _found(monitor)
        for sentence in getattr(monitor, "warnings", ()):
            log.warning("%s", sentence)
        yield Backend(name=name, monitor=monitor, devices=devices, folder=folder, is_new=is_new)
    finally:
        if memory is not None:
            memory.close()
        monitor.close()


def _found(monitor: Monitor) -> tuple[DeviceInfo, ...]:
    devices = tuple(monitor.devices())
    if not devices:
        raise NoDeviceError(getattr(monitor, "why_none", "") or "the driver reports none")
    return devices


def _awaited(monitor: Monitor) -> tuple[DeviceInfo, ...]:
    said = ""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _found(monitor)
        except (BackendError, GPUError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for a device: %s", said)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def simulated_folder(socket: str) -> Path:
    return choose_directory(hashlib.sha256(os.path.realpath(socket).encode()).hexdigest()[:12])
