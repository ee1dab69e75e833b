"""How the broker applies budgets: lower priority, warnings and refusals, also across restarts and after additions."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from fractional_gpu.broker.accounting.budgets import BudgetKeeper
from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.config.pools import Pool
from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Event
from fractional_gpu.core.metering.budgets import LAST_PRIORITY, Budget, Consequence, Subject, Unit, WindowKind
from fractional_gpu.core.metering.usage import Party, Usage, UsageRow
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.errors import NoRoomError
from tests.core.driving import Hand

pytestmark = pytest.mark.promise("budgets")

EUR = Budget(
    kind="user", name="*", unit=Unit.MONEY, amount=1000, currency="EUR", window=WindowKind.DAY, text="1.00 EUR per day"
)
ANN = Subject("user", "ann")  # the user of the leases that `Hand` makes
HOUR = 3600


class Link:
    """The connection to a kernel's extension."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def send(self, _verb: object, *, sentence: str) -> None:
        self.said.append(sentence)


@dataclass
class World:
    """A broker with real leases and budgets. The test sets the wall clock."""

    ledger: Ledger
    budgets: tuple[Budget, ...] = (EUR,)
    over: tuple[Consequence, ...] = (Consequence.LOWER_PRIORITY,)
    wall_ms: int = int(time.mktime((2026, 11, 24, 12, 0, 0, 0, 0, -1))) * 1000
    kernels: dict[str, Kernel] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hand = Hand()
        self.arbiter = self.hand.arbiter
        self.records = self
        self.restart()

    def restart(self) -> None:
        self.keeper = BudgetKeeper(
            cast("Any", self),
            cast("Any", self),
            self.budgets,
            lambda _: Pool("", {"over_budget": ", ".join(self.over) or "nothing"}),
            wall=lambda: self.wall_ms,
        )
        self.keeper.recover(self.ledger)

    def kernel(self, name: str, *, linked: bool = True) -> Link:
        """A kernel of ann's that was just admitted."""
        self.hand.start(name)
        self.kernels[name] = Kernel(lease_id=name, uid=0, token_sha256="")
        link = Link()
        if linked:
            self.kernels[name].link = cast("GateLink", link)
        self.keeper.lease_admitted(self.kernels[name])
        return link

    def spend(self, amount: int, owner: str = "ann", group: str = "", hours_ago: int = 0) -> None:
        """Record an amount as the meter would."""
        hour_s = self.wall_ms // 1000 // HOUR * HOUR - HOUR * hours_ago
        row = UsageRow.of(hour_s, "EUR", Party("p", owner, group), Usage(reserved_ms=1, charge_milli=amount))
        self.ledger.add_metered([row], "{}")
        self.keeper.counted([row])

    def priority(self, name: str) -> int:
        return self.hand.view(name).spec.priority

    # what the keeper needs from the broker

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        return [
            (self.kernels[view.spec.lease_id], view)
            for view in self.arbiter.leases()
            if view.spec.lease_id in self.kernels
        ]

    def dispatch(self, event: Event) -> list[Effect]:
        return self.hand.send(event)

    def save(self, kernel: Kernel, *, limit: bool = False) -> None:
        del limit
        self.saved.append(kernel.lease_id)

    async def run(self, act: Any) -> None:  # noqa: ANN401 - a write
        act()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield World(ledger)


def test_a_used_up_budget_puts_its_owners_kernels_last_until_its_next_period(world: World) -> None:
    world.kernel("a")
    world.spend(999)
    assert world.priority("a") == 0
    world.spend(1)
    assert world.priority("a") == -1
    assert world.saved == ["a"]
    world.wall_ms += 24 * HOUR * 1000
    world.keeper.counted([])
    assert world.priority("a") == 0
    assert world.hand.view("a").spec.own_priority is None


def test_if_the_pool_allows_it_they_get_room_that_no_ticket_waits_for(world: World) -> None:
    world.over = (Consequence.WHEN_FREE,)
    world.kernel("a")
    world.spend(1000)
    assert world.priority("a") == LAST_PRIORITY
    world.over = ()
    world.keeper.apply()
    assert world.priority("a") == 0


def test_a_notebook_is_told_once_at_four_fifths_and_once_at_the_end(world: World) -> None:
    link = world.kernel("a")
    for _ in range(5):
        world.spend(160)
    world.spend(100)
    world.keeper.apply()
    assert [one.split(";")[0] for one in link.said] == [
        "Your budget of 1.00 EUR per day: 0.80 EUR spent (80 %)",
    ]
    assert "(90 %)" in world.kernels["a"].budget  # the status stays correct
    world.spend(100)
    world.spend(100)
    assert len(link.said) == 2
    assert "is used up (1.00 EUR spent): other kernels go first; it resets on Wednesday, 25 November" in link.said[1]
    world.wall_ms += 24 * HOUR * 1000
    world.keeper.counted([])
    assert world.kernels["a"].budget == ""
    world.spend(900)
    assert len(link.said) == 3


def test_no_new_kernel_begins_where_the_pool_says_so(world: World) -> None:
    party = Party("p", "ann")
    world.spend(1000)
    world.keeper.check(party)
    world.over = (Consequence.NO_SEATS,)
    with pytest.raises(NoRoomError, match="no more servers or kernels with a GPU are started") as refused:
        world.keeper.check(party)
    assert refused.value.reason == "over-budget"
    world.keeper.check(Party("p", "bob"))


def test_a_group_spends_together_and_its_members_are_treated_alike(tmp_path: Path) -> None:
    group = Budget(
        kind="group",
        name="staff",
        unit=Unit.MONEY,
        amount=1000,
        currency="EUR",
        window=WindowKind.WEEK,
        text="1 EUR per week",
    )
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        world = World(ledger, budgets=(group,), over=(Consequence.NO_SEATS,))
        ann, bob = Party("p", "ann", "staff"), Party("p", "bob", "staff")
        world.spend(600, "ann", "staff")
        for party in (ann, bob):  # both may use the last of it
            world.keeper.check(party)
        world.spend(600, "bob", "staff")
        for party in (ann, bob):
            with pytest.raises(NoRoomError, match="The budget of the group 'staff'"):
                world.keeper.check(party)
        world.keeper.check(Party("p", "ann", ""))
        assert world.keeper.group_of(["zoo", "staff"]) == "staff"
        assert world.keeper.group_of(["zoo"]) == ""


def test_the_next_broker_knows_what_was_spent_and_what_was_added(world: World) -> None:
    world.spend(700, hours_ago=2)
    world.spend(500, hours_ago=13)  # yesterday
    world.kernel("a")
    world.spend(400)
    assert world.priority("a") == -1
    world.restart()
    assert world.priority("a") == -1
    assert world.keeper.states(Party("p", "ann"))[0].spent == 1100


async def test_what_an_administrator_adds_counts_at_once_and_until_its_end(world: World) -> None:
    world.kernel("a")
    world.spend(1000)
    await world.keeper.extend(ANN, world.keeper.matching(ANN, "money", "EUR"), 500, None)
    assert world.priority("a") == 0
    assert "plus additions, 1.50 EUR in total" in world.keeper.status(Party("p", "ann"))[0].sentence
    world.restart()
    assert world.priority("a") == 0
    world.spend(500)
    assert world.priority("a") == -1
    world.wall_ms += 24 * HOUR * 1000
    world.keeper.counted([])
    assert world.keeper.states(Party("p", "ann"))[0].amount == 1000
    assert world.keeper.matching(ANN, "money", "USD") == []
    assert world.keeper.matching(Subject("group", "staff"), "money", "EUR") == []


def test_nothing_is_lost_whatever_a_kernel_does_when_its_budget_ends(world: World) -> None:
    for name in ("a", "b"):
        world.kernel(name)
    world.hand.want("a")
    world.hand.work("a")
    world.hand.rest("a")
    world.hand.wait(60_000)
    leaves = world.hand.want("b")
    world.spend(1000)
    assert world.hand.state("a") is LeaseState.SUSPENDING
    world.hand.saved(leaves, saved_mib=77)
    assert world.hand.view("a").saved_mib == 77
    assert {world.priority(name) for name in ("a", "b")} == {-1}
