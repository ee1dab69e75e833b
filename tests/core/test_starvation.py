"""No ticket waits for ever, whatever the others do. What is guaranteed, and what is not:

- Among equal priorities, a ticket is passed over at most K times. From then on room is kept for it, so it is let in as soon as the
  running cells have ended: after K grants and one longest cell, plus its neighbours' swaps. Urgent tickets are no exception.
- A higher priority goes first as often as it asks. A lower one has no guaranteed share: it gets what the higher ones leave, in the
  same event in which they leave it.
- Asking twice, giving up and asking again, or coming with many leases never improves a user's place.
"""

from collections.abc import Callable
from random import Random

import pytest

from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import SuspendRequested
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from tests.core.driving import Hand, device, pool
from tests.core.theatre import Actor, Theatre

pytestmark = pytest.mark.promise("fairness")

CELL_MS = 1_000
SWAP_MS = 50


def _theatre(*pools: PoolSpec, devices: int = 1) -> Theatre:
    return Theatre([device(f"d{n}") for n in range(devices)], pools or [pool()], swap_ms=lambda _: SWAP_MS)


def _actor(
    name: str,
    reserve_mib: int,
    *,
    cell_ms: Callable[[], int] = lambda: CELL_MS,
    gap_ms: Callable[[], int] = lambda: 0,
    priority: int = 0,
    owner: str = "",
) -> Actor:
    spec = LeaseSpec(
        lease_id=name,
        pool="p",
        owner=owner or name,
        fraction_milli=reserve_mib,
        reserve_mib=reserve_mib,
        priority=priority,
    )
    return Actor(spec, cell_ms, gap_ms)


@pytest.mark.parametrize("most", [0, 1, 8])
def test_a_large_kernel_gets_in_among_small_ones_that_ask_for_ever(most: int) -> None:
    play = _theatre(pool(max_passed_over=most))
    for number in range(8):
        play.enter(_actor(f"small{number}", 300), at_ms=number * 100)
    large = play.enter(_actor("large", 1000), at_ms=2_000)
    play.run(60_000)
    rounds = 8 // 3 + 1 + most + 1  # earlier tickets, three at a time; then K grants; then the running cells
    assert len(large.waits_ms) >= 5
    assert max(large.waits_ms) <= rounds * (CELL_MS + 6 * SWAP_MS)


def test_many_sizes_at_once_all_get_their_turn() -> None:
    random = Random(1)
    play = _theatre(pool("d0", "d1", max_passed_over=3), devices=2)
    actors = [
        play.enter(
            _actor(
                f"k{number}", size, cell_ms=lambda: random.randrange(100, 2_000), gap_ms=lambda: random.randrange(500)
            ),
            at_ms=number,
        )
        for number, size in enumerate([1000, 900, 600, 600, 400, 300, 300, 250, 250, 125, 125, 100])
    ]
    play.run(100_000)
    assert min(len(actor.waits_ms) for actor in actors) > 15
    assert max(max(actor.waits_ms) for actor in actors) < 60_000


def _settled(hand: Hand, effects: list[Effect]) -> None:
    """Carry out what the arbiter asks for until nothing is left."""
    while hand.suspends(effects) or hand.resumes(effects):
        effects = hand.saved(effects) if hand.suspends(effects) else hand.restored(effects)


def test_an_ordinary_ticket_gets_in_among_urgent_ones_that_come_for_ever() -> None:
    hand = Hand(pools=[pool(max_passed_over=3)])
    hand.run("u", 600)
    hand.start("old")
    hand.want("old")
    last, passed = "u", 0
    while hand.state("old") is not LeaseState.RESIDENT:
        name, passed = f"u{passed}", passed + 1
        hand.start(name)
        hand.want(name, urgent=True)
        _settled(hand, hand.rest(last))
        if hand.state(name) is LeaseState.RESIDENT:
            hand.work(name)
            last = name
    assert passed == 3 + 1


def test_a_lower_priority_gets_what_the_higher_ones_leave_and_at_once() -> None:
    play = _theatre()
    first = play.enter(_actor("first", 600, priority=1))
    second = play.enter(_actor("second", 600, priority=1, gap_ms=lambda: 500), at_ms=10)
    low = play.enter(_actor("low", 600), at_ms=20)
    beside = play.enter(_actor("beside", 400), at_ms=30)
    play.run(60_000)
    assert len(low.waits_ms) == 0, "two of a higher priority always have one that waits: nothing is left"
    assert beside.ran_ms > 50_000, "what none of the higher ones can use is not kept from the lower"
    first.cells = second.cells = 1
    play.run(65_000)
    assert play.state(first) is play.state(second) is None
    assert len(low.waits_ms) >= 2, "they left: it is its turn"


def test_giving_up_and_asking_again_is_no_way_to_the_front() -> None:
    hand = Hand()
    hand.run("a")
    for name in ("flapper", "steady"):
        hand.start(name)
        hand.want(name)
    hand.give_up("flapper")
    hand.want("flapper")
    assert [view.lease_id for view in hand.arbiter.tickets("p")] == ["steady", "flapper"]


def test_many_leases_of_one_user_do_not_shut_another_one_out() -> None:
    play = _theatre(pool(max_passed_over=2))
    for number in range(20):
        play.enter(_actor(f"greedy{number}", 250, owner="greedy"), at_ms=number)
    modest = play.enter(_actor("modest", 750, owner="modest"), at_ms=500)
    play.run(60_000)
    assert len(modest.waits_ms) >= 5
    turns = 20 + 2 + 4  # everyone before it once, one by one; K grants; then the four running cells
    assert max(modest.waits_ms) <= turns * (CELL_MS + 2 * SWAP_MS)


def test_a_withdrawn_ticket_is_not_passed_over_by_those_it_lets_in() -> None:
    hand = Hand(pools=[pool(max_passed_over=1)])
    hand.idle("old", 900)
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="old")))
    hand.run("x", 300)
    hand.work("old")  # meanwhile a completion waits for its device and counts as busy
    hand.want("old")
    hand.run("first", 300)
    hand.start("second", 300)
    assert hand.granted(hand.want("second")) == []
    assert hand.granted(hand.give_up("old")) == [("second", "d0")]
