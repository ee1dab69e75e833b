"""Reports a host's remaining capacity (`GET /v1/capacity`) to people and to the node agents of Slurm and Kubernetes.

For each offered fraction, a forecast estimates how many more seats each device can take. The broker also uses this forecast to place seats
(`core.seat_packing`). It assumes that nothing is known about the new users, and respects the pool's `wait_bound`. The smallest estimate is
reported, so that Slurm or Kubernetes can grant any of the offered sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fractional_gpu import __version__
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.lanes import QUESTIONS
from fractional_gpu.broker.seats.offers import ANY_FRACTIONS, PoolForecasts
from fractional_gpu.broker.seats.rules import percent
from fractional_gpu.config.pools import Pool
from fractional_gpu.core.model import PoolSpec
from fractional_gpu.core.seat_packing import (
    SeatDevice,
    SeatLoad,
    admissible_milli,
    choose_device,
    least_waiting,
    more_seats_in,
    wait_chance_with,
    wait_quantile_ms,
)
from fractional_gpu.core.units import format_duration, format_fraction
from fractional_gpu.host.memory import machine_total_mib
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.nodes import Capacity, PoolCapacity

_MOST_ON_A_DEVICE_MILLI = 16_000  # the largest sum of fractions counted on one device
_HALF_MILLI, _MOST_CELLS_MILLI = 500, 950


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """The input for a pool's forecast, as plain data, so that the forecast can be computed in a thread."""

    spec: PoolSpec
    hub: Pool
    places: list[SeatDevice]
    loads: dict[int, SeatLoad]  # by fraction on offer: the load of a seat
    usual_milli: int
    held_milli: int
    waiting: int
    promised_left_mib: int | None  # None if there is no limit
    memory_mib: dict[int, int]


class HostCapacity:
    def __init__(self, broker: Broker, forecasts: PoolForecasts, *, default_milli: int) -> None:
        self._broker = broker
        self._forecasts = forecasts
        self._default_milli = default_milli

    async def now(self, seats: Sequence[SeatRecord]) -> Capacity:
        """Return the host's remaining capacity, given the existing `seats`. Cancellation does not stop the forecast's thread."""
        broker, arbiter = self._broker, self._broker.arbiter
        pools = [self._snapshot(pool, seats) for _, pool in sorted(arbiter.pools().items())]
        left_mib = max(0, arbiter.host_left_mib)
        answers = await QUESTIONS.run(lambda: [_capacity(pool) for pool in pools])
        return Capacity(
            version=__version__,
            simulated=broker.monitor.kind == "simulated",
            host_memory_total_mib=machine_total_mib(),
            host_memory_left_mib=left_mib,
            pools=answers,
        )

    def fitting(self, pool: PoolSpec) -> str:
        empty, fit, limited = self._snapshot(pool, []), [], False
        for milli, load in empty.loads.items():
            count, promised = _count(empty, milli, load), _promised(empty, milli)
            why = " (oversubscription)" if count == promised else " or more" if count >= _most(milli) else ""
            fit.append(f"{count} seat{'' if count == 1 else 's'} of {format_fraction(milli)} GPU{why}")
            limited |= not why
        said = f"pool {pool.name!r} has room for about {', or '.join(fit)}"
        if not limited:
            return said if fit else ""
        hub = empty.hub
        return (
            f"{said}; with more, over {percent(hub.wait_bound)} of the cells would wait longer than "
            f"{format_duration(hub.wait_target)} (wait_bound, wait_target), if users compute {percent(hub.expected_use)} of the "
            "time (expected_use)"
        )

    def _snapshot(self, pool: PoolSpec, seats: Sequence[SeatRecord]) -> _Pool:
        broker, forecasts = self._broker, self._forecasts
        devices, there = forecasts.usable_devices(pool), [seat for seat in seats if seat.pool == pool.name]
        fractions = pool.fractions_milli or ANY_FRACTIONS
        memory = {milli: forecasts.memory_mib(pool, milli, None) for milli in fractions} if devices else {}
        unseated = [
            (kernel, view) for kernel, view in broker.views() if view.spec.pool == pool.name and not view.spec.seat
        ]
        left_mib = None
        if pool.oversubscription_milli is not None:
            limit_mib = sum(one.leasable_mib for one in devices) * pool.oversubscription_milli // 1000
            left_mib = max(0, limit_mib - sum(seat.memory_mib for seat in there))
        return _Pool(
            spec=pool,
            hub=forecasts.hub(pool.name),
            places=forecasts.places(pool, devices, there),
            loads={milli: forecasts.load("", pool, mib) for milli, mib in memory.items()},
            usual_milli=self._default_milli if self._default_milli in fractions else min(fractions),
            held_milli=sum(seat.fraction_milli for seat in there)
            + sum(view.spec.fraction_milli * view.spec.devices for _, view in unseated),
            waiting=sum(
                broker.arbiter.waits(kernel.lease_id) for kernel, view in broker.views() if view.spec.pool == pool.name
            ),
            promised_left_mib=left_mib,
            memory_mib=memory,
        )


def _capacity(pool: _Pool) -> PoolCapacity:
    """Return one pool's forecast. This function is pure, and can take a few tenths of a second on a host with differing devices."""
    counts = {milli: _count(pool, milli, load) for milli, load in pool.loads.items()}
    waiting_millionths = _waiting_millionths(pool)
    return PoolCapacity(
        name=pool.spec.name,
        devices=[place.device_id for place in pool.places],
        total_milli=1000 * len(pool.places),
        held_milli=pool.held_milli,
        admissible_milli=admissible_milli(counts),
        waiting=pool.waiting,
        wait_p50_s=wait_quantile_ms(waiting_millionths, _HALF_MILLI) / 1000,
        wait_p95_s=wait_quantile_ms(waiting_millionths, _MOST_CELLS_MILLI) / 1000,
        fraction_milli=pool.usual_milli,
        fractions_milli=list(pool.spec.fractions_milli),
        wait_target_ms=pool.hub.wait_target,
        wait_bound_milli=pool.hub.wait_bound,
        device_mib=min((place.capacity_mib for place in pool.places), default=0),
    )


def _waiting_millionths(pool: _Pool) -> int:
    """Return the chance, in millionths, that a cell would find no room if one more seat of the usual size were added."""
    load = pool.loads.get(pool.usual_milli)
    if load is None:
        return 1_000_000
    device_id, _ = choose_device(load, pool.places, target_ms=pool.hub.wait_target, bound_milli=pool.hub.wait_bound)
    if device_id is None:
        return least_waiting(load, pool.places)[1]
    return wait_chance_with(load, pool.places, device_id)


def _count(pool: _Pool, milli: int, load: SeatLoad) -> int:
    there = more_seats_in(
        pool.places,
        load,
        target_ms=pool.hub.wait_target,
        bound_milli=pool.hub.wait_bound,
        most=_most(milli),
    )
    promised = _promised(pool, milli)
    return there if promised is None else min(there, promised)


def _promised(pool: _Pool, milli: int) -> int | None:
    return None if pool.promised_left_mib is None else pool.promised_left_mib // pool.memory_mib[milli]


def _most(milli: int) -> int:
    return max(1, _MOST_ON_A_DEVICE_MILLI // milli)
