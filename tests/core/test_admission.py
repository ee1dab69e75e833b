"""Which requests are admitted, which are refused and why, and what a lease without a process may hold."""

import pytest

from fractional_gpu.core.effects import Effect, LeaseAdmitted, LeaseEnded, LeaseRefused
from fractional_gpu.core.events import Attached, LeaseReleased, LeaseRequested, ProcessExited, Unwanted
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from tests.core.driving import Hand, device, pool, spec


def _refused(effects: list[Effect]) -> LeaseRefused:
    (effect,) = effects
    assert isinstance(effect, LeaseRefused)
    return effect


def test_a_request_is_admitted_without_a_process_and_without_memory() -> None:
    hand = Hand()
    effects = hand.request("a")
    assert LeaseAdmitted(lease_id="a") in effects
    assert (hand.state("a"), hand.view("a").reserved_mib) == (LeaseState.UNATTACHED, 0)


@pytest.mark.parametrize(
    ("asked", "reason", "says"),
    [
        (spec("b", 600, in_pool="nowhere"), "unknown-pool", "pools: p"),
        (spec("b", 600, milli=300), "fraction-not-offered", "offers 1/4, 1/2"),
        (spec("b", 1001), "larger-than-device", "1000 MiB"),
        (spec("b", 0), "bad-size", "0 MiB was requested"),
        (spec("b", -5), "bad-size", "ask for 1 to 1000 thousandths"),
        (spec("a", 100), "duplicate-lease", "a new lease needs a new id"),
        (spec("b", 900), "pool-full", "promised 600 MiB of the 1.4 GiB"),
    ],
)
def test_a_refusal_says_what_was_asked_and_what_there_is(asked: LeaseSpec, reason: str, says: str) -> None:
    policy = PoolSpec(name="p", devices=("d0",), fractions_milli=(250, 500), oversubscription_milli=1400)
    hand = Hand(pools=[policy])
    hand.request("a")
    refused = _refused(hand.send(LeaseRequested(at_ms=0, spec=asked)))
    assert refused.reason == reason
    assert says in refused.sentence


def test_a_refusal_counts_kernels_that_do_not_run_apart() -> None:
    hand = Hand(pools=[PoolSpec(name="p", devices=("d0",), oversubscription_milli=1000)])
    hand.start("a", 500)
    hand.start("b", 500)
    assert "1000 MiB that it may promise; shut a kernel down" in _refused(hand.request("c", 500)).sentence
    hand.send(ProcessExited(at_ms=hand.now, lease_id="b"))
    hand.wait(60_000)
    sentence = _refused(hand.request("c", 500)).sentence
    assert "500 MiB of that to a kernel that has not started or has ended (counted for up to 1 min more)" in sentence
    assert sentence.endswith("; try again when they have ended, or ask for a smaller fraction")
    assert _refused(hand.request("c", 900)).sentence.endswith("; shut a kernel down, or ask for a smaller fraction")


@pytest.mark.parametrize("reason", ["released", "abandoned"])
def test_a_release_has_a_reason(reason: str) -> None:
    hand = Hand()
    hand.start("a")
    assert LeaseEnded(lease_id="a", reason=reason) in hand.send(
        LeaseReleased(at_ms=hand.now, lease_id="a", reason=reason)
    )


def test_a_lease_without_a_process_expires() -> None:
    hand = Hand()
    hand.request("a")
    assert LeaseEnded(lease_id="a", reason="expired") in hand.wait(120_000)
    assert hand.arbiter.lease("a") is None


def test_an_attached_lease_does_not_expire() -> None:
    hand = Hand()
    hand.start("a")
    hand.wait(10_000_000)
    assert hand.state("a") is LeaseState.NO_CONTEXT


def test_a_second_release_is_ignored() -> None:
    hand = Hand()
    hand.idle("a")
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.send(LeaseReleased(at_ms=0, lease_id="a")) == []


def test_an_id_may_be_used_again_after_its_lease_has_ended() -> None:
    hand = Hand()
    hand.idle("a")
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert LeaseAdmitted(lease_id="a") in hand.request("a")


def test_an_ungated_kernel_gets_its_reservation_before_it_starts() -> None:
    hand = Hand()
    assert ("a", "d0") in hand.granted(hand.request("a", gated=False))
    assert (hand.state("a"), hand.view("a").reserved_mib) == (LeaseState.UNATTACHED, 600)
    hand.send(Attached(at_ms=0, lease_id="a", gated=False))
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_reservation_before_the_start_has_a_whole_time_to_live() -> None:
    hand = Hand()
    hand.run("a")
    hand.request("b", gated=False)
    hand.wait(100_000)
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="a"))
    hand.wait(100_000)
    assert hand.view("b").reserved_mib == 600
    hand.wait(20_000)
    assert hand.arbiter.lease("b") is None
    assert hand.arbiter.devices()[0].reserved_mib == 0


def test_a_ticket_before_the_start_dies_with_its_lease() -> None:
    hand = Hand()
    hand.run("a")
    hand.request("b", gated=False)
    hand.wait(120_000)
    assert hand.arbiter.tickets("p") == []


def test_a_process_that_came_before_its_reservation_waits_on() -> None:
    hand = Hand()
    hand.run("a")
    hand.request("b", gated=False)
    hand.send(Attached(at_ms=0, lease_id="b", gated=False))
    assert hand.state("b") is LeaseState.NO_CONTEXT
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("b") is LeaseState.RESIDENT


def test_a_want_before_the_process_is_known_is_served_when_it_is() -> None:
    hand = Hand()
    hand.request("a")
    hand.want("a")
    assert (hand.view("a").reserved_mib, hand.ticket("a").reason) == (0, "wait.no-process")
    hand.send(Attached(at_ms=0, lease_id="a", gated=True))
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_want_of_a_kernel_that_holds_its_reservation_already_files_no_ticket() -> None:
    hand = Hand()
    hand.request("a", gated=False)
    assert ("a", "d0") in hand.granted(hand.want("a"))
    assert hand.arbiter.ticket("a") is None


def test_an_ungated_process_without_a_reservation_asks_for_it_by_itself() -> None:
    hand = Hand()
    hand.request("a", gated=False)
    hand.send(Attached(at_ms=0, lease_id="a", gated=False))
    hand.send(ProcessExited(at_ms=0, lease_id="a"))
    assert hand.view("a").reserved_mib == 0
    hand.send(Attached(at_ms=0, lease_id="a", gated=False))
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_withdrawn_ticket_gets_nothing() -> None:
    hand = Hand()
    hand.run("a")
    hand.start("b")
    hand.want("b")
    hand.send(Unwanted(at_ms=0, lease_id="b"))
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("b") is LeaseState.NO_CONTEXT


def test_an_exit_frees_everything_and_keeps_the_lease() -> None:
    hand = Hand()
    hand.run("a")
    hand.send(ProcessExited(at_ms=0, lease_id="a"))
    assert (hand.state("a"), hand.arbiter.devices()[0].reserved_mib) == (LeaseState.UNATTACHED, 0)
    assert not hand.view("a").busy


def test_placement_takes_the_device_that_it_leaves_least_room_on() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    hand.run("a", 600)
    hand.run("b", 500)
    hand.run("c", 500)
    assert [hand.view(name).device_id for name in "abc"] == ["d0", "d1", "d1"]
    hand.run("d", 300)
    assert hand.view("d").device_id == "d0"
