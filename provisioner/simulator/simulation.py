"""Virtual time: a trace of notebook sessions drives the arbiter that the broker drives in real time.

- One heap of (time, order) moments; the arbiter's effects come back as later moments; nothing depends on a clock or on hash order.
- A session's kernel is gated. A GPU cell is asked for: the kernel is busy from then on, `Wanted` goes out unless the lease is resident,
  and the cell runs once granted. The next cell comes as long after it as in the trace: a wait delays everything behind it.
- A wait is the time from asking to running, the restore included; cells that found their kernel resident count with zero.
- A swap takes a fixed time and the bytes over the bandwidth. A cell of a suspended kernel that touches no GPU runs without asking.
- Device memory is counted a second time here, from what kernels hold and not from what they reserve: `out_of_memory` is what a real
  driver would have refused, and `lost` counts sessions that could not run to their end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from provisioner.core.arbiter import Arbiter
from provisioner.core.effects import Effect, Granted, LeaseEnded, LeaseRefused, Resume, StateChanged, Suspend, WakeAt
from provisioner.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseMeasured,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    ProcessExited,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    Wanted,
)
from provisioner.core.model import HOLDING, DeviceSpec, LeaseSpec, LeaseState, PoolSpec
from provisioner.core.units import format_fraction, format_memory
from provisioner.simulator.busy import UNSHARED, Running, SharedDevice
from provisioner.simulator.errors import SimulationError
from provisioner.simulator.result import Point, Result, Waits
from provisioner.simulator.traces import Cell, Session

__all__ = ["Host", "SwapSpeed", "fraction_for", "simulate"]

Watch = Callable[[Event, Sequence[Effect]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpeed:
    """What a suspend or resume takes: ms of its own, and MiB per second in either direction."""

    fixed_ms: int = 300
    save_mib_per_s: int = 1_800
    restore_mib_per_s: int = 4_000

    def save_ms(self, mib: int) -> int:
        """Return how long a checkpoint of so many MiB takes, ms."""
        return self.fixed_ms + -(-mib * 1000 // self.save_mib_per_s)

    def restore_ms(self, mib: int) -> int:
        """Return how long a restore of so many MiB takes, ms."""
        return self.fixed_ms + -(-mib * 1000 // self.restore_mib_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine and its policy. The sessions run in `pools[0]`."""

    devices: tuple[DeviceSpec, ...]
    pools: tuple[PoolSpec, ...]
    host_memory_mib: int = 1 << 20
    swap: SwapSpeed = SwapSpeed()
    parallel_swaps: int = 1
    slowdown: bool = True
    every_cell_asks: bool = False


@dataclass(slots=True, eq=False)
class _Kernel:
    """One session as it stands."""

    session: Session
    spec: LeaseSpec
    state: LeaseState | None = None
    device_id: str = ""
    memory_mib: int = 0  # what its process holds, on a device or on the host
    next_cell: int = 0
    asked_ms: int = 0
    waiting: bool = False
    running: Running | None = None
    unfinished: Running | None = None  # a cell that was preempted
    cell_began_ms: int = 0
    over: bool = False

    @property
    def cell(self) -> Cell:
        """The cell that is asked for or runs."""
        return self.session.cells[self.next_cell]


def fraction_for(session: Session, pool: PoolSpec, device_mib: int) -> tuple[int, int]:
    """Return the smallest fraction on offer (milli-GPU) of a device of that size that covers the session's peak memory, and its cap in MiB.

    Raises SimulationError where none does.
    """
    peak = max(1, session.peak_mib)
    if not pool.fractions_milli and peak <= device_mib:
        milli = -(-peak * 1000 // device_mib)
        return milli, device_mib * milli // 1000
    for milli in pool.fractions_milli:
        if device_mib * milli // 1000 >= peak:
            return milli, device_mib * milli // 1000
    most = format_fraction(max(pool.fractions_milli, default=1000))
    raise SimulationError(
        f"session {session.session_id!r} holds up to {format_memory(peak)}, but the largest fraction of pool {pool.name!r}, {most} of "
        f"{format_memory(device_mib)}, does not cover that; simulate larger devices with --devices"
    )


def simulate(
    host: Host,
    trace: Sequence[Session],
    *,
    watch: Watch | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Run the trace. `watch` sees every event and its effects; `progress` the sessions that ended, and all.

    Raises SimulationError for a session that the host cannot serve at all.
    """
    return _Run(host, trace, watch, progress).result()


class _Run:
    def __init__(
        self,
        host: Host,
        trace: Sequence[Session],
        watch: Watch | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._host = host
        self._arbiter = Arbiter(parallel_swaps=host.parallel_swaps)
        self._watch, self._progress = watch, progress
        self._now_ms = self._order = self._ended = self._wake_version = 0
        self._moments: list[tuple[int, int, Callable[[], None]]] = []
        self._events: deque[Event] = deque()
        served = frozenset(host.pools[0].devices)
        usable = [device.leasable_mib for device in host.devices if device.device_id in served]
        self._device_mib = min(usable, default=0)
        self._kernels = {session.session_id: self._kernel(session) for session in trace}
        self._shared = {device.device_id: SharedDevice(slowdown=host.slowdown) for device in host.devices}
        self._sizes = {device.device_id: device.memory_mib for device in host.devices}
        self._used = dict.fromkeys(self._sizes, 0)
        self._holders = dict.fromkeys(self._sizes, 0)
        self._devices_held = self._running_gpus = self._waiting = self._accounted_ms = self._host_mib = 0
        self._waits: list[int] = []
        self._result = Result(
            name="fractional",
            sessions=len(trace),
            cells=sum(len(session.cells) for session in trace),
            gpu_cells=sum(cell.gpus > 0 for session in trace for cell in session.cells),
            devices=len(host.devices),
            reserved=sum(session.gpus * (session.close_ms - session.open_ms) * 1000 for session in trace),
        )

    def _kernel(self, session: Session) -> _Kernel:
        if session.most_gpus > 1:
            raise SimulationError(
                f"session {session.session_id!r} uses {session.most_gpus} GPUs at once, and a lease has one; "
                "leave such sessions out with --one-gpu-only"
            )
        pool = self._host.pools[0]
        milli, cap_mib = fraction_for(session, pool, self._device_mib)
        spec = LeaseSpec(
            lease_id=session.session_id, pool=pool.name, owner=session.user, fraction_milli=milli, reserve_mib=cap_mib
        )
        return _Kernel(session, spec)

    def result(self) -> Result:
        """Run to the end."""
        self._tell(HostMemorySeen(at_ms=0, budget_mib=self._host.host_memory_mib))
        for device in self._host.devices:
            self._tell(DeviceSeen(at_ms=0, device=device))
        for pool in self._host.pools:
            self._tell(PoolConfigured(at_ms=0, pool=pool))
        for kernel in self._kernels.values():
            self._at(kernel.session.open_ms, partial(self._open, kernel))
        while self._moments:
            at_ms, _, act = heappop(self._moments)
            self._account(at_ms)
            self._now_ms = at_ms
            act()
        self._arbiter.validate()
        self._result.waits = Waits(tuple(sorted(self._waits)))
        self._result.lost += sum(not kernel.over for kernel in self._kernels.values())
        return self._result

    # -- time ---------------------------------------------------------------------------------------------------------

    def _at(self, at_ms: int, act: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._moments, (max(at_ms, self._now_ms), self._order, act))

    def _account(self, now_ms: int) -> None:
        passed = now_ms - self._accounted_ms
        if passed > 0:
            self._result.busy += self._running_gpus * passed * 1000
            point = Point(self._accounted_ms, self._devices_held, self._running_gpus, self._waiting)
            self._result.held += point.devices_held * passed * 1000
            if not self._result.timeline or self._result.timeline[-1] != point:
                self._result.timeline.append(point)
            self._result.peak_devices_held = max(self._result.peak_devices_held, point.devices_held)
            self._accounted_ms = now_ms

    def _tell(self, event: Event) -> None:
        """Hand an event to the arbiter and carry out what it says; events that arise on the way come after it."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            effects = self._arbiter.handle(self._events[0])
            if self._watch is not None:
                self._watch(self._events[0], effects)
            for effect in effects:
                self._carry_out(effect)
            self._events.popleft()

    # -- what the arbiter says ----------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StateChanged():
                self._changed(self._kernels[effect.lease_id], effect)
            case Granted():
                kernel = self._kernels[effect.lease_id]
                if kernel.waiting:
                    self._run_cell(kernel)
            case Suspend():
                self._suspend(self._kernels[effect.lease_id], effect)
            case Resume():
                self._resume(self._kernels[effect.lease_id], effect)
            case WakeAt(at_ms=at_ms):
                self._wake_version += 1
                if at_ms is not None:
                    self._at(at_ms, partial(self._wake, self._wake_version))
            case LeaseEnded(lease_id=lease_id, reason=reason) if reason != "released":
                self._result.lost += 1
                self._kernels[lease_id].over = True
            case LeaseRefused(lease_id=lease_id, sentence=sentence):
                raise SimulationError(f"session {lease_id!r} was refused: {sentence}")

    def _wake(self, version: int) -> None:
        if version == self._wake_version:
            self._tell(Tick(at_ms=self._now_ms))

    def _changed(self, kernel: _Kernel, change: StateChanged) -> None:
        held = kernel.state in HOLDING
        holds = change.new in HOLDING
        if held:
            self._holders[kernel.device_id] -= 1
            self._devices_held -= self._holders[kernel.device_id] == 0
        if holds and change.device_id is not None:
            self._devices_held += self._holders[change.device_id] == 0
            self._holders[change.device_id] += 1
            kernel.device_id = change.device_id
        kernel.state = change.new

    def _suspend(self, kernel: _Kernel, effect: Suspend) -> None:
        self._result.suspends += 1
        if kernel.running is not None:
            self._result.preemptions += 1
            kernel.unfinished = self._stop(kernel)
            kernel.waiting, kernel.asked_ms = True, self._now_ms
            self._waiting += 1
        nothing = kernel.memory_mib == 0
        takes_ms = self._host.swap.save_ms(kernel.memory_mib)
        device_id, mib = kernel.device_id, kernel.memory_mib

        def saved() -> None:
            if not kernel.over:
                self._used[device_id] -= mib
                self._move_host(mib)
            outcome = SuspendOutcome.NOTHING_TO_SAVE if nothing else SuspendOutcome.SAVED
            self._tell(
                SuspendFinished(
                    at_ms=self._now_ms,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=outcome,
                    saved_mib=mib,
                )
            )

        self._at(self._now_ms + takes_ms, saved)

    def _resume(self, kernel: _Kernel, effect: Resume) -> None:
        self._result.resumes += 1
        self._use(effect.device_id, kernel.memory_mib)
        mib = kernel.memory_mib

        def restored() -> None:
            if not kernel.over:
                self._move_host(-mib)
            self._tell(
                ResumeFinished(
                    at_ms=self._now_ms,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=ResumeOutcome.RESTORED,
                )
            )

        self._at(self._now_ms + self._host.swap.restore_ms(mib), restored)

    def _move_host(self, mib: int) -> None:
        self._host_mib += mib
        self._result.moved_mib += abs(mib)
        self._result.host_peak_mib = max(self._result.host_peak_mib, self._host_mib)

    def _use(self, device_id: str, mib: int) -> None:
        self._used[device_id] += mib
        if mib > 0 and self._used[device_id] > self._sizes[device_id]:
            self._result.out_of_memory += 1

    # -- a session ------------------------------------------------------------------------------------------------------

    def _open(self, kernel: _Kernel) -> None:
        self._tell(LeaseRequested(at_ms=self._now_ms, spec=kernel.spec))
        self._tell(Attached(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, gated=True))
        first = kernel.session.cells[0].start_ms if kernel.session.cells else kernel.session.close_ms
        self._at(first, partial(self._next, kernel))

    def _next(self, kernel: _Kernel) -> None:
        """The user executes the next cell, or closes the notebook."""
        if kernel.next_cell == len(kernel.session.cells):
            self._close(kernel)
            return
        cell = kernel.cell
        kernel.asked_ms = kernel.cell_began_ms = self._now_ms
        if not cell.gpus and not self._host.every_cell_asks:
            self._at(self._now_ms + cell.duration_ms, partial(self._done, kernel))
            return
        self._tell(BusyChanged(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, busy=True))
        if kernel.state is LeaseState.RESIDENT:
            self._run_cell(kernel)
            return
        kernel.waiting = True
        self._waiting += 1
        self._tell(Wanted(at_ms=self._now_ms, lease_id=kernel.spec.lease_id))

    def _run_cell(self, kernel: _Kernel) -> None:
        """The cell runs on the kernel's device from now on."""
        cell = kernel.cell
        if kernel.waiting:
            kernel.waiting = False
            self._waiting -= 1
        running, kernel.unfinished = kernel.unfinished, None
        if running is None:
            running = Running(
                kernel.spec.lease_id, cell.util_percent if cell.gpus else 0, cell.duration_ms * UNSHARED, self._now_ms
            )
            kernel.cell_began_ms = self._now_ms
            if cell.gpus:
                self._waits.append(self._now_ms - kernel.asked_ms)
                self._allocate(kernel, cell.gpu_mib)
        running.at_ms = self._now_ms
        kernel.running = running
        self._running_gpus += cell.gpus
        self._plan(self._shared[kernel.device_id].begin(running))

    def _allocate(self, kernel: _Kernel, mib: int) -> None:
        self._use(kernel.device_id, mib - kernel.memory_mib)
        kernel.memory_mib = mib
        self._tell(LeaseMeasured(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, used_mib=mib))

    def _plan(self, ends: Sequence[tuple[int, Running]]) -> None:
        for at_ms, running in ends:
            self._at(at_ms, partial(self._cell_ends, running, running.version))

    def _cell_ends(self, running: Running, version: int) -> None:
        if running.version != version:
            return
        kernel = self._kernels[running.session_id]
        self._stop(kernel)
        self._tell(BusyChanged(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, busy=False))
        self._done(kernel)

    def _stop(self, kernel: _Kernel) -> Running:
        """Take the running cell off its device; the others there may be quicker for it."""
        stopped, ends = self._shared[kernel.device_id].finish(kernel.spec.lease_id, self._now_ms)
        kernel.running = None
        self._running_gpus -= kernel.cell.gpus
        self._plan(ends)
        return stopped

    def _done(self, kernel: _Kernel) -> None:
        """The cell is over: the next one, or the end, comes as long after it as in the trace."""
        cell = kernel.cell
        kernel.next_cell += 1
        follows = kernel.cell.start_ms if kernel.next_cell < len(kernel.session.cells) else kernel.session.close_ms
        thinks_ms = max(0, follows - cell.start_ms - cell.duration_ms)
        self._at(self._now_ms + thinks_ms, partial(self._next, kernel))

    def _close(self, kernel: _Kernel) -> None:
        on_device = kernel.state in HOLDING
        on_host = kernel.state is LeaseState.SUSPENDED or kernel.state is LeaseState.RESUMING
        kernel.over = True
        if on_device:
            self._used[kernel.device_id] -= kernel.memory_mib
        if on_host:
            self._host_mib -= kernel.memory_mib
        self._tell(ProcessExited(at_ms=self._now_ms, lease_id=kernel.spec.lease_id))
        self._tell(LeaseReleased(at_ms=self._now_ms, lease_id=kernel.spec.lease_id))
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, self._result.sessions)
