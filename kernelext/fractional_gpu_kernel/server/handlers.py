"""The routes, below the server's base URL:

    GET  /jupyter-fractional-gpu/state                     the last state of the event stream, for a page that was just opened
    POST /jupyter-fractional-gpu/kernels/KERNEL/ACTION     suspend, resume, pin {"minutes": 30}, unpin: as `%gpu` does

Requests are signed in, authorised for `kernels` and XSRF-checked, as for each of Jupyter's own routes. An action is a call to the broker
in a thread; it ends when the browser closes the connection, which withdraws the ticket of a resume that waits. Errors are JSON with
`message` and `reason`, with the broker's own status.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import unstarted_broker
from fractional_gpu.protocol.errors import BadRequestError, ConflictError, FractionalGPUError
from fractional_gpu.protocol.messages import LeaseStatus, PinRequest

__all__ = ["handlers"]

_MOST_ACTIONS = 16  # under way at once: each holds a thread
_LONGEST_PIN_MIN = 7 * 24 * 60

Action = Callable[[BrokerClient, str], LeaseStatus]


class KernelLeases(Protocol):
    """The part of the extension's application that the routes use; the application documents these methods."""

    def state(self) -> dict[str, Any]: ...
    def lease_of(self, kernel_id: str) -> LeaseStatus: ...
    def token_of(self, kernel_id: str) -> str | None: ...


def handlers(app: KernelLeases) -> list[tuple[str, type[APIHandler], dict[str, Any]]]:
    """Return the routes for this application."""
    shared = {"app": app}
    return [
        (r"/jupyter-fractional-gpu/state", _State, shared),
        (r"/jupyter-fractional-gpu/kernels/(?P<kernel_id>[\w-]{1,200})/(?P<action>[a-z]{1,20})", _Action, shared),
    ]


class _Handler(APIHandler):
    auth_resource = "kernels"

    def initialize(self, app: KernelLeases) -> None:
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
