"""The base classes of the routes: identity of the peer, strict decoding of the body, one JSON form of errors, and streams.

The peer's uid and pid come from the operating system (SO_PEERCRED), so a client cannot claim others. Strict decoding refuses unknown
fields, wrong types, and strings, lists or nesting beyond the limits: what a newer client sends beyond this version is an error with both
versions, never silently ignored.
"""

import asyncio
import http
import logging
import re
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from tornado import iostream, web

from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.server import MeteredStream, bearer
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.cost import metered
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.lanes import PAYER
from fractional_gpu.broker.persistence.audit import Act, is_anothers
from fractional_gpu.host import files
from fractional_gpu.host.accounts import account_uid, user_name
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
from fractional_gpu.protocol.limits import MAX_NAME, TAKEN_S, VERSION_HEADER
from fractional_gpu.protocol.names import ACTING_FOR, CAUSE, decode_acting_for

log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
_CAUSE = re.compile(r"[\w`% ]{1,60}", re.ASCII)

LOG_LINES_PER_S, LOG_LINES_BURST = 1.0, 100.0  # in the log, of one user's refused requests


class Handler(web.RequestHandler):
    """The base class of all routes."""

    peer: Peer
    answers_any_version = False  # also for a client with another protocol

    def initialize(self, service: LeaseService, socket_path: str) -> None:
        """Receive the arguments that Tornado passes to every handler."""
        self.service = service
        self.socket_path = socket_path

    def prepare(self) -> None:
        """Identify the peer, and check its headers and its protocol."""
        self.service.broker.note_use()
        stream, token = self.stream, bearer(self.request.headers)
        self.peer = Peer(credentials=stream.credentials, token=token or None, admin=stream.admin)
        if token == "":
            raise UnauthorizedError("the header Authorization is not of the form `Bearer TOKEN`")
        self.peer = replace(self.peer, acting_for=self._acting_for(admin=stream.admin))
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
    def stream(self) -> MeteredStream:
        """The connection of the request."""
        connection: Any = self.request.connection
        stream: MeteredStream = connection.stream
        return stream

    async def _execute(self, transforms: list[web.OutputTransform], *args: bytes, **kwargs: bytes) -> None:
        """Serve the request, at its account's cost."""
        charge = self.stream.account.charge
        PAYER.set(charge)
        await metered(super()._execute(transforms, *args, **kwargs), charge)

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
        """Return the request as the lease's story names it: by the cause that its client gives, and by the administrator's name."""
        view = self.service.broker.arbiter.lease(kernel.lease_id)
        name, cause = self.peer.acting_for, self.request.headers.get(CAUSE, "")
        cause = cause if _CAUSE.fullmatch(cause) else ""
        if view is None or name == view.spec.owner or not is_anothers(self.peer, kernel, view):
            return cause or "a request of its user"
        return f"{cause or 'a request'} of administrator {name or user_name(self.peer.credentials.uid)}"

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
        lines: TokenBucket = self.settings["log_lines"]
        return peer is None or lines.take(account_uid(peer.credentials.uid)) == 0

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

    async def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the work, at the request's cost, until it is done or the peer disconnects."""
        self._work = work = asyncio.create_task(metered(coroutine, self.stream.account.charge))
        try:
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()
        except iostream.StreamClosedError:
            pass
        finally:
            work.cancel()
