"""The hub's line to the broker: its calls in threads, so that the hub's loop never waits, and patience for a broker that is restarted.

A managed broker is started again by the hub within a moment, and a seat is taken under the server's name: asking once more after a
connection broke gives one seat, never two.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from msgspec.structs import replace

from fractional_gpu.client.seat_client import SeatClient
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError
from fractional_gpu.protocol.seats import (
    OfferRequest,
    Offers,
    SeatList,
    SeatProgress,
    SeatRequest,
    SeatStatus,
)

__all__ = ["BrokerLink"]

T = TypeVar("T")
_PAUSE_S = 0.2
_CALL_S = 10.0


class BrokerLink:
    """Calls to the broker on a socket. `patience_s`: how long a broker that does not answer is tried again."""

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
        """Yield what the broker says until the seat is granted or refused. Raises FractionalGPUError.

        Closed or cancelled, it leaves the queue; a seat that was granted in that moment expires by itself.
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
                request = replace(request, hub="")  # an earlier broker keeps no hub with a seat
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
