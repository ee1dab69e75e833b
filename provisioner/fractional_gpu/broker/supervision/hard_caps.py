"""Has the driver enforce memory caps: a control group can use only as much memory on a device as its leases hold there.

A group is limited if all of its processes belong to one seat or user (`own_group`). The broker raises a group's limit before one of its
leases uses or returns to a device, and lowers it after a suspend. The limit is removed when the group's last lease ends.

A restore that exceeds the limit would kill the process, so the limit is always raised before a restore. A broker that starts while kernels
are running can't test whether the driver enforces limits, but it adopts any limits it finds and keeps them up to date.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fractional_gpu.broker.clock import within
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.model import HOLDING, LeaseView
from fractional_gpu.gpu.checkpoint_trial import LimitTrial
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.own_group import OwnGroup, own_group
from fractional_gpu.host.process import ProcessIdentity

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

log = logging.getLogger(__name__)

_AGAIN_S: Final = 5.0
_GONE: Final = frozenset({GPUErrorCode.OPERATING_SYSTEM, GPUErrorCode.NO_SUCH_DEVICE, GPUErrorCode.DEVICE_LOST})
_NOT_TRIED: Final = "the driver's memory limits have not been tested"

Key = tuple[str, str]
"""A control group and a device."""


class HardCaps:
    """The memory limits that the driver enforces on control groups.

    `why_not` is a sentence that explains why the driver enforces no caps, or "" if it enforces them for kernels in limited groups.
    """

    def __init__(self, broker: "Broker", worker: WorkerLink) -> None:
        self.why_not = _NOT_TRIED
        self._broker = broker
        self._worker = worker
        self._is_told = False
        self._groups: dict[ProcessIdentity, OwnGroup | None] = {}
        self._set: dict[Key, int] = {}  # MiB
        self._failed: dict[Key, str] = {}  # why the driver refused the last change
        self._unlimited: set[str] = set()  # devices without limits, such as MIG instances
        self._turn = asyncio.Lock()

    def tried(self, result: LimitTrial) -> None:
        self.why_not, self._is_told = result.why_not, result.is_told
        log.info("memory limits enforced by the driver: %s", result.why_not or "they work")

    async def recall(self) -> None:
        """Read the limits an earlier broker set for running kernels, and keep them."""
        for kernel, _ in self._broker.views():
            await self._look(kernel)

    async def _look(self, kernel: Kernel) -> None:
        """Check whether an earlier broker limited the kernel's control group."""
        group, view = self._group(kernel), self._broker.arbiter.lease(kernel.lease_id)
        if group is None or view is None or self.why_not not in ("", _NOT_TRIED):
            return
        try:
            found = [await self._worker.read_limit(device_id, group.path) for device_id in view.device_ids]
        except GPUError as error:
            if error.code is GPUErrorCode.NOT_SUPPORTED:
                self.why_not = str(error)
            return
        for device_id, limit in zip(view.device_ids, found, strict=True):
            if limit is not None:
                self.why_not, self._is_told = "", True
                self._set[group.path, device_id] = limit.hard_mib

    def allows(self, kernel: Kernel) -> bool:
        """Return whether the driver's limits allow all the memory that the kernel's control group may hold on its devices."""
        return self.why_not != "" or self._is_raised(kernel, self._wanted())

    def _is_raised(self, kernel: Kernel, wanted: Mapping[Key, int]) -> bool:
        return all(self._set.get(key, mib) >= mib for key, mib in wanted.items() if self._concerns(kernel, key))

    def told_mib(self, kernel: Kernel, device_id: str) -> int | None:
        """Return the device's size in MiB as the kernel's frameworks see it, or None if they see the whole device."""
        group = self._group(kernel) if not self.why_not and self._is_told else None
        return self._set.get((group.path, device_id)) if group is not None and group.is_leaf else None

    def caps(self, kernel: Kernel) -> bool:
        """Return whether the driver currently limits the kernel's control group."""
        return any(self._concerns(kernel, key) for key in self._set)

    async def apply(self, kernel: Kernel | None = None) -> str:
        """Update the limits. If the limit of `kernel` could not be raised, return the reason. Otherwise, return ""."""
        if kernel is not None and self.why_not == _NOT_TRIED:
            await self._look(kernel)
        if self.why_not:
            return ""
        async with self._turn:
            wanted = self._wanted()
            for key, mib in wanted.items():
                if self._set.get(key) != mib:
                    await self._change(key, mib)
            for key in [key for key in self._set if key not in wanted]:
                await self._change(key, None)
            self._failed = {key: why for key, why in self._failed.items() if key in wanted or key in self._set}
        if kernel is None or self.allows(kernel):
            return ""
        return next(
            (why for key, why in self._failed.items() if self._concerns(kernel, key)), "its limit has not been set yet"
        )

    async def run(self) -> None:
        """Keep the limits up to date until cancelled, and let cells run once their kernel's limit has been raised."""
        while True:
            changed = self._broker.anything_changed
            wanted = self._wanted() if not self.why_not else {}
            waiting = [kernel for kernel, _ in self._broker.views() if not self._is_raised(kernel, wanted)]
            await self.apply()
            for kernel in waiting:
                if self.allows(kernel):
                    self._broker.open_gate(kernel)
                    kernel.notify()
            if self._failed:
                await within(_AGAIN_S, changed)
            else:
                await changed.wait()

    async def _change(self, key: Key, mib: int | None) -> None:
        group, device_id = key
        try:
            await self._worker.set_limit(device_id, group, mib)
        except GPUError as error:
            if mib is None and error.code in _GONE:  # the limit ended with its group or device
                self._set.pop(key, None)
                return
            if error.code is GPUErrorCode.NOT_SUPPORTED:
                self._unlimited.add(device_id)
                return
            if self._failed.get(key) != str(error):
                log.warning("cannot change the memory limit of control group %s: %s", group, error)
            self._failed[key] = str(error)
            return
        self._failed.pop(key, None)
        if mib is None:
            self._set.pop(key, None)
        else:
            self._set[key] = mib

    def _wanted(self) -> dict[Key, int]:
        by_group: dict[str, list[LeaseView]] = defaultdict(list)
        for kernel, view in self._broker.views():
            if (group := self._group(kernel)) is not None:
                by_group[group.path].append(view)
        wanted: dict[Key, int] = {}
        for path, views in by_group.items():
            if len({view.spec.seat or view.spec.owner for view in views}) > 1:
                continue  # several seats or users share the group
            for view in views:
                for device_id in view.device_ids:
                    holds_mib = view.reserved_mib if view.state in HOLDING else 0
                    wanted[path, device_id] = wanted.get((path, device_id), 0) + holds_mib
                if (pool := self._broker.arbiter.pools().get(view.spec.pool)) is not None and pool.exclusive:
                    for device_id in self._broker.devices:
                        wanted.setdefault((path, device_id), 0)
        # The driver refuses a limit beyond the size of the device.
        sizes = {device_id: device.memory_mib for device_id, device in self._broker.devices.items()}
        limited = {key: mib for key, mib in wanted.items() if key[1] in sizes and key[1] not in self._unlimited}
        return {key: min(mib, sizes[key[1]]) for key, mib in limited.items()}

    def _concerns(self, kernel: Kernel, key: Key) -> bool:
        group, view = self._group(kernel), self._broker.arbiter.lease(kernel.lease_id)
        return group is not None and view is not None and key[0] == group.path and key[1] in view.device_ids

    def _group(self, kernel: Kernel) -> OwnGroup | None:
        identity = kernel.identity
        if identity is None:
            return OwnGroup(kernel.launch.group, is_leaf=False) if kernel.launch.group else None
        if identity not in self._groups:
            if len(self._groups) > 2 * len(self._broker.kernels) + 16:
                self._groups.clear()
            self._groups[identity] = own_group(identity.pid, kernel.uid)
        return self._groups[identity]
