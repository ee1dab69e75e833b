"""The broker's record of what its leases used: complete across restarts, and missing at most a minute after a kill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from fractional_gpu.broker.accounting.metering import Metering
from fractional_gpu.broker.clock import Clocks
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Attached, Event, LeaseRecovered, LeaseReleased, LeaseRequested
from fractional_gpu.core.metering.tariffs import Tariff
from fractional_gpu.core.metering.usage import Usage
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import DeviceSensors
from fractional_gpu.ledger.ledger import METER, Ledger
from fractional_gpu.ledger.records import LedgerError
from tests.core.driving import Hand, spec

pytestmark = pytest.mark.promise("meter")

EUR = Tariff(currency="EUR", price_milli=1000)
MINUTE = 60_000
SECOND = 1000


class Writer:
    """Writes immediately what would be retried if the disk were full."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def submit(self, act: Callable[[], None], *, again: bool = False) -> None:
        assert again
        act()


class Metered(Hand):
    """A hand whose meter sees each event as the broker shows it."""

    metering: Metering | None = None

    def send(self, event: Event) -> list[Effect]:
        effects = super().send(event)
        if self.metering is not None:
            self.metering.saw(event, effects)
        return effects


@dataclass
class World:
    """A broker's arbiter and meter over a ledger, with clocks that the test sets."""

    ledger: Ledger
    wall_ms: int = 1_700_000_100_000
    boot_ms: int = 500_000
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a broker that knows only the ledger. Its arbiter's clock continues from the machine's."""
        self.hand = Metered()
        self.hand.now = self.boot_ms
        self.writer = Writer(self.ledger)
        clocks = Clocks(now=lambda: self.hand.now, wall=lambda: self.wall_ms, boot=lambda: self.boot_ms)
        self.metering = Metering(self.hand.arbiter, cast("Any", self.writer), self.kernels, clocks)
        self.metering.begin(self.ledger, {"p": EUR})
        self.hand.metering = self.metering

    def kernel(self, name: str) -> None:
        self.kernels[name] = Kernel(lease_id=name, uid=0, token_sha256="", created_ms=self.wall_ms)

    def wait(self, ms: int) -> list[Effect]:
        self.wall_ms, self.boot_ms = self.wall_ms + ms, self.boot_ms + ms
        return self.hand.wait(ms)

    def draw(self, counter_mj: int, busy_percent: int = 0) -> None:
        self.metering.read_energy({"d0": DeviceSensors(energy_mj=counter_mj, busy_percent=busy_percent)}, {})

    def recover(self, name: str, state: LeaseState, **more: Any) -> None:  # noqa: ANN401
        one = LeaseRecovered(at_ms=self.hand.now, spec=spec(name), state=state, generation=9, **more)
        self.hand.send(one)

    def written(self, lease_id: str | None = None) -> Usage:
        only = {} if lease_id is None else {"lease": lease_id}
        found = list(self.ledger.metered([], 0, 2**40, only))
        return found[0][1] if found else Usage()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield World(ledger)


def test_a_lease_is_counted_through_its_states_and_its_swaps(world: World) -> None:
    world.kernel("a")
    world.hand.run("a")
    world.wait(10 * SECOND)
    world.hand.rest("a")
    world.wait(50 * SECOND)
    world.hand.start("b")
    leaves = world.hand.want("b")
    world.wait(2 * SECOND)
    world.hand.saved(leaves, saved_mib=300)
    world.wait(28 * SECOND)
    world.metering.write()
    a, b = world.written("a"), world.written("b")
    assert (a.reserved_ms, a.held_ms, a.busy_ms, a.suspended_ms) == (90_000, 62_000, 10_000, 28_000)
    assert (a.moved_mib, a.host_mib_ms) == (300, 300 * 28_000)
    assert (b.reserved_ms, b.held_ms) == (30_000, 28_000)
    assert a.charge_milli == 250 * 62_000 // 3_600_000
    assert world.written().occupied_us == 90_000_000


def test_room_that_was_kept_for_a_start_is_the_pools(world: World) -> None:
    """Otherwise a charge would be lost when the ledger forgets a lease that never had a process."""
    for name in ("never", "late"):
        world.kernel(name)
        world.hand.send(LeaseRequested(at_ms=world.hand.now, spec=spec(name, gated=False), needs_reservation=True))
        assert world.hand.view(name).reserved_mib
        world.wait(10 * SECOND)
        if name == "late":
            world.hand.send(Attached(at_ms=world.hand.now, lease_id=name, gated=False))
            world.wait(20 * SECOND)
        world.hand.send(LeaseReleased(at_ms=world.hand.now, lease_id=name))
    world.metering.write()
    assert world.written("never") == Usage()
    assert world.written("").occupied_us == 20_000_000
    assert (world.written("late").reserved_ms, world.written("late").occupied_us) == (20_000, 20_000_000)
    assert world.written("late").charge_milli == 250 * 20_000 // 3_600_000


@pytest.mark.parametrize("lost_ms", [0, 1, 59 * SECOND])
def test_a_broker_that_is_killed_loses_what_it_counted_since_the_last_write(world: World, lost_ms: int) -> None:
    world.kernel("a")
    world.hand.run("a")
    world.draw(1_000_000)
    world.wait(MINUTE)
    world.draw(2_000_000, 90)
    world.metering.write()
    world.wait(lost_ms)
    world.begin()  # killed here
    world.wait(20 * SECOND)
    world.recover("a", LeaseState.RESIDENT, device_id="d0", busy=True)
    world.draw(5_000_000)
    world.wait(10 * SECOND)
    world.draw(6_000_000, 90)
    world.metering.write()
    a = world.written("a")
    # Everything except what was busy while no broker watched.
    assert (a.reserved_ms, a.held_ms) == (90_000 + lost_ms, 90_000 + lost_ms)
    assert a.busy_ms == 70_000
    assert world.written().occupied_us == (90_000 + lost_ms) * 1000
    assert world.written().energy_mj == 5_000_000


def test_after_a_reboot_the_time_before_is_nobodys_and_the_counter_is_a_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.draw(9_000_000)
    world.metering.write()
    world.wait(MINUTE)
    monkeypatch.setattr("fractional_gpu.broker.accounting.metering.boot_id", lambda: "another")
    world.boot_ms = 1_000
    world.begin()
    world.draw(50_000)
    world.wait(SECOND)
    world.draw(150_000)
    world.metering.write()
    assert (world.written().occupied_us, world.written().energy_mj) == (SECOND * 1000, 100_000)


def test_figures_and_state_are_written_together_or_not_at_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.kernel("a")
    world.hand.run("a")
    world.wait(MINUTE)

    def full(*_: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(world.ledger, "keep", full)
    with pytest.raises(LedgerError):
        world.metering.write()
    assert world.written("a") == Usage()
    assert world.ledger.kept(METER) is None
