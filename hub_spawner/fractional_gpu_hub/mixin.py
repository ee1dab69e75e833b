"""Adds fractional GPUs to any JupyterHub spawner: `class S(FractionalGPUMixin, AnySpawner): ...`.

- Before a server with a GPU starts, a seat is requested from the broker. The seat is given back when the server ends, for whatever reason.
- A new seat expires unless it is confirmed. The hub confirms a seat once the seat is saved in its database, so a hub that dies before then
  leaves no seat behind.
- The server is given the path of a private file that contains the seat's token, never the token itself.
"""

import contextlib
import hashlib
import inspect
import os
import pwd
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from traitlets import Float, Unicode, default

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.following import AsyncClient
from fractional_gpu.client.seat import SEAT_FILE_VARIABLE, Seat, SeatClient, write_seat
from fractional_gpu.core.units import format_forecast, format_fraction
from fractional_gpu.protocol.errors import FractionalGPUError, NotFoundError
from fractional_gpu.protocol.messages import ProgressKind
from fractional_gpu.protocol.seats import OfferRequest, Offers, SeatProgress, SeatRequest
from fractional_gpu_hub.base import GPUChoiceMixin, free_fractions
from fractional_gpu_hub.options import Choice
from fractional_gpu_hub.seats import (
    SEAT_WAIT,
    prepare_seat_folder,
    seat_client,
    spawn_error,
    spawn_error_of,
    start_reconciling,
)

_STATE = "gpu_seat"
_SERVER_START_S = 60  # the time for the server itself to start, after it has its seat
_RELEASE_S = 5.0  # if the broker does not answer in this time when a server ends, the seat is given back later
_TTL_MS = 600_000  # the time after the start in which the hub must save its state


class FractionalGPUMixin(GPUChoiceMixin):
    """A mixin that adds a GPU choice, a seat and a seat file to a spawner. List it before the spawner's class."""

    gpu_socket: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The broker's socket. Default: $JUPYTER_GPU_SOCKET, else the machine's broker, else the hub's own.

        Example: c.FractionalGPUMixin.gpu_socket = "/run/jupyter-gpu/broker.sock"
        """,
    )
    gpu_seat_dir: Unicode[str, str | bytes] = Unicode(
        config=True,
        help="""The folder for the servers' seat files, each readable only by its user. Default: `seats` next to the socket.

        Example: c.FractionalGPUMixin.gpu_seat_dir = "/run/jupyter-gpu/seats"
        """,
    )
    gpu_wait: Float[float, int | float] = Float(
        300.0,
        config=True,
        help="""How long a server waits for a place in a full pool, in seconds, if the pool lets servers wait. The default of
        `start_timeout` is a minute longer.

        Example: c.FractionalGPUMixin.gpu_wait = 900
        """,
    )
    gpu_broker_patience: Float[float, int | float] = Float(
        30.0,
        config=True,
        help="""How long to retry calls while the broker is not responding (it may be restarting), in seconds.

        Example: c.FractionalGPUMixin.gpu_broker_patience = 60
        """,
    )

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - the spawner's
        super().__init__(**kwargs)
        self._gpu_seat: dict[str, Any] | None = None
        self._gpu_confirmed = False
        self._gpu_over: list[dict[str, Any]] = []  # seats to give back

    @default("gpu_socket")
    def _gpu_socket_default(self) -> str:
        return socket_path()

    @default("gpu_seat_dir")
    def _gpu_seat_dir_default(self) -> str:
        return str(Path(self.gpu_socket).parent / "seats")

    @default("start_timeout")
    def _gpu_start_timeout_default(self) -> int:
        return int(self.gpu_wait) + _SERVER_START_S

    def gpu_user_ids(self) -> tuple[int, int] | None:
        """Return the uid and gid of the server's processes, or None if they are the same as the hub's."""
        return None

    def gpu_seat_path(self, file: Path) -> str:
        return str(file)

    def gpu_socket_path(self) -> str:
        """Return the path of the broker's socket as the server sees it."""
        return self.gpu_socket

    def gpu_seat_uid(self) -> int | None:
        """Return the only uid that may use the seat, or None if any process with the seat's token may use it."""
        ids = self.gpu_user_ids()
        return os.getuid() if ids is None else ids[0]

    @property
    def gpu_seat(self) -> Mapping[str, Any] | None:
        """The id, pool, fraction and file of the running server's seat, or None if the server has no seat."""
        return self._gpu_seat

    @property
    def _gpu_client(self) -> AsyncClient[SeatClient]:
        return seat_client(self.gpu_socket, patience_s=self.gpu_broker_patience)

    async def gpu_offers(self) -> Offers:
        request = self._gpu_offer_request()
        return await self._gpu_client.call(lambda client: client.offers(request))

    def _gpu_offer_request(self) -> OfferRequest:
        return OfferRequest(owner=self.user.name, groups=self._gpu_groups(), server=self.name, hub=self._gpu_hub())

    async def gpu_take(self, choice: Choice) -> None:
        """Request a seat and wait for it. If this fails or is cancelled, the hub's cleanup gives the seat back."""
        request = await self._gpu_request(choice)
        wanted = f"{format_fraction(request.fraction_milli)} GPU of pool {request.pool}"
        self._gpu_progress.add(5, f"Asking for {wanted}")
        begun_s = time.monotonic()
        place, hint = None, ""
        try:
            async with contextlib.aclosing(self._gpu_client.stream(lambda client: client.take_seat(request))) as lines:
                async for line in lines:
                    if line.kind == ProgressKind.REFUSED:
                        raise spawn_error(line.sentence, reason=line.reason, hint=await self._gpu_hint())
                    if line.kind == ProgressKind.GRANTED:
                        wait_s = time.monotonic() - begun_s
                        SEAT_WAIT.labels(pool=request.pool).observe(wait_s)
                        if place is not None:
                            self.log.info("%s waited %.0f s for %s", self._log_name, wait_s, wanted)
                        self._gpu_keep(request, line)
                        self._gpu_progress.add(70, f"Your server has {wanted}")
                        return
                    if line.position != place:  # not for each line, because the broker must make a forecast for a hint
                        hint = await self._gpu_hint()
                    told = f"{_waiting(line)} {hint}".rstrip()
                    if place is None:
                        self.log.info("%s is waiting for %s: %s", self._log_name, wanted, told)
                    place = line.position
                    self._gpu_progress.add(min(60, 10 + self._gpu_progress.count), told)
        except FractionalGPUError as error:
            self.log.warning("%s did not get a seat: %s", self._log_name, error)
            raise spawn_error_of(error) from error
        raise spawn_error("the GPU broker closed the connection without answering; try again", reason="broker")

    async def _gpu_request(self, choice: Choice) -> SeatRequest:
        pool, milli = choice.pool, choice.fraction_milli
        if pool is None or milli is None:
            try:
                offers = await self.gpu_offers()
            except FractionalGPUError as error:
                raise spawn_error_of(error) from error
            pool, milli = self.gpu_wanted(choice, offers)
        patience_s = max(0.0, min(self.gpu_wait, self.start_timeout - _SERVER_START_S / 2))
        return SeatRequest(
            owner=self.user.name,
            pool=pool,
            fraction_milli=milli,
            memory_mib=choice.memory_mib,
            groups=self._gpu_groups(),
            server=self.name,
            uid=self.gpu_seat_uid(),
            hub=self._gpu_hub(),
            ttl_ms=int(self.start_timeout + self.http_timeout) * 1000 + _TTL_MS,
            wait_ms=int(patience_s * 1000),
        )

    async def _gpu_hint(self) -> str:
        try:
            request = self._gpu_offer_request()
            offers = await seat_client(self.gpu_socket, patience_s=0).call(lambda client: client.offers(request))
        except FractionalGPUError:
            return ""
        return free_fractions(offers, without=self.gpu_allow_without)

    def _gpu_keep(self, request: SeatRequest, granted: SeatProgress) -> None:
        folder = Path(self.gpu_seat_dir)
        # Each server of each hub has one name, so a file replaces the file of a hub that died, but no file of another hub.
        name = hashlib.sha256(f"{request.hub} {self.user.name}/{self.name}".encode()).hexdigest()[:24]
        file = folder / f"{name}.json"
        seat = Seat(
            seat_id=granted.seat_id,
            token=granted.token,
            pool=request.pool,
            fraction_milli=request.fraction_milli,
            memory_mib=granted.memory_mib,
        )
        kept = ("seat_id", "pool", "fraction_milli")
        self._gpu_seat = {**{name: getattr(seat, name) for name in kept}, "file": str(file)}
        self._gpu_confirmed = False
        ids = self.gpu_user_ids()
        try:
            prepare_seat_folder(folder, shared=ids is not None)
            write_seat(seat, file, uid=ids[0] if ids else None, gid=ids[1] if ids else None)
        except OSError as error:
            raise spawn_error(
                f"the hub could not write {file}: {error.strerror}; ask your administrator", reason="seat-file"
            ) from error

    async def poll(self) -> int | None:
        """Poll the server, and confirm its seat once the hub has saved it. If confirming fails, a later poll tries again."""
        status: int | None = await super().poll()
        if status is None and self._gpu_seat is not None and not self._gpu_confirmed and self._gpu_is_saved():
            await self._gpu_confirm()
        return status

    def _gpu_is_saved(self) -> bool:
        state = self.orm_spawner.state if self.orm_spawner is not None else None
        saved = (state or {}).get(_STATE)
        return isinstance(saved, Mapping) and saved.get("seat_id") == (self._gpu_seat or {}).get("seat_id")

    async def _gpu_confirm(self) -> None:
        seat_id = (self._gpu_seat or {}).get("seat_id", "")
        try:
            await seat_client(self.gpu_socket, patience_s=0).call(lambda client: client.confirm_seat(seat_id))
        except NotFoundError:
            self.log.warning(
                "The broker no longer has the seat of %s: its kernels will get no GPU until the server is restarted",
                self._log_name,
            )
            self._gpu_confirmed = True
        except FractionalGPUError as error:  # do not raise it, or a starting hub would assume that the server has ended
            self.log.warning("Could not confirm that %s holds its seat; will try again: %s", self._log_name, error)
        else:
            self._gpu_confirmed = True

    async def run_post_stop_hook(self) -> None:
        """Give the seat back. Called after the server has ended, for whatever reason."""
        over = [*self._gpu_over, *([self._gpu_seat] if self._gpu_seat is not None else [])]
        self._gpu_over, self._gpu_seat = [], None
        for seat in over:
            with contextlib.suppress(OSError):
                Path(seat["file"]).unlink()  # noqa: ASYNC240 - one local file
            try:
                client = seat_client(self.gpu_socket, patience_s=min(_RELEASE_S, self.gpu_broker_patience))
                await client.call(partial(SeatClient.release_seat, seat_id=seat["seat_id"]))
            except FractionalGPUError as error:
                self.log.warning("The seat of %s will be given back once the broker is back: %s", self._log_name, error)
                start_reconciling(self.gpu_socket)
        hook = super().run_post_stop_hook()
        if inspect.isawaitable(hook):
            await hook

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if self._gpu_seat is not None:
            state[_STATE] = dict(self._gpu_seat)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the seat, and treat it as unconfirmed, because the hub that saved it may have died before confirming it."""
        super().load_state(state)
        seat = state.get(_STATE)
        if isinstance(seat, dict) and isinstance(seat.get("seat_id"), str) and isinstance(seat.get("file"), str):
            self._gpu_seat, self._gpu_confirmed = dict(seat), False

    def clear_state(self) -> None:
        """Clear the state, but keep the seat for `run_post_stop_hook`. Spawners call this as soon as the server has ended."""
        super().clear_state()
        if self._gpu_seat is not None:
            self._gpu_over.append(self._gpu_seat)
        self._gpu_seat, self._gpu_confirmed = None, False

    def get_env(self) -> dict[str, str]:
        environment: dict[str, str] = super().get_env()
        environment["JUPYTER_GPU_SOCKET"] = self.gpu_socket_path()
        if self._gpu_seat is not None:
            environment[SEAT_FILE_VARIABLE] = self.gpu_seat_path(Path(self._gpu_seat["file"]))
            environment["JUPYTER_GPU_DEFAULT_POOL"] = self._gpu_seat["pool"]
            environment["JUPYTER_GPU_DEFAULT_FRACTION"] = f"{self._gpu_seat['fraction_milli']}m"
        return environment


def ids_of_user(name: str) -> tuple[int, int]:
    try:
        user = pwd.getpwnam(name)
    except (KeyError, ValueError):  # ValueError if the name is not possible
        raise spawn_error(
            f"this machine has no user {name!r}, but servers here run as users of this machine; ask your administrator to add that "
            "user",
            reason="no-system-user",
        ) from None
    return user.pw_uid, user.pw_gid


def _waiting(line: SeatProgress) -> str:
    words = f"{line.sentence[:1].upper()}{line.sentence[1:]}."
    if line.position is not None:
        words += f" You are number {line.position} in the queue"
        if line.expected_ms is not None:
            words += f"; {format_forecast(line.expected_ms, line.low_ms, line.high_ms)} to wait"
        words += "."
    return words
