"""What owners and groups have of each pool: their leases, for limits, and virtual time, for fair shares.

An owner's virtual time in a pool grows by milli-GPU times milliseconds over its weight while its leases are busy (or pinned) on a device,
or keep room there for a process that has not come yet; so does a lease's among its owner's. The one with the least virtual time is served
first. An owner that contends again after a pause starts at the least virtual time of those that contend, so no share is saved up
(start-time fair queueing, Goyal, Vin and Cheng 1996). An idle lease on a device pays nothing, because it leaves for any other. A pause
between two cells (`_PAUSE_MS`) is no absence.

Accounts of owners without leases are kept for as long as they differ from an empty account, and at most `_MOST_FORMER` of them.
"""

from collections.abc import Callable

from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.core.state.leases import Account, Lease

_MOST_FORMER = 4096
_DAY_MS = 86_400_000
_PAUSE_MS = 10_000
_UNIT = 100  # the usual weight


class Accounts:
    """All accounts. `shares_by_time` returns whether a lease's pool shares by virtual time."""

    def __init__(self, shares_by_time: Callable[[Lease], bool]) -> None:
        self._shares_by_time = shares_by_time
        self._owners: dict[tuple[str, str], Account] = {}  # by pool and name
        self._groups: dict[tuple[str, str], Account] = {}
        self._floors: dict[str, int] = {}  # by pool: least virtual time of an owner that contends again

    def owner(self, pool: str, name: str) -> Account:
        return self._owners.get((pool, name)) or Account(name=name)

    def group(self, pool: str, name: str) -> Account:
        return self._groups.get((pool, name)) or Account(name=name)

    def of(self, lease: Lease) -> Account:
        """Return the account of a lease's owner, which is there for as long as the lease is."""
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
        """Forget a lease that holds nothing and waits for nothing."""
        spec, owner = lease.spec, self.of(lease)
        del owner.leases[lease.lease_id]
        if spec.group:
            group = self._groups[spec.pool, spec.group]
            del group.leases[lease.lease_id]
            if not group.leases:
                del self._groups[spec.pool, spec.group]
        if not owner.leases:
            _settle(owner, now_ms)
            self._forget_former(now_ms)

    def _forget_former(self, now_ms: int) -> None:
        """Drop the accounts without leases that equal an empty account, and the oldest ones if there are too many."""
        former = [key for key, account in self._owners.items() if not account.leases]
        equal = [key for key in former if self._equals_empty(key[0], self._owners[key], now_ms)]
        for key in equal or former[:-_MOST_FORMER]:
            del self._owners[key]

    def _equals_empty(self, pool: str, account: Account, now_ms: int) -> bool:
        is_pinned = account.pinned_ms and now_ms - account.pinned_at_ms < _DAY_MS  # a budget is back after a day
        return not is_pinned and _virtual_ms(account.usage, account.weight) <= self._floors.get(pool, 0)

    def resize(self, lease: Lease, spec: LeaseSpec, now_ms: int) -> None:
        """Give the lease another size."""
        _settle(self.of(lease), now_ms)
        _settle_lease(lease, now_ms)
        lease.spec = spec

    # -- shares ----------------------------------------------------------------------------------------------------------

    def share(self, lease: Lease, now_ms: int) -> tuple[int, int]:
        """Return the virtual time of the lease's owner and its own."""
        return owner_time_ms(self.of(lease), now_ms), lease_time_ms(lease, now_ms)

    def contending_weights(self, lease: Lease) -> tuple[int, int]:
        """Return the sums of the weights of the owners that contend in the lease's pool, and of its owner's leases that do.

        Both are at least its own.
        """
        account = self.of(lease)
        owners = sum(one.weight for one in self._contending(lease.spec.pool))
        own = sum(max(1, one.spec.weight) for one in account.contenders.values())
        return max(owners, account.weight), max(own, lease.spec.weight, 1)

    def meter(self, lease: Lease, now_ms: int) -> None:
        """Start or stop the lease's meter, and note whether it contends, by its state. Only where the pool shares by virtual time."""
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
        if metered != lease.meter.is_running:
            _settle(account, now_ms)
            _settle_lease(lease, now_ms)
            lease.meter.is_running, lease.meter.as_of_ms = metered, now_ms
        if not contends and lease.lease_id in account.contenders:
            self._stop_contending(lease, account, now_ms)

    def fall_behind(self, lease: Lease, now_ms: int) -> None:
        """Put the lease's owner behind all others that contend in the pool: it had its turn, and no process came."""
        if not self._shares_by_time(lease):
            return
        account = self.of(lease)
        others = (one for one in self._contending(lease.spec.pool) if one is not account)
        last_ms = max((owner_time_ms(one, now_ms) for one in others), default=-1)
        _settle(account, now_ms)
        account.usage = max(account.usage, _usage(last_ms + 1, account.weight))

    def _contending(self, pool: str) -> list[Account]:
        """Return the accounts of the pool's owners that contend."""
        return [account for (name, _), account in self._owners.items() if name == pool and account.contenders]

    def _start_contending(self, lease: Lease, account: Account, now_ms: int) -> None:
        if not account.contenders:
            _settle(account, now_ms)
            floor = self._raise_floor(lease.spec.pool, now_ms)
            if _was_absent(account.idle_since_ms, now_ms):
                account.usage = max(account.usage, _usage(floor, account.weight))
        # The same among the owner's own leases: a lease that was absent starts at the least virtual time of the others.
        self._raise_own_floor(account, now_ms)
        if _was_absent(lease.meter.idle_since_ms, now_ms):
            lease.meter.usage = max(lease.meter.usage, _usage(account.floor, lease.spec.weight))
        account.contenders[lease.lease_id] = lease

    def _stop_contending(self, lease: Lease, account: Account, now_ms: int) -> None:
        self._raise_own_floor(account, now_ms)
        lease.meter.idle_since_ms = now_ms
        if len(account.contenders) == 1:
            _settle(account, now_ms)
            account.idle_since_ms = now_ms
            self._raise_floor(lease.spec.pool, now_ms)
        del account.contenders[lease.lease_id]

    def _raise_floor(self, pool: str, now_ms: int) -> int:
        """Raise the floor of a pool's owners to the least virtual time of those that contend, and return it.

        It never falls: else an owner could gain by pausing while others pause.
        """
        least_ms = min((owner_time_ms(account, now_ms) for account in self._contending(pool)), default=0)
        self._floors[pool] = max(self._floors.get(pool, 0), least_ms)
        return self._floors[pool]

    def _raise_own_floor(self, account: Account, now_ms: int) -> None:
        others = [lease_time_ms(other, now_ms) for other in account.contenders.values()]
        account.floor = max(account.floor, min(others, default=0))


def _was_absent(since_ms: int | None, now_ms: int) -> bool:
    return since_ms is None or now_ms - since_ms > _PAUSE_MS


def _virtual_ms(usage: int, weight: int) -> int:
    """Return the virtual time of a usage in milli-GPU milliseconds."""
    return usage * _UNIT // max(1, weight)


def _usage(virtual_ms: int, weight: int) -> int:
    """Return the least usage whose virtual time is this."""
    return -(-virtual_ms * max(1, weight) // _UNIT)


def owner_time_ms(account: Account, now_ms: int) -> int:
    """Return the virtual time of an owner, by which the leases of different owners compare."""
    usage = account.usage + account.busy_milli * max(0, now_ms - account.usage_as_of_ms)
    return _virtual_ms(usage, account.weight)


def lease_time_ms(lease: Lease, now_ms: int) -> int:
    """Return the virtual time of a lease, by which it compares with others of its owner."""
    meter = lease.meter
    usage = meter.usage + (lease.milli * max(0, now_ms - meter.as_of_ms) if meter.is_running else 0)
    return _virtual_ms(usage, lease.spec.weight)


def _settle(account: Account, now_ms: int) -> None:
    account.usage += account.busy_milli * max(0, now_ms - account.usage_as_of_ms)
    account.usage_as_of_ms = now_ms


def _settle_lease(lease: Lease, now_ms: int) -> None:
    if lease.meter.is_running:
        lease.meter.usage += lease.milli * (now_ms - lease.meter.as_of_ms)
        lease.meter.as_of_ms = now_ms
