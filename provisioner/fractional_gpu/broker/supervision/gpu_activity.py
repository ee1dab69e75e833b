"""Is a kernel that runs no cell really idle? Decided by the devices' own counters of work, beside IOPub.

A thread that a cell left behind, or a child process, works without a busy message. So a resident kernel that has just become idle by its
messages still counts as busy until the counters have shown that its whole process tree is quiet, and counts as busy again whenever they
show work.

- What a cell did before it ended says nothing. A device reports work with a delay (`settle_us`): for so long after a cell's end it is
  not known yet.
- Work makes a kernel busy for `QUIET_S` after it was last seen, so that a loop with short pauses is one piece of work.
- For a device that reports nothing (MIG instances and some virtual machines), the messages alone decide. It is read again every minute:
  a driver that was restarted may report.
- All times are since boot: setting the clock makes no kernel busy or quiet.
- While a client waits for a suspend (`PendingRequests.suspend_waiters`), only the messages count, and work under way is waited for.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE, members_of
from fractional_gpu.broker.runtime import Runtime
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.gpu.interface import DeviceActivity, GPUError
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.host.tree import Snapshot, scan

log = logging.getLogger(__name__)

QUIET_S: Final = 2.0
UNANSWERED_QUIET_S: Final = 5.0  # of a kernel whose extension does not answer: nothing else shows that it is idle
_INTERVAL_S: Final = 1.0
_QUIET_INTERVAL_S: Final = 2.0  # while no kernel works, or none is resident and idle: a resume gives no sign here
_SHORTEST_S: Final = 0.05
_READ_AGAIN_S: Final = 60.0  # a device that reported nothing
_S: Final = 1_000_000  # microseconds


class GpuActivity:
    """Watches the kernels of one broker that are resident and idle by their messages."""

    def __init__(
        self,
        broker: Runtime,
        since_boot_us: Callable[[], int] = since_boot_us,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._since_boot_us = since_boot_us
        self._steady_s = steady_s
        self._silent: dict[str, float] = {}  # devices that report nothing, and when each is read again
        self._settle_us = 0  # the longest of the devices'
        self._news = asyncio.Event()
        self._looks = False  # until `run`, no kernel counts as working: no look would ever end that

    def see(self, kernel: Kernel, view: LeaseView) -> None:
        """Note whether the kernel is in use by its messages. To be called before its `busy` is read."""
        if kernel.in_use or kernel.identity is None:
            kernel.gpu_work.clear()
        elif kernel.gpu_work.idle_us is None:
            kernel.gpu_work.idle_us, kernel.gpu_work.last_us = self._since_boot_us(), 0
            reports = self._looks and view.device_id not in self._silent
            kernel.gpu_work.working = reports and view.state is LeaseState.RESIDENT
            self._news.set()

    async def run(self) -> None:
        """Read the counters until cancelled: soon after a kernel became idle, and at intervals."""
        self._looks = True
        while True:
            self._news.clear()
            watched = self._watched()
            if watched:
                try:
                    await self._look(watched)
                except OSError as error:  # short of descriptors or memory: the next look may succeed
                    log.error("the devices' work could not be read: %s", error)  # noqa: TRY400 - the sentence says it
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s() if watched else _QUIET_INTERVAL_S):
                    await self._news.wait()
                await asyncio.sleep(_SHORTEST_S)

    async def is_quiet(self, kernel: Kernel) -> bool:
        """Return whether no device of the lease has seen work of its processes for `UNANSWERED_QUIET_S`.

        A device that reports nothing leaves it to the messages. One that cannot be read is not known to be quiet.
        """
        view, identity = self._broker.arbiter.lease(kernel.lease_id), kernel.identity
        if view is None or identity is None:
            return False
        devices = sorted(view.device_ids or ((view.device_id,) if view.device_id is not None else ()))
        known = {one.pid for one in self._broker.roots()}
        since_us = self._since_boot_us() - int(UNANSWERED_QUIET_S * _S)
        activities, snapshot = await asyncio.to_thread(self._read, devices, since_us, known)
        pids = self._pids(kernel, identity, snapshot)
        return all(
            device_id in self._silent
            or (
                (found := activities.get(device_id)) is not None
                and not any(at_us > since_us for pid, at_us in found.worked_us.items() if pid in pids)
            )
            for device_id in devices
        )

    def _watched(self) -> list[tuple[Kernel, ProcessIdentity, str]]:
        found = []
        for kernel, view in self._broker.views():
            if view.state is not LeaseState.RESIDENT:
                self._conclude(kernel, working=False)
            elif kernel.gpu_work.idle_us is None or kernel.identity is None or view.device_id is None:
                continue
            elif self._steady_s() >= self._silent.get(view.device_id, 0.0):
                found.append((kernel, kernel.identity, view.device_id))
        return found

    def _pause_s(self) -> float:
        """Return the time until the first kernel of which nothing is known yet can be known; longer while all are known to be quiet."""
        now_us = self._since_boot_us()
        working = [
            one for one in self._broker.kernels.values() if one.gpu_work.idle_us is not None and one.gpu_work.working
        ]
        if not working:
            return _QUIET_INTERVAL_S
        dues = [
            one.gpu_work.idle_us + self._settle_us - now_us
            for one in working
            if one.gpu_work.idle_us and not one.gpu_work.last_us
        ]
        return min(_INTERVAL_S, max(_SHORTEST_S, min(dues, default=_S) / _S))

    async def _look(self, watched: list[tuple[Kernel, ProcessIdentity, str]]) -> None:
        since_us = min(kernel.gpu_work.idle_us or 0 for kernel, _, _ in watched)
        known = {identity.pid for identity in self._broker.roots()}
        devices = sorted({device_id for _, _, device_id in watched})
        activities, snapshot = await asyncio.to_thread(self._read, devices, since_us, known)
        for kernel, identity, device_id in watched:
            activity = activities.get(device_id)
            if kernel.identity is not identity or kernel.gpu_work.idle_us is None:
                continue  # it was restarted or runs a cell meanwhile
            if activity is None:
                self._conclude(kernel, working=False)
            elif activity.worked_us or kernel.gpu_work.working:  # otherwise it stays quiet
                self._judge(kernel, identity, activity, snapshot)

    def _read(
        self, device_ids: list[str], since_us: int, known: Collection[int]
    ) -> tuple[dict[str, DeviceActivity], Snapshot | None]:
        """In a thread: read the counters; scan /proc only if a process other than a kernel itself worked."""
        found: dict[str, DeviceActivity] = {}
        for device_id in device_ids:
            try:
                activity = self._broker.monitor.activity(device_id, since_us)
            except GPUError as error:
                log.warning("the counters of device %s could not be read: %s", device_id, error)
                continue
            if activity is None:
                if device_id not in self._silent:
                    log.info(
                        "device %s does not report its processes' work: kernels are idle by their messages alone",
                        device_id,
                    )
                self._silent[device_id] = self._steady_s() + _READ_AGAIN_S
            else:
                self._silent.pop(device_id, None)
                found[device_id] = activity
                self._settle_us = max(self._settle_us, activity.settle_us)
        others = any(pid not in known for activity in found.values() for pid in activity.worked_us)
        return found, scan(LEASE_VARIABLE) if others else None

    def _judge(
        self, kernel: Kernel, identity: ProcessIdentity, activity: DeviceActivity, snapshot: Snapshot | None
    ) -> None:
        pids = self._pids(kernel, identity, snapshot)
        idle_us = kernel.gpu_work.idle_us or 0
        worked_us = max((at_us for pid, at_us in activity.worked_us.items() if pid in pids), default=0)
        if worked_us > idle_us:
            kernel.gpu_work.last_us = max(kernel.gpu_work.last_us, worked_us)
        unsettled = activity.known_until_us < idle_us + activity.settle_us
        recent = kernel.gpu_work.last_us > 0 and activity.known_until_us - kernel.gpu_work.last_us < QUIET_S * _S
        # While nothing is settled it stays as it is: a kernel that has been quiet for long does not become busy by waiting.
        self._conclude(kernel, working=recent or (unsettled and kernel.gpu_work.working))

    def _pids(self, kernel: Kernel, identity: ProcessIdentity, snapshot: Snapshot | None) -> set[int]:
        """Return the pids of the kernel's processes; without a snapshot only the kernel's own."""
        if snapshot is None:
            return {identity.pid}
        return {identity.pid} | {one.pid for one in members_of(kernel, identity, snapshot, self._broker.roots())}

    def _conclude(self, kernel: Kernel, *, working: bool) -> None:
        if kernel.gpu_work.working != working:
            kernel.gpu_work.working = working
            self._broker.sync_busy_state(kernel)
