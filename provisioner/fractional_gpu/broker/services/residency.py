"""Moves leases on and off devices on request (acquire, suspend, resume, move), and ends all of a lease's processes.

`acquire` files a ticket and reports on it until the grant, so that a waiting cell can show why it is waiting. A grant is sent only after
the reservation has been written to the ledger. Otherwise the next broker could give the same memory to another kernel.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms, within
from fractional_gpu.broker.kernels.ending import end_processes
from fractional_gpu.broker.kernels.kernel import Kernel, Request
from fractional_gpu.broker.kernels.process_inspector import members_of
from fractional_gpu.broker.lanes import SWAPS
from fractional_gpu.broker.services.status import explain, full_lease_status, revoked_sentence, times, view_of
from fractional_gpu.core.events import Attached, BusyChanged, MoveRequested, SuspendRequested, Unwanted, Wanted
from fractional_gpu.core.model import FOUND_FAILED, LeaseState, LeaseView, TicketView
from fractional_gpu.core.move import BUSY_CHANNEL
from fractional_gpu.core.revoke import REVOKED
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.errors import RESTART, ConflictError
from fractional_gpu.protocol.limits import MAX_WAIT_S
from fractional_gpu.protocol.messages import AcquireRequest, LeaseNews, Progress, ProgressKind
from fractional_gpu.protocol.status import LeaseStatus

_QUEUE_PAUSE_S = 0.1
_LONGEST_LOOK_S = 30.0  # a waiting cell's status is refreshed at least this often
PATIENCE_S = 30.0
_IDLE_PATIENCE_S = 10.0  # how long a requested suspend or move waits for the kernel to become idle and stay so
_AGAIN_S = 0.3
_QUIET_S = 0.25
_UNWRITTEN = Progress(
    kind=ProgressKind.REFUSED, reason="ledger", sentence="the broker cannot write its ledger; see its log"
)
_ON_THE_WAY = frozenset({LeaseState.SUSPENDING, LeaseState.SUSPENDED, LeaseState.RESUMING})
_SETTLED = frozenset(
    {LeaseState.NO_CONTEXT, LeaseState.RESIDENT, LeaseState.SUSPENDED, LeaseState.UNATTACHED, LeaseState.QUARANTINED}
)


class Residency:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def acquire(
        self, kernel: Kernel, request: AcquireRequest, *, urgent: bool = False
    ) -> AsyncGenerator[Progress, None]:
        """File a ticket or, with `watch`, follow an existing one. Yield the reasons the kernel is waiting, then `granted` or `refused`.

        Closing the generator withdraws the ticket. With `hold`, closing it also ends the kernel's use of the GPU.
        """
        broker = self._broker
        patience_s = math.inf if request.hold else max(0, min(request.wait_ms / 1000, MAX_WAIT_S))
        deadline_s = time.monotonic() + patience_s
        ends = {ProgressKind.REFUSED} if request.hold else {ProgressKind.REFUSED, ProgressKind.GRANTED}
        kernel.requests.waiters += not request.watch
        told: Progress | None = None
        try:
            if not request.watch:
                view = broker.arbiter.lease(kernel.lease_id)
                if view is not None and not view.busy and kernel.busy:
                    # Mark the kernel as busy before the ticket is filed, because busy kernels are not chosen as victims.
                    broker.dispatch(BusyChanged(at_ms=now_ms(), lease_id=kernel.lease_id, busy=True))
                if kernel.launch.claim:  # no process attaches to a claim
                    broker.dispatch(Attached(at_ms=now_ms(), lease_id=kernel.lease_id, gated=True))
                broker.dispatch(Wanted(at_ms=now_ms(), lease_id=kernel.lease_id, urgent=urgent))
            told_s = time.monotonic()
            while True:
                change, queue = kernel.change(), broker.queue_changed
                progress = self._progress(kernel, deadline_s)
                if request.watch and kernel.cell.unused:
                    return  # its cell does not wait
                if progress is not None and _is_news(progress, told, int((time.monotonic() - told_s) * 1000)):
                    told, told_s = progress, time.monotonic()
                    yield progress
                if progress is not None and progress.kind in ends:
                    return
                await _any_of(change, queue, min(_look_again_s(told), max(0.0, deadline_s - time.monotonic())))
                if not change.is_set():  # only the queue moved, so do not wake a hundred cells at each step
                    await _any_of(change, change, min(_QUEUE_PAUSE_S, max(0.0, deadline_s - time.monotonic())))
        finally:
            kernel.requests.waiters -= not request.watch
            view = None if request.watch else broker.arbiter.lease(kernel.lease_id)
            granted = told is not None and told.kind == ProgressKind.GRANTED
            if kernel.launch.claim and not (granted or request.watch or broker.stopping):
                await broker.survivors.release(kernel, "not-granted")
            elif kernel.requests.waiters == 0 and view is not None:
                # Keep a ticket that the broker filed for a blocked kernel, because another request needs it.
                waits = view.state is not LeaseState.RESIDENT or view.at_gate
                if waits and not kernel.cell.ticket_by_broker:
                    interrupted = time.monotonic() < deadline_s
                    broker.dispatch(Unwanted(at_ms=now_ms(), lease_id=kernel.lease_id, interrupted=interrupted))
                broker.sync_busy_state(kernel)

    def _progress(self, kernel: Kernel, deadline_s: float) -> Progress | None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or kernel.ending.released or view.revoked:
            return _over(view)
        if view.state is LeaseState.RESIDENT and not view.at_gate:
            device_ids = self._broker.records.may_use(kernel)
            if not device_ids:
                if time.monotonic() >= deadline_s:
                    return _UNWRITTEN
                trouble = self._broker.writer.trouble
                return Progress(kind=ProgressKind.WAITING, reason="ledger", sentence=trouble) if trouble else None
            return Progress(
                kind=ProgressKind.GRANTED,
                reason=view.reason,
                sentence=view.sentence,
                device_id=view.device_id,
                environment=self._broker.environment(kernel.lease_id, device_ids),
            )
        if view.state is LeaseState.QUARANTINED and view.reason == FOUND_FAILED:
            return Progress(kind=ProgressKind.REFUSED, reason=view.reason, sentence=view.sentence)
        ticket = self._broker.ticket(kernel.lease_id)
        reason, sentence, expected = explain(self._broker, view)
        if time.monotonic() >= deadline_s:
            return Progress(
                kind=ProgressKind.REFUSED, reason="timeout", sentence=f"no GPU became free in time: {sentence}"
            )
        if self._broker.writer.trouble:  # grants and suspends wait for the ledger
            reason, sentence, expected = "ledger", self._broker.writer.trouble, None
        # The restore is running and only needs time. The ledger gets the reservation before the grant, but perhaps does not have it yet.
        pool = self._broker.arbiter.pools().get(view.spec.pool) if view.state is LeaseState.RESUMING else None
        overlap = pool is not None and pool.overlap_resume
        is_behind_busy = reason == "wait.busy-neighbour"
        turns_end_ms = self._broker.arbiter.turns_end_ms(kernel.lease_id) if is_behind_busy else None
        return Progress(
            kind=ProgressKind.WAITING,
            overlap=overlap,
            environment=self._broker.environment(kernel.lease_id, view.device_ids) if overlap else {},
            reason=reason,
            sentence=sentence,
            position=ticket.position if ticket is not None else None,
            **times(expected),
            turn_ms=None if turns_end_ms is None else max(0, turns_end_ms - now_ms()),
            slowdown_brief=self._broker.arbiter.slowdown(kernel.lease_id).brief,
            blockers=self._own_blockers(view, ticket),
        )

    def _own_blockers(self, view: LeaseView, ticket: TicketView | None) -> tuple[str, ...]:
        others = [self._broker.arbiter.lease(one) for one in ticket.blockers] if ticket is not None else []
        return tuple(one.spec.lease_id for one in others if one is not None and one.spec.owner == view.spec.owner)

    async def follow(self, kernel: Kernel) -> AsyncGenerator[LeaseNews, None]:
        told: LeaseNews | None = None
        while True:
            change, view = kernel.change(), self._broker.arbiter.lease(kernel.lease_id)
            while kernel.notices:
                yield LeaseNews(notice=kernel.notices.pop(0))
            if view is None:
                return
            news = LeaseNews(state=view.state.value, worked=kernel.gpu_work.last_us > 0)
            if told is None or news.state != told.state:
                yield news
                told = news
            await change.wait()

    async def suspend(self, kernel: Kernel, by: str) -> LeaseStatus:
        """Suspend the kernel. Return once it is suspended. Raises ConflictError. Cancellation does not stop a suspend that has begun."""
        view = view_of(self._broker, kernel)
        if view.state in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT):
            return full_lease_status(self._broker, kernel)
        request, until_s = Request(), time.monotonic() + _IDLE_PATIENCE_S
        kernel.requests.suspend_waiters += 1  # an explicit request, which only a running cell prevents
        try:
            while True:
                if view.state is LeaseState.RESIDENT:
                    await self._quiet(kernel, until_s)
                    # The kernel may have left the device in the meantime.
                    if view_of(self._broker, kernel).state is LeaseState.RESIDENT:
                        if request not in kernel.requests.suspends:
                            kernel.requests.suspends.append(request)
                        self._broker.dispatch(SuspendRequested(at_ms=now_ms(), lease_id=kernel.lease_id, by=by))
                # While the suspend waits for the swap channel, the lease stays resident with the request pending.
                await kernel.until(lambda: request.declined is not None or self._settled(kernel))
                view = view_of(self._broker, kernel)
                if request.declined is not None or view.reason != "suspend.aborted" or time.monotonic() >= until_s:
                    break
                await asyncio.sleep(_AGAIN_S)  # a message came in between, such as a debugger's request for variables
        finally:
            kernel.requests.suspend_waiters -= 1
            if request in kernel.requests.suspends:
                kernel.requests.suspends.remove(request)
            self._broker.sync_busy_state(kernel)
        if request.declined is not None:
            reason, sentence = request.declined
            raise ConflictError(sentence, reason=reason)
        view = view_of(self._broker, kernel)
        if view.state not in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT):
            raise ConflictError(f"the kernel was not suspended: {view.sentence}", reason=view.reason)
        return full_lease_status(self._broker, kernel)

    async def resume(self, kernel: Kernel, *, if_blocked: bool = False) -> LeaseStatus:
        """Resume the kernel, and return once it is resident. Raises ConflictError. Cancelling this call withdraws the ticket.

        With `if_blocked`, do nothing unless the kernel is blocked in a GPU call.
        """
        view = view_of(self._broker, kernel)
        if if_blocked:
            # The kernel may be doing something that did not request the GPU.
            blocked = kernel.handles_message and not self._broker.arbiter.waits(kernel.lease_id)
            if view.state is LeaseState.SUSPENDED and blocked:
                await self._resume_blocked(kernel)
            return full_lease_status(self._broker, kernel)
        if view.state is LeaseState.UNATTACHED:
            raise ConflictError("the lease has no running kernel to resume", reason="no-process")
        if view.gate_closed:  # it is resident, and its gate is closed only so that its next cell asks
            return full_lease_status(self._broker, kernel)
        await self._acquired(kernel)
        return full_lease_status(self._broker, kernel)

    async def _resume_blocked(self, kernel: Kernel) -> None:
        kernel.requests.blocked_resumes += 1
        resumed = asyncio.create_task(self._acquired(kernel))
        over = asyncio.create_task(kernel.until(lambda: not kernel.handles_message))
        try:
            await asyncio.wait([resumed, over], return_when=asyncio.FIRST_COMPLETED)
            if resumed.done():
                resumed.result()
        finally:
            kernel.requests.blocked_resumes -= 1
            for task in (resumed, over):
                task.cancel()
            await asyncio.gather(resumed, over, return_exceptions=True)

    async def _acquired(self, kernel: Kernel) -> None:
        last = Progress(kind=ProgressKind.REFUSED)
        # The kernel executes something, but not at the gate. It may be in a CUDA call, which ignores interrupts.
        blocked = kernel.cell.executing_since_s is not None and kernel.requests.waiters == 0
        async with aclosing(self.acquire(kernel, AcquireRequest(), urgent=blocked)) as stream:
            async for progress in stream:
                last = progress
        if last.kind != ProgressKind.GRANTED:
            raise ConflictError(last.sentence, reason=last.reason)

    async def _quiet(self, kernel: Kernel, until_s: float) -> None:
        """Wait until the kernel has been idle for `_QUIET_S`, because JupyterLab's debugger makes kernels busy again after each cell."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._broker.sync_busy_state(kernel)
            await kernel.until(lambda: not kernel.busy, left_s)
            quiet_s = (now_ms() - view_of(self._broker, kernel).last_active_ms) / 1000
            if quiet_s >= _QUIET_S:
                return
            await kernel.until(lambda: kernel.busy, min(left_s, _QUIET_S - quiet_s))

    async def move(self, kernel: Kernel, device_id: str | None) -> LeaseStatus:
        """Move the idle kernel to `device_id`, or to any other device if that is None. Return once it is there.

        Raises ConflictError. Cancellation does not stop a move that has begun.
        """
        kernel.requests.suspend_waiters += 1  # an explicit request, which only a running cell prevents
        try:
            self._broker.sync_busy_state(kernel)
            await kernel.until(lambda: not kernel.busy, _IDLE_PATIENCE_S)
            before = view_of(self._broker, kernel).device_ids
            await self._begin_move(kernel, device_id)
            why_not: tuple[str, str] | None = None
            while (view := view_of(self._broker, kernel)).state in _ON_THE_WAY:
                if view.reason == "resume.not-started":  # it may return to its old device, and this is the reason
                    why_not = view.reason, view.sentence
                await kernel.change().wait()
        finally:
            kernel.requests.suspend_waiters -= 1
            self._broker.sync_busy_state(kernel)
        if view.state is not LeaseState.RESIDENT or view.device_ids == before:
            reason, sentence = why_not or (view.reason, view.sentence)
            raise ConflictError(f"the kernel was not moved: {sentence}", reason=reason)
        return full_lease_status(self._broker, kernel)

    async def _begin_move(self, kernel: Kernel, device_id: str | None) -> None:
        """Begin the move. Wait up to `PATIENCE_S` for another kernel to finish suspending or resuming. Raises ConflictError."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            event = MoveRequested(at_ms=now_ms(), lease_id=kernel.lease_id, device_id=device_id)
            declined = self._broker.ask(event, "move")
            if declined is None:
                return
            left_s = deadline_s - time.monotonic()
            if declined.reason != BUSY_CHANNEL or left_s <= 0:
                raise ConflictError(declined.sentence, reason=declined.reason)
            # Take the event after the request, because the request itself sets the earlier event.
            await within(left_s, self._broker.anything_changed)

    def _settled(self, kernel: Kernel) -> bool:
        view = view_of(self._broker, kernel)
        return view.state in _SETTLED and not view.suspend_requested


async def end_tree(broker: Broker, kernel: Kernel) -> None:
    """End all processes in the kernel's tree, rescanning it until it is empty. Raises ConflictError.

    Processes are identified by start time and signalled through a pidfd, so a signal never reaches a reused pid. Processes that have
    already been signalled still exit if this call is cancelled.
    """
    root = kernel.identity

    async def tree() -> list[ProcessIdentity]:
        snapshot = await SWAPS.run(broker.scans.take)
        return members_of(kernel, root, snapshot, broker.roots()) if root is not None else []

    kernel.requests.evictions += 1
    try:
        await end_processes(tree, "process {pid} of the kernel")
    finally:
        kernel.requests.evictions -= 1


def _over(view: LeaseView | None) -> Progress:
    if view is not None and view.revoked:
        return Progress(kind=ProgressKind.REFUSED, reason=REVOKED.code, sentence=revoked_sentence(view))
    sentence = f"this kernel's lease has ended; for a new one, {RESTART}"
    return Progress(kind=ProgressKind.REFUSED, reason="lease-over", sentence=sentence)


def _is_news(progress: Progress, told: Progress | None, age_ms: int) -> bool:
    """Return whether this progress differs enough from what the waiting cell already shows to be worth sending."""
    if told is None:
        return True
    for name in ("expected_ms", "turn_ms"):
        now_ms, told_ms = getattr(progress, name), getattr(told, name)
        if now_ms is not None and told_ms is not None:
            if abs(now_ms - (told_ms - age_ms)) > max(1000, told_ms // 5):
                return True
            told = replace(told, **{name: now_ms})
    return progress != replace(told, low_ms=progress.low_ms, high_ms=progress.high_ms)


def _look_again_s(told: Progress | None) -> float:
    """Return how many seconds to wait for an event before checking a waiting cell again, based on when its wait is expected to end."""
    if told is None or told.expected_ms is None:
        return _LONGEST_LOOK_S
    return min(_LONGEST_LOOK_S, max(1.0, told.expected_ms / 1000))


async def _any_of(first: asyncio.Event, second: asyncio.Event, patience_s: float) -> None:
    tasks = [asyncio.create_task(first.wait()), asyncio.create_task(second.wait())]
    try:
        await asyncio.wait(tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
