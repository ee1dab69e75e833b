"""What the lease API does, apart from HTTP: each method is one route, with its checks.

What a client says of itself is verified: a pid must have the peer's uid, the start time it stated and the lease id in its environment;
a connection must be loopback. Who may do what: a token opens its lease's own routes; without one a uid steers its own leases; root
and the broker's own uid, and members of the configured group, steer all. A lease that the peer may not see is "not found".
"""

import asyncio
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial

import zmq
from msgspec.structs import replace

from fractional_gpu import __version__
from fractional_gpu.broker.broker import (
    Broker,
    devices_of,
    now_ms,
    token_digest,
    wall_ms,
)
from fractional_gpu.broker.kernels.connection import check_endpoints, connection_from_json
from fractional_gpu.broker.kernels.ending import EVICTED
from fractional_gpu.broker.kernels.gate import GateLink
from fractional_gpu.broker.kernels.kernel import Kernel, Launch, Request
from fractional_gpu.broker.kernels.request_validation import (
    Peer,
    lease_spec,
    server_of,
    token_file_of,
    user_name,
    verified_process,
)
from fractional_gpu.broker.kernels.sharing import launch_environment
from fractional_gpu.broker.persistence.audit import AuditLog
from fractional_gpu.broker.recovery.lost_leases import LostLeases
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.broker.services.admin import AdminService
from fractional_gpu.broker.services.lease_control import LeaseControl
from fractional_gpu.broker.services.status import (
    HAD_ITS_TURN,
    lease_status,
    neighbours,
    revoked_sentence,
)
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.effects import LeaseRefused
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    Checkpointable,
    LeaseRequested,
    SuspendRequested,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.handlers.revocation import REVOKED
from fractional_gpu.core.model import FOUND_FAILED, LeaseState, LeaseView
from fractional_gpu.core.rules.admission import UNATTACHED_LIMIT
from fractional_gpu.core.units import format_duration
from fractional_gpu.host.process import ProcessIdentity, read_stat
from fractional_gpu.host.tree import is_below
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.errors import (
    RESTART,
    BadRequestError,
    ConflictError,
    InternalBrokerError,
    NoRoomError,
    NotFoundError,
    RequestTooLargeError,
    TooManyRequestsError,
    UnauthorizedError,
)
from fractional_gpu.protocol.limits import (
    MAX_LEASES,
    MAX_LEASES_PER_UID,
    MAX_NAME,
    MAX_WAIT_S,
    MAX_WAITERS_PER_LEASE,
    PROTOCOL_VERSION,
)
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    GateAnswer,
    GateHello,
    GateVerb,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    Pong,
    Progress,
    ProgressKind,
)

__all__ = ["LeaseService"]

log = logging.getLogger(__name__)

_QUEUE_PAUSE_S = 0.1
_LONGEST_LOOK_S = 30.0  # a waiting cell is told anew what has changed with time alone
_START_PATIENCE_S, _START_PAUSE_S = 10.0, 0.2  # a new lease waits so long for other kernels of its user to start
_IDLE_PATIENCE_S = 10.0  # a suspend that was asked for waits this long for the kernel to become idle
_LONGEST_REASON = 300
_MEASURE_PATIENCE_S = 2.0  # for a sample that a reader wants
_UNWRITTEN = Progress(
    kind=ProgressKind.REFUSED, reason="ledger", sentence="the broker cannot write its ledger; its log says why"
)
_SETTLED = frozenset(
    {LeaseState.NO_CONTEXT, LeaseState.RESIDENT, LeaseState.SUSPENDED, LeaseState.UNATTACHED, LeaseState.QUARANTINED}
)

Refresh = Callable[[], Coroutine[None, None, None]]


class LeaseService:
    """The work of the routes. One per broker. `refresh` samples the devices; `lost` restores leases that the ledger lost."""

    def __init__(
        self, broker: Broker, settings: Settings, *, refresh: Refresh | None = None, lost: LostLeases | None = None
    ) -> None:
        self.broker = broker
        self.seats = Seats(broker, settings)
        self.lease_control = LeaseControl(broker, self.seats.check_resize)
        self.admin = AdminService(broker)
        self.admin_gid = settings.admin_gid()
        self.settings = settings
        self.lost = lost
        self.audit = AuditLog(settings, broker.writer.ledger.path.parent)
        self.refresh = refresh
        self._refreshing: set[asyncio.Task[None]] = set()

    def ping(self) -> Pong:
        """Say who answers."""
        return Pong(
            version=__version__,
            protocol=PROTOCOL_VERSION,
            pid=os.getpid(),
            simulated=self.broker.monitor.kind == "simulated",
        )

    async def measure_now(self) -> None:
        """Sample the devices before an answer about them, and wait a moment for it: a driver that answers late is not waited for.

        Cancelled: the sample is taken nevertheless.
        """
        if self.refresh is not None:
            task = asyncio.create_task(self.refresh())
            self._refreshing.add(task)
            task.add_done_callback(self._refreshing.discard)
            await asyncio.wait({task}, timeout=_MEASURE_PATIENCE_S)

    # -- leases ----------------------------------------------------------------------------------------------------------------

    async def create(self, peer: Peer, request: LeaseRequest) -> LeaseReply:
        """Admit a new lease. Raises BadRequestError, NoRoomError or RequestTooLargeError. Cancelled: the lease expires by itself."""
        broker, uid = self.broker, peer.credentials.uid
        await self._let_others_start(peer, request)
        if sum(kernel.uid == uid for kernel in broker.kernels.values()) >= MAX_LEASES_PER_UID:
            raise RequestTooLargeError(
                f"user {user_name(uid)} has {MAX_LEASES_PER_UID} leases, the most there may be; shut a kernel down"
            )
        if len(broker.kernels) >= MAX_LEASES:
            raise RequestTooLargeError(
                f"this host has {MAX_LEASES} leases of all its users, the most there may be; shut a kernel down, or ask others to",
                reason="too-many-leases",
            )
        spec = self.seats.apply_terms(peer, request, lease_spec(broker.arbiter, peer, request))
        token = secrets.token_urlsafe(32)
        kernel = Kernel(
            lease_id=spec.lease_id,
            uid=uid,
            token_sha256=token_digest(token),
            created_ms=wall_ms(),
            gated=spec.gated,
            launch=Launch(kernel_id=printable(request.kernel_id), server=server_of(peer)),
        )
        broker.kernels[spec.lease_id] = kernel
        event = LeaseRequested(at_ms=now_ms(), spec=spec, needs_reservation=not spec.gated)
        for effect in broker.dispatch(event):
            if isinstance(effect, LeaseRefused) and effect.lease_id == spec.lease_id:
                del broker.kernels[spec.lease_id]
                raise NoRoomError(effect.sentence, reason=effect.reason)
        record = broker.records.save_second_record(kernel)
        if record is not None:
            try:
                await broker.writer.run(partial(broker.writer.ledger.save_lease, record))
            except LedgerError:
                await self.release(kernel)
                raise
        evicted = self.admin.evictions.successor(kernel)
        if evicted:
            kernel.notices.append(evicted)
            broker.record_line(kernel.lease_id, EVICTED, evicted)
        device_id = None if spec.gated else await self._reserve_now(kernel, request.wait_ms)
        kernel.launch.started_on = () if device_id is None else self._held(kernel)
        return LeaseReply(
            lease_id=spec.lease_id,
            token=token,
            reserve_mib=spec.reserve_mib,
            device_id=device_id,
            simulated=broker.monitor.kind == "simulated",
            environment={
                **broker.environment(spec.lease_id, kernel.launch.started_on),
                **launch_environment(broker.arbiter.pools()[spec.pool], spec),
            },
            notice=evicted,
        )

    async def _let_others_start(self, peer: Peer, request: LeaseRequest) -> None:
        """Wait a moment where the request would be refused only because other kernels of its user have not started yet.

        A class, or a session that is restored, starts many kernels in the same second.
        """
        arbiter, deadline_s = self.broker.arbiter, time.monotonic() + _START_PATIENCE_S
        while time.monotonic() < deadline_s:
            refused = arbiter.refusal(self.seats.apply_terms(peer, request, lease_spec(arbiter, peer, request)))
            if refused is None or refused[0] != UNATTACHED_LIMIT:
                return
            await asyncio.sleep(_START_PAUSE_S)

    async def _reserve_now(self, kernel: Kernel, wait_ms: int) -> str:
        """Wait a bounded time for the reservation of a kernel that must have it before it starts."""
        limit_ms = max(0, min(wait_ms, 60_000))
        try:
            async with asyncio.timeout(limit_ms / 1000):
                while True:
                    change, view = kernel.change(), self.broker.arbiter.lease(kernel.lease_id)
                    if view is None:
                        raise NoRoomError("the lease was released while it waited")
                    if view.device_id is not None and view.state in (LeaseState.UNATTACHED, LeaseState.RESIDENT):
                        return view.device_id
                    await change.wait()
        except TimeoutError:
            ticket = self.broker.ticket(kernel.lease_id)
            why = ticket.sentence if ticket is not None else "other kernels of yours are starting and hold room already"
            await self.release(kernel)
            raise NoRoomError(
                f"no GPU became free within {format_duration(limit_ms)}: {why}; try again later, or with a smaller fraction"
            ) from None

    def _held(self, kernel: Kernel) -> tuple[str, ...]:
        return devices_of(self._view(kernel))

    def find(self, peer: Peer, lease_id: str, *, own: bool = False) -> Kernel:
        """Return the lease's kernel if the peer may steer it; `own` routes are for those who have the lease's token.

        A process of the kernel that shows no token, because its file is gone, is known by its place in the kernel's tree. A lease that is
        being evicted, or goes on only for what its kernel left behind, is over for its own kernel. Raises NotFoundError,
        UnauthorizedError or ForbiddenError.
        """
        kernel = self.broker.kernels.get(lease_id)
        itself = own and peer.token is None and kernel is not None and self._is_of(peer, kernel)
        is_over = kernel is not None and self._is_over_for(peer, kernel, itself=itself)
        if kernel is None or is_over or not (itself or self._may_see(peer, kernel)):
            raise NotFoundError(
                f"there is no lease {lease_id[:MAX_NAME]!r} of yours; `jupyter gpu status` lists them",
                reason="unknown-lease",
            )
        if peer.token is not None and not self._is_token_of(peer, peer.token, kernel, own=own):
            raise UnauthorizedError("the token is not this lease's", reason="foreign-token")
        if own and peer.token is None and not itself:
            raise UnauthorizedError(
                "this needs the lease's token, in the header `Authorization: Bearer TOKEN`", reason="no-token"
            )
        return kernel

    @staticmethod
    def _is_over_for(peer: Peer, kernel: Kernel, *, itself: bool) -> bool:
        if peer.token is None:
            return itself and (kernel.requests.evictions > 0 or kernel.ending.released)
        own = hmac.compare_digest(token_digest(peer.token), kernel.token_sha256)
        return kernel.requests.evictions > 0 or (kernel.ending.released and own)

    async def find_own(self, peer: Peer, lease_id: str) -> Kernel:
        """Return what `find` returns on a lease's own routes; one that was lost with the ledger is taken back first.

        Raises as `find`, and what `LostLeases.recall` raises.
        """
        if self.lost is not None and lease_id not in self.broker.kernels:
            await self.lost.recall(peer, lease_id)
        return self.find(peer, lease_id, own=True)

    def _may_see(self, peer: Peer, kernel: Kernel) -> bool:
        """Whether the lease is the peer's. One of a hub's seat is not everybody's of that uid: containers share uids."""
        if peer.admin or peer.credentials.uid != kernel.uid:
            return peer.admin
        return peer.token is not None or not self._seat_of(kernel)

    def _is_of(self, peer: Peer, kernel: Kernel, *, or_parent: bool = False) -> bool:
        """Whether the peer is a process of the kernel, and of no other kernel below it; `or_parent`: or the one that started it."""
        identity, pid = kernel.identity, peer.credentials.pid
        if identity is None or peer.credentials.uid != kernel.uid:
            return False
        others = {root.pid for root in self.broker.roots() if root != identity}
        try:
            return is_below(pid, identity, others) or (or_parent and 1 < pid == read_stat(identity.pid).ppid)
        except (ProcessLookupError, PermissionError):
            return False

    def _is_token_of(self, peer: Peer, token: str, kernel: Kernel, *, own: bool) -> bool:
        """Whether it is the lease's token, or, where that is not needed, one of the seat that the lease draws on.

        The token of a lease that was taken back without any record is learnt from a process of its kernel, or from what started that.
        """
        digest = token_digest(token)
        if not kernel.token_sha256 and self._is_of(peer, kernel, or_parent=True):
            kernel.token_sha256 = digest
            self.broker.records.save(kernel)
        if hmac.compare_digest(digest, kernel.token_sha256):
            return True
        view = self.broker.arbiter.lease(kernel.lease_id)
        return not own and view is not None and self.seats.opens(token, view)

    def _seat_of(self, kernel: Kernel) -> str:
        view = self.broker.arbiter.lease(kernel.lease_id)
        return view.spec.seat if view is not None else ""

    def status_of(self, kernel: Kernel) -> LeaseStatus:
        """Return the lease as it is."""
        view = self.broker.arbiter.lease(kernel.lease_id)
        if view is None:
            raise NotFoundError("the lease is over", reason="unknown-lease")
        return replace(lease_status(self.broker, kernel, view), neighbours=neighbours(self.broker, view))

    async def release(self, kernel: Kernel) -> None:
        """End the lease for its kernel; it goes on for as long as processes that the kernel left behind have device memory.

        Returns when it is known which. Cancelled: it goes on.
        """
        await self.broker.survivors.release(kernel)

    async def end(self, kernel: Kernel) -> None:
        """End what the kernel left behind, or a kernel whose own server has ended. Raises ConflictError. Cancelled: it goes on."""
        view = self._view(kernel)
        if not kernel.ending.survivors and self.seats.predates(kernel, view):
            await self.admin.end_kernel(kernel)
        else:
            await self.broker.survivors.end(kernel)

    async def attach(self, peer: Peer, kernel: Kernel, request: AttachRequest) -> LeaseStatus:
        """Put a process behind the lease. Raises BadRequestError or ForbiddenError with what does not fit."""
        identity = await verified_process(peer, kernel, request)
        try:
            connection = connection_from_json(request.connection)
            await asyncio.to_thread(check_endpoints, connection, kernel.uid)
        except ValueError as error:
            raise BadRequestError(str(error), reason="bad-connection") from None
        if kernel.identity is not None and kernel.identity != identity and not kernel.ending.survivors:
            self.broker.process_gone(kernel, kernel.identity)
        await self.broker.survivors.settled(kernel)
        self.broker.survivors.adopt(kernel)
        kernel.launch.attached(
            server=server_of(peer),
            token_file=token_file_of(identity),
            language=request.language[:MAX_NAME],
            ipykernel=request.ipykernel,
        )
        if kernel.identity is None:
            gated = self._view(kernel).spec.gated
            self.broker.dispatch(Attached(at_ms=now_ms(), lease_id=kernel.lease_id, gated=gated))
            try:
                self.broker.follow(kernel, identity, json.dumps(request.connection))
            except ProcessLookupError:
                kernel.identity = identity  # nobody saw it come, but the arbiter was told
                self.broker.process_gone(kernel, identity)
                raise BadRequestError(
                    f"process {request.pid} has ended; see the server's log for why, and start the kernel again",
                    reason="no-process",
                ) from None
            except (OSError, zmq.ZMQError) as error:
                kernel.identity = identity
                self.broker.process_gone(kernel, identity)
                raise InternalBrokerError(
                    f"the broker cannot watch process {request.pid}: {error}; restart the broker if it says this again"
                ) from error
            if not gated:
                self._insist(kernel, identity)
        record = self.broker.records.save_second_record(kernel)
        if record is not None:
            await self.broker.writer.run(partial(self.broker.writer.ledger.save_lease, record))
        return self.status_of(kernel)

    def _insist(self, kernel: Kernel, identity: ProcessIdentity) -> None:
        """See that a process without a gate has its reservation. Raises NoRoomError: it must not run without."""
        self.broker.request_on_behalf(
            kernel
        )  # what an earlier broker promised to a lease without a process died with that broker
        view = self._view(kernel)
        elsewhere = bool(kernel.launch.started_on) and devices_of(view) != kernel.launch.started_on
        if view.state is not LeaseState.RESIDENT or elsewhere:
            self.broker.process_gone(kernel, identity)
            raise NoRoomError(
                "the GPU that this kernel was to have was given to another kernel, because this one had not started in time (the "
                "pool's unattached_hold) or because the broker was restarted; start the kernel again"
            )

    async def detach(self, kernel: Kernel) -> None:
        """The process is gone or about to be replaced: free what it held once it is free, keep the lease.

        Returns when it is known what the process left behind. Cancelled: it is found out all the same.
        """
        if kernel.identity is not None and not kernel.ending.survivors:
            self.broker.process_gone(kernel, kernel.identity)
        await self.broker.survivors.settled(kernel)

    # -- having the GPU -----------------------------------------------------------------------------------------------------------

    async def acquire(
        self, kernel: Kernel, request: AcquireRequest, *, urgent: bool = False
    ) -> AsyncGenerator[Progress, None]:
        """Yield why the kernel waits, whenever that changes, then `granted` or `refused`. Closing it withdraws the ticket."""
        broker = self.broker
        deadline_s = time.monotonic() + max(0, min(request.wait_ms / 1000, MAX_WAIT_S))
        if kernel.requests.waiters >= MAX_WAITERS_PER_LEASE:
            raise TooManyRequestsError(
                f"{kernel.requests.waiters} callers wait for the GPU in the name of this kernel; allowed: {MAX_WAITERS_PER_LEASE}; hang up "
                "some of them first",
                reason="too-many-waiters",
            )
        kernel.requests.waiters += 1
        try:
            self._tell_busy(kernel)
            broker.dispatch(Wanted(at_ms=now_ms(), lease_id=kernel.lease_id, urgent=urgent))
            told: Progress | None = None
            told_s = time.monotonic()
            while True:
                change, queue = kernel.change(), broker.queue_changed
                progress = self._progress(kernel, deadline_s)
                if progress is not None and _is_news(progress, told, int((time.monotonic() - told_s) * 1000)):
                    yield progress
                    told, told_s = progress, time.monotonic()
                if progress is not None and progress.kind != ProgressKind.WAITING:
                    return
                await _any_of(change, queue, min(_look_again_s(told), max(0.0, deadline_s - time.monotonic())))
                if not change.is_set():  # only the queue moved: a hundred who wait need not hear of each step at once
                    await _any_of(change, change, min(_QUEUE_PAUSE_S, max(0.0, deadline_s - time.monotonic())))
        finally:
            kernel.requests.waiters -= 1
            view = broker.arbiter.lease(kernel.lease_id)
            if kernel.requests.waiters == 0 and view is not None:
                # A ticket that the broker filed for a kernel that is blocked is not this caller's to withdraw.
                waits = view.state is not LeaseState.RESIDENT or view.at_gate
                if waits and not kernel.cell.ticket_by_broker:
                    broker.dispatch(Unwanted(at_ms=now_ms(), lease_id=kernel.lease_id))
                broker.sync_busy_state(kernel)

    def _progress(self, kernel: Kernel, deadline_s: float) -> Progress | None:
        """Return what there is to say, None for the moment in which a grant is being written down."""
        view = self.broker.arbiter.lease(kernel.lease_id)
        if view is None or kernel.ending.released or view.revoked:
            return _over(view)
        if view.state is LeaseState.RESIDENT and not view.at_gate:
            device_ids = self.broker.records.may_use(kernel)
            if not device_ids:
                return self._unwritten() if time.monotonic() < deadline_s else _UNWRITTEN
            return Progress(
                kind=ProgressKind.GRANTED,
                reason=view.reason,
                sentence=view.sentence,
                device_id=view.device_id,
                environment=self.broker.environment(kernel.lease_id, device_ids),
            )
        if (failure := _failure(view)) is not None:
            return Progress(kind=ProgressKind.REFUSED, reason=failure[0], sentence=failure[1])
        ticket = self.broker.ticket(kernel.lease_id)
        reason, sentence = (ticket.reason, ticket.sentence) if ticket is not None else (view.reason, view.sentence)
        expected = ticket.expected if ticket is not None else None
        if view.at_gate:
            reason, sentence = "wait.turn", HAD_ITS_TURN
            expected = self.broker.arbiter.gate_wait(kernel.lease_id, now_ms())
        if time.monotonic() >= deadline_s:
            return Progress(
                kind=ProgressKind.REFUSED, reason="timeout", sentence=f"no GPU within the time allowed: {sentence}"
            )
        if self.broker.writer.trouble:  # nothing is granted and nobody is suspended before it is written down
            reason, sentence, expected = "ledger", self.broker.writer.trouble, None
        # The bytes are on their way: nothing but time is needed. The ledger is told of the reservation before the grant, not here.
        pool = self.broker.arbiter.pools().get(view.spec.pool) if view.state is LeaseState.RESUMING else None
        overlap = pool is not None and pool.overlap_resume
        return Progress(
            kind=ProgressKind.WAITING,
            overlap=overlap,
            environment=self.broker.environment(kernel.lease_id, view.device_ids) if overlap else {},
            reason=reason,
            sentence=sentence,
            position=ticket.position if ticket is not None else None,
            expected_ms=expected.expected_ms if expected is not None else None,
            low_ms=expected.low_ms if expected is not None else None,
            high_ms=expected.high_ms if expected is not None else None,
        )

    def _unwritten(self) -> Progress | None:
        """Return what keeps reservations and operations from being written down; None: nothing does."""
        trouble = self.broker.writer.trouble
        return Progress(kind=ProgressKind.WAITING, reason="ledger", sentence=trouble) if trouble else None

    async def suspend(self, kernel: Kernel, by: str) -> LeaseStatus:
        """Suspend the lease for `by`, as its story names them, and return when it is. Raises ConflictError if it is not suspended.

        Cancelled: a suspend that has begun goes on; one that waits for the kernel to become idle does not begin.
        """
        view = self._view(kernel)
        if view.state in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT):
            return self.status_of(kernel)
        request = Request()
        kernel.requests.suspend_waiters += 1  # whoever asks means it: only a running cell is in the way
        try:
            if view.state is LeaseState.RESIDENT:
                self.broker.sync_busy_state(kernel)
                await self._until(kernel, lambda: not kernel.busy, _IDLE_PATIENCE_S)
                if self._view(kernel).state is LeaseState.RESIDENT:  # it may have left the device meanwhile
                    kernel.requests.suspends.append(request)
                    self.broker.dispatch(SuspendRequested(at_ms=now_ms(), lease_id=kernel.lease_id, by=by))
            # A suspend that has to wait for the swap channel starts later: until then the lease is resident, and was asked.
            await self._until(kernel, lambda: request.declined is not None or self._settled(kernel), None)
        finally:
            kernel.requests.suspend_waiters -= 1
            if request in kernel.requests.suspends:
                kernel.requests.suspends.remove(request)
            self.broker.sync_busy_state(kernel)
        if request.declined is not None:
            reason, sentence = request.declined
            raise ConflictError(sentence, reason=reason)
        view = self._view(kernel)
        if view.state not in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT):
            raise ConflictError(f"the kernel was not suspended: {view.sentence}", reason=view.reason)
        return self.status_of(kernel)

    async def resume(self, kernel: Kernel) -> LeaseStatus:
        """Make the lease resident and return when it is. Raises ConflictError. Cancelled: the ticket is withdrawn."""
        if self._view(kernel).state is LeaseState.UNATTACHED:
            raise ConflictError("the lease has no running kernel; nothing to resume", reason="no-process")
        if self._view(kernel).gate_closed:  # it is resident: only a cell asks at a gate that is closed for others
            return self.status_of(kernel)
        last = Progress(kind=ProgressKind.REFUSED)
        # Something executes, nobody waits at the gate: the kernel may be blocked on the GPU, deaf to the interrupt that brings us here.
        blocked = kernel.cell.executing_since_s is not None and kernel.requests.waiters == 0
        async with aclosing(self.acquire(kernel, AcquireRequest(), urgent=blocked)) as stream:
            async for progress in stream:
                last = progress
        if last.kind != ProgressKind.GRANTED:
            raise ConflictError(last.sentence, reason=last.reason)
        return self.status_of(kernel)

    async def _until(self, kernel: Kernel, condition: Callable[[], bool], patience_s: float | None) -> None:
        """Wait until the condition holds or the patience is over."""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    change = kernel.change()
                    if condition():
                        return
                    await change.wait()
        except TimeoutError:
            return

    def _settled(self, kernel: Kernel) -> bool:
        view = self._view(kernel)
        return view.state in _SETTLED and not view.suspend_requested

    def _view(self, kernel: Kernel) -> LeaseView:
        view = self.broker.arbiter.lease(kernel.lease_id)
        if view is None:
            raise NotFoundError("the lease is over", reason="unknown-lease")
        return view

    def _tell_busy(self, kernel: Kernel) -> None:
        view = self.broker.arbiter.lease(kernel.lease_id)
        if view is not None and not view.busy and kernel.busy:
            self.broker.dispatch(BusyChanged(at_ms=now_ms(), lease_id=kernel.lease_id, busy=True))

    # -- the extension's line -----------------------------------------------------------------------------------------------------

    def connect_gate(self, kernel: Kernel, hello: GateHello) -> GateLink:
        """Take the extension's line; a newer one replaces an older one. The gate is set to what the lease is."""
        if kernel.link is not None:
            kernel.link.close()
        link = kernel.link = GateLink(time.monotonic())
        link.inputs = frozenset(hello.inputs)
        view = self._view(kernel)
        kernel.notify()
        if not hello.open:
            self.broker.open_gate(kernel)
        elif view.state in (LeaseState.SUSPENDED, LeaseState.SUSPENDING, LeaseState.NO_CONTEXT):
            link.send(GateVerb.CLOSE)
        elif view.gate_closed:
            link.send(GateVerb.PREEMPT)
        for sentence in kernel.notices:
            link.send(GateVerb.NOTICE, sentence=sentence)
        kernel.notices.clear()
        if hello.managed:
            self.cannot_be_saved(kernel, hello.managed)
        self.broker.sync_busy_state(kernel)
        return link

    def cannot_be_saved(self, kernel: Kernel, sentence: str) -> None:
        """The extension knows that the process cannot be checkpointed."""
        kernel.unsaveable = printable(sentence)[:_LONGEST_REASON] or "its extension says so"
        self.broker.dispatch(Checkpointable(at_ms=now_ms(), lease_id=kernel.lease_id, why_not=kernel.unsaveable))

    def disconnect_gate(self, kernel: Kernel, link: GateLink) -> None:
        """The extension hung up."""
        link.close()
        if kernel.link is link:
            kernel.link = None
            self.broker.sync_busy_state(kernel)

    def answer(self, kernel: Kernel, answer: GateAnswer) -> None:
        """Take an answer or a pulse."""
        if kernel.link is None:
            return
        kernel.link.take(answer, time.monotonic())
        if answer.number == 0 and answer.word == "managed":
            self.cannot_be_saved(kernel, answer.detail)
        elif answer.number == 0 and answer.word == "input":
            self.broker.sync_busy_state(kernel)


def _over(view: LeaseView | None) -> Progress:
    """Return that the lease has ended, or that its seat has."""
    if view is not None and view.revoked:
        return Progress(kind=ProgressKind.REFUSED, reason=REVOKED.code, sentence=revoked_sentence(view))
    sentence = f"the lease of this kernel was ended: for another one {RESTART}"
    return Progress(kind=ProgressKind.REFUSED, reason="lease-over", sentence=sentence)


def _failure(view: LeaseView) -> tuple[str, str] | None:
    """Return reason and sentence where waiting would not help, because the driver says that the kernel failed."""
    failed = view.state is LeaseState.QUARANTINED and view.reason == FOUND_FAILED
    return (view.reason, view.sentence) if failed else None


def _is_news(progress: Progress, told: Progress | None, age_ms: int) -> bool:
    """Whether a waiting cell should hear it, when what it was told is so old.

    A forecast that moves a little is no news: the cell counts down by itself. One that does not count down with it is.
    """
    if told is None or progress.expected_ms is None or told.expected_ms is None:
        return progress != told
    moved_ms = abs(progress.expected_ms - (told.expected_ms - age_ms))
    same = replace(told, expected_ms=progress.expected_ms, low_ms=progress.low_ms, high_ms=progress.high_ms)
    return progress != same or moved_ms > max(1000, told.expected_ms // 5)


def _look_again_s(told: Progress | None) -> float:
    """Return how long what a waiting cell was told holds though nothing happens: until the wait was expected to end."""
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
