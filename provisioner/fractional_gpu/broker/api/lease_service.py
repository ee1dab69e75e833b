"""Implements the API's lease operations below the HTTP layer: creating, attaching and ending leases, and streaming to a kernel's extension.

The service verifies what clients claim. A process must have the peer's uid, the stated start time, and the lease's id in its environment. A
kernel's TCP ports must be on the loopback interface. A lease's token gives access to that lease's routes. A seat's token gives access to
the seat's leases and to its user's revoked leases. Without a token, a uid controls its own leases, but not hub seats' leases, because
containers share uids. Root, the broker's uid and the configured group control all leases. If the peer may not see a lease, the answer is
"not found", which does not reveal whether the lease exists.
"""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine

import zmq

from fractional_gpu.broker.accounting.budgets import party_of
from fractional_gpu.broker.accounting.reports import UsageReports
from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.kernels.connection import GateLink, check_endpoints, command_connection, connection_from_json
from fractional_gpu.broker.kernels.ending import EVICTED, Evictions
from fractional_gpu.broker.kernels.kernel import Kernel, launch_environment
from fractional_gpu.broker.kernels.request_validation import (
    Peer,
    check_kind,
    holder_of,
    lease_spec,
    server_of,
    token_file_of,
    verified_process,
)
from fractional_gpu.broker.lanes import ATTACHING
from fractional_gpu.broker.persistence.audit import AuditLog
from fractional_gpu.broker.recovery.lost_leases import REMEDY, carries
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.broker.services.lease_control import LeaseControl
from fractional_gpu.broker.services.residency import Residency, end_tree
from fractional_gpu.broker.services.status import full_lease_status, view_of
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.effects import LeaseRefused
from fractional_gpu.core.events import Attached, Checkpointable, LeaseRequested
from fractional_gpu.core.limits import UNATTACHED_LIMIT
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.core.units import format_duration
from fractional_gpu.host.accounts import account_uid, user_name
from fractional_gpu.host.own_group import own_path
from fractional_gpu.host.process import ProcessIdentity, is_below, read_stat
from fractional_gpu.ledger.records import Launch, LedgerError
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.errors import (
    BadRequestError,
    ConflictError,
    InternalBrokerError,
    NoRoomError,
    NotFoundError,
    RequestTooLargeError,
    UnauthorizedError,
)
from fractional_gpu.protocol.limits import MAX_LEASES, MAX_LEASES_PER_UID, MAX_NAME
from fractional_gpu.protocol.messages import (
    CLAIM,
    COMMAND,
    KERNEL,
    AttachRequest,
    EvictRequest,
    GateAnswer,
    GateHello,
    GateVerb,
    LeaseReply,
    LeaseRequest,
)
from fractional_gpu.protocol.status import KernelFacts, LeaseStatus

log = logging.getLogger(__name__)

_START_PATIENCE_S, _START_PAUSE_S = 10.0, 0.2  # how long a new lease waits while the user's other kernels start
_LONGEST_REASON = 300
_MEASURE_PATIENCE_S = 2.0  # how long to wait for a sample before answering

Refresh = Callable[[], Coroutine[None, None, None]]


class LeaseService:
    def __init__(self, broker: Broker, settings: Settings, *, refresh: Refresh | None = None) -> None:
        self.broker = broker
        self.seats = Seats(broker, settings)
        self.lease_control = LeaseControl(broker, self.seats.draws.check_resize)
        self._evictions = Evictions()
        self.admin_gid = settings.admin_gid()
        self.settings = settings
        self.residency = Residency(broker)
        self.audit = AuditLog(settings, broker.writer.ledger.path.parent)
        self.usage = UsageReports(
            broker.metering, broker.writer, visible=settings.usage_visible, carbon_setting=settings.carbon
        )
        self.refresh = refresh
        self._refreshing: set[asyncio.Task[None]] = set()

    async def measure_now(self) -> None:
        """Sample the devices so that the answer is up to date. Wait at most `_MEASURE_PATIENCE_S` seconds for a slow driver."""
        if self.refresh is not None:
            task = asyncio.create_task(self.refresh())
            self._refreshing.add(task)
            task.add_done_callback(self._refreshing.discard)
            await asyncio.wait({task}, timeout=_MEASURE_PATIENCE_S)

    async def find(self, peer: Peer, lease_id: str, *, own: bool = False) -> Kernel:
        """Return the lease's kernel if the peer may control it. With `own`, only its own processes and clients with its token may.

        A process whose token file is gone is recognized by its place in the kernel's process tree. To the kernel itself, the lease appears
        to have ended once the kernel is being evicted, or once only processes it left behind keep the lease alive. Raises NotFoundError,
        UnauthorizedError, ForbiddenError, and ConflictError for a kernel whose record was lost.
        """
        if own and lease_id in self.broker.lost and await ATTACHING.run(carries, peer.credentials.pid, lease_id):
            raise ConflictError(
                f"the broker lost its record of this kernel, but the variables are kept; {REMEDY}", reason="lost-lease"
            )
        kernel = self.broker.kernels.get(lease_id)
        itself = own and peer.token is None and kernel is not None and self._is_of(peer, kernel)
        is_over = kernel is not None and self._is_over_for(peer, kernel, itself=itself)
        if kernel is None or is_over or not (itself or self._may_see(peer, kernel)):
            raise NotFoundError(
                f"you have no lease {lease_id[:MAX_NAME]!r}; `jupyter gpu status` lists your leases",
                reason="unknown-lease",
            )
        if peer.token is not None and not self._is_token_of(peer, peer.token, kernel, own=own):
            raise UnauthorizedError("the token in the request does not match this lease", reason="foreign-token")
        if own and peer.token is None and not itself:
            raise UnauthorizedError(
                "this request needs the lease's token in an `Authorization: Bearer TOKEN` header", reason="no-token"
            )
        return kernel

    @staticmethod
    def _is_over_for(peer: Peer, kernel: Kernel, *, itself: bool) -> bool:
        if peer.token is None:
            return itself and (kernel.requests.evictions > 0 or kernel.ending.released)
        own = hmac.compare_digest(token_digest(peer.token), kernel.token_sha256)
        return kernel.requests.evictions > 0 or (kernel.ending.released and own)

    def _may_see(self, peer: Peer, kernel: Kernel) -> bool:
        """Return whether the peer may see the lease. For a hub seat's lease, the uid is not enough, because containers share uids."""
        if peer.admin or peer.credentials.uid != kernel.uid:
            return peer.admin
        view = self.broker.arbiter.lease(kernel.lease_id)
        return peer.token is not None or view is None or not view.spec.seat

    def _is_of(self, peer: Peer, kernel: Kernel, *, or_parent: bool = False) -> bool:
        """Return whether the peer is one of this kernel's processes, excluding any that belong to kernels it started itself.

        With `or_parent`, the kernel's parent process is accepted as well.
        """
        identity, pid = kernel.identity, peer.credentials.pid
        if identity is None or peer.credentials.uid != kernel.uid:
            return False
        others = {root.pid for root in self.broker.roots() if root != identity}
        try:
            return is_below(pid, identity, others) or (or_parent and 1 < pid == read_stat(identity.pid).ppid)
        except (ProcessLookupError, PermissionError):
            return False

    def _is_token_of(self, peer: Peer, token: str, kernel: Kernel, *, own: bool) -> bool:
        """Return whether `token` is the lease's token or, without `own`, the token of the lease's seat."""
        digest = token_digest(token)
        # A lease restored without a record has no digest yet: accept the first token from a process of the kernel or its parent.
        if not kernel.token_sha256 and self._is_of(peer, kernel, or_parent=True):
            kernel.token_sha256 = digest
            self.broker.records.save(kernel)
        if hmac.compare_digest(digest, kernel.token_sha256):
            return True
        view = self.broker.arbiter.lease(kernel.lease_id)
        return not own and view is not None and self.seats.draws.opens(token, view)

    async def create(self, peer: Peer, request: LeaseRequest) -> LeaseReply:
        """Admit a new lease. Raises BadRequestError, NoRoomError or RequestTooLargeError. If the call is cancelled, the lease expires."""
        broker, uid = self.broker, peer.credentials.uid
        launch = Launch(server=server_of(peer), command=request.kind == COMMAND, claim=request.kind == CLAIM)
        if launch.claim:
            launch.holder = await holder_of(peer, request.holder_pid) if request.holder_pid else None
            launch.group = await ATTACHING.run(own_path, peer.credentials.pid, uid)
        await self._let_others_start(peer, request)
        spec = self.seats.draws.apply_terms(peer, request, lease_spec(broker.arbiter, peer, request))
        self._check_count(spec)
        if not spec.seat:  # kernels of a seat may start until the seat ends
            self.seats.budgets.check(party_of(spec))
        token = secrets.token_urlsafe(32)
        kernel = Kernel(
            lease_id=spec.lease_id,
            uid=uid,
            token_sha256=token_digest(token),
            created_ms=wall_ms(),
            gated=spec.gated,
            facts=KernelFacts(kernel_id=printable(request.kernel_id)),
            launch=launch,
        )
        broker.kernels[spec.lease_id] = kernel
        # A command is attached before it runs. It waits then (`acquire`), and is shown its place and the reason.
        reserves = not spec.gated and request.kind == KERNEL
        event = LeaseRequested(at_ms=now_ms(), spec=spec, needs_reservation=reserves)
        for effect in broker.dispatch(event):
            if isinstance(effect, LeaseRefused) and effect.lease_id == spec.lease_id:
                del broker.kernels[spec.lease_id]
                raise NoRoomError(effect.sentence, reason=effect.reason)
        self.seats.budgets.lease_admitted(kernel)
        self.seats.workloads.tell(spec.lease_id, spec.seat)
        try:
            await broker.records.write(kernel)
        except LedgerError:
            await broker.survivors.release(kernel)
            raise
        broker.watch_holder(kernel)
        evicted = self._evictions.successor(kernel)
        if evicted:
            kernel.notices.append(evicted)
            broker.record_line(kernel.lease_id, EVICTED, evicted)
        device_id = await self._reserve_now(kernel, request.wait_ms) if reserves else None
        kernel.launch.started_on = () if device_id is None else view_of(broker, kernel).device_ids
        pool = broker.arbiter.pools()[spec.pool]
        # Without our extension, no code of ours that could create the job starts the kernel.
        starts_job = pool.checkpoint_children and (spec.gated or kernel.launch.command)
        kernel.launch.in_job = starts_job and any(device.saves_children for device in broker.devices.values())
        return LeaseReply(
            lease_id=spec.lease_id,
            token=token,
            reserve_mib=spec.reserve_mib,
            device_id=device_id,
            simulated=broker.monitor.kind == "simulated",
            environment={
                **broker.environment(spec.lease_id, kernel.launch.started_on),
                **launch_environment(pool, spec, in_job=kernel.launch.in_job),
            },
            notice=evicted,
        )

    def _check_count(self, spec: LeaseSpec) -> None:
        kernels, account = self.broker.kernels, None if spec.uid is None else account_uid(spec.uid)
        if sum(account_uid(kernel.uid) == account for kernel in kernels.values()) >= MAX_LEASES_PER_UID:
            raise RequestTooLargeError(
                f"user {spec.owner} already has {MAX_LEASES_PER_UID} leases, the maximum per user; shut down a kernel",
                reason="too-many-leases-of-a-user",
            )
        if len(kernels) >= MAX_LEASES:
            raise RequestTooLargeError(
                f"this host already has {MAX_LEASES} leases, the maximum; shut down a kernel, or ask other users to",
                reason="too-many-leases",
            )

    async def _let_others_start(self, peer: Peer, request: LeaseRequest) -> None:
        """Wait briefly if too many of the user's kernels are starting at once, for example when JupyterLab restores a session."""
        arbiter, deadline_s = self.broker.arbiter, time.monotonic() + _START_PATIENCE_S
        while time.monotonic() < deadline_s:
            refused = arbiter.refusal(self.seats.draws.apply_terms(peer, request, lease_spec(arbiter, peer, request)))
            if refused is None or refused[0] != UNATTACHED_LIMIT:
                return
            await asyncio.sleep(_START_PAUSE_S)

    async def _reserve_now(self, kernel: Kernel, wait_ms: int) -> str:
        """Wait up to `wait_ms` (at most a minute) to reserve a device for a kernel that has not started yet. Return the device."""
        limit_ms = max(0, min(wait_ms, 60_000))
        try:
            async with asyncio.timeout(limit_ms / 1000):
                while True:
                    change, view = kernel.change(), self.broker.arbiter.lease(kernel.lease_id)
                    if view is None:
                        raise NoRoomError("the lease ended while it was waiting for a GPU")
                    if view.device_id is not None and view.state in (LeaseState.UNATTACHED, LeaseState.RESIDENT):
                        return view.device_id
                    await change.wait()
        except TimeoutError:
            ticket = self.broker.ticket(kernel.lease_id)
            why = (
                ticket.sentence
                if ticket is not None
                else "your other kernels are starting and have reserved the free memory"
            )
            await self.broker.survivors.release(kernel)
            raise NoRoomError(
                f"no GPU became free within {format_duration(limit_ms)}: {why}; try again later, or with a smaller fraction"
            ) from None

    async def end(self, kernel: Kernel) -> None:
        view = view_of(self.broker, kernel)
        if not kernel.ending.survivors and self.seats.draws.predates(kernel, view):
            await end_tree(self.broker, kernel)
            await self.broker.survivors.release(kernel)
        else:
            await self.broker.survivors.end(kernel)

    async def evict(self, peer: Peer, kernel: Kernel, request: EvictRequest) -> None:
        """End the kernel's processes and its lease. This is the only action that deliberately discards a kernel's state.

        Raises BadRequestError without `confirm`. If a process does not end, raises ConflictError and keeps the lease. A kernel that Jupyter
        starts in the meantime gets another lease. If this call is cancelled, the lease remains, but processes that have already been
        signalled still exit.
        """
        if not request.confirm:
            raise BadRequestError(
                "evicting ends the kernel and loses all its variables (suspending keeps them); send confirm = true to go ahead",
                reason="not-confirmed",
            )
        log.warning("lease %s: evicted by an administrator", kernel.lease_id[:8])
        who = f"An administrator ({printable(peer.acting_for or user_name(peer.credentials.uid))})"
        because = (
            f"; the reason given: {printable(request.why)[:_LONGEST_REASON].rstrip('.')}" if request.why.strip() else ""
        )
        await self.end_kernel(who, kernel, f", to free the GPU{because}")

    async def end_kernel(self, who: str, kernel: Kernel, why: str) -> None:
        """End the kernel's processes and its lease, as `evict` does. The notebook's next kernel tells the user who did this and why."""
        sentence = self._evictions.begin(kernel, who, why)
        try:
            await end_tree(self.broker, kernel)
        except ConflictError:
            self._evictions.failed(kernel)
            raise
        self.broker.record_line(kernel.lease_id, EVICTED, sentence)
        await self.broker.survivors.release(kernel, EVICTED)

    async def attach(self, peer: Peer, kernel: Kernel, request: AttachRequest) -> LeaseStatus:
        if kernel.launch.claim:
            raise ConflictError("this lease is a claim, so no process can be attached to it", reason="claim")
        identity = await verified_process(peer, kernel, request)
        token_file = await ATTACHING.run(token_file_of, identity)
        self.seats.draws.check_process(view_of(self.broker, kernel), identity.pid)
        connection = await self._checked_connection(kernel, request, identity.pid)
        if kernel.identity is not None and kernel.identity != identity and not kernel.ending.survivors:
            self.broker.process_gone(kernel, kernel.identity)
        await self.broker.survivors.settled(kernel)
        self.broker.survivors.adopt(kernel)
        kernel.taken_over = False  # the current server starts this process
        kernel.launch.attached(
            server=server_of(peer),
            token_file=token_file,
            language=request.language[:MAX_NAME],
            ipykernel=request.ipykernel,
        )
        kernel.launch.command, kernel.launch.served = request.kind == COMMAND, request.served
        if kernel.identity is None:
            # A command's program waits for the grant.
            gated = kernel.launch.command or view_of(self.broker, kernel).spec.gated
            self.broker.dispatch(Attached(at_ms=now_ms(), lease_id=kernel.lease_id, gated=gated))
            try:
                self.broker.follow(kernel, identity, connection)
            except ProcessLookupError:
                self.broker.process_unwatched(kernel, identity)
                raise BadRequestError(
                    f"process {request.pid} has ended; see the server's log for why, and start the kernel again",
                    reason="no-process",
                ) from None
            except (OSError, zmq.ZMQError) as error:
                self.broker.process_unwatched(kernel, identity)
                raise InternalBrokerError(
                    f"the broker cannot watch process {request.pid}: {error}; if this happens again, restart the broker"
                ) from error
            if not gated:
                self._check_reservation(kernel, identity)
        elif kernel.launch.command:
            self.broker.watch_runner(kernel)
        await self.broker.records.write(kernel)
        return full_lease_status(self.broker, kernel)

    @staticmethod
    async def _checked_connection(kernel: Kernel, request: AttachRequest, pid: int) -> str:
        check_kind(request.kind, KERNEL, COMMAND)
        if request.kind == COMMAND:
            return command_connection(served=request.served)
        try:
            connection = connection_from_json(request.connection)
            await ATTACHING.run(check_endpoints, connection, kernel.uid, pid)
        except ValueError as error:
            raise BadRequestError(str(error), reason="bad-connection") from None
        return json.dumps(request.connection)

    def _check_reservation(self, kernel: Kernel, identity: ProcessIdentity) -> None:
        """Raise NoRoomError if a kernel whose cells cannot be made to wait has lost its reservation. Its cells would run without one."""
        # The reservation of a lease without a process ends with the broker that made it, so request it again.
        self.broker.request_on_behalf(kernel)
        view = view_of(self.broker, kernel)
        elsewhere = bool(kernel.launch.started_on) and view.device_ids != kernel.launch.started_on
        if view.state is not LeaseState.RESIDENT or elsewhere:
            self.broker.process_gone(kernel, identity)
            raise NoRoomError(
                "the GPU reserved for this kernel went to another kernel, because this one did not start in time (the pool's "
                "unattached_hold) or because the broker was restarted; start the kernel again"
            )

    async def detach(self, kernel: Kernel) -> None:
        """Detach the ended process from the lease.

        Returns once the processes the kernel left behind are known. If this call is cancelled, the search for them continues.
        """
        if kernel.identity is not None and not kernel.ending.survivors:
            self.broker.process_gone(kernel, kernel.identity)
        await self.broker.survivors.settled(kernel)

    def connect_gate(self, kernel: Kernel, hello: GateHello) -> GateLink:
        """Accept an extension's stream, replacing any older one, and send the extension the command that matches the lease's state."""
        link = kernel.connect_gate(time.monotonic(), hello.inputs)
        view = view_of(self.broker, kernel)
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
            self._set_unsaveable(kernel, hello.managed)
        self.broker.sync_busy_state(kernel)
        return link

    def _set_unsaveable(self, kernel: Kernel, sentence: str) -> None:
        kernel.unsaveable = printable(sentence)[:_LONGEST_REASON] or "its extension says so"
        self.broker.dispatch(Checkpointable(at_ms=now_ms(), lease_id=kernel.lease_id, why_not=kernel.unsaveable))

    def disconnect_gate(self, kernel: Kernel, link: GateLink) -> None:
        if kernel.disconnect_gate(link):
            self.broker.sync_busy_state(kernel)

    def answer(self, kernel: Kernel, answer: GateAnswer) -> None:
        if kernel.link is None:
            return
        kernel.link.take(answer, time.monotonic())
        if answer.number == 0 and answer.word == "managed":
            self._set_unsaveable(kernel, answer.detail)
        elif answer.number == 0 and answer.word == "input":
            self.broker.sync_busy_state(kernel)
