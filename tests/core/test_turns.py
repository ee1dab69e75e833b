"""No ticket waits for ever next to kernels that always want the GPU, whatever they run and whatever their pool preempts.

A turn is the minimum residency: `max(min_residency, min_residency_swaps x swap)`, where a swap is one suspend and one resume. The
promise, in virtual time:

- Next to kernels whose cells end, under any `preempt`: one turn, one cell and one swap for each earlier ticket and for its own.
- In a pool that shares by time (the default), next to any kernels: at most `queue.patience_ms`, then one turn and one swap for
  each kernel that is in the way or was due before it.
"""

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fractional_gpu.core.effects import CloseGate, Effect, Suspend
from fractional_gpu.core.events import (
    Attached,
    DeviceLost,
    DeviceSeen,
    LeaseRequested,
    PinRequested,
    ResizeRequested,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from tests.core.driving import Hand, device, lease_measured, pool, spec
from tests.core.theatre import FOR_EVER, Actor, Theatre

pytestmark = pytest.mark.promise("race-gate", "bounded-wait")

SWAP_MS = 300  # each way
QUIET_MS = 100
DEFAULT = PoolSpec(name="p", devices=("d0",))
NEVER = replace(DEFAULT, preempt_equals=False, preempt_priorities=False)
NAMES = ("H",)


@dataclass(frozen=True)
class Habit:
    """What a neighbour runs: cells and pauses in ms, and whether our extension guards its cells.

    `reaches_ms`: how long after its room was requested its cell first uses the GPU; None: from the beginning.
    """

    cell_ms: int
    gap_ms: int
    gated: bool = True
    reaches_ms: int | None = None

    @property
    def ends(self) -> bool:
        return self.cell_ms < FOR_EVER


HABITS = {
    "cells back to back": Habit(20, 0),
    "cells with pauses of 50 ms": Habit(20, 50),
    "cells of a second": Habit(1_000, 0),
    "a cell that never ends": Habit(FOR_EVER, 0),
    "without the extension, cells back to back": Habit(20, 0, gated=False),
    "without the extension, busy for ever, as after execv": Habit(FOR_EVER, 0, gated=False),
}
WITHOUT_CONTEXT = {
    "a cell that never ends and never uses the GPU": Habit(FOR_EVER, 0, reaches_ms=FOR_EVER),
    "a cell that never ends and uses the GPU at once when its room is gone": Habit(FOR_EVER, 0, reaches_ms=0),
    "a cell that never ends and uses the GPU much later": Habit(FOR_EVER, 0, reaches_ms=90_000),
}
ENDING = [name for name, habit in HABITS.items() if habit.ends]


def _actor(name: str, habit: Habit, milli: int = 1000, owner: str = "") -> Actor:
    spec = LeaseSpec(
        lease_id=name,
        pool="p",
        owner=owner or name,
        fraction_milli=milli,
        reserve_mib=milli,
        gated=habit.gated,
    )
    return Actor(spec, lambda: habit.cell_ms, lambda: habit.gap_ms, quiet_ms=QUIET_MS, reaches_ms=habit.reaches_ms)


def _theatre(policy: PoolSpec) -> Theatre:
    return Theatre([device("d0")], [policy], swap_ms=lambda _: SWAP_MS, whole_every=50)


def _swap_ms(play: Theatre) -> int:
    """The longest that a swap of a whole device was expected to take, or took."""
    said = [
        one.swap_ms(SUSPEND, "H", 1000) + one.swap_ms(RESUME, "H", 1000)
        for one in (Forecasts(), play.arbiter.forecasts)
    ]
    return max(2 * SWAP_MS, *said)


def _turn_ms(play: Theatre, policy: PoolSpec) -> int:
    return max(policy.min_residency_ms, policy.min_residency_swaps_milli * _swap_ms(play) // 1000)


def _waits(play: Theatre, actor: Actor) -> list[int]:
    """Return the wait for each of its cells, including one that is still waiting."""
    view = play.arbiter.lease(actor.spec.lease_id)
    assert view is not None
    still = [play.now - actor.wanted_ms] if actor.asks else []
    return [*actor.waits_ms, *still]


@pytest.mark.parametrize("policy", [DEFAULT, NEVER], ids=["default", "never"])
@pytest.mark.parametrize("name", ENDING)
def test_a_ticket_beside_one_kernel_whose_cells_end_waits_for_one_turn_and_one_swap(
    name: str, policy: PoolSpec
) -> None:
    play, habit = _theatre(policy), HABITS[name]
    play.enter(_actor("a", habit))
    wanting = play.enter(_actor("b", Habit(200, 700)), at_ms=1_234)
    play.run(300_000)
    bound_ms = _turn_ms(play, policy) + habit.cell_ms + QUIET_MS + _swap_ms(play)
    assert len(wanting.waits_ms) >= 5
    assert max(_waits(play, wanting)) <= bound_ms


@pytest.mark.parametrize("name", HABITS)
def test_in_the_default_pool_two_kernels_of_any_kind_take_turns(name: str) -> None:
    play, habit = _theatre(DEFAULT), HABITS[name]
    neighbour = play.enter(_actor("a", habit))
    wanting = play.enter(_actor("b", Habit(FOR_EVER, 0)), at_ms=1_234)
    play.run(600_000)
    turn_ms, swap_ms = _turn_ms(play, DEFAULT), _swap_ms(play)
    assert wanting.suspends >= 600_000 // (2 * (turn_ms + swap_ms)) - 2
    assert play.ran_ms(wanting) >= 0.4 * 600_000
    assert play.ran_ms(neighbour) > 0
    assert wanting.waits_ms[0] <= turn_ms + swap_ms + QUIET_MS


@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_a_kernel_that_did_not_use_the_gpu_makes_room_in_mid_cell_and_takes_turns_once_it_does(name: str) -> None:
    play, habit = _theatre(DEFAULT), WITHOUT_CONTEXT[name]
    neighbour = play.enter(_actor("a", habit))
    wanting = play.enter(_actor("b", Habit(FOR_EVER, 0)), at_ms=1_234)
    play.run(600_000)
    turn_ms, swap_ms = _turn_ms(play, DEFAULT), _swap_ms(play)
    assert wanting.waits_ms[0] <= turn_ms + swap_ms + QUIET_MS
    if habit.reaches_ms == FOR_EVER:
        assert (neighbour.suspends, wanting.suspends) == (1, 0)
    else:
        assert neighbour.suspends > 1
        assert max(_waits(play, neighbour)) <= 2 * (2 * turn_ms + swap_ms)


@pytest.mark.parametrize("name", ENDING)
def test_older_tickets_cost_one_turn_and_one_swap_each(name: str) -> None:
    """The queue is fixed: no later or returning lease goes before those that wait."""
    play, habit = _theatre(NEVER), HABITS[name]
    actors = [play.enter(_actor(f"k{number}", habit), at_ms=10 * number) for number in range(5)]
    play.run(600_000)
    most_ms = 5 * (_turn_ms(play, NEVER) + habit.cell_ms + QUIET_MS + _swap_ms(play))
    assert max(max(_waits(play, actor)) for actor in actors) <= most_ms
    assert min(len(actor.waits_ms) for actor in actors) >= 5


@pytest.mark.parametrize("policy", [DEFAULT, NEVER], ids=["default", "never"])
def test_several_small_kernels_make_room_for_a_large_one_at_the_end_of_their_cells(policy: PoolSpec) -> None:
    play = _theatre(policy)
    for number in range(8):
        play.enter(_actor(f"small{number}", HABITS["cells with pauses of 50 ms"], 125), at_ms=number)
    large = play.enter(_actor("large", Habit(500, 2_000)), at_ms=1_000)
    play.run(400_000)
    assert len(large.waits_ms) >= 5
    assert max(_waits(play, large)) <= _turn_ms(play, policy) + 8 * _swap_ms(play) + QUIET_MS


def test_kernels_that_wait_for_one_whose_cell_never_ends_go_on_after_a_moment() -> None:
    """Without preemption the room may never come; the other kernels are held up for at most a tenth of the time."""
    play = _theatre(NEVER)
    play.enter(_actor("stays", HABITS["a cell that never ends"], 500))
    beside = play.enter(_actor("beside", HABITS["cells back to back"], 500))
    play.enter(_actor("large", Habit(500, 2_000)), at_ms=1_000)
    play.run(400_000)
    assert play.ran_ms(beside) >= 0.85 * 400_000 * 3 / 4
    assert play.swaps["suspend"] == 0
    assert beside.waits_ms
    assert max(_waits(play, beside)) <= max(1_000, _swap_ms(play)) + QUIET_MS


kernels = st.lists(
    st.tuples(
        st.sampled_from(list(HABITS | WITHOUT_CONTEXT)),
        st.sampled_from([125, 250, 500, 1000]),
        st.sampled_from(["ann", "bob", "eve"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(
    max_examples=settings().max_examples // 5,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(
    kernels=kernels,
    milli=st.sampled_from([125, 500, 1000]),
    owner=st.sampled_from(["ann", "zoe"]),
    cell_ms=st.sampled_from([5, 2_000]),
)
def test_in_the_default_pool_every_ticket_is_served_within_the_bound(
    kernels: list[tuple[str, int, str]], milli: int, owner: str, cell_ms: int
) -> None:
    play = _theatre(replace(DEFAULT, fractions_milli=()))
    neighbours = [
        play.enter(_actor(f"n{number}", (HABITS | WITHOUT_CONTEXT)[name], size, user), at_ms=7 * number)
        for number, (name, size, user) in enumerate(kernels)
    ]
    wanting = play.enter(_actor("wanting", Habit(cell_ms, 300), milli, owner), at_ms=20_000)
    play.run(700_000)
    everybody = [*neighbours, wanting]
    for actor in everybody:
        own = sum(other.spec.owner == actor.spec.owner for other in everybody)
        owners = len({other.spec.owner for other in everybody})
        each_ms = _turn_ms(play, DEFAULT) + 1_000 + QUIET_MS + _swap_ms(play)
        patience_ms = 2 * each_ms * owners * own
        assert max(_waits(play, actor)) <= patience_ms + len(everybody) * each_ms, (actor.spec, kernels)


# -- step by step ------------------------------------------------------------------------------------------------------------------------


def _closed(effects: list[Effect]) -> list[str]:
    return [effect.lease_id for effect in effects if isinstance(effect, CloseGate)]


def _never(**what: int) -> PoolSpec:
    return replace(pool(**what), preempt_priorities=False)  # type: ignore[arg-type]


def test_the_gate_is_closed_when_the_minimum_residency_is_over_and_the_next_cell_makes_room_at_once() -> None:
    hand = Hand(pools=[_never(min_residency_ms=5_000)])
    hand.run("a")
    hand.start("b")
    assert _closed(hand.want("b")) == []
    assert _closed(hand.wait(4_999)) == []
    assert _closed(hand.wait(1)) == ["a"]
    assert hand.state("a") is LeaseState.RESIDENT, "its cell continues"
    effects = hand.want("a")
    (suspend,) = [effect for effect in effects if isinstance(effect, Suspend)]
    assert (suspend.lease_id, suspend.preempt, suspend.between_cells) == ("a", False, True)
    assert [view.lease_id for view in hand.arbiter.tickets("p")] == ["b", "a"]
    assert hand.granted(hand.saved(effects)) == [("b", "d0")]


def test_no_gate_is_closed_for_a_ticket_that_gets_the_room_of_a_lapsed_hold_in_the_same_event() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("a", 600)
    hand.request("never-comes", 300, gated=False)
    hand.wait(15_000)  # as long as the pool keeps room for a process
    assert hand.view("never-comes").reserved_mib == 300, "no ticket waits for it"
    hand.start("b", 400)
    effects = hand.want("b")
    assert hand.granted(effects) == [("b", "d0")], "and nothing is said to a, whose gate stays open"
    assert _closed(effects) == []
    assert not hand.view("a").gate_closed


def test_no_gate_is_closed_for_a_ticket_that_gets_what_a_smaller_lease_gives_back_in_the_same_event() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("a", 900)
    hand.now += 60_000
    hand.send(DeviceLost(at_ms=hand.now, device_id="d0"))
    hand.start("b", 200)
    hand.want("b")
    hand.send(ResizeRequested(at_ms=hand.now, lease_id="a", fraction_milli=500, reserve_mib=300))
    effects = hand.send(DeviceSeen(at_ms=hand.now, device=device()))
    assert hand.view("a").reserved_mib == 300
    assert hand.granted(effects) == [("b", "d0")]
    assert _closed(effects) == []
    assert not hand.view("a").gate_closed


def test_a_cell_at_a_closed_gate_is_told_when_its_gate_is_opened_at_the_latest() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("endless", 500)
    hand.run("a", 500)
    hand.start("large", 900)
    hand.now += 60_000
    assert sorted(_closed(hand.want("large"))) == ["a", "endless"]
    assert hand.arbiter.gate_wait("a", hand.now) is None, "its cell runs"
    hand.rest("a")
    hand.want("a")
    told = hand.arbiter.gate_wait("a", hand.now)
    assert told is not None
    assert told.low_ms < told.high_ms >= 1_000
    assert hand.arbiter.gate_wait("a", hand.now + 400) == replace(
        told, expected_ms=told.expected_ms - 400, high_ms=told.high_ms - 400
    )
    assert hand.granted(hand.wait(told.high_ms - 1)) == []
    assert hand.granted(hand.wait(1)) == [("a", "d0")]
    assert hand.arbiter.gate_wait("a", hand.now) is None


def test_a_gate_stays_closed_for_as_long_as_a_swap_is_expected_to_take() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[_never(min_residency_ms=0), replace(pool("d1"), name="q")])
    hand.run("endless", 500)
    hand.run("a", 500)
    hand.start("large", 900)
    hand.now += 60_000
    hand.want("large")
    hand.rest("a")
    hand.want("a")
    alone = hand.arbiter.gate_wait("a", hand.now)
    hand.send(LeaseRequested(at_ms=hand.now, spec=replace(spec("elsewhere", in_pool="q"), reserve_mib=900)))
    hand.send(Attached(at_ms=hand.now, lease_id="elsewhere", gated=True))
    hand.want("elsewhere")
    hand.send(lease_measured(hand.now, "elsewhere", 900))
    hand.work("elsewhere")
    hand.rest("elsewhere")
    hand.now += 1
    effects = hand.send(SuspendRequested(at_ms=hand.now, lease_id="elsewhere"))
    assert hand.suspends(effects) == ["elsewhere"]
    later = hand.arbiter.gate_wait("a", hand.now + 10_000)
    assert alone is not None
    assert later is not None
    assert later.high_ms > 0, "the swap is under way still, and no gate is opened before it has ended"
    assert hand.granted(hand.wait(alone.high_ms + 1)) == []
    released = hand.granted(hand.saved(effects))
    left = hand.arbiter.gate_wait(
        "a", hand.now
    )  # that swap took longer than expected, so later ones are expected to as well
    assert ("a", "d0") in [*released, *hand.granted(hand.wait(0 if left is None else left.high_ms))]


def test_a_ticket_that_is_given_up_opens_the_gate_again() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("a")
    hand.start("b")
    hand.now += 60_000
    assert _closed(hand.want("b")) == ["a"]
    hand.give_up("b")
    assert hand.granted(hand.want("a")) == [("a", "d0")]
    assert hand.suspends(hand.wait(1_000)) == []


def test_a_cell_that_gives_up_at_its_gate_leaves_the_device_to_others_only_when_it_rests() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)], host_mib=0)
    hand.run("a")
    hand.start("b")
    hand.now += 60_000
    hand.want("b")
    assert hand.suspends(hand.want("a")) == [], "the host has no memory for it"
    assert hand.view("a").at_gate is False, "so no gate holds it up"


def test_neither_a_pinned_kernel_nor_one_of_higher_priority_makes_room() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.start("high", priority=1)
    hand.want("high")
    hand.work("high")
    hand.start("b")
    hand.now += 60_000
    assert _closed(hand.want("b")) == []
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("a")
    hand.send(PinRequested(at_ms=0, lease_id="a", duration_ms=60_000))
    hand.start("b")
    assert _closed(hand.want("b")) == []
    assert _closed(hand.wait(59_999)) == []
    assert _closed(hand.wait(1)) == ["a"]


def test_no_kernel_is_asked_to_leave_if_that_would_not_let_the_ticket_in() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("small", 300)
    hand.start("pinned", 300)
    hand.want("pinned")
    hand.work("pinned")
    hand.send(PinRequested(at_ms=0, lease_id="pinned", duration_ms=600_000))
    hand.start("large", 900)
    hand.now += 60_000
    assert _closed(hand.want("large")) == []


def test_a_suspend_that_fails_lets_the_next_cell_run() -> None:
    hand = Hand(pools=[_never(min_residency_ms=0)])
    hand.run("a")
    hand.start("b")
    hand.now += 60_000
    hand.want("b")
    effects = hand.saved(hand.want("a"), SuspendOutcome.REFUSED)
    assert hand.granted(effects) == [("a", "d0")]
    assert hand.arbiter.ticket("a") is None
    assert _closed(hand.wait(29_000)) == []


def test_room_that_was_made_is_not_taken_back_by_who_made_it() -> None:
    """The lease that leaves has had less: by virtual time alone it would go first, and the two would swap for ever."""
    hand = Hand(pools=[replace(pool(min_residency_ms=5_000), preempt_equals=True)])
    hand.run("a")
    hand.wait(60_000)
    hand.start("b")
    hand.want("b")
    effects = hand.saved(hand.wait(1))
    assert hand.granted(effects) == [("b", "d0")]
    hand.work("b")
    hand.want("a")
    hand.wait(4_000)
    hand.rest("b")
    assert hand.state("b") is LeaseState.SUSPENDING
