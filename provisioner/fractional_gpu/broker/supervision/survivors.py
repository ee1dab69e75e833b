"""Deals with processes and device memory left behind when a kernel ends, and finds out what killed the kernel.

- A lease's memory is free when no process in the kernel's tree holds device memory, on a device or saved on the host, and no device still
  counts it as used. The driver frees memory only after a process has exited. If any of this is unknown, the memory is not considered free.
- While processes with device memory remain, the lease continues. It keeps its memory and its turns, counts against its owner's limits, and
  is resumed if it was suspended. The lease's next kernel takes over the lease. Processes have `_MOMENT_S` to exit along with their kernel.
- Memory that a device still counts as used after `FREED_S`, but attributes to no process, is treated as used without a lease.
- With `after_kernel: "end"`, remaining processes are ended if they were seen in the tree and their identity and user match.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fractional_gpu.broker.clock import now_ms, within
from fractional_gpu.broker.kernels.ending import end_processes, wait_for_end
from fractional_gpu.broker.kernels.kernel import Kernel, Survivor
from fractional_gpu.broker.kernels.process_inspector import HostSnapshot, ProcessInspector, uncounted_mib
from fractional_gpu.broker.lanes import SWAPS
from fractional_gpu.core.events import LeaseReleased, LeftBehind
from fractional_gpu.core.model import AfterKernel, LeaseState, LeaseView
from fractional_gpu.gpu.interface import DeviceUse, GPUError
from fractional_gpu.host.memory import kill_count, kill_counter, smallest_limit, was_killed
from fractional_gpu.host.process import ProcessIdentity, is_alive, owner_uid, read_command, read_stat
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.errors import ConflictError

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

# Ends leases whose kernels no process can start again. Only a lease's server can do so: a Jupyter server, a script that uses
# jupyter_client, or a launcher that becomes the kernel.
#
# - The server is the process that requested the lease or, later, the process that attached the kernel. A server that takes over a kernel
#   attaches it again.
# - If both the kernel and the server have ended, the lease ends at once. While the server lives, the lease is kept for `unattached_ttl`.
# - If no process was attached and the server has ended, it may have started a process first. The lease ends when no process carries its id.
# - If the server is unknown (in another pid namespace, or if the lease had no record), nothing is ended.


ABANDONED: Final = "abandoned"
"""The reason shown in a lease's history, and in the counters, if the lease ended because its server had exited."""
_EVERY_S: Final = 1.0


def has_lost_server(kernel: Kernel) -> bool:
    """Return whether the lease's server is known and has exited. A server that can't be checked is assumed to be alive."""
    try:
        return kernel.launch.server is not None and not is_alive(kernel.launch.server)
    except OSError:  # it is unreadable, or the broker is out of descriptors
        return False


class AbandonedLeases:
    def __init__(self, broker: "Broker") -> None:
        self._broker = broker

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()

    async def look(self) -> None:
        lost = [kernel for kernel in self._broker.kernels.values() if self._is_abandoned(kernel)]
        if any(not kernel.launch.had_process for kernel in lost):
            try:
                carried = (await asyncio.to_thread(self._broker.scans.take)).marked()
            except OSError as error:
                log.warning("cannot search for the processes of abandoned leases: %s; retrying", error)
                return
            lost = [kernel for kernel in lost if kernel.launch.had_process or kernel.lease_id not in carried]
        for kernel in lost:
            # While the processes were read, a server may have been named or a process attached.
            if self._is_abandoned(kernel):
                self._broker.dispatch(LeaseReleased(at_ms=now_ms(), lease_id=kernel.lease_id, reason=ABANDONED))

    def _is_abandoned(self, kernel: Kernel) -> bool:
        if kernel.identity is not None or kernel.ending.task is not None or not has_lost_server(kernel):
            return False
        view = self._broker.arbiter.lease(kernel.lease_id)
        return view is not None and view.state is LeaseState.UNATTACHED


log = logging.getLogger(__name__)

FREED_S: Final = 5.0
_MOMENT_S: Final = 0.5
_AGAIN_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0  # between looks without a result; each pause is twice as long as the one before
_SAMPLED_S: Final = 10.0  # the devices are sampled again within this time
_SLACK_MIB: Final = 16
_LONGEST_COMMAND: Final = 200
_MOST_WORDS: Final = 20  # of a command
_IN_A_SWAP: Final = frozenset(
    {LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING, LeaseState.QUARANTINED}
)


class Survivors:
    def __init__(self, broker: "Broker", inspector: ProcessInspector) -> None:
        self.uncounted_mib: dict[str, int] = {}  # by device: the memory that it usually charges to no process
        self.unfreed: dict[str, int] = {}  # the same, for devices that did not free the memory of an ended process
        self.sampled = asyncio.Event()  # set at the arbiter's next sample of the devices, and then replaced
        self._broker = broker
        self._inspector = inspector
        self._ends: set[asyncio.Task[None]] = set()

    def kernel_ended(self, kernel: Kernel, root: ProcessIdentity | None) -> None:
        """Begin freeing the reservation of a kernel whose process exited or was replaced.

        The reservation is freed once no device counts the kernel's memory any more. The process is no longer watched.
        """
        if not kernel.ending.survivors:
            kernel.ending.root = root
        if kernel.ending.task is None:
            if _holds(self._view(kernel)):
                kernel.ending.task = asyncio.get_running_loop().create_task(self._settle(kernel, root))
                kernel.ending.task.add_done_callback(_log_failure)
            else:
                self._free(kernel)

    async def release(self, kernel: Kernel, reason: str = "released") -> None:
        """End the lease now, or when its kernel's last processes exit. Return once it is known whether any remain.

        The lease still ends if this call is cancelled.
        """
        if not kernel.ending.released:
            kernel.ending.released, kernel.ending.reason = True, reason
        kernel.notify()
        if kernel.launch.claim:  # the programs under a claim are not ours
            self._free(kernel)
        elif kernel.ending.task is None:
            root = kernel.identity
            kernel.forget_process()
            self.kernel_ended(kernel, root)
        await self.settled(kernel)

    async def settled(self, kernel: Kernel) -> None:
        while (ending := kernel.ending.task) is not None:
            await asyncio.wait([ending])

    def adopt(self, kernel: Kernel) -> None:
        if kernel.ending.survivors:
            kernel.forget_process()
            kernel.ending.survivors = ()

    async def _settle(self, kernel: Kernel, root: ProcessIdentity | None) -> None:
        begun_s, pause_s = time.monotonic(), _AGAIN_S
        try:
            while _holds(self._view(kernel)):
                try:
                    is_free = await self._settle_now(kernel, root, begun_s)
                except (GPUError, OSError) as error:
                    log.warning(
                        "lease %s: cannot yet find the processes that its kernel left behind: %s",
                        kernel.lease_id[:8],
                        error,
                    )
                    await asyncio.sleep(pause_s)
                    # The time in which the devices must free memory starts with the first successful look.
                    begun_s, pause_s = time.monotonic(), min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                if is_free:
                    break
                if is_free is False:
                    return
        finally:
            kernel.ending.task = None
        self._free(kernel)

    async def _settle_now(self, kernel: Kernel, root: ProcessIdentity | None, begun_s: float) -> bool | None:
        """Return True if the memory is free, False if processes keep the lease, or None to check again. Raises GPUError or OSError."""
        left, unfreed = await self._look(kernel, root)
        passed_s = time.monotonic() - begun_s
        if left and passed_s < _MOMENT_S:
            await wait_for_end([one.identity for one in left], _MOMENT_S - passed_s)
            return None
        if left:
            return False if self.keep(kernel, left) else None
        if unfreed and passed_s < FREED_S:
            await asyncio.sleep(_AGAIN_S)
            return None
        if unfreed:
            await self._give_up(kernel, unfreed)
        return True

    async def _look(self, kernel: Kernel, root: ProcessIdentity | None) -> tuple[list[Survivor], list[str]]:
        view = self._view(kernel)
        device_ids = view.device_ids if view is not None else ()
        host = await self._inspector.take(kernel.measurement.devices_to_read(device_ids))
        pids = {one.pid for one in kernel.members} | ({root.pid} if root is not None else set())
        left = await self.find(kernel, root, host, saved=view is None or view.state in _IN_A_SWAP)
        return left, [device for device, use in host.uses.items() if not self._is_freed(device, use, pids)]

    async def find(
        self, kernel: Kernel, root: ProcessIdentity | None, host: HostSnapshot, *, saved: bool
    ) -> list[Survivor]:
        """Return the processes with device memory, largest first. With `saved`, include those whose memory may be saved on the host.

        Raises GPUError.
        """
        found = await SWAPS.run(
            _described_all, await self._inspector.with_memory(kernel, root, host, saved=saved), host
        )
        return sorted(found, key=lambda one: (-one.used_mib, one.identity))

    def _is_freed(self, device_id: str, use: DeviceUse, pids: set[int]) -> bool:
        if any(one.pid in pids for one in use.processes):
            return False  # the processes have ended, but are still counted
        known_mib = self.uncounted_mib.get(device_id)
        return known_mib is None or uncounted_mib(use) <= known_mib + _SLACK_MIB

    async def _give_up(self, kernel: Kernel, device_ids: list[str]) -> None:
        """Count device memory that was not freed as used without a lease.

        Return once the arbiter knows about it. Only after that may other leases get the rest of this lease's memory.
        """
        log.error(
            "lease %s: %g s after its kernel ended, %s still reports its memory as in use; until freed, it counts as used without a lease",
            kernel.lease_id[:8],
            FREED_S,
            ", ".join(device_ids),
        )
        for device_id in device_ids:
            self.unfreed.setdefault(device_id, self.uncounted_mib.get(device_id, 0))
        await within(_SAMPLED_S, self.sampled)

    def unfreed_mib(self, device_id: str, use: DeviceUse) -> int:
        """Return the MiB still counted for ended processes. If no kernel is ending, note how much memory is charged to no process."""
        mib = uncounted_mib(use)
        if device_id in self.unfreed:
            beyond_mib = mib - self.unfreed[device_id]
            if beyond_mib > _SLACK_MIB:
                return beyond_mib
            del self.unfreed[device_id]
        if not any(kernel.ending.task is not None for kernel in self._broker.kernels.values()):
            self.uncounted_mib[device_id] = mib
        return 0

    def was_sampled(self) -> None:
        self.sampled.set()
        self.sampled = asyncio.Event()

    def keep(self, kernel: Kernel, left: list[Survivor]) -> bool:
        """Let these processes keep the lease, and watch the first. Return False if it has exited. Raises OSError if it can't be watched."""
        first = left[0].identity
        try:
            kernel.watch_process(first, partial(self._broker.process_gone, kernel, first))
        except ProcessLookupError:
            return False
        kernel.ending.survivors = tuple(left)
        self._broker.dispatch(
            LeftBehind(at_ms=now_ms(), lease_id=kernel.lease_id, what=described(kernel.ending.survivors))
        )
        self._broker.records.save(kernel)
        kernel.notify()
        if self._policy(kernel) is AfterKernel.END:
            task = asyncio.get_running_loop().create_task(self._end_by_policy(kernel))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)
        return True

    def refresh(self, kernel: Kernel, used_mib: Mapping[int, int]) -> None:
        """Update the memory of the processes an ended kernel left behind. If different processes hold memory now, search again."""
        view = self._view(kernel)
        if kernel.ending.task is not None or view is None or view.state is not LeaseState.RESIDENT:
            return
        known = {one.identity.pid for one in kernel.ending.survivors if one.used_mib}
        if known and known != set(used_mib):
            self.kernel_ended(kernel, kernel.identity)
        else:
            kernel.ending.survivors = tuple(
                replace(one, used_mib=used_mib.get(one.identity.pid, 0)) for one in kernel.ending.survivors
            )

    def _free(self, kernel: Kernel) -> None:
        kernel.forget_process()
        kernel.ending.survivors, kernel.members = (), frozenset()
        if kernel.ending.released:
            ended = LeaseReleased(at_ms=now_ms(), lease_id=kernel.lease_id, reason=kernel.ending.reason)
            self._broker.dispatch(ended)
        elif has_lost_server(kernel):
            self._broker.dispatch(LeaseReleased(at_ms=now_ms(), lease_id=kernel.lease_id, reason=ABANDONED))
        else:
            self._broker.exited(kernel)

    async def end(self, kernel: Kernel) -> None:
        """End the kernel's remaining processes, and return when its memory is free.

        Raises ConflictError. Processes that have already been signalled still exit if this call is cancelled.
        """
        await self.settled(kernel)
        if not kernel.ending.survivors:
            raise ConflictError(
                "this lease's kernel left no processes behind; to end a running kernel, shut it down in Jupyter or evict it",
                reason="nothing-left",
            )
        await end_processes(partial(self._certain_processes, kernel), "process {pid}, which the kernel left behind,")
        while kernel.ending.survivors or kernel.ending.task is not None:
            change = kernel.change()
            await self.settled(kernel)
            others = tuple(
                one
                for one in kernel.ending.survivors
                if is_alive(one.identity) and not _is_of(one.identity.pid, kernel.uid)
            )
            if others:
                raise ConflictError(
                    f"{described(others)} does not belong to the lease's user, so the broker will not end it; its owner can",
                    reason="not-certain",
                )
            if kernel.ending.survivors:
                await change.wait()

    async def _end_by_policy(self, kernel: Kernel) -> None:
        log.info(
            "lease %s: ending the processes that its kernel left behind, as its pool is configured to: %s",
            kernel.lease_id[:8],
            described(kernel.ending.survivors),
        )
        left = partial(self._certain_processes, kernel, spare_root=True)
        while True:
            try:
                await end_processes(left, "process {pid}, which the kernel left behind,")
            except ConflictError as error:
                log.error("lease %s: %s", kernel.lease_id[:8], error)  # noqa: TRY400 - the sentence says it
            except OSError as error:  # out of descriptors; only a new attempt could end them
                log.warning(
                    "lease %s: cannot yet end the processes that its kernel left behind: %s", kernel.lease_id[:8], error
                )
                await asyncio.sleep(_LONGEST_PAUSE_S)
                continue
            return

    async def _certain_processes(self, kernel: Kernel, *, spare_root: bool = False) -> list[ProcessIdentity]:
        if not kernel.ending.survivors:
            return []
        try:
            host = await self._inspector.take(None)
            left = await self.find(kernel, kernel.identity, host, saved=True)
        except GPUError:
            left = list(kernel.ending.survivors)
        return [
            one.identity
            for one in left
            if _is_of(one.identity.pid, kernel.uid) and not (spare_root and one.identity == kernel.ending.root)
        ]

    async def close(self) -> None:
        tasks = [kernel.ending.task for kernel in self._broker.kernels.values() if kernel.ending.task is not None]
        for task in (*tasks, *self._ends):
            task.cancel()
        await asyncio.gather(*tasks, *self._ends, return_exceptions=True)

    def _view(self, kernel: Kernel) -> LeaseView | None:
        return self._broker.arbiter.lease(kernel.lease_id)

    def _policy(self, kernel: Kernel) -> AfterKernel:
        view = self._view(kernel)
        pool = self._broker.arbiter.pools().get(view.spec.pool) if view is not None else None
        return pool.after_kernel if pool is not None else AfterKernel.KEEP


def described(left: tuple[Survivor, ...]) -> str:
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return f"process {left[0].identity.pid} ({left[0].name}){more}"


def _holds(view: LeaseView | None) -> bool:
    if view is None or view.state is LeaseState.UNATTACHED:
        return False
    return view.reserved_mib > 0 or view.saved_mib > 0


def _is_of(pid: int, uid: int) -> bool:
    try:
        return owner_uid(pid) == uid
    except (ProcessLookupError, PermissionError):
        return False


def _described_all(identities: Iterable[ProcessIdentity], host: HostSnapshot) -> list[Survivor]:
    found = []
    for identity in identities:
        name, command = "?", ""
        with suppress(OSError):  # it ended, or the broker may not see this
            name = printable(read_stat(identity.pid).comm) or "?"
            command = printable(" ".join(islice(read_command(identity.pid), _MOST_WORDS)).strip())[:_LONGEST_COMMAND]
        used_mib = host.used_mib(identity.pid)
        found.append(Survivor(identity=identity, used_mib=used_mib, name=name, command=command or name))
    return found


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("could not find the processes that a kernel left behind", exc_info=error)


# Finds out whether the system's out-of-memory killer ended a kernel, for the message to the user. It reads the counters of control groups.
#
# - Each group counts its killed processes. A kernel that ends after its group's counter has risen counts as killed. One kill explains the
#   end of one kernel, and only within `_WINDOW_S`, which is longer than a process of many GiB takes to end.
# - The broker is not the kernels' parent, so it cannot read how they ended. If it may read the system's log, the log decides. Otherwise
#   another process of the group that was killed in the same seconds can be mistaken for the kernel.


_WINDOW_S: Final = 15.0


@dataclass(slots=True)
class _Counter:
    """How many of a control group's processes Linux has killed for lack of memory. The first `accounted` can't explain a new exit."""

    limited_by: str
    accounted: int
    latest: int
    latest_s: float


class OomKills:
    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # by a kernel's pid
        self._counters: dict[Path, _Counter] = {}

    def follow(self, pid: int, now_s: float) -> None:
        try:
            file = kill_counter(pid)
            if file not in self._counters:
                count = kill_count(file)
                self._counters[file] = _Counter(smallest_limit(pid).limited_by, count, count, now_s)
            self._files[pid] = file
        except (OSError, ValueError) as error:
            log.debug("cannot read the out-of-memory kill count for process %d: %s", pid, error)

    def look(self, pids: Collection[int], now_s: float) -> None:
        """Count kills in the control groups of these running kernels. Kills older than `_WINDOW_S` no longer explain why a kernel ended."""
        self._files = {pid: file for pid, file in self._files.items() if pid in pids}
        for pid in set(pids) - self._files.keys():
            self.follow(pid, now_s)
        self._counters = {file: self._counters[file] for file in set(self._files.values())}
        for file, counter in self._counters.items():
            if now_s - counter.latest_s >= _WINDOW_S:
                counter.accounted = max(counter.accounted, counter.latest)
                counter.latest, counter.latest_s = _count(file, counter.latest), now_s

    def account_for(self, identity: ProcessIdentity) -> str:
        file = self._files.pop(identity.pid, None)
        counter = self._counters.get(file) if file is not None else None
        if file is None or counter is None or _count(file, counter.accounted) <= counter.accounted:
            return ""
        try:
            if was_killed(identity) is False:
                return ""
        except (OSError, ValueError) as error:
            log.debug("cannot read the system log: %s", error)
        counter.accounted += 1
        return counter.limited_by


def _count(file: Path, otherwise: int) -> int:
    try:
        return kill_count(file)
    except (OSError, ValueError):
        return otherwise  # the group disappeared with its last process
