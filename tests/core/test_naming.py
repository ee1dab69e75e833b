"""A lease's story names who acts: the notebook that needs the room (if it has the same user), the administrator, or the broker."""

from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Effect, Recorded, Suspend
from fractional_gpu.core.events import (
    Attached,
    LeaseRecovered,
    LeaseRequested,
    PinRequested,
    SuspendRequested,
    UnpinRequested,
    Unwanted,
)
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, spec


def start(hand: Hand, name: str, *, owner: str = "ann", uid: int | None = None, label: str = "") -> None:
    what = replace(spec(name, 600), owner=owner, uid=uid, label=label)
    hand.send(LeaseRequested(at_ms=hand.now, spec=what))
    hand.send(Attached(at_ms=hand.now, lease_id=name, gated=True))


def told(effects: list[Effect], name: str) -> list[str]:
    return [one.sentence for one in effects if isinstance(one, Recorded) and one.lease_id == name]


@pytest.mark.parametrize(
    ("owner", "uid", "needs"),
    [
        ("ann", 1000, "train.ipynb"),
        ("bob", 1001, "another user's kernel"),
        ("ann", 300_000, "another user's kernel"),  # it counts against ann's limit
    ],
)
def test_who_needs_the_room_is_named_to_the_same_user_only(owner: str, uid: int, needs: str) -> None:
    hand = Hand()
    start(hand, "a", uid=1000, label="mine.ipynb")
    hand.want("a")
    hand.idle_again("a")
    start(hand, "b", owner=owner, uid=uid, label="train.ipynb")
    effects = hand.want("b") + hand.wait(60_000)
    assert f"idle, and {needs} needs 600 MiB" in told(effects, "a")
    assert [one.for_lease_id for one in effects if isinstance(one, Suspend)] == ["b"]


def test_a_grant_says_who_asked_and_how_long_it_took() -> None:
    hand = Hand()
    start(hand, "a")
    assert "this kernel asked for the GPU and got it at once: 600 MiB is reserved" in told(hand.want("a"), "a")
    hand.idle_again("a")
    start(hand, "b")
    effects = hand.want("b") + hand.wait(12_000)
    assert "this kernel asked for the GPU and got it after 12 s: 600 MiB is reserved" in told(
        effects + hand.saved(effects), "b"
    )


@pytest.mark.parametrize("by", ["`%gpu suspend`", "a request by administrator grace"])
def test_what_caused_a_suspend_or_the_end_of_a_pin_is_named(by: str) -> None:
    hand = Hand()
    hand.idle("a")
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=60_000))
    assert f"its pin ended because of {by}" in told(hand.send(UnpinRequested(at_ms=hand.now, lease_id="a", by=by)), "a")
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=60_000))
    effects = hand.send(SuspendRequested(at_ms=hand.now, lease_id="a", by=by))
    assert f"its pin ended because of {by}" in told(effects, "a")
    assert f"suspended because of {by}" in told(effects, "a")


def test_a_wait_that_its_user_ends_is_told_and_one_whose_time_is_over_is_not() -> None:
    hand = Hand()
    start(hand, "a")
    hand.want("a")
    start(hand, "b")
    for interrupted in (False, True):
        hand.want("b")
        effects = hand.send(Unwanted(at_ms=hand.now, lease_id="b", interrupted=interrupted))
        assert ("stopped waiting (interrupted)" in told(effects, "b")) is interrupted
    effects = hand.send(Unwanted(at_ms=hand.now, lease_id="b", interrupted=True))
    assert told(effects, "b") == [], "it did not wait any more"


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (LeaseState.UNATTACHED, "no process of this kernel"),
        (LeaseState.NO_CONTEXT, "this kernel alive, with nothing on a GPU"),
        (LeaseState.RESIDENT, "this kernel on its GPU"),
        (LeaseState.SUSPENDED, "this kernel's memory saved on the host"),
        (LeaseState.QUARANTINED, "this kernel in an unknown state, which it is checking"),
    ],
)
def test_what_a_broker_found_when_it_started_is_told_in_plain_words(state: LeaseState, found: str) -> None:
    hand = Hand()
    effects = hand.send(
        LeaseRecovered(at_ms=0, spec=spec("a", 600), state=state, generation=1, device_id="d0", saved_mib=300)
    )
    assert told(effects, "a")[0] == f"the broker restarted and found {found}"
