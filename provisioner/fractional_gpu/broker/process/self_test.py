"""A broker's test of checkpointing at its start, on real devices that no kernel uses yet.

The checkpoint worker is the only part that needs privileges, and the driver shows only on a real CUDA process whether it has them. A
refusal for good becomes the devices' `why_not`: their kernels stay resident and status gives the reason, so that no kernel is tried in
vain. Any other failure (no room, a slow machine) is written to the log and proves nothing.
"""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fractional_gpu.broker.clock import now_ms
from fractional_gpu.core.events import DeviceSeen
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.checkpoint_trial import try_checkpoint
from fractional_gpu.gpu.interface import GPUErrorCode
from fractional_gpu.gpu.worker_link import WorkerLink

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker
    from fractional_gpu.broker.swap.swap import Swaps

__all__ = ["SelfTest"]

_FINAL: Final = frozenset({GPUErrorCode.NOT_PERMITTED, GPUErrorCode.NOT_SUPPORTED})


class SelfTest:
    """One test. `specs` are the broker's devices by id: a refusal is written there too, where the sampler reads it."""

    def __init__(
        self, broker: "Broker", swaps: "Swaps", worker: WorkerLink, specs: MutableMapping[str, DeviceSpec]
    ) -> None:
        self._broker = broker
        self._swaps = swaps
        self._worker = worker
        self._specs = specs

    async def run(self) -> str:
        """Make the test if a device is idle; return the result, a sentence for the log. Cancellation kills the process."""
        device_id = self._idle_device()
        if device_id is None:
            return "checkpointing was not tried: no device is free for it"
        result = await try_checkpoint(
            self._worker, self._broker.monitor, device_id, exempt_pids=self._broker.enforcement.exempt_pids
        )
        if result.before_mib:
            # It was counted under the pid that it has here, so the device counts kernels under their pids, too.
            self._swaps.inspector.set_counts_processes()
        if result.code in _FINAL:
            self._give_up(result.wrong)
        outcome = result.wrong or f"it works, and took {sum(result.phases_us.values()) / 1e6:.2f} s"
        return f"checkpointing was tried on a process of our own: {outcome}"

    def _idle_device(self) -> str | None:
        """Return a device that can be checkpointed and is mostly free; None while there are kernels, which may need the memory."""
        if self._broker.kernels:
            return None
        for device_id, spec in self._specs.items():
            if not spec.why_not and self._broker.used_mib.get(device_id, 0) < spec.memory_mib // 2:
                return device_id
        return None

    def _give_up(self, sentence: str) -> None:
        """Make the sentence the reason of each device that has none."""
        views = {device.device_id: device for device in self._broker.arbiter.devices()}
        for device_id, spec in list(self._specs.items()):
            if spec.why_not:
                continue
            self._specs[device_id] = replace(spec, why_not=sentence)
            view = views.get(device_id)
            if view is None or not view.lost:  # the event would call a lost device found; it is sent when it is back
                stranger_mib = view.stranger_mib if view is not None else 0
                self._broker.dispatch(
                    DeviceSeen(at_ms=now_ms(), device=self._specs[device_id], stranger_mib=stranger_mib)
                )
