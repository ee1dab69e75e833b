"""Suspends and resumes: which lease is chosen, what is reserved for it, and the effect of each answer, even late, doubled or false."""

import dataclasses
from typing import TypeVar

import pytest

from fractional_gpu.core.effects import (
    Declined,
    Effect,
    LookAgain,
    Recorded,
    Resume,
    Shrink,
    Suspend,
    TicketsChanged,
    WakeAt,
)
from fractional_gpu.core.events import (
    Attached,
    DeviceDrained,
    DeviceSeen,
    HostMemorySeen,
    LeaseRecovered,
    LeaseReleased,
    ProcessExited,
    ResumeFinished,
    ResumeOutcome,
    Shrunk,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
    TruthFound,
    Unwanted,
)
from fractional_gpu.core.model import FOUND_FAILED, LeaseState
from tests.core.driving import Hand, device, lease_measured, pool, spec

pytestmark = pytest.mark.promise("race-host-memory")

Kind = TypeVar("Kind", bound=Effect)


def _suspended(hand: Hand, name: str, *, saved_mib: int = 100) -> None:
    """Return an idle lease that was suspended for a ticket."""
    effects = hand.send(SuspendRequested(at_ms=hand.now, lease_id=name))
    hand.saved(effects, saved_mib=saved_mib)


def _one(effects: list[Effect], kind: type[Kind]) -> Kind:
    (effect,) = [effect for effect in effects if type(effect) is kind]
    assert isinstance(effect, kind)
    return effect


def test_an_idle_kernel_steps_aside_for_one_that_waits() -> None:
    hand = Hand()
    hand.idle("a")
    hand.start("b")
    effects = hand.want("b")
    assert hand.suspends(effects) == ["a"]
    assert ("b", "d0") in hand.granted(hand.saved(effects))


def test_a_busy_kernel_is_never_suspended_for_others() -> None:
    hand = Hand()
    hand.run("a")
    hand.start("b")
    assert hand.suspends(hand.want("b")) == []
    assert hand.ticket("b").reason == "wait.busy-neighbour"
    assert hand.ticket("b").blockers == ("a",)
    hand.wait(10_000_000)
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_kernel_that_was_let_in_has_a_chance_to_run_before_it_is_suspended() -> None:
    hand = Hand(pools=[pool(min_residency_ms=4_000, idle_after_ms=0)])
    hand.start("a")
    hand.want("a")
    hand.start("b")
    assert hand.suspends(hand.want("b")) == []
    assert hand.suspends(hand.wait(3_999)) == []
    assert hand.suspends(hand.wait(1)) == ["a"]


def test_a_kernel_that_has_run_is_suspended_at_once() -> None:
    hand = Hand(pools=[pool(idle_after_ms=0)])
    hand.run("a")
    assert hand.suspends(hand.rest("a")) == ["a"]


def test_nothing_is_suspended_by_the_event_that_let_it_in() -> None:
    hand = Hand(pools=[pool(idle_after_ms=0, min_residency_ms=0)])
    hand.start("a")
    assert hand.suspends(hand.want("a")) == []
    assert hand.suspends(hand.wait(1)) == ["a"]


def test_the_least_recently_used_makes_room_and_no_lease_for_nothing() -> None:
    hand = Hand()
    hand.idle("a", 100)
    hand.wait(1)
    hand.idle("b", 300)
    hand.wait(1)
    hand.idle("c", 600)
    hand.start("d", 400)
    effects = hand.want("d")
    assert hand.suspends(effects) == ["a"]
    effects = hand.saved(effects)
    assert hand.suspends(effects) == ["b"]
    hand.saved(effects)
    assert hand.state("d") is LeaseState.RESIDENT
    assert hand.state("c") is LeaseState.RESIDENT


def test_no_lease_is_suspended_for_one_that_would_still_not_fit() -> None:
    hand = Hand()
    hand.run("a", 300)
    hand.idle("b", 300)
    hand.start("c", 800)
    assert hand.suspends(hand.want("c")) == []


def test_no_more_is_suspended_when_the_beneficiary_is_gone() -> None:
    hand = Hand()
    hand.idle("a", 500)
    hand.idle("b", 500)
    hand.start("c", 1000)
    effects = hand.want("c")
    hand.send(LeaseReleased(at_ms=0, lease_id="c"))
    assert hand.suspends(hand.saved(effects)) == []
    assert hand.state("b") is LeaseState.RESIDENT


@pytest.mark.parametrize("outcome", [SuspendOutcome.ABORTED, SuspendOutcome.REFUSED])
def test_a_victim_that_cannot_be_suspended_is_let_in_again_and_another_is_asked_at_once(
    outcome: SuspendOutcome,
) -> None:
    hand = Hand()
    hand.idle("a", 400)
    hand.idle("b", 500)
    hand.start("c", 400)
    effects = hand.saved(hand.want("c"), outcome)
    assert ("a", "d0") in hand.granted(effects)
    assert hand.suspends(effects) == ["b"]


def test_a_victim_that_cannot_be_saved_is_left_alone_for_long() -> None:
    hand = Hand()
    hand.idle("a")
    hand.start("b")
    effects = hand.saved(hand.want("b"), SuspendOutcome.REFUSED)
    assert hand.suspends(effects) == []
    assert hand.ticket("b").reason == "wait.unwilling-neighbour"
    assert _one(effects, WakeAt) == WakeAt(at_ms=30_000)
    assert hand.suspends(hand.wait(30_000)) == ["a"]


def test_a_victim_met_at_a_bad_moment_is_tried_again_soon_and_then_less_often() -> None:
    hand = Hand()
    hand.idle("a")
    hand.start("b")
    effects = hand.want("b")
    for pause_ms in (1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000):
        assert hand.suspends(hand.saved(effects, SuspendOutcome.ABORTED)) == []
        assert hand.suspends(hand.wait(pause_ms - 1)) == []
        effects = hand.wait(1)
        assert hand.suspends(effects) == ["a"]


def test_an_idle_kernel_that_could_not_be_suspended_rests_before_the_next_try() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1_000)])
    hand.idle("a")
    hand.saved(hand.wait(1_000), SuspendOutcome.REFUSED)
    assert hand.suspends(hand.wait(29_999)) == []
    assert hand.suspends(hand.wait(1)) == ["a"]


@pytest.mark.parametrize("outcome", [SuspendOutcome.SAVED, SuspendOutcome.NOTHING_TO_SAVE])
def test_a_refusal_is_forgotten_when_the_kernel_could_be_suspended_after_all(outcome: SuspendOutcome) -> None:
    hand = Hand(pools=[pool(idle_after_ms=1_000)])
    hand.idle("a")
    hand.saved(hand.wait(1_000), SuspendOutcome.REFUSED)
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")), outcome)
    effects = hand.want("a")
    if outcome is SuspendOutcome.SAVED:
        hand.restored(effects)
    hand.work("a")
    hand.rest("a")
    assert hand.suspends(hand.wait(1_000)) == ["a"]


def test_a_kernel_without_a_context_gives_its_reservation_back() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1_000)])
    hand.idle("a")
    hand.saved(hand.wait(1_000), SuspendOutcome.NOTHING_TO_SAVE)
    assert (hand.state("a"), hand.arbiter.devices()[0].reserved_mib) == (LeaseState.NO_CONTEXT, 0)
    assert hand.arbiter.host_saved_mib == 0


def test_what_a_kernel_uses_after_it_gave_its_room_up_counts_as_a_strangers_until_it_is_admitted_there() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("p", "d0", "d1", idle_after_ms=1_000)])
    hand.idle("a", 1000)
    (there,) = hand.arbiter.lease("a").device_ids  # type: ignore[union-attr]
    hand.saved(hand.wait(1_000), SuspendOutcome.NOTHING_TO_SAVE)
    hand.send(lease_measured(hand.now, "a", 100))
    hand.send(DeviceSeen(at_ms=hand.now, device=device(there), stranger_mib=100))
    hand.want("a")
    assert hand.state("a") is LeaseState.RESIDENT
    (seen,) = [one for one in hand.arbiter.devices() if one.device_id == there]
    assert (seen.reserved_mib, seen.stranger_mib) == (1000, 0)


def test_two_kernels_that_gave_their_room_up_do_not_both_count_the_same_memory_of_strangers_as_theirs() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1_000)])
    for name in ("a", "b"):
        hand.idle(name, 550)
        hand.saved(hand.wait(1_000), SuspendOutcome.NOTHING_TO_SAVE)
        hand.send(lease_measured(hand.now, name, 100))
    hand.send(DeviceSeen(at_ms=hand.now, device=device(), stranger_mib=100))
    hand.want("a")
    hand.want("b")
    assert (hand.state("a"), hand.state("b")) == (LeaseState.RESIDENT, LeaseState.NO_CONTEXT)


def test_what_a_kernel_uses_beyond_its_cap_is_free_for_an_earlier_ticket_once_it_is_admitted() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1_000)])
    hand.idle("a", 100)
    hand.saved(hand.wait(1_000), SuspendOutcome.NOTHING_TO_SAVE)
    hand.send(lease_measured(hand.now, "a", 400))
    hand.send(DeviceSeen(at_ms=hand.now, device=device(), stranger_mib=400))
    hand.start("b", 800)
    hand.want("b")
    assert hand.granted(hand.want("a")) == [("a", "d0"), ("b", "d0")]


def test_an_idle_suspend_is_woken_for() -> None:
    hand = Hand(pools=[pool(idle_after_ms=5_000)])
    hand.run("a")
    assert _one(hand.rest("a"), WakeAt) == WakeAt(at_ms=5_000)
    assert hand.suspends(hand.wait(5_000)) == ["a"]


def test_an_early_tick_is_answered_with_the_alarm_again() -> None:
    hand = Hand(pools=[pool(idle_after_ms=5_000)])
    hand.idle("a")
    assert hand.wait(4_999) == [WakeAt(at_ms=5_000)]


def test_a_lease_that_wants_the_gpu_while_it_is_suspended_comes_back_right_after() -> None:
    hand = Hand()
    hand.idle("a")
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.want("a")
    assert hand.ticket("a").reason == "wait.own-suspend"
    assert hand.resumes(hand.saved(effects)) == [("a", "d0")]


# -- asked for -------------------------------------------------------------------------------------------------------------------------


def test_a_suspend_that_waits_for_the_channel_is_seen_and_served() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    assert hand.send(SuspendRequested(at_ms=0, lease_id="b")) == []
    assert hand.view("b").suspend_requested
    assert hand.suspends(hand.saved(effects)) == ["b"]
    assert not hand.view("b").suspend_requested


def test_a_suspend_that_waits_is_declined_when_a_cell_begins() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    declined = _one(hand.work("b"), Declined)
    assert isinstance(declined, Declined)
    assert declined.reason == "busy"
    hand.rest("b")
    assert hand.suspends(hand.saved(effects)) == []


def test_a_suspend_that_waits_is_declined_when_the_kernel_wants_the_gpu() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    assert "declined.busy" in hand.reasons(hand.want("b"), "b")
    assert hand.suspends(hand.saved(effects)) == []


def test_a_suspend_that_waits_is_forgotten_when_the_kernel_exits() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    hand.send(ProcessExited(at_ms=0, lease_id="b"))
    assert hand.suspends(hand.saved(effects)) == []


def test_a_suspend_that_waits_is_declined_when_host_memory_goes() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    shrink = _one(hand.send(HostMemorySeen(at_ms=0, budget_mib=400)), Shrink)
    assert isinstance(shrink, Shrink)
    effects = hand.send(Shrunk(at_ms=0, lease_id="b", generation=shrink.generation))
    assert hand.reasons(effects, "b") == ["declined.host-memory"]


@pytest.mark.parametrize(("prepare", "reason"), [("start", "not-resident"), ("run", "busy")])
def test_a_suspend_that_cannot_be_is_declined_with_the_reason(prepare: str, reason: str) -> None:
    hand = Hand()
    getattr(hand, prepare)("a")
    declined = _one(hand.send(SuspendRequested(at_ms=0, lease_id="a")), Declined)
    assert isinstance(declined, Declined)
    assert declined.reason == reason


# -- host memory -----------------------------------------------------------------------------------------------------------------------


def test_no_suspend_begins_without_host_memory() -> None:
    hand = Hand(host_mib=599)
    hand.idle("a")
    hand.start("b")
    assert hand.suspends(hand.want("b")) == []
    assert hand.ticket("b").reason == "wait.host-memory"
    assert hand.suspends(hand.send(HostMemorySeen(at_ms=0, budget_mib=600))) == ["a"]


def shrinks(effects: list[Effect]) -> dict[str, int]:
    return {effect.lease_id: effect.generation for effect in effects if isinstance(effect, Shrink)}


def test_an_idle_kernel_gives_its_caches_back_before_host_memory_is_called_short() -> None:
    hand = Hand(host_mib=300)
    hand.idle("a")
    hand.send(lease_measured(0, "a", 590))
    hand.start("b")
    effects = hand.want("b")
    assert (hand.suspends(effects), hand.ticket("b").reason) == ([], "wait.host-memory")
    (generation,) = shrinks(effects).values()
    effects = hand.send(Shrunk(at_ms=0, lease_id="a", generation=generation, used_mib=90))
    assert hand.suspends(effects) == ["a"]
    assert _one(effects, Suspend).host_mib == 90


@pytest.mark.parametrize("way", ["asked", "idle", "drained"])
def test_so_it_does_for_whatever_reason_it_is_to_leave(way: str) -> None:
    hand = Hand(host_mib=300, pools=[pool(idle_after_ms=1_000)])
    hand.idle("a")
    if way == "asked":
        effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
        assert hand.reasons(effects, "a") == [], "its answer decides"
    elif way == "idle":
        effects = hand.wait(1_000)
    else:
        effects = hand.send(DeviceDrained(at_ms=0, device_id="d0"))
    effects = hand.send(Shrunk(at_ms=hand.now, lease_id="a", generation=shrinks(effects)["a"], used_mib=90))
    assert hand.suspends(effects) == ["a"]


def test_it_is_asked_once_while_idle_and_again_after_it_worked() -> None:
    hand = Hand(host_mib=300)
    hand.idle("a")
    hand.start("b")
    asked = shrinks(hand.want("b"))
    hand.send(Shrunk(at_ms=0, lease_id="a", generation=asked["a"], used_mib=400))  # still too much
    assert hand.ticket("b").reason == "wait.host-memory"
    assert shrinks(hand.wait(60_000)) == {}
    hand.work("a")
    assert shrinks(hand.rest("a")) == asked, "it may have filled its caches again"


def test_an_answer_about_an_earlier_time_decides_nothing() -> None:
    hand = Hand(host_mib=300)
    hand.idle("a")
    hand.start("b")
    generation = shrinks(hand.want("b"))["a"]
    hand.work("a")
    hand.send(HostMemorySeen(at_ms=0, budget_mib=10_000))
    effects = hand.rest("a")
    assert hand.suspends(effects) == ["a"]
    hand.send(HostMemorySeen(at_ms=0, budget_mib=100))
    assert hand.send(Shrunk(at_ms=0, lease_id="a", generation=generation, used_mib=10)) == []


def test_busy_kernels_and_kernels_without_the_extension_are_not_asked() -> None:
    hand = Hand(host_mib=300)
    hand.run("a")
    hand.start("b")
    assert shrinks(hand.want("b")) == {}
    hand = Hand(host_mib=300)
    hand.request("a", gated=False)
    hand.send(Attached(at_ms=0, lease_id="a", gated=False))
    hand.work("a")
    hand.rest("a")
    hand.start("b")
    effects = hand.want("b")
    assert (shrinks(effects), hand.ticket("b").reason) == ({}, "wait.host-memory")


def test_a_suspend_that_would_save_more_than_was_reserved_gets_as_much_the_next_time() -> None:
    hand = Hand()
    hand.idle("a", 300)
    suspend = _one(hand.send(SuspendRequested(at_ms=0, lease_id="a")), Suspend)
    assert isinstance(suspend, Suspend)
    hand.send(
        SuspendFinished(
            at_ms=0,
            lease_id="a",
            operation_id=suspend.operation_id,
            generation=suspend.generation,
            outcome=SuspendOutcome.ABORTED,
            need_mib=450,
        )
    )
    suspend = _one(hand.send(SuspendRequested(at_ms=0, lease_id="a")), Suspend)
    assert isinstance(suspend, Suspend)
    assert suspend.host_mib == 450


def test_no_first_victim_is_suspended_when_there_is_no_host_memory_for_all() -> None:
    hand = Hand(host_mib=999)
    hand.idle("a", 500)
    hand.idle("b", 500)
    hand.start("c", 1000)
    assert hand.suspends(hand.want("c")) == []


def test_a_kernel_past_its_cap_has_host_memory_for_all_it_uses() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.send(lease_measured(0, "a", 450))
    suspend = _one(hand.send(SuspendRequested(at_ms=0, lease_id="a")), Suspend)
    assert isinstance(suspend, Suspend)
    assert suspend.host_mib == 450


def test_more_saved_than_was_reserved_leaves_no_room_for_the_next() -> None:
    hand = Hand(host_mib=700)
    hand.idle("a", 300)
    hand.idle("b", 300)
    _suspended(hand, "a", saved_mib=600)
    shrink = _one(hand.send(SuspendRequested(at_ms=0, lease_id="b")), Shrink)
    effects = hand.send(Shrunk(at_ms=0, lease_id="b", generation=shrink.generation, used_mib=200))
    assert hand.reasons(effects, "b") == ["declined.host-memory"]


def test_a_resume_reserves_what_was_saved_if_that_is_more_than_the_cap() -> None:
    hand = Hand()
    hand.idle("a", 300)
    _suspended(hand, "a", saved_mib=450)
    resume = _one(hand.want("a"), Resume)
    assert isinstance(resume, Resume)
    assert resume.reserve_mib == 450
    hand.restored([resume])
    assert hand.view("a").reserved_mib == 450


def test_what_was_saved_past_any_device_waits_and_says_so() -> None:
    hand = Hand()
    hand.idle("a", 300)
    _suspended(hand, "a", saved_mib=1001)
    assert hand.resumes(hand.want("a")) == []
    assert hand.ticket("a").reason == "wait.too-large"


# -- answers ---------------------------------------------------------------------------------------------------------------------------


def test_an_exit_in_the_middle_of_a_suspend_keeps_the_channel_until_the_answer() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    assert hand.suspends(hand.send(ProcessExited(at_ms=0, lease_id="a"))) == []
    effects = hand.saved(effects)
    assert hand.reasons(effects, "a") == ["answer.stale"]
    assert hand.suspends(effects) == ["b"]
    assert hand.state("a") is LeaseState.UNATTACHED


def test_an_answer_about_an_earlier_lease_of_the_same_id_changes_nothing() -> None:
    hand = Hand()
    hand.idle("a")
    old = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    hand.idle("a")
    hand.saved(old)
    assert hand.state("a") is LeaseState.RESIDENT


def test_an_answer_given_twice_counts_once() -> None:
    hand = Hand()
    hand.idle("a")
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.saved(effects, saved_mib=100)
    assert hand.reasons(hand.saved(effects, saved_mib=200), "a") == ["answer.stale"]
    assert hand.arbiter.host_saved_mib == 100


@pytest.mark.parametrize("lie", [{"lease_id": "b"}, {"generation": 99}, {"operation_id": 99}])
def test_an_answer_that_names_another_operation_does_not_free_the_channel(lie: dict[str, object]) -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    suspend = _one(hand.send(SuspendRequested(at_ms=0, lease_id="a")), Suspend)
    assert isinstance(suspend, Suspend)
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    answer = SuspendFinished(
        at_ms=0,
        lease_id="a",
        operation_id=suspend.operation_id,
        generation=suspend.generation,
        outcome=SuspendOutcome.SAVED,
    )
    assert hand.suspends(hand.send(dataclasses.replace(answer, **lie))) == []  # type: ignore[arg-type]
    assert hand.state("a") is LeaseState.SUSPENDING


def test_a_suspend_answered_as_a_resume_is_no_answer() -> None:
    hand = Hand()
    hand.idle("a")
    suspend = _one(hand.send(SuspendRequested(at_ms=0, lease_id="a")), Suspend)
    assert isinstance(suspend, Suspend)
    hand.send(
        ResumeFinished(
            at_ms=0,
            lease_id="a",
            operation_id=suspend.operation_id,
            generation=suspend.generation,
            outcome=ResumeOutcome.RESTORED,
        )
    )
    assert hand.state("a") is LeaseState.SUSPENDING


def test_a_resume_that_could_not_start_is_tried_again_later_and_later() -> None:
    hand = Hand()
    hand.idle("a")
    _suspended(hand, "a")
    effects = hand.want("a")
    for pause_ms in (1_000, 2_000, 4_000):
        assert hand.resumes(hand.restored(effects, ResumeOutcome.NOT_STARTED)) == []
        assert (hand.state("a"), hand.ticket("a").reason) == (LeaseState.SUSPENDED, "wait.retry")
        assert hand.resumes(hand.wait(pause_ms - 1)) == []
        effects = hand.wait(1)
        assert hand.resumes(effects) == [("a", "d0")]


def test_while_a_resume_is_not_tried_again_others_may_use_the_channel() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    _suspended(hand, "a")
    _suspended(hand, "b")
    hand.restored(hand.want("a"), ResumeOutcome.NOT_STARTED)
    assert hand.resumes(hand.want("b")) == [("b", "d0")]


def test_a_pending_resume_finishes_though_no_cell_waits_any_more() -> None:
    hand = Hand()
    hand.idle("a")
    _suspended(hand, "a")
    effects = hand.want("a")
    hand.send(Unwanted(at_ms=0, lease_id="a"))
    hand.restored(effects)
    assert hand.state("a") is LeaseState.RESIDENT


# -- quarantine ------------------------------------------------------------------------------------------------------------------------


def test_a_lost_suspend_keeps_device_and_host_memory_until_the_truth_is_known() -> None:
    hand = Hand()
    hand.idle("a")
    effects = hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.UNKNOWN)
    look = _one(effects, LookAgain)
    assert isinstance(look, LookAgain)
    assert (hand.view("a").reserved_mib, hand.arbiter.host_reserved_mib) == (600, 600)
    hand.wait(10_000_000)
    assert hand.state("a") is LeaseState.QUARANTINED
    truth = TruthFound(
        at_ms=hand.now, lease_id="a", generation=look.generation, state=LeaseState.SUSPENDED, saved_mib=200
    )
    hand.send(truth)
    assert (hand.view("a").reserved_mib, hand.arbiter.host_reserved_mib, hand.arbiter.host_saved_mib) == (0, 0, 200)


def test_a_lease_found_without_a_context_starts_over_and_is_saved_at_once_when_its_device_is_emptied() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.REFUSED)
    effects = hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")), SuspendOutcome.UNKNOWN)
    generation = _one(effects, LookAgain).generation
    hand.send(TruthFound(at_ms=hand.now, lease_id="a", generation=generation, state=LeaseState.NO_CONTEXT))
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    assert hand.suspends(hand.send(DeviceDrained(at_ms=hand.now, device_id="d0"))) == ["a"]


def test_a_ticket_of_a_quarantined_lease_is_served_when_the_truth_is_known() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.UNKNOWN)
    hand.want("a")
    assert hand.ticket("a").reason == "wait.quarantine"
    generation = hand.view("a").generation
    truth = TruthFound(at_ms=0, lease_id="a", generation=generation, state=LeaseState.SUSPENDED, saved_mib=200)
    assert hand.resumes(hand.send(truth)) == [("a", "d0")]


def test_a_lease_that_the_driver_calls_failed_says_so_until_another_truth_is_found() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.UNKNOWN)
    hand.want("a")
    generation = hand.view("a").generation
    failed = TruthFound(
        at_ms=0, lease_id="a", generation=generation, state=LeaseState.QUARANTINED, sentence="it failed, restart it"
    )
    effects = hand.send(failed)
    view = hand.view("a")
    assert (view.state, view.generation, view.reason) == (LeaseState.QUARANTINED, generation, FOUND_FAILED)
    assert (view.sentence, hand.ticket("a").sentence) == ("it failed, restart it", "it failed, restart it")
    assert [(one.reason, one.sentence) for one in effects if isinstance(one, Recorded)] == [
        (FOUND_FAILED, view.sentence)
    ]
    assert any(isinstance(one, TicketsChanged) for one in effects), "a cell that waits does not hear of it"
    assert not any(isinstance(one, LookAgain) for one in effects), "it is looked at already"
    assert view.reserved_mib == 600
    hand.send(TruthFound(at_ms=0, lease_id="a", generation=generation, state=LeaseState.RESIDENT))
    assert (hand.state("a"), hand.view("a").reason) == (LeaseState.RESIDENT, "found.resident")


@pytest.mark.parametrize("state", [LeaseState.QUARANTINED, LeaseState.ENDED, LeaseState.RESUMING])
def test_an_impossible_truth_is_looked_at_again(state: LeaseState) -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.UNKNOWN)
    generation = hand.view("a").generation
    effects = hand.send(TruthFound(at_ms=0, lease_id="a", generation=generation, state=state))
    assert LookAgain(lease_id="a", generation=generation) in effects
    assert hand.state("a") is LeaseState.QUARANTINED


def test_the_truth_of_an_earlier_quarantine_is_ignored() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.UNKNOWN)
    generation = hand.view("a").generation - 1
    hand.send(TruthFound(at_ms=0, lease_id="a", generation=generation, state=LeaseState.SUSPENDED, device_id="d0"))
    assert hand.state("a") is LeaseState.QUARANTINED


# -- moving ----------------------------------------------------------------------------------------------------------------------------


def test_saved_state_goes_home_even_when_another_device_is_free() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    hand.idle("a")
    _suspended(hand, "a")
    hand.run("b")
    assert hand.view("b").device_id == "d0"
    assert hand.resumes(hand.want("a")) == []


def test_saved_state_moves_to_a_like_device_if_the_pool_lets_it() -> None:
    hand = Hand(device("d0"), device("d1", kind="A"), device("d2"), pools=[pool("d0", "d1", "d2", may_move=True)])
    hand.idle("a")
    _suspended(hand, "a")
    hand.run("b")
    assert hand.resumes(hand.want("a")) == [("a", "d2")]


def test_after_a_move_that_could_not_start_its_home_is_what_it_was() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a")
    _suspended(hand, "a")
    hand.run("b")
    hand.restored(hand.want("a"), ResumeOutcome.NOT_STARTED)
    assert hand.view("a").device_id == "d0"
    resume = _one(hand.wait(1_000), Resume)
    assert isinstance(resume, Resume)
    assert resume.from_device_ids == ("d0",)


def test_after_a_move_that_was_lost_its_home_is_where_it_was_saved() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a")
    _suspended(hand, "a")
    hand.run("b")
    hand.restored(hand.want("a"), ResumeOutcome.UNKNOWN)
    truth = TruthFound(
        at_ms=0, lease_id="a", generation=hand.view("a").generation, state=LeaseState.SUSPENDED, device_id="d1"
    )
    resume = _one(hand.send(truth), Resume)
    assert isinstance(resume, Resume)
    assert resume.from_device_ids == ("d0",)


def test_the_victim_is_one_that_host_memory_can_hold() -> None:
    hand = Hand(host_mib=350)
    hand.idle("large", 600)
    hand.now += 7_200_000
    hand.idle("small", 300)
    hand.wait(10_000)
    hand.start("a", 300)
    assert hand.suspends(hand.want("a")) == ["small"], "though the other has rested for longer"


def test_a_lease_with_the_id_of_one_that_ended_is_a_victim_like_any_other() -> None:
    hand = Hand()
    hand.idle("a", 600)
    hand.run("b", 400)
    hand.start("c", 800)
    hand.want("c")  # the leases on the device are ranked
    hand.give_up("c")
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="a"))
    hand.send(
        LeaseRecovered(at_ms=hand.now, spec=spec("a", 600), state=LeaseState.RESIDENT, generation=9, device_id="d0")
    )
    hand.now += 60_000
    hand.start("d", 600)
    assert hand.suspends(hand.want("d")) == ["a"]
