"""The hub's side of seats: calls to the broker, the folder of the servers' seat files, and seats whose servers are gone.

Calls run in threads, so that the hub's loop never waits, and are tried again while a managed broker is restarted. A seat is taken under
the server's name: a second request after a connection broke gives the same seat.

A seat is left over where its hub was killed together with its broker, where the hub's database was lost, or where the broker did not
answer when a server ended. Nothing else ends such a seat, and its pool counts it. So each hub gives leftover seats back, when it starts
and every minute after that (`Reconciler`):

- Only seats that this hub took: a broker can serve several hubs. A hub is known by the address of its API. Seats of an earlier version
  name no hub; they are this hub's if the hub runs the broker itself.
- A seat is in use if its server starts, stops or is being checked, or runs with this very seat.
"""

import asyncio
import contextlib
import logging
import stat
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.messages import SeatStatus
from fractional_gpu.protocol.seats import OfferRequest, Offers, SeatList, SeatProgress, SeatRequest
from fractional_gpu_hub.spawn_outcome import spawn_error

T = TypeVar("T")
_PAUSE_S = 0.2
_CALL_S = 10.0


class AsyncSeatClient:
    """Calls to the broker on a socket. A broker that does not answer is tried again for `patience_s` seconds."""

    def __init__(self, socket: str, *, patience_s: float) -> None:
        self.socket = socket
        self.patience_s = patience_s

    async def offers(self, request: OfferRequest) -> Offers:
        """Return what the user can choose from. Raises FractionalGPUError. Cancelled: the call ends by itself."""
        return await self._call(lambda client: client.offers(request))

    async def seats(self) -> SeatList:
        """Return all seats. Raises FractionalGPUError. Cancelled: the call ends by itself."""
        return await self._call(lambda client: client.seats())

    async def confirm(self, seat_id: str) -> SeatStatus:
        """Keep the seat. Raises FractionalGPUError. Cancelled: the call ends by itself."""
        return await self._call(lambda client: client.confirm_seat(seat_id))

    async def release(self, seat_id: str) -> None:
        """End the seat. Raises FractionalGPUError. Cancelled: the call ends by itself."""
        await self._call(lambda client: client.release_seat(seat_id))

    async def take(self, request: SeatRequest) -> AsyncGenerator[SeatProgress, None]:
        """Yield the broker's lines until the seat is granted or refused. Raises FractionalGPUError.

        Closed or cancelled, it leaves the queue; a seat that was granted at that moment expires by itself.
        """
        end_s = time.monotonic() + self.patience_s
        while True:
            client = SeatClient(self.socket, timeout_s=_CALL_S)
            lines = client.take_seat(request)
            try:
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    end_s = time.monotonic() + self.patience_s
                    yield line
            except BrokerUnavailableError:
                if time.monotonic() > end_s:
                    raise
            except BadRequestError as error:
                if not request.hub or "unknown field 'hub'" not in str(error):
                    raise
                request = replace(request, hub="")  # an earlier broker has no such field
                continue
            else:
                return
            finally:
                client.close()  # wakes a thread that still reads
            await asyncio.sleep(_PAUSE_S)

    async def _call(self, work: Callable[[SeatClient], T]) -> T:
        end_s = time.monotonic() + self.patience_s
        while True:
            with contextlib.closing(SeatClient(self.socket, timeout_s=_CALL_S)) as client:
                try:
                    return await asyncio.to_thread(work, client)
                except BrokerUnavailableError:
                    if time.monotonic() > end_s:
                        raise
            await asyncio.sleep(_PAUSE_S)


BROKER_SERVICE = "gpu-broker"
_EVERY_S = 60.0
_PATIENCE_S = 30.0  # with a broker that starts together with the hub
_POLL_S = 0.5
_running: dict[str, "Reconciler"] = {}


def prepare_seat_folder(folder: Path, *, shared: bool) -> None:
    """Create the folder of the servers' seat files. `shared`: users with a uid of their own pass through it to their file.

    A folder that exists stays as its administrator set it up. Raises OSError, and the error that stops the spawn where users cannot pass
    through.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if shared and not mode & stat.S_IXOTH:
            raise spawn_error(
                f"users cannot pass through the hub's folder of seat files, {folder} (mode {mode:04o}); ask your administrator "
                f"to run `chmod o+x {folder}`, or to set c.FractionalGPUMixin.gpu_seat_dir to another folder",
                reason="seat-file",
            ) from None
    else:
        folder.chmod(0o711)  # pass through, not list; `mkdir` alone is subject to the umask


class Reconciler:
    """Gives back leftover seats of one hub at the broker on a socket. Everything runs on the hub's loop."""

    def __init__(self, app: Any, socket: str) -> None:  # noqa: ANN401 - JupyterHub is untyped
        self._app = app
        self._socket = socket
        self._log: logging.Logger = app.log
        self._wake = asyncio.Event()
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a second call has the seats checked now."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.reconcile()
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

    async def reconcile(self) -> None:
        """Give back the seats that no server uses. Raises FractionalGPUError. Cancelled: some may have been given back."""
        client = AsyncSeatClient(self._socket, patience_s=_PATIENCE_S)
        for seat in (await client.seats()).seats:
            if self._is_ours(seat) and not self._is_used(seat):
                await client.release(seat.seat_id)
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


def start_reconciling(socket: str) -> None:
    """Check the seats now and from now on every minute. Does nothing outside a hub's process."""
    app = _running_hub()
    if getattr(app, "hub", None) is None:
        return
    if socket not in _running:
        _running[socket] = Reconciler(app, socket)
    _running[socket].start()


def start_with_hub(socket: str) -> None:
    """Call `start_reconciling` once the hub that now reads its configuration serves. Does nothing outside a hub's process."""
    app = _running_hub()
    if app is None:
        return
    loop = asyncio.get_running_loop()

    def poll() -> None:
        if getattr(app, "http_server", None) is not None:
            start_reconciling(socket)
        else:
            loop.call_later(_POLL_S, poll)

    loop.call_soon(poll)


def _running_hub() -> Any:  # noqa: ANN401 - JupyterHub is untyped
    """Return the hub that runs in this process and on this loop, None if there is none."""
    module: Any = sys.modules.get("jupyterhub.app")
    if module is None or not module.JupyterHub.initialized():
        return None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return module.JupyterHub.instance()
