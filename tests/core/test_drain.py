"""Draining a device: no lease comes, each leaves as soon as possible, and nothing is lost."""

import dataclasses

from fractional_gpu.core.effects import Recorded, Suspend
from fractional_gpu.core.events import (
    DeviceDrained,
    DeviceSeen,
    DeviceUndrained,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
    TruthFound,
    Unwanted,
)
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, lease_measured, pool


def _drained(hand: Hand, name: str = "d0", *, evict_busy: bool = False) -> list[Suspend]:
    effects = hand.send(DeviceDrained(at_ms=hand.now, device_id=name, evict_busy=evict_busy))
    return [effect for effect in effects if isinstance(effect, Suspend)]


def test_a_draining_device_admits_no_lease_until_it_is_undrained() -> None:
    hand = Hand()
    _drained(hand)
    hand.start("a")
    hand.want("a")
    assert hand.ticket("a").reason == "wait.device-draining"
    assert hand.arbiter.devices()[0].draining
    assert hand.granted(hand.send(DeviceUndrained(at_ms=0, device_id="d0"))) == [("a", "d0")]
    assert not hand.arbiter.devices()[0].draining


def test_a_device_seen_again_still_drains() -> None:
    hand = Hand()
    _drained(hand)
    hand.send(DeviceSeen(at_ms=0, device=device()))
    hand.start("a")
    assert hand.granted(hand.want("a")) == []


def test_idle_kernels_leave_at_once_one_after_another() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    (suspend,) = _drained(hand)
    assert (suspend.lease_id, suspend.preempt) == ("a", False)
    effects = hand.saved([suspend])
    assert hand.suspends(effects) == ["b"]
    hand.saved(effects)
    assert hand.arbiter.devices()[0].reserved_mib == 0


def test_a_kernel_that_has_not_run_yet_leaves_as_well() -> None:
    hand = Hand()
    hand.start("a")
    hand.want("a")
    assert [suspend.lease_id for suspend in _drained(hand)] == ["a"]


def test_a_busy_kernel_leaves_when_its_cell_has_ended() -> None:
    hand = Hand()
    hand.run("a")
    effects = hand.send(DeviceDrained(at_ms=0, device_id="d0"))
    (story,) = [effect for effect in effects if isinstance(effect, Recorded)]
    assert story.reason == "drain.begun"
    assert "when its cell has ended" in story.sentence
    assert hand.suspends(hand.wait(10_000_000)) == []
    effects = hand.rest("a")
    assert hand.suspends(effects) == ["a"]
    assert "suspend.drain" in hand.reasons(effects, "a")


def test_a_busy_kernel_is_evicted_where_the_administrator_says_so_and_goes_on_elsewhere() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.run("a")
    (suspend,) = _drained(hand, evict_busy=True)
    assert (suspend.lease_id, suspend.preempt) == ("a", True)
    effects = hand.saved([suspend])
    assert hand.resumes(effects) == [("a", "d1")]
    assert "wait.preempted" in hand.reasons(effects, "a")
    hand.restored(effects)
    assert (hand.state("a"), hand.view("a").busy) == (LeaseState.RESIDENT, True)


def test_an_evicted_kernel_that_may_not_move_waits_whatever_happens_to_other_tickets() -> None:
    hand = Hand()
    hand.run("a")
    hand.saved(list(_drained(hand, evict_busy=True)))
    hand.send(Unwanted(at_ms=0, lease_id="a"))
    assert hand.ticket("a").reason == "wait.device-draining"
    assert hand.resumes(hand.send(DeviceUndrained(at_ms=0, device_id="d0"))) == [("a", "d0")]


def test_a_suspended_kernel_is_not_bound_to_its_draining_home_where_it_may_move() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a")
    hand.saved(list(_drained(hand)))
    assert hand.resumes(hand.want("a")) == [("a", "d1")]


def test_what_could_not_be_saved_is_tried_again_in_its_time() -> None:
    hand = Hand()
    hand.idle("a")
    effects = hand.saved(list(_drained(hand)), SuspendOutcome.REFUSED)
    assert hand.suspends(effects) == []
    assert hand.suspends(hand.wait(29_999)) == []
    assert hand.suspends(hand.wait(1)) == ["a"]


def test_host_memory_is_needed_to_leave() -> None:
    hand = Hand(host_mib=100)
    hand.idle("a")
    assert _drained(hand) == []
    assert hand.state("a") is LeaseState.RESIDENT


def test_draining_an_unknown_device_does_nothing() -> None:
    hand = Hand()
    hand.idle("a")
    assert _drained(hand, "d9") == []
    hand.send(DeviceUndrained(at_ms=0, device_id="d9"))
    assert hand.state("a") is LeaseState.RESIDENT


def test_room_is_made_elsewhere_for_a_lease_that_had_to_leave() -> None:
    plain = pool("d0", "d1", may_move=True)
    hand = Hand(device("d0"), device("d1"), pools=[dataclasses.replace(plain, idle_after_ms=None)])
    hand.idle("b", 900)
    hand.run("a", 900)
    assert {hand.view("a").device_id, hand.view("b").device_id} == {"d0", "d1"}
    name = hand.view("a").device_id or ""
    effects = hand.saved(list(_drained(hand, name, evict_busy=True)))
    assert hand.suspends(effects) == ["b"]
    assert hand.resumes(hand.saved(effects)) == [("a", hand.view("b").device_id)]


def test_a_failed_suspend_delays_the_drain_for_its_pause_though_its_kernel_was_in_doubt_meanwhile() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), retry_refused_ms=10_000)])
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")), SuspendOutcome.REFUSED)
    hand.wait(4_000)
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")), SuspendOutcome.UNKNOWN)
    assert _drained(hand) == [], "unknown is not free"
    found = TruthFound(
        at_ms=hand.now,
        lease_id="a",
        generation=hand.view("a").generation,
        state=LeaseState.RESIDENT,
        device_id="d0",
    )
    assert hand.suspends(hand.send(found)) == []
    assert hand.suspends(hand.wait(5_999)) == []
    assert hand.suspends(hand.wait(1)) == ["a"], "by the alarm alone"


def test_a_kernel_that_begins_to_run_is_evicted_at_once_where_what_it_would_have_saved_idle_did_not_fit() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), retry_refused_ms=0)], host_mib=200)
    hand.idle("a")
    hand.send(lease_measured(hand.now, "a", 160))
    (suspend,) = _drained(hand, evict_busy=True)
    too_much = SuspendFinished(
        at_ms=hand.now,
        lease_id="a",
        operation_id=suspend.operation_id,
        generation=suspend.generation,
        outcome=SuspendOutcome.ABORTED,
        need_mib=240,
    )
    assert hand.suspends(hand.send(too_much)) == [], "240 MiB must be saved, as far as is known while it is idle"
    assert hand.suspends(hand.wait(60_000)) == []
    assert hand.suspends(hand.work("a")) == ["a"], "it may have freed something: only 160 MiB are known again"
