"""A suspend reserves host memory for a lease's use, not its cap, and a wrong estimate loses no data and blocks no lease."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, Granted, Resume, Shrink, Suspend
from fractional_gpu.core.events import (
    HostMemoryNeeded,
    HostMemorySeen,
    ResumeFinished,
    ResumeOutcome,
    Shrunk,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.state.leases import HOST_MARGIN_MIB, HOST_MARGIN_PARTS
from tests.core.driving import Hand, device, lease_measured, pool

pytestmark = pytest.mark.promise("race-size")

CAP_MIB, USE_MIB, BUDGET_MIB = 512, 232, 700


def measured(hand: Hand, name: str, used_mib: int) -> list[Effect]:
    return hand.send(lease_measured(hand.now, name, used_mib))


def suspend_of(effects: list[Effect]) -> Suspend:
    (effect,) = [effect for effect in effects if isinstance(effect, Suspend)]
    return effect


def reserved_by(hand: Hand, name: str) -> int:
    """Suspend an idle lease; return what was reserved for it."""
    return suspend_of(hand.send(SuspendRequested(at_ms=hand.now, lease_id=name))).host_mib


# -- the estimate ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_mib", "reserved_mib"),
    [
        (None, 10_000),  # never measured: it may use its whole reservation
        (0, 1 + HOST_MARGIN_MIB),  # measured, and it uses nothing
        (1_600, 1_600 + HOST_MARGIN_MIB + 1_600 // HOST_MARGIN_PARTS),
        (9_990, 10_000),  # no more than its reservation
        (10_500, 10_500),  # it is over its cap
    ],
)
def test_what_is_reserved_is_the_use_and_a_margin_within_what_it_holds(used_mib: int | None, reserved_mib: int) -> None:
    hand = Hand(device(memory_mib=20_000))
    hand.idle("a", 10_000)
    if used_mib is not None:
        measured(hand, "a", used_mib)
    assert reserved_by(hand, "a") == reserved_mib


def test_a_busy_lease_that_grows_is_expected_to_grow_on() -> None:
    hand = Hand(device(memory_mib=10_000), pools=[pool(min_residency_ms=0, preempt_equals=True)])
    hand.run("a", 8_000)
    measured(hand, "a", 1_600)
    measured(hand, "a", 2_400)
    hand.start("b", 8_000)
    effects = hand.want("b") + hand.wait(600_000)
    assert suspend_of(effects).host_mib == 2_400 + HOST_MARGIN_MIB + 2_400 // HOST_MARGIN_PARTS + 800


def test_the_use_of_all_devices_together_counts() -> None:
    hand = Hand()
    hand.idle("a", 900)
    measured(hand, "a", 300)
    hand.send(HostMemorySeen(at_ms=0, budget_mib=299))
    hand.start("b", 900)
    assert hand.suspends(hand.want("b")) == []
    assert "expected to take 300 MiB of host memory, and only 299 MiB is left" in hand.ticket("b").sentence
    assert hand.suspends(hand.send(HostMemorySeen(at_ms=0, budget_mib=300))) == ["a"], "the margin takes what is left"


def test_a_lease_that_is_measured_to_use_nothing_leaves_a_device_that_host_memory_could_not_hold() -> None:
    hand = Hand(device(memory_mib=81_920), host_mib=12_000)
    hand.idle("a", 80_000)
    measured(hand, "a", 0)
    hand.start("b", 80_000)
    assert hand.suspends(hand.want("b")) == ["a"]


def test_what_was_measured_says_nothing_of_the_next_stay() -> None:
    hand = Hand(device(memory_mib=20_000))
    hand.idle("a", 10_000)
    measured(hand, "a", 0)
    suspend = suspend_of(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")))
    hand.send(
        SuspendFinished(
            at_ms=hand.now,
            lease_id="a",
            operation_id=suspend.operation_id,
            generation=suspend.generation,
            outcome=SuspendOutcome.NOTHING_TO_SAVE,
        )
    )
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    assert hand.state("a") is LeaseState.RESIDENT
    assert reserved_by(hand, "a") == 10_000


def test_no_wait_is_forecast_for_room_that_host_memory_keeps_from_leaving() -> None:
    hand = Hand(host_mib=599)
    hand.idle("a")
    hand.start("b")
    hand.want("b")
    assert hand.ticket("b").expected is None
    assert hand.suspends(measured(hand, "a", 500)) == ["a"]
    assert hand.ticket("b").expected is not None


def test_use_that_falls_lets_a_waiting_ticket_go_on() -> None:
    hand = Hand(host_mib=300)
    hand.idle("a")
    measured(hand, "a", 400)
    hand.start("b")
    (shrink,) = [effect for effect in hand.want("b") if isinstance(effect, Shrink)]
    hand.send(Shrunk(at_ms=0, lease_id="a", generation=shrink.generation, used_mib=None))  # it could not
    assert hand.ticket("b").reason == "wait.host-memory"
    assert hand.suspends(measured(hand, "a", 301)) == []
    assert hand.suspends(measured(hand, "a", 300)) == ["a"]


def test_a_margin_delays_the_second_victim_and_takes_nothing_from_it() -> None:
    hand = Hand(device(memory_mib=1_000), host_mib=700, parallel_swaps=2)
    for name in ("a", "b"):
        hand.idle(name, 500)
        measured(hand, name, 330)
    hand.start("c", 1_000)
    effects = hand.want("c")
    first = suspend_of(effects)
    assert first.host_mib == 330 + HOST_MARGIN_MIB + 330 // HOST_MARGIN_PARTS, "the second needs 330 of what is left"
    effects = hand.saved(effects, saved_mib=330)
    assert suspend_of(effects).lease_id != first.lease_id
    assert suspend_of(effects).host_mib == 700 - 330
    assert hand.granted(hand.saved(effects, saved_mib=330)) == [("c", "d0")]


# -- wrong estimates ------------------------------------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """What a kernel really uses on its device, and what its measurements report."""

    cap_mib: int
    holds_mib: int
    said_mib: int


class Driver:
    """A broker that counts under the driver's locks, as the real one does, and saves no more than was reserved."""

    def __init__(self, hand: Hand, kernels: dict[str, Kernel], *, asks: bool = True) -> None:
        self.asks = asks  # for what exceeds its reservation
        self.hand, self.kernels = hand, kernels
        self.saved_mib: dict[str, int] = {}  # saved in host memory
        self.refused = 0
        self.granted: set[str] = set()

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Granted(lease_id=lease_id):
                    self.granted.add(lease_id)
                case Suspend():
                    self.carry_out(self._suspend(effect))
                case Resume():
                    self.carry_out(self._resume(effect))
                case Shrink(lease_id=lease_id, generation=generation):
                    said_mib = self.kernels[lease_id].said_mib or None
                    answer = Shrunk(at_ms=self.hand.now, lease_id=lease_id, generation=generation, used_mib=said_mib)
                    self.carry_out(self.hand.send(answer))

    def _suspend(self, effect: Suspend) -> list[Effect]:
        need_mib = self.kernels[effect.lease_id].holds_mib
        reserved_mib = effect.host_mib
        if need_mib > reserved_mib and self.asks:
            self.hand.send(
                HostMemoryNeeded(
                    at_ms=self.hand.now,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    need_mib=need_mib,
                )
            )
            reserved_mib = self.hand.view(effect.lease_id).host_reserved_mib
        fits = need_mib <= reserved_mib
        if fits:
            self.saved_mib[effect.lease_id] = need_mib
        self.refused += not fits
        return self.hand.send(
            SuspendFinished(
                at_ms=self.hand.now,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=SuspendOutcome.SAVED if fits else SuspendOutcome.ABORTED,
                saved_mib=need_mib if fits else 0,
                need_mib=0 if fits else need_mib,
            )
        )

    def _resume(self, effect: Resume) -> list[Effect]:
        saved_mib = self.saved_mib.pop(effect.lease_id)
        assert effect.reserve_mib >= saved_mib, "there is no room for what comes back"
        assert saved_mib == self.kernels[effect.lease_id].holds_mib, "something is lost"
        return self.hand.send(
            ResumeFinished(
                at_ms=self.hand.now,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=ResumeOutcome.RESTORED,
            )
        )

    def turn(self, name: str, *, within_ms: int) -> None:
        """Make the kernel run a cell: it must be let in within the time limit."""
        hand, until_ms = self.hand, self.hand.now + within_ms
        self.granted.discard(name)
        if hand.state(name) is not LeaseState.RESIDENT:
            self.carry_out(hand.want(name))
            while hand.state(name) is not LeaseState.RESIDENT:
                assert hand.now < until_ms, f"{name} waits: {hand.ticket(name)}, {hand.arbiter.host_saved_mib} saved"
                self.carry_out(hand.wait(1_000))
        self.carry_out(hand.work(name))
        self.carry_out(measured(hand, name, self.kernels[name].said_mib))
        self.carry_out(hand.rest(name))
        assert hand.arbiter.host_saved_mib == sum(self.saved_mib.values())


@given(
    kernels=st.lists(
        st.tuples(st.integers(1, 1_000), st.integers(0, 3_000)), min_size=2, max_size=5
    ),  # in thousandths: the part of its cap it uses, and the part of that which is measured
    spare_mib=st.integers(0, 1_000),
    turns=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    parallel_swaps=st.integers(1, 2),
    asks=st.booleans(),
)
def test_estimates_wrong_by_any_factor_lose_nothing_and_end_every_wait(
    kernels: list[tuple[int, int]], spare_mib: int, turns: list[int], parallel_swaps: int, asks: bool
) -> None:
    """The host has room for everything in use plus the worst estimate of each lease, so every kernel gets every turn."""
    crowd = {}
    for number, (holds_milli, said_milli) in enumerate(kernels):
        holds_mib = max(1, CAP_MIB * holds_milli // 1_000)
        crowd[f"k{number}"] = Kernel(CAP_MIB, holds_mib, holds_mib * said_milli // 1_000)
    worst = [max(one.holds_mib, one.said_mib or one.cap_mib) for one in crowd.values()]
    hand = Hand(device(memory_mib=CAP_MIB), host_mib=sum(worst) + spare_mib, parallel_swaps=parallel_swaps)
    driver = Driver(hand, crowd, asks=asks)
    for name in crowd:
        hand.start(name, CAP_MIB)
    for turn in [*range(len(crowd)), *turns]:
        driver.turn(f"k{turn % len(crowd)}", within_ms=600_000)


def test_three_kernels_whose_caps_the_host_could_not_hold_take_turns() -> None:
    crowd = {name: Kernel(CAP_MIB, USE_MIB, USE_MIB) for name in "abc"}
    hand = Hand(device(memory_mib=CAP_MIB), host_mib=BUDGET_MIB)
    driver = Driver(hand, crowd)
    for name in crowd:
        hand.start(name, CAP_MIB)
    for name in "abcabcabc":
        driver.turn(name, within_ms=60_000)
    assert driver.refused == 0


class Grower(Kernel):
    """A kernel that allocates more each time, after its use was estimated and before it is locked."""

    @property
    def holds_mib(self) -> int:
        self.looks = getattr(self, "looks", 0) + 1
        return 1_000 * self.looks

    @holds_mib.setter
    def holds_mib(self, _mib: int) -> None:
        self.looks = 0


def test_a_lease_that_always_grows_before_its_lock_delays_no_other() -> None:
    hand = Hand(device(memory_mib=1_000), host_mib=100_000)
    driver = Driver(
        hand, {"a": Grower(500, 0, 100), "b": Kernel(500, 100, 100), "c": Kernel(500, 100, 100)}, asks=False
    )
    for name in "ab":
        hand.start(name, 500)
        driver.turn(name, within_ms=1_000)
    hand.start("c", 500)
    driver.turn("c", within_ms=1_000)
    assert (hand.state("a"), hand.state("b"), driver.refused) == (LeaseState.RESIDENT, LeaseState.SUSPENDED, 1)


def test_a_lease_that_always_grows_before_its_lock_is_tried_ever_more_rarely() -> None:
    hand = Hand(host_mib=100_000)
    driver = Driver(hand, {"a": Grower(600, 0, 100), "b": Kernel(600, 100, 100)}, asks=False)
    hand.start("a")
    driver.turn("a", within_ms=1_000)
    hand.start("b")
    driver.carry_out(hand.want("b"))
    for _ in range(3_600):
        driver.carry_out(hand.wait(1_000))
    pause_s = pool().retry_refused_ms // 1_000
    assert 2 < driver.refused <= pause_s.bit_length() + 3_600 // pause_s + 1
    assert (hand.arbiter.host_reserved_mib, hand.arbiter.host_saved_mib) == (0, 0)
    assert hand.state("a") is LeaseState.RESIDENT


# -- the difference -------------------------------------------------------------------------------------------------------------------


def needed(hand: Hand, suspend: Suspend, need_mib: int, *, operation_id: int | None = None) -> int:
    """Ask for more host memory for a suspend under way; return what is then reserved for it."""
    event = HostMemoryNeeded(
        at_ms=hand.now,
        lease_id=suspend.lease_id,
        operation_id=suspend.operation_id if operation_id is None else operation_id,
        generation=suspend.generation,
        need_mib=need_mib,
    )
    assert hand.send(event) == []
    assert hand.arbiter.host_reserved_mib == hand.view(suspend.lease_id).host_reserved_mib
    return hand.view(suspend.lease_id).host_reserved_mib


def test_a_suspend_under_way_gets_the_difference_within_the_budget_and_only_then() -> None:
    hand = Hand(host_mib=400)
    hand.idle("a")
    measured(hand, "a", 200)
    suspend = suspend_of(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    reserved_mib = suspend.host_mib
    assert needed(hand, suspend, reserved_mib - 1) == reserved_mib, "it gives nothing back before its end"
    assert needed(hand, suspend, 401) == reserved_mib
    assert needed(hand, suspend, 400, operation_id=suspend.operation_id + 1) == reserved_mib
    assert needed(hand, suspend, 400) == 400
    hand.saved([suspend], saved_mib=400)
    assert (hand.arbiter.host_reserved_mib, hand.arbiter.host_saved_mib) == (0, 400)
    assert needed(hand, suspend, 450) == 0, "it is over"
