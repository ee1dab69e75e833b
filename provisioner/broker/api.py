"""HTTP on the UNIX socket: decode strictly, ask the service, encode. Every failure is one JSON error with a stable code."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from tornado import httputil, iostream, web
from tornado.httpserver import HTTPServer

from provisioner.broker.feed import Feed
from provisioner.broker.handler import Handler, Stream, as_json
from provisioner.broker.policy_api import POLICY_ROUTES
from provisioner.broker.service import Service
from provisioner.broker.status import host_status
from provisioner.host.peers import peer_credentials
from provisioner.protocol.errors import NotFoundError, RequestTooLargeError
from provisioner.protocol.limits import MAX_BODY_BYTES, MAX_CONNECTIONS_PER_UID, MAX_HEADER_BYTES, PULSE_S
from provisioner.protocol.messages import AcquireRequest, AttachRequest, Done, GateAnswer, GateHello, LeaseRequest

__all__ = ["make_server"]

log = logging.getLogger(__name__)
_LEASE = r"/v1/leases/([0-9a-zA-Z_-]{1,64})"
_IDLE_CONNECTION_S = 3600.0
_BODY_S = 10.0  # a body that does not arrive within this is a slow-loris
# What is too large is thrown away as it comes, for _BODY_S at most: a peer that still writes could not read its error.
_DISCARDED_BYTES = 1 << 40
_DISCARDED_HEADER_BYTES = 4 * MAX_HEADER_BYTES  # larger ones: the connection is closed


class _Missing(Handler):
    def prepare(self) -> None:
        raise NotFoundError(
            "there is no such route; the routes are in provisioner/protocol/messages.py", reason="unknown-route"
        )


class _Ping(Handler):
    def get(self) -> None:
        self.reply(self.service.ping())


class _Status(Handler):
    def get(self) -> None:
        uid = None if self.peer.admin else self.peer.credentials.uid
        seat = self.service.seats.of_token(self.peer.token)
        self.reply(host_status(self.service.broker, self.socket_path, uid, seat=seat))


class _Leases(Handler):
    async def post(self) -> None:
        self.reply(await self.service.create(self.peer, self.take(LeaseRequest)))


class _Lease(Handler):
    def get(self, lease_id: str) -> None:
        self.reply(self.service.status_of(self.service.find(self.peer, lease_id)))

    def delete(self, lease_id: str) -> None:
        try:
            kernel = self.service.find(self.peer, lease_id)
        except NotFoundError:
            pass  # released before: a second release is no error
        else:
            self.service.release(kernel)
        self.reply(Done())


class _Attach(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id, own=True)
        self.reply(await self.service.attach(self.peer, kernel, self.take(AttachRequest)))


class _Detach(Handler):
    def post(self, lease_id: str) -> None:
        self.service.detach(self.service.find(self.peer, lease_id, own=True))
        self.reply(Done())


class _Suspend(Handler):
    async def post(self, lease_id: str) -> None:
        self.reply(await self.service.suspend(self.service.find(self.peer, lease_id)))


class _Events(Stream):
    async def get(self) -> None:
        uid = None if self.peer.admin else self.peer.credentials.uid
        seat = self.service.seats.of_token(self.peer.token)

        async def work() -> None:
            async with aclosing(self.settings["feed"].follow(uid, seat)) as news:
                async for status in news:
                    await self.line({} if status is None else status)

        await self.run(asyncio.create_task(work()))


class _Resume(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id)

        async def work() -> None:
            self.reply(await self.service.resume(kernel))

        await self.run(asyncio.create_task(work()))


class _Acquire(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id, own=True)
        request = self.take(AcquireRequest)

        async def work() -> None:
            async with aclosing(self.service.acquire(kernel, request)) as stream:
                async for progress in stream:
                    await self.line(progress)

        await self.run(asyncio.create_task(work()))


class _Gate(Stream):
    async def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id, own=True)
        link = self.service.connect_gate(kernel, self.take(GateHello))

        async def work() -> None:
            await self.flush()  # the extension learns at once that it is connected
            while (command := await link.next(PULSE_S)) is not None:
                await self.line(command)

        try:
            await self.run(asyncio.create_task(work()))
        finally:
            self.service.disconnect_gate(kernel, link)


class _Answer(Handler):
    def post(self, lease_id: str) -> None:
        kernel = self.service.find(self.peer, lease_id, own=True)
        self.service.answer(kernel, self.take(GateAnswer))
        self.reply(Done())


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
        body = msgspec.json.encode(as_json(self._error))
        headers = httputil.HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(body))})
        line = httputil.ResponseStartLine("HTTP/1.1", self._error.status, "Request Entity Too Large")
        self._connection.write_headers(line, headers, body)
        self._connection.finish()

    def on_connection_close(self) -> None:
        self._request.on_connection_close()


class _Server(HTTPServer):
    """Counts connections per uid and turns away whoever has too many."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        self._count: Counter[int] = Counter()
        self._uids: dict[object, int] = {}
        super().initialize(*args, **kwargs)

    def handle_stream(self, stream: iostream.IOStream, address: tuple[Any, ...]) -> None:
        try:
            uid = peer_credentials(stream.socket).uid
        except (OSError, ValueError):
            stream.close()
            return
        if self._count[uid] >= MAX_CONNECTIONS_PER_UID:
            log.warning("user %d has %d connections open: one more is turned away", uid, MAX_CONNECTIONS_PER_UID)
            stream.close()
            return
        self._count[uid] += 1
        self._uids[stream] = uid
        super().handle_stream(stream, address)

    def start_request(self, server_conn: object, request_conn: httputil.HTTPConnection) -> httputil.HTTPMessageDelegate:
        return _Bounded(super().start_request(server_conn, request_conn), request_conn)

    def on_close(self, server_conn: object) -> None:
        uid = self._uids.pop(getattr(server_conn, "stream", None), None)
        if uid is not None:
            self._count[uid] -= 1
        super().on_close(server_conn)


def make_server(service: Service, socket_path: str, *, more: Sequence[tuple[str, type[Handler]]] = ()) -> HTTPServer:
    """Return the server, not yet listening; `more` are routes beside those of leases."""
    shared = {"service": service, "socket_path": socket_path}
    application = web.Application(
        [
            ("/v1/ping", _Ping, shared),
            ("/v1/status", _Status, shared),
            ("/v1/events", _Events, shared),
            ("/v1/leases", _Leases, shared),
            (_LEASE, _Lease, shared),
            (_LEASE + "/attach", _Attach, shared),
            (_LEASE + "/detach", _Detach, shared),
            (_LEASE + "/acquire", _Acquire, shared),
            (_LEASE + "/suspend", _Suspend, shared),
            (_LEASE + "/resume", _Resume, shared),
            (_LEASE + "/gate", _Gate, shared),
            (_LEASE + "/answer", _Answer, shared),
            *((pattern, handler, shared) for pattern, handler in more),
            *((pattern, handler, shared) for pattern, handler in POLICY_ROUTES),
        ],
        default_handler_class=_Missing,
        default_handler_args=shared,
        feed=Feed(service.broker, socket_path),
        log_function=_log_request,
    )
    return _Server(
        application,
        max_header_size=_DISCARDED_HEADER_BYTES,
        max_body_size=_DISCARDED_BYTES,
        max_buffer_size=MAX_BODY_BYTES * 2,
        idle_connection_timeout=_IDLE_CONNECTION_S,
        body_timeout=_BODY_S,
    )


def _log_request(handler: web.RequestHandler) -> None:
    request: httputil.HTTPServerRequest = handler.request
    log.debug(
        "%s %s -> %d in %.1f ms", request.method, request.path, handler.get_status(), request.request_time() * 1000
    )
