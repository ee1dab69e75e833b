"""The extension's application: it joins the subscription, the event stream and the routes.

Everything but the subscription runs on the server's loop.
"""

import asyncio
from typing import Any

from jupyter_events import EventLogger
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp

from fractional_gpu.client.seat import own_seat
from fractional_gpu.protocol.errors import RESTART, ConflictError, NotFoundError
from fractional_gpu.protocol.messages import HostStatus, LeaseStatus
from fractional_gpu_kernel.server.follower import Follower
from fractional_gpu_kernel.server.handlers import handlers
from fractional_gpu_kernel.server.news import (
    NOTICE_ID,
    NOTICE_SCHEMA,
    STATE_ID,
    STATE_SCHEMA,
    state,
)

__all__ = ["FractionalGPUApp"]

_LISTING_STEP_S = 0.05
_LISTING_STEPS = 100
_KERNEL_ACTIONS = "https://events.jupyter.org/jupyter_server/kernel_actions/v1"


class FractionalGPUApp(ExtensionApp):
    """Tells browsers what the broker tells this server."""

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
        self._told: dict[str, Any] | None = None
        self._follower: Follower | None = None
        for schema in (STATE_SCHEMA, NOTICE_SCHEMA):
            self._events.register_event_schema(dict(schema))

    def initialize_handlers(self) -> None:
        """Add the routes."""
        self.handlers.extend(handlers(self))

    async def _start_jupyter_server_extension(self, _serverapp: Any) -> None:  # noqa: ANN401 - jupyter_server's signature
        """Subscribe, now that the loop runs."""
        loop = asyncio.get_running_loop()

        def told(status: HostStatus | None) -> None:
            loop.call_soon_threadsafe(self._take, status)

        self._events.add_listener(schema_id=_KERNEL_ACTIONS, listener=self._kernel_acted)
        self._follower = Follower(told)
        self._follower.start()

    async def stop_extension(self) -> None:
        """Hang up."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)

    def state(self) -> dict[str, Any]:
        """Return what browsers should show now."""
        return state(self._status, self._is_ours)

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
        """Return the lease's token if the kernel's provisioner holds it, else this server's seat's: it opens what the uid alone may not.

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
        """Wait, not for ever, until the kernel manager lists a kernel that it says has started: it does so a moment later."""
        for _ in range(_LISTING_STEPS):
            if self._is_ours(kernel_id):
                return
            await asyncio.sleep(_LISTING_STEP_S)

    def _take(self, status: HostStatus | None) -> None:
        self._status = status
        self._tell()

    def _tell(self) -> None:
        """Emit the state if it is news."""
        now = self.state()
        if now != self._told:
            self._told = now
            self._events.emit(schema_id=STATE_ID, data=now)

    async def _kernel_acted(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:  # noqa: ANN401, ARG002 - jupyter_events' signature
        """Hear of kernels that start, restart and end: which ones are ours changed, and some have something to say."""
        kernel_id, action = data.get("kernel_id", ""), data["action"]
        if action == "start" and data.get("status") == "success":
            await self._until_ours(kernel_id)
        self._tell()
        provisioner = self._provisioner(kernel_id)
        notice = getattr(provisioner, "gpu_notice", None)
        if action not in ("start", "restart") or notice is None:
            return  # not one of our provisioner's
        if data.get("status") == "error" and action == "restart":
            notice = f"The kernel could not be restarted: {data['msg']}"
        if notice:
            self._events.emit(schema_id=NOTICE_ID, data={"kernel_id": kernel_id, "sentence": notice})
