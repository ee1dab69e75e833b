"""What owners and groups have of each pool: totals for limits, and virtual time for fair shares.

An owner's virtual time in a pool grows by milli-GPU times milliseconds over its weight while its leases are busy (or pinned) on a device,
or keep room there for a process that has not come yet; so does a lease's among its owner's. The one with the least virtual time is served
first. An owner that contends again after a pause starts where the least of the contending ones stands, so no share is saved up (start-time
fair queueing, Goyal, Vin and Cheng 1996). An idle lease on a device pays nothing, because it leaves for any other. A pause between two
cells (`_PAUSE_MS`) is no absence.

Accounts of owners without leases are kept for as long as they differ from an empty account, and at most `_MOST_FORMER` of them.
"""

from collections.abc import Callable

from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.core.state.leases import Account, Lease

_MOST_FORMER = 4096


_DAY_MS = 86_400_000


_PAUSE_MS = 10_000


_UNIT = 100  # the usual weight


def _virtual_ms(usage: int, weight: int) -> int:
    """Return the virtual time of a usage in milli-GPU milliseconds."""
    return usage * _UNIT // max(1, weight)


def guaranteed_mib(spec: LeaseSpec) -> int:
    """Return what a lease is promised on all its devices: what it requests, which is never more than its cap; of several, its cap."""
    if spec.devices > 1 or spec.request_mib is None:
        return spec.reserve_mib * spec.devices
    return min(spec.request_mib, spec.reserve_mib)


def _was_absent(since_ms: int | None, now_ms: int) -> bool:
    return since_ms is None or now_ms - since_ms > _PAUSE_MS


class Accounts:
    """All accounts, kept up to date by `Books`. `shares_by_time` returns whether a lease's pool shares by virtual time."""

    def __init__(self, shares_by_time: Callable[[Lease], bool]) -> None:
        self._shares_by_time = shares_by_time
        self.owners: dict[tuple[str, str], Account] = {}
        self.groups: dict[tuple[str, str], Account] = {}
        self.promised_mib: dict[str, int] = {}  # by pool: what was guaranteed
        self._contending: dict[str, dict[str, Account]] = {}  # by pool, then owner
        self._floors: dict[str, int] = {}  # by pool: least virtual time of an owner that contends again
        self._former: dict[tuple[str, str], Account] = {}  # owners without leases

    # -- totals ----------------------------------------------------------------------------------------------------------

    def owner(self, pool: str, name: str) -> Account:
        """Return an owner's account."""
        return self.owners.get((pool, name)) or Account(name=name)

    def group(self, pool: str, name: str) -> Account:
        """Return a group's account."""
        return self.groups.get((pool, name)) or Account(name=name)

    def of(self, lease: Lease) -> Account:
        """Return the account of a lease's owner, which is there for as long as the lease is."""
        return self.owners[lease.spec.pool, lease.spec.owner]

    def _accounts_of(self, spec: LeaseSpec) -> tuple[Account, ...]:
        mine = self.owners[spec.pool, spec.owner]
        return (mine, self.groups[spec.pool, spec.group]) if spec.group else (mine,)

    def open(self, lease: Lease) -> None:
        """Count a new lease."""
        spec = lease.spec
        key = (spec.pool, spec.owner)
        if key not in self.owners:
            self.owners[key] = self._former.pop(key, Account(name=spec.owner))
        if spec.group:
            self.groups.setdefault((spec.pool, spec.group), Account(name=spec.group))
        for account in self._accounts_of(spec):
            account.leases += 1
        self.owners[key].weight = max(1, spec.owner_weight)
        self._promise(spec, 1)

    def close(self, lease: Lease, now_ms: int) -> None:
        """Forget a lease that holds nothing and waits for nothing."""
        spec = lease.spec
        if lease.revoked:
            self.reinstate(lease)
        self._promise(spec, -1)
        for account in self._accounts_of(spec):
            account.leases -= 1
        if spec.group and not self.groups[spec.pool, spec.group].leases:
            del self.groups[spec.pool, spec.group]
        key = (spec.pool, spec.owner)
        account = self.owners[key]
        if not account.leases:
            del self.owners[key]
            self._settle(account, now_ms)
            self._former[key] = account
            self._forget_former(now_ms)

    def resize(self, lease: Lease, spec: LeaseSpec, now_ms: int) -> None:
        """Give the lease another size."""
        account = self.of(lease)
        self._settle(account, now_ms)
        if lease.meter.is_running:
            lease.meter.usage += lease.milli * (now_ms - lease.meter.as_of_ms)
            lease.meter.as_of_ms = now_ms
            account.busy_milli -= lease.milli
        self._promise(lease.spec, -1)
        if lease.held_mib:
            self.reserve(lease, -1)
        lease.spec = spec
        self._promise(spec, 1)
        if lease.held_mib:
            self.reserve(lease, 1)
        if lease.meter.is_running:
            account.busy_milli += lease.milli

    def _promise(self, spec: LeaseSpec, sign: int) -> None:
        for account in self._accounts_of(spec):
            account.milli += sign * spec.fraction_milli * spec.devices
        self._guarantee(spec, sign)

    def revoke(self, lease: Lease) -> None:
        """Take back the pool's promise to the lease, which counts for its owner as before."""
        self._guarantee(lease.spec, -1)

    def reinstate(self, lease: Lease) -> None:
        """Promise a revoked lease again what it was promised before."""
        self._guarantee(lease.spec, 1)

    def _guarantee(self, spec: LeaseSpec, sign: int) -> None:
        left = self.promised_mib.get(spec.pool, 0) + sign * guaranteed_mib(spec)
        self.promised_mib[spec.pool] = left
        if not left:
            del self.promised_mib[spec.pool]

    def reserve(self, lease: Lease, sign: int) -> None:
        """Count a lease that holds a reservation from now on (1), or does not any more (-1)."""
        for account in self._accounts_of(lease.spec):
            account.resident_milli += sign * lease.milli
            if sign > 0:
                account.holders[lease.lease_id] = lease
            else:
                del account.holders[lease.lease_id]

    def _forget_former(self, now_ms: int) -> None:
        """Check the two oldest accounts without leases: drop those that equal an empty account, or all where there are too many."""
        for key in list(self._former)[:2]:
            account = self._former[key]
            pinned = account.pinned_ms and now_ms - account.pinned_at_ms < _DAY_MS  # a budget is back after a day
            says = pinned or _virtual_ms(account.usage, account.weight) > self._floors.get(key[0], 0)
            del self._former[key]
            if says and len(self._former) < _MOST_FORMER:
                self._former[key] = account

    # -- shares ----------------------------------------------------------------------------------------------------------

    def share(self, lease: Lease, now_ms: int) -> tuple[int, int]:
        """Return the virtual time of the lease's owner and its own."""
        meter = lease.meter
        mine = meter.usage
        if meter.is_running:
            mine += lease.milli * max(0, now_ms - meter.as_of_ms)
        return self._virtual_ms_now(self.of(lease), now_ms), _virtual_ms(mine, lease.spec.weight)

    def contending_weights(self, lease: Lease) -> tuple[int, int]:
        """Return the sums of the weights of the owners that contend in the lease's pool, and of its owner's leases that do.

        Both are at least its own.
        """
        account = self.of(lease)
        owners = sum(one.weight for one in self._contending.get(lease.spec.pool, {}).values())
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
            self._settle(account, now_ms)
            if lease.meter.is_running:
                lease.meter.usage += lease.milli * (now_ms - lease.meter.as_of_ms)
            account.busy_milli += lease.milli if metered else -lease.milli
            lease.meter.is_running, lease.meter.as_of_ms = metered, now_ms
        if not contends and lease.lease_id in account.contenders:
            self._stop_contending(lease, account, now_ms)

    def fall_behind(self, lease: Lease, now_ms: int) -> None:
        """Put the lease's owner behind all others that contend in the pool: it had its turn, and no process came."""
        if not self._shares_by_time(lease):
            return
        account = self.of(lease)
        others = (one for one in self._contending.get(lease.spec.pool, {}).values() if one is not account)
        last_ms = max((self._virtual_ms_now(one, now_ms) for one in others), default=-1)
        self._settle(account, now_ms)
        account.usage = max(account.usage, -(-(last_ms + 1) * account.weight // _UNIT))

    def _settle(self, account: Account, now_ms: int) -> None:
        account.usage += account.busy_milli * max(0, now_ms - account.usage_as_of_ms)
        account.usage_as_of_ms = now_ms

    def _start_contending(self, lease: Lease, account: Account, now_ms: int) -> None:
        pool = lease.spec.pool
        contending = self._contending.setdefault(pool, {})
        if not account.contenders:
            self._settle(account, now_ms)
            # A floor never falls: else an owner could gain by pausing while others pause.
            self._floors[pool] = floor = max(self._floors.get(pool, 0), self._least_virtual_ms(contending, now_ms))
            if _was_absent(account.idle_since_ms, now_ms):
                account.usage = max(account.usage, -(-floor * account.weight // _UNIT))
            contending[account.name] = account
        # The same floor among the owner's own leases: a lease that was absent starts where the least of the others stands.
        others = [self.share(other, now_ms)[1] for other in account.contenders.values()]
        account.floor = max(account.floor, min(others, default=0))
        if _was_absent(lease.meter.idle_since_ms, now_ms):
            lease.meter.usage = max(lease.meter.usage, -(-account.floor * max(1, lease.spec.weight) // _UNIT))
        account.contenders[lease.lease_id] = lease

    def _stop_contending(self, lease: Lease, account: Account, now_ms: int) -> None:
        pool = lease.spec.pool
        others = [self.share(other, now_ms)[1] for other in account.contenders.values()]
        account.floor = max(account.floor, min(others, default=0))
        del account.contenders[lease.lease_id]
        lease.meter.idle_since_ms = now_ms
        if account.contenders:
            return
        account.idle_since_ms, contending = now_ms, self._contending[pool]
        self._settle(account, now_ms)
        self._floors[pool] = max(self._floors.get(pool, 0), self._least_virtual_ms(contending, now_ms))
        del contending[account.name]
        if not contending:
            del self._contending[pool]

    def _least_virtual_ms(self, contending: dict[str, Account], now_ms: int) -> int:
        return min((self._virtual_ms_now(account, now_ms) for account in contending.values()), default=0)

    @staticmethod
    def _virtual_ms_now(account: Account, now_ms: int) -> int:
        usage = account.usage + account.busy_milli * max(0, now_ms - account.usage_as_of_ms)
        return _virtual_ms(usage, account.weight)
