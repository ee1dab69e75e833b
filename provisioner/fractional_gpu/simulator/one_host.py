"""Runs one host, with its arbiter, devices and sessions, in virtual time.

docs/simulator.md states the assumptions, for example about users' pauses, swaps and preemption. `experience` measures waits and lateness.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import (
    Effect,
    Granted,
    LeaseEnded,
    LeaseRefused,
    Resized,
    Resume,
    Shrink,
    StateChanged,
    Suspend,
    WakeAt,
)
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    Event,
    Expected,
    HostMemoryNeeded,
    HostMemorySeen,
    LeaseReleased,
    LeaseRequested,
    LeasesMeasured,
    Measurement,
    PoolConfigured,
    ProcessExited,
    ResumeFinished,
    ResumeOutcome,
    Shrunk,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    Wanted,
)
from fractional_gpu.core.model import HOLDING, LeaseSpec, LeaseState, Sign
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.hosts import Moments
from fractional_gpu.simulator.load import SIGN_MS
from fractional_gpu.simulator.machine import UNSHARED, Host, Running, SharedDevice
from fractional_gpu.simulator.metering import RunMeter
from fractional_gpu.simulator.record import EventLog
from fractional_gpu.simulator.result import Accounts
from fractional_gpu.simulator.traces import Cell, Session

Watch = Callable[[Event, Sequence[Effect]], None]

_MEASURED_MS = 2_000  # the time between the broker's measurements
_REFUSED_BY_LIMIT = frozenset({"user-limit", "group-limit"})  # the user has too many leases, so the session never runs


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state shared by all hosts in a run. `over` is called when a session's lease ends, and `ended` when the session itself is over."""

    moments: Moments
    accounts: Accounts
    watch: Watch | None
    record: EventLog | None
    meter: RunMeter | None
    over: Callable[[int, LeaseSpec], None]
    ended: Callable[[], None]


@dataclass(slots=True, eq=False)
class Kernel:
    session: Session
    spec: LeaseSpec
    state: LeaseState | None = None
    device_ids: tuple[str, ...] = ()
    reserved_mib: int = 0  # how much it may use on each of its devices
    memory_mib: int = 0  # how much its process holds on each device, or how much was saved from each to the host
    next_cell: int = 0
    door_ms: int = 0  # its wait for a host, if not yet counted in a cell's lateness
    asked_ms: int = 0
    waiting: bool = False
    growing: bool = False  # let in, but short of memory for its cell
    short_ms: int = 0  # since when it has been short of memory, if it is growing
    running: Running | None = None
    unfinished: Running | None = None  # a preempted cell
    began_ms: int = 0  # when the running cell was last let in
    ran_ms: int = 0  # how long the last cell had run in total when it was stopped
    swaps: int = 0
    resume_fails: bool = False  # the current resume will fail
    early_mib: int = 0  # memory that was resumed before a cell asked for it; 0 once a cell has asked
    overdue: int = 0  # how many of the goal's limits its cell's wait exceeds
    over: bool = False

    @property
    def cell(self) -> Cell:
        return self.session.cells[self.next_cell]

    @property
    def total_mib(self) -> int:
        return self.memory_mib * self.spec.devices


class HostRun:
    def __init__(self, number: int, host: Host, run: RunState) -> None:
        self.number, self.host, self._run = number, host, run
        self.accounts, self.result, self.experience = run.accounts, run.accounts.result, run.accounts.result.experience
        self.meter = run.meter.hosts[number] if run.meter is not None else None
        self.arbiter = Arbiter(parallel_swaps=host.parallel_swaps)
        self.kernels: dict[str, Kernel] = {}
        self.devices = {device.device_id: SharedDevice(slowdown=host.slowdown) for device in host.devices}
        self.closed_ms = self.over = 0  # when its last session closed, and how many are over
        self._events: deque[Event] = deque()
        self._wake_version = 0

    def begin(self) -> None:
        self.send(HostMemorySeen(at_ms=0, budget_mib=self.host.host_memory_mib))
        for device in self.host.devices:
            self.send(DeviceSeen(at_ms=0, device=device))
        for pool in self.host.pools:
            self.send(PoolConfigured(at_ms=0, pool=pool))

    @property
    def now_ms(self) -> int:
        return self._run.moments.now_ms

    def at(self, at_ms: int, act: Callable[[], None]) -> None:
        self._run.moments.at(at_ms, act)

    def after(self, wait_ms: int, act: Callable[[], None]) -> None:
        self._run.moments.at(self.now_ms + wait_ms, act)

    def send(self, event: Event) -> None:
        """Send an event to the arbiter and carry out its effects. Then do the same with any events that these cause."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            effects = self.arbiter.handle(self._events[0])
            if self._run.watch is not None:
                self._run.watch(self._events[0], effects)
            if self._run.record is not None:
                self._run.record.event(self.number, self._events[0], effects)
            if self.meter is not None:
                self.meter.saw(self.now_ms, self.arbiter, self._events[0], effects)
            for effect in effects:
                self._execute(effect)
            self._events.popleft()

    def drop_memory(self, kernel: Kernel) -> None:
        if kernel.state in HOLDING and not (kernel.state is LeaseState.RESUMING and kernel.resume_fails):
            self.accounts.use(self.number, kernel.device_ids, -kernel.memory_mib)
        if kernel.state is LeaseState.SUSPENDED or kernel.state is LeaseState.RESUMING:
            self.accounts.drop_saved(self.number, kernel.total_mib)

    def count_vain(self, kernel: Kernel) -> None:
        """If no cell has asked for the GPU since a kernel's early resume, count the memory that the resume moved as wasted."""
        self.result.vain_mib += kernel.early_mib
        kernel.early_mib = 0

    def count_over(self, kernel: Kernel) -> None:
        if not kernel.over:
            kernel.over = True
            self.over += 1
            self._run.over(self.number, kernel.spec)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case StateChanged():
                self._changed(self.kernels[effect.lease_id], effect)
            case Granted():
                self.granted(self.kernels[effect.lease_id], effect)
            case Suspend():
                self.suspend(self.kernels[effect.lease_id], effect)
            case Resume():
                self.resume(self.kernels[effect.lease_id], effect)
            case Shrink():  # a simulated kernel has no caches
                kernel = self.kernels[effect.lease_id]
                self.send(
                    Shrunk(
                        at_ms=self.now_ms,
                        lease_id=effect.lease_id,
                        generation=effect.generation,
                        used_mib=kernel.total_mib,
                    )
                )
            case Resized():
                self.resized(self.kernels[effect.lease_id], effect)
            case WakeAt(at_ms=at_ms):
                self._wake_version += 1
                if at_ms is not None:
                    self.at(at_ms, partial(self._wake, self._wake_version))
            case LeaseEnded(lease_id=lease_id, reason=reason) if reason != "released":
                self.result.lost += 1
                self.count_over(self.kernels[lease_id])
            case LeaseRefused(lease_id=lease_id, reason=reason) if reason in _REFUSED_BY_LIMIT:
                self.result.lost += 1
                self.count_over(self.kernels[lease_id])
            case LeaseRefused(lease_id=lease_id, sentence=sentence):
                raise SimulationError(f"session {lease_id!r} was refused: {sentence}")

    def _wake(self, version: int) -> None:
        if version == self._wake_version:
            self.send(Tick(at_ms=self.now_ms))

    def _changed(self, kernel: Kernel, change: StateChanged) -> None:
        if kernel.state in HOLDING:
            self.accounts.let_go(self.number, kernel.device_ids)
        if change.new in HOLDING and change.device_id is not None:
            view = self.arbiter.lease(kernel.spec.lease_id) if kernel.spec.devices > 1 else None
            if kernel.spec.devices == 1:
                kernel.device_ids = (change.device_id,)
            elif view is not None:
                kernel.device_ids = view.device_ids
            self.accounts.hold(self.number, kernel.device_ids)
        kernel.state = change.new

    # Sessions: a person opens a notebook, thinks, gives signs, runs cells, and closes it.

    def open(self, session: Session, lease: LeaseSpec) -> None:
        kernel = self.kernels[session.session_id] = Kernel(session, lease)
        self.send(LeaseRequested(at_ms=self.now_ms, spec=lease))
        if kernel.over:
            self._run.ended()
            return
        kernel.door_ms = self.now_ms - session.open_ms
        self.experience.entered(kernel.door_ms)  # the lease is granted at once; its cells wait
        self.send(Attached(at_ms=self.now_ms, lease_id=lease.lease_id, gated=True))
        thinks_ms = (session.cells[0].start_ms if session.cells else session.close_ms) - session.open_ms
        self._expect(kernel, thinks_ms)
        self.after(thinks_ms, partial(self._next, kernel))

    def _expect(self, kernel: Kernel, gap_ms: int) -> None:
        at_end = kernel.next_cell == len(kernel.session.cells)
        asks = not at_end and self.asks(kernel)
        signs = self.host.signs.before(
            self.host.seed, kernel.session.session_id, kernel.next_cell, gap_ms, uses_gpu=asks
        )
        for after_ms in signs:
            self.after(after_ms, partial(self._sign, kernel, kernel.next_cell))

    def _sign(self, kernel: Kernel, cell: int) -> None:
        if kernel.over or kernel.next_cell != cell:
            return
        until_ms = self.now_ms + SIGN_MS
        self.send(Expected(at_ms=self.now_ms, lease_id=kernel.spec.lease_id, until_ms=until_ms, sign=Sign.TYPING))

    def _next(self, kernel: Kernel) -> None:
        if kernel.next_cell < len(kernel.session.cells):
            self.ask(kernel)
            return
        self.count_over(kernel)
        self.count_vain(kernel)
        self.closed_ms = self.now_ms
        self.drop_memory(kernel)
        self.send(ProcessExited(at_ms=self.now_ms, lease_id=kernel.spec.lease_id))
        self.send(LeaseReleased(at_ms=self.now_ms, lease_id=kernel.spec.lease_id))
        self._run.ended()

    def done(self, kernel: Kernel) -> None:
        cell = kernel.cell
        kernel.next_cell += 1
        follows = kernel.cell.start_ms if kernel.next_cell < len(kernel.session.cells) else kernel.session.close_ms
        thinks_ms = max(0, follows - cell.start_ms - cell.duration_ms)
        self._expect(kernel, thinks_ms)
        self.after(thinks_ms, partial(self._next, kernel))

    # Cells: their memory, their run time next to neighbours, and what is measured.

    def asks(self, kernel: Kernel) -> bool:
        return bool(kernel.cell.gpus) or self.host.every_cell_asks

    def ask(self, kernel: Kernel) -> None:
        cell = kernel.cell
        kernel.asked_ms = self.now_ms
        if not self.asks(kernel):
            self.after(cell.duration_ms, partial(self.done, kernel))
            return
        kernel.early_mib = 0
        self.send(BusyChanged(at_ms=self.now_ms, lease_id=kernel.spec.lease_id, busy=True))
        self.accounts.waiting += 1
        view = self.arbiter.lease(kernel.spec.lease_id)
        if kernel.state is LeaseState.RESIDENT and (view is None or not view.gate_closed):
            self._grow(kernel)
            return
        kernel.waiting = True
        if cell.gpus:  # the cell counts against the goal as soon as its wait exceeds a limit, not only when it begins
            for limit, limit_ms in enumerate(self.experience.wait_limits_ms):
                self.after(limit_ms + 1, partial(self._overdue, kernel, kernel.next_cell, limit))
        self.send(Wanted(at_ms=self.now_ms, lease_id=kernel.spec.lease_id))

    def _overdue(self, kernel: Kernel, cell: int, limit: int) -> None:
        unbegun = kernel.unfinished is None and (kernel.waiting or kernel.growing)
        if kernel.next_cell == cell and unbegun and not kernel.over:
            kernel.overdue = limit + 1
            self.experience.overdue(limit)

    def granted(self, kernel: Kernel, grant: Granted) -> None:
        kernel.reserved_mib = grant.reserved_mib or kernel.spec.reserve_mib
        if kernel.waiting:
            kernel.waiting = False
            self._grow(kernel)

    def resized(self, kernel: Kernel, effect: Resized) -> None:
        kernel.reserved_mib = effect.reserved_mib or kernel.reserved_mib
        if kernel.growing:
            self._grow(kernel)

    def _grow(self, kernel: Kernel) -> None:
        need_mib = kernel.cell.gpu_mib if kernel.cell.gpus and kernel.unfinished is None else kernel.memory_mib
        mib = min(need_mib, kernel.reserved_mib)
        if mib != kernel.memory_mib:
            self.accounts.use(self.number, kernel.device_ids, mib - kernel.memory_mib)
            kernel.memory_mib = mib
        if mib < need_mib and not kernel.growing:
            kernel.short_ms = self.now_ms
            plan = partial(self._give_up, kernel, kernel.next_cell, self.now_ms)
            patience_ms = self.host.patience_ms if need_mib <= kernel.spec.reserve_mib else 0
            self.after(patience_ms, plan)
        kernel.growing = mib < need_mib  # set before the measurement, whose answer may let it grow at once
        if kernel.cell.gpus:
            self._measure(kernel, None)
        if mib == need_mib:
            self.after(_MEASURED_MS, partial(self._measure_again, kernel, kernel.next_cell))
            self._run_cell(kernel)

    def _measure_again(self, kernel: Kernel, cell: int) -> None:
        """Report memory use again, as the broker would, so that the arbiter sees it is stable. Include the cell if it is still running."""
        if kernel.state is LeaseState.RESIDENT:
            running = kernel.running if kernel.next_cell == cell and kernel.cell.gpus else None
            used_milli = self.devices[kernel.device_ids[0]].used_milli(running) if running is not None else None
            self._measure(kernel, used_milli)

    def _measure(self, kernel: Kernel, util_milli: int | None) -> None:
        one = Measurement(lease_id=kernel.spec.lease_id, used_mib=kernel.total_mib, util_milli=util_milli)
        self.send(LeasesMeasured(at_ms=self.now_ms, measurements=(one,)))

    def _give_up(self, kernel: Kernel, cell: int, since_ms: int) -> None:
        """Fail a cell that has been short of memory since `since_ms`, as when an allocation exceeds a framework's limit."""
        if kernel.growing and (kernel.next_cell, kernel.short_ms) == (cell, since_ms):
            kernel.growing = False
            self.result.out_of_memory += 1
            self._begins(kernel)
            self.send(BusyChanged(at_ms=self.now_ms, lease_id=kernel.spec.lease_id, busy=False))
            self.done(kernel)

    def _begins(self, kernel: Kernel) -> None:
        self.accounts.waiting -= 1
        if kernel.unfinished is None and kernel.cell.gpus:
            self.experience.waited(self.now_ms - kernel.asked_ms, kernel.overdue, host=self.number)
            kernel.overdue = 0

    def _run_cell(self, kernel: Kernel) -> None:
        """Run the cell on the kernel's devices. Neighbours on the first device slow it down."""
        cell = kernel.cell
        self._begins(kernel)
        running, kernel.unfinished = kernel.unfinished, None
        if running is None:
            util_percent = cell.util_percent if cell.gpus else 0
            kernel.ran_ms = 0
            running = Running(kernel.spec.lease_id, util_percent, cell.duration_ms * UNSHARED, self.now_ms)
        running.at_ms = self.now_ms
        kernel.running, kernel.began_ms = running, self.now_ms
        self.accounts.running_gpus += cell.gpus
        self._plan(self.devices[kernel.device_ids[0]].begin(running))
        self._count_work(kernel)

    def _count_work(self, kernel: Kernel) -> None:
        if self.meter is not None:
            shared = self.devices[kernel.device_ids[0]]
            used = {
                session_id: (self.kernels[session_id].next_cell, shared.used_milli(running))
                for session_id, running in shared.running.items()
            }
            self.meter.works(self.now_ms, kernel.device_ids[: max(1, kernel.cell.gpus)], used)

    def _plan(self, ends: Sequence[tuple[int, Running]]) -> None:
        for at_ms, running in ends:
            self.at(at_ms, partial(self._cell_ends, running, running.version))

    def _cell_ends(self, running: Running, version: int) -> None:
        if running.version != version:
            return
        kernel = self.kernels[running.session_id]
        self._stop(kernel)
        if kernel.cell.gpus:
            if kernel.ran_ms >= _MEASURED_MS:  # the broker has no complete measurement of a shorter cell
                worked_ms = kernel.cell.util_percent * kernel.cell.duration_ms
                self._measure(kernel, worked_ms * 10 // kernel.ran_ms)
            alone_ms = kernel.cell.duration_ms
            late_ms, kernel.door_ms = kernel.door_ms + self.now_ms - kernel.asked_ms - alone_ms, 0
            self.experience.ended(kernel.session.user, late_ms, alone_ms)
        self.send(BusyChanged(at_ms=self.now_ms, lease_id=kernel.spec.lease_id, busy=False))
        self.done(kernel)

    def preempt(self, kernel: Kernel) -> None:
        if kernel.running is None and not kernel.growing:
            return
        self.result.preemptions += 1
        if kernel.running is not None:
            kernel.unfinished = self._stop(kernel)
            self.accounts.waiting += 1
        kernel.growing, kernel.waiting = False, True

    def _stop(self, kernel: Kernel) -> Running:
        stopped, ends = self.devices[kernel.device_ids[0]].finish(kernel.spec.lease_id, self.now_ms)
        kernel.running = None
        kernel.ran_ms += self.now_ms - kernel.began_ms
        self.accounts.running_gpus -= kernel.cell.gpus
        self._plan(ends)
        self._count_work(kernel)
        return stopped

    # Swaps: how long they take, what they move, and which fail.

    def suspend(self, kernel: Kernel, effect: Suspend) -> None:
        self.result.suspends += 1
        self.count_vain(kernel)
        if self._fails(kernel):
            gives_up = partial(self._suspended, effect, SuspendOutcome.ABORTED)
            self.after(self.host.swap.fixed_ms, gives_up)
        elif kernel.total_mib > effect.host_mib:
            self.after(0, partial(self._reserve_more, kernel, effect))
        else:
            self._save(kernel, effect)

    def _reserve_more(self, kernel: Kernel, effect: Suspend) -> None:
        """Ask the arbiter for more host memory when a suspend needs more than is reserved. If the host has none left, abort the suspend.

        The broker does the same.
        """
        need_mib = kernel.total_mib
        self.send(
            HostMemoryNeeded(
                at_ms=self.now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                need_mib=need_mib,
            )
        )
        view = self.arbiter.lease(effect.lease_id)
        if view is not None and view.host_reserved_mib >= need_mib:
            self._save(kernel, effect)
            return
        self.result.failed_swaps += 1
        self._suspended(effect, SuspendOutcome.ABORTED, need_mib=need_mib)

    def _save(self, kernel: Kernel, effect: Suspend) -> None:
        self.preempt(kernel)
        device_ids, mib, total_mib = kernel.device_ids, kernel.memory_mib, kernel.total_mib

        def saved() -> None:
            if not kernel.over:
                self.accounts.use(self.number, device_ids, -mib)
                self.accounts.save(self.number, total_mib)
                self._count_moved(kernel, total_mib)
            outcome = SuspendOutcome.NOTHING_TO_SAVE if mib == 0 else SuspendOutcome.SAVED
            self._suspended(effect, outcome, saved_mib=total_mib)

        self.after(self.host.swap.save_ms(total_mib), saved)

    def _suspended(self, effect: Suspend, outcome: SuspendOutcome, *, saved_mib: int = 0, need_mib: int = 0) -> None:
        self.send(
            SuspendFinished(
                at_ms=self.now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
                saved_mib=saved_mib,
                need_mib=need_mib,
            )
        )

    def resume(self, kernel: Kernel, effect: Resume) -> None:
        self.result.resumes += 1
        kernel.reserved_mib, kernel.resume_fails = effect.reserve_mib, self._fails(kernel)
        if kernel.resume_fails:
            self.after(self.host.swap.fixed_ms, partial(self._resumed, effect, ResumeOutcome.NOT_STARTED))
            return
        self.accounts.use(self.number, kernel.device_ids, kernel.memory_mib)
        total_mib = kernel.total_mib
        view = self.arbiter.lease(effect.lease_id)
        if view is not None and view.came_early:
            self.result.early_resumes += 1
            kernel.early_mib = total_mib

        def restored() -> None:
            if not kernel.over:
                self.accounts.save(self.number, -total_mib)
                self._count_moved(kernel, total_mib)
            self._resumed(effect, ResumeOutcome.RESTORED)

        self.after(self.host.swap.restore_ms(total_mib), restored)

    def _resumed(self, effect: Resume, outcome: ResumeOutcome) -> None:
        self.send(
            ResumeFinished(
                at_ms=self.now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
            )
        )

    def _fails(self, kernel: Kernel) -> bool:
        """Decide at random whether the swap about to start will fail."""
        percent = self.host.failed_swaps_percent
        kernel.swaps += 1
        swap = f"{self.host.seed}/swap/{kernel.session.session_id}/{kernel.swaps}"
        if not percent or random.Random(swap).random() * 100 >= percent:  # noqa: S311 - a workload, not a secret
            return False
        self.result.failed_swaps += 1
        return True

    def _count_moved(self, kernel: Kernel, mib: int) -> None:
        if self.meter is not None:
            self.meter.moved(self.now_ms, kernel.spec.lease_id, mib)
