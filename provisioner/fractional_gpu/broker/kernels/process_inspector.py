"""Determines kernels' current states from the operating system, the driver and the devices.

A `HostSnapshot` is one pass over /proc and one reading of each requested device. Several checks can share a snapshot, but only a new one is
certain to be current. A CUDA process that no device lists uses at most the memory that the devices do not charge to any process. This holds
only if the devices are known to list pids from this pid namespace; otherwise, its memory use is unknown. A process that was forked from a
CUDA process and has not called exec has inherited a context it cannot use, so the driver's answers about it are meaningless. The driver is
not asked about a stopped process, because it would never answer.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.lanes import SWAPS
from fractional_gpu.gpu.interface import DeviceUse, GPUError, GPUErrorCode, Monitor, ProcessState
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import ProcessIdentity, Snapshot, holds_open, identify, scan

LEASE_VARIABLE = "JUPYTER_GPU_LEASE"
ENDED = (GPUErrorCode.NO_SUCH_PROCESS, GPUErrorCode.WRONG_IDENTITY)
FRESH_S = 0.25  # processes read longer ago are read again, even for a first look
NOMINAL_MIB = 64
"""The minimum memory in MiB assumed for a CUDA process that no device lists."""

# A failed worker says nothing about the process in question.
_WORKERS = (GPUErrorCode.WORKER_HUNG, GPUErrorCode.WORKER_DIED, GPUErrorCode.WORKER_BUSY)
_NO_CUDA = (ProcessState.NO_CONTEXT, ProcessState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    processes: Snapshot
    uses: Mapping[str, DeviceUse]

    def used_mib(self, pid: int) -> int:
        """Return how many MiB the process holds across all devices, or 0 if no device lists it."""
        return sum(one.used_mib for use in self.uses.values() for one in use.processes if one.pid == pid)

    def free_mib(self, device_id: str) -> int:
        if device_id not in self.uses:
            raise GPUError(GPUErrorCode.NO_SUCH_DEVICE, f"device {device_id} was not found")
        return self.uses[device_id].memory_mib - self.uses[device_id].used_mib

    def uncounted_mib(self) -> int:
        return sum(map(uncounted_mib, self.uses.values()))

    def is_alone(self, pids: Collection[int], device_id: str) -> bool:
        self.free_mib(device_id)
        return all(one.pid in pids for one in self.uses[device_id].processes)

    def homes(self, pids: Collection[int]) -> tuple[str, ...]:
        mine = {
            device_id: sum(one.used_mib for one in use.processes if one.pid in pids)
            for device_id, use in self.uses.items()
        }
        return tuple(sorted((device for device, mib in mine.items() if mib), key=lambda device: -mine[device]))


def uncounted_mib(use: DeviceUse) -> int:
    return max(0, use.used_mib - sum(one.used_mib for one in use.processes))


class ProcessScans:
    """Shared scans of /proc, which run one at a time. Thread-safe.

    If `kernels` is set to the live kernels, scans read only the environments of their users' processes. Otherwise, they read every
    environment.
    """

    def __init__(self) -> None:
        self.kernels: Mapping[str, Kernel] | None = None
        self._lock = threading.Lock()
        self._last: tuple[float, Snapshot] | None = None

    def take(self, max_age_s: float = 0.0) -> Snapshot:
        """Return a scan that began after this call, or at most `max_age_s` seconds before it. Blocks. Raises OSError."""
        asked_s = time.monotonic()
        with self._lock:
            if self._last is None or self._last[0] < asked_s - max_age_s:
                kernels = self.kernels
                uids = None if kernels is None else {kernel.uid for kernel in list(kernels.values())}
                begun_s = time.monotonic()
                self._last = begun_s, scan(LEASE_VARIABLE, uids)
            return self._last[1]


class ProcessInspector:
    """Classifies a kernel's processes.

    `off` is the reason the driver cannot be queried. If it is set, only the memory that devices list for each process is known.
    `counts_processes` is true once a device is known to list CUDA processes by their pids in this pid namespace.
    """

    def __init__(self, monitor: Monitor, worker: WorkerLink, *, off: str = "") -> None:
        self.off = off
        self.counts_processes = False
        self.scans = ProcessScans()
        self._monitor = monitor
        self._worker = worker
        # The processes of all kernels, because a kernel that another kernel started has its own lease.
        self.roots: Callable[[], list[ProcessIdentity]] = list
        self._own = identify(os.getpid())

    async def scan_processes(self) -> Snapshot:
        with _shortage_as_gpu_error():
            return await SWAPS.run(self.scans.take)

    async def take(self, device_ids: Sequence[str] | None = None, *, max_age_s: float = 0.0) -> HostSnapshot:
        """Return a snapshot of /proc, at most `max_age_s` seconds old, and of these devices (default: all). Raises GPUError."""
        with _shortage_as_gpu_error():
            # The scan waits for the operating system, and the reading for the driver.
            found, uses = await asyncio.gather(SWAPS.run(self.scans.take, max_age_s), SWAPS.run(self._uses, device_ids))
            return HostSnapshot(processes=found, uses=uses)

    def _uses(self, device_ids: Sequence[str] | None) -> dict[str, DeviceUse]:
        if device_ids is None:
            device_ids = [device.device_id for device in self._monitor.devices()]
        uses: dict[str, DeviceUse] = {}
        for device_id in device_ids:
            try:
                uses[device_id] = self._monitor.use(device_id)
            except GPUError as error:
                if error.code not in (GPUErrorCode.DEVICE_LOST, GPUErrorCode.NO_SUCH_DEVICE):
                    raise  # a lost device has no reading, and a step that needs it reports that
        return uses

    async def used_mib(self, kernel: Kernel) -> int:
        host = await self.take()
        return sum(host.used_mib(identity.pid) for identity in self.tree(kernel, host))

    def tree(self, kernel: Kernel, host: HostSnapshot) -> list[ProcessIdentity]:
        if kernel.identity is None:
            return []
        return self._tree_below(kernel, kernel.identity, host.processes)

    def _tree_below(self, kernel: Kernel, root: ProcessIdentity | None, processes: Snapshot) -> list[ProcessIdentity]:
        # A kernel that starts a broker is above it until the broker serves. The broker's checkpoint worker is a CUDA process, but does not
        # belong to the kernel.
        return members_of(kernel, root, processes, [*self.roots(), self._own])

    async def with_memory(
        self, kernel: Kernel, root: ProcessIdentity | None, host: HostSnapshot, *, saved: bool
    ) -> list[ProcessIdentity]:
        """Return the kernel's processes that hold device memory.

        With `saved`, include processes whose device memory is saved in host memory, which only the driver knows.
        """
        found = []
        for identity in self._tree_below(kernel, root, host.processes):
            if host.used_mib(identity.pid):
                has_memory = True
            elif saved and not self.off:
                has_memory = await self._has_cuda(kernel, host, identity)
            elif not self.counts_processes:  # an open device file is then the only evidence
                own = host.processes.runs_own_program(identity)
                has_memory = own and await SWAPS.run(holds_open, identity.pid, is_device_file)
            else:
                has_memory = False
            if has_memory:
                found.append(identity)
        return found

    async def _has_cuda(self, kernel: Kernel, host: HostSnapshot, identity: ProcessIdentity) -> bool:
        """Ask the driver whether the process has CUDA state. Return True for a stopped process, which cannot answer. Raises GPUError.

        If it is known which processes were saved, an error about any other process that runs its parent's program is ignored, because such
        a process has only inherited a context.
        """
        if host.processes.stopped_or_traced(identity):
            return True
        try:
            return await self._worker.state(identity) not in _NO_CUDA
        except GPUError as error:
            if error.code in ENDED:
                return False
            saved = kernel.checkpoint.sizes
            inherited = bool(saved) and identity not in saved and not host.processes.runs_own_program(identity)
            if error.code in _WORKERS or not inherited:
                raise
            return False

    async def memory_use(
        self, kernel: Kernel, host: HostSnapshot
    ) -> tuple[dict[ProcessIdentity, int], list[ProcessIdentity]]:
        """Return the MiB used by each CUDA process (0 if unknown), and the processes that inherited a context.

        Raises GPUError if the driver fails or if a process is already saved.
        """
        states, heirs = await self.states(kernel, host)
        for identity, state in states.items():
            if state not in (ProcessState.RUNNING, ProcessState.LOCKED):
                raise GPUError(GPUErrorCode.ILLEGAL_STATE, f"process {identity.pid} is already {state}")
        use = {identity: host.used_mib(identity.pid) for identity in states}
        self.counts_processes |= any(use.values())
        if self.counts_processes:
            at_most_mib = max(NOMINAL_MIB, host.uncounted_mib())
            use = {identity: mib or at_most_mib for identity, mib in use.items()}
        return use, heirs

    async def states(
        self, kernel: Kernel, host: HostSnapshot
    ) -> tuple[dict[ProcessIdentity, ProcessState], list[ProcessIdentity]]:
        """Return the states of processes that created a CUDA context, and the processes that inherited one. Raises GPUError."""
        tree = self.tree(kernel, host)
        if self.off:
            return {one: ProcessState.RUNNING for one in tree if host.used_mib(one.pid)}, []
        states: dict[ProcessIdentity, ProcessState] = {}
        failed: dict[ProcessIdentity, GPUError] = {}
        for identity in tree:
            if host.processes.stopped_or_traced(identity) and await self._may_use_cuda(kernel, host, identity):
                raise GPUError(GPUErrorCode.TARGET_STOPPED, stopped_sentence(identity.pid))
            try:
                states[identity] = await self._worker.state(identity)
            except GPUError as error:
                if error.code in _WORKERS:
                    raise
                if error.code not in ENDED:  # leave out a process that has just ended
                    failed[identity] = error
        cuda = {identity for identity, state in states.items() if state not in _NO_CUDA}
        # A process that is saved, locked or half-way through a swap has its own context. Any other may have inherited one.
        doubtful = [one for one, state in states.items() if state in (ProcessState.RUNNING, ProcessState.NO_CONTEXT)]
        heirs = [
            one
            for one in (*doubtful, *failed)
            if one not in kernel.checkpoint.sizes and await self._is_heir(host, one, cuda, answered=one not in failed)
        ]
        # If the driver fails on a process with an inherited context, this says nothing about the kernel. Any other failure counts.
        for identity, failure in failed.items():
            if identity not in heirs:
                raise failure
        return {one: state for one, state in states.items() if one in cuda and one not in heirs}, heirs

    @staticmethod
    async def _may_use_cuda(kernel: Kernel, host: HostSnapshot, identity: ProcessIdentity) -> bool:
        known = identity in kernel.checkpoint.sizes or host.used_mib(identity.pid) > 0
        return known or await SWAPS.run(holds_open, identity.pid, is_device_file)

    @staticmethod
    async def _is_heir(
        host: HostSnapshot, identity: ProcessIdentity, cuda: Collection[ProcessIdentity], *, answered: bool
    ) -> bool:
        if host.used_mib(identity.pid) or not any(one in cuda for one in host.processes.forked_from(identity)):
            return False
        return identity in cuda or not answered or await SWAPS.run(holds_open, identity.pid, is_device_file)


def members_of(
    kernel: Kernel, root: ProcessIdentity | None, processes: Snapshot, apart: Collection[ProcessIdentity]
) -> list[ProcessIdentity]:
    """Return the kernel's processes, including any that have left its process tree, but excluding `apart` and their descendants."""
    tree = processes.tree(root, kernel.lease_id, uid=kernel.uid, apart=apart, also=kernel.members)
    kernel.members = frozenset(tree) - {root}
    return tree


@contextmanager
def _shortage_as_gpu_error() -> Iterator[None]:
    # A lack of descriptors or memory counts as a failed step, which can be rolled back.
    try:
        yield
    except OSError as error:
        sentence = f"the broker could not examine the machine: {error}"
        raise GPUError(GPUErrorCode.OPERATING_SYSTEM, sentence) from error


def stopped_sentence(pid: int) -> str:
    return f"process {pid} is stopped and cannot answer the driver; continue it with `kill -CONT {pid}`, or end its debugger"


def is_device_file(path: str) -> bool:
    return path.startswith("/dev/nvidia")  # a process with a CUDA context holds one open
