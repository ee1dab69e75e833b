"""Always-busy kernels share devices by weight: first among users, then among each user's kernels.

The measure is milli-GPU times the time spent busy and resident. The tests run hours of virtual time in which every kernel wants more
than its share, with swaps that take time, and allow an error of 5 % per share. The model checks every law (including that no kernel
is preempted before its minimum residency).
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest

from fractional_gpu.core.events import Checkpointable
from fractional_gpu.core.model import LeaseSpec, QueueDelay
from tests.core.driving import Hand, device, pool
from tests.core.theatre import FOR_EVER, Actor, Theatre

pytestmark = pytest.mark.promise("fairness")

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
SLACK = 0.05


@dataclass(frozen=True)
class Case:
    """The kernels that share, each as (user, user's weight, kernel's weight, fraction)."""

    kernels: tuple[tuple[str, int, int, int], ...]
    devices: int = 1
    swap_ms: int = 500
    min_residency_ms: int = 10_000
    parallel_swaps: int = 1
    minutes: int = 30


CASES = {
    "two equals": Case((("a", 100, 100, 1000), ("b", 100, 100, 1000))),
    "five for two devices": Case(tuple((user, 100, 100, 1000) for user in "abcde"), devices=2),
    "one user comes with many": Case((*[("a", 100, 100, 500)] * 6, ("b", 100, 100, 500), ("b", 100, 100, 500))),
    "users' weights": Case(
        tuple((user, weight, 100, 500) for user, weight in [("a", 100), ("b", 200), ("c", 300)] * 2)
    ),
    "a user's own weights": Case((("a", 100, 300, 1000), ("a", 100, 100, 1000), ("b", 100, 100, 1000))),
    "a weight of a tenth": Case((("a", 1000, 100, 1000), ("b", 100, 100, 1000)), minutes=90),
    "different fractions": Case(
        (("a", 100, 100, 1000), *[("b", 100, 100, 500)] * 2, *[("c", 100, 100, 250)] * 4), parallel_swaps=2
    ),
    "slow swaps": Case((("a", 100, 100, 1000), ("b", 200, 100, 1000)), swap_ms=9_000, minutes=180),
    "only the minimum by swaps": Case((("a", 100, 100, 1000), ("b", 300, 100, 1000)), min_residency_ms=0),
    "a long minimum": Case((("a", 100, 100, 1000), ("b", 300, 100, 1000)), min_residency_ms=300_000, minutes=720),
}


def _begin(case: Case) -> tuple[Theatre, list[Actor]]:
    ids = [f"d{number}" for number in range(case.devices)]
    policy = replace(
        pool(*ids, min_residency_ms=case.min_residency_ms, may_move=True),
        preempt_equals=True,
        min_residency_swaps_milli=4_000,
    )
    play = Theatre(
        [device(name) for name in ids],
        [policy],
        swap_ms=lambda _: case.swap_ms,
        parallel_swaps=case.parallel_swaps,
        whole_every=100,
    )
    actors = []
    for number, (user, owner_weight, weight, milli) in enumerate(case.kernels):
        spec = LeaseSpec(
            lease_id=f"{user}{number}",
            pool="p",
            owner=user,
            fraction_milli=milli,
            reserve_mib=milli,
            owner_weight=owner_weight,
            weight=weight,
        )
        actors.append(play.enter(Actor(spec, lambda: FOR_EVER), at_ms=number * 10))
    return play, actors


@cache
def _played(name: str) -> tuple[Theatre, list[Actor]]:
    """Run a case to its end, once for all tests."""
    play, actors = _begin(CASES[name])
    play.run(CASES[name].minutes * MINUTE_MS)
    return play, actors


def _shares(play: Theatre, actors: list[Actor]) -> dict[str, float]:
    """Return the milli-GPU hours of each kernel."""
    return {actor.spec.lease_id: actor.spec.fraction_milli * play.ran_ms(actor) / HOUR_MS for actor in actors}


@pytest.mark.parametrize("name", CASES)
def test_busy_shares_follow_the_weights(name: str) -> None:
    case = CASES[name]
    play, actors = _played(name)
    shares, weights, users = _shares(play, actors), dict[str, int](), Counter[str]()
    for actor in actors:
        weights[actor.spec.owner] = actor.spec.owner_weight
        users[actor.spec.owner] += round(shares[actor.spec.lease_id] * 1_000)
    total = sum(users.values())
    for user, weight in weights.items():
        expected = weight / sum(weights.values())
        assert abs(users[user] / total - expected) <= SLACK * expected, (users, shares)
        own = [actor for actor in actors if actor.spec.owner == user]
        for actor in own:
            part = shares[actor.spec.lease_id] * 1_000 / users[user]
            expected = actor.spec.weight / sum(other.spec.weight for other in own)
            assert abs(part - expected) <= SLACK * expected, (user, shares)
    assert total / 1_000 > 0.5 * 1_000 * case.devices * case.minutes / 60, "most of the time goes to work, not to swaps"


@pytest.mark.parametrize("name", CASES)
def test_no_lease_is_swapped_more_often_than_the_minimum_residency_allows(name: str) -> None:
    case = CASES[name]
    play, actors = _played(name)
    least_ms = max(case.min_residency_ms, 4 * 2 * case.swap_ms)
    for actor in actors:
        assert actor.preempted <= play.now / (least_ms + 2 * case.swap_ms) + 1, actor.spec.lease_id
    assert play.swaps["preempt"] > 20


def test_a_kernel_that_was_away_has_saved_nothing_up() -> None:
    play, (first, second) = _begin(CASES["two equals"])
    play.run(HOUR_MS // 2)
    late = play.enter(Actor(replace(first.spec, lease_id="late", owner="late"), lambda: FOR_EVER), at_ms=play.now)
    before = {actor: play.ran_ms(actor) for actor in (first, second)}
    play.run(HOUR_MS)
    ran = [play.ran_ms(late), *(play.ran_ms(actor) - before[actor] for actor in (first, second))]
    assert max(ran) - min(ran) <= SLACK * HOUR_MS // 2, ran


def test_a_kernel_that_rests_gets_its_share_again_and_no_more() -> None:
    play, (first, _) = _begin(CASES["two equals"])
    resting = play.enter(
        Actor(replace(first.spec, lease_id="rests", owner="rests"), lambda: HOUR_MS // 6, lambda: HOUR_MS), at_ms=0
    )
    play.run(2 * HOUR_MS)
    assert len(resting.waits_ms) >= 2
    assert max(resting.waits_ms) <= 3 * 60_000


def test_a_higher_priority_preempts_a_lower_one_once_it_has_had_its_minimum() -> None:
    policy = replace(pool(min_residency_ms=20_000), preempt_priorities=True)
    play = Theatre([device("d0")], [policy], swap_ms=lambda _: 200)

    def spec(name: str, priority: int) -> LeaseSpec:
        return LeaseSpec(lease_id=name, pool="p", owner=name, fraction_milli=1000, reserve_mib=1000, priority=priority)

    low = play.enter(Actor(spec("low", 0), lambda: FOR_EVER))
    high = play.enter(Actor(spec("high", 1), lambda: 5_000, lambda: 60_000), at_ms=1_000)
    play.run(19_000)
    assert (play.ran_ms(low), high.waits_ms) == (19_000, [])
    play.run(HOUR_MS)
    assert max(high.waits_ms) <= 20_000
    assert low.preempted == high.suspends or low.preempted == high.suspends + 1
    assert play.ran_ms(low) > 0.8 * HOUR_MS, "it continues as soon as the higher one rests"


def test_equals_do_not_preempt_each_other_where_the_pool_does_not_say_so() -> None:
    play = Theatre([device("d0")], [pool()], swap_ms=lambda _: 200)
    kernels = [
        play.enter(
            Actor(
                LeaseSpec(lease_id=name, pool="p", owner=name, fraction_milli=1000, reserve_mib=1000), lambda: FOR_EVER
            )
        )
        for name in ("a", "b")
    ]
    play.run(HOUR_MS)
    assert [play.ran_ms(kernel) for kernel in kernels] == [HOUR_MS, 0]


def test_no_ticket_is_over_its_bound_while_equals_take_turns() -> None:
    play = Theatre([device("d0")], [pool(preempt_equals=True)], swap_ms=lambda _: 200)
    for name in ("a", "b", "c"):
        what = LeaseSpec(lease_id=name, pool="p", owner=name, fraction_milli=1000, reserve_mib=1000)
        play.enter(Actor(what, lambda: FOR_EVER))
    longest_ms = 0
    for second in range(1, 600):
        play.run(1000 * second)
        delay = play.arbiter.queue_delays(1000 * second)["p"]
        assert delay.over_bound == 0, delay
        longest_ms = max(longest_ms, delay.longest_ms)
    assert longest_ms > 10_000, "they wait for each other's turns"


@pytest.mark.parametrize(("fair", "over"), [(True, 1), (False, 0)])
def test_a_ticket_beside_a_lease_that_cannot_be_suspended_is_over_its_bound(fair: bool, over: int) -> None:
    hand = Hand(pools=[pool(preempt_equals=fair)])
    hand.run("a")
    hand.send(Checkpointable(at_ms=hand.now, lease_id="a", why_not="it has managed memory"))
    hand.start("b")
    hand.want("b")
    assert hand.arbiter.queue_delays(hand.now + 10_000)["p"] == QueueDelay(longest_ms=10_000)
    hand.wait(600_000)
    assert hand.arbiter.queue_delays(hand.now)["p"] == QueueDelay(longest_ms=600_000, over_bound=over)
    hand.give_up("b")
    assert hand.arbiter.queue_delays(hand.now)["p"] == QueueDelay()
