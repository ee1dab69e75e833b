"""The extension's application and its routes: connects the subscription to the broker with the server's event stream.

Everything but the subscription runs on the server's loop.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from jupyter_events import EventLogger
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp
from tornado import web

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import unstarted_broker
from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import RESTART, BadRequestError, ConflictError, FractionalGPUError, NotFoundError
from fractional_gpu.protocol.messages import HostStatus, LeaseStatus, PinRequest
from fractional_gpu_kernel.server.follower import (
    NOTICE_ID,
    NOTICE_SCHEMA,
    STATE_ID,
    STATE_SCHEMA,
    StatusFollower,
    state,
)

# -- handlers ----------------------------------------------------------------------------------------------------------
# The routes, below the server's base URL:
#
#     GET  /jupyter-fractional-gpu/state                     the last state of the event stream, for a page that was just opened
#     POST /jupyter-fractional-gpu/kernels/KERNEL/ACTION     suspend, resume, pin {"minutes": 30}, unpin: as `%gpu` does
#
# Requests are signed in, authorised for `kernels` and XSRF-checked, as for each of Jupyter's own routes. An action is a call to the broker
# in a thread; it ends when the browser closes the connection, which withdraws the ticket of a resume that waits. Errors are JSON with
# `message` and `reason`, with the broker's own status.


_MOST_ACTIONS = 16  # under way at once: each holds a thread
_LONGEST_PIN_MIN = 7 * 24 * 60

Action = Callable[[BrokerClient, str], LeaseStatus]


def handlers(app: "FractionalGPUApp") -> list[tuple[str, type[APIHandler], dict[str, Any]]]:
    """Return the routes for this application."""
    shared = {"app": app}
    return [
        (r"/jupyter-fractional-gpu/state", _State, shared),
        (r"/jupyter-fractional-gpu/kernels/(?P<kernel_id>[\w-]{1,200})/(?P<action>[a-z]{1,20})", _Action, shared),
    ]


class _Handler(APIHandler):
    auth_resource = "kernels"

    def initialize(self, app: "FractionalGPUApp") -> None:
        super().initialize()
        self.app = app


class _State(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        await self.finish(json.dumps(self.app.state()))


class _Action(_Handler):
    under_way = 0
    _client: BrokerClient | None = None

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str, action: str) -> None:
        try:
            lease = await self._call(kernel_id, action)
        except FractionalGPUError as error:
            self.set_status(error.status)
            await self.finish(json.dumps({"message": str(error), "reason": error.reason}))
        else:
            await self.finish(json.dumps({"state": lease.state, "sentence": lease.sentence}))

    def on_connection_close(self) -> None:
        if self._client is not None:
            self._client.close()
        super().on_connection_close()

    async def _call(self, kernel_id: str, name: str) -> LeaseStatus:
        action = _action(name, self.get_json_body() or {})
        lease = self.app.lease_of(kernel_id)
        if _Action.under_way >= _MOST_ACTIONS:
            raise ConflictError(f"{_MOST_ACTIONS} actions are under way on this server; wait for one to end")
        self._client = unstarted_broker(token=self.app.token_of(kernel_id))
        _Action.under_way += 1
        try:
            with self._client as client:
                return await asyncio.to_thread(action, client, lease.lease_id)
        finally:
            _Action.under_way -= 1


def _action(name: str, body: object) -> Action:
    """Return the call to make. Raises BadRequestError."""
    if not isinstance(body, Mapping):
        raise BadRequestError(f"the body is {type(body).__name__}; allowed: an object")
    known = ["minutes"] if name == "pin" else []
    for key in body:
        if key not in known:
            raise BadRequestError(f"{name} takes no {str(key)[:80]!r}; allowed: {', '.join(known) or 'nothing'}")
    if name == "pin":
        minutes = body.get("minutes")
        if isinstance(minutes, bool) or not isinstance(minutes, int) or not 1 <= minutes <= _LONGEST_PIN_MIN:
            raise BadRequestError(f"minutes is {str(minutes)[:80]!r}; allowed: 1 to {_LONGEST_PIN_MIN}")
        request = PinRequest(duration_ms=minutes * 60_000)
        return lambda client, lease_id: client.pin(lease_id, request)
    actions: dict[str, Action] = {
        "suspend": BrokerClient.suspend,
        "resume": BrokerClient.resume,
        "unpin": BrokerClient.unpin,
    }
    if name not in actions:
        raise BadRequestError(f"there is no action {name!r}; allowed: pin, {', '.join(actions)}")
    return actions[name]


# -- app ---------------------------------------------------------------------------------------------------------------


_LISTING_STEP_S = 0.05
_LISTING_STEPS = 100
_KERNEL_ACTIONS = "https://events.jupyter.org/jupyter_server/kernel_actions/v1"


class FractionalGPUApp(ExtensionApp):
    """Passes the broker's status on to browsers."""

    name = "jupyter_fractional_gpu"
    load_other_extensions = True

    @property
    def _server(self) -> ServerApp:
        if self.serverapp is None:
            raise RuntimeError("the extension was not loaded into a server")
        return self.serverapp

    @property
    def _events(self) -> EventLogger:
        events: EventLogger | None = self._server.event_logger
        if events is None:
            raise RuntimeError("the server has no event stream yet")
        return events

    def initialize_settings(self) -> None:
        """Register what will be emitted."""
        self._status: HostStatus | None = None
        self._emitted: dict[str, Any] | None = None
        self._follower: StatusFollower | None = None
        for schema in (STATE_SCHEMA, NOTICE_SCHEMA):
            self._events.register_event_schema(dict(schema))

    def initialize_handlers(self) -> None:
        """Add the routes."""
        self.handlers.extend(handlers(self))

    async def _start_jupyter_server_extension(self, _serverapp: Any) -> None:  # noqa: ANN401 - jupyter_server's signature
        """Subscribe, now that the loop runs."""
        loop = asyncio.get_running_loop()

        def on_status(status: HostStatus | None) -> None:
            loop.call_soon_threadsafe(self._take, status)

        self._events.add_listener(schema_id=_KERNEL_ACTIONS, listener=self._kernel_acted)
        self._follower = StatusFollower(on_status)
        self._follower.start()

    async def stop_extension(self) -> None:
        """Close the subscription."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)

    def state(self) -> dict[str, Any]:
        """Return the state that browsers should show now."""
        return state(self._status, set(self._server.kernel_manager.list_kernel_ids()))

    def lease_of(self, kernel_id: str) -> LeaseStatus:
        """Return the lease of a kernel of this server. Raises NotFoundError, or ConflictError for one without a lease."""
        if not self._is_ours(kernel_id):
            raise NotFoundError("this server has no such kernel; it may have been shut down", reason="unknown-kernel")
        leases = self._status.leases if self._status is not None else []
        for lease in leases:
            if lease.kernel_id == kernel_id:
                return lease
        raise ConflictError(f"this kernel has no GPU lease now; to get one {RESTART}", reason="no-lease")

    def token_of(self, kernel_id: str) -> str | None:
        """Return the lease's token if the kernel's provisioner holds it, else the token of this server's seat.

        A token allows what the uid alone does not.

        Raises FractionalGPUError for a seat that cannot be read.
        """
        token: str | None = getattr(self._provisioner(kernel_id), "gpu_token", None)
        seat = own_seat() if token is None else None
        return token if seat is None else seat.token

    def _provisioner(self, kernel_id: str) -> object:
        if not self._is_ours(kernel_id):
            return None
        return getattr(self._server.kernel_manager.get_kernel(kernel_id), "provisioner", None)

    def _is_ours(self, kernel_id: str) -> bool:
        return kernel_id in self._server.kernel_manager

    async def _until_ours(self, kernel_id: str) -> None:
        """Wait for up to 5 s until the kernel manager lists a kernel: it does so a moment after its event `start`."""
        for _ in range(_LISTING_STEPS):
            if self._is_ours(kernel_id):
                return
            await asyncio.sleep(_LISTING_STEP_S)

    def _take(self, status: HostStatus | None) -> None:
        self._status = status
        self._emit_state()

    def _emit_state(self) -> None:
        """Emit the state if it differs from the last one emitted."""
        now = self.state()
        if now != self._emitted:
            self._emitted = now
            self._events.emit(schema_id=STATE_ID, data=now)

    async def _kernel_acted(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:  # noqa: ANN401, ARG002 - jupyter_events' signature
        """A kernel has started, restarted or ended: the set of this server's kernels changed, and some kernels have a notice."""
        kernel_id, action = data.get("kernel_id", ""), data["action"]
        if action == "start" and data.get("status") == "success":
            await self._until_ours(kernel_id)
        self._emit_state()
        provisioner = self._provisioner(kernel_id)
        notice = getattr(provisioner, "gpu_notice", None)
        if action not in ("start", "restart") or notice is None:
            return  # its provisioner is not ours
        if data.get("status") == "error" and action == "restart":
            notice = f"The kernel could not be restarted: {data['msg']}"
        if notice:
            self._events.emit(schema_id=NOTICE_ID, data={"kernel_id": kernel_id, "sentence": notice})
