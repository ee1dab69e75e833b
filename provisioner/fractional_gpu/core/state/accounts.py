"""Keeps an account for each owner and group in each pool, in order to enforce limits and share devices fairly.

An owner's virtual time in a pool grows by milli-GPU times milliseconds, divided by the owner's weight. It grows while the owner's leases
are busy or pinned on a device, or hold a reservation for a process that has not started. Each lease also has a virtual time, for comparison
with the owner's other leases. Turns go to the owner with the least virtual time and, among that owner's leases, to the one with the least.
After a pause of more than `_PAUSE_MS`, an owner restarts at no less than the least virtual time of the contending owners, so that unused
time cannot be saved up (start-time fair queueing, Goyal, Vin and Cheng 1996). Idle leases on a device are not charged, because they make
room for others.

An account without leases is dropped once it is no different from a new one. At most `_MOST_FORMER` accounts without leases are kept.
"""

from collections.abc import Callable

from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.state.leases import DAY_MS, UNIT, Account, Lease

_MOST_FORMER = 4096
_PAUSE_MS = 10_000


class Accounts:
    """The accounts in all pools. `shares_by_time` returns whether a lease's pool shares devices by virtual time."""

    def __init__(self, shares_by_time: Callable[[Lease], bool]) -> None:
        self._shares_by_time = shares_by_time
        self._owners: dict[tuple[str, str], Account] = {}  # by pool and name
        self._groups: dict[tuple[str, str], Account] = {}
        self._floors: dict[str, int] = {}  # by pool, the virtual time at which an owner starts that contends again

    def owner(self, pool: str, name: str) -> Account:
        return self._owners.get((pool, name)) or Account(name=name)

    def group(self, pool: str, name: str) -> Account:
        return self._groups.get((pool, name)) or Account(name=name)

    def of(self, lease: Lease) -> Account:
        """Return the account of the lease's owner."""
        return self._owners[lease.spec.pool, lease.spec.owner]

    # -- leases ------------------------------------------------------------------------------------------------------------

    def open(self, lease: Lease) -> None:
        spec = lease.spec
        owner = self._owners.setdefault((spec.pool, spec.owner), Account(name=spec.owner))
        owner.leases[lease.lease_id] = lease
        owner.weight = max(1, spec.owner_weight)
        if spec.group:
            group = self._groups.setdefault((spec.pool, spec.group), Account(name=spec.group))
            group.leases[lease.lease_id] = lease

    def close(self, lease: Lease, now_ms: int) -> None:
        """Remove a lease from its accounts. It must not have a reservation or a ticket."""
        spec, owner = lease.spec, self.of(lease)
        del owner.leases[lease.lease_id]
        if spec.group:
            group = self._groups[spec.pool, spec.group]
            del group.leases[lease.lease_id]
            if not group.leases:
                del self._groups[spec.pool, spec.group]
        if not owner.leases:
            self._forget_former(now_ms)

    def _forget_former(self, now_ms: int) -> None:
        """Drop accounts without leases that are no different from new ones. If there are none, keep only the newest `_MOST_FORMER`."""
        former = [key for key, account in self._owners.items() if not account.leases]
        equal = [key for key in former if self._equals_empty(key[0], self._owners[key], now_ms)]
        for key in equal or former[:-_MOST_FORMER]:
            del self._owners[key]

    def _equals_empty(self, pool: str, account: Account, now_ms: int) -> bool:
        is_pinned = account.pinned_ms and now_ms - account.pinned_at_ms < DAY_MS  # a budget is restored after a day
        return not is_pinned and account.time_ms <= self._floors.get(pool, 0)

    # -- shares ----------------------------------------------------------------------------------------------------------

    def advance(self, passed_ms: int) -> None:
        """Charge the last `passed_ms` to the leases whose meters are running, and to their owners."""
        for account in self._owners.values():
            for lease in account.contenders.values():
                if lease.meter.is_running:
                    account.usage += lease.milli * passed_ms
                    lease.meter.usage += lease.milli * passed_ms

    def share(self, lease: Lease) -> tuple[int, int]:
        """Return the owner's and the lease's virtual times, which are used to share devices fairly."""
        return self.of(lease).time_ms, lease.time_ms

    def contending_weights(self, lease: Lease) -> tuple[int, int]:
        """Return the total weight of the contending owners in the lease's pool, and the total weight of its owner's contending leases.

        The totals are never less than the weights of the lease's owner and of the lease itself, respectively.
        """
        account = self.of(lease)
        owners = sum(one.weight for one in self._contending(lease.spec.pool))
        own = sum(max(1, one.spec.weight) for one in account.contenders.values())
        return max(owners, account.weight), max(own, lease.spec.weight, 1)

    def meter(self, lease: Lease, now_ms: int) -> None:
        """Start or stop the lease's meter, and update whether the lease is contending. Only pools that share by virtual time need this."""
        fair = self._shares_by_time(lease)
        if not fair and lease.meter.idle_since_ms is None and not lease.meter.is_running:
            return  # no decision depends on it
        if lease.state is LeaseState.UNATTACHED:
            metered = fair and lease.has_reservation
        else:
            works = lease.is_working or lease.pinned_until_ms > now_ms
            metered = fair and lease.state is LeaseState.RESIDENT and works
        waits = lease.ticket is not None or lease.gate.ticket is not None
        contends = fair and (metered or waits or lease.state is LeaseState.RESUMING or lease.preempted)
        account = self.of(lease)
        if contends and lease.lease_id not in account.contenders:
            self._start_contending(lease, account, now_ms)
        lease.meter.is_running = metered
        if not contends and lease.lease_id in account.contenders:
            self._stop_contending(lease, account, now_ms)

    def fall_behind(self, lease: Lease) -> None:
        """Put the lease's owner behind the pool's other contending owners, because the lease's process did not start during its turn."""
        if not self._shares_by_time(lease):
            return
        account = self.of(lease)
        others = (one for one in self._contending(lease.spec.pool) if one is not account)
        last_ms = max((one.time_ms for one in others), default=-1)
        account.usage = max(account.usage, _usage(last_ms + 1, account.weight))

    def _contending(self, pool: str) -> list[Account]:
        return [account for (name, _), account in self._owners.items() if name == pool and account.contenders]

    def _start_contending(self, lease: Lease, account: Account, now_ms: int) -> None:
        if not account.contenders:
            floor = self._raise_floor(lease.spec.pool)
            if _was_absent(account.idle_since_ms, now_ms):
                account.usage = max(account.usage, _usage(floor, account.weight))
        # In the same way, a lease that was absent starts at the least virtual time of its owner's other leases.
        self._raise_own_floor(account)
        if _was_absent(lease.meter.idle_since_ms, now_ms):
            lease.meter.usage = max(lease.meter.usage, _usage(account.floor, lease.spec.weight))
        account.contenders[lease.lease_id] = lease

    def _stop_contending(self, lease: Lease, account: Account, now_ms: int) -> None:
        self._raise_own_floor(account)
        lease.meter.idle_since_ms = now_ms
        if len(account.contenders) == 1:
            account.idle_since_ms = now_ms
            self._raise_floor(lease.spec.pool)
        del account.contenders[lease.lease_id]

    def _raise_floor(self, pool: str) -> int:
        """Raise the pool's floor to the least virtual time of its contending owners, and return it.

        The floor never falls. Otherwise, an owner could gain an advantage by pausing while others do.
        """
        least_ms = min((account.time_ms for account in self._contending(pool)), default=0)
        self._floors[pool] = max(self._floors.get(pool, 0), least_ms)
        return self._floors[pool]

    def _raise_own_floor(self, account: Account) -> None:
        others = [other.time_ms for other in account.contenders.values()]
        account.floor = max(account.floor, min(others, default=0))


def _was_absent(since_ms: int | None, now_ms: int) -> bool:
    return since_ms is None or now_ms - since_ms > _PAUSE_MS


def _usage(virtual_ms: int, weight: int) -> int:
    """Return the least usage that brings an account or lease with this weight to this virtual time."""
    return -(-virtual_ms * max(1, weight) // UNIT)
