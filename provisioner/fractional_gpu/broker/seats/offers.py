"""Forecasts how busy pools will be, to decide where to place seats and to help users choose a pool and a fraction.

The forecasts for each user and pool are based on the last four weeks of usage in the ledger. The predicted wait for a seat in a full pool
depends on how long the pool's most recent seats lasted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

from msgspec import structs

from fractional_gpu.broker.accounting.terms import charge_terms, fraction_price
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.broker.seats.rules import (
    PoolFull,
    check_limits,
    check_terms,
    counted_group,
    guaranteed_full,
    is_of_same_server,
    percent,
)
from fractional_gpu.broker.services.status import times
from fractional_gpu.config.pools import Pool
from fractional_gpu.config.settings import Settings
from fractional_gpu.core.model import DeviceView, PoolSpec, ReserveBy, Span
from fractional_gpu.core.seat_packing import (
    PRIOR_USAGE,
    SeatDevice,
    SeatLoad,
    Usage,
    choose_device,
    estimated_usage,
    least_waiting,
    wait_chance_with,
)
from fractional_gpu.core.units import format_duration, format_forecast, format_fraction, format_memory
from fractional_gpu.ledger.records import SeatRecord, UsageRecord
from fractional_gpu.protocol.errors import FractionalGPUError, NoRoomError
from fractional_gpu.protocol.seats import FractionOffer, OfferRequest, Offers, PoolOffer, SeatRequest

HISTORY_DAYS = 28
LAST_SEATS = 200  # per pool, to estimate the wait for a seat
# Assumed until the first seat has ended: half an hour, two hours and eight hours.
_FIRST_SEATS_MS = (30 * 60_000, 2 * 3_600_000, 8 * 3_600_000)
ANY_FRACTIONS = (125, 250, 500, 750, 1000)  # choices in a pool that allows any fraction


class PoolForecasts:
    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._settings = settings
        self.hubs = {pool.name: pool for pool in settings.pools}
        self._usage: dict[tuple[str, str], dict[int, UsageRecord]] = {}  # by owner and pool, then by day
        self._sums: dict[tuple[str, str], UsageRecord] = {}  # sums over the days, computed when needed
        self.lasted_ms: dict[str, list[int]] = {}  # by pool: the durations of past seats, latest first

    def hub(self, pool: str) -> Pool:
        return self.hubs.get(pool) or Pool()

    def learn(self, usage: Sequence[UsageRecord]) -> None:
        for one in usage:
            days = self._usage.setdefault((one.owner, one.pool), {})
            known = days.get(one.day)
            days[one.day] = one if known is None else known + one
            self._sums.pop((one.owner, one.pool), None)

    def forget(self, before_day: int) -> None:
        for who, days in list(self._usage.items()):
            kept = {day: one for day, one in days.items() if day >= before_day}
            if len(kept) < len(days):
                self._usage[who] = kept
                self._sums.pop(who, None)
            if not kept:
                del self._usage[who]

    def seat_ended(self, pool: str, lasted_ms: int) -> None:
        lasted = self.lasted_ms.setdefault(pool, [])
        lasted.insert(0, max(0, lasted_ms))  # the wall clock may have been set back
        del lasted[LAST_SEATS:]

    def habits(self, owner: str, pool: str) -> Usage:
        prior = replace(PRIOR_USAGE, duty_milli=self.hub(pool).expected_use)
        who = owner, pool
        days, known = self._usage.get(who), self._sums.get(who)
        if days is None:
            return prior
        if known is None:
            known = self._sums[who] = reduce(add, days.values())
        return estimated_usage(live_ms=known.live_ms, busy_ms=known.busy_ms, busy_mib_ms=known.busy_mib_ms, prior=prior)

    def memory_mib(
        self, pool: PoolSpec, fraction_milli: int, asked_mib: int | None, allowed: Collection[str] | None = None
    ) -> int:
        sizes = [device.leasable_mib for device in self.usable_devices(pool, allowed)]
        if not sizes:
            emptied = [one for one in self._broker.arbiter.devices() if one.device_id in pool.devices and one.draining]
            why = {0: "", 1: ": its GPU is being emptied"}.get(len(emptied), ": its GPUs are being emptied")
            raise NoRoomError(
                f"pool {pool.name!r} has no devices at the moment{why}; ask your administrator", reason="no-device"
            )
        mib = max(1, min(sizes) * fraction_milli // 1000) if asked_mib is None else asked_mib
        if not 1 <= mib <= max(sizes):
            raise NoRoomError(
                f"{format_memory(mib)} of memory was requested, but the largest device of pool {pool.name!r} can give "
                f"{format_memory(max(sizes))}; request that or less",
                reason="larger-than-device",
            )
        return mib

    def full(
        self, request: SeatRequest, pool: PoolSpec, hub: Pool, memory_mib: int, seats: Sequence[SeatRecord]
    ) -> PoolFull | str | None:
        """Return the id of a device with room for one more seat besides `seats`. If there is none, return a `PoolFull` that explains why.

        If Slurm or Kubernetes has already admitted the request, a device is returned even if long waits are forecast.
        """
        devices = self.usable_devices(pool)
        promised = guaranteed_full(
            pool, memory_mib, sum(seat.memory_mib for seat in seats), sum(device.leasable_mib for device in devices)
        )
        if promised is not None:
            return promised
        load, allowed = self.load(request.owner, pool, memory_mib), request.allowed_devices
        places = [place for place in self.places(pool, devices, seats) if allowed is None or place.device_id in allowed]
        device_id, chance = choose_device(load, places, target_ms=hub.wait_target, bound_milli=hub.wait_bound)
        if device_id is not None:
            return device_id
        if request.admitted:
            place, _ = least_waiting(load, places)
            return place.device_id if place is not None else None
        there = f"{len(seats)} servers are using it" if len(seats) != 1 else "1 server is using it"
        return PoolFull(
            "pool-full",
            f"pool {pool.name!r} is full: {there}, and with another server of {format_fraction(request.fraction_milli)} GPU, "
            f"{percent(-(-chance // 1000))} of the cells would wait longer than {format_duration(hub.wait_target)} for the "
            f"GPU ({percent(hub.wait_bound)} are allowed)",
        )

    def check_ever(self, request: SeatRequest, pool: PoolSpec, hub: Pool, memory_mib: int) -> None:
        full = self.full(request, pool, hub, memory_mib, [])
        if isinstance(full, PoolFull):
            raise NoRoomError(f"{full.sentence}; even an empty pool could not provide that much", reason="too-large")

    def load(self, owner: str, pool: PoolSpec, memory_mib: int) -> SeatLoad:
        habits = self.habits(owner, pool.name)
        mib = memory_mib
        if pool.reserve_by is ReserveBy.USE:
            mib = min(memory_mib, habits.active_mib + pool.headroom_mib)
        return SeatLoad(mib=mib, duty_milli=habits.duty_milli)

    def places(self, pool: PoolSpec, devices: Sequence[DeviceView], seats: Sequence[SeatRecord]) -> list[SeatDevice]:
        loads: dict[str, list[SeatLoad]] = {device.device_id: [] for device in devices}
        for seat in seats:
            # If a seat's device is gone, count the seat on the device with the fewest seats.
            home = (
                seat.device_id if seat.device_id in loads else min(loads, key=lambda one: len(loads[one]), default=None)
            )
            if home is not None:
                loads[home].append(self.load(seat.owner, pool, seat.memory_mib))
        return [
            SeatDevice(
                device_id=device.device_id,
                capacity_mib=max(0, device.leasable_mib - device.stranger_mib),
                loads=tuple(loads[device.device_id]),
                kind="" if device.why_no_move or not pool.may_move else device.name,
            )
            for device in devices
        ]

    def usable_devices(self, pool: PoolSpec, allowed: Collection[str] | None = None) -> list[DeviceView]:
        return [
            one
            for one in self._broker.arbiter.devices()
            if one.device_id in pool.devices
            and not one.lost
            and not one.draining
            and (allowed is None or one.device_id in allowed)
        ]

    def expected(self, pool: str, position: int, seats: int) -> Span | None:
        found = self.worked_out(pool, position, seats)
        return None if found is None else self._broker.arbiter.forecasts.seat_span(pool, found)

    def worked_out(self, pool: str, position: int, seats: int) -> Span | None:
        """Forecast how long it will take until `position` of the pool's `seats` seats have ended, with lower and upper bounds."""
        lasted = sorted(self.lasted_ms.get(pool) or _FIRST_SEATS_MS)
        if not seats:
            return None
        tenth = len(lasted) // 10
        paces = (sum(lasted) // len(lasted), lasted[tenth], lasted[-1 - tenth])
        expected, low, high = (position * pace // seats for pace in paces)
        return Span(expected_ms=expected, low_ms=min(low, expected), high_ms=max(high, expected))

    def offers(
        self, request: OfferRequest, seats: Sequence[SeatRecord], waiting: Mapping[str, int], kept: Collection[str]
    ) -> Offers:
        """Return what each pool offers this user. `kept` lists the pools that are keeping their free room for a waiting request."""
        found = []
        for name, pool in sorted(self._broker.arbiter.pools().items()):
            hub = self.hub(name)
            if hub.terms(request.groups) is None:
                continue
            there = [seat for seat in seats if seat.pool == name]
            found.append(self._pool_offer(request, pool, hub, there, waiting.get(name, 0), kept=name in kept))
        default_pool, default_milli = self._default(found)
        return Offers(
            pools=found,
            default_pool=default_pool,
            default_fraction_milli=default_milli,
            simulated=self._broker.monitor.kind == "simulated",
        )

    def _pool_offer(
        self,
        request: OfferRequest,
        pool: PoolSpec,
        hub: Pool,
        seats: Sequence[SeatRecord],
        waiting: int,
        *,
        kept: bool,
    ) -> PoolOffer:
        devices, why_not = self.usable_devices(pool), ""
        try:
            check_terms(pool.name, hub, request.groups, wall_ms() / 1000)
            self.memory_mib(pool, 1, None)
        except FractionalGPUError as error:
            why_not = str(error)
        fractions = () if not devices else pool.fractions_milli or ANY_FRACTIONS
        return PoolOffer(
            pool=pool.name,
            why_not=why_not,
            hours=hub.hours.text if hub.hours is not None else "",
            devices=len(devices),
            free_mib=sum(max(0, one.leasable_mib - one.reserved_mib - one.stranger_mib) for one in devices),
            capacity_mib=sum(one.leasable_mib for one in devices),
            seats=len(seats),
            waiting=waiting,
            terms=charge_terms(hub.tariff) if hub.price is not None else "",
            fractions=[
                self._fraction_offer(
                    SeatRequest(**structs.asdict(request), pool=pool.name, fraction_milli=milli),
                    pool,
                    seats,
                    waiting,
                    kept=kept,
                )
                for milli in fractions
            ],
        )

    def _fraction_offer(
        self, request: SeatRequest, pool: PoolSpec, seats: Sequence[SeatRecord], waiting: int, *, kept: bool
    ) -> FractionOffer:
        hub, milli = self.hub(pool.name), request.fraction_milli
        memory_mib = self.memory_mib(pool, milli, None)
        seats = [seat for seat in seats if not is_of_same_server(seat, request)]
        where = self.full(request, pool, hub, memory_mib, seats)
        why_not = _over_limit(request, pool, hub, seats)
        free = not isinstance(where, PoolFull) and not kept and not why_not
        expected = None if free else self.expected(pool.name, waiting + 1, len(seats))
        at_once_milli = 0  # of a thousand cells on the seat's device, how many would start without waiting
        if isinstance(where, str):
            places = self.places(pool, self.usable_devices(pool), seats)
            load = self.load(request.owner, pool, memory_mib)
            at_once_milli = 1000 - -(-wait_chance_with(load, places, where) // 1000)
        offer = FractionOffer(
            fraction_milli=milli,
            memory_mib=memory_mib,
            price=fraction_price(hub.tariff, milli),
            free=free,
            sentence="",
            why_not=why_not,
            **times(expected),
            at_once_milli=at_once_milli,
        )
        return structs.replace(offer, sentence=_expectation(offer, hub))

    def _default(self, offers: Sequence[PoolOffer]) -> tuple[str, int]:
        usable = [offer for offer in offers if not offer.why_not and offer.fractions]
        usable.sort(key=lambda offer: offer.pool != self._settings.first_pool.name)
        for offer in usable:
            usual = [one for one in offer.fractions if one.fraction_milli == self._settings.first_fraction]
            for one in (*usual, *offer.fractions):
                if one.free:
                    return offer.pool, one.fraction_milli
        allowed = [(offer.pool, one.fraction_milli) for offer in usable for one in offer.fractions if not one.why_not]
        return allowed[0] if allowed else ("", 0)


def _over_limit(request: SeatRequest, pool: PoolSpec, hub: Pool, seats: Sequence[SeatRecord]) -> str:
    found = hub.terms(request.groups)
    try:
        group = counted_group(found[0] if found is not None else "", request.groups, pool)
        check_limits(request, group, pool, seats)
    except NoRoomError as error:
        return str(error)
    return ""


def _expectation(offer: FractionOffer, hub: Pool) -> str:
    if offer.why_not:
        return offer.why_not
    if offer.free:
        some = offer.at_once_milli < 1000
        return "free now" + (f"; about {percent(offer.at_once_milli)} of the cells start at once" if some else "")
    if hub.when_full == "refuse":
        return "full now"
    if offer.expected_ms is None:
        return "full now; your server would wait for a place"
    return f"full now; a place is expected in {format_forecast(offer.expected_ms, offer.low_ms, offer.high_ms)}"
