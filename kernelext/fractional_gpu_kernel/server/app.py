"""The Jupyter server extension's application: its routes, its subscription to the broker, and the server's event stream."""

import asyncio
import json
import logging
from collections.abc import Callable, Container, Mapping
from datetime import UTC, datetime
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.application import ExtensionApp
from msgspec import to_builtins
from tornado import web
from tornado.ioloop import PeriodicCallback

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import unstarted_broker
from fractional_gpu.client.following import AsyncClient, follow
from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import RESTART, BadRequestError, ConflictError, FractionalGPUError, NotFoundError
from fractional_gpu.protocol.messages import ExpectRequest, PinRequest
from fractional_gpu.protocol.status import HostStatus, LeaseStatus
from fractional_gpu_kernel.display.views import TopView

log = logging.getLogger(__name__)

# The data for browsers. Memory is in MiB, fractions in milli-GPU and durations in ms. The event logger checks events against the schemas.

STATE_ID = "urn:jupyter-fractional-gpu:state:v1"
NOTICE_ID = "urn:jupyter-fractional-gpu:notice:v1"

_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_NUMBER_OR_NULL, _SPAN_OR_NULL = {"type": ["integer", "null"]}, {"type": ["object", "null"]}
_KERNEL_FIELDS = {
    **dict.fromkeys(("kernel_id", "state", "pool", "device_name", "reason", "sentence", "slowdown_brief"), _TEXT),
    **dict.fromkeys(("foresight", "budget", "lost_because"), _TEXT),
    **dict.fromkeys(("fraction_milli", "reserve_mib", "used_mib", "saved_mib", "pinned_ms"), _NUMBER),
    **dict.fromkeys(("measured", "simulated", "busy", "budget_used_up"), _FLAG),
    **dict.fromkeys(("position", "goes_away_in_ms", "host_goes_away_in_ms"), _NUMBER_OR_NULL),
    **dict.fromkeys(("expected", "resume"), _SPAN_OR_NULL),
}
_DEVICE_FIELDS = {
    **dict.fromkeys(("name", "pool"), _TEXT),
    **dict.fromkeys(("index", "memory_mib", "used_mib", "reserved_mib", "leases_saved", "leases_lost"), _NUMBER),
    **dict.fromkeys(("over_committed", "lost", "draining"), _FLAG),
    "goes_away_in_ms": _NUMBER_OR_NULL,
}
_STEP_PERCENT = 5  # the demand on a device is rounded, so that not every measurement causes an event


def _items(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


_HOLDERS = {"type": "array", "items": _TEXT}
_DEVICE = _items({**_DEVICE_FIELDS, "demand_percent": _NUMBER, "holders": _HOLDERS})

STATE_SCHEMA: Mapping[str, Any] = {
    "$id": STATE_ID,
    "version": "1",
    "title": "The GPU kernels of this server",
    "description": "The full state, whenever something changed. Without a broker, it has no devices and no kernels.",
    "personal-data": True,
    "type": "object",
    "required": ["broker", "simulated", "kernels", "devices"],
    "properties": {
        "broker": {"type": "boolean"},
        "simulated": {"type": "boolean"},
        "kernels": {"type": "array", "items": _items(_KERNEL_FIELDS)},
        "devices": {"type": "array", "items": _DEVICE},
    },
}
NOTICE_SCHEMA: Mapping[str, Any] = {
    "$id": NOTICE_ID,
    "version": "1",
    "title": "A notice about a kernel that is not shown elsewhere",
    "description": "A kernel that could not be restarted, or that was started without a GPU.",
    "personal-data": True,
    "type": "object",
    "required": ["kernel_id", "sentence"],
    "properties": {"kernel_id": {"type": "string"}, "sentence": {"type": "string"}},
}


def state(status: HostStatus | None, kernel_ids: Container[str]) -> dict[str, Any]:
    if status is None:
        return {"broker": False, "simulated": False, "kernels": [], "devices": []}
    return {
        "broker": True,
        "simulated": status.simulated,
        "kernels": [_kernel_of(lease) for lease in status.leases if lease.kernel_id in kernel_ids],
        "devices": [
            {
                **{name: getattr(device, name) for name in _DEVICE_FIELDS},
                "demand_percent": _STEP_PERCENT * round(device.demand_milli / 10 / _STEP_PERCENT),
                "holders": [f"{who}: {share}, {what}" for share, who, what in TopView(status).tenants(device)],
            }
            for device in status.devices
        ],
    }


def _kernel_of(status: LeaseStatus) -> dict[str, Any]:
    lease = to_builtins(status.lease)
    own = {name: getattr(status, name) for name in ("pinned_ms", "goes_away_in_ms")}
    known = {**lease["spec"], **lease, **to_builtins(status), **own, "slowdown_brief": status.slowdown.brief}
    return {name: known[name] for name in _KERNEL_FIELDS}


# The routes, below the server's base URL:
#
#     GET  /jupyter-fractional-gpu/state                     the last state in the event stream, for a newly opened page
#     GET  /jupyter-fractional-gpu/kernels/KERNEL/advice     advice about the kernel's share, for a newly opened panel
#     POST /jupyter-fractional-gpu/kernels/KERNEL/ACTION     suspend, resume, pin {"minutes": 30} or unpin, as with `%gpu`
#     POST /jupyter-fractional-gpu/kernels/KERNEL/expect     {"sign": "typing"}: the next cell will run soon (but nothing about the cell)
#
# Requests are authenticated, authorised for `kernels` and checked for XSRF. When the browser disconnects, the action ends, and the ticket
# of a waiting resume is withdrawn. Errors are JSON with `message` and `reason`, with the HTTP status from the broker.

_MOST_ACTIONS = 16  # at the same time, because each action has a thread
_LONGEST_PIN_MIN = 7 * 24 * 60
_SIGN_MS = 60_000
_KERNEL = r"/jupyter-fractional-gpu/kernels/(?P<kernel_id>[\w-]{1,200})/"

Action = Callable[[BrokerClient, str], LeaseStatus | None]


class _Handler(APIHandler):
    auth_resource = "kernels"
    under_way = 0  # the number of actions in progress, over all requests
    _call: asyncio.Task[LeaseStatus | None] | None = None

    def initialize(self, app: "FractionalGPUApp") -> None:
        super().initialize()
        self.app = app

    def on_connection_close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        super().on_connection_close()

    async def _answer(
        self, kernel_id: str, name: str, write: Callable[[LeaseStatus | None], Mapping[str, object]]
    ) -> None:
        try:
            action = BrokerClient.lease if name == "advice" else _action(name, self.get_json_body() or {})
            lease = self.app.lease_of(kernel_id)
            if _Handler.under_way >= _MOST_ACTIONS:
                raise ConflictError(f"{_MOST_ACTIONS} actions are in progress on this server; wait for one to end")
            token = self.app.token_of(kernel_id)
            client = AsyncClient(lambda: unstarted_broker(token=token).because_of(f"`{name}` in JupyterLab"))
            _Handler.under_way += 1
            try:
                self._call = asyncio.create_task(client.call(lambda one: action(one, lease.lease_id)))
                await asyncio.wait([self._call])
                answer = write(None if self._call.cancelled() else self._call.result())
            finally:
                _Handler.under_way -= 1
        except FractionalGPUError as error:
            self.set_status(error.status)
            answer = {"message": str(error), "reason": error.reason}
        await self.finish(json.dumps(answer))


class _State(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        await self.finish(json.dumps(self.app.state()))


class _Action(_Handler):
    @web.authenticated
    @authorized
    async def post(self, kernel_id: str, action: str) -> None:
        await self._answer(
            kernel_id, action, lambda lease: {} if lease is None else {"state": lease.state, "sentence": lease.sentence}
        )


class _Advice(_Handler):
    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        await self._answer(
            kernel_id, "advice", lambda lease: {"sentence": lease.advice.sentence if lease and lease.advice else ""}
        )


def _action(name: str, body: object) -> Action:
    if not isinstance(body, Mapping):
        raise BadRequestError(f"the body is of type {type(body).__name__}; expected an object")
    known = {"pin": ["minutes"], "expect": ["sign"]}.get(name, [])
    for key in body:
        if key not in known:
            raise BadRequestError(
                f"{name} does not accept {str(key)[:80]!r}; it accepts: {', '.join(known) or 'nothing'}"
            )
    if name == "pin":
        minutes = body.get("minutes")
        if isinstance(minutes, bool) or not isinstance(minutes, int) or not 1 <= minutes <= _LONGEST_PIN_MIN:
            raise BadRequestError(f"minutes is {str(minutes)[:80]!r}; expected 1 to {_LONGEST_PIN_MIN}")
        request = PinRequest(duration_ms=minutes * 60_000)
        return lambda client, lease_id: client.pin(lease_id, request)
    if name == "expect":
        sign = ExpectRequest(sign=str(body.get("sign", "")), within_ms=_SIGN_MS)  # the broker checks the sign
        return lambda client, lease_id: client.expect(lease_id, sign)
    actions: dict[str, Action] = {
        "suspend": BrokerClient.suspend,
        "resume": BrokerClient.resume,
        "unpin": BrokerClient.unpin,
    }
    if name not in actions:
        raise BadRequestError(f"there is no action named {name!r}; choose one of: expect, pin, {', '.join(actions)}")
    return actions[name]


_LISTING_STEP_S = 0.05
_LISTING_STEPS = 100
_HOLDING = frozenset({"resident", "suspending", "suspended", "resuming"})
_SPARE_MS = 5_000
_KERNEL_ACTIONS = "https://events.jupyter.org/jupyter_server/kernel_actions/v1"


def _broker() -> BrokerClient:
    seat = own_seat()
    return unstarted_broker(token=None if seat is None else seat.token)


class FractionalGPUApp(ExtensionApp):
    name = "jupyter_fractional_gpu"
    load_other_extensions = True

    serverapp: Any

    def initialize_settings(self) -> None:
        self._status: HostStatus | None = None
        self._emitted: dict[str, Any] | None = None
        self._following: asyncio.Task[None] | None = None
        self._complaint = ""
        for schema in (STATE_SCHEMA, NOTICE_SCHEMA):
            self.serverapp.event_logger.register_event_schema(dict(schema))

    def initialize_handlers(self) -> None:
        shared = {"app": self}
        self.handlers.append((r"/jupyter-fractional-gpu/state", _State, shared))
        self.handlers.append((_KERNEL + "advice", _Advice, shared))
        self.handlers.append((_KERNEL + "(?P<action>[a-z]{1,20})", _Action, shared))

    async def _start_jupyter_server_extension(self, _serverapp: Any) -> None:  # noqa: ANN401 - jupyter_server's signature
        self.serverapp.event_logger.add_listener(schema_id=_KERNEL_ACTIONS, listener=self._kernel_acted)
        self._following = asyncio.create_task(follow(AsyncClient(_broker), self._take, self._lost))
        self._sparing = PeriodicCallback(self._spare_holders, _SPARE_MS)
        self._sparing.start()

    async def stop_extension(self) -> None:
        if self._following is not None:
            self._sparing.stop()
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        return state(self._status, set(self.serverapp.kernel_manager.list_kernel_ids()))

    def lease_of(self, kernel_id: str) -> LeaseStatus:
        """Return the kernel's lease. Raises NotFoundError if this server has no such kernel, and ConflictError if it has no lease."""
        if not self._is_ours(kernel_id):
            raise NotFoundError("this server has no such kernel; it may have been shut down", reason="unknown-kernel")
        leases = self._status.leases if self._status is not None else []
        for lease in leases:
            if lease.kernel_id == kernel_id:
                return lease
        raise ConflictError(f"this kernel has no GPU lease at the moment; to get one {RESTART}", reason="no-lease")

    def token_of(self, kernel_id: str) -> str | None:
        """Return the lease's token if the kernel's provisioner has one, otherwise the token of this server's seat.

        Raises FractionalGPUError.
        """
        token: str | None = getattr(self._provisioner(kernel_id), "gpu_token", None)
        seat = own_seat() if token is None else None
        return token if seat is None else seat.token

    def _provisioner(self, kernel_id: str) -> object:
        if not self._is_ours(kernel_id):
            return None
        return getattr(self.serverapp.kernel_manager.get_kernel(kernel_id), "provisioner", None)

    def _is_ours(self, kernel_id: str) -> bool:
        return kernel_id in self.serverapp.kernel_manager

    def _spare_holders(self) -> None:
        """If the broker culls idle kernels itself, make this server and any of its kernels with GPU state look active to other cullers."""
        if self._status is None or not self._status.culls_idle:
            return
        for lease in self._status.leases:
            if lease.state in _HOLDING and self._is_ours(lease.kernel_id):
                now = datetime.now(UTC)
                self.serverapp.kernel_manager.get_kernel(lease.kernel_id).last_activity = now
                self.serverapp.web_app.settings["last_activity_times"][self.name] = now

    def _take(self, status: HostStatus) -> None:
        self._status, self._complaint = status, ""
        self._emit_state()

    def _lost(self, error: FractionalGPUError) -> None:
        """Clear the status after the connection is lost. `follow` keeps reconnecting, because new brokers do not announce themselves."""
        if error.reason not in {"no-broker", "hung-up"} and str(error) != self._complaint:
            self._complaint = str(error)
            log.info("GPU status: %s", error)
        if self._status is not None:
            self._status = None
            self._emit_state()

    def _emit_state(self) -> None:
        now = self.state()
        if now != self._emitted:
            self._emitted = now
            self.serverapp.event_logger.emit(schema_id=STATE_ID, data=now)

    async def _kernel_acted(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:  # noqa: ANN401, ARG002 - jupyter_events' signature
        """Emit the new state when a kernel starts, restarts or ends, along with the kernel's notice, if any."""
        kernel_id, action = data.get("kernel_id", ""), data["action"]
        if action == "start" and data.get("status") == "success":
            for _ in range(_LISTING_STEPS):  # the kernel manager lists the kernel a moment after this event
                if self._is_ours(kernel_id):
                    break
                await asyncio.sleep(_LISTING_STEP_S)
        self._emit_state()
        provisioner = self._provisioner(kernel_id)
        notice = getattr(provisioner, "gpu_notice", None)
        if action not in ("start", "restart") or notice is None:
            return  # this kernel does not use our provisioner
        if data.get("status") == "error" and action == "restart":
            notice = f"The kernel could not be restarted: {data['msg']}"
        if notice:
            self.serverapp.event_logger.emit(schema_id=NOTICE_ID, data={"kernel_id": kernel_id, "sentence": notice})
