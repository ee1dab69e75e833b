"""Registers the functions that serve the routes, and creates the server. The route table and `handler` decide who may call a route."""

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace
from prometheus_client.exposition import choose_encoder
from tornado import httputil, web

from fractional_gpu import __version__
from fractional_gpu.broker.api import account_routes  # noqa: F401 - registers its routes
from fractional_gpu.broker.api.handler import (
    LOG_LINES_BURST,
    LOG_LINES_PER_S,
    Call,
    Described,
    Handler,
    HandlerContext,
    Text,
    serve,
)
from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.metrics_routes import register_collectors
from fractional_gpu.broker.api.server import DISCARDED_HEADER_BYTES, READ_AT_ONCE, Payers, Server
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.services.lease_control import others_use_milli
from fractional_gpu.broker.services.status import StatusStream, Viewer, full_lease_status, host_status
from fractional_gpu.protocol import routes
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.limits import BODY_S, IDLE_S, MAX_BODY_BYTES, PROTOCOL_VERSION
from fractional_gpu.protocol.messages import GateCommand, GateHello, MoveRequest, OthersUse, Pong
from fractional_gpu.protocol.names import describe_unprintable
from fractional_gpu.protocol.routes import EmptyRequest, FreshQuery, NoteRequest, OthersQuery
from fractional_gpu.protocol.seats import SeatRequest
from fractional_gpu.protocol.status import HostStatus, LeaseStatus

log = logging.getLogger(__name__)


def _viewer(call: Call[Any]) -> Viewer:
    draws = call.service.seats.draws
    seat = draws.of_token(call.peer.token)
    uid = call.peer.credentials.uid
    return Viewer(None if call.peer.admin else uid, seat, draws.owner_of(seat), caller=uid)


def _ping(call: Call[EmptyRequest]) -> Pong:
    simulated = call.service.broker.monitor.kind == "simulated"
    return Pong(version=__version__, protocol=PROTOCOL_VERSION, pid=os.getpid(), simulated=simulated)


async def _status(call: Call[FreshQuery]) -> HostStatus:
    if call.body.fresh:
        await call.service.measure_now()
    broker, seats, viewer = call.service.broker, call.service.seats, _viewer(call)
    return replace(
        host_status(broker, call.shared.socket_path, viewer),
        seats=seats.seen_by(viewer),
        seat_queue=seats.queue_seen_by(viewer),
        forecasts=list(broker.arbiter.forecasts.errors()),
        audit_file=str(call.service.audit.path) if call.peer.admin else "",
    )


async def _events(call: Call[EmptyRequest]) -> AsyncGenerator[Any, None]:
    async with aclosing(call.shared.statuses.follow(_viewer(call))) as statuses:
        async for status in statuses:
            yield {} if status is None else status


def _metrics(call: Call[EmptyRequest]) -> Text:
    encode, content_type = choose_encoder(call.handler.request.headers.get("Accept", ""))
    metrics = call.service.broker.metrics
    return Text(encode(metrics.full_registry if call.peer.admin else metrics.registry), content_type)


serve(routes.PING, _ping)
serve(routes.STATUS, _status)
serve(routes.EVENTS, _events)
serve(routes.CAPACITY, lambda call: call.service.seats.capacity())
serve(routes.METRICS, _metrics)


async def _show(call: Call[FreshQuery]) -> LeaseStatus:
    if call.body.fresh:
        await call.service.measure_now()
    return full_lease_status(call.service.broker, call.kernel)


async def _gate(call: Call[GateHello]) -> AsyncGenerator[GateCommand, None]:
    link = call.service.connect_gate(call.kernel, call.body)
    try:
        yield GateCommand()  # tells the extension that it is connected
        link.stream = call.handler
        while (command := await link.next()) is not None:
            yield command
    finally:
        call.service.disconnect_gate(call.kernel, link)


async def _move(call: Call[MoveRequest]) -> LeaseStatus:
    device = None if call.body.device is None else call.service.lease_control.device(call.body.device)
    return await call.service.residency.move(call.kernel, device)


async def _note(call: Call[NoteRequest]) -> LeaseStatus:
    broker, kernel, note = call.service.broker, call.kernel, call.body.note
    if found := describe_unprintable(note):
        raise BadRequestError(f"the note contains {found}; it must be one line of printable characters")
    kernel.facts = replace(kernel.facts, note=note)
    broker.records.save(kernel)
    await broker.writer.flushed()
    broker.note_change()
    return full_lease_status(broker, kernel)


async def _others(call: Call[OthersQuery]) -> OthersUse:
    without = [await call.service.find(call.peer, one) for one in call.body.without.split(",") if one]
    used_milli = await others_use_milli(call.service.broker, [call.kernel, *without], call.body.last_ms)
    return OthersUse(used_milli=used_milli)


serve(routes.CREATE, lambda call: call.service.create(call.peer, call.body))
serve(routes.SHOW, _show)
serve(routes.RELEASE, lambda call: call.service.broker.survivors.release(call.kernel))
serve(routes.ATTACH, lambda call: call.service.attach(call.peer, call.kernel, call.body))
serve(routes.DETACH, lambda call: call.service.detach(call.kernel))
serve(routes.ACQUIRE, lambda call: call.service.residency.acquire(call.kernel, call.body))
serve(routes.FOLLOW, lambda call: call.service.residency.follow(call.kernel))
serve(routes.GATE, _gate)
serve(routes.ANSWER, lambda call: call.service.answer(call.kernel, call.body))
serve(routes.SUSPEND, lambda call: call.service.residency.suspend(call.kernel, call.actor()))
serve(routes.RESUME, lambda call: call.service.residency.resume(call.kernel, if_blocked=call.body.if_blocked))
serve(routes.EXPECT, lambda call: call.service.lease_control.expect(call.kernel, call.body))
serve(routes.PIN, lambda call: call.service.lease_control.pin(call.kernel, call.body))
serve(routes.UNPIN, lambda call: call.service.lease_control.unpin(call.kernel, call.actor()))
serve(routes.NOTE, _note)
serve(routes.RESIZE, lambda call: call.service.lease_control.resize(call.kernel, call.body))
serve(routes.MOVE, _move)
serve(routes.EVICT, lambda call: call.service.evict(call.peer, call.kernel, call.body))
serve(
    routes.END,
    lambda call: call.service.end(call.kernel),
    lambda call: (call.about, {"processes": [one.identity.pid for one in call.kernel.ending.survivors]}),
)
serve(routes.STORY, lambda call: call.service.lease_control.story(call.kernel))
serve(routes.HISTORY, lambda call: call.service.lease_control.history(call.kernel))
serve(routes.OTHERS, _others)

serve(routes.DRAIN, lambda call: call.service.lease_control.drain(call.about, call.body))
serve(routes.UNDRAIN, lambda call: call.service.lease_control.undrain(call.about))


def _asked_seat(call: Call[SeatRequest]) -> Described:
    asked = call.body
    return _server(asked.owner, asked.server), {
        "pool": asked.pool,
        "fraction_milli": asked.fraction_milli,
        "memory_mib": asked.memory_mib,
        "server_uid": asked.uid,
    }


def _ended_seat(call: Call[EmptyRequest]) -> Described | None:
    seat = call.service.seats.find(call.about)
    return None if seat is None else (_server(seat.owner, seat.server), {"seat": seat.seat_id, "pool": seat.pool})


def _server(owner: str, server: str) -> str:
    return f"{owner}/{server}" if server else owner


serve(routes.OFFERS, lambda call: call.service.seats.offers(call.body))
serve(routes.SEATS, lambda call: call.service.seats.listing())
serve(routes.TAKE_SEAT, lambda call: call.service.seats.take(call.body), _asked_seat)
serve(routes.CONFIRM_SEAT, lambda call: call.service.seats.confirm(call.about))
serve(routes.RELEASE_SEAT, lambda call: call.service.seats.release(call.about), _ended_seat)
serve(routes.POOLS, lambda call: call.service.seats.pools.listing())
serve(
    routes.CHANGE_POOL,
    lambda call: call.service.seats.pools.change(call.about, call.body, uid=call.peer.credentials.uid),
    lambda call: (call.about, {"keys": call.body.keys}) if call.body.keys else None,
)


def make_server(service: LeaseService, socket_path: str) -> Server:
    shared = HandlerContext(
        service=service,
        socket_path=socket_path,
        statuses=StatusStream(service.broker, socket_path),
        log_lines=TokenBucket(LOG_LINES_PER_S, LOG_LINES_BURST),
    )
    server = Server(
        web.Application([(".*", Handler)], shared=shared, log_function=_log_request),
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
