"""What an arbiter that moves a lease through its real states reports to the meter."""

from fractional_gpu.core.events import LeaseReleased, LeaseRequested, ProcessExited, SuspendOutcome
from fractional_gpu.core.metering.meter import Holding, Meter
from fractional_gpu.core.metering.usage import Party, Usage
from fractional_gpu.core.model import LeaseSpec, LeaseState
from tests.core.driving import Hand, device, lease_measured, pool


def holding(hand: Hand, name: str) -> Holding:
    found = hand.arbiter.holding(name)
    assert found is not None
    return found


def measure(hand: Hand, name: str, used_mib: int) -> None:
    hand.send(lease_measured(hand.now, name, used_mib))


def test_a_lease_is_told_as_it_is_through_its_whole_life() -> None:
    hand = Hand()
    hand.start("a")
    ann = Party(pool="p", owner="ann")
    assert holding(hand, "a") == Holding(party=ann, milli=250)
    hand.want("a")
    assert holding(hand, "a") == Holding(party=ann, milli=250, devices=("d0",))
    hand.work("a")
    measure(hand, "a", 100)
    assert holding(hand, "a") == Holding(party=ann, milli=250, devices=("d0",), busy=True, device_mib=100)
    hand.rest("a")
    hand.wait(60_000)
    hand.start("b")
    leaves = hand.want("b")
    assert hand.state("a") is LeaseState.SUSPENDING
    assert holding(hand, "a") == Holding(party=ann, milli=250, devices=("d0",), device_mib=100)
    hand.saved(leaves, saved_mib=90)
    assert holding(hand, "a") == Holding(party=ann, milli=250, suspended=True, host_mib=90)
    hand.send(ProcessExited(at_ms=hand.now, lease_id="b"))
    comes = hand.want("a")
    hand.work("a")
    assert hand.state("a") is LeaseState.RESUMING
    assert holding(hand, "a") == Holding(party=ann, milli=250, devices=("d0",), host_mib=90)
    hand.restored(comes)
    assert holding(hand, "a") == Holding(party=ann, milli=250, devices=("d0",), busy=True, device_mib=90)


def test_a_preempted_cell_works_no_more_from_the_begin_of_its_suspend() -> None:
    hand = Hand(pools=(pool(min_residency_ms=0),))
    hand.run("a")
    assert holding(hand, "a").working
    hand.wait(60_000)
    hand.request("b", priority=1, gated=False)
    hand.want("b")
    assert hand.state("a") is LeaseState.SUSPENDING
    assert hand.view("a").busy
    assert not holding(hand, "a").busy
    assert holding(hand, "a").devices == ("d0",)


def test_what_is_not_known_is_held_and_not_busy() -> None:
    hand = Hand()
    hand.idle("a")
    hand.wait(60_000)
    hand.start("b")
    hand.saved(hand.want("b"), SuspendOutcome.UNKNOWN)
    hand.work("a")
    assert hand.state("a") is LeaseState.QUARANTINED
    assert (holding(hand, "a").devices, holding(hand, "a").busy) == (("d0",), False)


def test_a_lease_without_a_process_is_not_metered_even_with_room_kept_for_its_start() -> None:
    hand = Hand()
    hand.request("a", gated=False)
    assert hand.view("a").reserved_mib
    assert hand.arbiter.holding("a") is None


def test_all_devices_group_and_label_are_told() -> None:
    hand = Hand(device("d0"), device("d1"), pools=(pool("d0", "d1"),))
    spec = LeaseSpec(
        lease_id="a", pool="p", owner="ann", fraction_milli=1000, reserve_mib=1000, devices=2, group="staff", label="x.ipynb"
    )  # fmt: skip
    hand.send(LeaseRequested(at_ms=0, spec=spec))
    hand.idle_again("a")
    measure(hand, "a", 150)
    told = holding(hand, "a")
    assert told.party == Party(pool="p", owner="ann", group="staff", label="x.ipynb")
    assert (told.milli, told.count, sorted(told.devices), told.device_mib) == (1000, 2, ["d0", "d1"], 150)
    assert told.devices[0] == hand.view("a").device_id


def test_the_meter_follows_a_lease_from_its_process_to_its_end() -> None:
    hand, meter = Hand(), Meter()

    def observe() -> None:
        meter.set_lease(hand.now, hand.now, "a", hand.arbiter.holding("a"))

    hand.request("a")
    observe()
    hand.wait(1_000)
    hand.idle_again("a")
    observe()
    hand.wait(5_000)
    hand.work("a")
    observe()
    hand.wait(3_000)
    hand.send(ProcessExited(at_ms=hand.now, lease_id="a"))
    observe()
    hand.wait(7_000)
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="a"))
    observe()
    total = Usage()
    for row in meter.take(hand.now, hand.now):
        if row.key.lease_id == "a":
            total.add(row.usage)
    assert (total.reserved_ms, total.held_ms, total.busy_ms) == (8_000, 8_000, 3_000)
    assert total.occupied_us == 8_000_000
