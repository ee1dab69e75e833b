"""Compares the memory that devices report for each process with the broker's records, to enforce caps and claims and to show usage.

- The arbiter decides when a lease exceeds its cap. The lease's notebook then gets a notice. If the pool is set to `kill`, the lease's
  processes that are using a device are killed at once.
- Processes that use a managed device without a lease are shown in the status. If the pool is set to `refuse`, they are sent SIGTERM after
  `PATIENCE_S`, and SIGKILL after another `PATIENCE_S`. Display programs, NVIDIA's servers and processes marked with an active lease's id
  are left alone.
- Processes are identified by their start time and signalled through a pidfd, never by pid alone.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fractional_gpu.broker.clock import within
from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.context_sizes import FLOOR_MIB, ContextSize, ContextSizes
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import members_of
from fractional_gpu.core.effects import CapBreached
from fractional_gpu.core.model import Breach, LeaseState, LeaseView, Strangers
from fractional_gpu.gpu.interface import DeviceActivity, DeviceUse, GPUError, ProcessKind, ProcessUse
from fractional_gpu.host.accounts import user_name
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import ProcessIdentity, Snapshot, identify, open_pidfd, owner_and_name
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.messages import GateVerb
from fractional_gpu.protocol.status import Stranger

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

log = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0
Owner = tuple[str, ProcessIdentity]
"""The owner of a process: the lease's id, and the process's identity at the time its owner was determined."""
_SERVERS: Final = ("nvidia-cuda-mps", "nv-hostengine", "nvidia-persiste")


@dataclass(slots=True)
class _StrangerToEnd:
    """A process without a lease that is going to be ended.

    Records when it was first seen, whether it got SIGTERM, and whether the broker's user is permitted to signal it.
    """

    since_s: float
    terminated: bool = False
    permitted: bool = True


class Enforcement:
    def __init__(self, broker: "Broker", clock: Callable[[], float] = time.monotonic) -> None:
        self.strangers: dict[str, list[Stranger]] = {}  # by device, with everything that is known about them
        self.exempt_pids: set[int] = set()  # pids of processes that the broker uses to test checkpoints
        self._broker = broker
        self._clock = clock
        self._users: dict[str, set[ProcessIdentity]] = {}  # by lease: its processes that use a device
        self._unwanted: dict[ProcessIdentity, _StrangerToEnd] = {}

    def see(
        self, uses: Mapping[str, DeviceUse | None], owners: Mapping[int, Owner], processes: Snapshot | None
    ) -> None:
        """Evaluate a sample, which contains each device's use and the lease that owns each process.

        `processes` is None if the only processes using a device are kernels themselves.
        """
        self._users = {}
        unwanted: dict[ProcessIdentity, _StrangerToEnd] = {}
        for device_id, use in uses.items():
            users = use.processes if use is not None else ()
            for process in users:
                if process.pid in owners:
                    lease_id, identity = owners[process.pid]
                    self._users.setdefault(lease_id, set()).add(identity)
            strangers = {_described(process): process for process in users if process.pid not in owners}
            self.strangers[device_id] = sorted(strangers, key=lambda one: -one.used_mib)
            if strangers and self._refuses(device_id):
                for identity in self._foreign(strangers, processes):
                    unwanted[identity] = self._unwanted.get(identity) or _StrangerToEnd(self._clock())
        self._unwanted = unwanted
        for identity, stranger in unwanted.items():
            self._end_stranger(identity, stranger)

    def breached(self, breach: CapBreached) -> None:
        kernel = self._broker.kernels.get(breach.lease_id)
        if kernel is None:
            return
        sentence = breach.sentence
        if breach.action is Breach.KILL:
            alive = [one for one in self._users.get(breach.lease_id, set()) if not self._signal(one, signal.SIGKILL)]
            if alive:
                sentence += f" (the broker is not permitted to end process {alive[0].pid})"
        if kernel.launch.command:
            kernel.notices.append(sentence)  # its runner prints it
            kernel.notify()
        elif breach.action is Breach.KILL:
            kernel.notices.append(sentence)  # for the kernel that follows this one
        elif kernel.link is not None:
            kernel.link.send(GateVerb.NOTICE, sentence=sentence)

    def _refuses(self, device_id: str) -> bool:
        pools = self._broker.arbiter.pools().values()
        return any(device_id in pool.devices and pool.strangers is Strangers.REFUSE for pool in pools)

    def _foreign(
        self, strangers: Mapping[Stranger, ProcessUse], processes: Snapshot | None
    ) -> Iterator[ProcessIdentity]:
        for one, process in strangers.items():
            lease_id = processes.marker(one.pid) if processes is not None else None
            is_spared = (
                one.pid in self.exempt_pids or one.command.startswith(_SERVERS) or lease_id in self._broker.kernels
            )
            if process.kind is not ProcessKind.GRAPHICS and not is_spared:
                with suppress(ProcessLookupError, PermissionError, ValueError):  # it ended, or is unreadable
                    yield identify(one.pid)

    def _end_stranger(self, identity: ProcessIdentity, stranger: _StrangerToEnd) -> None:
        there_s = self._clock() - stranger.since_s
        number = signal.SIGKILL if there_s >= 2 * PATIENCE_S else signal.SIGTERM
        if there_s < PATIENCE_S or not stranger.permitted or (number is signal.SIGTERM and stranger.terminated):
            return
        log.warning(
            "process %d uses a device whose pool refuses programs without a lease: %s", identity.pid, number.name
        )
        stranger.terminated, stranger.permitted = True, self._signal(identity, number)

    @staticmethod
    def _signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
        try:
            pidfd = open_pidfd(identity)
        except ProcessLookupError:
            return True  # it has ended
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return True
        except PermissionError:
            log.error("the broker's user is not permitted to end process %d", identity.pid)  # noqa: TRY400 - the sentence says it
            return False
        finally:
            os.close(pidfd)
        return True


def _described(process: ProcessUse) -> Stranger:
    try:
        uid, name = owner_and_name(process.pid)
    except (ProcessLookupError, PermissionError):
        return Stranger(pid=process.pid, user="unknown", used_mib=process.used_mib)
    command, user = printable(name) or "?", user_name(uid)
    return Stranger(pid=process.pid, user=user, used_mib=process.used_mib, command=command, uid=uid)


# Learns the memory of contexts on each kind of device, so that the limits of frameworks leave room for contexts.
#
# At each suspend, two figures are known for one moment under the lock: the device's figure for the process, and the extension's figure for
# the frameworks (its answer to `shrink`). A kernel over its cap is also asked as soon as it is idle, because without suspends only this
# shows that a limit left too little room. Kernels get the result with their next grant, or at once if they were over their cap.


_SHRINK_TIMEOUT_S: Final = 10.0
_AGAIN_S: Final = 5.0
_NO_USER: Final = -1  # a uid that no user has


class ContextLearner:
    def __init__(self, broker: "Broker", sizes: ContextSizes) -> None:
        self.sizes = sizes
        self._broker = broker
        self._asking: dict[str, asyncio.Task[None]] = {}  # by lease

    def context_mib(self, lease_id: str, device_ids: Sequence[str]) -> int:
        devices, kernel = self._broker.devices, self._broker.kernels.get(lease_id)
        uid = kernel.uid if kernel is not None else _NO_USER
        known = [self.sizes.estimate_mib(devices[one].name, uid) for one in device_ids if one in devices]
        return max(known, default=FLOOR_MIB)

    def suspended(self, kernel: Kernel) -> None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or view.state is not LeaseState.SUSPENDED or kernel.identity is None or kernel.link is None:
            return
        if kernel.identity in kernel.checkpoint.sizes:
            self._learn(kernel, kernel.checkpoint.homes, kernel.checkpoint.sizes[kernel.identity])

    def breached(self, kernel: Kernel) -> None:
        """Start a task that waits until a kernel over its memory cap is idle, then asks how much memory its frameworks hold."""
        if kernel.lease_id not in self._asking:
            task = asyncio.get_running_loop().create_task(self._ask(kernel))
            self._asking[kernel.lease_id] = task
            task.add_done_callback(lambda _: self._asking.pop(kernel.lease_id, None))

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, kernel: Kernel) -> None:
        """Once the kernel is idle, have it free its caches, then compare its figures with the device's. Safe to cancel."""
        while True:
            change = kernel.change()
            if kernel.busy:
                await change.wait()
                continue
            link, device_ids = kernel.link, self._broker.records.may_use(kernel)
            if link is None or not device_ids:
                return  # it ended, or is being suspended, which gives the same figures
            word = await link.ask(GateVerb.SHRINK, _SHRINK_TIMEOUT_S)
            if word != "busy":  # busy if a cell began before the main loop read the command
                break
            await asyncio.sleep(_AGAIN_S)
        if word == "done" and await self._compare(kernel, link, device_ids):
            link.send(GateVerb.LIMIT, environment=self._broker.environment(kernel.lease_id, device_ids))

    async def _compare(self, kernel: Kernel, link: GateLink, device_ids: Sequence[str]) -> bool:
        try:
            use = await asyncio.to_thread(self._broker.monitor.use, device_ids[0])
        except GPUError:
            return False  # the next breach or suspend is another chance
        if kernel.in_use or kernel.identity is None or kernel.link is not link:
            return False  # the device's figure is from a later moment than the answer
        used_mib = sum(one.used_mib for one in use.processes if one.pid == kernel.identity.pid)
        self._learn(kernel, device_ids, used_mib)
        return device_ids == self._broker.records.may_use(kernel)

    def _learn(self, kernel: Kernel, device_ids: Sequence[str], used_mib: int) -> None:
        """Learn the size of a kernel's CUDA context. Do nothing if the kernel has several devices, because the size on each is unknown."""
        reserved_mib = kernel.link.reserved_mib if kernel.link is not None else None
        view = self._broker.arbiter.lease(kernel.lease_id)
        device = self._broker.devices.get(device_ids[0]) if len(device_ids) == 1 else None
        if reserved_mib is None or view is None or device is None or not used_mib:
            return
        figure = ContextSize(kernel.uid, used_mib - reserved_mib)
        if self.sizes.saw(device.name, kernel.lease_id, figure, view.spec.reserve_mib):
            context_mib = self.context_mib(kernel.lease_id, device_ids)
            log.info("a CUDA context on %s takes %d MiB (uid %d)", device.name, context_mib, kernel.uid)


# Checks that a kernel that runs no cell is really idle. The devices' counters of work decide this together with IOPub.
#
# A thread that a cell left behind, or a child process, works without a busy message. A resident kernel that has just become idle therefore
# counts as busy until the counters have shown that its whole process tree is quiet. It counts as busy again whenever they show work.
#
# - A device reports work with a delay (`settle_us`). Until then its counters may still show the cell that has just ended.
# - Work makes a kernel busy for `QUIET_S` after it was last seen, so that a loop with short pauses counts as continuous work.
# - For a device that reports nothing (MIG instances, some virtual machines), only messages count. Such a device is read again every minute,
#   in case its driver was restarted. A command (`jupyter gpu run`) sends no messages. On such a device it is busy while it is resident,
#   unless its connections show when it is in use.
# - All times are since boot, so that setting the clock makes no kernel busy or quiet.
# - While a client waits for a suspend (`PendingRequests.suspend_waiters`), only messages count. The suspend waits for other work to end.


QUIET_S: Final = 2.0
UNANSWERED_QUIET_S: Final = 5.0  # for a kernel whose extension does not answer, as nothing else shows that it is idle
_INTERVAL_S: Final = 1.0
_QUIET_INTERVAL_S: Final = 2.0  # while no kernel works, or none is resident and idle; a resume sets no event here
_SHORTEST_S: Final = 0.05
_READ_AGAIN_S: Final = 60.0  # for a device that reported nothing
_S: Final = 1_000_000  # microseconds


class GpuActivity:
    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._silent: dict[str, float] = {}  # devices that report nothing, with the time when each is read again
        self._settle_us = 0  # the longest of all devices
        self._news = asyncio.Event()
        self._looks = False  # no kernel counts as working before `run`, because no look would end that

    def see(self, kernel: Kernel, view: LeaseView) -> None:
        """Record whether the kernel's messages show that it is in use. Call this before reading the kernel's `busy`."""
        if kernel.in_use or kernel.identity is None:
            kernel.gpu_work.clear()
        elif kernel.gpu_work.idle_us is None:
            kernel.gpu_work.idle_us, kernel.gpu_work.last_us = since_boot_us(), 0
            reports = self._looks and view.device_id not in self._silent
            known = reports or (self._looks and self._is_unknown(kernel))
            kernel.gpu_work.working = known and view.state is LeaseState.RESIDENT
            self._news.set()

    async def run(self) -> None:
        self._looks = True
        while True:
            self._news.clear()
            watched = self._watched()
            if watched:
                try:
                    await self._look(watched)
                except OSError as error:  # such as a lack of descriptors; the next look may succeed
                    log.error("cannot tell when processes last used the devices: %s", error)  # noqa: TRY400 - the sentence says it
            if await within(self._pause_s() if watched else _QUIET_INTERVAL_S, self._news):
                await asyncio.sleep(_SHORTEST_S)

    async def is_quiet(self, kernel: Kernel) -> bool:
        """Return whether the kernel's processes have done no work on its devices for `UNANSWERED_QUIET_S`.

        A kernel whose devices don't report work is considered quiet. A kernel with a device that can't be read is not.
        """
        view, identity = self._broker.arbiter.lease(kernel.lease_id), kernel.identity
        if view is None or identity is None:
            return False
        devices = sorted(view.device_ids)
        known = {one.pid for one in self._broker.roots()}
        since_us = since_boot_us() - int(UNANSWERED_QUIET_S * _S)
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

    @staticmethod
    def _is_unknown(kernel: Kernel) -> bool:
        return kernel.launch.command and not kernel.launch.served  # a command sends no messages

    def _watched(self) -> list[tuple[Kernel, ProcessIdentity, str]]:
        found = []
        for kernel, view in self._broker.views():
            if view.state is not LeaseState.RESIDENT:
                self._conclude(kernel, working=False)
            elif kernel.gpu_work.idle_us is None or kernel.identity is None or view.device_id is None:
                continue
            elif time.monotonic() >= self._silent.get(view.device_id, 0.0):
                found.append((kernel, kernel.identity, view.device_id))
        return found

    def _pause_s(self) -> float:
        now_us = since_boot_us()
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
                continue  # the kernel has restarted or runs a cell
            if activity is None:
                self._conclude(kernel, working=self._is_unknown(kernel))
            elif activity.worked_us or kernel.gpu_work.working:  # otherwise it stays quiet
                self._judge(kernel, identity, activity, snapshot)

    def _read(
        self, device_ids: list[str], since_us: int, known: Collection[int]
    ) -> tuple[dict[str, DeviceActivity], Snapshot | None]:
        """Read when processes last worked on the devices. Scan /proc if any of these processes is not itself a kernel. Blocks."""
        found: dict[str, DeviceActivity] = {}
        for device_id in device_ids:
            try:
                activity = self._broker.monitor.activity(device_id, since_us)
            except GPUError as error:
                log.warning("cannot read the counters of device %s: %s", device_id, error)
                continue
            if activity is None:
                if device_id not in self._silent:
                    log.info(
                        "device %s does not report process activity, so idle kernels can only be detected from their messages",
                        device_id,
                    )
                self._silent[device_id] = time.monotonic() + _READ_AGAIN_S
            else:
                self._silent.pop(device_id, None)
                found[device_id] = activity
                self._settle_us = max(self._settle_us, activity.settle_us)
        others = any(pid not in known for activity in found.values() for pid in activity.worked_us)
        return found, self._broker.scans.take() if others else None

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
        # While the reports have not settled, keep the state, so that a kernel that has long been quiet does not become busy by waiting.
        self._conclude(kernel, working=recent or (unsettled and kernel.gpu_work.working))

    def _pids(self, kernel: Kernel, identity: ProcessIdentity, snapshot: Snapshot | None) -> set[int]:
        if snapshot is None:
            return {identity.pid}
        return {identity.pid} | {one.pid for one in members_of(kernel, identity, snapshot, self._broker.roots())}

    def _conclude(self, kernel: Kernel, *, working: bool) -> None:
        if kernel.gpu_work.working != working:
            kernel.gpu_work.working = working
            self._broker.sync_busy_state(kernel)
