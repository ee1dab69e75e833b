"""Who pays for a request: a seat, if the request's token or the peer's control group proves one, else the peer's user."""

import hmac
import re
from typing import Any, Final
from urllib.parse import unquote

from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.cost import EXEMPT, Account
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.host.accounts import account_uid
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.limits import CONNECTIONS_PER_LEASE, MAX_CONNECTIONS, MOST_CONNECTIONS
from fractional_gpu.protocol.routes import ROUTES, Route

_ROUTES: Final = {(route.method, route.path): route for route in ROUTES}
_NAMES: Final = {
    "leases": ("{lease}", re.compile(r"[0-9a-zA-Z_-]{1,64}")),
    "seats": ("{seat}", re.compile(r"[0-9a-zA-Z_-]{1,64}")),
    "pools": ("{pool}", re.compile(r"[0-9a-z._-]{1,63}")),
    "devices": ("{device}", re.compile(r"[^/]{1,200}")),
}


def find_route(method: str, path: str) -> tuple[Route[Any, Any] | None, str]:
    """Return the route, None if there is none, and what its path names: a lease, a seat, a pool or a device."""
    if (route := _ROUTES.get((method, path))) is not None:
        return route, ""
    parts = path.split("/")
    if len(parts) < 4 or parts[2] not in _NAMES:
        return None, ""
    placeholder, allowed = _NAMES[parts[2]]
    name, parts[3] = unquote(parts[3]), placeholder
    if not allowed.fullmatch(name):
        return None, ""
    return _ROUTES.get((method, "/".join(parts))), name


class Payers:
    def __init__(self, broker: Broker, seats: Seats) -> None:
        self._broker = broker
        self._seats = seats

    def of_connection(self, credentials: PeerCredentials, *, admin: bool) -> Account:
        """Return who pays for a connection whose requests show no token. Administrators are exempt."""
        if admin:
            return EXEMPT
        if (pod := self._seats.workloads.of_pod(credentials.pid)) is not None:
            return self._of_seat(pod)
        return self._broker.costs.of_user(credentials.uid)

    def of_request(
        self, connection: Account, credentials: PeerCredentials, method: str, path: str, token: str | None
    ) -> tuple[Account, bool]:
        """Return who pays for a request of the connection, and whether other users may wait for the request."""
        if connection is EXEMPT:
            return EXEMPT, True
        route, name = find_route(method, path)
        kernel = self._broker.kernels.get(name) if route is not None else None
        if kernel is not None and kernel.uid != credentials.uid:
            kernel = None
        seat = self._seat_of(token, kernel) if token else None
        account = connection if seat is None else self._of_seat(seat)
        return account, route is not None and route.reserved and kernel is not None and kernel.identity is not None

    def most_connections(self, uid: int) -> int:
        """Return how many connections a user may have open: few, and more for each kernel and each seat that there is."""
        user = account_uid(uid)
        kernels = sum(
            one.identity is not None and account_uid(one.uid) == user for one in self._broker.kernels.values()
        )
        seats = sum(one.uid is None or account_uid(one.uid) == user for one in self._seats.live())
        return min(MOST_CONNECTIONS, MAX_CONNECTIONS + CONNECTIONS_PER_LEASE * (kernels + seats))

    def _of_seat(self, seat: SeatRecord) -> Account:
        return self._broker.costs.of_seat(seat.seat_id, seat.owner)

    def _seat_of(self, token: str, kernel: Kernel | None) -> SeatRecord | None:
        """Return the seat that the token proves: its own token, or that of the lease in the request's path."""
        digest = token_digest(token)
        if kernel is not None and hmac.compare_digest(digest, kernel.token_sha256):
            view = self._broker.arbiter.lease(kernel.lease_id)
            return self._seats.find(view.spec.seat) if view is not None and view.spec.seat else None
        return next((one for one in self._seats.live() if hmac.compare_digest(digest, one.token_sha256)), None)
