"""The routes of leases, status and events, and the server with all routes. A handler decodes, calls the service and encodes."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace
from tornado import httputil, web

from fractional_gpu.broker.api.account_routes import ACCOUNT_ROUTES
from fractional_gpu.broker.api.admin_routes import CONTROL_ROUTES
from fractional_gpu.broker.api.handler import LOG_LINES_BURST, LOG_LINES_PER_S, Handler, StreamHandler
from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.metrics_routes import METRICS_ROUTES, register_collectors
from fractional_gpu.broker.api.payers import Payers
from fractional_gpu.broker.api.server import DISCARDED_HEADER_BYTES, READ_AT_ONCE, Server
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.services.others_use import others_use_milli
from fractional_gpu.broker.services.status import StatusStream, forecast_errors, full_lease_status, host_status
from fractional_gpu.host.peers import detects_unread, unread
from fractional_gpu.protocol.errors import BadRequestError, NotFoundError
from fractional_gpu.protocol.limits import BODY_S, IDLE_S, MAX_BODY_BYTES, MAX_LAST_MS, MAX_NAME
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    Done,
    GateAnswer,
    GateCommand,
    GateHello,
    LeaseRequest,
    OthersUse,
    ResumeRequest,
)

log = logging.getLogger(__name__)
_LEASE = r"/v1/leases/([0-9a-zA-Z_-]{1,64})"
_KEEP_ALIVE = msgspec.json.encode(GateCommand()) + b"\n"


class _Missing(Handler):
    def prepare(self) -> None:
        super().prepare()
        raise NotFoundError(
            "there is no such route; fractional_gpu/protocol/messages.py lists the routes",
            reason="unknown-route",
        )


class _Ping(Handler):
    answers_any_version = True

    def get(self) -> None:
        self.reply(self.service.ping())


class _Status(Handler):
    async def get(self) -> None:
        if self.wants_fresh:
            await self.service.measure_now()
        uid = None if self.peer.admin else self.peer.credentials.uid
        seats = self.service.seats
        seat = seats.draws.of_token(self.peer.token)
        status = replace(
            host_status(self.service.broker, self.socket_path, uid, seat=seat, owner=seats.draws.owner_of(seat)),
            seats=seats.seen_by(uid, seat),
            seat_queue=seats.queue_seen_by(uid, seat),
            forecasts=forecast_errors(self.service.broker),
        )
        self.reply(replace(status, audit_file=str(self.service.audit.path)) if self.peer.admin else status)


class _Leases(Handler):
    async def post(self) -> None:
        self.reply(await self.service.create(self.peer, self.decode_body(LeaseRequest)))


class _Lease(Handler):
    async def get(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        if self.wants_fresh:
            await self.service.measure_now()
        self.reply(full_lease_status(self.service.broker, kernel))

    async def delete(self, lease_id: str) -> None:
        try:
            kernel = self.find(lease_id)
        except NotFoundError:
            pass  # a second release is no error
        else:
            async with self.audited_for_lease("release", kernel):
                await self.service.release(kernel)
        self.reply(Done())


class _Others(Handler):
    async def get(self, lease_id: str) -> None:
        text = self.get_query_argument("last_ms", "1000")
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= MAX_LAST_MS):
            raise BadRequestError(
                f"last_ms={text[:MAX_NAME]!r} is not allowed: give whole milliseconds from 1 to {MAX_LAST_MS}",
                reason="bad-period",
            )
        beside = [one for one in self.get_query_argument("with", "").split(",") if one]
        kernels = [self.find(one) for one in (lease_id, *beside)]
        self.reply(OthersUse(used_milli=await others_use_milli(self.service.broker, kernels, int(text))))


class _Attach(Handler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id, own=True)
        self.reply(await self.service.attach(self.peer, kernel, self.decode_body(AttachRequest)))


class _Detach(Handler):
    async def post(self, lease_id: str) -> None:
        await self.service.detach(self.find(lease_id, own=True))
        self.reply(Done())


class _Suspend(StreamHandler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)

        async def work() -> None:
            async with self.audited_for_lease("suspend", kernel):
                status = await self.service.residency.suspend(kernel, self.actor(kernel))
            self.reply(status)

        await self.run(work())


class _Events(StreamHandler):
    async def get(self) -> None:
        uid = None if self.peer.admin else self.peer.credentials.uid
        seat = self.service.seats.draws.of_token(self.peer.token)

        async def work() -> None:
            owner = self.service.seats.draws.owner_of(seat)
            lines = self.settings["status_stream"].follow(uid, seat, owner)
            async with aclosing(lines) as stream:
                async for status in stream:
                    await self.write_line({} if status is None else status)

        await self.run(work())


class _Resume(StreamHandler):
    async def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        request = self.decode_body(ResumeRequest)

        async def work() -> None:
            async with self.audited_for_lease("resume", kernel):
                status = await self.service.residency.resume(kernel, if_blocked=request.if_blocked)
            self.reply(status)

        await self.run(work())


class _Acquire(StreamHandler):
    async def post(self, lease_id: str) -> None:
        kernel = await self.service.access.find_own(self.peer, lease_id)
        request = self.decode_body(AcquireRequest)

        async def work() -> None:
            async with aclosing(self.service.residency.acquire(kernel, request)) as stream:
                async for progress in stream:
                    await self.write_line(progress)

        await self.run(work())


class _Follow(StreamHandler):
    async def post(self, lease_id: str) -> None:
        kernel = await self.service.access.find_own(self.peer, lease_id)

        async def work() -> None:
            async with aclosing(self.service.residency.follow(kernel)) as stream:
                async for news in stream:
                    await self.write_line(news)

        await self.run(work())


class _Gate(StreamHandler):
    _writes = False

    async def post(self, lease_id: str) -> None:
        kernel = await self.service.access.find_own(self.peer, lease_id)
        link = self.service.connect_gate(kernel, self.decode_body(GateHello))

        async def work() -> None:
            # The first line tells the extension that it is connected, and whether it must send pulses.
            await self.write_line(GateCommand(hears=self.settings["hears"]))
            link.stream = self
            while (command := await link.next()) is not None:
                await self.write_line(command)

        try:
            await self.run(work())
        finally:
            self.service.disconnect_gate(kernel, link)

    async def write_line(self, message: object) -> None:
        """Write one line; no keep-alive comes between its parts. Raises as `StreamHandler.write_line`."""
        self._writes = True
        try:
            await super().write_line(message)
        finally:
            self._writes = False

    def keep_alive(self) -> bool:
        """Write an empty command, unless a line is being written: this flush would replace its future, which would never be done."""
        connection: Any = self.request.connection
        if self._writes or connection.stream.closed() or connection.stream.writing():
            return False
        self.write(_KEEP_ALIVE)
        self.flush()
        return True

    def is_read(self) -> bool | None:
        """Whether the extension has read everything that was written; None if the operating system cannot tell."""
        connection: Any = self.request.connection
        if not self.settings["hears"] or connection.stream.socket is None:
            return None
        return not (connection.stream.writing() or unread(connection.stream.socket))


class _Answer(Handler):
    def post(self, lease_id: str) -> None:
        kernel = self.find(lease_id, own=True)
        self.service.answer(kernel, self.decode_body(GateAnswer))
        self.reply(Done())


def make_server(service: LeaseService, socket_path: str, *, more: Sequence[tuple[str, type[Handler]]] = ()) -> Server:
    """Return the server, not yet listening; `more` are routes beside those of leases."""
    shared = {"service": service, "socket_path": socket_path}
    application = web.Application(
        [
            ("/v1/ping", _Ping, shared),
            ("/v1/status", _Status, shared),
            ("/v1/events", _Events, shared),
            ("/v1/leases", _Leases, shared),
            (_LEASE, _Lease, shared),
            (_LEASE + "/others", _Others, shared),
            (_LEASE + "/attach", _Attach, shared),
            (_LEASE + "/detach", _Detach, shared),
            (_LEASE + "/acquire", _Acquire, shared),
            (_LEASE + "/follow", _Follow, shared),
            (_LEASE + "/suspend", _Suspend, shared),
            (_LEASE + "/resume", _Resume, shared),
            (_LEASE + "/gate", _Gate, shared),
            (_LEASE + "/answer", _Answer, shared),
            *((pattern, handler, shared) for pattern, handler in more),
            *((pattern, handler, shared) for pattern, handler in (*CONTROL_ROUTES, *METRICS_ROUTES, *ACCOUNT_ROUTES)),
        ],
        default_handler_class=_Missing,
        default_handler_args=shared,
        status_stream=StatusStream(service.broker, socket_path),
        log_lines=TokenBucket(LOG_LINES_PER_S, LOG_LINES_BURST),
        hears=detects_unread(),
        log_function=_log_request,
    )
    server = Server(
        application,
        max_header_size=DISCARDED_HEADER_BYTES,
        max_body_size=MAX_BODY_BYTES,
        max_buffer_size=MAX_BODY_BYTES * 2,
        chunk_size=READ_AT_ONCE,
        idle_connection_timeout=IDLE_S,
        body_timeout=BODY_S,
        payers=Payers(service.broker, service.seats),
        admin_gid=service.admin_gid,
    )
    register_collectors(service, server)
    return server


def _log_request(handler: web.RequestHandler) -> None:
    request: httputil.HTTPServerRequest = handler.request
    log.debug(
        "%s %s -> %d in %.1f ms", request.method, request.path, handler.get_status(), request.request_time() * 1000
    )
