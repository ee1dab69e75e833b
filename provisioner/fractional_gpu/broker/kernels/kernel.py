"""The broker's data about each lease in addition to the arbiter's view: the process, its connections, and the parts' notes.

A `Kernel` holds one small object for each part of the broker that keeps something about it. Only the part that the object's docstring names
changes the object; all others read it.
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
    """A client's request to suspend or resize, from its event to its reply. Not kept on the lease: another may be under way.

    `declined` is the arbiter's refusal (reason, sentence).
    """

    declined: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A process of a kernel that has ended. Memory in MiB; 0: no device counts it, or it is saved on the host."""

    identity: ProcessIdentity
    used_mib: int
    name: str  # of its program, as every user can see it
    command: str  # with its arguments, for its owner and for administrators


@dataclass(eq=False, slots=True, kw_only=True)
class CheckpointState:
    """The state of the kernel's checkpoints. The swap changes it, and the broker when the lease gets a device."""

    homes: tuple[str, ...] = ()  # the devices that last held its processes' memory; checkpoints come from them
    sizes: Mapping[ProcessIdentity, int] = field(default_factory=dict)  # MiB that the last suspend was to save
    needs_driver: bool = False  # found in the middle of a swap, or saved, while the driver could not be asked

    @property
    def total_mib(self) -> int:
        return sum(self.sizes.values())

    @property
    def home(self) -> str | None:
        return self.homes[0] if self.homes else None


@dataclass(eq=False, slots=True, kw_only=True)
class Ending:
    """The end of the kernel's process, and of its lease. Changed by `Survivors`."""

    task: "asyncio.Task[None] | None" = None  # finds the processes that the kernel left behind
    survivors: tuple[Survivor, ...] = ()  # the kernel has ended, and these of its processes have device memory
    root: ProcessIdentity | None = None  # the last process that was the kernel itself
    released: bool = False  # its kernel has ended for good: the lease ends with the processes left behind
    reason: str = "released"  # why the lease ends
    announced: str = ""  # that it will be ended unless it is used, a sentence; changed by `Culler`


@dataclass(eq=False, slots=True, kw_only=True)
class Measurement:
    """The devices' last figures. Changed by `Sampler`."""

    is_fresh: bool = False  # made since a cell began or ended
    grew: bool = False  # more than before, if the lease's reservation follows its use
    seen_on: frozenset[str] = frozenset()  # the devices on which its processes had memory
    has_used: bool = False  # a command's processes ever had memory
    users_on_disk: frozenset[ProcessIdentity] = frozenset()  # processes that used a device and are in the ledger

    def devices_to_read(self, device_ids: Iterable[str]) -> list[str]:
        return list(dict.fromkeys([*device_ids, *sorted(self.seen_on)]))


@dataclass(eq=False, slots=True, kw_only=True)
class DiskState:
    """The parts of the lease that are certainly in the ledger. Changed by `LeaseRecords`."""

    reserved: tuple[str, ...] = ()  # the devices on which the ledger holds a reservation
    unreserved_saves: int = 0  # saves that record no reservation


@dataclass(eq=False, slots=True, kw_only=True)
class PendingRequests:
    """The requests that clients wait for. Changed by the services that take the requests."""

    waiters: int = 0  # acquisitions under way
    blocked_resumes: int = 0  # of these, those that end once the process handles nothing
    suspends: list[Request] = field(default_factory=list)  # that the arbiter has not answered yet
    suspend_waiters: int = 0  # clients who wait for its suspend: then only its messages make it busy
    resize: Request | None = None  # the waiting request for another size
    seat_size: tuple[int, int] = (0, 0)  # fraction and MiB that the waiting resize requests from its seat
    size_before_burst: ResizeRequested | None = (
        None  # the size that the lease returns to if the process ends in a burst
    )
    evictions: int = 0  # administrators who are ending it


@dataclass(eq=False, slots=True, kw_only=True)
class CellState:
    """The state that the broker derives from the kernel's messages. Changed by `Broker`."""

    executing_since_s: float | None = None  # monotonic
    granted_s: float = 0.0  # the last grant, monotonic: a cell that waited for it runs since then
    ticket_by_broker: bool = False  # the broker filed the lease's ticket, because of IOPub or of silence
    unused: frozenset[str] = frozenset()  # requests that count as idle: they held room too long without using the GPU


@dataclass(eq=False, slots=True, kw_only=True)
class GpuWork:
    """Work on the GPU without a running cell. Changed by `GpuActivity`. Times in microseconds since boot."""

    idle_us: int | None = None  # when it became idle by its messages; None: it is not
    last_us: int = 0  # when its processes were last seen at work since then; 0: not yet
    working: bool = False  # they are at work, or it is not known yet

    def clear(self) -> None:
        self.idle_us, self.last_us, self.working = None, 0, False


@dataclass(eq=False, kw_only=True)
class Kernel:
    """One lease's process, its connections, and each part's data about it, rebuilt from the ledger, /proc and the driver at startup."""

    lease_id: str
    uid: int
    token_sha256: str
    created_ms: int = 0  # wall clock
    gated: bool = False  # its extension is expected to connect
    facts: KernelFacts = field(default_factory=KernelFacts)
    changes: int = 0  # of its state, as far as this broker saw them
    identity: ProcessIdentity | None = None
    members: frozenset[ProcessIdentity] = frozenset()  # processes in the kernel's tree other than the kernel itself
    connection: str = field(default="", repr=False)  # the checked connection contents, JSON
    iopub: IOPubWatch | None = None
    signs: dict[Sign, int] = field(default_factory=dict)  # of a coming cell: when each may be sent again, ms
    told_cell: bool = False  # the arbiter was told that a cell runs, and not yet that the kernel is idle
    link: GateLink | None = None
    taken_over: bool = False  # its seat took it over from the server that started its kernel
    notices: list[str] = field(default_factory=list)  # for the next extension that connects
    budget: str = ""  # a sentence: most or all of a budget it counts for is spent
    budget_used_up: bool = False
    budget_told: object = (
        None  # the budget that its notebook was notified about, its window, and whether it was used up
    )
    unsaveable: str = ""  # its extension's sentence on why its process cannot be checkpointed
    unheard: str = ""  # why the broker cannot listen to its messages, a sentence; empty: it can
    stopped: str = ""  # a sentence: its process is stopped, and what to do; empty: it runs
    launch: Launch = field(default_factory=Launch)
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    ending: Ending = field(default_factory=Ending)
    measurement: Measurement = field(default_factory=Measurement)
    on_disk: DiskState = field(default_factory=DiskState)
    requests: PendingRequests = field(default_factory=PendingRequests)
    cell: CellState = field(default_factory=CellState)
    gpu_work: GpuWork = field(default_factory=GpuWork)
    runner_gone: bool = False  # of a command: no process would say any more that it needs the GPU
    _pidfd: int | None = None
    _runner_pidfd: int | None = None
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> asyncio.Event:
        """Return the event of the next change. Take it before looking at the state, then wait for it: no change is missed."""
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
        """Wait up to `patience_s` for an extension that is expected but not yet connected."""
        await self.until(lambda: not self.gated or self.link is not None, patience_s)

    def watch_process(self, identity: ProcessIdentity, exited: Callable[[], None]) -> None:
        """Hold the process's pidfd and call `exited` on the loop when it ends. Raises ProcessLookupError if it has ended already."""
        self.forget_process()
        pidfd = open_pidfd(identity)
        self.identity, self._pidfd = identity, pidfd
        asyncio.get_running_loop().add_reader(pidfd, exited)

    def watch_runner(self, runner: ProcessIdentity | None, exited: Callable[[], object]) -> None:
        """Call `exited` on the loop once a command's runner or a claim's holder has ended. An invisible one counts as alive."""
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
        """Return a new line to the kernel's extension, which replaces an older one. `inputs`: the requests that wait for input."""
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
            # Before its first use it has nothing to save. Without its runner no process would bring it back: it stays until it ends.
            return not self.measurement.has_used or self.runner_gone
        return self.handles_message

    @property
    def handles_message(self) -> bool:
        """Whether it handles, or may handle, a message that counts as use of the GPU."""
        # Doubt counts: a live kernel to whose messages the broker cannot listen may be running a cell. If the broker may never listen,
        # the gate says whether a cell runs before anything is saved, and the counters say when to ask; without a gate nothing would bring
        # the kernel back.
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
        """Whether every message handled waits for input or holds room unused. A kernel in doubt may handle more."""
        idle = self.cell.unused | (self.link.inputs if self.link is not None else frozenset())
        if not idle or self.iopub is None or not self.iopub.executing:
            return False
        return self.iopub.is_certain and self.iopub.handled <= idle


def _unwatch(pidfd: int | None) -> None:
    if pidfd is not None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


# What each kind of sharing puts into its kernels' environment.
#
# - `time-slice`: not a client of the host's MPS daemon, if any: MPS clients cannot be checkpointed.
# - `mps`: the thread percentage is the fraction (a cap, not a reservation); the pinned memory limit is the cap, by the UUID of each device
#   that the kernel sees: the number of a hidden device would lift all limits.
# - `mig`: the kernel may use the whole instance, whatever its fraction.
# - HAMi-core is preloaded if the administrator names its library. Its file would be shared by the whole machine, so each lease has its own.


_MIG = "MIG-"


def sharing_environment(pool: PoolSpec, spec: LeaseSpec, limit_mib: int, held: Sequence[DeviceView]) -> dict[str, str]:
    """Return the variables that limit a kernel to its share. `limit_mib`: cap per device; `held`: its devices so far."""
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
    """Remove HAMi-core's bookkeeping file for an ended lease, if it exists and we may."""
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
