"""Exports the meter's figures as Prometheus counters: by pool and, if the administrator enables it, by user and pool.

- A scrape brings the meter up to date without writing anything. Counters start at 0 in each new broker. They also cover the gap between the
  previous broker and this one, if the meter counts it.
- Counts are kept as whole numbers in the meter's units (such as milli-GPU milliseconds) and converted on each scrape, so that rounding
  errors do not add up.
- User names are personal data, so `users` is a separate collector, served only to administrators and on the configured address.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from fractional_gpu.broker.accounting.metering import Metering
from fractional_gpu.broker.metrics import PREFIX, Metric
from fractional_gpu.core.metering.usage import ACCOUNTS, UsageRow

_MOST_USERS: Final = 256  # per pool; all further users are summed as `other`
_SHARE_S: Final = 1_000_000  # a whole device for a second, in milli-GPU milliseconds
_OTHER: Final = ("", "other")


@dataclass(frozen=True, slots=True)
class _Total:
    """A Prometheus counter that exports the meter's `field`, divided by `per_unit`."""

    name: str
    help: str
    field: str
    per_unit: float
    in_money: bool = False  # whether it has a currency
    of_leases: bool = True  # whether it counts only leases, and so by user, too; otherwise it includes unleased use

    def of(self, row: UsageRow) -> int:
        figure: int = getattr(row.usage, self.field)
        return figure if row.key.lease_id or not self.of_leases else 0


_FIGURES: Final = (
    _Total("reserved_gpu_seconds", "GPU time of leases with a process, by share: 4 s of 1/4 GPU count as 1 s", "reserved_share", _SHARE_S),
    _Total("held_gpu_seconds", "GPU time of leases with room on a device, weighted by share", "held_share", _SHARE_S),
    _Total("busy_gpu_seconds", "GPU time of leases that ran a cell on a device, weighted by share", "busy_share", _SHARE_S),
    _Total("suspended_gpu_seconds", "GPU time that suspended leases left to others, weighted by share", "suspended_share", _SHARE_S),
    _Total("charged_gpu_seconds", "GPU time charged under the pool's terms, weighted by share", "charged_share", _SHARE_S),
    _Total("occupied_device_seconds", "Time for which leases held devices, divided among them by their shares", "occupied_us", 1e6),
    _Total("device_seconds", "Total time of all devices", "occupied_us", 1e6, of_leases=False),
    _Total("lease_energy_joules", "Energy that leases drew, with their share of idle power", "energy_mj", 1e3),
    _Total("energy_joules", "Total energy that devices drew", "energy_mj", 1e3, of_leases=False),
    _Total("moved_bytes", "Device memory that suspends and resumes of leases moved", "moved_mib", 1 / 2**20),
    _Total("charged_amount", "Charges for leases, in units of the currency", "charge_milli", 1e3, in_money=True),
    _Total("resident_amount", "Charges if no lease had been suspended", "resident_milli", 1e3, in_money=True),
)  # fmt: skip


def _metrics(labels: tuple[str, ...], *, by_user: bool) -> tuple[Metric, ...]:
    return tuple(
        Metric(
            "counter",
            f"user_{one.name}" if by_user else one.name,
            f"{one.help}, by user" if by_user else one.help,
            (*labels, "currency") if one.in_money else labels,
        )
        for one in _FIGURES
        if one.of_leases or not by_user
    )


POOL_METRICS = _metrics(("pool",), by_user=False)
USER_METRICS = _metrics(("pool", "account", "user"), by_user=True)
_Sums = defaultdict[str, Counter[tuple[str, ...]]]  # by the metric's name and its labels, in the meter's units


class UsageCounters:
    """Counters for one broker's meter. The `users` collector contains user names; the `pools` collector does not."""

    def __init__(self, metering: Metering, pools: Callable[[], Iterable[str]]) -> None:
        """Export counters, starting at 0, for every pool in `pools()`, which returns the names of the configured pools."""
        self._metering = metering
        self._pools = pools
        self._users: dict[str, set[tuple[str, str]]] = {}  # by pool: the users that have their own label
        self._taken = _Sums(Counter)  # usage rows passed on by the meter
        self.pools = _Counters(POOL_METRICS, self._until_now)
        self.users = _Counters(USER_METRICS, self._until_now)
        metering.followers.append(partial(self._add, self._taken))

    def _until_now(self) -> _Sums:
        sums = _Sums(Counter, {name: found.copy() for name, found in self._taken.items()})
        for pool in self._pools():
            for one in _FIGURES:
                if not one.in_money:
                    sums[one.name][pool,] += 0
        self._add(sums, self._metering.uncollected())
        return sums

    def _add(self, sums: _Sums, rows: Iterable[UsageRow]) -> None:
        for row in rows:
            pool, currency = row.party.pool, row.key.currency
            user = self._named(row) if row.key.lease_id else None
            for one in _FIGURES:
                if one.in_money and not currency:
                    continue
                money = (currency,) if one.in_money else ()
                sums[one.name][pool, *money] += one.of(row)
                if user is not None and one.of_leases:
                    sums[f"user_{one.name}"][pool, *user, *money] += one.of(row)

    def _named(self, row: UsageRow) -> tuple[str, str]:
        user = (ACCOUNTS[row.party.seated], row.party.owner)
        named = self._users.setdefault(row.party.pool, set())
        if user not in named and len(named) >= _MOST_USERS:
            return _OTHER
        named.add(user)
        return user


class _Counters(Collector):
    def __init__(self, metrics: tuple[Metric, ...], sums: Callable[[], _Sums]) -> None:
        self._metrics = metrics
        self._sums = sums

    def describe(self) -> Iterable[Family]:
        return [CounterMetricFamily(PREFIX + one.name, one.help, labels=one.labels) for one in self._metrics]

    def collect(self) -> Iterator[Family]:
        sums, per_unit = self._sums(), {one.name: one.per_unit for one in _FIGURES}
        for metric in self._metrics:
            family = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in sums[metric.name].items():
                family.add_metric(labels, value / per_unit[metric.name.removeprefix("user_")])
            yield family
