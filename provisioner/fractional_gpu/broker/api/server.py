"""The server below the routes: whoever connects is known by his uid, counted, and held to the limits of protocol/limits.py.

Rules:

- A connection too many gets one reply that says so, whatever it wanted, and is closed. An administrator's connections are not counted
  against everybody's, so there is a descriptor left for him when users have used up theirs.
- A request too large is thrown away as it comes, and gets its error when it is over: a peer that still writes could not read it.
- A request head, a body and a reply that do not get on within their time close the connection.
"""

import http
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec
from tornado import httputil, iostream
from tornado.httpserver import HTTPServer

from fractional_gpu.broker.token_bucket import TokenBucket
from fractional_gpu.host.peers import PeerCredentials, peer_credentials, peer_groups
from fractional_gpu.protocol.decode import as_json
from fractional_gpu.protocol.errors import FractionalGPUError, RequestTooLargeError, TooManyRequestsError
from fractional_gpu.protocol.limits import MAX_BODY_BYTES, MAX_CONNECTIONS_PER_UID, MAX_HEADER_BYTES

__all__ = ["DISCARDED_BYTES", "DISCARDED_HEADER_BYTES", "Server", "is_admin"]

log = logging.getLogger(__name__)
# What is too large is thrown away as it comes, for BODY_S at most: a peer that still writes could not read its error.
DISCARDED_BYTES = 1 << 40
DISCARDED_HEADER_BYTES = 4 * MAX_HEADER_BYTES  # larger ones: the connection is closed
_TOLD_PER_S = 1 / 60  # lines in the log about one user's connections: he must not be able to fill it


def is_admin(sock: socket.socket, credentials: PeerCredentials, group: int | None) -> bool:
    """Whether the peer is root, the broker's own user or a member of the administrators' group."""
    return credentials.uid in (0, os.getuid()) or (group is not None and group in peer_groups(sock))


class _Bounded(httputil.HTTPMessageDelegate):
    """Passes one request on if it is within the limits; of a larger one nothing is kept, and it gets its error when it is over."""

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
        # The body is JSON, whatever it is called: Tornado must not look for forms in it.
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
        log.info("a request was refused: %s", self._error)
        self._request.on_connection_close()  # gives up what was kept of it
        line, headers, body = _whole_reply(self._error)
        self._connection.write_headers(line, headers, body)
        self._connection.finish()

    def on_connection_close(self) -> None:
        self._request.on_connection_close()


def _whole_reply(error: FractionalGPUError) -> tuple[httputil.ResponseStartLine, httputil.HTTPHeaders, bytes]:
    body = msgspec.json.encode(as_json(error))
    headers = httputil.HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
    return httputil.ResponseStartLine("HTTP/1.1", error.status, http.HTTPStatus(error.status).phrase), headers, body


class Server(HTTPServer):
    """Counts connections per uid and turns away whoever has too many."""

    def initialize(self, *args: Any, admin_gid: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - tornado's own
        """Take HTTPServer's arguments, and the group whose members are administrators."""
        self._admin_gid = admin_gid
        self._count: Counter[int] = Counter()
        self._of_users = 0  # connections of who is no administrator
        self._open: dict[object, tuple[int, bool]] = {}  # stream -> (uid, whether an administrator's)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 1 << 20
        self._most = min(MAX_CONNECTIONS_PER_UID, descriptors // 4)
        self._most_of_users = descriptors // 2
        self._told = TokenBucket(_TOLD_PER_S, burst=1)
        super().initialize(*args, **kwargs)

    def handle_stream(self, stream: iostream.IOStream, address: tuple[Any, ...]) -> None:
        """Take a connection, or turn it away."""
        try:
            credentials = peer_credentials(stream.socket)
            admin = is_admin(stream.socket, credentials, self._admin_gid)
        except (OSError, ValueError):
            stream.close()
            return
        uid = credentials.uid
        if self._count[uid] >= self._most or (not admin and self._of_users >= self._most_of_users):
            self._turn_away(stream, uid)
            return
        self._count[uid] += 1
        self._of_users += not admin
        self._open[stream] = (uid, admin)
        super().handle_stream(stream, address)

    def replace_listener(self, old: socket.socket, new: socket.socket) -> None:
        """Listen on another socket from now on. Connections that were accepted on the old one live on."""
        self.add_socket(new)
        descriptor = old.fileno()
        self._handlers.pop(descriptor)()
        self._sockets.pop(descriptor).close()

    def connections(self) -> tuple[int, int]:
        """Return how many connections users have, and how many administrators."""
        return self._of_users, len(self._open) - self._of_users

    def _turn_away(self, stream: iostream.IOStream, uid: int) -> None:
        have = self._count[uid]
        if self._told.take(uid) == 0:
            log.warning("user %d has %d connections open: more are turned away", uid, have)
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
        return _Bounded(super().start_request(server_conn, request_conn), request_conn)

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
