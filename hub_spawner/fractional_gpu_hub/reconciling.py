"""Gives back the seats whose servers are gone: what a hub does when it starts, and every minute after that.

A seat is left over where its hub was killed together with its broker, where the hub's database was lost, or where the broker did not
answer when a server ended. Nothing else ends such a seat, and its pool counts it.

- Only seats that this hub took are given back: a broker can serve several hubs. A hub is known by the address of its API. Seats that an
  earlier version took name no hub; they are this hub's if the hub runs the broker itself.
- A seat is in use if its server starts, stops or is being checked, or runs with this very seat.
"""

import asyncio
import logging
import sys
from typing import Any

from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.seats import SeatStatus
from fractional_gpu_hub.broker_link import BrokerLink

__all__ = ["BROKER_SERVICE", "Reconciler", "begin", "begin_with_the_hub"]

BROKER_SERVICE = "gpu-broker"
_EVERY_S = 60.0
_PATIENCE_S = 30.0  # with a broker that starts together with the hub
_LOOK_S = 0.5
_running: dict[str, "Reconciler"] = {}


class Reconciler:
    """Looks after the seats of one hub at the broker on a socket. Everything runs on the hub's loop."""

    def __init__(self, app: Any, socket: str) -> None:  # noqa: ANN401 - JupyterHub is untyped
        self._app = app
        self._socket = socket
        self._log: logging.Logger = app.log
        self._wake = asyncio.Event()
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a second call has the seats looked at now."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.look()
                self._problem = ""
            except FractionalGPUError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    self._log.warning("Seats of servers that are gone cannot be given back now: %s", error)
            try:
                async with asyncio.timeout(_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Give back what no server uses. Raises FractionalGPUError. Cancelled: some of it may be given back."""
        link = BrokerLink(self._socket, patience_s=_PATIENCE_S)
        for seat in (await link.seats()).seats:
            if self._is_ours(seat) and not self._is_used(seat):
                await link.release(seat.seat_id)
                name = f"{seat.owner}:{seat.server}" if seat.server else seat.owner
                self._log.warning("The seat %s of %s was given back: its server is gone", seat.seat_id[:8], name)

    def _is_ours(self, seat: SeatStatus) -> bool:
        if seat.hub:
            return bool(seat.hub == self._app.hub.api_url)
        return any(service.get("name") == BROKER_SERVICE for service in self._app.services)

    def _is_used(self, seat: SeatStatus) -> bool:
        from jupyterhub.orm import User  # noqa: PLC0415 - the service's process imports this module, and waits for no database

        orm_user = User.find(self._app.db, seat.owner)
        if orm_user is None:
            return False
        spawners = self._app.users[orm_user].spawners
        if seat.server not in spawners and seat.server not in orm_user.orm_spawners:
            return False
        spawner = spawners[seat.server]
        if spawner.pending or not spawner.active:
            return bool(spawner.pending)
        return bool((getattr(spawner, "gpu_seat", None) or {}).get("seat_id") == seat.seat_id)


def begin(socket: str) -> None:
    """Look at the seats now, and again and again. Does nothing outside of a hub's process."""
    app = _running_hub()
    if getattr(app, "hub", None) is None:
        return
    if socket not in _running:
        _running[socket] = Reconciler(app, socket)
    _running[socket].start()


def begin_with_the_hub(socket: str) -> None:
    """Call `begin` once the hub serves that reads its configuration now. Does nothing outside of a hub's process."""
    app = _running_hub()
    if app is None:
        return
    loop = asyncio.get_running_loop()

    def look() -> None:
        if getattr(app, "http_server", None) is not None:
            begin(socket)
        else:
            loop.call_later(_LOOK_S, look)

    loop.call_soon(look)


def _running_hub() -> Any:  # noqa: ANN401 - JupyterHub is untyped
    """Return the hub whose process and loop this is, None if it is none's."""
    module: Any = sys.modules.get("jupyterhub.app")
    if module is None or not module.JupyterHub.initialized():
        return None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return module.JupyterHub.instance()
