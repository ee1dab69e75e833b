"""Manages seats for the hub: calls to the broker, servers' seat files, leftover seats, and the outcomes of spawns.

Calls run in threads and are retried while a managed broker restarts. A seat is requested under the server's name, so a retry after a broken
connection gets the same seat.

A seat is left over if the hub and the broker are killed together, if the hub's database is lost, or if the broker does not answer when a
server ends. Each hub therefore gives leftover seats back at startup and every minute (`Reconciler`). It only gives back its own seats,
which it recognises by its API address, and only if the server is not starting, stopping or running with that seat.
"""

import asyncio
import logging
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram
from tornado import web

from fractional_gpu.client.following import AsyncClient
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.status import SeatStatus

# The error that stops a spawn has a reason for metrics, a sentence for the API and HTML for the page, in JupyterHub 5 and 6.
try:
    from jupyterhub.spawner import SpawnException
except ImportError:  # JupyterHub 5
    SpawnException = None

_STATUS = {
    "pool-group": 403,
    "user-limit": 403,
    "group-limit": 403,
    "pool-closed": 503,
    "pool-full": 503,
    "seat-queue": 503,
    "no-device": 503,
    "broker": 503,
    "engine": 503,
    "engine-unavailable": 503,
}


class _SpawnError(web.HTTPError):
    """An HTTPError whose `str()` is just the message for the user, because JupyterHub 5 shows `str()` on the spawn page."""

    def __str__(self) -> str:
        return str(getattr(self, "jupyterhub_message", super().__str__()))


def spawn_error(sentence: str, *, reason: str, hint: str = "") -> web.HTTPError:
    status = _STATUS.get(reason, 400)
    text = f"{sentence[:1].upper()}{sentence[1:].rstrip('.')}." + (f" {hint}" if hint else "")
    html = f"<strong>Your server was not started.</strong> {escape(text)}"
    if SpawnException is not None:
        error: web.HTTPError = SpawnException(sentence, reason=reason, message_html=html, status_code=status)
    else:
        error = _SpawnError(status, "%s", sentence, reason=reason)
    # The pages of both versions show these attributes. Without them, they would show the text of the exception.
    error.jupyterhub_message = f"Your server was not started. {text}"  # type: ignore[attr-defined]
    error.jupyterhub_html_message = html  # type: ignore[attr-defined]
    return error


def spawn_error_of(error: FractionalGPUError) -> web.HTTPError:
    reason = "broker" if error.status >= 500 and error.reason not in _STATUS else error.reason
    return spawn_error(str(error), reason=reason)


class ProgressLog:
    """The progress events of a server's current start. Viewers who join late still get all events from the beginning."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self._events)

    def add(self, progress: int, message: str) -> None:
        self._events.append({"progress": progress, "message": message})
        self._wake()

    def begin(self) -> None:
        self._events = []
        self._closed = False
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # a new event, because viewers would spin on an event that stays set

    async def follow(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield every event of the current start until the start is over. Cancelling this only affects one viewer."""
        events, sent = self._events, 0
        while True:
            changed = self._changed
            if events is not self._events:  # another start has begun
                events, sent = self._events, 0
            while sent < len(events):
                sent += 1
                yield events[sent - 1]
            if self._closed:
                return
            await changed.wait()


_WAITS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
# JupyterHub shows the global registry of prometheus_client on `/hub/metrics`. Labels must not contain users or servers.
SPAWNS = Counter(
    "jupyter_gpu_hub_spawns_total",
    "Requested servers, by outcome (`gpu` or `without` if started)",
    ("outcome", "reason"),
)
SEAT_WAIT = Histogram(
    "jupyter_gpu_hub_seat_wait_seconds",
    "Time from requesting a seat to getting it",
    ("pool",),
    buckets=_WAITS_S,
)


def spawn_ended(outcome: str, reason: str = "") -> None:
    SPAWNS.labels(outcome=outcome, reason=reason).inc()


def spawn_failed(error: BaseException) -> None:
    """Count a failed spawn in the metrics: an HTTPError as `refused` with its reason, any other error as `failed` with its class name."""
    if isinstance(error, web.HTTPError):
        spawn_ended("refused", str(getattr(error, "reason", "") or "unknown"))
    else:
        spawn_ended("failed", type(error).__name__)


_CALL_S = 10.0


def seat_client(socket: str, *, patience_s: float) -> AsyncClient[SeatClient]:
    return AsyncClient(lambda: SeatClient(socket, timeout_s=_CALL_S), patience_s=patience_s)


BROKER_SERVICE = "gpu-broker"
_EVERY_S = 60.0
_PATIENCE_S = 30.0  # for a broker that starts together with the hub
_POLL_S = 0.5
_running: dict[str, "Reconciler"] = {}


def prepare_seat_folder(folder: Path, *, shared: bool) -> None:
    """Create the folder for seat files. Set `shared` if users with separate uids need to open their own files in it.

    An existing folder keeps its mode. Raises OSError, or an HTTPError to stop the spawn if users cannot access the folder.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if shared and not mode & stat.S_IXOTH:
            raise spawn_error(
                f"users cannot access the hub's folder for seat files, {folder} (mode {mode:04o}); ask your administrator to run `chmod "
                f"o+x {folder}`, or to set c.FractionalGPUMixin.gpu_seat_dir to another folder",
                reason="seat-file",
            ) from None
    else:
        folder.chmod(0o711)  # users may open their files but not list the folder; the umask affects the mode of `mkdir`


class Reconciler:
    """Gives one hub's leftover seats back to one broker. Runs on the hub's event loop."""

    def __init__(self, app: Any, socket: str) -> None:  # noqa: ANN401 - JupyterHub is untyped
        self._app = app
        self._socket = socket
        self._log: logging.Logger = app.log
        self._wake = asyncio.Event()
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
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
                    self._log.warning("Could not give back the seats of servers that no longer exist: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._wake.wait()

    async def reconcile(self) -> None:
        client = seat_client(self._socket, patience_s=_PATIENCE_S)
        for seat in (await client.call(SeatClient.seats)).seats:
            if self._is_ours(seat) and not self._is_used(seat):
                await client.call(partial(SeatClient.release_seat, seat_id=seat.seat_id))
                name = f"{seat.owner}:{seat.server}" if seat.server else seat.owner
                self._log.warning("Gave back the seat %s of %s: its server no longer exists", seat.seat_id[:8], name)

    def _is_ours(self, seat: SeatStatus) -> bool:
        return bool(seat.hub == self._app.hub.api_url)

    def _is_used(self, seat: SeatStatus) -> bool:
        from jupyterhub.orm import User  # noqa: PLC0415 - the service's process imports this module, but does not need the database

        orm_user = User.find(self._app.db, seat.owner)
        if orm_user is not None:
            spawners = self._app.users[orm_user].spawners
            # JupyterHub creates the spawner of a stored server when the server is looked up by name.
            known = seat.server in spawners or seat.server in orm_user.orm_spawners
            if known and (spawners[seat.server].pending or _has_seat(spawners[seat.server], seat)):
                return True
        # An administrator may have renamed the user while the server was running.
        return any(_has_seat(one, seat) for user in self._app.users.values() for one in user.spawners.values())


def _has_seat(spawner: Any, seat: SeatStatus) -> bool:  # noqa: ANN401 - JupyterHub is untyped
    return bool(spawner.active and (getattr(spawner, "gpu_seat", None) or {}).get("seat_id") == seat.seat_id)


def start_reconciling(socket: str) -> None:
    """Give leftover seats back now, and again every minute. Do nothing if this process is not a hub."""
    app = _running_hub()
    if getattr(app, "hub", None) is None:
        return
    if socket not in _running:
        _running[socket] = Reconciler(app, socket)
    _running[socket].start()


def start_with_hub(socket: str) -> None:
    _once_it_serves(lambda _: start_reconciling(socket))


def expect_service(name: str, call: str) -> None:
    """Log an error if the service `name` is missing when the hub starts serving. `call` is the call that added it, as text."""

    def check(app: Any) -> None:  # noqa: ANN401 - JupyterHub is untyped
        if not any(service.get("name") == name for service in app.services):
            app.log.error(
                "The service %r, which %s in jupyterhub_config.py added, is missing: c.JupyterHub.services was assigned after that "
                "call. Assign it before the call, or use c.JupyterHub.services.append instead, and restart the hub",
                name,
                call,
            )

    _once_it_serves(check)


def _once_it_serves(work: Callable[[Any], None]) -> None:
    app = _running_hub()
    if app is None:
        return
    loop = asyncio.get_running_loop()

    def poll() -> None:
        if getattr(app, "http_server", None) is not None:
            work(app)
        else:
            loop.call_later(_POLL_S, poll)

    loop.call_soon(poll)


def _running_hub() -> Any:  # noqa: ANN401 - JupyterHub is untyped
    module: Any = sys.modules.get("jupyterhub.app")
    if module is None or not module.JupyterHub.initialized():
        return None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return module.JupyterHub.instance()
