"""What users do is measured: how long they have kernels, how long those are busy, and how much memory they use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fractional_gpu.broker.clock import Clocks
from fractional_gpu.broker.seats.draws import UsageRecorder
from fractional_gpu.broker.seats.offers import PoolForecasts
from fractional_gpu.config import load
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.seat_packing import PRIOR_USAGE
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import UsageRecord

DAY_MS = 86_400_000


@dataclass
class World:
    """A broker reduced to its leases, and two clocks."""

    ledger: Ledger
    now_ms: int = 5
    wall_ms: int = 100 * DAY_MS
    leases: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        def submit(act: Callable[[], None], *, again: bool) -> None:
            assert again
            act()  # at once

        self.broker = cast(
            "Any",
            SimpleNamespace(
                views=lambda: self.leases,
                writer=SimpleNamespace(ledger=self.ledger, submit=submit),
                arbiter=SimpleNamespace(pools=lambda: {"default": None}),
            ),
        )
        self.forecasts = PoolForecasts(self.broker, load(None, {}))
        self.meter = self.restarted()

    def restarted(self) -> UsageRecorder:
        return UsageRecorder(self.broker, self.forecasts, Clocks(now=lambda: self.now_ms, wall=lambda: self.wall_ms))

    def lease(self, owner: str, *, busy: bool, used_mib: int, state: LeaseState = LeaseState.RESIDENT) -> Any:  # noqa: ANN401
        view = SimpleNamespace(
            spec=SimpleNamespace(owner=owner, pool="default"), busy=busy, state=state, used_mib=used_mib
        )
        self.leases.append((SimpleNamespace(identity=object()), view))
        return view

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms
        self.wall_ms += ms
        self.meter.sample()

    def written(self) -> dict[str, UsageRecord]:
        self.meter.write()
        return {usage.owner: usage for usage in self.ledger.usage(0)}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield World(ledger)


def test_time_counts_as_live_and_while_a_kernel_is_busy_as_busy(world: World) -> None:
    view = world.lease("ada", busy=False, used_mib=500)
    world.pass_ms(2000)
    view.busy = True
    world.pass_ms(3000)
    ada = world.written()["ada"]
    assert (ada.live_ms, ada.busy_ms, ada.busy_mib_ms) == (5000, 3000, 1_500_000)


@pytest.mark.parametrize("state", [LeaseState.SUSPENDED, LeaseState.RESUMING, LeaseState.QUARANTINED])
def test_who_waits_does_not_use_a_gpu(world: World, state: LeaseState) -> None:
    world.lease("ada", busy=True, used_mib=0, state=state)
    world.pass_ms(1000)
    assert world.written()["ada"].busy_ms == 0


def test_a_lease_without_a_process_counts_for_nothing(world: World) -> None:
    world.lease("ada", busy=False, used_mib=0)
    cast("Any", world.leases[0][0]).identity = None
    world.pass_ms(1000)
    assert world.written() == {}


def test_what_was_learnt_outlives_the_broker(world: World) -> None:
    world.lease("ada", busy=False, used_mib=100)
    for _ in range(1000):
        world.pass_ms(10_000)
    world.written()
    learnt = world.forecasts.habits("ada", "default")
    assert learnt.duty_milli < PRIOR_USAGE.duty_milli
    world.forecasts = PoolForecasts(world.broker, load(None, {}))
    assert world.forecasts.habits("ada", "default") == PRIOR_USAGE
    world.restarted().recover(world.ledger)
    assert world.forecasts.habits("ada", "default") == learnt
    assert world.forecasts.habits("bob", "default") == PRIOR_USAGE
