"""Serves every route in `protocol.routes`: identifies and authorizes the peer, then decodes, audits and answers the request.

The peer's uid and pid come from the operating system (SO_PEERCRED), so a client cannot forge them. Decoding is strict: if a newer client
sends an unknown field, the request fails with an error that names the client's and the broker's versions.
"""

import asyncio
import http
import inspect
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from tornado import iostream, web

from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.api.server import MeteredStream, bearer, close_if_unread, find_route
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.cost import metered
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.lanes import PAYER
from fractional_gpu.broker.persistence.audit import AuditedAction, is_of_another_user
from fractional_gpu.broker.services.status import StatusStream
from fractional_gpu.host.accounts import account_uid, user_name
from fractional_gpu.host.peers import unread
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol import routes
from fractional_gpu.protocol.codec import decode_query, decode_request, error_body, printable
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
from fractional_gpu.protocol.messages import Done, GateCommand, ProgressKind
from fractional_gpu.protocol.names import ACTING_FOR, CAUSE, decode_acting_for, refusal
from fractional_gpu.protocol.routes import ADMIN, KERNEL, Route

log = logging.getLogger(__name__)
Request = TypeVar("Request", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=msgspec.Struct)
_CAUSE = re.compile(r"[\w`% ]{1,60}", re.ASCII)
_KEEP_ALIVE = msgspec.json.encode(GateCommand()) + b"\n"

LOG_LINES_PER_S, LOG_LINES_BURST = 1.0, 100.0  # log lines about one user's refused requests


@dataclass(slots=True)
class HandlerContext:
    service: LeaseService
    socket_path: str
    statuses: StatusStream
    log_lines: TokenBucket


class Call(Generic[Request]):
    """One request, as passed to the function that serves its route. `about` is the lease, seat, device or pool named in the path."""

    kernel: Kernel  # only set on a lease's routes; the peer may use this kernel

    def __init__(self, handler: "Handler", about: str, body: Request) -> None:
        self.handler = handler
        self.shared = handler.shared
        self.service = handler.shared.service
        self.peer = handler.peer
        self.about = about
        self.body = body

    def actor(self) -> str:
        view = self.service.broker.arbiter.lease(self.kernel.lease_id)
        name, cause = self.peer.acting_for, self.handler.request.headers.get(CAUSE, "")
        cause = cause if _CAUSE.fullmatch(cause) else ""
        if view is None or name == view.spec.owner or not is_of_another_user(self.peer, self.kernel, view):
            return cause or "a request by its user"
        return f"{cause or 'a request'} by administrator {name or user_name(self.peer.credentials.uid)}"


class Text(NamedTuple):
    body: bytes
    content_type: str


Described = tuple[str, dict[str, Any]]


class _RouteHandler(NamedTuple):
    function: Callable[[Call[Any]], Any]
    describe: Callable[[Call[Any]], Described | None]


_SERVED: dict[Route[Any, Any], _RouteHandler] = {}


def _describe(call: Call[Any]) -> Described:
    return call.about, msgspec.to_builtins(call.body)


def serve(
    route: Route[Request, Reply],
    function: Callable[
        [Call[Request]], Reply | Text | Awaitable[Reply | Text | None] | AsyncGenerator[Reply, None] | None
    ],
    describe: Callable[[Call[Request]], Described | None] = _describe,
) -> None:
    """Register the function that serves a route.

    The function returns a reply, returns None to reply with `Done`, or yields lines until the client disconnects. `describe` returns the
    audit log entry. If it returns None, nothing is logged.
    """
    _SERVED[route] = _RouteHandler(function, describe)


class Handler(web.RequestHandler):
    peer: Peer
    route: Route[Any, Any] | None = None
    _about = ""
    _work: asyncio.Task[None] | None = None
    _writes = False

    def initialize(self) -> None:
        self.shared: HandlerContext = self.settings["shared"]

    def prepare(self) -> None:
        self.shared.service.broker.last_use_s = time.monotonic()
        stream, token = self.stream, bearer(self.request.headers)
        self.peer = Peer(credentials=stream.credentials, token=token or None, admin=stream.admin)
        if token == "":
            raise UnauthorizedError("the Authorization header must have the form `Bearer TOKEN`")
        self.peer = replace(self.peer, acting_for=self._acting_for(admin=stream.admin))
        self.route, self._about = find_route(str(self.request.method), self.request.path)
        client = self.request.headers.get(VERSION_HEADER)
        if client is not None and self.route is not routes.PING and (why := refusal(client=client)):  # any may ping
            raise BadRequestError(why, reason="version")
        if self.route is None:
            raise self._no_route()

    def set_default_headers(self) -> None:
        self.set_header("Server", "jupyter-fractional-gpu")

    @property
    def stream(self) -> MeteredStream:
        connection: Any = self.request.connection
        stream: MeteredStream = connection.stream
        return stream

    async def _execute(self, transforms: list[web.OutputTransform], *args: bytes, **kwargs: bytes) -> None:
        charge = self.stream.account.charge
        PAYER.set(charge)
        await metered(super()._execute(transforms, *args, **kwargs), charge)

    def _acting_for(self, *, admin: bool) -> str | None:
        values = self.request.headers.get_list(ACTING_FOR)
        if values and not admin:
            raise ForbiddenError(
                f"only an administrator (root, the user who runs the broker, or a member of its admin_group) may send {ACTING_FOR}; "
                "leave it out",
                reason="not-admin",
            )
        return decode_acting_for(values)

    def _no_route(self) -> FractionalGPUError:
        if any(find_route(other, self.request.path)[0] for other in ("GET", "POST", "DELETE")):
            return _error_for(http.HTTPStatus.METHOD_NOT_ALLOWED)
        return _error_for(http.HTTPStatus.NOT_FOUND)

    async def _serve(self) -> None:
        route = self.route
        if route is None:
            raise RuntimeError("`prepare` refuses these")
        call = Call[Any](self, self._about, None)
        if route.path.startswith("/v1/leases/"):
            try:
                call.kernel = await self.shared.service.find(self.peer, call.about, own=route.who == KERNEL)
            except NotFoundError:
                if route is not routes.RELEASE:
                    raise
                self.reply(Done())  # a second release is not an error
                return
        if route.who == ADMIN and not self.peer.admin:
            raise ForbiddenError(
                f"uid {self.peer.credentials.uid} may not do this: only an administrator may (root, the user who runs the broker, or a "
                "member of its admin_group)",
                reason="not-admin",
            )
        if route.method == "GET":
            query = {name: self.get_query_argument(name, strip=False) for name in self.request.query_arguments}
            call.body = decode_query(query, route.request_type)
        else:
            call.body = decode_request(self.request.body, route.request_type)
        wait_s = _preferred_wait_s(self.request.headers.get("Prefer", "")) if route is routes.ACQUIRE else None
        if wait_s is not None:
            work = self._answer_within(route, call, wait_s)
        else:
            work = self._write_lines(route, call) if route.lines else self._answer(route, call)
        if route.lines or route.withdraws:
            await self._while_connected(work)
        else:
            await work

    get = post = delete = put = patch = head = options = _serve

    async def _answer(self, route: Route[Any, Any], call: Call[Any]) -> None:
        async with self._audited(route, call):
            reply = _SERVED[route].function(call)
            if inspect.isawaitable(reply):
                reply = await reply
        # Reply only once the outcome is in the audit log.
        if isinstance(reply, Text):
            self.reply_with(*reply)
        else:
            self.reply(Done() if reply is None else reply)

    async def _answer_within(self, route: Route[Any, Any], call: Call[Any], wait_s: int) -> None:
        """Reply within `wait_s` seconds with just the last line of a stream, as requested by the `Prefer: wait=N` header (RFC 7240)."""
        if call.body.hold or call.body.watch:
            raise BadRequestError(
                "`hold` and `watch` need a streamed reply; leave them out, or leave out the Prefer header"
            )
        call.body = msgspec.structs.replace(call.body, wait_ms=min(wait_s * 1000, call.body.wait_ms))
        async with aclosing(_SERVED[route].function(call)) as lines:
            async for line in lines:
                last = line
        self.set_header("Preference-Applied", f"wait={wait_s}")
        self.reply(last)

    async def _write_lines(self, route: Route[Any, Any], call: Call[Any]) -> None:
        last = None
        async with self._audited(route, call) as act, aclosing(_SERVED[route].function(call)) as lines:
            async for line in lines:
                if act is None or line.kind == ProgressKind.WAITING:
                    await self.write_line(line)
                    continue
                last = line
                if line.kind == ProgressKind.REFUSED:
                    act.refused(line.reason, line.sentence)
        if last is not None:
            await self.write_line(last)

    def _audited(self, route: Route[Any, Any], call: Call[Any]) -> AbstractAsyncContextManager[AuditedAction | None]:
        """Audit an administrator's action and its outcome. Actions on their own leases that any user could take are not audited."""
        if not route.audited or not self.peer.admin or (described := _SERVED[route].describe(call)) is None:
            return nullcontext()
        target, parameters = described
        if route.path.startswith("/v1/leases/"):
            view = self.shared.service.broker.arbiter.lease(call.kernel.lease_id)
            if view is None or not (route.who == ADMIN or is_of_another_user(self.peer, call.kernel, view)):
                return nullcontext()
            parameters = {"owner": view.spec.owner, **parameters}
        return self.shared.service.audit.act(route.audited, target, self.peer, parameters)

    async def _while_connected(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._work = work = asyncio.create_task(metered(coroutine, self.stream.account.charge))
        try:
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()
        except iostream.StreamClosedError:
            pass
        finally:
            work.cancel()

    def on_connection_close(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def reply(self, message: object) -> None:
        self.reply_with(msgspec.json.encode(message), "application/json")

    def reply_with(self, body: bytes, content_type: str) -> None:
        self.set_header("Content-Type", content_type)
        close_if_unread(self.stream, self.finish(body), TAKEN_S)

    async def write_line(self, message: object) -> None:
        """Write one line of a stream. Raises StreamClosedError if the peer disconnects or reads too slowly."""
        self._writes = True
        self.write(msgspec.json.encode(message) + b"\n")
        try:
            async with asyncio.timeout(TAKEN_S):
                await self.flush()
        except TimeoutError:
            self.stream.close()
            raise iostream.StreamClosedError from None
        finally:
            self._writes = False

    def keep_alive(self) -> bool:
        """Write an empty line and return True. If the connection is closed or still busy with another line, just return False."""
        if self._writes or self.stream.closed() or self.stream.writing():
            return False
        self.write(_KEEP_ALIVE)
        self.flush()
        return True

    def is_read(self) -> bool | None:
        """Return whether the peer has read everything written to it, or None if the operating system cannot tell."""
        if self.stream.closed():
            return None
        with suppress(OSError):  # some systems that emulate Linux
            return not (self.stream.writing() or unread(self.stream.socket))
        return None

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, LedgerError):
            error = InternalBrokerError(str(error), reason="ledger")
        elif not isinstance(error, FractionalGPUError):
            error = _error_for(status_code)
        self.set_status(error.status)
        if isinstance(error, TooManyRequestsError):
            self.set_header("Retry-After", str(round(error.retry_s)))
        self.reply(error_body(error))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if isinstance(value, FractionalGPUError | web.HTTPError):
            peer = getattr(self, "peer", None)
            if peer is None or self.shared.log_lines.take(account_uid(peer.credentials.uid)) == 0:
                target = printable(self.request.path[:MAX_NAME])
                log.info("%s %s refused: %s", self.request.method, target, printable(str(value))[:500])
        elif not isinstance(value, iostream.StreamClosedError):
            log.error("%s %s failed", self.request.method, self.request.path, exc_info=(typ, value, tb))


def _preferred_wait_s(prefer: str) -> int | None:
    found = re.search(r"(?:^|[,;])\s*wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", prefer, re.ASCII | re.IGNORECASE)
    return int(found[1]) if found else None


def _error_for(status: int) -> FractionalGPUError:
    if status == http.HTTPStatus.NOT_FOUND:
        return NotFoundError("unknown route; docs/routes.md lists the routes", reason="unknown-route")
    if status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        return BadRequestError("this route does not accept that method", reason="bad-method")
    if 400 <= status < 500:
        return BadRequestError("the request is malformed")
    return InternalBrokerError("the broker failed; see its log")
