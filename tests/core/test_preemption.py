"""Busy kernels make room only if the pool allows it, for leases that go before them, and not before their minimum residency."""

import dataclasses

from fractional_gpu.core.effects import Effect, Suspend
from fractional_gpu.core.events import Attached, LeaseRequested, PinRequested, SuspendOutcome, TruthFound, Unwanted
from fractional_gpu.core.model import LeaseState, PoolSpec
from tests.core.driving import Hand, lease_measured, pool, spec

MINIMUM_MS = 60_000


def _pool(*, equals: bool = False, priorities: bool = True, swaps_milli: int = 0) -> PoolSpec:
    plain = pool(min_residency_ms=MINIMUM_MS)
    return dataclasses.replace(
        plain, preempt_equals=equals, preempt_priorities=priorities, min_residency_swaps_milli=swaps_milli
    )


def _start(hand: Hand, name: str, *, owner: str = "", priority: int = 0, reserve_mib: int = 600) -> None:
    what = dataclasses.replace(spec(name, reserve_mib, priority=priority), owner=owner or name)
    hand.send(LeaseRequested(at_ms=hand.now, spec=what))
    hand.send(Attached(at_ms=hand.now, lease_id=name, gated=True))


def _runs(hand: Hand, name: str, **what: object) -> None:
    _start(hand, name, **what)  # type: ignore[arg-type]
    hand.want(name)
    hand.work(name)


def _preempted(effects: list[Effect]) -> list[str]:
    return [effect.lease_id for effect in effects if isinstance(effect, Suspend) and effect.preempt]


def test_a_higher_priority_preempts_after_the_minimum_residency_and_the_alarm_is_set_for_it() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low")
    hand.wait(10_000)
    _start(hand, "high", priority=1)
    assert _preempted(hand.want("high")) == []
    assert hand.ticket("high").reason == "wait.busy-neighbour"
    assert hand.observer.wake == MINIMUM_MS
    effects = hand.wait(MINIMUM_MS - 10_000)
    assert _preempted(effects) == ["low"]
    assert "suspend.preempted" in hand.reasons(effects, "low")
    assert "has a higher priority" in hand.view("low").sentence
    effects = hand.saved(effects)
    assert hand.granted(effects) == [("high", "d0")]
    assert "wait.preempted" in hand.reasons(effects, "low")


def test_a_suspend_that_a_cell_aborts_begins_no_new_minimum_residency() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low")
    hand.wait(2 * MINIMUM_MS)
    _start(hand, "high", priority=1)
    hand.rest("low")
    effects = hand.want("high")
    assert hand.suspends(effects) == ["low"]
    hand.work("low")
    hand.saved(effects, SuspendOutcome.ABORTED)
    assert _preempted(hand.wait(MINIMUM_MS // 10)) == ["low"], "it has had its residency"


def test_a_preempted_kernel_waits_by_itself_and_goes_on_when_there_is_room() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low")
    _start(hand, "high", priority=1)
    hand.want("high")
    hand.saved(hand.wait(MINIMUM_MS))
    hand.send(Unwanted(at_ms=hand.now, lease_id="low"))  # its cell is still waiting
    assert hand.ticket("low").position == 1
    hand.work("high")
    effects = hand.saved(hand.rest("high"))
    assert hand.resumes(effects) == [("low", "d0")]
    hand.restored(effects)
    assert (hand.state("low"), hand.view("low").busy) == (LeaseState.RESIDENT, True)


def test_a_kernel_that_host_memory_is_too_short_for_saves_no_other_one_from_preemption() -> None:
    hand = Hand(pools=[_pool(equals=True)], host_mib=150)
    for name, reserve_mib, used_mib in (("large", 550, 500), ("left", 100, 100), ("right", 200, 100)):
        _runs(hand, name, reserve_mib=reserve_mib)
        hand.send(lease_measured(hand.now, name, used_mib))
        hand.wait(MINIMUM_MS)
    _start(hand, "new", reserve_mib=300)
    effects = [*hand.want("new"), *hand.wait(10 * MINIMUM_MS)]
    assert _preempted(effects) == ["right"], "it alone makes enough room, and fits into host memory"


def test_a_minimum_residency_ends_by_what_the_last_swap_has_taught() -> None:
    hand = Hand(pools=[dataclasses.replace(_pool(swaps_milli=30_000), min_residency_ms=0)])
    _runs(hand, "low")
    _start(hand, "high", priority=1)
    hand.want("high")
    hand.saved(hand.wait(MINIMUM_MS * 10), saved_mib=600)
    hand.work("high")
    effects = hand.saved(hand.rest("high"), saved_mib=600)
    assert hand.resumes(effects) == [("low", "d0")]
    hand.want("high")
    hand.now += 1
    hand.restored(effects)  # much faster than expected
    since_ms = hand.now
    hand.arbiter.run_deferred_work()
    swap_ms = sum(hand.arbiter.forecasts.swap_ms(kind, "H", 600) for kind in ("suspend", "resume"))
    while not _preempted(hand.wait((hand.observer.wake or 0) - hand.now)):
        pass
    assert hand.now == since_ms + 30 * swap_ms


def test_no_pool_preempts_across_priorities_that_does_not_want_to() -> None:
    hand = Hand(pools=[_pool(priorities=False)])
    _runs(hand, "low")
    _start(hand, "high", priority=1)
    hand.want("high")
    assert _preempted(hand.wait(10 * MINIMUM_MS)) == []


def test_equals_are_not_preempted_unless_the_pool_shares_by_time() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a")
    _start(hand, "b")
    hand.want("b")
    assert _preempted(hand.wait(10 * MINIMUM_MS)) == []


def test_no_busy_lease_is_preempted_while_an_idle_one_can_make_room() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "busy", reserve_mib=500)
    _runs(hand, "idle", reserve_mib=500)
    hand.wait(2 * MINIMUM_MS)
    hand.rest("idle")
    _start(hand, "high", priority=1, reserve_mib=500)
    assert hand.suspends(hand.want("high")) == ["idle"]


def test_the_lowest_priority_is_preempted_first() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "middle", priority=1, reserve_mib=500)
    _runs(hand, "low", reserve_mib=500)
    _start(hand, "high", priority=2, reserve_mib=500)
    hand.want("high")
    assert _preempted(hand.wait(MINIMUM_MS)) == ["low"]


def test_no_lease_is_preempted_for_nothing() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low", reserve_mib=300)
    _runs(hand, "equal", priority=1, reserve_mib=600)
    _start(hand, "high", priority=1, reserve_mib=600)
    hand.want("high")
    assert _preempted(hand.wait(10 * MINIMUM_MS)) == []


def test_a_pinned_kernel_is_not_preempted() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low")
    hand.send(PinRequested(at_ms=0, lease_id="low", duration_ms=2 * MINIMUM_MS))
    _start(hand, "high", priority=1)
    hand.want("high")
    assert _preempted(hand.wait(2 * MINIMUM_MS - 1)) == []
    assert _preempted(hand.wait(1)) == ["low"]


def test_the_minimum_is_never_shorter_than_a_multiple_of_the_swap() -> None:
    hand = Hand(pools=[_pool(swaps_milli=100_000)])
    _runs(hand, "low")
    hand.send(lease_measured(0, "low", 600))
    _start(hand, "high", priority=1)
    hand.want("high")
    assert hand.observer.wake is not None
    assert hand.observer.wake > MINIMUM_MS
    assert _preempted(hand.wait(hand.observer.wake - 1)) == []
    assert _preempted(hand.wait(1)) == ["low"]


def test_a_preemption_that_fails_is_tried_again_in_its_time() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low")
    _start(hand, "high", priority=1)
    hand.want("high")
    effects = hand.saved(hand.wait(MINIMUM_MS), SuspendOutcome.ABORTED)
    assert hand.state("low") is LeaseState.RESIDENT
    assert hand.suspends(effects) == []
    assert _preempted(hand.wait(10 * MINIMUM_MS)) == ["low"]


def test_a_preempted_kernel_that_was_lost_sight_of_comes_back_too() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "low")
    _start(hand, "high", priority=1)
    hand.want("high")
    hand.saved(hand.wait(MINIMUM_MS), SuspendOutcome.UNKNOWN)
    generation = hand.view("low").generation
    found = TruthFound(at_ms=hand.now, lease_id="low", generation=generation, state=LeaseState.SUSPENDED, saved_mib=100)
    hand.send(found)
    assert hand.ticket("low").reason in ("wait.busy-neighbour", "wait.older-ticket", "wait.unwilling-neighbour")


def test_equals_take_turns_where_the_pool_shares_by_time() -> None:
    hand = Hand(pools=[_pool(equals=True)])
    _runs(hand, "a")
    _start(hand, "b")
    hand.want("b")
    turns = []
    for _ in range(6):
        effects = hand.wait(MINIMUM_MS)
        if not _preempted(effects):  # equal: a moment later the running one is ahead
            assert hand.observer.wake is not None
            effects = hand.wait(hand.observer.wake - hand.now)
        (leaves,) = _preempted(effects)
        turns.append(leaves)
        comes = "b" if leaves == "a" else "a"
        effects = hand.saved(effects)
        if hand.resumes(effects):
            hand.restored(effects)
        hand.work(comes)
        hand.want(leaves)
    assert turns == ["a", "b", "a", "b", "a", "b"]


def test_the_line_of_a_pool_that_shares_by_time_begins_with_who_had_least() -> None:
    hand = Hand(pools=[_pool(equals=True)])
    _runs(hand, "a", owner="ann")
    hand.wait(30_000)
    for name, owner in (("b", "ann"), ("c", "bob")):
        _start(hand, name, owner=owner)
        hand.want(name)
    assert [view.lease_id for view in hand.arbiter.tickets("p")] == ["c", "b"]
    assert (hand.ticket("c").position, hand.ticket("b").position) == (1, 2)


def test_a_busy_kernel_is_preempted_at_once_when_the_idle_one_that_the_host_has_no_memory_for_works_again() -> None:
    hand = Hand(pools=[_pool()], host_mib=300)
    _runs(hand, "large", reserve_mib=600)
    _runs(hand, "small", reserve_mib=250)
    hand.wait(MINIMUM_MS)
    hand.rest("large")
    _start(hand, "high", priority=1, reserve_mib=400)
    assert _preempted(hand.want("high")) == []
    assert hand.ticket("high").reason == "wait.host-memory"
    assert _preempted(hand.work("large")) == ["small"]
