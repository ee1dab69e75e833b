"""Prometheus's counters always agree with the meter: exact, never falling, and split by user only on request."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.registry import Collector

from fractional_gpu.broker.accounting.counters import UsageCounters
from fractional_gpu.broker.metrics import PREFIX
from fractional_gpu.core.events import Attached, BusyChanged, LeaseRequested, Wanted
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.ledger.ledger import Ledger
from tests.broker.accounting.test_metering import MINUTE, SECOND, World

pytestmark = pytest.mark.promise("metrics")

Counted = Mapping[tuple[str, ...], float]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield World(ledger)


def counters_of(world: World) -> UsageCounters:
    return UsageCounters(world.metering, world.hand.arbiter.pools)


def scraped(collector: Collector) -> Counted:
    """Return the counters by name (without the prefix), with the values of their labels."""
    return {
        (sample.name.removeprefix(PREFIX).removesuffix("_total"), *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def begin_story(world: World) -> None:
    """Lease a runs for 4 s and rests for 56 s; then b takes its room, and a is saved within 2 s."""
    world.kernel("a")
    world.hand.run("a")
    world.wait(4 * SECOND)
    world.hand.rest("a")
    world.wait(56 * SECOND)
    world.hand.start("b")
    leaves = world.hand.want("b")
    world.wait(2 * SECOND)
    world.hand.saved(leaves, saved_mib=300)


def test_the_counters_are_what_the_meter_counted_until_the_scrape(world: World) -> None:
    counters = counters_of(world)
    world.draw(1_000_000)
    begin_story(world)
    world.draw(5_000_000, 50)
    world.wait(28 * SECOND)
    assert scraped(counters.pools) == {
        ("reserved_gpu_seconds", "p"): 90 / 4 + 30 / 4,
        ("held_gpu_seconds", "p"): 62 / 4 + 28 / 4,
        ("busy_gpu_seconds", "p"): 1,
        ("suspended_gpu_seconds", "p"): 28 / 4,
        ("charged_gpu_seconds", "p"): 62 / 4 + 28 / 4,
        ("occupied_device_seconds", "p"): 90,
        ("device_seconds", "p"): 90,
        ("lease_energy_joules", "p"): 4000,
        ("energy_joules", "p"): 4000,
        ("moved_bytes", "p"): 300 * 2**20,
        ("charged_amount", "p", "EUR"): (250 * 62_000 // 3_600_000 + 250 * 28_000 // 3_600_000) / 1000,
        ("resident_amount", "p", "EUR"): (250 * 90_000 // 3_600_000 + 250 * 28_000 // 3_600_000) / 1000,
    }


def test_the_time_of_idle_devices_is_the_pools(world: World) -> None:
    counters = counters_of(world)
    assert scraped(counters.pools)["device_seconds", "p"] == 0, "a counter is there before anything is counted"
    world.draw(1_000_000)
    world.wait(MINUTE)
    world.draw(4_000_000)
    seen = scraped(counters.pools)
    assert (seen["device_seconds", "p"], seen["occupied_device_seconds", "p"]) == (60, 0)
    assert (seen["energy_joules", "p"], seen["lease_energy_joules", "p"]) == (3000, 0)
    assert scraped(counters.users) == {}


def request(world: World, name: str, *, owner: str, seat: str = "") -> None:
    what = LeaseSpec(lease_id=name, pool="p", owner=owner, fraction_milli=250, reserve_mib=100, seat=seat)
    world.kernel(name)
    at_ms = world.hand.now
    world.hand.send(LeaseRequested(at_ms=at_ms, spec=what, needs_reservation=False))
    world.hand.send(Attached(at_ms=at_ms, lease_id=name, gated=True))
    world.hand.send(Wanted(at_ms=at_ms, lease_id=name))
    world.hand.send(BusyChanged(at_ms=at_ms, lease_id=name, busy=True))


def test_users_are_told_apart_and_a_hubs_user_from_one_of_the_machine(world: World) -> None:
    counters = counters_of(world)
    request(world, "1", owner="ada")
    world.wait(4 * SECOND)
    request(world, "2", owner="ada", seat="s")
    request(world, "3", owner="bob")
    world.wait(8 * SECOND)
    busy = {key[1:]: value for key, value in scraped(counters.users).items() if key[0] == "user_busy_gpu_seconds"}
    assert busy == {("p", "machine", "ada"): 3, ("p", "hub", "ada"): 2, ("p", "machine", "bob"): 2}
    assert sum(busy.values()) == scraped(counters.pools)["busy_gpu_seconds", "p"]


def test_the_next_broker_begins_at_zero_with_what_happened_between_the_two(world: World) -> None:
    counters = counters_of(world)
    world.kernel("a")
    world.hand.idle("a")
    world.wait(MINUTE)
    assert scraped(counters.pools)["held_gpu_seconds", "p"] == 15
    world.metering.write()
    world.wait(20 * SECOND)
    world.begin()
    counters = counters_of(world)
    assert scraped(counters.pools)["held_gpu_seconds", "p"] == 0
    world.recover("a", LeaseState.RESIDENT, device_id="d0")
    assert scraped(counters.pools)["held_gpu_seconds", "p"] == 5
