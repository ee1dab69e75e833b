"""Holds what the broker knows about each lease beyond the arbiter's view: process, connections, and data kept by parts of the broker.

A `Kernel` holds one small object for each part of the broker that keeps data about the lease. The object's docstring names the part that
changes it; all other parts only read it.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.config import ConfigError
from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.core.model import DeviceView, LeaseSpec, PoolSpec, Sharing, Sign
from fractional_gpu.gpu.driver_environment import NO_MPS, PRELOAD, PRELOADED_FOR_US
from fractional_gpu.gpu.nvidia.jobs import REQUEST
from fractional_gpu.host.files import temporary_folder
from fractional_gpu.host.process import ProcessIdentity, open_pidfd
from fractional_gpu.ledger.records import Launch
from fractional_gpu.protocol.status import KernelFacts


@dataclass(eq=False, slots=True)
class Request:
    """A client's suspend or resize request that has not been answered yet.

    A lease may have several of these at once. If the arbiter refuses the request, `declined` contains a code for programs and a sentence
    for users.
    """

    declined: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A process that a kernel left behind when it ended.

    `used_mib` is 0 if no device counts the process's memory, or if that memory is saved in host memory.
    """

    identity: ProcessIdentity
    used_mib: int
    name: str  # the name of its program, which every user can see
    command: str  # the command with its arguments, for its owner and for administrators


@dataclass(eq=False, slots=True, kw_only=True)
class CheckpointState:
    """The state of the kernel's checkpoints. Changed by suspends and resumes, and by the broker when the lease is given a device."""

    homes: tuple[str, ...] = ()  # the devices that last held the memory of its processes; checkpoints come from them
    sizes: Mapping[ProcessIdentity, int] = field(default_factory=dict)  # MiB that the last suspend planned to save
    needs_driver: bool = False  # its state was saved or half-way through a swap when the driver could not be asked

    @property
    def total_mib(self) -> int:
        return sum(self.sizes.values())

    @property
    def home(self) -> str | None:
        return self.homes[0] if self.homes else None


@dataclass(eq=False, slots=True, kw_only=True)
class Ending:
    """What is known about the end of the kernel's process and its lease. Maintained by `Survivors`."""

    task: "asyncio.Task[None] | None" = None  # finds the processes that the kernel left behind
    survivors: tuple[Survivor, ...] = ()  # the ended kernel's processes that hold device memory
    root: ProcessIdentity | None = None  # the last process that was the kernel itself
    released: bool = False  # the kernel has ended for good, and its lease ends with the processes left behind
    reason: str = "released"  # why the lease ends
    announced: str = ""  # a sentence that the kernel will be ended unless it is used; `Culler` changes it


@dataclass(eq=False, slots=True, kw_only=True)
class Measurement:
    """What the devices last reported about the lease. Maintained by `Sampler`."""

    is_fresh: bool = False  # measured since a cell last began or ended
    grew: bool = False  # used more than before; only set if the lease's reservation follows its use
    seen_on: frozenset[str] = frozenset()  # the devices on which its processes had memory
    has_used: bool = False  # whether a command's processes have ever had device memory
    users_on_disk: frozenset[ProcessIdentity] = frozenset()  # processes that used a device and are in the ledger

    def devices_to_read(self, device_ids: Iterable[str]) -> list[str]:
        return list(dict.fromkeys([*device_ids, *sorted(self.seen_on)]))


@dataclass(eq=False, slots=True, kw_only=True)
class DiskState:
    """What the ledger is known to contain about the lease. Maintained by `LeaseRecords`."""

    reserved: tuple[str, ...] = ()  # the devices on which the ledger holds a reservation
    unreserved_saves: int = 0  # number of saves that recorded no reservation


@dataclass(eq=False, slots=True, kw_only=True)
class PendingRequests:
    """The requests clients are waiting for. Maintained by the services that receive the requests."""

    waiters: int = 0  # clients that wait for the GPU
    blocked_resumes: int = 0  # of these, clients whose wait ends once the process handles no message
    suspends: list[Request] = field(default_factory=list)  # requests that the arbiter has not answered yet
    suspend_waiters: int = 0  # clients that wait for its suspend, during which only its messages make it busy
    resize: Request | None = None  # the waiting request for another size
    seat_size: tuple[int, int] = (0, 0)  # fraction and MiB that the waiting resize takes from its seat
    size_before_burst: ResizeRequested | None = (
        None  # the size to which the lease returns if the process ends in a burst
    )
    evictions: int = 0  # number of administrators who are ending it


@dataclass(eq=False, slots=True, kw_only=True)
class CellState:
    """What the broker derives from the kernel's messages. Maintained by `Broker`."""

    executing_since_s: float | None = None  # monotonic
    granted_s: float = 0.0  # monotonic time of the last grant, from which a cell that waited for it runs
    ticket_by_broker: bool = False  # the broker filed the lease's ticket, because of IOPub or the extension's silence
    unused: frozenset[str] = frozenset()  # requests that count as idle: they held room unused for too long


@dataclass(eq=False, slots=True, kw_only=True)
class GpuWork:
    """When the kernel used the GPU while no cell was running, in microseconds since boot. Maintained by `GpuActivity`."""

    idle_us: int | None = None  # when its messages showed it as idle, or None if they do not
    last_us: int = 0  # when its processes were last seen at work since then, or 0 if they were not
    working: bool = False  # its processes are at work, or this is not known yet

    def clear(self) -> None:
        self.idle_us, self.last_us, self.working = None, 0, False


@dataclass(eq=False, kw_only=True)
class Kernel:
    """One lease's process and connections, and the data each part of the broker keeps about the lease.

    When a broker starts, it rebuilds this from the ledger, /proc and the driver.
    """

    lease_id: str
    uid: int
    token_sha256: str
    created_ms: int = 0  # wall clock
    gated: bool = False  # whether its extension is expected to connect
    facts: KernelFacts = field(default_factory=KernelFacts)
    changes: int = 0  # number of state changes that this broker has seen
    identity: ProcessIdentity | None = None
    members: frozenset[ProcessIdentity] = frozenset()  # processes in the kernel's tree apart from the kernel itself
    connection: str = field(default="", repr=False)  # the contents of the connection file, checked, as JSON
    iopub: IOPubWatch | None = None
    signs: dict[Sign, int] = field(default_factory=dict)  # by sign of a coming cell: when it may be reported again, ms
    told_cell: bool = False  # the arbiter was told that a cell runs, but not yet that the kernel is idle again
    link: GateLink | None = None
    taken_over: bool = False  # its seat has taken it over from the server that started its kernel
    notices: list[str] = field(default_factory=list)  # for the next extension that connects
    budget: str = ""  # a sentence if most or all of a budget that it counts against is spent
    budget_used_up: bool = False
    budget_told: object = (
        None  # the last budget notice in its notebook: the budget, its window, and whether it was used up
    )
    unsaveable: str = ""  # the extension's sentence that explains why the process cannot be checkpointed
    unheard: str = ""  # a sentence that explains why the broker cannot listen to its messages, or "" if it can
    stopped: str = ""  # a sentence that its process is stopped and what to do, or "" if it runs
    launch: Launch = field(default_factory=Launch)
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    ending: Ending = field(default_factory=Ending)
    measurement: Measurement = field(default_factory=Measurement)
    on_disk: DiskState = field(default_factory=DiskState)
    requests: PendingRequests = field(default_factory=PendingRequests)
    cell: CellState = field(default_factory=CellState)
    gpu_work: GpuWork = field(default_factory=GpuWork)
    runner_gone: bool = False  # the command's runner has ended, so no process requests the GPU for it any more
    _pidfd: int | None = None
    _runner_pidfd: int | None = None
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> asyncio.Event:
        """Return an event that is set on the next change. To avoid missing a change, get the event before reading the state."""
        return self._change

    def notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, condition: Callable[[], bool], patience_s: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while True:
                    change = self.change()
                    if condition():
                        return
                    await change.wait()

    async def until_linked(self, patience_s: float) -> None:
        """Wait up to `patience_s` seconds for the extension to connect, if one is expected."""
        await self.until(lambda: not self.gated or self.link is not None, patience_s)

    def watch_process(self, identity: ProcessIdentity, exited: Callable[[], None]) -> None:
        """Keep the process's pidfd open, and call `exited` on the loop when the process ends. Raises ProcessLookupError if it has ended."""
        self.forget_process()
        pidfd = open_pidfd(identity)
        self.identity, self._pidfd = identity, pidfd
        asyncio.get_running_loop().add_reader(pidfd, exited)

    def watch_runner(self, runner: ProcessIdentity | None, exited: Callable[[], object]) -> None:
        """Call `exited` on the loop once a command's runner or a claim's holder has ended, if the broker is permitted to watch it."""
        self._forget_runner()
        if runner is None:
            return
        try:
            self._runner_pidfd = open_pidfd(runner)
        except ProcessLookupError:
            exited()
        except PermissionError:
            return
        else:
            asyncio.get_running_loop().add_reader(self._runner_pidfd, exited)

    def _forget_runner(self) -> None:
        self.runner_gone = False
        _unwatch(self._runner_pidfd)
        self._runner_pidfd = None

    def end_runner(self) -> None:
        self._forget_runner()
        self.runner_gone = True

    def forget_process(self) -> None:
        _unwatch(self._pidfd)
        self._pidfd = None
        self._forget_runner()
        if self.iopub is not None:
            self.iopub.close()
            self.iopub = None
        if self.link is not None:
            self.link.close()
            self.link = None
        self.identity = None
        self.connection = ""
        self.unsaveable = self.stopped = self.unheard = ""
        self.cell.executing_since_s, self.cell.ticket_by_broker, self.cell.unused = None, False, frozenset()
        self.gpu_work.clear()

    def connect_gate(self, now_s: float, inputs: Iterable[str]) -> GateLink:
        """Return a new connection to the kernel's extension, replacing any older one. `inputs` lists requests that await user input."""
        if self.link is not None:
            self.link.close()
        self.link = GateLink(now_s, inputs)
        self.notify()
        return self.link

    def disconnect_gate(self, link: GateLink) -> bool:
        link.close()
        if self.link is not link:
            return False
        self.link = None
        return True

    @property
    def busy(self) -> bool:
        works = self.gpu_work.working and not self.requests.suspend_waiters
        return self.in_use or (self.identity is not None and works)

    @property
    def in_use(self) -> bool:
        if self.launch.claim:
            return bool(self.measurement.seen_on)
        if self.identity is None:
            return self.ending.task is not None
        if self.requests.waiters > 0:
            return True
        if self.launch.command:
            # Before its first use it has nothing to save. Without its runner, no process would bring it back, so it stays on the device
            # until it ends.
            return not self.measurement.has_used or self.runner_gone
        return self.handles_message

    @property
    def handles_message(self) -> bool:
        """Whether the kernel is, or might be, handling a message that counts as GPU use."""
        # Doubt counts as use, because a live kernel to which the broker cannot listen may be running a cell. If the broker can never listen
        # to it, the counters show when to ask the gate, and the gate tells whether a cell runs before anything is saved. Without a gate,
        # nothing would bring the kernel back.
        if self.unheard and self.link is not None:
            return False
        return self.iopub is None or (self.iopub.busy and not self._uses_no_gpu)

    @property
    def executing(self) -> bool:
        return self.iopub is not None and self.iopub.executing and not self._uses_no_gpu

    @property
    def runs_cell(self) -> bool:
        return self.iopub is None or self.requests.waiters > 0 or self.iopub.runs_cell

    @property
    def _uses_no_gpu(self) -> bool:
        """Whether every message being handled is waiting for input or has not used the GPU for a long time. False if in doubt."""
        idle = self.cell.unused | (self.link.inputs if self.link is not None else frozenset())
        if not idle or self.iopub is None or not self.iopub.executing:
            return False
        return self.iopub.is_certain and self.iopub.handled <= idle


def _unwatch(pidfd: int | None) -> None:
    if pidfd is not None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


# What each kind of sharing adds to the environment of its kernels:
#
# - `time-slice`: The kernel is not a client of the host's MPS daemon, if there is one, because MPS clients cannot be checkpointed.
# - `mps`: The thread percentage is the fraction (a cap, not a reservation). The pinned memory limit is the cap for each device that the
#   kernel sees. It names the device by UUID, because the number of a hidden device would lift all limits.
# - `mig`: The kernel may use the whole instance, whatever its fraction is.
# - HAMi-core is preloaded if the administrator names its library. Each lease gets its own file for it, because the default file is shared
#   by the whole machine.


_MIG = "MIG-"


def sharing_environment(pool: PoolSpec, spec: LeaseSpec, limit_mib: int, held: Sequence[DeviceView]) -> dict[str, str]:
    """Return the environment variables that limit a kernel to its share.

    `limit_mib` is the memory cap on each device, and `held` lists the devices the lease holds so far.
    """
    if pool.sharing is Sharing.MPS:
        limits = ",".join(f"{device.device_id}={limit_mib}M" for device in held)
        memory = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limits} if limits else {}
        return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(_percent(spec)), **memory}
    if pool.sharing is Sharing.MIG and held:
        return {"JUPYTER_GPU_MEMORY_MIB": str(max(limit_mib, min(device.leasable_mib for device in held)))}
    return dict(NO_MPS) if pool.sharing is Sharing.TIME_SLICE else {}


def launch_environment(pool: PoolSpec, spec: LeaseSpec, *, in_job: bool = False) -> dict[str, str]:
    job = {REQUEST: "1"} if in_job else {}
    if not pool.hami_library:
        return job
    return job | {
        PRELOAD: pool.hami_library,
        PRELOADED_FOR_US: pool.hami_library,
        "CUDA_DEVICE_MEMORY_LIMIT": f"{spec.reserve_mib}m",
        "CUDA_DEVICE_SM_LIMIT": str(_percent(spec)),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(_books(spec.lease_id)),
    }


def remove_books(lease_id: str) -> None:
    """Remove the file HAMi-core used to track an ended lease's memory. Do nothing if the broker lacks permission."""
    with suppress(PermissionError):
        _books(lease_id).unlink(missing_ok=True)


def check_pools(pools: Sequence[PoolSpec], names: Mapping[str, str], *, simulated: bool) -> None:
    for pool in pools:
        if pool.hami_library and not Path(pool.hami_library).is_file():
            raise ConfigError(
                f"pool {pool.name!r}: hami_library is {pool.hami_library!r}, which does not exist: install HAMi-core, or leave the key out"
            )
        if pool.sharing is Sharing.MIG and not simulated:
            for device_id in pool.devices:
                if not device_id.startswith(_MIG):
                    raise ConfigError(
                        f"pool {pool.name!r} hands out MIG instances, but {names.get(device_id, 'a device')} ({device_id}) is a whole "
                        "device: divide it (nvidia-smi -mig 1, nvidia-smi mig -cgi), or leave 'sharing' out"
                    )


def _books(lease_id: str) -> Path:
    return temporary_folder() / f"jupyter-gpu-{lease_id}.hami"


def _percent(spec: LeaseSpec) -> int:
    return max(1, -(-spec.fraction_milli // 10))
