"""What the routes share: who asks, the body decoded strictly, one shape of error, and streams that end when the peer hangs up."""

import asyncio
import http
import logging
import os
import time
from typing import Any, TypeVar

import msgspec
from tornado import iostream, web

from provisioner.broker.checks import Peer
from provisioner.broker.decode import decode, printable
from provisioner.broker.service import Service
from provisioner.host import failpoints
from provisioner.host.peers import peer_credentials, peer_groups
from provisioner.ledger.records import LedgerError
from provisioner.protocol.acting import ACTING_FOR, from_header
from provisioner.protocol.errors import (
    BadRequestError,
    ForbiddenError,
    FractionalGPUError,
    InternalBrokerError,
    NotFoundError,
    UnauthorizedError,
)

__all__ = ["Handler", "Stream", "as_json"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Handler(web.RequestHandler):
    """What all routes share."""

    peer: Peer

    def initialize(self, service: Service, socket_path: str) -> None:
        """Take what tornado passes to every handler."""
        self.service = service
        self.socket_path = socket_path

    def prepare(self) -> None:
        """Find out who asks."""
        self.service.broker.last_use_s = time.monotonic()
        connection: Any = self.request.connection
        if connection.stream.socket is None:
            raise iostream.StreamClosedError  # hung up meanwhile
        credentials = peer_credentials(connection.stream.socket)
        group = self.service.admin_gid
        admin = credentials.uid in (0, os.getuid()) or (
            group is not None and group in peer_groups(connection.stream.socket)
        )
        self.peer = Peer(
            credentials=credentials, token=self._token(), admin=admin, acting_for=self._acting_for(admin=admin)
        )

    def _token(self) -> str | None:
        header = self.request.headers.get("Authorization")
        if header is None:
            return None
        scheme, _, token = header.partition(" ")
        if scheme != "Bearer" or not token:
            raise UnauthorizedError("the header Authorization is not of the form `Bearer TOKEN`")
        return token

    def _acting_for(self, *, admin: bool) -> str | None:
        values = self.request.headers.get_list(ACTING_FOR)
        if values and not admin:
            raise ForbiddenError(
                f"only an administrator (root, the user who runs the broker, or a member of its admin_group) may send {ACTING_FOR}; "
                "leave it out",
                reason="not-admin",
            )
        return from_header(values)

    def take(self, kind: type[T]) -> T:
        """Decode the body."""
        return decode(self.request.body, kind)

    def reply(self, message: object) -> None:
        """Answer with a message."""
        self._reach("reply")
        self.set_header("Content-Type", "application/json")
        self.finish(msgspec.json.encode(message))

    async def line(self, message: object) -> None:
        """Write one line of a stream. Raises StreamClosedError when the peer hung up."""
        self._reach("line")
        self.write(msgspec.json.encode(message) + b"\n")
        await self.flush()

    def _reach(self, moment: str) -> None:
        if failpoints.enabled():
            failpoints.reach(f"api.{self.request.method}.{type(self).__name__.strip('_').lower()}.{moment}")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Turn any failure into the one JSON shape."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, LedgerError):
            error = InternalBrokerError(str(error), reason="ledger")
        elif not isinstance(error, FractionalGPUError):
            error = _error_for(status_code)
        self.set_status(error.status)
        self.reply(as_json(error))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log what is our fault with its traceback, and what is the peer's in a line."""
        if isinstance(value, FractionalGPUError | web.HTTPError):
            log.info("%s %s refused: %s", self.request.method, self.request.path, str(value).replace("\n", " ")[:500])
        elif not isinstance(value, iostream.StreamClosedError):
            log.error("%s %s failed", self.request.method, self.request.path, exc_info=(typ, value, tb))


def as_json(error: FractionalGPUError) -> dict[str, dict[str, str]]:
    """Return the one shape of an error."""
    return {"error": {"code": error.code, "reason": error.reason, "message": printable(str(error))}}


def _error_for(status: int) -> FractionalGPUError:
    if status == http.HTTPStatus.NOT_FOUND:
        return NotFoundError(
            "there is no such route; the routes are in provisioner/protocol/messages.py", reason="unknown-route"
        )
    if status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        return BadRequestError("this route does not take that method", reason="bad-method")
    if 400 <= status < 500:
        return BadRequestError("the request is malformed")
    return InternalBrokerError("the broker failed; its log says why")


class Stream(Handler):
    """A route whose work ends when the peer hangs up."""

    def on_connection_close(self) -> None:
        """Stop what is done for a peer that hung up."""
        if self._work is not None:
            self._work.cancel()

    _work: asyncio.Task[None] | None = None

    async def run(self, work: "asyncio.Task[None]") -> None:
        """Run until done or hung up."""
        self._work = work
        try:
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()
        except iostream.StreamClosedError:
            pass
        finally:
            work.cancel()
