"""Turns events into arbiter calls and carries out the effects the arbiter returns.

The broker does not decide who holds a GPU. It manages what the arbiter does not know about: processes, IOPub, extensions, tokens, the
ledger and the checkpoint worker. All methods run on one event loop. Effects that take time (such as suspending or resuming a kernel, or
re-examining its processes) run as tasks, and their results come back as events.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import zmq.asyncio
from msgspec import structs

from fractional_gpu.broker.accounting.counters import UsageCounters
from fractional_gpu.broker.accounting.habits import ShareHabits
from fractional_gpu.broker.accounting.metering import Metering, Turns
from fractional_gpu.broker.clock import DeadlineClock, now_ms, wall_ms
from fractional_gpu.broker.cost import Account, Costs
from fractional_gpu.broker.kernels.connection import connection_from_json
from fractional_gpu.broker.kernels.context_sizes import ContextSizes
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import Kernel, remove_books, sharing_environment
from fractional_gpu.broker.kernels.networks import Networks
from fractional_gpu.broker.kernels.process_inspector import stopped_sentence
from fractional_gpu.broker.lanes import TOKENS
from fractional_gpu.broker.metrics import Metrics
from fractional_gpu.broker.persistence.lease_files import LeaseFiles, remove_token_file
from fractional_gpu.broker.persistence.ledger_writer import History, LeaseRecords, LedgerWriter
from fractional_gpu.broker.supervision.enforcement import ContextLearner, Enforcement, GpuActivity
from fractional_gpu.broker.supervision.hard_caps import HardCaps
from fractional_gpu.broker.supervision.survivors import OomKills, Survivors
from fractional_gpu.broker.swap.operations import Operations
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import (
    CapBreached,
    CloseGate,
    Declined,
    Effect,
    EndProcesses,
    Granted,
    LeaseAdmitted,
    LeaseEnded,
    LeaseRefused,
    LookAgain,
    Pinned,
    Recorded,
    Resized,
    Resume,
    Shrink,
    StateChanged,
    Suspend,
    SuspendAnnounced,
    TicketsChanged,
    UserNotice,
    WakeAt,
)
from fractional_gpu.core.events import (
    BusyChanged,
    Checkpointable,
    Event,
    Expected,
    LeaseReleased,
    LeasesMeasured,
    Measurement,
    MoveRequested,
    PinRequested,
    ProcessExited,
    Tick,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.model import LeaseState, LeaseView, ReserveBy, Sign, TicketView
from fractional_gpu.core.units import format_duration, format_memory
from fractional_gpu.gpu.interface import DeviceInfo, DeviceSensors, Monitor
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.messages import GateVerb

log = logging.getLogger(__name__)

_TICKETS_MS = 1000
_SIGN_MS = 60_000  # how long the sign of a coming cell lasts, unless the sender sets a time
_SIGN_AGAIN_MS = 2_000
_SHARE_UNUSED = (
    "This cell has held its share of the GPU without using it for as long as its pool allows (`max_unused_hold`), so other kernels may use "
    "it now. The cell continues. If it uses the GPU later, the memory is not reserved for it until it is this kernel's turn again."
)


class Broker:
    def __init__(
        self,
        arbiter: Arbiter,
        monitor: Monitor,
        swaps: Swaps,
        writer: LedgerWriter,
        *,
        devices: Mapping[str, DeviceInfo] | None = None,
        files: LeaseFiles | None = None,
        context_sizes: ContextSizes | None = None,
    ) -> None:
        """Manage `devices`, a mapping from ids to devices.

        Backup copies of lease records are written to `files`. `context_sizes` contains the sizes of CUDA contexts that earlier brokers
        observed.
        """
        self.arbiter = arbiter
        self.monitor = monitor
        self.writer = writer
        self.deadlines = DeadlineClock.of(writer.ledger)
        self.metrics = Metrics(arbiter)
        self.kernels: dict[str, Kernel] = {}
        self.culls_idle = False  # whether to end kernels that have been idle for long
        self.lost: Mapping[str, ProcessIdentity] = {}  # by lease: live kernels whose lease has no record
        self.metering = Metering(arbiter, writer, self.kernels)
        self.habits = ShareHabits(arbiter, writer, self.kernels)
        self.turns = Turns(arbiter, writer)
        self.metering.followers += [lambda _rows: self.habits.write(), lambda _rows: self.turns.write()]
        self.usage_counters = UsageCounters(self.metering, arbiter.pools)
        self.devices = dict(devices or {})
        self.queue_changed = asyncio.Event()
        # The next event sets this, as any event may change anything. Take it before you read the state, then wait for it.
        self.anything_changed = asyncio.Event()
        self.last_use_s = time.monotonic()
        self.stopping = False
        self.used_mib: dict[str, int] = {}  # by device, as last measured
        self.host_deadline_ms: int | None = None  # when a cloud takes the host away, on the clock of `now_ms`
        self.changes = 0  # state changes so far; each one makes a running measurement stale
        self.history = History(writer)
        self.records = LeaseRecords(self, files)
        self.end_processes: Callable[[str], None] = lambda _: None  # ends the processes of a revoked lease
        writer.connect(wrote=self.metrics.wrote, trouble_changed=self._trouble_changed)
        self._inspector = swaps.inspector
        self.scans = swaps.inspector.scans
        self.costs = Costs()
        self._tickets: tuple[int, dict[str, TicketView]] | None = None  # when the tickets were read, and all tickets
        self._places: dict[str, int | None] = {}  # by lease: the place in the queue when last read
        self.sensors: dict[str, DeviceSensors] = {}  # by device, as last read
        self.gpu_activity = GpuActivity(self)
        self.enforcement = Enforcement(self)
        self.asked_servers: list[Callable[[Kernel], str]] = []  # what each model server was asked to do for a kernel
        self.oom_kills = OomKills()
        self.contexts = ContextLearner(self, context_sizes or ContextSizes())
        self.survivors = Survivors(self, swaps.inspector)
        swaps.connect(roots=self.roots, is_quiet=self.gpu_activity.is_quiet)
        self._networks = Networks()
        self._alarm: asyncio.TimerHandle | None = None
        self.hard_caps = HardCaps(self, swaps.worker)
        self.operations = Operations(self, swaps)

    def dispatch(self, event: Event) -> list[Effect]:
        """Pass an event to the arbiter, carry out the resulting effects, and return them."""
        effects = self.arbiter.handle(event)
        self.metrics.saw(event, effects)
        self._tickets = None
        for effect in effects:
            self._carry_out(effect)
        if isinstance(event, Tick):
            self._wake_queue()  # tickets may overtake each other just by waiting
        self.metering.saw(event, effects)
        self.turns.saw(event, effects)
        self.arbiter.run_deferred_work()
        if isinstance(event, LeasesMeasured):
            for lease_id in event.lease_ids:
                if (view := self.arbiter.lease(lease_id)) is not None:
                    self.history.note(view)
        self.note_change()
        return effects

    def ask(self, event: PinRequested | MoveRequested, about: str) -> Declined | None:
        """Dispatch a request the arbiter answers at once. Return the refusal, or None if the request was granted."""
        for effect in self.dispatch(event):
            if isinstance(effect, Declined) and (effect.lease_id, effect.about) == (event.lease_id, about):
                return effect
        return None

    def _carry_out(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case per effect
        lease_id = getattr(effect, "lease_id", "")
        kernel = self.kernels.get(lease_id)
        match effect:
            case Recorded(reason=reason, sentence=sentence):
                log.info("lease %s: %s (%s)", lease_id[:8], sentence, reason)
                self.record_line(lease_id, reason, sentence)
            case StateChanged(new=new):
                self.changes += 1
                if kernel is not None:
                    self._state_changed(kernel, effect)
                    if new is not LeaseState.ENDED:
                        self.records.save(kernel)
            case Suspend() | Resume() | LookAgain() | Shrink():
                if not self.stopping:  # otherwise the next broker examines the lease and decides again
                    self.operations.start(effect)
            case EndProcesses():
                if not self.stopping:
                    self.end_processes(lease_id)
            case LeaseEnded(reason=reason):
                self._ended(lease_id, reason)
            case TicketsChanged():
                self._wake_queue()
            case WakeAt(at_ms=at_ms):
                self._set_alarm(at_ms)
            case CapBreached():
                self.enforcement.breached(effect)
                if kernel is not None and not self.stopping:
                    self.contexts.breached(kernel)
            case LeaseAdmitted() | LeaseRefused():
                pass  # the caller reads it from the result of `dispatch`
            case Granted() | CloseGate() | Declined() | Resized() | Pinned() | SuspendAnnounced() | UserNotice():
                if kernel is not None:
                    self._tell(kernel, effect)
            case _:
                raise TypeError(f"the arbiter returned {type(effect).__name__}, which the broker does not know")

    def _state_changed(self, kernel: Kernel, change: StateChanged) -> None:
        kernel.changes += 1
        if change.new is LeaseState.SUSPENDED and change.old is LeaseState.SUSPENDING:
            kernel.facts = structs.replace(kernel.facts, suspends=kernel.facts.suspends + 1)
        elif change.new is LeaseState.RESIDENT and change.old is LeaseState.RESUMING:
            kernel.facts = structs.replace(kernel.facts, resumes=kernel.facts.resumes + 1)
        if (view := self.arbiter.lease(change.lease_id)) is not None:
            if change.new is LeaseState.RESIDENT:
                kernel.checkpoint.homes = view.device_ids
                if kernel.launch.command:
                    # No message shows that the command continues, so it counts as busy until the device's counters show that it is quiet.
                    kernel.gpu_work.clear()
                    asyncio.get_running_loop().call_soon(self.sync_busy_state, kernel)
            self.history.note(view)
        kernel.notify()

    def _tell(
        self, kernel: Kernel, effect: Granted | CloseGate | Declined | Resized | Pinned | SuspendAnnounced | UserNotice
    ) -> None:
        match effect:
            case Granted():
                kernel.cell.ticket_by_broker, kernel.cell.granted_s = False, time.monotonic()
                if self.records.may_use(kernel):
                    self.open_gate(kernel)
            case CloseGate():
                # The next cell will ask first. If there is no extension, IOPub shows when a cell begins (`sync_busy_state`).
                if kernel.link is not None:
                    kernel.link.send(GateVerb.PREEMPT)
                return
            case Declined(about="pin" | "move"):
                return  # the caller that pins or moves reads the answer from the result of `dispatch`
            case Declined(about="resize"):
                if kernel.requests.resize is not None:
                    kernel.requests.resize.declined = (effect.reason, effect.sentence)
            case Declined():
                # The arbiter merges all requests to suspend a lease, so its refusal answers all of them.
                for request in kernel.requests.suspends:
                    request.declined = (effect.reason, effect.sentence)
            case Resized():
                self.records.save(kernel, limit=True)
            case Pinned():
                self.records.save(kernel)
            case SuspendAnnounced(at_ms=at_ms):
                if kernel.link is not None:
                    left = format_duration(max(0, at_ms - now_ms()))
                    sentence = (
                        f"This kernel is idle: its GPU memory will move to host memory in {left}, and back when you run a cell. "
                        "To keep it on the GPU, run a cell or `%gpu pin 30m`."
                    )
                    kernel.link.send(GateVerb.NOTICE, sentence=sentence)
            case UserNotice(sentence=sentence):
                self.announce_deadline(kernel, sentence)
        kernel.notify()

    @staticmethod
    def announce_deadline(kernel: Kernel, sentence: str) -> None:
        """Tell the user of a kernel or command that its GPU or host will become unavailable, or will stay available after all."""
        if kernel.link is not None:
            kernel.link.send(GateVerb.NOTICE, sentence=sentence, urgent=True, topic="deadline")
        elif kernel.launch.command:
            kernel.notices.append(sentence)  # its runner prints it
            kernel.notify()

    def open_gate(self, kernel: Kernel) -> None:
        """Let the kernel's cells run if it may use its devices and the arbiter is not making its cells wait."""
        device_ids, view = self.records.may_use(kernel), self.arbiter.lease(kernel.lease_id)
        if device_ids and kernel.link is not None and view is not None and not view.gate_closed:
            kernel.link.send(GateVerb.OPEN, environment=self.environment(kernel.lease_id, device_ids))

    def _cell_began(self, kernel: Kernel) -> None:
        """Handle a cell that started although its kernel should have kept it waiting.

        This happens if the kernel has no extension, or if the command to keep cells waiting arrived too late or was overridden by a grant.
        """
        if kernel.link is not None:
            kernel.link.send(GateVerb.PREEMPT)
        elif kernel.requests.waiters == 0:
            kernel.cell.ticket_by_broker = True
            self.dispatch(Wanted(at_ms=now_ms(), lease_id=kernel.lease_id))

    def suspend_finished(self, kernel: Kernel) -> None:
        self.contexts.suspended(kernel)
        view = self.arbiter.lease(kernel.lease_id)
        state = view.state if view is not None else LeaseState.ENDED
        if state is LeaseState.SUSPENDED and kernel.executing and self.arbiter.waits(kernel.lease_id):
            # The kernel was preempted, so the arbiter has filed a ticket for it. The ticket is withdrawn if the cell ends without the GPU.
            kernel.cell.ticket_by_broker = kernel.requests.waiters == 0
        if state is LeaseState.NO_CONTEXT and kernel.cell.unused and kernel.link is not None:
            kernel.link.send(GateVerb.NOTICE, sentence=_SHARE_UNUSED, urgent=True)
        self.sync_busy_state(kernel)

    def _ended(self, lease_id: str, reason: str) -> None:
        kernel = self.kernels.pop(lease_id, None)
        self.history.forget(lease_id)
        remove_books(lease_id)
        if kernel is not None:
            kernel.forget_process()
            self._networks.forget(lease_id)
            kernel.notify()
            TOKENS.start().submit(remove_token_file, lease_id, kernel.launch.token_file, kernel.uid)
        self.records.remove_backup_record(lease_id)
        self.writer.submit(partial(self.writer.ledger.end_lease, lease_id, wall_ms(), reason))
        self.last_use_s = time.monotonic()

    def _trouble_changed(self) -> None:
        if not self.writer.trouble and not self.stopping:
            for kernel in self.kernels.values():
                self.records.save(kernel, limit=True)  # the record may be unwritten while a cell waits for it
        self._wake_queue()
        self.note_change()

    def note_change(self) -> None:
        self.anything_changed.set()
        self.anything_changed = asyncio.Event()

    def _wake_queue(self) -> None:
        self.queue_changed.set()
        self.queue_changed = asyncio.Event()

    def _set_alarm(self, at_ms: int | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if at_ms is not None:
            delay_s = max(0, at_ms - now_ms()) / 1000
            self._alarm = asyncio.get_running_loop().call_later(delay_s, lambda: self.dispatch(Tick(at_ms=now_ms())))

    def environment(self, lease_id: str, device_ids: Sequence[str]) -> dict[str, str]:
        environment = self.monitor.kernel_environment(device_ids[0] if device_ids else None)
        for device_id in device_ids[1:]:
            for name, value in self.monitor.kernel_environment(device_id).items():
                if value != environment[name]:
                    environment[name] += f",{value}"
        view = self.arbiter.lease(lease_id)
        if view is not None:
            # The lease's cap on each device is its reservation there.
            follows_use = self.reserves_by_use(view.spec.pool) and view.reserved_mib > 0
            limit_mib = view.reserved_mib if follows_use else view.spec.reserve_mib
            environment["JUPYTER_GPU_MEMORY_MIB"] = str(limit_mib)
            if (pool := self.arbiter.pools().get(view.spec.pool)) is not None:
                held = [device for device in self.arbiter.devices() if device.device_id in device_ids]
                environment |= sharing_environment(pool, view.spec, limit_mib, held)
        if device_ids and device_ids[0] in self.devices:
            kernel = self.kernels.get(lease_id)
            told_mib = self.hard_caps.told_mib(kernel, device_ids[0]) if kernel is not None else None
            environment["JUPYTER_GPU_CAP"] = "driver" if told_mib else ""
            environment["JUPYTER_GPU_DEVICE_MIB"] = str(told_mib or self.devices[device_ids[0]].memory_mib)
            environment["JUPYTER_GPU_CONTEXT_MIB"] = str(self.contexts.context_mib(lease_id, device_ids))
        return environment

    def reserves_by_use(self, pool: str) -> bool:
        policy = self.arbiter.pools().get(pool)
        return policy is not None and policy.reserve_by is ReserveBy.USE

    def follow(self, kernel: Kernel, identity: ProcessIdentity, connection: str) -> None:
        """Watch a kernel's process and IOPub, or a command's process and runner.

        Raises ProcessLookupError if the process has ended, and ValueError if the connection is invalid.
        """
        checked = None if kernel.launch.command else connection_from_json(json.loads(connection))
        kernel.watch_process(identity, partial(self.process_gone, kernel, identity))
        self.oom_kills.follow(identity.pid, time.monotonic())
        kernel.connection = connection
        if checked is None:
            self.watch_runner(kernel)
            self.sync_busy_state(kernel)
            return
        context = self._context_for(kernel, identity)
        if context is not None:
            kernel.iopub = IOPubWatch(
                context,
                checked,
                self._account_of(kernel),
                ipykernel=kernel.launch.ipykernel,
                changed=partial(self.sync_busy_state, kernel),
                signed=partial(self.expect_cell, kernel),
            )
        self.dispatch(BusyChanged(at_ms=now_ms(), lease_id=kernel.lease_id, busy=kernel.busy))

    def _account_of(self, kernel: Kernel) -> Account:
        view = self.arbiter.lease(kernel.lease_id)
        if view is not None and view.spec.seat:
            return self.costs.of_seat(view.spec.seat, view.spec.owner)
        return self.costs.of_user(kernel.uid)

    def _context_for(self, kernel: Kernel, identity: ProcessIdentity) -> zmq.asyncio.Context | None:
        """Return a ZeroMQ context that can reach the kernel's sockets.

        If the broker is not permitted to enter the kernel's network namespace, record this in the lease's history and return None.
        """
        try:
            return self._networks.context_for(kernel.lease_id, identity)
        except PermissionError as error:
            kernel.unheard = (
                "the broker is not permitted to enter this kernel's network namespace, so it cannot read the kernel's messages "
                f"({error.strerror}; only root may do this). With our extension, the device's counters show whether the kernel is idle; "
                "without it, the kernel counts as busy"
            )
            log.warning("lease %s: %s", kernel.lease_id[:8], kernel.unheard)
            self.record_line(kernel.lease_id, "iopub.no-permission", kernel.unheard)
            return None

    def watch_runner(self, kernel: Kernel) -> None:
        kernel.watch_runner(kernel.launch.server, partial(self._runner_ended, kernel))

    def watch_holder(self, kernel: Kernel) -> None:
        ended = LeaseReleased(at_ms=now_ms(), lease_id=kernel.lease_id, reason="holder-ended")
        # Not at once, because a starting broker introduces its leases one by one.
        later = partial(asyncio.get_running_loop().call_soon, self.dispatch, ended)
        kernel.watch_runner(kernel.launch.holder, later)

    def _runner_ended(self, kernel: Kernel) -> None:
        """Resume a command, or keep it resident, once its runner (`jupyter gpu run`) has ended, because no other process will resume it."""
        kernel.end_runner()
        sentence = "`jupyter gpu run` has ended, but its command is still running and stays on the GPU until it ends"
        log.warning("lease %s: %s", kernel.lease_id[:8], sentence)
        self.record_line(kernel.lease_id, "runner.ended", sentence)
        # The arbiter may be handling an event, because a starting broker introduces its leases one by one.
        asyncio.get_running_loop().call_soon(self._bring_back, kernel)

    def _bring_back(self, kernel: Kernel) -> None:
        if kernel.runner_gone:
            self.sync_busy_state(kernel)
            self.request_on_behalf(kernel)

    def process_gone(self, kernel: Kernel, identity: ProcessIdentity) -> None:
        """Handle a process that has ended or is about to be replaced. The kernel's memory is not free until all its processes are gone."""
        if kernel.identity != identity:
            return
        log.info("lease %s: process %d ended", kernel.lease_id[:8], identity.pid)
        if full := self.oom_kills.account_for(identity):
            self._ended_by_oom(kernel, full)
        kernel.forget_process()
        self._networks.forget(kernel.lease_id)
        kernel.checkpoint.needs_driver = False
        self.survivors.kernel_ended(kernel, identity)

    def process_unwatched(self, kernel: Kernel, identity: ProcessIdentity) -> None:
        kernel.identity = identity
        self.process_gone(kernel, identity)

    def exited(self, kernel: Kernel) -> None:
        self.dispatch(ProcessExited(at_ms=now_ms(), lease_id=kernel.lease_id))
        self.end_burst(kernel)
        kernel.notify()

    def end_burst(self, kernel: Kernel) -> None:
        """Restore the lease's normal size if the kernel ended while the lease was enlarged for one cell."""
        if kernel.requests.size_before_burst is not None:
            own_size, kernel.requests.size_before_burst = kernel.requests.size_before_burst, None
            self.dispatch(replace(own_size, at_ms=now_ms()))

    def _ended_by_oom(self, kernel: Kernel, full: str) -> None:
        view = self.arbiter.lease(kernel.lease_id)
        saved_mib = view.saved_mib if view is not None else 0
        saved = f", with the {format_memory(saved_mib)} that were saved from the GPU" if saved_mib else ""
        sentence = (
            "Host memory ran out, and it appears that the system's out-of-memory killer ended this kernel. "
            f"What was full: {full}. Its variables are lost{saved}. Keep less in memory at once, or ask for a higher limit."
        )
        log.warning("lease %s: %s", kernel.lease_id[:8], sentence)
        kernel.notices.append(sentence)
        self.record_line(kernel.lease_id, "process.out-of-memory", sentence)

    def record_line(self, lease_id: str, reason: str, sentence: str) -> None:
        self.writer.submit(partial(self.writer.ledger.record, lease_id, wall_ms(), reason, sentence))

    def sync_busy_state(self, kernel: Kernel) -> None:
        """Tell the arbiter whether the kernel is busy, and request the GPU if the kernel cannot do so itself."""
        view = self.arbiter.lease(kernel.lease_id)
        if view is None or view.state in (LeaseState.UNATTACHED, LeaseState.ENDED):
            return
        self.gpu_activity.see(kernel, view)
        busy = kernel.busy
        by_cell = busy and kernel.runs_cell
        if view.busy != busy or (by_cell and not kernel.told_cell):
            kernel.told_cell, kernel.measurement.is_fresh = by_cell, False
            self.dispatch(BusyChanged(at_ms=now_ms(), lease_id=kernel.lease_id, busy=busy, by_cell=by_cell))
            kernel.notify()
        # A cell at a closed gate files its own ticket. A cell that has no gate, or was preempted, cannot do so. The broker then files the
        # ticket, and withdraws it if the cell ends without the GPU.
        executing = kernel.executing
        if not executing:
            kernel.cell.executing_since_s = None
            if kernel.requests.blocked_resumes:
                kernel.notify()
            if kernel.cell.ticket_by_broker and kernel.requests.waiters == 0 and not kernel.runner_gone:
                kernel.cell.ticket_by_broker = False
                self.dispatch(Unwanted(at_ms=now_ms(), lease_id=kernel.lease_id))
        elif kernel.cell.executing_since_s is None:
            kernel.cell.executing_since_s = time.monotonic()
            if view.gate_closed and not view.at_gate:
                self._cell_began(kernel)
        if executing and kernel.link is None and not view.spec.gated:
            self.request_on_behalf(kernel)

    def expect_cell(self, kernel: Kernel, sign: Sign, within_ms: int = _SIGN_MS, confidence_milli: int = 1000) -> None:
        at_ms = now_ms()
        if kernel.signs.get(sign, at_ms) <= at_ms:
            kernel.signs[sign] = at_ms + _SIGN_AGAIN_MS
            self.dispatch(
                Expected(
                    at_ms=at_ms,
                    lease_id=kernel.lease_id,
                    until_ms=at_ms + within_ms,
                    sign=sign,
                    confidence_milli=confidence_milli,
                )
            )

    def set_stopped(self, kernel: Kernel, *, stopped: bool) -> None:
        """Record that a signal or debugger has stopped the process, or that it has continued. A stopped process stays on its device."""
        identity = kernel.identity
        if identity is None or stopped == bool(kernel.stopped):
            return
        kernel.stopped = stopped_sentence(identity.pid) if stopped else ""
        sentence = kernel.stopped or f"process {identity.pid} is running again"
        log.info("lease %s: %s", kernel.lease_id[:8], sentence)
        self.record_line(kernel.lease_id, "process.stopped" if stopped else "process.goes-on", sentence)
        why_not = kernel.stopped or kernel.unsaveable
        self.dispatch(Checkpointable(at_ms=now_ms(), lease_id=kernel.lease_id, why_not=why_not))

    async def measure(self, kernel: Kernel) -> None:
        used_mib = await self._inspector.used_mib(kernel)
        view = self.arbiter.lease(kernel.lease_id)
        if view is not None and view.state in (LeaseState.RESIDENT, LeaseState.NO_CONTEXT):
            one = Measurement(lease_id=kernel.lease_id, used_mib=used_mib)
            self.dispatch(LeasesMeasured(at_ms=now_ms(), measurements=(one,)))

    def request_on_behalf(self, kernel: Kernel) -> None:
        """File a ticket on behalf of a kernel that has not requested the GPU or cannot do so."""
        view = self.arbiter.lease(kernel.lease_id)
        if view is None or view.revoked or kernel.cell.ticket_by_broker:
            return
        if view.state not in (LeaseState.SUSPENDED, LeaseState.SUSPENDING, LeaseState.NO_CONTEXT):
            return
        kernel.cell.ticket_by_broker = True
        self.dispatch(Wanted(at_ms=now_ms(), lease_id=kernel.lease_id))

    def ticket(self, lease_id: str) -> TicketView | None:
        """Return the lease's ticket with its place in the queue, or None. Tickets are cached until the next event, for at most a second."""
        at_ms = now_ms()
        if self._tickets is None or at_ms - self._tickets[0] > _TICKETS_MS:
            pools = self.arbiter.pools()
            self._tickets = at_ms, {one.lease_id: one for pool in pools for one in self.arbiter.tickets(pool, at_ms)}
            before, self._places = self._places, {one.lease_id: one.position for one in self._tickets[1].values()}
            if before != self._places:
                self._wake_queue()  # tell all waiting cells, or two of them would show the same place
        return self._tickets[1].get(lease_id)

    def roots(self) -> list[ProcessIdentity]:
        return [kernel.identity for kernel in self.kernels.values() if kernel.identity is not None]

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        return [
            (self.kernels[view.spec.lease_id], view)
            for view in self.arbiter.leases()
            if view.spec.lease_id in self.kernels
        ]

    async def close(self) -> None:
        self.stopping = True
        await self.operations.close()
        await self.survivors.close()
        await self.contexts.close()
        self._set_alarm(None)
        for kernel in self.kernels.values():
            kernel.forget_process()
        self._networks.close()
        await self.records.close()
        await self.writer.close()


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
