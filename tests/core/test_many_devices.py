"""Several whole devices for one lease: all or none, kept together, moved together."""

import dataclasses

import pytest

from fractional_gpu.core.effects import Effect, Granted, LeaseRefused, Resume, Suspend
from fractional_gpu.core.events import (
    Attached,
    DeviceDrained,
    DeviceLost,
    DeviceSeen,
    DeviceUndrained,
    HostMemorySeen,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    ResumeOutcome,
    SuspendRequested,
    TruthFound,
)
from fractional_gpu.core.model import LeaseSpec, LeaseState, ReserveBy
from tests.core.driving import Hand, device, lease_measured, pool, spec


def _spec(name: str, devices: int = 2, reserve_mib: int = 900) -> LeaseSpec:
    return dataclasses.replace(spec(name, reserve_mib, milli=1000), devices=devices)


def _hand(count: int = 3, *, may_move: bool = False, kinds: str = "HHHH", most: int = 8) -> Hand:
    ids = [f"d{number}" for number in range(count)]
    devices = [device(name, kind=kind) for name, kind in zip(ids, kinds, strict=False)]
    return Hand(*devices, pools=[pool(*ids, may_move=may_move, max_passed_over=most)])


def _start(hand: Hand, what: LeaseSpec) -> list[Effect]:
    effects = hand.send(LeaseRequested(at_ms=hand.now, spec=what))
    hand.send(Attached(at_ms=hand.now, lease_id=what.lease_id, gated=True))
    return effects


def _reserved(hand: Hand) -> list[int]:
    return [view.reserved_mib for view in hand.arbiter.devices()]


def test_a_lease_gets_all_its_devices_at_once() -> None:
    hand = _hand()
    _start(hand, _spec("a"))
    (granted,) = [effect for effect in hand.want("a") if isinstance(effect, Granted)]
    assert (granted.device_id, granted.device_ids) == ("d0", ("d0", "d1"))
    assert _reserved(hand) == [900, 900, 0]
    assert hand.view("a").device_ids == ("d0", "d1")


@pytest.mark.parametrize("request_mib", [None, 100])
def test_where_memory_is_reserved_by_use_its_devices_are_whole_ones_too(request_mib: int | None) -> None:
    by_use = dataclasses.replace(pool("d0", "d1"), reserve_by=ReserveBy.USE, headroom_mib=50)
    hand = Hand(device("d0"), device("d1"), pools=[by_use])
    hand.idle("x", 300)
    _start(hand, dataclasses.replace(_spec("a", reserve_mib=1000), request_mib=request_mib))
    assert hand.granted(hand.saved(hand.want("a"))) == [("a", "d0")], "the neighbour had to leave"
    hand.work("a")
    for used_mib in (0, 100, 40):
        hand.send(lease_measured(hand.now, "a", used_mib))
        assert _reserved(hand) == [1000, 1000]
    hand.start("y", 10)
    assert hand.granted(hand.want("y")) == []
    hand.saved(hand.rest("a"), saved_mib=100)
    assert hand.state("y") is LeaseState.RESIDENT
    hand.send(LeaseReleased(at_ms=0, lease_id="y"))
    (resume,) = [one for one in hand.want("a") if isinstance(one, Resume)]
    assert (resume.device_ids, _reserved(hand)) == (("d0", "d1"), [1000, 1000])


def test_a_lease_gets_none_while_it_cannot_have_all() -> None:
    hand = _hand(2)
    hand.run("x", 300)
    _start(hand, _spec("a"))
    assert hand.granted(hand.want("a")) == []
    assert _reserved(hand) == [300, 0]
    assert hand.granted(hand.send(LeaseReleased(at_ms=0, lease_id="x"))) == [("a", "d0")]


def test_idle_neighbours_step_aside_on_all_devices() -> None:
    hand = _hand(2)
    hand.idle("x", 600)
    hand.idle("y", 600)
    _start(hand, _spec("a"))
    effects = hand.want("a")
    assert hand.suspends(effects) == ["x"]
    effects = hand.saved(effects)
    assert hand.suspends(effects) == ["y"]
    assert hand.granted(hand.saved(effects)) == [("a", "d0")]


def test_no_lease_makes_room_on_one_device_while_another_is_missing() -> None:
    hand = _hand(2)
    hand.idle("x", 600)
    hand.run("y", 600)
    _start(hand, _spec("a"))
    assert hand.suspends(hand.want("a")) == []


def test_a_suspend_saves_all_and_a_resume_brings_all_back() -> None:
    hand = _hand(3)
    _start(hand, _spec("a"))
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    (suspend,) = [e for e in hand.send(SuspendRequested(at_ms=0, lease_id="a")) if isinstance(e, Suspend)]
    assert (suspend.device_ids, suspend.host_mib) == (("d0", "d1"), 1800)
    hand.saved([suspend], saved_mib=1000)
    assert _reserved(hand) == [0, 0, 0]
    hand.run("x", 300)  # on d0, where it must return
    (name,) = [view.device_id for view in hand.arbiter.devices() if view.reserved_mib]
    assert name == "d0"
    assert hand.resumes(hand.want("a")) == []
    (resume,) = [e for e in hand.send(LeaseReleased(at_ms=0, lease_id="x")) if isinstance(e, Resume)]
    assert resume.device_ids == resume.from_device_ids == ("d0", "d1")
    assert _reserved(hand) == [900, 900, 0]


def test_a_lease_that_may_move_comes_back_on_any_like_set() -> None:
    hand = _hand(4, may_move=True, kinds="HAHH")
    _start(hand, _spec("a"))
    hand.want("a")
    assert hand.view("a").device_ids == ("d0", "d2")
    hand.work("a")
    hand.rest("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    hand.run("x", 300)
    assert hand.view("x").device_id in {"d0", "d1"}
    hand.send(DeviceDrained(at_ms=0, device_id="d0"))
    (resume,) = [effect for effect in hand.want("a") if isinstance(effect, Resume)]
    assert resume.device_ids == ("d2", "d3")
    assert resume.from_device_ids == ("d0", "d2")


def test_room_is_kept_on_all_its_devices_for_a_lease_that_was_passed_over_too_often() -> None:
    hand = _hand(2, most=1)
    hand.run("x", 300)
    _start(hand, _spec("a"))
    hand.want("a")
    hand.start("s0", 200)
    hand.want("s0")
    assert hand.state("s0") is LeaseState.RESIDENT
    hand.start("s1", 700)
    hand.want("s1")
    assert hand.ticket("s1").reason == "wait.older-ticket"
    assert set(hand.ticket("a").kept_on) == {"d0", "d1"}
    for name in ("x", "s0"):
        hand.send(LeaseReleased(at_ms=0, lease_id=name))
    assert hand.state("a") is LeaseState.RESIDENT


@pytest.mark.parametrize(
    ("what", "reason", "said"),
    [
        (_spec("a", 4), "too-many-devices", "3 devices"),
        (_spec("a", 9), "too-many-devices", "at most 8"),
        (dataclasses.replace(_spec("a"), fraction_milli=500), "bad-size", "whole"),
        (_spec("a", 0), "bad-size", "ask for one device"),
    ],
)
def test_what_can_never_be_is_refused(what: LeaseSpec, reason: str, said: str) -> None:
    hand = _hand(3)
    (refused,) = [effect for effect in _start(hand, what) if isinstance(effect, LeaseRefused)]
    assert refused.reason == reason
    assert said in refused.sentence


def test_several_devices_are_of_one_kind() -> None:
    hand = _hand(3, kinds="HAA")
    _start(hand, _spec("a"))
    hand.want("a")
    assert hand.view("a").device_ids == ("d1", "d2")


def test_a_new_broker_finds_a_lease_on_several_devices() -> None:
    hand = _hand(3)
    hand.send(
        LeaseRecovered(
            at_ms=0,
            spec=_spec("a"),
            state=LeaseState.RESIDENT,
            generation=2,
            device_id="d1",
            device_ids=("d1", "d2"),
        )
    )
    assert _reserved(hand) == [0, 900, 900]


def _saved_from(hand: Hand, *devices: str) -> list[Effect]:
    found = LeaseRecovered(
        at_ms=0,
        spec=_spec("a", len(devices), 500),
        state=LeaseState.SUSPENDED,
        generation=1,
        device_ids=devices,
        saved_mib=300,
    )
    return hand.send(found)


def test_what_was_saved_from_devices_of_two_kinds_only_goes_home() -> None:
    hand = _hand(may_move=True, kinds="HHK")
    _saved_from(hand, "d0", "d2")
    there = LeaseRecovered(at_ms=0, spec=spec("x"), state=LeaseState.RESIDENT, generation=1, device_id="d2", busy=True)
    hand.send(there)
    assert hand.resumes(hand.want("a")) == [], "two devices of one kind are free, but they are not like those"
    (resume,) = [one for one in hand.send(LeaseReleased(at_ms=0, lease_id="x")) if isinstance(one, Resume)]
    assert resume.device_ids == ("d0", "d2")


def test_what_was_saved_goes_home_where_its_pool_has_not_enough_devices_for_it_any_more() -> None:
    hand = _hand(may_move=True)
    hand.send(PoolConfigured(at_ms=0, pool=pool("d2", may_move=True)))
    _saved_from(hand, "d0", "d1")
    (resume,) = [one for one in hand.want("a") if isinstance(one, Resume)]
    assert resume.device_ids == ("d0", "d1")


def test_what_comes_back_since_host_memory_is_short_gets_devices_of_its_kind() -> None:
    hand = _hand(4, may_move=True, kinds="HKHH")
    _saved_from(hand, "d0", "d2")
    there = LeaseRecovered(at_ms=0, spec=spec("x"), state=LeaseState.RESIDENT, generation=1, device_id="d0", busy=True)
    hand.send(there)
    (resume,) = [one for one in hand.send(HostMemorySeen(at_ms=0, budget_mib=0)) if isinstance(one, Resume)]
    assert resume.device_ids == ("d2", "d3")


@pytest.mark.parametrize("most", [0, 8], ids=["gathered for", "needed by"])
def test_a_lease_does_not_step_aside_while_one_of_its_devices_is_lost(most: int) -> None:
    hand = _hand(2, most=most)
    _start(hand, _spec("a"))
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    hand.send(DeviceLost(at_ms=0, device_id="d1"))
    hand.start("b", 600)
    assert hand.suspends(hand.want("b")) == []
    assert hand.suspends(hand.send(DeviceSeen(at_ms=0, device=device("d1")))) == ["a"]


def test_a_lease_found_where_it_was_before_a_move_has_all_its_devices_again() -> None:
    names = ("d0", "d1", "d2", "d3")
    hand = Hand(*(device(name) for name in names), pools=[pool(*names, may_move=True)])
    hand.send(LeaseRequested(at_ms=0, spec=_spec("a", reserve_mib=400)))
    hand.send(Attached(at_ms=0, lease_id="a", gated=True))
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    home = hand.view("a").device_ids
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    for name in home:
        hand.send(DeviceDrained(at_ms=0, device_id=name))
    resume = hand.want("a")
    assert set(hand.view("a").device_ids).isdisjoint(home)
    hand.restored(resume, ResumeOutcome.UNKNOWN)
    generation = hand.view("a").generation
    for name in home:
        hand.send(DeviceUndrained(at_ms=0, device_id=name))
    found = TruthFound(at_ms=0, lease_id="a", generation=generation, state=LeaseState.RESIDENT, device_id=home[0])
    hand.send(found)
    assert (hand.state("a"), hand.view("a").device_ids) == (LeaseState.RESIDENT, home)
