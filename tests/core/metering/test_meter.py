"""The meter's sums: for any order of events they equal the time elapsed, the device time, and the energy drawn."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.metering.meter import Holding, Meter
from fractional_gpu.core.metering.tariffs import Basis, PriceBand, Tariff, utc
from fractional_gpu.core.metering.usage import FIGURES, SHARE_HOUR, Party, Usage, UsageRow, divided

pytestmark = pytest.mark.promise("meter")

DEVICES = ("GPU-0", "GPU-1")
LEASES = ("a", "b", "c")
ANNA = Party(pool="lab", owner="anna", group="staff", label="one.ipynb")
MINUTE, HOUR = 60_000, 3_600_000
PRICE = Tariff(currency="EUR", price_milli=2000)


def summed(rows: list[UsageRow], **wanted: str) -> Usage:
    """Return the sum of the rows whose key has these values."""
    total = Usage()
    for row in rows:
        if all(getattr(row.key, name) == value for name, value in wanted.items()):
            total.add(row.usage)
    return total


def holding(*devices: str, milli: int = 250, busy: bool = False, suspended: bool = False) -> Holding:
    return Holding(party=ANNA, milli=milli, devices=devices, busy=busy, suspended=suspended)


# -- laws --------------------------------------------------------------------------------------------------------------

HOLDINGS = st.builds(
    lambda milli, places, busy, mib: Holding(
        party=ANNA,
        milli=1000 if len(places) > 1 else milli,
        count=max(1, len(places)),
        devices=tuple(sorted(places)),
        busy=busy,
        suspended=not places and busy,
        device_mib=mib if places else 0,
        host_mib=0 if places else mib,
    ),
    milli=st.sampled_from([1, 125, 250, 333, 1000]),
    places=st.sets(st.sampled_from(DEVICES)),
    busy=st.booleans(),
    mib=st.integers(0, 80_000),
)
STEPS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(LEASES), HOLDINGS),
    st.tuples(st.just("end"), st.sampled_from(LEASES)),
    st.tuples(st.just("wait"), st.integers(0, 2 * HOUR)),
    st.tuples(st.just("clock"), st.integers(-3 * HOUR, 3 * HOUR)),
    st.tuples(st.just("draw"), st.sampled_from(DEVICES), st.integers(0, 2_000_000)),
    st.tuples(st.just("power"), st.sampled_from(DEVICES), st.integers(0, 700_000), st.booleans()),
    st.tuples(st.just("unreadable"), st.sampled_from(DEVICES)),
    st.tuples(st.just("reload"), st.sampled_from(DEVICES)),
    st.tuples(st.just("take")),
    st.tuples(st.just("price"), st.sampled_from([PRICE, Tariff(), Tariff(currency="USD", price_milli=1)])),
)


@dataclass
class World:
    """A meter, and the same figures counted independently."""

    meter: Meter = field(default_factory=Meter)
    at_ms: int = 5_000
    wall_ms: int = 1_700_000_000_000
    now: dict[str, Holding] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DEVICES, 1_000_000))
    drawn: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DEVICES, 0))
    expected: dict[str, Usage] = field(default_factory=dict)
    rows: list[UsageRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        for device_id in DEVICES:
            self.meter.add_device(self.at_ms, device_id, "lab")
            self.read(device_id, self.counters[device_id])

    def read(self, device_id: str, counter: int | None, power: int | None = None, *, quiet: bool = False) -> None:
        work = {"a": 700, "b": 0}
        self.drawn[device_id] += self.meter.read_energy(
            self.at_ms, self.wall_ms, device_id, counter_mj=counter, power_mw=power, quiet=quiet, utilisation=work
        )

    def do(self, step: tuple) -> None:  # type: ignore[type-arg]
        match step:
            case "set", lease_id, holding:
                self.meter.set_lease(self.at_ms, self.wall_ms, lease_id, holding)
                self.now[lease_id] = holding
            case "end", lease_id:
                self.meter.set_lease(self.at_ms, self.wall_ms, lease_id, None)
                self.now.pop(lease_id, None)
            case "wait", passed_ms:
                self.wait(passed_ms)
            case "clock", by_ms:
                self.wall_ms += by_ms
            case "draw", device_id, energy_mj:
                self.counters[device_id] += energy_mj
                self.read(device_id, self.counters[device_id])
            case "power", device_id, power_mw, quiet:
                self.read(device_id, self.counters[device_id], power_mw, quiet=quiet)
            case "unreadable", device_id:
                self.read(device_id, None)
            case "reload", device_id:
                self.counters[device_id] = 0
                self.read(device_id, 0)
            case ("take",):
                self.rows += self.meter.take(self.at_ms, self.wall_ms)
            case "price", tariff:
                self.meter.set_tariff(self.at_ms, self.wall_ms, "lab", tariff)

    def wait(self, passed_ms: int) -> None:
        self.at_ms, self.wall_ms = self.at_ms + passed_ms, self.wall_ms + passed_ms
        for lease_id, one in self.now.items():
            count = len(one.devices) or one.count
            share = one.milli * count * passed_ms
            held, suspended = bool(one.devices), one.suspended and not one.devices
            self.expected.setdefault(lease_id, Usage()).add(
                Usage(
                    reserved_ms=passed_ms,
                    held_ms=passed_ms * held,
                    busy_ms=passed_ms * (held and one.busy),
                    suspended_ms=passed_ms * suspended,
                    reserved_share=share,
                    held_share=share * held,
                    busy_share=share * (held and one.busy),
                    suspended_share=share * suspended,
                    device_mib_ms=one.device_mib * passed_ms,
                    host_mib_ms=one.host_mib * passed_ms,
                )
            )


@given(st.lists(STEPS, max_size=40))
def test_sums_equal_time_device_time_and_energy(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    began_ms = world.at_ms
    for step in steps:
        world.do(step)
    world.do(("take",))
    others = {"occupied_us", "energy_mj", "charge_milli", "resident_milli", "whole_milli", "charged_share", "moved_mib"}
    for lease_id in LEASES:
        mine, expected = summed(world.rows, lease_id=lease_id), world.expected.get(lease_id, Usage())
        assert {name: getattr(mine, name) for name in FIGURES if name not in others} == {
            name: getattr(expected, name) for name in FIGURES if name not in others
        }
    for device_id in DEVICES:
        total = summed(world.rows, device_id=device_id)
        assert total.occupied_us == (world.at_ms - began_ms) * 1000
        assert total.energy_mj == world.drawn[device_id]


@given(st.lists(STEPS, max_size=30), st.lists(st.integers(0, 30), max_size=10))
def test_when_figures_are_taken_changes_no_sum(steps: list[tuple], taken: list[int]) -> None:  # type: ignore[type-arg]
    once, often = World(), World()
    for number, step in enumerate(steps):
        once.do(step)
        often.do(step)
        if number in taken:
            often.do(("take",))
    once.do(("take",))
    often.do(("take",))
    assert summed(once.rows) == summed(often.rows)


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_parts_add_up_and_are_within_one_of_their_share(total: int, weights: list[int]) -> None:
    parts = divided(total, weights)
    whole = sum(weights)
    assert sum(parts) == (total if whole else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert not whole or abs(part * whole - total * weight) < whole


# -- energy ------------------------------------------------------------------------------------------------------------


def energies(meter: Meter, at_ms: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in meter.take(at_ms, at_ms):
        found[row.key.lease_id] = found.get(row.key.lease_id, 0) + row.usage.energy_mj
    return found


def test_idle_draw_goes_to_holders_by_share_and_work_to_those_that_work() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab", idle_mw=60_000)
    meter.read_energy(0, 0, "GPU-0", counter_mj=0)
    meter.set_lease(0, 0, "a", holding("GPU-0", milli=250))
    meter.set_lease(0, 0, "b", holding("GPU-0", milli=750, busy=True))
    meter.read_energy(10_000, 10_000, "GPU-0", counter_mj=3_000_000, utilisation={"b": 900})
    # 600 J of idle draw, 2,400 J of work.
    assert energies(meter, 10_000) == {"a": 150_000, "b": 450_000 + 2_400_000}


def test_work_is_divided_by_measured_use_and_by_share_where_none_was_measured() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab", idle_mw=0)
    meter.read_energy(0, 0, "GPU-0", counter_mj=0)
    for lease_id, milli in {"a": 500, "b": 250, "c": 250}.items():
        meter.set_lease(0, 0, lease_id, holding("GPU-0", milli=milli, busy=True))
    meter.read_energy(10_000, 10_000, "GPU-0", counter_mj=1_000_000, utilisation={"a": 100, "b": 650})
    assert energies(meter, 10_000) == {"a": 100_000, "b": 650_000, "c": 250_000}


def test_unheld_device_time_belongs_to_the_pool() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab")
    meter.read_energy(0, 0, "GPU-0", counter_mj=0)
    meter.read_energy(10_000, 10_000, "GPU-0", counter_mj=500_000, quiet=True)
    meter.set_lease(15_000, 15_000, "a", holding("GPU-0"))
    meter.read_energy(20_000, 20_000, "GPU-0", counter_mj=1_000_000, quiet=True)
    assert energies(meter, 20_000) == {"": 750_000, "a": 250_000}
    assert meter.idle_draws() == {"GPU-0": 50_000}


def test_a_stranger_above_the_idle_draw_is_nobodys_cell() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab", idle_mw=50_000)
    meter.read_energy(0, 0, "GPU-0", counter_mj=0)
    meter.set_lease(0, 0, "a", holding("GPU-0"))
    meter.read_energy(10_000, 10_000, "GPU-0", counter_mj=4_000_000, quiet=False)
    assert energies(meter, 10_000) == {"": 3_500_000, "a": 500_000}


def test_a_device_without_a_counter_is_measured_by_its_draw() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab", idle_mw=50_000)
    meter.set_lease(0, 0, "a", holding("GPU-0", busy=True))
    assert meter.read_energy(2_000, 2_000, "GPU-0", counter_mj=None, power_mw=300_000) == 600_000
    assert energies(meter, 2_000) == {"a": 600_000}


def test_a_counter_that_jumps_beyond_what_a_device_can_draw_is_not_believed() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab")
    meter.read_energy(0, 0, "GPU-0", counter_mj=1_000)
    assert meter.read_energy(2_000, 2_000, "GPU-0", counter_mj=10**12, power_mw=100_000) == 200_000
    assert meter.read_energy(4_000, 4_000, "GPU-0", counter_mj=10**12 + 7, power_mw=100_000) == 7


def test_a_next_meter_goes_on_from_the_counter_of_the_last() -> None:
    meter = Meter()
    meter.add_device(0, "GPU-0", "lab", idle_mw=50_000, counter_mj=1_000_000)
    assert meter.read_energy(60_000, 60_000, "GPU-0", counter_mj=5_000_000, quiet=True) == 4_000_000


# -- amounts -----------------------------------------------------------------------------------------------------------


def charged(tariff: Tariff, *stays: tuple[Holding, int], wall_ms: int = 0) -> Usage:
    meter, at_ms = Meter(utc), 0
    meter.set_tariff(0, wall_ms, "lab", tariff)
    for one, lasts_ms in stays:
        meter.set_lease(at_ms, wall_ms + at_ms, "a", one)
        at_ms += lasts_ms
    return summed(meter.take(at_ms, wall_ms + at_ms))


RESIDENT, BUSY, AWAY = holding("GPU-0"), holding("GPU-0", busy=True), holding(suspended=True)


def test_each_basis_charges_its_time() -> None:
    stays = ((BUSY, HOUR), (RESIDENT, 2 * HOUR), (AWAY, 5 * HOUR))
    amounts = {
        Basis.RESERVED: (4000, 4000),  # 8 hours of a quarter at 2.00
        Basis.HELD: (1500, 4000),
        Basis.BUSY: (500, 500),
    }
    for basis, (charge, resident) in amounts.items():
        usage = charged(Tariff(currency="EUR", price_milli=2000, basis=basis), *stays)
        assert (usage.charge_milli, usage.resident_milli, usage.whole_milli) == (charge, resident, 16_000)


def test_suspended_time_gets_its_credit() -> None:
    tariff = Tariff(currency="EUR", price_milli=2000, basis=Basis.RESERVED, credit_milli=800)
    usage = charged(tariff, (RESIDENT, 2 * HOUR), (AWAY, 5 * HOUR))
    assert (usage.charge_milli, usage.resident_milli) == (1000 + 500, 3500)
    assert usage.charged_share == 250 * (2 * HOUR + HOUR)


def test_the_price_is_that_of_the_time_of_the_week() -> None:
    monday_8 = 4 * 24 * HOUR + 8 * HOUR  # 5 January 1970
    dear = PriceBand(spans=((9 * 60, 17 * 60),), price_milli=10_000)
    usage = charged(Tariff(currency="EUR", price_milli=2000, bands=(dear,)), (RESIDENT, 2 * HOUR), wall_ms=monday_8)
    assert usage.charge_milli == 500 + 2500


def test_the_hours_of_a_price_are_said_to_the_minute() -> None:
    days = [(at + 8 * 60 + 30, at + 18 * 60 + 15) for at in range(0, 5 * 24 * 60, 24 * 60)]
    assert PriceBand(spans=tuple(days), price_milli=1).hours == "Mon-Fri 08:30-18:15"


def test_the_machine_s_hours_begin_where_its_time_zone_says() -> None:
    def india(number: int) -> tuple[int, int]:  # 5.5 hours ahead
        return utc(number + 22)._replace(hour_s=utc(number + 22).hour_s - 19_800)

    meter = Meter(india)  # type: ignore[arg-type]
    meter.set_lease(0, 0, "a", RESIDENT)
    hours = {row.key.hour_s: row.usage.held_ms for row in meter.take(2 * HOUR, 2 * HOUR)}
    assert hours == {-1800: HOUR // 2, 1800: HOUR, 5400: HOUR // 2}


@given(st.lists(st.integers(1, 7 * MINUTE), min_size=1, max_size=200), st.integers(1, 50_000))
def test_no_thousandth_is_lost_to_rounding(parts: list[int], price: int) -> None:
    tariff = Tariff(currency="EUR", price_milli=price)
    exact = 250 * sum(parts) * price * 1000 // (1000 * SHARE_HOUR)
    assert charged(tariff, *((RESIDENT, one) for one in parts)).charge_milli == exact
