"""Per-user request and log-rate limits.

A request with a lease's own token counts for that lease, not for its user: a script of the user that sends too many requests must not
keep the user's kernels from the GPU.
"""

import hmac
import math
import re

from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.kernels.request_validation import Peer, user_name
from fractional_gpu.broker.token_bucket import TokenBucket
from fractional_gpu.protocol.errors import TooManyRequestsError
from fractional_gpu.protocol.limits import (
    LEASE_REQUEST_BURST,
    LEASE_REQUESTS_PER_S,
    REQUEST_BURST,
    REQUESTS_PER_S,
)

__all__ = ["RateLimiter"]

_LEASE = re.compile(r"/v1/leases/([0-9a-zA-Z_-]{1,64})/")
_LINES_PER_S = 1.0
_LINES_BURST = 100.0


class RateLimiter:
    """Counts requests and log lines. One per broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._users = TokenBucket(REQUESTS_PER_S, REQUEST_BURST)
        self._leases = TokenBucket(LEASE_REQUESTS_PER_S, LEASE_REQUEST_BURST)
        self._lines = TokenBucket(_LINES_PER_S, _LINES_BURST)

    def admit(self, peer: Peer, path: str) -> None:
        """Count a request. Raises TooManyRequestsError with the time after which to retry."""
        uid = peer.credentials.uid
        lease_id = self._own_lease(peer, path)
        wait_s = self._users.take(uid) if lease_id is None else self._leases.take(lease_id)
        if not wait_s:
            return
        who = f"user {user_name(uid)}" if lease_id is None else f"the kernel of lease {lease_id[:8]}"
        per_s, burst = (
            (REQUESTS_PER_S, REQUEST_BURST) if lease_id is None else (LEASE_REQUESTS_PER_S, LEASE_REQUEST_BURST)
        )
        raise TooManyRequestsError(
            f"{who} asks the broker too often; allowed: {per_s:g} requests a second, and {burst:g} at once; ask again in "
            f"{math.ceil(wait_s)} s",
            reason="too-many-requests",
            retry_s=math.ceil(wait_s),
        )

    def may_log(self, uid: int) -> bool:
        """Whether one more line about this user's refused requests may be logged: they must not push other lines out of the log."""
        return self._lines.take(uid) == 0

    def _own_lease(self, peer: Peer, path: str) -> str | None:
        """Return the lease of the route if the request has that lease's token."""
        route = _LEASE.match(path)
        if route is None or peer.token is None:
            return None
        kernel = self._broker.kernels.get(route[1])
        if kernel is None or kernel.uid != peer.credentials.uid:
            return None
        return route[1] if hmac.compare_digest(token_digest(peer.token), kernel.token_sha256) else None
