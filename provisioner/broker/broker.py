"""The broker: one arbiter, and the hands that do what it decides.

Everything that happens becomes an event for `Arbiter.handle`; every effect it returns is carried out here. The broker decides nothing
about who holds a GPU. It owns what the arbiter does not know: processes, IOPub, extensions, tokens, the ledger, the worker.

All methods run on one event loop. Effects that take time (suspend, resume, looking again) run as tasks and come back as events.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Coroutine, Iterable
from functools import partial

import zmq.asyncio

from provisioner.broker.iopub import IOPubWatch, connection_from_json
from provisioner.broker.kernels import Kernel
from provisioner.broker.swaps import Swaps
from provisioner.broker.writer import LedgerWriter
from provisioner.core.arbiter import Arbiter
from provisioner.core.effects import (
    Declined,
    Effect,
    Granted,
    LeaseAdmitted,
    LeaseEnded,
    LeaseRefused,
    LookAgain,
    Recorded,
    Resume,
    StateChanged,
    Suspend,
    TicketsChanged,
    WakeAt,
)
from provisioner.core.events import (
    BusyChanged,
    Event,
    ProcessExited,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    TruthFound,
    Unwanted,
    Wanted,
)
from provisioner.core.model import HOLDING, LeaseState, LeaseView
from provisioner.gpu.interface import DeviceInfo, Monitor
from provisioner.host import failpoints
from provisioner.host.process import ProcessIdentity
from provisioner.ledger.records import LeaseRecord, LedgerError, OperationRecord
from provisioner.protocol.messages import GateVerb

__all__ = ["Broker", "now_ms", "token_digest", "wall_ms"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_WRITE_AGAIN_S = 1.0
_FAILED_RESUME_PAUSE_S = 1.0  # the arbiter tries again at once; a driver that fails at once must not be hammered


def now_ms() -> int:
    """Return the arbiter's time: monotonic milliseconds."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Return the ledger's time: wall-clock milliseconds, which survive a reboot."""
    return time.time_ns() // 1_000_000


class Broker:
    """Carries the arbiter's decisions out."""

    def __init__(self, arbiter: Arbiter, monitor: Monitor, swaps: Swaps, writer: LedgerWriter) -> None:
        self.arbiter = arbiter
        self.monitor = monitor
        self.writer = writer
        self.kernels: dict[str, Kernel] = {}
        self.devices: dict[str, DeviceInfo] = {}
        self.queue_changed = asyncio.Event()
        self.stirred = asyncio.Event()  # anything at all may have changed; take it before looking, then wait for it
        self.last_use_s = time.monotonic()
        self.stopping = False
        self.used_mib: dict[str, int] = {}  # by device, as last measured
        self.changes = 0  # state changes so far: a measurement that one overtook is stale
        self._swaps = swaps
        swaps.roots = self.roots
        self._zmq = zmq.asyncio.Context()
        self._zmq.set(zmq.MAX_SOCKETS, 8192)
        self._alarm: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # operations: finished before the broker ends
        self._looking: set[asyncio.Task[None]] = set()  # looks at quarantined leases: dropped when the broker ends

    # -- events in, effects out ----------------------------------------------------------------------------------------------

    def dispatch(self, event: Event) -> list[Effect]:
        """Hand an event to the arbiter and carry out what it answers. Returns the effects, for callers that wait for one."""
        point = self._failpoint(event) if failpoints.enabled() else ""
        failpoints.reach(f"{point}.before")
        effects = self.arbiter.handle(event)
        for effect in effects:
            self._carry_out(effect)
        failpoints.reach(f"{point}.after")
        self.stirred.set()
        self.stirred = asyncio.Event()
        return effects

    def _failpoint(self, event: Event) -> str:
        """Name the event and the state of the lease it is about."""
        lease = self.arbiter.lease(getattr(event, "lease_id", ""))
        return f"event.{type(event).__name__}" + (f"@{lease.state}" if lease is not None else "")

    def _carry_out(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case Recorded(lease_id=lease_id, reason=reason, sentence=sentence):
                log.info("lease %s: %s (%s)", lease_id[:8], sentence, reason)
                self.writer.submit(partial(self.writer.ledger.record, lease_id, wall_ms(), reason, sentence))
            case StateChanged(lease_id=lease_id, new=new):
                self.changes += 1
                self._state_changed(effect)
                if new is not LeaseState.ENDED and lease_id in self.kernels:
                    self.save(self.kernels[lease_id])
            case Granted(lease_id=lease_id, device_id=device_id):
                self._granted(lease_id, device_id)
            case Suspend() | Resume() | LookAgain() if self.stopping:
                pass  # the next broker finds out what is true and decides anew
            case Suspend():
                self._spawn(self._suspend(effect))
            case Resume():
                self._spawn(self._resume(effect))
            case LookAgain():
                self._spawn(self._look_again(effect), self._looking)
            case Declined(lease_id=lease_id, reason=reason, sentence=sentence):
                if (kernel := self.kernels.get(lease_id)) is not None:
                    kernel.declined = (reason, sentence)
                    kernel.notify()
            case LeaseEnded(lease_id=lease_id, reason=reason):
                self._ended(lease_id, reason)
            case TicketsChanged():
                self._wake_queue()
            case WakeAt(at_ms=at_ms):
                self._set_alarm(at_ms)
            case LeaseAdmitted() | LeaseRefused():
                pass  # read by the caller from dispatch's result
            case _:
                raise TypeError(f"the arbiter asked for {type(effect).__name__}, which the broker does not know")

    def _state_changed(self, change: StateChanged) -> None:
        kernel = self.kernels.get(change.lease_id)
        if kernel is None:
            return
        if change.new is LeaseState.SUSPENDED and change.old is LeaseState.SUSPENDING:
            kernel.suspends += 1
        elif change.new is LeaseState.RESIDENT and change.old is LeaseState.RESUMING:
            kernel.resumes += 1
        if change.new is LeaseState.RESIDENT:
            kernel.home = change.device_id
        kernel.notify()

    def _granted(self, lease_id: str, device_id: str) -> None:
        kernel = self.kernels.get(lease_id)
        if kernel is None:
            return
        kernel.wanted_by_broker = False
        if kernel.reserved_on_disk == device_id:
            self.open_gate(kernel)
        kernel.notify()

    def may_use(self, kernel: Kernel) -> str | None:
        """Return the device that the kernel may use now: it is resident, and the ledger knows.

        A reservation that a kernel was told of and the ledger was not would be given away once more by the next broker.
        """
        view = self.arbiter.lease(kernel.lease_id)
        if view is None or view.state is not LeaseState.RESIDENT or view.device_id != kernel.reserved_on_disk:
            return None
        return view.device_id

    def open_gate(self, kernel: Kernel) -> None:
        """Let the kernel's cells run if it may use its device."""
        device_id = self.may_use(kernel)
        if device_id is not None and kernel.link is not None:
            kernel.link.send(GateVerb.OPEN, environment=self.environment(kernel.lease_id, device_id))

    def _ended(self, lease_id: str, reason: str) -> None:
        kernel = self.kernels.pop(lease_id, None)
        if kernel is not None:
            kernel.forget_process()
            kernel.notify()
        self.writer.submit(partial(self.writer.ledger.end_lease, lease_id, wall_ms(), reason))
        self.last_use_s = time.monotonic()

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

    def _spawn(self, work: Coroutine[None, None, None], among: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if among is None else among
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(partial(self._task_done, tasks))

    @staticmethod
    def _task_done(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the broker failed while it carried out a decision", exc_info=error)

    # -- operations ------------------------------------------------------------------------------------------------------------

    async def _suspend(self, effect: Suspend) -> None:
        """Carry a suspend out and answer it, whatever happens: an operation without an answer would hold the swap channel for ever."""
        outcome, saved_mib, sentence = (
            SuspendOutcome.UNKNOWN,
            0,
            "the broker failed in the middle of it; its log says why",
        )
        begun_s = time.monotonic()
        try:
            kernel = self.kernels.get(effect.lease_id)
            if kernel is None:
                outcome, sentence = SuspendOutcome.ABORTED, "the lease is gone"
                return
            await self._begin(effect, "suspend", 0)
            step = partial(self._step, effect.operation_id)
            outcome, saved_mib, sentence = await self._swaps.suspend(kernel, step)
        except LedgerError as error:
            outcome = SuspendOutcome.ABORTED
            sentence = f"nothing was begun because it could not be written down: {error}"
        finally:
            log.info("lease %s: suspend took %.3f s: %s", effect.lease_id[:8], time.monotonic() - begun_s, outcome)
            self.dispatch(
                SuspendFinished(
                    at_ms=now_ms(),
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=outcome,
                    saved_mib=saved_mib,
                    sentence=sentence,
                )
            )
            self._finish(effect.operation_id, outcome)
            if (kernel := self.kernels.get(effect.lease_id)) is not None:
                self.look_at_use(kernel)  # it may have become busy meanwhile

    async def _resume(self, effect: Resume) -> None:
        """Carry a resume out and answer it, whatever happens."""
        outcome, sentence = ResumeOutcome.UNKNOWN, "the broker failed in the middle of it; its log says why"
        begun_s = time.monotonic()
        try:
            kernel, view = self.kernels.get(effect.lease_id), self.arbiter.lease(effect.lease_id)
            if kernel is None or view is None:
                outcome, sentence = ResumeOutcome.NOT_STARTED, "the lease is gone"
                return
            await self._begin(effect, "resume", view.saved_mib)
            step = partial(self._step, effect.operation_id)
            outcome, sentence = await self._swaps.resume(kernel, effect, view.saved_mib, step)
            if outcome is ResumeOutcome.NOT_STARTED:
                await asyncio.sleep(_FAILED_RESUME_PAUSE_S)
        except LedgerError as error:
            outcome = ResumeOutcome.NOT_STARTED
            sentence = f"nothing was begun because it could not be written down: {error}"
            await asyncio.sleep(_FAILED_RESUME_PAUSE_S)
        finally:
            log.info("lease %s: resume took %.3f s: %s", effect.lease_id[:8], time.monotonic() - begun_s, outcome)
            self.dispatch(
                ResumeFinished(
                    at_ms=now_ms(),
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=outcome,
                    sentence=sentence,
                )
            )
            self._finish(effect.operation_id, outcome)

    async def _look_again(self, effect: LookAgain) -> None:
        """Look until the truth is known or the lease has moved on."""
        attempt = 0
        while True:
            await self._swaps.until_alone()
            await asyncio.sleep(_LOOK_AGAIN_S[min(attempt, len(_LOOK_AGAIN_S) - 1)])
            attempt += 1
            kernel, view = self.kernels.get(effect.lease_id), self.arbiter.lease(effect.lease_id)
            if kernel is None or view is None or view.generation != effect.generation:
                return
            truth = await self._swaps.truth(kernel, view.device_id, view.saved_mib)
            if truth is None:
                continue
            state, device_id = truth.state, truth.device_id
            if state is LeaseState.UNARMED and view.device_id is not None:
                # Nobody can say whether its gate is open: keep the reservation.
                state, device_id = LeaseState.RESIDENT, view.device_id
            self.dispatch(
                TruthFound(
                    at_ms=now_ms(),
                    lease_id=effect.lease_id,
                    generation=effect.generation,
                    state=state,
                    device_id=device_id,
                    saved_mib=truth.saved_mib,
                )
            )
            return

    async def _begin(self, effect: Suspend | Resume, kind: str, saved_mib: int) -> None:
        record = OperationRecord(
            operation_id=effect.operation_id,
            lease_id=effect.lease_id,
            generation=effect.generation,
            kind=kind,
            device_id=effect.device_id,
            phase="intent",
            begun_ms=wall_ms(),
            pids="[]",
            saved_mib=saved_mib,
        )
        await self.writer.run(partial(self.writer.ledger.begin, record))

    async def _step(self, operation_id: int, phase: str, identities: Iterable[ProcessIdentity], saved_mib: int) -> None:
        pids = json.dumps([identity.to_dict() for identity in identities])
        step = partial(self.writer.ledger.step, operation_id, phase, at_ms=wall_ms(), pids=pids, saved_mib=saved_mib)
        await self.writer.run(step)

    def _finish(self, operation_id: int, outcome: str) -> None:
        self.writer.submit(partial(self.writer.ledger.finish, operation_id, str(outcome), wall_ms()))

    # -- kernels ---------------------------------------------------------------------------------------------------------------

    def environment(self, lease_id: str, device_id: str | None) -> dict[str, str]:
        """Return what binds a kernel to its device and its cap."""
        environment = self.monitor.kernel_environment(device_id)
        view = self.arbiter.lease(lease_id)
        if view is not None:
            environment["JUPYTER_GPU_MEMORY_MIB"] = str(view.spec.reserve_mib)
        if device_id in self.devices:
            environment["JUPYTER_GPU_DEVICE_MIB"] = str(self.devices[device_id].memory_mib)
        return environment

    def follow(self, kernel: Kernel, identity: ProcessIdentity, connection: str) -> None:
        """Watch the kernel's process and its IOPub. Raises ProcessLookupError if it is gone, ValueError for a bad connection."""
        checked = connection_from_json(json.loads(connection))
        kernel.watch_process(identity, partial(self.process_gone, kernel, identity))
        kernel.connection = connection
        kernel.watch = IOPubWatch(
            self._zmq, checked, ipykernel=kernel.ipykernel, changed=partial(self.look_at_use, kernel)
        )
        self.dispatch(BusyChanged(at_ms=now_ms(), lease_id=kernel.lease_id, busy=kernel.busy))

    def process_gone(self, kernel: Kernel, identity: ProcessIdentity) -> None:
        """The kernel's process ended or is about to be replaced: whatever it held is free."""
        if kernel.identity != identity:
            return
        log.info("lease %s: process %d ended", kernel.lease_id[:8], identity.pid)
        kernel.forget_process()
        self.dispatch(ProcessExited(at_ms=now_ms(), lease_id=kernel.lease_id))
        kernel.notify()

    def look_at_use(self, kernel: Kernel) -> None:
        """Tell the arbiter whether the kernel is busy, and want the GPU for one that nobody else speaks for."""
        view = self.arbiter.lease(kernel.lease_id)
        if view is None or view.state in (LeaseState.UNATTACHED, LeaseState.ENDED):
            return
        if view.busy != kernel.busy:
            self.dispatch(BusyChanged(at_ms=now_ms(), lease_id=kernel.lease_id, busy=kernel.busy))
            kernel.notify()
        executing = kernel.watch is not None and kernel.watch.executing
        if not executing:
            kernel.executing_since_s = None
            if kernel.wanted_by_broker and kernel.waiting == 0:
                kernel.wanted_by_broker = False
                self.dispatch(Unwanted(at_ms=now_ms(), lease_id=kernel.lease_id))
        elif kernel.executing_since_s is None:
            kernel.executing_since_s = time.monotonic()
        if executing and kernel.link is None and not view.spec.gated:
            self.want_for(kernel)

    def want_for(self, kernel: Kernel) -> None:
        """File a ticket on behalf of a kernel that cannot or did not ask."""
        view = self.arbiter.lease(kernel.lease_id)
        if view is None or kernel.wanted_by_broker:
            return
        if view.state not in (LeaseState.SUSPENDED, LeaseState.SUSPENDING, LeaseState.UNARMED):
            return
        kernel.wanted_by_broker = True
        self.dispatch(Wanted(at_ms=now_ms(), lease_id=kernel.lease_id))

    def save(self, kernel: Kernel) -> None:
        """Write the lease as it stands."""
        kernel.save_due = False
        record = self.record(kernel)
        if record is None:
            return
        device_id = record.device_id if record.state in HOLDING else None
        if device_id is None:
            kernel.reserved_on_disk = None
            kernel.unreserved_saves += 1
        done = self.writer.submit(partial(self.writer.ledger.save_lease, record))
        done.add_done_callback(partial(self._saved, kernel, device_id, kernel.unreserved_saves))

    def _saved(self, kernel: Kernel, device_id: str | None, unreserved_saves: int, done: asyncio.Future[None]) -> None:
        if done.cancelled() or self.kernels.get(kernel.lease_id) is not kernel:
            return
        if done.exception() is not None:
            if not self.stopping and not kernel.save_due:  # its cell may be waiting for this
                kernel.save_due = True
                asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, self.save, kernel)
            return
        if device_id in (None, kernel.reserved_on_disk) or unreserved_saves != kernel.unreserved_saves:
            return
        kernel.reserved_on_disk = device_id
        self.open_gate(kernel)
        kernel.notify()

    def record(self, kernel: Kernel) -> LeaseRecord | None:
        """Return the lease as the ledger keeps it, or None if the arbiter does not know it."""
        view = self.arbiter.lease(kernel.lease_id)
        if view is None:
            return None
        identity = kernel.identity
        return LeaseRecord(
            spec=view.spec,
            state=view.state,
            generation=view.generation,
            device_id=view.device_id,
            saved_mib=max(view.saved_mib, kernel.checkpointed_mib if view.state is LeaseState.QUARANTINED else 0),
            uid=kernel.uid,
            kernel_id=kernel.kernel_id,
            token_sha256=kernel.token_sha256,
            boot_id=identity.boot_id if identity else "",
            pid=identity.pid if identity else None,
            start_time=identity.start_time if identity else None,
            connection=kernel.connection,
            language=kernel.language,
            ipykernel=kernel.ipykernel,
            created_ms=kernel.created_ms,
            suspends=kernel.suspends,
            resumes=kernel.resumes,
            home_device_id=kernel.home,
        )

    def roots(self) -> list[ProcessIdentity]:
        """Return the kernel processes of all leases."""
        return [kernel.identity for kernel in self.kernels.values() if kernel.identity is not None]

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        """Return every living lease with its kernel."""
        return [
            (self.kernels[view.spec.lease_id], view)
            for view in self.arbiter.leases()
            if view.spec.lease_id in self.kernels
        ]

    async def close(self) -> None:
        """Stop everything that runs on the loop. Kernels are left as they are; an operation in hand is finished first."""
        self.stopping = True
        for task in self._looking:
            task.cancel()
        while self._tasks or self._looking:
            await asyncio.gather(*self._tasks, *self._looking, return_exceptions=True)
        self._set_alarm(None)
        for kernel in self.kernels.values():
            kernel.forget_process()
        self._zmq.destroy(linger=0)
        await self.writer.close()


def token_digest(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()
