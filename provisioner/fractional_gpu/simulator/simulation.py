"""Virtual time: a trace of notebook sessions drives the same arbiter that the broker drives in real time, one on each host.

- One heap of (time, order) moments for all hosts; an arbiter's effects come back as later moments; nothing depends on a clock or on
  hash order. A session is given its host when it opens (`hosts`), and stays there.
- A session's kernel is gated. A GPU cell is asked for: the kernel is busy from then on, `Wanted` goes out unless the lease is resident,
  and the cell runs once granted. The next cell comes as long after it as in the trace: a wait delays everything behind it.
- A wait is the time from asking to running, the restore included; cells that found their kernel resident count with zero.
  What else a user feels is in `felt`.
- A swap takes a fixed time and the bytes over the bandwidth. One that fails takes the fixed time and changes nothing.
- A cell of a suspended kernel that touches no GPU runs without asking.
- A cell that needs more than is reserved (where a pool reserves by use) takes what it may and waits for more; if none comes for
  `patience_ms` it fails as out of memory, and at once if it needs more than its cap.
- Device memory is counted a second time, in `accounts`; `lost` counts sessions that could not run to their end.
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
    DeviceDrained,
    DeviceLost,
    DeviceSeen,
    DeviceUndrained,
    Event,
    Expected,
    HostMemoryNeeded,
    HostMemorySeen,
    LeaseMeasured,
    LeaseReleased,
    LeaseRequested,
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
from fractional_gpu.core.forecasts.estimators import ErrorView
from fractional_gpu.core.forecasts.track_record import Judged
from fractional_gpu.core.model import HOLDING, LeaseSpec, LeaseState, Sign
from fractional_gpu.core.rules.salvage import value_of
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.felt import Felt, Goal
from fractional_gpu.simulator.hosts import Chosen, Door, DoorRule, Machine, Moments, Recorder, hosts_of
from fractional_gpu.simulator.load import SIGN_MS
from fractional_gpu.simulator.machine import UNSHARED, Host, Running, SharedDevice
from fractional_gpu.simulator.metering.run_meter import RunMeter
from fractional_gpu.simulator.result import Accounts, Part, Result, begin_result, finished
from fractional_gpu.simulator.revocation.orders import Holder
from fractional_gpu.simulator.revocation.revocations import HostRevocations, Revocation, RevocationFigures
from fractional_gpu.simulator.traces import Cell, Session

Watch = Callable[[Event, Sequence[Effect]], None]
Progress = Callable[[int, int], None]
_MEASURED_MS = 2_000  # from one measurement of the broker to the next
_REFUSED_BY_LIMIT = frozenset({"user-limit", "group-limit"})  # the user has too many already: the session never runs


@dataclass(slots=True, eq=False)
class _Kernel:
    """One session as it stands."""

    session: Session
    spec: LeaseSpec
    ended: Callable[[], None]
    state: LeaseState | None = None
    device_ids: tuple[str, ...] = ()
    reserved_mib: int = 0  # on each of its devices: what it may use there
    memory_mib: int = 0  # what its process holds on each of them, or saved of each on the host
    next_cell: int = 0
    asked_ms: int = 0
    waiting: bool = False
    growing: bool = False  # let in, and short of memory for its cell
    short_ms: int = 0  # since when, if it is
    running: Running | None = None
    unfinished: Running | None = None  # a cell that was preempted
    began_ms: int = 0  # when the cell that runs was let in last
    ran_ms: int = 0  # how long the last cell has run in all, up to when it was stopped
    swaps: int = 0
    resume_fails: bool = False  # the resume under way
    swap_ends_ms: int = 0  # when the swap under way ends
    worked_ms: int = 0  # for how long its cells have run since its process began
    life: int = 0  # how many processes it has had before this one
    early_mib: int = 0  # what it was brought back with before a cell asked, until one does
    overdue: int = 0  # how many limits of the goal the wait of its cell exceeds
    over: bool = False

    @property
    def cell(self) -> Cell:
        """The cell that is asked for or runs."""
        return self.session.cells[self.next_cell]

    @property
    def total_mib(self) -> int:
        """What it holds in all."""
        return self.memory_mib * self.spec.devices


def simulate(
    machine: Machine,
    trace: Sequence[Session],
    *,
    door: DoorRule = DoorRule.FIT,
    chosen: Sequence[int] | None = None,
    watch: Watch | None = None,
    record: Recorder | None = None,
    progress: Progress | None = None,
    goal: Goal | None = None,
    meter: RunMeter | None = None,
    revocation: Revocation | None = None,
    judged: Callable[[Judged], None] | None = None,
) -> Result:
    """Run the trace on one host or on several, among which `door` chooses; or `chosen` has the host of each session of the trace.

    `watch` sees every event and its effects; `progress` the sessions that ended, and all; `judged` every forecast with what happened.
    `meter` counts what the leases use, and changes no decision. `revocation` takes devices or hosts away meanwhile; what was lost is in the
    result.

    A run that cannot reach the `goal` any more is given up there.
    Raises SimulationError for a session that no host can serve at all, or that cannot run on the host that was chosen for it.
    """
    hosts = hosts_of(machine)
    gate = Door(hosts, trace, door) if chosen is None else Chosen(hosts, trace, chosen)
    cluster = _Cluster(hosts, trace, goal, door=gate, watch=watch, record=record, progress=progress, meter=meter)
    if revocation is not None:
        cluster.revoke(revocation)
    cluster.show_forecasts(judged)
    return finished(cluster.run(), trace)


def simulate_part(
    host: Host, trace: Sequence[Session], *, record: Recorder | None = None, progress: Progress | None = None
) -> Part:
    """Run the sessions of one host by themselves: what they add to the figures of all hosts.

    Raises SimulationError for a session that the host cannot serve at all.
    """
    door = Door((host,), trace, DoorRule.FIT)
    return _Cluster((host,), trace, None, door=door, watch=None, record=record, progress=progress).run()


@dataclass(slots=True, kw_only=True)
class _Shared:
    """What the hosts of a run share. `over` is told of the end of a session's lease."""

    moments: Moments
    result: Result
    accounts: Accounts
    felt: Felt
    watch: Watch | None
    record: Recorder | None
    meter: RunMeter | None
    over: Callable[[int, LeaseSpec], None]


class _Cluster:
    """A run: its hosts, and the door."""

    def __init__(
        self,
        hosts: Sequence[Host],
        trace: Sequence[Session],
        goal: Goal | None,
        *,
        door: Door | Chosen,
        watch: Watch | None,
        record: Recorder | None,
        progress: Progress | None,
        meter: RunMeter | None = None,
    ) -> None:
        self._trace, self._progress = trace, progress
        self._result = begin_result("fractional", trace, hosts)
        self._door = door
        self._ended = 0
        self._shared = _Shared(
            moments=Moments(),
            result=self._result,
            accounts=Accounts(self._result, hosts),
            felt=Felt(trace, goal),
            watch=watch,
            record=record,
            meter=meter,
            over=self._door.closed,
        )
        if meter is not None:
            meter.begin(hosts)
        self._runs = [_Run(number, host, self._shared) for number, host in enumerate(hosts)]

    def revoke(self, revocation: Revocation) -> None:
        """Take devices away from the first session's opening on, until the last session has ended."""
        figures = self._result.revocation = RevocationFigures(whole_hosts=revocation.whole_hosts)
        begins_ms = min((session.open_ms for session in self._trace), default=0)
        for number, run in enumerate(self._runs):
            devices = HostRevocations(revocation, number, run, run.device_ids, figures, self._goes_on)
            self._shared.moments.at(begins_ms, devices.begin)

    def _goes_on(self) -> bool:
        return sum(run.over for run in self._runs) < len(self._trace)

    def show_forecasts(self, judged: Callable[[Judged], None] | None) -> None:
        """Have every forecast seen that is compared with what happened."""
        for run in self._runs:
            run.show_forecasts(judged)

    def run(self) -> Part:
        """Run to the end."""
        moments, felt, accounts = self._shared.moments, self._shared.felt, self._shared.accounts
        meter = self._shared.meter
        for run in self._runs:
            run.begin()
        for session in self._trace:
            moments.at(session.open_ms, partial(self._open, session))
        while moments and not felt.hopeless:
            at_ms, act = moments.next()
            accounts.advance(at_ms)
            if meter is not None:
                meter.advance(at_ms)
            moments.now_ms = at_ms
            act()
        for run in self._runs:
            run.validate()
        accounts.finish()
        if meter is not None:
            meter.finish(moments.now_ms)
        self._result.lost += len(self._trace) - sum(run.over for run in self._runs)
        errors = [run.forecast_errors() for run in self._runs]
        closed_ms = max((run.closed_ms for run in self._runs), default=0)
        return Part(result=self._result, felt=felt, errors=errors, closed_ms=closed_ms)

    def _open(self, session: Session) -> None:
        """Send a session to its host."""
        host, lease = self._door.choose(session)
        if self._shared.record is not None:
            self._shared.record.moment(host, "placed", self._shared.moments.now_ms, session.session_id)
        self._door.opened(host, lease)
        self._runs[host].open(session, lease, self._ends)

    def _ends(self) -> None:
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, self._result.sessions)


class _Run:
    """One host: its arbiter, and the sessions that live there."""

    def __init__(self, number: int, host: Host, shared: _Shared) -> None:
        self._number, self._host = number, host
        self._moments, self._result, self._accounts = shared.moments, shared.result, shared.accounts
        self._felt, self._watch, self._record, self._lease_over = shared.felt, shared.watch, shared.record, shared.over
        self._meter = shared.meter.hosts[number] if shared.meter is not None else None
        self._arbiter = Arbiter(parallel_swaps=host.parallel_swaps)
        self._wake_version = 0
        self._events: deque[Event] = deque()
        self._kernels: dict[str, _Kernel] = {}
        self._shared = {device.device_id: SharedDevice(slowdown=host.slowdown) for device in host.devices}
        self.closed_ms = self.over = 0  # when the last of its sessions closed, and how many are over

    def begin(self) -> None:
        """Show the arbiter its machine."""
        self._send(HostMemorySeen(at_ms=0, budget_mib=self._host.host_memory_mib))
        for device in self._host.devices:
            self._send(DeviceSeen(at_ms=0, device=device))
        for pool in self._host.pools:
            self._send(PoolConfigured(at_ms=0, pool=pool))

    def validate(self) -> None:
        """Check the whole state of the arbiter."""
        self._arbiter.validate()

    # -- devices that go away (`revocation.revocations.Revocable`) -------------------------------------------------------

    @property
    def device_ids(self) -> tuple[str, ...]:
        """All devices of this host."""
        return tuple(device.device_id for device in self._host.devices)

    def announce(self, device_ids: Sequence[str], deadline_ms: int) -> None:
        """Let the arbiter know that the devices go away."""
        for device_id in device_ids:
            self._send(DeviceDrained(at_ms=self.now_ms, device_id=device_id, deadline_ms=deadline_ms))

    def _there(self, device_ids: Sequence[str]) -> list[_Kernel]:
        """Return the kernels that hold memory on one of the devices, or have it restored there."""
        return [
            kernel
            for kernel in self._kernels.values()
            if not kernel.over and kernel.state in HOLDING and not set(device_ids).isdisjoint(kernel.device_ids)
        ]

    def holders(self, device_ids: Sequence[str]) -> list[Holder]:
        """Return the kernels that hold memory on the devices."""
        return [self._holder(kernel) for kernel in self._there(device_ids) if kernel.memory_mib]

    def _holder(self, kernel: _Kernel) -> Holder:
        worked_ms = kernel.worked_ms + (self.now_ms - kernel.began_ms if kernel.running is not None else 0)
        return Holder(
            lease_id=kernel.spec.lease_id,
            mib=kernel.total_mib,
            swap_ms=self._host.swap.save_ms(kernel.total_mib),
            work=worked_ms * kernel.spec.devices,
            value=value_of(worked_ms, kernel.spec.priority),
            under_way_until_ms=kernel.swap_ends_ms if kernel.state is LeaseState.SUSPENDING else None,
        )

    def swap_room(self) -> tuple[list[int], int]:
        """Return when each swap channel is free, and how much host memory is left, MiB."""
        moving = (LeaseState.SUSPENDING, LeaseState.RESUMING)
        free_ms = [
            kernel.swap_ends_ms for kernel in self._kernels.values() if kernel.state in moving and not kernel.over
        ]
        free_ms += [self.now_ms] * (self._host.parallel_swaps - len(free_ms))
        arbiter = self._arbiter
        return free_ms, arbiter.host_budget_mib - arbiter.host_saved_mib - arbiter.host_reserved_mib

    def take_away(self, device_ids: Sequence[str], *, whole_host: bool) -> tuple[list[Holder], list[Holder]]:
        """Take the devices away; return the kernels that were not saved, and those whose saved state was lost with the host."""
        for device_id in device_ids:
            self._send(DeviceLost(at_ms=self.now_ms, device_id=device_id))
        lost = self._there(device_ids)
        unsaved, saved = [self._holder(kernel) for kernel in lost if kernel.memory_mib], list[Holder]()
        if whole_host:
            asleep = [one for one in self._kernels.values() if not one.over and one.state is LeaseState.SUSPENDED]
            saved = [self._holder(kernel) for kernel in asleep]
            lost += asleep
        for kernel in lost:
            self._lose_process(kernel)
        return unsaved, saved

    def give_back(self, device_ids: Sequence[str]) -> None:
        """Put other devices in their places."""
        for device in self._host.devices:
            if device.device_id in device_ids:
                self._send(DeviceSeen(at_ms=self.now_ms, device=device))
                self._send(DeviceUndrained(at_ms=self.now_ms, device_id=device.device_id))

    def has_closed(self, lease_id: str) -> bool:
        """Return whether its notebook was closed."""
        return self._kernels[lease_id].over

    def _lose_process(self, kernel: _Kernel) -> None:
        """End a kernel's process, and begin another: a cell that had begun has failed; one that waits for its first turn waits on."""
        lease_id, has_begun = kernel.spec.lease_id, kernel.growing or kernel.unfinished is not None
        if kernel.running is not None:
            self._stop(kernel)
            has_begun = True
        elif has_begun:
            self._begins(kernel)
        if has_begun:
            kernel.unfinished, kernel.growing, kernel.waiting = None, False, False
            self._note("failed", kernel, cell=kernel.next_cell)
            self._send(BusyChanged(at_ms=self.now_ms, lease_id=lease_id, busy=False))
        self._drop_memory(kernel)
        self._leaves_in_vain(kernel)
        kernel.memory_mib, kernel.worked_ms, kernel.life = 0, 0, kernel.life + 1
        self._send(ProcessExited(at_ms=self.now_ms, lease_id=lease_id))
        self._send(Attached(at_ms=self.now_ms, lease_id=lease_id, gated=True))
        if has_begun:
            self._done(kernel)
        elif kernel.waiting:
            self._send(BusyChanged(at_ms=self.now_ms, lease_id=lease_id, busy=True))
            self._send(Wanted(at_ms=self.now_ms, lease_id=lease_id))

    def show_forecasts(self, judged: Callable[[Judged], None] | None) -> None:
        """Have this host's forecasts seen that are compared with what happened."""
        self._arbiter.forecasts.record.watch = judged

    def forecast_errors(self) -> Sequence[ErrorView]:
        """Return how far off this host's forecasts were."""
        return self._arbiter.forecasts.errors()

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time of the run."""
        return self._moments.now_ms

    @property
    def _now_ms(self) -> int:
        return self._moments.now_ms

    def plan(self, at_ms: int, act: Callable[[], None]) -> None:
        """Plan what happens then."""
        self._moments.at(at_ms, act)

    def _at(self, at_ms: int, act: Callable[[], None]) -> None:
        self._moments.at(at_ms, act)

    def _send(self, event: Event) -> None:
        """Send an event to the arbiter and execute its effects; events that arise on the way follow."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            effects = self._arbiter.handle(self._events[0])
            if self._watch is not None:
                self._watch(self._events[0], effects)
            if self._record is not None:
                self._record.event(self._number, self._events[0], effects)
            if self._meter is not None:
                self._meter.saw(self._now_ms, self._arbiter, self._events[0], effects)
            for effect in effects:
                self._execute(effect)
            self._events.popleft()

    def _note(self, kind: str, kernel: _Kernel, **about: object) -> None:
        """Write a moment of the world to the record, if there is one."""
        if self._record is not None:
            self._record.moment(self._number, kind, self._now_ms, kernel.session.session_id, **about)

    def _use(self, kernel: _Kernel, device_ids: tuple[str, ...], mib: int) -> None:
        """Count `mib` more used on each of the devices; negative: given back."""
        self._accounts.use(self._number, device_ids, mib)
        if mib:
            self._note("memory", kernel, device_ids=device_ids, mib=mib)

    def _is_over(self, kernel: _Kernel) -> None:
        """Count the session's lease no more."""
        if not kernel.over:
            kernel.over = True
            self.over += 1
            self._lease_over(self._number, kernel.spec)

    # -- effects of the arbiter ----------------------------------------------------------------------------------------

    def _execute(self, effect: Effect) -> None:  # noqa: C901 - one case per effect
        match effect:
            case StateChanged():
                self._changed(self._kernels[effect.lease_id], effect)
            case Granted():
                self._granted(self._kernels[effect.lease_id], effect)
            case Suspend():
                self._suspend(self._kernels[effect.lease_id], effect)
            case Resume():
                self._resume(self._kernels[effect.lease_id], effect)
            case Shrink():  # a simulated kernel has no caches
                kernel = self._kernels[effect.lease_id]
                self._send(
                    Shrunk(
                        at_ms=self._now_ms,
                        lease_id=effect.lease_id,
                        generation=effect.generation,
                        used_mib=kernel.total_mib,
                    )
                )
            case Resized():
                kernel = self._kernels[effect.lease_id]
                kernel.reserved_mib = effect.reserved_mib or kernel.reserved_mib
                if kernel.growing:
                    self._grow(kernel)
            case WakeAt(at_ms=at_ms):
                self._wake_version += 1
                if at_ms is not None:
                    self._at(at_ms, partial(self._wake, self._wake_version))
            case LeaseEnded(lease_id=lease_id, reason=reason) if reason != "released":
                self._result.lost += 1
                self._is_over(self._kernels[lease_id])
            case LeaseRefused(lease_id=lease_id, reason=reason) if reason in _REFUSED_BY_LIMIT:
                self._result.lost += 1
                self._is_over(self._kernels[lease_id])
            case LeaseRefused(lease_id=lease_id, sentence=sentence):
                raise SimulationError(f"session {lease_id!r} was refused: {sentence}")

    def _wake(self, version: int) -> None:
        if version == self._wake_version:
            self._send(Tick(at_ms=self._now_ms))

    def _changed(self, kernel: _Kernel, change: StateChanged) -> None:
        if kernel.state in HOLDING:
            self._accounts.let_go(self._number, kernel.device_ids)
        if change.new in HOLDING and change.device_id is not None:
            kernel.device_ids = self._devices_of(kernel, change.device_id)
            self._accounts.hold(self._number, kernel.device_ids)
        kernel.state = change.new

    def _devices_of(self, kernel: _Kernel, device_id: str) -> tuple[str, ...]:
        if kernel.spec.devices == 1:
            return (device_id,)
        view = self._arbiter.lease(kernel.spec.lease_id)
        return view.device_ids if view is not None else kernel.device_ids

    def _fails(self, kernel: _Kernel) -> bool:
        """Return whether the swap that begins fails: by a draw for each swap of each session, whatever the others do."""
        percent = self._host.failed_swaps_percent
        kernel.swaps += 1
        if not percent:
            return False
        swap = f"{self._host.seed}/swap/{kernel.session.session_id}/{kernel.swaps}"
        return random.Random(swap).random() * 100 < percent  # noqa: S311 - a workload, not a secret

    def _failed(self, kernel: _Kernel, kind: str) -> None:
        self._result.failed_swaps += 1
        self._note("swap-fails", kernel, swap=kind)

    def _suspend(self, kernel: _Kernel, effect: Suspend) -> None:
        self._result.suspends += 1
        self._leaves_in_vain(kernel)
        if self._fails(kernel):
            self._failed(kernel, "suspend")
            gives_up = partial(self._suspended, effect, SuspendOutcome.ABORTED)
            self._at(self._now_ms + self._host.swap.fixed_ms, gives_up)
        elif kernel.total_mib > effect.host_mib:
            self._at(self._now_ms, partial(self._count, kernel, effect))
        else:
            self._save(kernel, effect)

    def _count(self, kernel: _Kernel, effect: Suspend) -> None:
        """Do what the broker does where more would be saved than is reserved: ask for the difference, or leave the kernel as it is."""
        need_mib = kernel.total_mib
        self._send(
            HostMemoryNeeded(
                at_ms=self._now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                need_mib=need_mib,
            )
        )
        view = self._arbiter.lease(effect.lease_id)
        if view is not None and view.host_reserved_mib >= need_mib:
            self._save(kernel, effect)
            return
        self._failed(kernel, "suspend")
        self._suspended(effect, SuspendOutcome.ABORTED, need_mib=need_mib)

    def _suspended(self, effect: Suspend, outcome: SuspendOutcome, *, saved_mib: int = 0, need_mib: int = 0) -> None:
        self._send(
            SuspendFinished(
                at_ms=self._now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
                saved_mib=saved_mib,
                need_mib=need_mib,
            )
        )

    def _save(self, kernel: _Kernel, effect: Suspend) -> None:
        if kernel.running is not None or kernel.growing:
            self._result.preemptions += 1
            self._note("preempted", kernel, cell=kernel.next_cell)
            if kernel.running is not None:
                kernel.unfinished = self._stop(kernel)
                self._accounts.waiting += 1
            kernel.growing, kernel.waiting = False, True
        device_ids, mib, total_mib, life = kernel.device_ids, kernel.memory_mib, kernel.total_mib, kernel.life
        kernel.swap_ends_ms = self._now_ms + self._host.swap.save_ms(total_mib)

        def saved() -> None:
            if not kernel.over and kernel.life == life:
                self._use(kernel, device_ids, -mib)
                self._accounts.save(self._number, total_mib)
                self._note("saved", kernel, mib=total_mib)
                self._count_moved(kernel, total_mib)
            outcome = SuspendOutcome.NOTHING_TO_SAVE if mib == 0 else SuspendOutcome.SAVED
            self._suspended(effect, outcome, saved_mib=total_mib)

        self._at(kernel.swap_ends_ms, saved)

    def _resume(self, kernel: _Kernel, effect: Resume) -> None:
        self._result.resumes += 1
        kernel.reserved_mib, kernel.resume_fails = effect.reserve_mib, self._fails(kernel)
        if kernel.resume_fails:
            self._failed(kernel, "resume")
            self._at(self._now_ms + self._host.swap.fixed_ms, partial(self._resumed, effect, ResumeOutcome.NOT_STARTED))
            return
        self._use(kernel, kernel.device_ids, kernel.memory_mib)
        total_mib, life = kernel.total_mib, kernel.life
        kernel.swap_ends_ms = self._now_ms + self._host.swap.restore_ms(total_mib)
        view = self._arbiter.lease(effect.lease_id)
        if view is not None and view.came_early:
            self._result.early_resumes += 1
            kernel.early_mib = total_mib

        def restored() -> None:
            if not kernel.over and kernel.life == life:
                self._accounts.save(self._number, -total_mib)
                self._note("restored", kernel, mib=total_mib)
                self._count_moved(kernel, total_mib)
            self._resumed(effect, ResumeOutcome.RESTORED)

        self._at(kernel.swap_ends_ms, restored)

    def _count_moved(self, kernel: _Kernel, mib: int) -> None:
        if self._meter is not None:
            self._meter.moved(self._now_ms, kernel.spec.lease_id, mib)

    def _resumed(self, effect: Resume, outcome: ResumeOutcome) -> None:
        self._send(
            ResumeFinished(
                at_ms=self._now_ms,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
            )
        )

    def _leaves_in_vain(self, kernel: _Kernel) -> None:
        """Count what a kernel was brought back with if no cell has followed."""
        self._result.vain_mib += kernel.early_mib
        kernel.early_mib = 0

    # -- a session ------------------------------------------------------------------------------------------------------

    def open(self, session: Session, lease: LeaseSpec, ended: Callable[[], None]) -> None:
        """Begin a session here; `ended` is called when it is over."""
        kernel = self._kernels[session.session_id] = _Kernel(session, lease, ended)
        self._send(LeaseRequested(at_ms=self._now_ms, spec=lease))
        if kernel.over:
            ended()
            return
        self._felt.entered(0)  # a lease is given at once; its cells wait
        self._send(Attached(at_ms=self._now_ms, lease_id=lease.lease_id, gated=True))
        first = session.cells[0].start_ms if session.cells else session.close_ms
        self._expect(kernel, first - self._now_ms)
        self._at(first, partial(self._next, kernel))

    def _expect(self, kernel: _Kernel, gap_ms: int) -> None:
        """Schedule the signs that the person gives before the next cell, or before closing the notebook."""
        at_end = kernel.next_cell == len(kernel.session.cells)
        asks = not at_end and self._asks(kernel.cell)
        signs = self._host.signs.before(
            self._host.seed, kernel.session.session_id, kernel.next_cell, gap_ms, uses_gpu=asks
        )
        for after_ms in signs:
            self._at(self._now_ms + after_ms, partial(self._sign, kernel, kernel.next_cell))

    def _sign(self, kernel: _Kernel, cell: int) -> None:
        if kernel.over or kernel.next_cell != cell:
            return
        until_ms = self._now_ms + SIGN_MS
        self._send(Expected(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, until_ms=until_ms, sign=Sign.TYPING))

    def _asks(self, cell: Cell) -> bool:
        return bool(cell.gpus) or self._host.every_cell_asks

    def _next(self, kernel: _Kernel) -> None:
        """Execute the next cell, or close the notebook."""
        if kernel.next_cell == len(kernel.session.cells):
            self._close(kernel)
            return
        cell = kernel.cell
        kernel.asked_ms = self._now_ms
        self._note("asked", kernel, cell=kernel.next_cell)
        if not self._asks(cell):
            self._note("begins", kernel, cell=kernel.next_cell, device_ids=(), util_percent=0)
            self._at(self._now_ms + cell.duration_ms, partial(self._ends_without_gpu, kernel))
            return
        kernel.early_mib = 0
        self._send(BusyChanged(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, busy=True))
        self._accounts.waiting += 1
        view = self._arbiter.lease(kernel.spec.lease_id)
        if kernel.state is LeaseState.RESIDENT and (view is None or not view.gate_closed):
            self._grow(kernel)
            return
        kernel.waiting = True
        self._watch_wait(kernel)
        self._send(Wanted(at_ms=self._now_ms, lease_id=kernel.spec.lease_id))

    def _watch_wait(self, kernel: _Kernel) -> None:
        """Count the cell against the goal as soon as its wait exceeds a limit, and not only when it begins."""
        if kernel.cell.gpus:
            for limit, limit_ms in enumerate(self._felt.wait_limits_ms):
                self._at(self._now_ms + limit_ms + 1, partial(self._overdue, kernel, kernel.next_cell, limit))

    def _overdue(self, kernel: _Kernel, cell: int, limit: int) -> None:
        unbegun = kernel.unfinished is None and (kernel.waiting or kernel.growing)
        if kernel.next_cell == cell and unbegun and not kernel.over:
            kernel.overdue = limit + 1
            self._felt.overdue(limit)

    def _ends_without_gpu(self, kernel: _Kernel) -> None:
        self._note("ends", kernel, cell=kernel.next_cell)
        self._done(kernel)

    def _granted(self, kernel: _Kernel, grant: Granted) -> None:
        kernel.reserved_mib = grant.reserved_mib or kernel.spec.reserve_mib
        if kernel.waiting:
            kernel.waiting = False
            self._grow(kernel)

    def _grow(self, kernel: _Kernel) -> None:
        """Take the memory that the cell of a granted kernel needs, as far as allowed; run the cell once it has all of it."""
        need_mib = kernel.cell.gpu_mib if kernel.cell.gpus and kernel.unfinished is None else kernel.memory_mib
        mib = min(need_mib, kernel.reserved_mib)
        if mib != kernel.memory_mib:
            self._use(kernel, kernel.device_ids, mib - kernel.memory_mib)
            kernel.memory_mib = mib
        if mib < need_mib and not kernel.growing:
            kernel.short_ms = self._now_ms
            self._note("short", kernel, cell=kernel.next_cell, mib=mib, need_mib=need_mib)
            plan = partial(self._give_up, kernel, kernel.next_cell, self._now_ms)
            patience_ms = self._host.patience_ms if need_mib <= kernel.spec.reserve_mib else 0
            self._at(self._now_ms + patience_ms, plan)
        kernel.growing = mib < need_mib  # before it is measured: the answer may let it grow at once
        if kernel.cell.gpus:
            self._measure(kernel, None)
        if mib == need_mib:
            self._at(self._now_ms + _MEASURED_MS, partial(self._measure_again, kernel, kernel.next_cell))
            self._run_cell(kernel)

    def _measure_again(self, kernel: _Kernel, cell: int) -> None:
        """Measure again as the broker does: how much of the device the cell uses, if it still runs, and that its memory grew no further."""
        if kernel.state is LeaseState.RESIDENT:
            running = kernel.running if kernel.next_cell == cell and kernel.cell.gpus else None
            used_milli = self._shared[kernel.device_ids[0]].used_milli(running) if running is not None else None
            self._measure(kernel, used_milli)

    def _measure(self, kernel: _Kernel, util_milli: int | None) -> None:
        used_mib, lease_id = kernel.total_mib, kernel.spec.lease_id
        self._send(LeaseMeasured(at_ms=self._now_ms, lease_id=lease_id, used_mib=used_mib, util_milli=util_milli))

    def _give_up(self, kernel: _Kernel, cell: int, since_ms: int) -> None:
        """Fail a cell that is short of memory since then, as an allocation fails at the framework's limit."""
        if kernel.growing and (kernel.next_cell, kernel.short_ms) == (cell, since_ms):
            kernel.growing = False
            self._result.out_of_memory += 1
            self._note("failed", kernel, cell=cell)
            self._begins(kernel)
            self._send(BusyChanged(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, busy=False))
            self._done(kernel)

    def _begins(self, kernel: _Kernel) -> None:
        self._accounts.waiting -= 1
        if kernel.unfinished is None and kernel.cell.gpus:
            self._felt.waited(self._now_ms - kernel.asked_ms, kernel.overdue, host=self._number)
            kernel.overdue = 0

    def _run_cell(self, kernel: _Kernel) -> None:
        """Run the cell on the kernel's devices; the first of them decides how much its neighbours slow it down."""
        cell = kernel.cell
        self._begins(kernel)
        running, kernel.unfinished = kernel.unfinished, None
        kind = "begins" if running is None else "continues"
        if running is None:
            util_percent = cell.util_percent if cell.gpus else 0
            kernel.ran_ms = 0
            running = Running(kernel.spec.lease_id, util_percent, cell.duration_ms * UNSHARED, self._now_ms)
        running.at_ms = self._now_ms
        kernel.running, kernel.began_ms = running, self._now_ms
        ids, util = kernel.device_ids, running.util_percent
        self._note(kind, kernel, cell=kernel.next_cell, device_ids=ids, util_percent=util)
        self._accounts.running_gpus += cell.gpus
        self._plan(self._shared[kernel.device_ids[0]].begin(running))
        self._count_work(kernel)

    def _count_work(self, kernel: _Kernel) -> None:
        """Tell the meter which cells run now on the devices of a cell that has begun or was stopped, and how much of each they use."""
        if self._meter is not None:
            shared = self._shared[kernel.device_ids[0]]
            used = {
                session_id: (self._kernels[session_id].next_cell, shared.used_milli(running))
                for session_id, running in shared.running.items()
            }
            self._meter.works(self._now_ms, kernel.device_ids[: max(1, kernel.cell.gpus)], used)

    def _plan(self, ends: Sequence[tuple[int, Running]]) -> None:
        for at_ms, running in ends:
            self._at(at_ms, partial(self._cell_ends, running, running.version))

    def _cell_ends(self, running: Running, version: int) -> None:
        if running.version != version:
            return
        kernel = self._kernels[running.session_id]
        self._note("ends", kernel, cell=kernel.next_cell)
        self._stop(kernel)
        if kernel.cell.gpus:
            if (
                kernel.ran_ms >= _MEASURED_MS
            ):  # a shorter one is over before the broker has measured a whole period of it
                worked_ms = kernel.cell.util_percent * kernel.cell.duration_ms
                self._measure(kernel, worked_ms * 10 // kernel.ran_ms)
            alone_ms = kernel.cell.duration_ms
            self._felt.ended(kernel.session.user, self._now_ms - kernel.asked_ms - alone_ms, alone_ms)
        self._send(BusyChanged(at_ms=self._now_ms, lease_id=kernel.spec.lease_id, busy=False))
        self._done(kernel)

    def _stop(self, kernel: _Kernel) -> Running:
        """Take the running cell off its device, which may speed up the others there."""
        stopped, ends = self._shared[kernel.device_ids[0]].finish(kernel.spec.lease_id, self._now_ms)
        kernel.running = None
        kernel.ran_ms += self._now_ms - kernel.began_ms
        kernel.worked_ms += self._now_ms - kernel.began_ms
        self._accounts.running_gpus -= kernel.cell.gpus
        self._plan(ends)
        self._count_work(kernel)
        return stopped

    def _done(self, kernel: _Kernel) -> None:
        """Schedule the next cell, or the end, as long after this one as in the trace."""
        cell = kernel.cell
        kernel.next_cell += 1
        follows = kernel.cell.start_ms if kernel.next_cell < len(kernel.session.cells) else kernel.session.close_ms
        thinks_ms = max(0, follows - cell.start_ms - cell.duration_ms)
        self._expect(kernel, thinks_ms)
        self._at(self._now_ms + thinks_ms, partial(self._next, kernel))

    def _close(self, kernel: _Kernel) -> None:
        self._is_over(kernel)
        self._leaves_in_vain(kernel)
        self.closed_ms = self._now_ms
        self._drop_memory(kernel)
        self._send(ProcessExited(at_ms=self._now_ms, lease_id=kernel.spec.lease_id))
        self._send(LeaseReleased(at_ms=self._now_ms, lease_id=kernel.spec.lease_id))
        kernel.ended()

    def _drop_memory(self, kernel: _Kernel) -> None:
        """Count no more what a kernel holds on devices and in the host's memory."""
        if kernel.state in HOLDING and not (kernel.state is LeaseState.RESUMING and kernel.resume_fails):
            self._use(kernel, kernel.device_ids, -kernel.memory_mib)
        if kernel.state is LeaseState.SUSPENDED or kernel.state is LeaseState.RESUMING:
            self._note("dropped", kernel, mib=kernel.total_mib)
            self._accounts.drop_saved(self._number, kernel.total_mib)
