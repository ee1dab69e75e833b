"""Measures leases' usage from what they hold and from readings of the devices' energy counters.

The meter does no I/O, uses only integers, and is given the time with every call. The broker and the simulator use the same meter. It keeps
separate figures for each hour, lease and device until the broker collects (`take`) and stores them.

**Time.** `at_ms` is the time on a monotonic clock. `wall_ms` is the wall-clock time at the same moment, and is used only to determine the
hour that usage is booked to. Setting the wall clock can make an hour longer or shorter, but does not change totals.

**Energy.** Between two readings of a device's counter, the energy above the idle draw is divided among the leases that ran cells there, in
proportion to their work. Work is busy time multiplied by measured utilisation, or by the lease's share if utilisation was not measured. The
idle draw is divided among the leases that held the device, in proportion to how much of the device's time each was assigned. The rest is
charged to the pool: the idle draw while no lease held the device, and any energy above it while no cell ran. All parts add up to the energy
read from the counter.

The energy use of virtual machines has been metered in the same way, by utilisation and with shared idle power (Kansal et al., "Virtual
Machine Power Metering and Provisioning", SoCC 2010). docs/costs.md compares this method with two others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fractional_gpu.core.metering.tariffs import SLICE_MS, Calendar, Tariff, utc
from fractional_gpu.core.metering.usage import SHARE_HOUR, Party, Usage, UsageKey, UsageRow, divided

_AMOUNT = 1000 * SHARE_HOUR
"""Divide price (in thousandths) x milli-GPU milliseconds x charged part (in thousandths) by this to get an amount in thousandths."""
_MOST_MW = 10_000_000  # 10 kW: no device draws more, so a higher reading is wrong
_QUIET_MS = 1000  # minimum time between readings for learning the idle draw
_IDLE_PARTS = 8  # each reading moves the known idle draw by one part in this many


_FREE = Tariff()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a lease holds from a certain time on. Memory is in MiB, summed over its devices."""

    party: Party
    milli: int  # its share of each of its devices
    count: int = 1  # devices that it requests
    devices: tuple[str, ...] = ()  # with a reservation now, the first one first
    busy: bool = False
    suspended: bool = False
    device_mib: int = 0
    host_mib: int = 0

    @property
    def working(self) -> bool:
        """Whether the lease is running a cell on a device."""
        return self.busy and bool(self.devices)


@dataclass(slots=True)
class _Lease:
    """A lease whose time has been counted up to `since_ms`. `carry` holds remainders that are too small to be booked yet."""

    holding: Holding
    since_ms: int
    carry: list[int] = field(default_factory=lambda: [0, 0, 0])


@dataclass(slots=True)
class _Part:
    """How much of a device a lease or the pool has used since the device's energy was last divided up."""

    party: Party
    occupied_us: int = 0  # of the device's time
    busy_ms: int = 0
    milli: int = 0  # the lease's share while it was busy


@dataclass(slots=True)
class _Device:
    """A device with its holders, and how it has been used since its energy was last divided up."""

    pool: str
    since_ms: int  # until when its time is divided
    energy_at_ms: int
    counter_mj: int | None = None
    idle_mw: int | None = None  # learnt while nothing ran there
    holders: dict[str, int] = field(default_factory=dict)  # share by lease
    parts: dict[str, _Part] = field(default_factory=dict)  # by lease; "": the pool


class Meter:
    """Adds up what leases use. `calendar` converts times to the machine's local time."""

    def __init__(self, calendar: Calendar = utc) -> None:
        self._calendar = calendar
        self._leases: dict[str, _Lease] = {}
        self._devices: dict[str, _Device] = {}
        self._tariffs: dict[str, Tariff] = {}
        self._rows: dict[UsageKey, UsageRow] = {}
        self._slice: tuple[int, int, int] = (-1, 0, 0)  # number, hour, minute of the week

    # -- inputs ---------------------------------------------------------------------------------------------------------

    def set_tariff(self, at_ms: int, wall_ms: int, pool: str, tariff: Tariff) -> None:
        """Charge by this tariff from now on."""
        if self._tariffs.get(pool) != tariff:
            for lease_id, lease in self._leases.items():
                if lease.holding.party.pool == pool:
                    self._count(lease_id, lease, at_ms, wall_ms)
                    lease.carry = [0, 0, 0]
            self._tariffs[pool] = tariff

    def add_device(
        self, at_ms: int, device_id: str, pool: str, *, idle_mw: int | None = None, counter_mj: int | None = None
    ) -> None:
        """Start metering a new device of the pool.

        `idle_mw` and `counter_mj` are the idle draw and the last counter reading from an earlier meter, if there was one. The next reading
        then also covers the time since the earlier meter's last one.
        """
        self._devices[device_id] = _Device(pool, at_ms, at_ms, counter_mj, idle_mw)

    def set_lease(self, at_ms: int, wall_ms: int, lease_id: str, holding: Holding | None) -> None:
        """Set what the lease holds from now on (None if it has ended). If nothing has changed, this just brings its usage up to date."""
        lease = self._leases.get(lease_id)
        if lease is None:
            if holding is None:
                return
            lease = self._leases[lease_id] = _Lease(Holding(party=holding.party, milli=0), at_ms)
        self._count(lease_id, lease, at_ms, wall_ms)
        before, now = lease.holding, holding or Holding(party=lease.holding.party, milli=0)
        if (before.devices, before.milli) != (now.devices, now.milli):  # if not, the devices' time is divided as before
            for device_id in {*before.devices, *now.devices}:
                if device_id not in self._devices:
                    self.add_device(at_ms, device_id, now.party.pool)
                self._advance(device_id, at_ms, wall_ms)
                self._devices[device_id].holders.pop(lease_id, None)
            for device_id in now.devices:
                self._devices[device_id].holders[lease_id] = max(1, now.milli)
        lease.holding = now
        if holding is None:
            del self._leases[lease_id]

    def knows(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def moved(self, wall_ms: int, lease_id: str, mib: int) -> None:
        """Record how much memory a suspend or resume has moved, in MiB."""
        lease = self._leases.get(lease_id)
        if lease is not None and mib:
            hour_s, _ = self._local(wall_ms)
            self._row(hour_s, lease_id, "", lease.holding.party).moved_mib += mib

    def read_energy(
        self,
        at_ms: int,
        wall_ms: int,
        device_id: str,
        *,
        counter_mj: int | None,
        power_mw: int | None = None,
        quiet: bool = False,
        utilisation: Mapping[str, int] | None = None,
    ) -> int:
        """Divide up the energy the device has used since the last reading. Return the total in mJ.

        `counter_mj` is the reading of its energy counter. If it has no counter, its current draw `power_mw` is multiplied by the time
        instead. Set `quiet` if nothing ran on the device. `utilisation` maps each lease to how much of the device it used while running
        cells, in thousandths. For a lease that was not measured, its share is used instead.
        """
        device = self._devices[device_id]
        if counter_mj is None and device.counter_mj is not None:
            return 0  # the counter cannot be read now, so the next reading includes this time
        for lease_id in device.holders:
            self._count(lease_id, self._leases[lease_id], at_ms, wall_ms)
        self._advance(device_id, at_ms, wall_ms)
        passed_ms = at_ms - device.energy_at_ms
        drawn_mj = _drawn(device.counter_mj, counter_mj, power_mw, passed_ms)
        device.counter_mj, device.energy_at_ms = counter_mj, at_ms
        quiet = quiet and (counter_mj is not None or power_mw is not None)
        self._divide(device_id, device, drawn_mj, passed_ms, wall_ms, quiet=quiet, utilisation=utilisation or {})
        return drawn_mj

    # -- results ----------------------------------------------------------------------------------------------------------

    def take(self, at_ms: int, wall_ms: int) -> list[UsageRow]:
        """Return the figures collected since the last call, grouped by hour, lease and device, and reset them to zero."""
        rows = sorted(self.rows(at_ms, wall_ms), key=lambda row: row.key)
        self._rows = {}
        return [row for row in rows if not row.usage.is_empty()]

    def rows(self, at_ms: int, wall_ms: int) -> Iterable[UsageRow]:
        """Bring all figures up to date, and return those collected since the last `take`."""
        for lease_id, lease in self._leases.items():
            self._count(lease_id, lease, at_ms, wall_ms)
        for device_id in self._devices:
            self._advance(device_id, at_ms, wall_ms)
        return self._rows.values()

    # -- time ------------------------------------------------------------------------------------------------------------

    def _count(self, lease_id: str, lease: _Lease, at_ms: int, wall_ms: int) -> None:
        """Count the lease's time up to now, one quarter hour at a time."""
        passed_ms = at_ms - lease.since_ms
        if passed_ms <= 0:
            return
        if lease.holding.working:
            for device_id in lease.holding.devices:
                part = self._devices[device_id].parts.setdefault(lease_id, _Part(lease.holding.party))
                part.busy_ms += passed_ms
                part.milli = lease.holding.milli
        for begin_wall_ms, piece_ms in _pieces(lease.since_ms, at_ms, wall_ms):
            self._count_within(lease_id, lease, begin_wall_ms, piece_ms)
        lease.since_ms = at_ms

    def _count_within(self, lease_id: str, lease: _Lease, wall_ms: int, passed_ms: int) -> None:
        holding = lease.holding
        hour_s, minute = self._local(wall_ms)
        first = self._row(hour_s, lease_id, holding.devices[0] if holding.devices else "", holding.party)
        share = holding.milli * passed_ms
        first.reserved_ms += passed_ms
        first.device_mib_ms += holding.device_mib * passed_ms
        first.host_mib_ms += holding.host_mib * passed_ms
        if holding.devices:
            first.held_ms += passed_ms
            first.busy_ms += passed_ms if holding.busy else 0
        elif holding.suspended:
            first.suspended_ms += passed_ms
        for device_id in holding.devices or ("",) * holding.count:
            usage = self._row(hour_s, lease_id, device_id, holding.party)
            usage.reserved_share += share
            if device_id:
                usage.held_share += share
                usage.busy_share += share if holding.busy else 0
            elif holding.suspended:
                usage.suspended_share += share
        self._charge(lease, first, minute, passed_ms)

    def _charge(self, lease: _Lease, usage: Usage, minute: int, passed_ms: int) -> None:
        """Book the amounts for this time in whole thousandths, and carry the remainders over."""
        holding = lease.holding
        tariff = self._tariffs.get(holding.party.pool, _FREE)
        held, suspended = bool(holding.devices), holding.suspended
        charged = tariff.charged_milli(held=held, busy=holding.busy, suspended=suspended)
        resident = tariff.charged_milli(held=held or suspended, busy=holding.busy, suspended=False)
        share = holding.milli * (len(holding.devices) or holding.count) * passed_ms
        usage.charged_share += share * charged // 1000
        if not tariff.currency:
            return
        price_milli, whole = tariff.price_at(minute), holding.count * passed_ms * 1000
        for index, worth in enumerate((share * charged, share * resident, whole * 1000)):
            lease.carry[index] += price_milli * worth
        booked = [one // _AMOUNT for one in lease.carry]
        lease.carry = [one % _AMOUNT for one in lease.carry]
        usage.charge_milli += booked[0]
        usage.resident_milli += booked[1]
        usage.whole_milli += booked[2]

    # -- devices -----------------------------------------------------------------------------------------------------------

    def _advance(self, device_id: str, at_ms: int, wall_ms: int) -> None:
        """Divide the device's time up to now among its holders, one quarter hour at a time."""
        device = self._devices[device_id]
        for begin_wall_ms, passed_ms in _pieces(device.since_ms, at_ms, wall_ms):
            hour_s, _ = self._local(begin_wall_ms)
            holders = sorted(device.holders)
            weights = [device.holders[one] for one in holders]
            for lease_id, us in zip(holders or [""], divided(passed_ms * 1000, weights or [1]), strict=True):
                lease = self._leases.get(lease_id)
                party = lease.holding.party if lease is not None else Party(pool=device.pool)
                self._row(hour_s, lease_id, device_id, party).occupied_us += us
                device.parts.setdefault(lease_id, _Part(party)).occupied_us += us
        device.since_ms = max(device.since_ms, at_ms)

    def _divide(
        self,
        device_id: str,
        device: _Device,
        drawn_mj: int,
        passed_ms: int,
        wall_ms: int,
        *,
        quiet: bool,
        utilisation: Mapping[str, int],
    ) -> None:
        """Divide the energy used since the last reading among the leases and the pool, then start again from zero."""
        parts, device.parts = device.parts, {}
        workers = sorted(lease_id for lease_id, part in parts.items() if part.busy_ms)
        idle_mj = min(drawn_mj, (device.idle_mw or 0) * max(0, passed_ms) // 1000)
        if quiet and not workers and passed_ms >= _QUIET_MS:
            idle_mj = drawn_mj
            seen_mw = drawn_mj * 1000 // passed_ms
            known_mw = seen_mw if device.idle_mw is None else device.idle_mw
            device.idle_mw = known_mw + (seen_mw - known_mw) // _IDLE_PARTS
        work = [parts[one].busy_ms * utilisation.get(one, parts[one].milli) for one in workers]
        if not any(work):  # the leases were busy, but their measured utilisation is 0, so only the time is known
            work = [parts[one].busy_ms for one in workers]
        mine = dict(zip(workers or [""], divided(drawn_mj - idle_mj, work or [1]), strict=True))
        holders = sorted(parts)
        times = [parts[one].occupied_us for one in holders]
        if not any(times):
            mine[""] = mine.get("", 0) + idle_mj
        for one, idle_part in zip(holders, divided(idle_mj, times), strict=True):
            mine[one] = mine.get(one, 0) + idle_part
        hour_s, _ = self._local(wall_ms)
        for one, energy_mj in mine.items():
            if energy_mj:
                party = parts[one].party if one in parts else Party(pool=device.pool)
                self._row(hour_s, one, device_id, party).energy_mj += energy_mj

    def idle_draws(self) -> dict[str, int]:
        """Return the idle draw of each device for which it is known, in mW."""
        return {device_id: one.idle_mw for device_id, one in self._devices.items() if one.idle_mw is not None}

    def counters(self) -> dict[str, int]:
        """Return the last counter reading of each device that has a counter, in mJ."""
        return {device_id: one.counter_mj for device_id, one in self._devices.items() if one.counter_mj is not None}

    # -- rows ------------------------------------------------------------------------------------------------------------

    def _local(self, wall_ms: int) -> tuple[int, int]:
        """Return the start of the local hour, in seconds since 1970, and the minute of the local week."""
        number = wall_ms // SLICE_MS
        if number != self._slice[0]:
            self._slice = (number, *self._calendar(number))
        return self._slice[1], self._slice[2]

    def _row(self, hour_s: int, lease_id: str, device_id: str, party: Party) -> Usage:
        key = UsageKey(hour_s, lease_id, device_id, self._tariffs.get(party.pool, _FREE).currency)
        row = self._rows.get(key)
        if row is None or row.party != party:
            row = self._rows[key] = UsageRow(key, party, row.usage if row is not None else Usage())
        return row.usage


def _pieces(begin_ms: int, at_ms: int, wall_ms: int) -> Iterator[tuple[int, int]]:
    """Split the time from `begin_ms` to now at quarter hours. Yield each piece's start, as wall-clock time, and its length, both in ms."""
    while begin_ms < at_ms:
        begin_wall_ms = wall_ms - (at_ms - begin_ms)
        passed_ms = min(at_ms - begin_ms, SLICE_MS - begin_wall_ms % SLICE_MS)
        yield begin_wall_ms, passed_ms
        begin_ms += passed_ms


def _drawn(before_mj: int | None, counter_mj: int | None, power_mw: int | None, passed_ms: int) -> int:
    """Return the energy used since the counter was at `before_mj`, in mJ. Without a counter, estimate it from the current draw."""
    by_power = max(0, power_mw or 0) * max(0, passed_ms) // 1000
    if counter_mj is None:
        return by_power
    if before_mj is None:
        return 0  # the first reading
    drawn = counter_mj - before_mj
    if drawn < 0:  # the driver was reloaded, so the counter restarted at 0
        drawn = counter_mj
    return drawn if drawn <= _MOST_MW * max(_QUIET_MS, passed_ms) // 1000 else by_power
