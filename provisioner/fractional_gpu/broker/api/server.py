"""The HTTP server beneath the routes. It limits what a connection may send, and decides when to read from it.

A request is refused if it is too large, does not state its length, or belongs to an account that has been overdrawn for a long time. The
headers are enough to decide this, so the server replies without reading the body. Otherwise, the request is charged to its account
(`cost.Account`), and its body is read when it is the account's turn. Once the account owes `COST_RESERVE_S`, nothing is read from its
connections.

Each user may have a few connections, plus more for each lease that has a process. Any connection beyond that waits briefly, gets one reply
and is closed. Some file descriptors are reserved for administrators, so users cannot use them all up. Connections that make no progress in
time are closed.
"""

import asyncio
import errno
import hmac
import http
import logging
import math
import os
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final, Self, cast
from urllib.parse import unquote

import msgspec
from tornado import httputil, iostream
from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop

from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.cost import EXEMPT, Account
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.host.accounts import account_uid
from fractional_gpu.host.claims import NameClaim
from fractional_gpu.host.peers import PeerCredentials, peer_credentials, peer_groups
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.codec import error_body
from fractional_gpu.protocol.errors import (
    BadRequestError,
    FractionalGPUError,
    RequestTooLargeError,
    TooManyRequestsError,
)
from fractional_gpu.protocol.limits import (
    CONNECTIONS_PER_LEASE,
    COST_BYTE_S,
    COST_CONNECTION_S,
    COST_REQUEST_S,
    COST_SHARE,
    COST_WAIT_S,
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MOST_CONNECTIONS,
)
from fractional_gpu.protocol.routes import ROUTES, Route

log = logging.getLogger(__name__)
DISCARDED_HEADER_BYTES = 4 * MAX_HEADER_BYTES  # beyond this the connection is closed without a reply
READ_AT_ONCE = 16 * 1024  # bytes buffered for a connection that waits for its turn
_WARNINGS_PER_S = 1 / 60  # log lines about one user's connections
_PAUSE_S = 0.5
_READS_AT_ONCE = 16  # in one pass of the loop; IOStream continues to read while there is data, even a byte at a time
_ACCEPTED_AT_ONCE = 8  # connections in one pass of the loop, so that a flood of them delays no other work
_LONGEST_NUMBER = 18  # digits


_ROUTES: Final = {(route.method, route.path): route for route in ROUTES}
_NAMES: Final = {
    "leases": ("{lease}", re.compile(r"[0-9a-zA-Z_-]{1,64}")),
    "seats": ("{seat}", re.compile(r"[0-9a-zA-Z_-]{1,64}")),
    "pools": ("{pool}", re.compile(r"[0-9a-z._-]{1,63}")),
    "devices": ("{device}", re.compile(r"[^/]{1,200}")),
}


def is_admin(sock: socket.socket, credentials: PeerCredentials, group: int | None) -> bool:
    return credentials.uid in (0, os.getuid()) or (group is not None and group in peer_groups(sock))


def bearer(headers: httputil.HTTPHeaders) -> str | None:
    """Return the request's bearer token. Return "" if its Authorization header has another form, or None if it has no such header."""
    authorization = headers.get("Authorization")
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    return token if scheme == "Bearer" else ""


def find_route(method: str, path: str) -> tuple[Route[Any, Any] | None, str]:
    if (route := _ROUTES.get((method, path))) is not None:
        return route, ""
    parts = path.split("/")
    if len(parts) < 4 or parts[2] not in _NAMES:
        return None, ""
    placeholder, allowed = _NAMES[parts[2]]
    name, parts[3] = unquote(parts[3]), placeholder
    if not allowed.fullmatch(name):
        return None, ""
    return _ROUTES.get((method, "/".join(parts))), name


class Payers:
    """Decides who pays for a request: a seat, if the token or the peer's control group identifies one, and otherwise the user."""

    def __init__(self, broker: Broker, seats: Seats) -> None:
        self._broker = broker
        self._seats = seats

    def of_connection(self, credentials: PeerCredentials, *, admin: bool) -> Account:
        if admin:
            return EXEMPT
        if (pod := self._seats.workloads.of_pod(credentials.pid)) is not None:
            return self._of_seat(pod)
        return self._broker.costs.of_user(credentials.uid)

    def of_request(
        self, connection: Account, credentials: PeerCredentials, method: str, path: str, token: str | None
    ) -> tuple[Account, bool]:
        if connection is EXEMPT:
            return EXEMPT, True
        route, name = find_route(method, path)
        kernel = self._broker.kernels.get(name) if route is not None else None
        if kernel is not None and kernel.uid != credentials.uid:
            kernel = None
        seat = self._seat_of(token, kernel) if token else None
        account = connection if seat is None else self._of_seat(seat)
        return account, route is not None and route.reserved and kernel is not None and kernel.identity is not None

    def most_connections(self, uid: int) -> int:
        user = account_uid(uid)
        kernels = sum(
            one.identity is not None and account_uid(one.uid) == user for one in self._broker.kernels.values()
        )
        seats = sum(one.uid is None or account_uid(one.uid) == user for one in self._seats.live())
        return min(MOST_CONNECTIONS, MAX_CONNECTIONS + CONNECTIONS_PER_LEASE * (kernels + seats))

    def _of_seat(self, seat: SeatRecord) -> Account:
        return self._broker.costs.of_seat(seat.seat_id, seat.owner)

    def _seat_of(self, token: str, kernel: Kernel | None) -> SeatRecord | None:
        digest = token_digest(token)
        if kernel is not None and hmac.compare_digest(digest, kernel.token_sha256):
            view = self._broker.arbiter.lease(kernel.lease_id)
            return self._seats.find(view.spec.seat) if view is not None and view.spec.seat else None
        return next((one for one in self._seats.live() if hmac.compare_digest(digest, one.token_sha256)), None)


def close_if_unread(stream: iostream.IOStream, taken: "asyncio.Future[None]", seconds: float) -> None:
    """Close the connection if the peer does not read its reply within `seconds`, to free the reply's memory."""

    def close() -> None:
        if not taken.done():
            stream.close()

    patience = asyncio.get_running_loop().call_later(seconds, close)
    taken.add_done_callback(lambda _: patience.cancel())


class MeteredStream(iostream.IOStream):
    """A connection that charges its account for each read. While the account owes `COST_RESERVE_S`, nothing is read from the connection."""

    def __init__(
        self,
        connection: socket.socket,
        credentials: PeerCredentials,
        account: Account,
        *,
        admin: bool,
        **sizes: int | None,
    ) -> None:
        super().__init__(connection, **sizes)
        self.credentials = credentials
        self.admin = admin
        self.opened_by = account
        self.account = account  # of the current or last request
        self._reads = 0  # in this pass of the loop

    def read_from_fd(self, buf: bytearray | memoryview) -> int | None:
        """Read as IOStream does, but return None if the account owes too much, or after `_READS_AT_ONCE` reads in one loop iteration."""
        self._reads += 1
        if self._reads > _READS_AT_ONCE or self.account.is_spent:
            return None
        return super().read_from_fd(buf)

    def _handle_events(self, fd: int | Any, events: int) -> None:  # noqa: ANN401 - tornado's own
        if self.account.is_spent:
            # Unread data keeps the descriptor readable, so the loop would report it in each pass.
            self.io_loop.update_handler(fd, 0)
            self.account.when_recovered(self._listen_again)
            return
        begun_s = time.thread_time()
        self._reads = 0
        super()._handle_events(fd, events)
        self.account.charge(time.thread_time() - begun_s)

    def _listen_again(self) -> None:
        if not self.closed() and self._state is not None:
            self.io_loop.update_handler(self.fileno(), self._state)


class _Admission(httputil.HTTPMessageDelegate):
    def __init__(
        self,
        request: httputil.HTTPMessageDelegate,
        connection: HTTP1Connection,
        stream: MeteredStream,
        payers: Payers,
    ) -> None:
        self._request = request
        self._connection = connection
        self._stream = stream
        self._payers = payers
        self._passed = False

    async def headers_received(
        self, start_line: httputil.RequestStartLine | httputil.ResponseStartLine, headers: httputil.HTTPHeaders
    ) -> None:
        stream, token, line = self._stream, bearer(headers), cast("httputil.RequestStartLine", start_line)
        path = line.path.partition("?")[0]
        account, reserved = self._payers.of_request(stream.opened_by, stream.credentials, line.method, path, token)
        stream.account = account
        try:
            account.charge(COST_REQUEST_S + _body_length(headers) * COST_BYTE_S)
            await _take_turn(account, reserved=reserved)
        except FractionalGPUError as error:
            self._refuse(error)
            return
        # The body is JSON, whatever type it declares. Tornado would parse form data.
        headers.pop("Content-Type", None)
        self._passed = True
        future = self._request.headers_received(start_line, headers)
        if future is not None:
            await future

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return self._request.data_received(chunk)

    def finish(self) -> None:
        if self._passed:
            self._request.finish()

    def on_connection_close(self) -> None:
        if self._passed:
            self._request.on_connection_close()

    def _refuse(self, error: FractionalGPUError) -> None:
        log.debug("refused a request: %s", error)
        stream = self._connection.detach()  # ignore the part of the body that was already read
        if not stream.closed():
            stream.write(_last_reply(error))
            stream.close()


def _body_length(headers: httputil.HTTPHeaders) -> int:
    size = sum(len(name) + len(value) for name, value in headers.get_all())
    if size > MAX_HEADER_BYTES:
        raise RequestTooLargeError(f"the headers are too large ({size} bytes); the maximum is {MAX_HEADER_BYTES}")
    if "Transfer-Encoding" in headers:
        raise BadRequestError(
            "a chunked body is not supported; send the whole body with a Content-Length", reason="chunked"
        )
    text = headers.get("Content-Length", "0")
    if not (text.isascii() and text.isdigit()):
        raise BadRequestError("the Content-Length is not a valid byte count", reason="bad-length")
    if len(text) > _LONGEST_NUMBER or int(text) > MAX_BODY_BYTES:
        raise RequestTooLargeError(f"the body is too large ({text[:40]} bytes); the maximum is {MAX_BODY_BYTES}")
    return int(text)


async def _take_turn(account: Account, *, reserved: bool) -> None:
    if account.take_turn(reserved=reserved):
        return
    try:
        async with asyncio.timeout(COST_WAIT_S):
            await account.turn(reserved=reserved)
    except TimeoutError:
        retry_s = max(1, math.ceil(-account.left_s / account.share))
        raise TooManyRequestsError(
            f"{account.name} is sending more requests than the broker accepts from one user ({COST_SHARE:.0%} of a processor); try again "
            f"in {retry_s} s, or find the program that is sending them",
            reason="too-many-requests",
            retry_s=retry_s,
        ) from None


def _last_reply(error: FractionalGPUError) -> bytes:
    body = msgspec.json.encode(error_body(error))
    lines = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if isinstance(error, TooManyRequestsError):
        lines.append(f"Retry-After: {round(error.retry_s)}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


class Server(HTTPServer):
    def initialize(  # type: ignore[override] # tornado passes on what its constructor gets
        self,
        *args: Any,  # noqa: ANN401 - tornado's own
        payers: Payers,
        admin_gid: int | None = None,
        **kwargs: Any,  # noqa: ANN401 - tornado's own
    ) -> None:
        self._admin_gid = admin_gid
        self._payers = payers
        self._count: Counter[Account] = Counter()  # connections, by who pays for them
        self._of_users = 0  # connections of users who are not administrators
        self._refusals: set[asyncio.Task[None]] = set()
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 1 << 20
        self._most = descriptors // 4
        self._most_of_users = descriptors // 2
        self._warnings = TokenBucket(_WARNINGS_PER_S, burst=1)
        super().initialize(*args, **kwargs)

    def _handle_connection(self, connection: socket.socket, address: Any) -> None:  # noqa: ANN401 - tornado's own
        """Accept or refuse a connection. Refusals must be cheap, because a user with too many connections may retry at once."""
        try:
            credentials = peer_credentials(connection)
            admin = is_admin(connection, credentials, self._admin_gid)
        except (OSError, ValueError):
            connection.close()
            return
        account = self._payers.of_connection(credentials, admin=admin)
        have = self._count[account]
        if have >= self._most or (not admin and self._of_users >= self._most_of_users):
            allowed = (
                f"at most {self._most} are allowed"
                if have >= self._most
                else f"all users together may have {self._most_of_users}"
            )
            self._refuse(connection, account, allowed)
        else:
            self._count[account] += 1
            self._of_users += not admin
            most = MAX_CONNECTIONS
            if not admin and have >= most and have >= (most := self._payers.most_connections(credentials.uid)):
                task = asyncio.create_task(self._refuse_later(connection, account, most))
                self._refusals.add(task)
                task.add_done_callback(self._refusals.discard)
            else:
                stream = MeteredStream(
                    connection,
                    credentials,
                    account,
                    admin=admin,
                    max_buffer_size=self.max_buffer_size,
                    read_chunk_size=self.read_chunk_size,
                )
                self.handle_stream(stream, address)
        account.charge(COST_CONNECTION_S)

    async def _refuse_later(self, connection: socket.socket, account: Account, most: int) -> None:
        """Pause, wait for the account's turn, then refuse the connection. A client that is refused at once would retry at once."""
        try:
            await asyncio.sleep(COST_WAIT_S)
            await account.turn()
            account.charge(COST_REQUEST_S)
        finally:
            self._forget(account, admin=False)
            self._refuse(connection, account, f"at most {most} are allowed")

    def _refuse(self, connection: socket.socket, account: Account, allowed: str) -> None:
        have = self._count[account]
        if self._warnings.take(account) == 0:
            log.warning("%s has %d connections open; rejecting more", account.name, have)
        if not account.is_spent:
            error = TooManyRequestsError(
                f"{account.name} has {have} open connections to the broker and requested another; {allowed}; close some, or end the "
                "programs that hold them",
                reason="too-many-connections",
            )
            with suppress(OSError):  # hung up already
                connection.send(_last_reply(error))
        connection.close()

    def _forget(self, account: Account, *, admin: bool) -> None:
        self._count[account] -= 1
        self._of_users -= not admin
        if not self._count[account]:
            del self._count[account]

    def connections(self) -> tuple[int, int]:
        return self._of_users, self._count.total() - self._of_users

    async def close_all_connections(self) -> None:
        for task in self._refusals:
            task.cancel()
        await super().close_all_connections()

    def start_request(self, server_conn: object, request_conn: httputil.HTTPConnection) -> httputil.HTTPMessageDelegate:
        stream: MeteredStream = server_conn.stream  # type: ignore[attr-defined] # an HTTP1ServerConnection
        connection = cast("HTTP1Connection", request_conn)
        return _Admission(super().start_request(server_conn, request_conn), connection, stream, self._payers)

    def on_close(self, server_conn: object) -> None:
        stream: MeteredStream = server_conn.stream  # type: ignore[attr-defined] # an HTTP1ServerConnection
        self._forget(stream.opened_by, admin=stream.admin)
        super().on_close(server_conn)


class PausingListener(socket.socket):
    """A listener that pauses for `_PAUSE_S` seconds if no file descriptor is free.

    Without the pause, the loop would retry at once, keeping a core busy and filling the log.
    """

    _paused: object | None = None
    _accepted = 0  # in this pass of the loop

    @classmethod
    def of(cls, listener: socket.socket) -> Self:
        pausing = cls(fileno=listener.detach())
        pausing.setblocking(False)
        return pausing

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises BlockingIOError if no file descriptor is free, or after several connections in a row, so that the loop can do other work.
        """
        if self._accepted == _ACCEPTED_AT_ONCE:
            self._accepted = 0
            raise BlockingIOError(errno.EAGAIN, "enough for one turn")
        try:
            accepted = super().accept()
        except OSError as error:
            self._accepted = 0
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.error("cannot accept connections: %s; retrying in %g s", error, _PAUSE_S)  # noqa: TRY400 - a traceback adds nothing
            loop = IOLoop.current()
            loop.update_handler(self.fileno(), 0)
            self._paused = loop.call_later(_PAUSE_S, loop.update_handler, self.fileno(), IOLoop.READ)
            raise BlockingIOError(errno.EAGAIN, "no file descriptor is free") from error
        self._accepted += 1
        return accepted

    def close(self) -> None:
        if self._paused is not None:
            IOLoop.current().remove_timeout(self._paused)
            self._paused = None
        super().close()


def drain_claim_queries(claim: NameClaim) -> None:
    """Close the connections of processes checking who holds `claim`. If they filled up the queue, later processes could not check."""
    loop = asyncio.get_running_loop()

    def drain() -> None:
        try:
            claim.drain()
        except OSError as error:
            log.error("cannot read which processes are asking about a device: %s; retrying in %g s", error, _PAUSE_S)  # noqa: TRY400 - a traceback adds nothing
            loop.remove_reader(claim.fileno())
            loop.call_later(_PAUSE_S, drain_claim_queries, claim)

    loop.add_reader(claim.fileno(), drain)
