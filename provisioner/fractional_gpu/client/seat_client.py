"""The hub's side of the broker: what can be had, and seats. Standard library only, synchronous; for administrators' processes.

The rules of `fractional_gpu.client.client` hold here, too. A wait for a seat ends when the generator is closed or, from another
thread, by `close`.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import Done
from fractional_gpu.protocol.seats import (
    OfferRequest,
    Offers,
    PoolChange,
    PoolKeys,
    PoolList,
    SeatList,
    SeatProgress,
    SeatRequest,
    SeatStatus,
)

__all__ = ["SeatClient"]


class SeatClient(BrokerClient):
    """Speaks to the broker as a hub does. Every call raises ForbiddenError for a peer that is no administrator."""

    def offers(self, request: OfferRequest) -> Offers:
        """Return the pools as one user would meet them now."""
        return self._call(Offers, "POST", "/v1/offers", request)

    def seats(self) -> SeatList:
        """Return all seats, and how many wait for one."""
        return self._call(SeatList, "GET", "/v1/seats")

    def take_seat(self, request: SeatRequest) -> Iterator[SeatProgress]:
        """Yield what the broker says while a seat is waited for; the last line is `granted` or `refused`.

        Closing the generator, or an interrupt in it, hangs up, which leaves the queue. Raises BadRequestError for what makes
        no sense, and BrokerUnavailableError when the broker goes away before the last line.
        """
        timeout_s = self.timeout_s + request.wait_ms / 1000 + PULSE_S
        return self._wait(SeatProgress, "/v1/seats", request, timeout_s)

    def confirm_seat(self, seat_id: str) -> SeatStatus:
        """Say that the seat is saved where it was taken: it no longer expires. Raises NotFoundError."""
        return self._call(SeatStatus, "POST", f"/v1/seats/{quote(seat_id, safe='')}/confirm")

    def pools(self) -> PoolList:
        """Return every pool's keys as they hold now."""
        return self._call(PoolList, "GET", "/v1/pools")

    def change_pool(self, pool: str, keys: Mapping[str, Any]) -> PoolKeys:
        """Change keys of a pool until the broker is started again. Raises NotFoundError, or BadRequestError with the allowed form."""
        return self._call(PoolKeys, "POST", f"/v1/pools/{quote(pool, safe='')}", PoolChange(keys=dict(keys)))

    def release_seat(self, seat_id: str) -> None:
        """End a seat. One that is over already is no error."""
        self._call(Done, "DELETE", f"/v1/seats/{quote(seat_id, safe='')}")
