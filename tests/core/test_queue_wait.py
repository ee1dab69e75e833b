"""Expected waits: small queues worked out by hand, and a day of simulated users whose waits are compared with the forecasts."""

import pytest

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Resume, Suspend
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceLost,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseRequested,
    PoolConfigured,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Wanted,
)
from fractional_gpu.core.forecasts.forecasts import Forecasts, WaitSpan
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.core.queue_wait import MOST_AHEAD, ForecastRecorder
from tests.core.driving import lease_measured

MIB = 8_000
SAVE_MS, RESTORE_MS = 4_744, 2_300  # of 8,000 MiB, by the prior


class World:
    """An arbiter, forecasts with only their priors, and kernels that each fill a device."""

    def __init__(self, devices: int = 1, *, parallel_swaps: int = 1) -> None:
        self.arbiter, self.forecasts = Arbiter(parallel_swaps=parallel_swaps), Forecasts()
        self.now_ms = 1_000_000
        self.waits = ForecastRecorder(self.arbiter._books, self.forecasts, parallel_swaps=parallel_swaps)
        names = tuple(f"d{number}" for number in range(devices))
        for name in names:
            self.tell(DeviceSeen(at_ms=0, device=DeviceSpec(device_id=name, name="H", memory_mib=MIB)))
        pool = PoolSpec(
            name="p",
            devices=names,
            fractions_milli=(),
            idle_after_ms=None,
            may_move=True,
            min_residency_ms=0,
            min_residency_swaps_milli=4_000,
            preempt_equals=False,
        )
        self.tell(PoolConfigured(at_ms=0, pool=pool))
        self.tell(HostMemorySeen(at_ms=0, budget_mib=1 << 20))

    def tell(self, event: Event) -> list[Effect]:
        return self.arbiter.handle(event)

    def kernel(self, name: str, mib: int = MIB, *, priority: int = 0) -> None:
        milli = mib * 1000 // MIB
        spec = LeaseSpec(lease_id=name, pool="p", owner="ann", fraction_milli=milli, reserve_mib=mib, priority=priority)
        self.tell(LeaseRequested(at_ms=self.now_ms, spec=spec))
        self.tell(Attached(at_ms=self.now_ms, lease_id=name, gated=True))

    def wants(self, name: str) -> list[Effect]:
        self.tell(BusyChanged(at_ms=self.now_ms, lease_id=name, busy=True))
        effects = self.tell(Wanted(at_ms=self.now_ms, lease_id=name))
        self.forecasts.cell_began(name, self.now_ms)
        return effects

    def ran(self, name: str, mib: int = MIB, *, after_ms: int = 10_000) -> list[Effect]:
        """Run a cell in a resident kernel, which then uses this many MiB."""
        self.tell(lease_measured(self.now_ms, name, mib))
        self.now_ms += after_ms
        self.forecasts.cell_ended(name, self.now_ms)
        return self.tell(BusyChanged(at_ms=self.now_ms, lease_id=name, busy=False))

    def answer(self, effects: list[Effect]) -> list[Effect]:
        """Finish the pending operation successfully."""
        (effect,) = (effect for effect in effects if isinstance(effect, Suspend | Resume))
        resumed, saved = ResumeOutcome.RESTORED, SuspendOutcome.SAVED
        at_ms, lease_id, operation_id = self.now_ms, effect.lease_id, effect.operation_id
        generation = effect.generation
        if isinstance(effect, Resume):
            return self.tell(
                ResumeFinished(
                    at_ms=at_ms, lease_id=lease_id, operation_id=operation_id, generation=generation, outcome=resumed
                )
            )
        return self.tell(
            SuspendFinished(
                at_ms=at_ms,
                lease_id=lease_id,
                operation_id=operation_id,
                generation=generation,
                outcome=saved,
                saved_mib=effect.host_mib,
            )
        )

    def wait(self, name: str) -> WaitSpan | None:
        self.arbiter._books.now_ms = self.now_ms
        return self.waits.wait_of(self.arbiter._books.leases[name])

    def queue(self, pool: str = "p") -> list[WaitSpan | None]:
        self.arbiter._books.now_ms = self.now_ms
        return self.waits.waits_of_pool(pool)

    def basis(self, name: str) -> tuple[str, int] | None:
        wait = self.wait(name)
        return None if wait is None else (wait.kind, wait.basis_ms)


def test_who_does_not_wait_has_no_wait() -> None:
    world = World()
    world.kernel("a")
    assert world.wait("a") is None
    world.wants("a")
    assert world.arbiter.lease("a").state is LeaseState.RESIDENT  # type: ignore[union-attr]
    assert world.wait("a") is None


def test_a_suspend_under_way_is_waited_for_as_long_as_it_still_takes() -> None:
    world = World()
    for name in "ab":
        world.kernel(name)
    world.wants("a")
    world.ran("a")
    world.wants("b")  # `a` is idle: it is suspended for `b`, which has no saved state
    assert world.basis("b") == ("swap", SAVE_MS)
    world.now_ms += 1_000
    assert world.basis("b") == ("swap", SAVE_MS - 1_000)
    world.now_ms += 60_000  # much longer than expected
    assert world.basis("b") == ("swap", SAVE_MS // 8)


def test_an_own_resume_is_part_of_the_wait_and_then_all_of_it() -> None:
    world = World()
    for name in "ab":
        world.kernel(name)
    world.wants("a")
    world.ran("a")
    world.answer(world.wants("b"))
    world.ran("b")
    effects = world.wants("a")  # `b` is saved, then `a` restored
    assert world.basis("a") == ("swap", SAVE_MS + RESTORE_MS)
    world.now_ms += SAVE_MS
    world.answer(effects)
    assert world.basis("a") == ("swap", RESTORE_MS)
    world.now_ms += 500
    assert world.basis("a") == ("swap", RESTORE_MS - 500)


def test_a_busy_neighbour_is_waited_for_until_its_cell_is_expected_to_end() -> None:
    world = World()
    for name in "ab":
        world.kernel(name)
    world.wants("a")
    world.tell(lease_measured(world.now_ms, "a", MIB))
    world.wants("b")
    at_once = world.wait("b")
    assert at_once is not None
    assert (at_once.kind, at_once.basis_ms) == ("busy", world.forecasts.cell_left_ms("a", world.now_ms) + SAVE_MS)
    assert at_once.low_ms < at_once.expected_ms < at_once.high_ms
    world.now_ms += 60_000
    later = world.wait("b")
    assert later is not None
    assert later.basis_ms == world.forecasts.cell_left_ms("a", world.now_ms) + SAVE_MS


def test_those_ahead_are_served_before() -> None:
    world = World()
    for name in "abc":
        world.kernel(name)
    world.wants("a")
    world.tell(lease_measured(world.now_ms, "a", MIB))
    world.wants("b")
    world.wants("c")
    first, second = world.wait("b"), world.wait("c")
    assert first is not None
    assert second is not None
    # `b` runs a cell before `c` comes in; what it will have to save is unknown
    assert second.basis_ms == first.basis_ms + world.forecasts.next_cell_ms("b") + world.forecasts.swap_ms(
        SUSPEND, "H", 0
    )
    assert world.queue() == [first, second]


def test_the_device_that_is_ready_first_counts() -> None:
    world = World(devices=2)
    for name in "abc":
        world.kernel(name)
    for name in "ab":
        world.wants(name)
        world.tell(lease_measured(world.now_ms, name, MIB))
    world.now_ms += 10_000
    world.ran("a", after_ms=0)
    for _ in range(30):  # `b` is known for short cells
        world.forecasts.cell_ended("b", world.now_ms)
        world.forecasts.cell_began("b", world.now_ms)
    world.wants("a")
    world.wants("c")
    wait = world.wait("c")
    assert wait is not None
    left = {name: world.forecasts.cell_left_ms(name, world.now_ms) for name in "ab"}
    assert left["b"] < left["a"]
    assert wait.basis_ms == max(1, left["b"]) + SAVE_MS


def test_idle_neighbours_that_must_be_suspended_one_after_another_are_added_up() -> None:
    world = World()
    for name in "ab":
        world.kernel(name, MIB // 2)
        world.wants(name)
    for name in "ab":
        world.ran(name, 2_000)
    world.kernel("c")
    world.wants("c")
    one = world.forecasts.swap_ms(SUSPEND, "H", 2_000)
    assert world.basis("c") == ("swap", 2 * one)


def test_no_victim_is_counted_that_would_not_help() -> None:
    world = World()
    for name, mib in (("a", 1_000), ("b", 7_000)):
        world.kernel(name, mib)
        world.wants(name)
        world.ran(name, mib)
    world.kernel("c", 7_000)
    world.wants("c")
    assert world.basis("c") == ("swap", world.forecasts.swap_ms(SUSPEND, "H", 7_000))


def test_nothing_is_said_where_nothing_can_be_known() -> None:
    world = World()
    for name in "ab":
        world.kernel(name)
    world.wants("a")
    world.ran("a")
    world.wants("b")
    world.tell(DeviceLost(at_ms=world.now_ms, device_id="d0"))
    assert world.wait("b") is None
    assert world.queue() == [None]
    assert world.queue("no such pool") == []


def test_far_back_in_the_queue_a_wait_grows_with_the_place() -> None:
    world = World()
    world.kernel("a")
    world.wants("a")
    names = [f"k{number:02}" for number in range(4 * MOST_AHEAD)]
    for name in names:
        world.kernel(name)
        world.wants(name)
    waits = world.queue()
    bases = [wait.basis_ms for wait in waits if wait is not None]
    assert len(bases) == len(names)
    assert bases == sorted(bases)
    assert bases[-1] == pytest.approx(4 * bases[MOST_AHEAD - 1], rel=0.1)
    for place in (0, MOST_AHEAD, len(names) - 1):
        alone = world.wait(names[place])
        assert alone is not None
        assert alone.basis_ms == pytest.approx(bases[place], rel=0.15)


def test_what_was_learnt_of_swaps_is_used() -> None:
    world = World()
    for name in "ab":
        world.kernel(name)
    for _ in range(10):
        world.forecasts.swap_finished(SUSPEND, "H", MIB, 1_000)
        world.forecasts.swap_finished(RESUME, "H", MIB, 200)
    world.wants("a")
    world.ran("a")
    world.answer(world.wants("b"))
    world.ran("b")
    world.wants("a")
    wait = world.wait("a")
    assert wait is not None
    assert wait.basis_ms == pytest.approx(1_200, abs=20)


def test_who_may_preempt_waits_for_the_minimum_residency_and_not_for_the_cell() -> None:
    world = World()
    world.kernel("a")
    world.kernel("b", priority=1)
    world.wants("a")
    world.tell(lease_measured(world.now_ms, "a", MIB))
    world.wants("b")
    four_swaps_ms = 4 * (SAVE_MS + RESTORE_MS)
    assert four_swaps_ms < world.forecasts.cell_left_ms("a", world.now_ms)
    assert world.basis("b") == ("busy", four_swaps_ms + SAVE_MS)
    world.now_ms += 10_000
    assert world.basis("b") == ("busy", four_swaps_ms - 10_000 + SAVE_MS)


@pytest.mark.parametrize(("channels", "second_ms"), [(1, 2 * SAVE_MS), (2, SAVE_MS)])
def test_swaps_follow_one_another_only_where_there_is_one_channel(channels: int, second_ms: int) -> None:
    world = World(devices=2, parallel_swaps=channels)
    for name in "abcd":
        world.kernel(name)
    for name in "ab":
        world.wants(name)
    for name in "ab":
        world.ran(name, after_ms=0)
    for name in "cd":
        world.wants(name)
    assert world.basis("c") == ("swap", SAVE_MS)
    assert world.basis("d") == ("swap", second_ms)
