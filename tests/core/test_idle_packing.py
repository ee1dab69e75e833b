"""Idle leases move together if that empties a whole device."""

from dataclasses import replace

from fractional_gpu.core.effects import Effect
from fractional_gpu.core.events import Expected, LeaseReleased, PinRequested, PoolConfigured
from fractional_gpu.core.model import PoolSpec, Sign
from fractional_gpu.core.move import QUIET_MS
from tests.core.driving import Hand, device, pool

NAMES = ("d0", "d1", "d2")


def policy(*, empty_devices: bool = True) -> PoolSpec:
    return replace(pool(*NAMES, may_move=True), empty_devices=empty_devices)


def spread(policy: PoolSpec) -> Hand:
    """Place three idle leases on a device each: "big" with half of it, "a" with a fifth, "b" with less."""
    hand = Hand(*(device(name) for name in NAMES), pools=[policy])
    for name, mib in (("big", 500), ("f0", 500), ("a", 200), ("f1", 800), ("b", 150)):
        hand.idle(name, mib)
    for name in ("f0", "f1"):
        hand.send(LeaseReleased(at_ms=hand.now, lease_id=name))
    assert [hand.view(name).device_id for name in ("big", "a", "b")] == ["d0", "d1", "d2"]
    return hand


def moved(hand: Hand, effects: list[Effect]) -> list[Effect]:
    """Let one lease move; return the effects."""
    effects = hand.saved(effects)
    assert hand.resumes(effects)
    return hand.restored(effects)


def held(hand: Hand) -> list[int]:
    return [view.reserved_mib for view in hand.arbiter.devices()]


def test_idle_leases_end_up_on_one_device_and_the_others_are_empty() -> None:
    hand = spread(policy())
    assert not hand.suspends(hand.wait(QUIET_MS - 1)), "they may be about to run something"
    effects = hand.wait(1)
    assert hand.suspends(effects) == ["b"]
    assert "move.pack" in hand.reasons(effects, "b")
    effects = moved(hand, effects)
    assert hand.suspends(effects) == ["a"]
    moved(hand, effects)
    assert held(hand) == [850, 0, 0]
    assert not hand.suspends(hand.wait(10 * QUIET_MS)), "that was all"


def test_other_pools_leave_their_leases_where_they_are() -> None:
    hand = spread(policy(empty_devices=False))
    assert not hand.suspends(hand.wait(2 * QUIET_MS))


def test_a_lease_of_another_pool_stays_on_a_device_that_came_to_a_pool_which_empties_devices() -> None:
    hand = spread(policy(empty_devices=False))
    hand.send(PoolConfigured(at_ms=hand.now, pool=replace(policy(empty_devices=False), devices=("d0", "d1"))))
    hand.send(PoolConfigured(at_ms=hand.now, pool=replace(policy(), name="q", devices=("d2",))))
    assert not hand.suspends(hand.wait(2 * QUIET_MS))


def test_a_device_is_not_emptied_in_part() -> None:
    hand = spread(policy())
    hand.work("b")
    hand.idle("c", 700)  # next to "a" or "b": on both devices some leases cannot leave now
    hand.work("c")
    hand.work("a")
    assert not hand.suspends(hand.wait(2 * QUIET_MS))


def test_a_pinned_or_expected_lease_stays_and_no_other_moves_for_nothing() -> None:
    hand = spread(policy())
    hand.send(PinRequested(at_ms=hand.now, lease_id="b", duration_ms=10_000_000))
    until_ms = hand.now + 300_000
    hand.send(Expected(at_ms=hand.now, lease_id="a", until_ms=until_ms, sign=Sign.TYPING))
    hand.work("big")
    assert not hand.suspends(hand.wait(2 * QUIET_MS))


def test_nothing_is_packed_while_a_ticket_waits() -> None:
    hand = spread(policy())
    hand.work("big")
    hand.work("a")
    hand.start("t", 950)
    hand.work("b")
    hand.want("t")
    hand.rest("a")
    assert "move.pack" not in hand.reasons(hand.wait(2 * QUIET_MS), "a")


def test_a_cell_that_asks_in_the_middle_of_the_move_runs_where_the_lease_arrives() -> None:
    hand = spread(policy())
    effects = hand.wait(QUIET_MS)
    hand.want("b")
    effects = hand.saved(effects)
    ((name, target),) = hand.resumes(effects)
    assert (name, target) == ("b", "d0")
    hand.restored(effects)
    assert hand.granted(hand.want("b")) == [("b", "d0")]


def test_beside_busy_leases_a_kernel_goes_where_it_fragments_least() -> None:
    hand = Hand(*(device(name) for name in NAMES), pools=[policy()])
    for name, mib in (("big", 500), ("f0", 500), ("a", 375), ("f1", 625), ("b", 125)):
        hand.idle(name, mib)
    for name in ("f0", "f1"):
        hand.send(LeaseReleased(at_ms=hand.now, lease_id=name))
    assert [hand.view(name).device_id for name in ("big", "a", "b")] == ["d0", "d1", "d2"]
    for name in ("big", "a"):
        hand.work(name)
    effects = hand.wait(QUIET_MS)
    assert hand.suspends(effects) == ["b"]
    assert hand.resumes(hand.saved(effects)) == [("b", "d1")], (
        "500 MiB are free on d0 and were asked for, 625 MiB on d1"
    )
