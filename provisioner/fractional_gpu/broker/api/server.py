"""The HTTP server below the routes: it counts connections by uid and enforces the sizes and times of protocol/limits.py.

Rules:

- The kernel reports the peer's uid (SO_PEERCRED); a client cannot claim another one.
- A connection beyond a user's limit gets one reply that says so, whatever its request, and is closed. Administrators' connections do
  not count against the users' common limit: an administrator still gets a descriptor when users have used up theirs.
- The server discards a request that is too large as it arrives and sends the error at its end: a client that still writes would not
  read an earlier reply.
- A request head, a body or a reply that makes no progress within its time closes the connection.
- A broker without free descriptors pauses its listeners.
"""

import asyncio
import errno
import http
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Self

import msgspec
from tornado import httputil, iostream
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop

from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.host.claims import NameClaim
from fractional_gpu.host.peers import PeerCredentials, peer_credentials, peer_groups
from fractional_gpu.protocol.codec import error_body
from fractional_gpu.protocol.errors import FractionalGPUError, RequestTooLargeError, TooManyRequestsError
from fractional_gpu.protocol.limits import MAX_BODY_BYTES, MAX_CONNECTIONS_PER_UID, MAX_HEADER_BYTES

log = logging.getLogger(__name__)
DISCARDED_BYTES = 1 << 40  # of a body, within BODY_S
DISCARDED_HEADER_BYTES = 4 * MAX_HEADER_BYTES  # larger ones: the connection is closed
_WARNINGS_PER_S = 1 / 60  # log lines about one user's connections
_PAUSE_S = 0.5


def is_admin(sock: socket.socket, credentials: PeerCredentials, group: int | None) -> bool:
    """Whether the peer is root, the broker's own user or a member of the administrators' group."""
    return credentials.uid in (0, os.getuid()) or (group is not None and group in peer_groups(sock))


class _SizeLimit(httputil.HTTPMessageDelegate):
    """Passes one request on if it is within the limits; discards a larger one and answers it with an error at its end."""

    def __init__(self, request: httputil.HTTPMessageDelegate, connection: httputil.HTTPConnection) -> None:
        self._request = request
        self._connection = connection
        self._left = MAX_BODY_BYTES
        self._error: RequestTooLargeError | None = None

    def headers_received(
        self, start_line: httputil.RequestStartLine | httputil.ResponseStartLine, headers: httputil.HTTPHeaders
    ) -> Awaitable[None] | None:
        size = sum(len(name) + len(value) for name, value in headers.get_all())
        if size > MAX_HEADER_BYTES:
            self._error = RequestTooLargeError(f"the headers have {size} bytes; allowed: {MAX_HEADER_BYTES}")
        # The body is JSON, whatever its declared type: Tornado would parse form data.
        headers.pop("Content-Type", None)
        return self._request.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        self._left -= len(chunk)
        if self._left < 0 and self._error is None:
            self._error = RequestTooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes; send less")
        return self._request.data_received(chunk) if self._error is None else None

    def finish(self) -> None:
        if self._error is None:
            self._request.finish()
            return
        log.info("refused a request: %s", self._error)
        self._request.on_connection_close()  # frees what was read of it
        line, headers, body = _whole_reply(self._error)
        self._connection.write_headers(line, headers, body)
        self._connection.finish()

    def on_connection_close(self) -> None:
        self._request.on_connection_close()


def _whole_reply(error: FractionalGPUError) -> tuple[httputil.ResponseStartLine, httputil.HTTPHeaders, bytes]:
    body = msgspec.json.encode(error_body(error))
    headers = httputil.HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
    return httputil.ResponseStartLine("HTTP/1.1", error.status, http.HTTPStatus(error.status).phrase), headers, body


class Server(HTTPServer):
    """Counts connections by uid and rejects those beyond the limits."""

    def initialize(self, *args: Any, admin_gid: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - tornado's own
        """Take HTTPServer's arguments, and the group whose members are administrators."""
        self._admin_gid = admin_gid
        self._count: Counter[int] = Counter()
        self._of_users = 0  # connections of users that are not administrators
        self._open: dict[object, tuple[int, bool]] = {}  # stream -> (uid, is an administrator's)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 1 << 20
        self._most = min(MAX_CONNECTIONS_PER_UID, descriptors // 4)
        self._most_of_users = descriptors // 2
        self._warnings = TokenBucket(_WARNINGS_PER_S, burst=1)
        super().initialize(*args, **kwargs)

    def handle_stream(self, stream: iostream.IOStream, address: tuple[Any, ...]) -> None:
        """Take a connection, or reject it."""
        try:
            credentials = peer_credentials(stream.socket)
            admin = is_admin(stream.socket, credentials, self._admin_gid)
        except (OSError, ValueError):
            stream.close()
            return
        uid = credentials.uid
        if self._count[uid] >= self._most or (not admin and self._of_users >= self._most_of_users):
            self._reject(stream, uid)
            return
        self._count[uid] += 1
        self._of_users += not admin
        self._open[stream] = (uid, admin)
        super().handle_stream(stream, address)

    def replace_listener(self, old: socket.socket, new: socket.socket) -> None:
        """Listen on another socket from now on. Connections that the old one accepted stay open."""
        self.add_socket(new)
        descriptor = old.fileno()
        self._handlers.pop(descriptor)()
        self._sockets.pop(descriptor).close()

    def connections(self) -> tuple[int, int]:
        """Return the number of connections of users and of administrators."""
        return self._of_users, len(self._open) - self._of_users

    def _reject(self, stream: iostream.IOStream, uid: int) -> None:
        have = self._count[uid]
        if self._warnings.take(uid) == 0:
            log.warning("user %d has %d connections open; rejecting more", uid, have)
        most = f"allowed: {self._most}" if have >= self._most else f"all users together may have {self._most_of_users}"
        line, headers, body = _whole_reply(
            TooManyRequestsError(
                f"user {uid} has {have} connections to the broker open, and one more was asked for; {most}; close some, or end the "
                "programs that hold them",
                reason="too-many-connections",
            )
        )
        headers["Connection"] = "close"
        headers["Retry-After"] = "1"
        head = [
            f"HTTP/1.1 {line.code} {line.reason}",
            *(f"{name}: {value}" for name, value in headers.get_all()),
            "",
            "",
        ]
        with suppress(OSError):  # hung up already
            stream.socket.send("\r\n".join(head).encode("ascii") + body)  # a fresh socket's buffer is empty
        stream.close()

    def start_request(self, server_conn: object, request_conn: httputil.HTTPConnection) -> httputil.HTTPMessageDelegate:
        """Take one request of a connection."""
        return _SizeLimit(super().start_request(server_conn, request_conn), request_conn)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection."""
        known = self._open.pop(getattr(server_conn, "stream", None), None)
        if known is not None:
            uid, admin = known
            self._count[uid] -= 1
            self._of_users -= not admin
            if not self._count[uid]:
                del self._count[uid]
        super().on_close(server_conn)


class PausingListener(socket.socket):
    """A listening socket that pauses for `_PAUSE_S` when the process has no free descriptor; clients wait in the backlog.

    The event loop's own way is to fail, to be called again at once because a connection still waits, and to fail again: a full core
    and a full log.
    """

    _paused: object | None = None

    @classmethod
    def of(cls, listener: socket.socket) -> Self:
        """Return one that takes over the descriptor of a listening socket."""
        pausing = cls(fileno=listener.detach())
        pausing.setblocking(False)
        return pausing

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError, and pauses, when there is no descriptor for it."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.error("cannot accept connections: %s; retrying in %g s", error, _PAUSE_S)  # noqa: TRY400 - a traceback adds nothing
            loop = IOLoop.current()
            loop.update_handler(self.fileno(), 0)
            self._paused = loop.call_later(_PAUSE_S, loop.update_handler, self.fileno(), IOLoop.READ)
            raise BlockingIOError(errno.EAGAIN, "no descriptor is free") from error

    def close(self) -> None:
        """Stop listening."""
        if self._paused is not None:
            IOLoop.current().remove_timeout(self._paused)
            self._paused = None
        super().close()


def drain_claim_queries(claim: NameClaim) -> None:
    """Discard the connections by which processes ask which one holds the claim, for as long as the running loop lives.

    The operating system answers them, with the listener's credentials; but it does so only while the backlog has room. The claim must be
    held until the loop ends.
    """
    loop = asyncio.get_running_loop()

    def drain() -> None:
        try:
            claim.drain()
        except OSError as error:
            log.error("cannot read device-claim queries: %s; retrying in %g s", error, _PAUSE_S)  # noqa: TRY400 - a traceback adds nothing
            loop.remove_reader(claim.fileno())
            loop.call_later(_PAUSE_S, drain_claim_queries, claim)

    loop.add_reader(claim.fileno(), drain)
