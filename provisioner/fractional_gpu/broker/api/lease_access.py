"""Which peer may use which lease.

- A lease's token opens its own routes; these are the kernel's calls (attach, acquire, gate).
- Without a token, a uid controls its own leases; but not those of a hub's seats, since containers share uids.
- A seat's token opens the leases of the seat, and revoked leases of the seat's user.
- Root, the broker's own uid and members of the configured group control all.
- A lease that the peer may not see is "not found": whether it exists is not disclosed.
"""

import hmac

from fractional_gpu.broker.broker import Broker, token_digest
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.recovery.lost_leases import LostLeases
from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.host.process import read_stat
from fractional_gpu.host.tree import is_below
from fractional_gpu.protocol.errors import NotFoundError, UnauthorizedError
from fractional_gpu.protocol.limits import MAX_NAME

__all__ = ["LeaseAccess"]


class LeaseAccess:
    """Finds leases for peers. `lost` restores leases that the ledger lost."""

    def __init__(self, broker: Broker, seats: Seats, lost: LostLeases | None) -> None:
        self._broker = broker
        self._seats = seats
        self.lost = lost

    def find(self, peer: Peer, lease_id: str, *, own: bool = False) -> Kernel:
        """Return the lease's kernel if the peer may control it. Routes that are `own` need the lease's token.

        A process of the kernel that shows no token, because the token's file is gone, is recognized by its place in the kernel's process
        tree. A lease that is being evicted, or that lives on only for processes that its kernel left behind, is over for its own kernel.
        Raises NotFoundError, UnauthorizedError or ForbiddenError.
        """
        kernel = self._broker.kernels.get(lease_id)
        itself = own and peer.token is None and kernel is not None and self._is_of(peer, kernel)
        is_over = kernel is not None and self._is_over_for(peer, kernel, itself=itself)
        if kernel is None or is_over or not (itself or self._may_see(peer, kernel)):
            raise NotFoundError(
                f"there is no lease {lease_id[:MAX_NAME]!r} of yours; `jupyter gpu status` lists them",
                reason="unknown-lease",
            )
        if peer.token is not None and not self._is_token_of(peer, peer.token, kernel, own=own):
            raise UnauthorizedError("the token is not this lease's", reason="foreign-token")
        if own and peer.token is None and not itself:
            raise UnauthorizedError(
                "this needs the lease's token, in the header `Authorization: Bearer TOKEN`", reason="no-token"
            )
        return kernel

    async def find_own(self, peer: Peer, lease_id: str) -> Kernel:
        """Return what `find` returns on a lease's own routes; restore a lease that was lost with the ledger first.

        Raises as `find`, and what `LostLeases.recall` raises.
        """
        if self.lost is not None and lease_id not in self._broker.kernels:
            await self.lost.recall(peer, lease_id)
        return self.find(peer, lease_id, own=True)

    @staticmethod
    def _is_over_for(peer: Peer, kernel: Kernel, *, itself: bool) -> bool:
        if peer.token is None:
            return itself and (kernel.requests.evictions > 0 or kernel.ending.released)
        own = hmac.compare_digest(token_digest(peer.token), kernel.token_sha256)
        return kernel.requests.evictions > 0 or (kernel.ending.released and own)

    def _may_see(self, peer: Peer, kernel: Kernel) -> bool:
        """Whether the lease is the peer's. For a lease of a hub's seat the uid is not enough: containers share uids."""
        if peer.admin or peer.credentials.uid != kernel.uid:
            return peer.admin
        return peer.token is not None or not self._seat_of(kernel)

    def _is_of(self, peer: Peer, kernel: Kernel, *, or_parent: bool = False) -> bool:
        """Whether the peer is a process of this kernel, not of another kernel below it. `or_parent`: or the process that started it.

        The operating system reports the peer's pid (SO_PEERCRED) as of the moment it connected.
        """
        identity, pid = kernel.identity, peer.credentials.pid
        if identity is None or peer.credentials.uid != kernel.uid:
            return False
        others = {root.pid for root in self._broker.roots() if root != identity}
        try:
            return is_below(pid, identity, others) or (or_parent and 1 < pid == read_stat(identity.pid).ppid)
        except (ProcessLookupError, PermissionError):
            return False

    def _is_token_of(self, peer: Peer, token: str, kernel: Kernel, *, own: bool) -> bool:
        """Whether it is the lease's token or, unless the route is `own`, a token of the seat that the lease draws on."""
        digest = token_digest(token)
        # A lease that was restored without any record has no digest yet: accept the token that a process of the kernel, or the process
        # that started it, shows first.
        if not kernel.token_sha256 and self._is_of(peer, kernel, or_parent=True):
            kernel.token_sha256 = digest
            self._broker.records.save(kernel)
        if hmac.compare_digest(digest, kernel.token_sha256):
            return True
        view = self._broker.arbiter.lease(kernel.lease_id)
        return not own and view is not None and self._seats.draws.opens(token, view)

    def _seat_of(self, kernel: Kernel) -> str:
        view = self._broker.arbiter.lease(kernel.lease_id)
        return view.spec.seat if view is not None else ""
