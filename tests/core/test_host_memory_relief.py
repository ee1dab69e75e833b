"""If host memory is short and a device has room, saved leases come back early, in a fixed order, and do not swap back and forth."""

from fractional_gpu.core.events import HostMemorySeen, HostPressureSeen, LeaseReleased, ResumeOutcome, SuspendRequested
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, pool

S = LeaseState


def saved(hand: Hand, *names: str) -> None:
    """Suspend these kernels, 100 MiB each, the last one active most recently."""
    for name in names:
        hand.now += 1
        hand.idle(name, 300)
        hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id=name)))


def short(hand: Hand, budget_mib: int) -> list[tuple[str, str]]:
    return hand.resumes(hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=budget_mib)))


def test_who_was_active_last_comes_back_first_until_what_is_saved_fits() -> None:
    hand = Hand()
    saved(hand, "a", "b", "c")
    effects = hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=150))
    assert hand.resumes(effects) == [("c", "d0")]
    assert hand.reasons(effects, "c") == ["resume.host-memory"]
    effects = hand.restored(effects)
    assert hand.resumes(effects) == [("b", "d0")]
    assert hand.resumes(hand.restored(effects)) == []
    assert [hand.state(name) for name in "abc"] == [S.SUSPENDED, S.RESIDENT, S.RESIDENT]


def test_with_enough_host_memory_no_lease_comes_back_early() -> None:
    hand = Hand()
    saved(hand, "a")
    assert short(hand, 100) == []


def test_no_lease_comes_back_early_without_room_or_while_a_ticket_waits_for_it() -> None:
    hand = Hand()
    saved(hand, "a")
    hand.run("b", 800)
    assert short(hand, 0) == []
    hand.start("c", 900)
    hand.want("c")
    assert hand.resumes(hand.send(LeaseReleased(at_ms=hand.now, lease_id="b"))) == []
    assert hand.state("c") is S.RESIDENT


def test_a_full_control_group_brings_back_the_one_that_lies_there() -> None:
    hand = Hand()
    saved(hand, "a", "b")
    effects = hand.send(HostPressureSeen(at_ms=hand.now, lease_id="a", pressed=True))
    assert hand.resumes(effects) == [("a", "d0")]
    hand.restored(effects)
    assert hand.state("b") is S.SUSPENDED


def test_no_lease_comes_back_early_once_the_pressure_is_over() -> None:
    hand = Hand()
    saved(hand, "a")
    hand.run("b", 800)
    hand.send(HostPressureSeen(at_ms=hand.now, lease_id="a", pressed=True))
    hand.send(HostPressureSeen(at_ms=hand.now, lease_id="a", pressed=False))
    assert hand.resumes(hand.send(LeaseReleased(at_ms=hand.now, lease_id="b"))) == []


def test_what_came_back_is_not_saved_again_while_host_memory_is_short() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1000)])
    saved(hand, "a")
    hand.restored(hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=50)))
    for _ in range(20):
        assert hand.suspends(hand.wait(60_000)) == []
    assert hand.suspends(hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=1000))) == ["a"]


def test_a_resume_that_could_not_start_is_tried_again_later() -> None:
    hand = Hand(device(memory_mib=1000))
    saved(hand, "a")
    effects = hand.restored(hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=0)), ResumeOutcome.NOT_STARTED)
    assert hand.resumes(effects) == []
    hand.now += 120_000
    assert short(hand, 1) == [("a", "d0")]


def test_as_many_come_back_at_once_as_there_are_swap_channels_but_no_more_than_is_lacking() -> None:
    hand = Hand(parallel_swaps=3)
    saved(hand, "a", "b", "c")
    effects = hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=150))
    assert hand.resumes(effects) == [("c", "d0"), ("b", "d0")]
