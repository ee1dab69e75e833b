"""The broker's record of share use and its advice: complete, resumed by the next broker, followed up, and shown only to its user."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from fractional_gpu.broker.accounting.habits import ShareHabits
from fractional_gpu.broker.clock import Clocks
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind, Sample, Share
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.status import ShareAdvice
from tests.core.driving import Hand, lease_measured

pytestmark = pytest.mark.promise("advice")

DAY_MS = 86_400_000
KEPT = Share(250, 250)  # the request that `Hand` makes, on a device of 1000 MiB


class Writer:
    """Writes immediately."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def submit(self, act: Callable[[], None], *, again: bool = False) -> None:  # noqa: ARG002 - as the broker's
        act()


@dataclass
class World:
    """An arbiter with a lease, its habits in a ledger, and a wall clock that the test sets."""

    ledger: Ledger
    wall_ms: int = 20_000 * DAY_MS
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hand = Hand()
        self.begin()
        self.kernels["a"] = Kernel(lease_id="a", uid=0, token_sha256="", created_ms=self.wall_ms)
        self.hand.run("a")

    def begin(self) -> None:
        """Start the next broker's habits."""
        self.writer = Writer(self.ledger)
        self.habits = ShareHabits(
            self.hand.arbiter,
            cast("Any", self.writer),
            self.kernels,
            Clocks(now=lambda: self.hand.now, wall=lambda: self.wall_ms),
        )
        self.habits.begin(self.ledger)

    def work(self, days: int, used_mib: int, use_milli: int = 100) -> None:
        """Run a cell for 20 minutes on each of this many days."""
        for _ in range(days):
            self.hand.send(lease_measured(self.hand.now, "a", used_mib, util_milli=use_milli))
            for _ in range(20):
                self.habits.sampled({"a": use_milli})
                self.hand.now += 60_000
                self.wall_ms += 60_000
            self.habits.sampled({"a": use_milli})
            self.hand.now += DAY_MS - 20 * 60_000
            self.wall_ms += DAY_MS - 20 * 60_000
            self.habits.write()

    def advice(self) -> ShareAdvice:
        view = self.hand.arbiter.lease("a")
        assert view is not None
        found = self.habits.of_lease(view)
        assert found is not None
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield World(ledger)


def test_a_notebook_that_uses_little_is_told_which_share_would_do(world: World) -> None:
    world.work(8, 60)
    advice = world.advice()
    figures = advice.figures
    assert (figures.verdict, figures.risk.share.milli, figures.peak_mib, figures.days) == ("smaller", 125, 60, 8)
    assert (figures.held_ms, figures.busy_ms) == (8 * 20 * 60_000,) * 2
    assert advice.sentence.startswith("1/8 GPU (125 MiB) would suffice")
    assert world.hand.arbiter.lease("a").spec.fraction_milli == KEPT.milli, "nothing is changed by it"  # type: ignore[union-attr]


def test_the_next_broker_knows_the_days_and_the_advice(world: World) -> None:
    world.work(8, 60)
    before = world.advice()
    world.begin()
    assert world.advice() == before
    (given,) = world.ledger.given_advice().values()
    assert (given.before_milli, given.milli) == (250, 125)


def test_a_share_that_is_full_gets_a_larger_one(world: World) -> None:
    world.work(4, 590)  # of 600
    figures = world.advice().figures
    assert (figures.verdict, figures.risk.share.milli, figures.risk.unknown_days) == ("larger", 1000, 4)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE share_days SET document = '{' WHERE day = 20000",
        "UPDATE share_days SET key = 'of a newer version' WHERE day = 20000",
    ],
)
def test_days_that_cannot_be_read_cost_their_advice_and_keep_no_broker_from_its_kernels(
    world: World, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    world.work(8, 60)
    world.ledger._write(damage, ())
    world.begin()
    assert len(world.habits.recorder.days(next(world.habits.recorder.keys()))) == 7
    assert f"1 of 8 days of shares in {world.ledger.path} cannot be read: " in caplog.text


async def test_whose_notebooks_are_shown(world: World) -> None:
    world.work(8, 60)
    shown, owner = world.habits.of_notebooks, world.hand.arbiter.lease("a").spec.owner  # type: ignore[union-attr]
    assert [one.owner for one in await shown(None, owner, seated=False)] == [owner]
    assert not await shown(None, owner, seated=True), "a hub's user with the same name is another one"
    assert not await shown(None, None, seated=True)
    assert [one.seated for one in await shown(None, None)] == [False]
    assert not await shown(None, "other")
    assert not await shown("other", None)
    assert len(await shown(None, None)) == 1


def test_a_servers_kernels_count_together(world: World) -> None:
    key = HabitKey("p", "me", True, HabitKind.SEAT, "")
    assert world.habits.of_seats("p", "me") is None
    for number in range(8):
        one = world.habits.recorder
        for minute in range(31):
            sample = Sample(Share(1000, 1000), 100, busy=True, use_milli=100)
            one.observe(minute * 60_000 + number * DAY_MS, number, "s", key, sample)
    advice = world.habits.of_seats("p", "me")
    assert advice is not None
    assert (advice.figures.verdict, advice.figures.risk.share.milli) == ("smaller", 125)
    assert advice.brief == "1/8 GPU (125 MiB) would have been enough on 8 of 8 days"
