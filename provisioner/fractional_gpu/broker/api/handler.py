"""The base classes of the routes: identity of the peer, strict decoding of the body, one JSON form of errors, and streams.

The peer's uid and pid come from the operating system (SO_PEERCRED), so a client cannot claim others. Strict decoding refuses unknown
fields, wrong types, and strings, lists or nesting beyond the limits: what a newer client sends beyond this version is an error with both
versions, never silently ignored.
"""

import asyncio
import hmac
import http
import logging
import math
import re
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from tornado import iostream, web

from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.server import is_admin
from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer, user_name
from fractional_gpu.broker.persistence.audit import Act, is_anothers
from fractional_gpu.host import files
from fractional_gpu.host.peers import peer_credentials
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol import names
from fractional_gpu.protocol.codec import decode_request, error_body, printable
from fractional_gpu.protocol.errors import (
    BadRequestError,
    ForbiddenError,
    FractionalGPUError,
    InternalBrokerError,
    NotFoundError,
    TooManyRequestsError,
    UnauthorizedError,
)
from fractional_gpu.protocol.limits import (
    LEASE_REQUEST_BURST,
    LEASE_REQUESTS_PER_S,
    MAX_NAME,
    REQUEST_BURST,
    REQUESTS_PER_S,
    TAKEN_S,
    VERSION_HEADER,
)
from fractional_gpu.protocol.names import ACTING_FOR, decode_acting_for

# -- rate limit --------------------------------------------------------------------------------------------------------
# Per-user request and log-rate limits.
#
# A request with a lease's own token counts for that lease, not for its user: a script of the user that sends too many requests must not
# keep the user's kernels from the GPU.


_LEASE = re.compile(r"/v1/leases/([0-9a-zA-Z_-]{1,64})/")
_LINES_PER_S = 1.0
_LINES_BURST = 100.0


class RateLimiter:
    """Counts requests and log lines. One per broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._users = TokenBucket(REQUESTS_PER_S, REQUEST_BURST)
        self._leases = TokenBucket(LEASE_REQUESTS_PER_S, LEASE_REQUEST_BURST)
        self._lines = TokenBucket(_LINES_PER_S, _LINES_BURST)

    def admit(self, peer: Peer, path: str) -> None:
        """Count a request. Raises TooManyRequestsError with the time after which to retry."""
        uid = peer.credentials.uid
        lease_id = self._own_lease(peer, path)
        wait_s = self._users.take(uid) if lease_id is None else self._leases.take(lease_id)
        if not wait_s:
            return
        who = f"user {user_name(uid)}" if lease_id is None else f"the kernel of lease {lease_id[:8]}"
        per_s, burst = (
            (REQUESTS_PER_S, REQUEST_BURST) if lease_id is None else (LEASE_REQUESTS_PER_S, LEASE_REQUEST_BURST)
        )
        raise TooManyRequestsError(
            f"{who} asks the broker too often; allowed: {per_s:g} requests a second, and {burst:g} at once; ask again in "
            f"{math.ceil(wait_s)} s",
            reason="too-many-requests",
            retry_s=math.ceil(wait_s),
        )

    def may_log(self, uid: int) -> bool:
        """Whether one more line about this user's refused requests may be logged: they must not push other lines out of the log."""
        return self._lines.take(uid) == 0

    def _own_lease(self, peer: Peer, path: str) -> str | None:
        """Return the lease of the route if the request has that lease's token."""
        route = _LEASE.match(path)
        if route is None or peer.token is None:
            return None
        kernel = self._broker.kernels.get(route[1])
        if kernel is None or kernel.uid != peer.credentials.uid:
            return None
        return route[1] if hmac.compare_digest(token_digest(peer.token), kernel.token_sha256) else None


# -- handler -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)


class Handler(web.RequestHandler):
    """The base class of all routes."""

    peer: Peer
    answers_any_version = False  # also for a client with another protocol

    def initialize(self, service: LeaseService, socket_path: str) -> None:
        """Receive the arguments that Tornado passes to every handler."""
        self.service = service
        self.socket_path = socket_path

    def prepare(self) -> None:
        """Identify the peer, and check its rate, its headers and its protocol."""
        self.service.broker.note_use()
        connection: Any = self.request.connection
        if connection.stream.socket is None:
            raise iostream.StreamClosedError  # the peer has disconnected
        credentials = peer_credentials(connection.stream.socket)
        admin = is_admin(connection.stream.socket, credentials, self.service.admin_gid)
        authorization = self.request.headers.get("Authorization")
        scheme, _, token = (authorization or "").partition(" ")
        self.peer = Peer(credentials=credentials, token=token if scheme == "Bearer" and token else None, admin=admin)
        self.limiter.admit(self.peer, self.request.path)  # first: a request that is refused below counts, too
        if authorization is not None and self.peer.token is None:
            raise UnauthorizedError("the header Authorization is not of the form `Bearer TOKEN`")
        self.peer = replace(self.peer, acting_for=self._acting_for(admin=admin))
        if not self.answers_any_version:
            self._check_version()

    @property
    def wants_fresh(self) -> bool:
        """Whether the devices should be sampled before the answer (`?fresh=1`)."""
        return self.get_query_argument("fresh", "") == "1"

    def set_default_headers(self) -> None:
        """Send the broker's version with each reply."""
        self.set_header("Server", "jupyter-fractional-gpu")
        self.set_header(VERSION_HEADER, names.OWN.to_header())

    @property
    def limiter(self) -> RateLimiter:
        """The limits of request rates."""
        limiter: RateLimiter = self.settings["limiter"]
        return limiter

    def _check_version(self) -> None:
        client = names.Version.from_header(self.request.headers.get(VERSION_HEADER))
        if client is not None and (why := names.refusal(client=client, broker=names.OWN)):
            raise BadRequestError(why, reason="version")

    def _acting_for(self, *, admin: bool) -> str | None:
        values = self.request.headers.get_list(ACTING_FOR)
        if values and not admin:
            raise ForbiddenError(
                f"only an administrator (root, the user who runs the broker, or a member of its admin_group) may send {ACTING_FOR}; "
                "leave it out",
                reason="not-admin",
            )
        return decode_acting_for(values)

    def audited(self, act: str, target: str, **parameters: object) -> AbstractAsyncContextManager[Act | None]:
        """Return a block that writes an administrator's action and its outcome to the audit log; for other peers it does nothing.

        Decode the body before the block and reply after it: then the outcome is on the disk. Raises as `AuditLog.act`.
        """
        if not self.peer.admin:
            return nullcontext()
        return self.service.audit.act(act, target, self.peer, parameters)

    def audited_for_lease(
        self, act: str, kernel: Kernel, *, even_own: bool = False, **parameters: object
    ) -> AbstractAsyncContextManager[Act | None]:
        """Return such a block for an action on a lease. Actions on one's own lease are not audited unless `even_own`."""
        view = self.service.broker.arbiter.lease(kernel.lease_id)
        if view is None or not (even_own or is_anothers(self.peer, kernel, view)):
            return nullcontext()
        return self.audited(act, kernel.lease_id, owner=view.spec.owner, **parameters)

    def actor(self, kernel: Kernel) -> str:
        """Return the requester as the lease's story names it: its user, or an administrator with their name."""
        view = self.service.broker.arbiter.lease(kernel.lease_id)
        name = self.peer.acting_for
        if view is None or name == view.spec.owner or not is_anothers(self.peer, kernel, view):
            return "its user"
        return f"administrator {name or user_name(self.peer.credentials.uid)}"

    def find(self, lease_id: str, *, own: bool = False) -> Kernel:
        """Return the lease's kernel if the peer may use it. Raises as `LeaseAccess.find`."""
        return self.service.access.find(self.peer, lease_id, own=own)

    def decode_body(self, kind: type[T]) -> T:
        """Decode the request's body. Raises BadRequestError or RequestTooLargeError."""
        return decode_request(self.request.body, kind)

    def reply(self, message: object) -> None:
        """Send a message as the reply."""
        self.reply_with(msgspec.json.encode(message), "application/json")

    def reply_with(self, body: bytes, content_type: str) -> None:
        """Send a body of this content type as the reply."""
        self._reach("reply")
        self.set_header("Content-Type", content_type)
        taken = self.finish(body)
        patience = asyncio.get_running_loop().call_later(TAKEN_S, self._give_up, taken)
        taken.add_done_callback(lambda _: patience.cancel())

    def _give_up(self, taken: "asyncio.Future[None]") -> None:
        """Close the connection of a peer that has not read its reply in time; else the reply would stay in memory."""
        if not taken.done():
            connection: Any = self.request.connection
            connection.stream.close()

    async def write_line(self, message: object) -> None:
        """Write one line of a stream. Raises StreamClosedError if the peer disconnects or does not read it in time."""
        self._reach("line")
        self.write(msgspec.json.encode(message) + b"\n")
        try:
            async with asyncio.timeout(TAKEN_S):
                await self.flush()
        except TimeoutError:
            connection: Any = self.request.connection
            connection.stream.close()
            raise iostream.StreamClosedError from None

    def _reach(self, moment: str) -> None:
        if files.enabled():
            files.reach(f"api.{self.request.method}.{type(self).__name__.strip('_').lower()}.{moment}")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send any failure in the JSON form of errors."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, LedgerError):
            error = InternalBrokerError(str(error), reason="ledger")
        elif not isinstance(error, FractionalGPUError):
            error = _error_for(status_code)
        self.set_status(error.status)
        if isinstance(error, TooManyRequestsError):
            self.set_header("Retry-After", str(round(error.retry_s)))
        self.reply(error_body(error))

    def _may_log(self) -> bool:
        peer = getattr(self, "peer", None)
        return peer is None or self.limiter.may_log(peer.credentials.uid)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log a refused request in one line, and a failure of the broker with its traceback."""
        if isinstance(value, FractionalGPUError | web.HTTPError):
            if self._may_log():
                target = printable(self.request.path[:MAX_NAME])
                log.info("%s %s refused: %s", self.request.method, target, printable(str(value))[:500])
        elif not isinstance(value, iostream.StreamClosedError):
            log.error("%s %s failed", self.request.method, self.request.path, exc_info=(typ, value, tb))


def _error_for(status: int) -> FractionalGPUError:
    if status == http.HTTPStatus.NOT_FOUND:
        return NotFoundError(
            "there is no such route; fractional_gpu/protocol/messages.py lists the routes",
            reason="unknown-route",
        )
    if status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        return BadRequestError("this route does not take that method", reason="bad-method")
    if 400 <= status < 500:
        return BadRequestError("the request is malformed")
    return InternalBrokerError("the broker failed; its log says why")


class StreamHandler(Handler):
    """A route whose work is cancelled when the peer disconnects."""

    def on_connection_close(self) -> None:
        """Cancel the work for a peer that has disconnected."""
        if self._work is not None:
            self._work.cancel()

    _work: asyncio.Task[None] | None = None

    async def run(self, work: "asyncio.Task[None]") -> None:
        """Run the work until it is done or the peer disconnects."""
        self._work = work
        try:
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()
        except iostream.StreamClosedError:
            pass
        finally:
            work.cancel()
