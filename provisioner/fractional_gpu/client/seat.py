"""The seat the hub gave this server, and the client for hubs.

The variable `JUPYTER_GPU_SEAT_FILE` names the file that contains the seat. The pool, fraction and memory in this file are for display only,
since the broker has the values that actually apply.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import DecodeError
from msgspec.json import decode, encode

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.host.files import replace_file
from fractional_gpu.protocol import routes
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import HidesSecrets
from fractional_gpu.protocol.seats import (
    OfferRequest,
    Offers,
    PoolChange,
    PoolKeys,
    PoolList,
    SeatList,
    SeatProgress,
    SeatRequest,
)
from fractional_gpu.protocol.status import SeatStatus

SEAT_FILE_VARIABLE = "JUPYTER_GPU_SEAT_FILE"
POD_SHARE_VARIABLE = "JUPYTER_GPU_POD_SHARE"
"""A pod's seat as POOL/THOUSANDTHS, for display. It is in a variable because no file can be put into a pod."""


class Seat(HidesSecrets, frozen=True, kw_only=True):
    """The seat shared by all of this server's kernels. The fraction is in milli-GPU, and the memory in MiB."""

    seat_id: str
    token: str
    pool: str
    fraction_milli: int
    memory_mib: int


def own_seat() -> Seat | None:
    """Return this process's seat, or None. Raises FractionalGPUError if the file is unreadable."""
    path = os.environ.get(SEAT_FILE_VARIABLE)
    return read_seat(path) if path else None


def own_share() -> tuple[str, int] | None:
    """Return the pool and milli-GPU of this process's seat, for display, or None if it has no seat. Raises FractionalGPUError."""
    seat = own_seat()
    if seat is not None:
        return seat.pool, seat.fraction_milli
    pool, _, milli = os.environ.get(POD_SHARE_VARIABLE, "").rpartition("/")
    return (pool, int(milli)) if pool and milli.isascii() and milli.isdecimal() and len(milli) < 5 else None


def read_seat(path: str) -> Seat:
    """Read a seat from its file. Raises FractionalGPUError."""
    remedy = "stop this server on the hub's page and start it again"
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FractionalGPUError(f"{SEAT_FILE_VARIABLE}={path} cannot be read: {reason}; {remedy}") from error
    try:
        return decode(text, type=Seat)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise FractionalGPUError(f"{SEAT_FILE_VARIABLE}={path} does not contain a seat; {remedy}") from None


def write_seat(seat: Seat, path: Path, *, uid: int | None = None, gid: int | None = None) -> None:
    """Write the seat to a new private file owned by `uid`, or by this process's user if None. Raises OSError."""

    def give(descriptor: int) -> None:
        if uid is not None:
            os.fchown(descriptor, uid, -1 if gid is None else gid)

    replace_file(path, encode(seat), prepare=give)


class SeatClient(BrokerClient):
    """A client with additional routes for hubs. These raise ForbiddenError for users who are not administrators."""

    def offers(self, request: OfferRequest) -> Offers:
        """Return what each pool currently offers one user."""
        return self.call(routes.OFFERS, request)

    def seats(self) -> SeatList:
        """Return all seats, and how many requests are waiting for one."""
        return self.call(routes.SEATS)

    def take_seat(self, request: SeatRequest) -> Iterator[SeatProgress]:
        """Yield the request's progress while it waits for a seat. The last line is `granted` or `refused`.

        Closing the generator, or the client in another thread, withdraws the request. Raises BadRequestError and BrokerUnavailableError.
        """
        return self.wait(routes.TAKE_SEAT, request)

    def confirm_seat(self, seat_id: str) -> SeatStatus:
        """Report that the hub has saved the seat, so that it won't expire. Raises NotFoundError."""
        return self.call(routes.CONFIRM_SEAT, about=seat_id)

    def pools(self) -> PoolList:
        """Return every pool's current settings."""
        return self.call(routes.POOLS)

    def change_pool(self, pool: str, keys: Mapping[str, Any]) -> PoolKeys:
        """Change some of a pool's settings until the broker restarts.

        Raises NotFoundError, or BadRequestError with a message that describes the allowed values.
        """
        return self.call(routes.CHANGE_POOL, PoolChange(keys=dict(keys)), pool)

    def release_seat(self, seat_id: str) -> None:
        """End a seat. Do nothing if it has already ended."""
        self.call(routes.RELEASE_SEAT, about=seat_id)
