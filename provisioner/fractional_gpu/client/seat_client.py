"""The client of the broker's routes for hubs: offers, seats and pools. Synchronous; for administrators' processes.

The rules of `fractional_gpu.client.client` hold here, too. To end a wait for a seat, close the generator or, from another thread, the
client.
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
    """A client that has a hub's routes, too. Each of these raises ForbiddenError for a peer that is no administrator."""

    def offers(self, request: OfferRequest) -> Offers:
        """Return what each pool offers one user now."""
        return self._call(Offers, "POST", "/v1/offers", request)

    def seats(self) -> SeatList:
        """Return all seats, and how many requests wait for one."""
        return self._call(SeatList, "GET", "/v1/seats")

    def take_seat(self, request: SeatRequest) -> Iterator[SeatProgress]:
        """Yield the request's progress while it waits for a seat; the last line is `granted` or `refused`.

        Closing the generator, or an interrupt in it, hangs up, which withdraws the request. Raises BadRequestError for an invalid
        request, and BrokerUnavailableError when the broker goes away before the last line.
        """
        timeout_s = self.timeout_s + request.wait_ms / 1000 + PULSE_S
        return self._wait(SeatProgress, "/v1/seats", request, timeout_s)

    def confirm_seat(self, seat_id: str) -> SeatStatus:
        """Report that the hub has saved the seat: it no longer expires. Raises NotFoundError."""
        return self._call(SeatStatus, "POST", f"/v1/seats/{quote(seat_id, safe='')}/confirm")

    def pools(self) -> PoolList:
        """Return every pool's present keys."""
        return self._call(PoolList, "GET", "/v1/pools")

    def change_pool(self, pool: str, keys: Mapping[str, Any]) -> PoolKeys:
        """Change keys of a pool until the broker restarts. Raises NotFoundError, or BadRequestError with the allowed form."""
        return self._call(PoolKeys, "POST", f"/v1/pools/{quote(pool, safe='')}", PoolChange(keys=dict(keys)))

    def release_seat(self, seat_id: str) -> None:
        """End a seat; does nothing if it has ended."""
        self._call(Done, "DELETE", f"/v1/seats/{quote(seat_id, safe='')}")
