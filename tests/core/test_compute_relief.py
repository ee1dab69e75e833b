"""Moving busy leases off devices whose busy leases slow each other down."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from fractional_gpu.core.effects import Effect, Resume, Suspend
from fractional_gpu.core.events import LeaseReleased, PinRequested, PoolConfigured
from fractional_gpu.core.model import Compute, LeaseState, PoolSpec
from tests.core.driving import Hand, device, lease_measured, pool

SMALL = 100  # MiB
HALF_HOUR_MS = 1_800_000


def policy() -> PoolSpec:
    return replace(pool("d0", "d1", may_move=True, preempt_equals=True), compute=Compute.SPREAD)


def seen(world: Hand, name: str, milli: int) -> list[Effect]:
    """Measure a busy kernel at this utilisation."""
    return world.send(lease_measured(world.now, name, 50, util_milli=milli))


def crowded(world: Hand, *, full: int = 900) -> list[Effect]:
    """Run "a" and "b" with these demands on one device while "x" fills the other. Return the last effects."""
    world.run("x", 1000)
    for name in ("a", "b"):
        world.run(name, SMALL)
    world.wait(60_000)
    assert {world.view(name).device_id for name in ("a", "b")} == {"d1"}
    seen(world, "a", full)
    return seen(world, "b", min(full, 500))


def ends(world: Hand, name: str) -> list[Effect]:
    return world.send(LeaseReleased(at_ms=world.now, lease_id=name))


def moves(effects: list[Effect]) -> list[str]:
    return [name for name in Hand.suspends(effects) if "move.compute" in Hand.reasons(effects, name)]


def relieved(world: Hand) -> list[Effect]:
    """End "x" on the other device. Return all effects of that and of the next sample."""
    return [*ends(world, "x"), *seen(world, "a", 900), *seen(world, "b", 500)]


def test_a_busy_lease_goes_where_neighbours_leave_it_more_and_runs_on() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    assert not world.suspends(crowded(world)), "no idle leases could make room elsewhere"
    effects = relieved(world)
    (mover,) = moves(effects)
    other = "b" if mover == "a" else "a"
    effects = world.saved(effects)
    assert world.resumes(effects) == [(mover, "d0")]
    world.restored(effects)
    assert (world.view(mover).device_id, world.view(other).device_id) == ("d0", "d1")
    seen(world, other, 900)
    assert not moves(seen(world, mover, 900)), "each has a device"


def test_idle_leases_make_room_first_where_memory_lacks() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    crowded(world)
    effects = world.rest("x")
    effects += seen(world, "a", 900) + seen(world, "b", 500)
    assert world.suspends(effects) == ["x"]
    assert "suspend.compute" in world.reasons(effects, "x")
    effects = world.saved(effects)
    assert len(moves(effects)) == 1


def test_no_more_idle_leases_leave_than_the_move_needs() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()], parallel_swaps=2)
    world.run("x", 1000)
    for name in ("a", "b"):
        world.run(name, SMALL)
    ends(world, "x")
    for name, mib in (("y", 500), ("z", 450)):
        world.idle(name, mib)
        assert world.view(name).device_id == "d0"
    world.wait(60_000)
    effects = seen(world, "a", 900) + seen(world, "b", 900)
    assert len(world.suspends(effects)) == 1, "a swap channel is left, but one of them suffices"
    effects = [one for one in effects if isinstance(one, Suspend)]
    assert len(moves(world.saved(effects))) == 1


def test_a_lease_of_a_low_priority_moves_for_one_of_a_high_priority() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    world.run("x", 1000)
    for name, priority in (("a", 1), ("b", 0)):
        world.start(name, SMALL, priority=priority)
        world.want(name)
        world.work(name)
    world.wait(60_000)
    seen(world, "a", 600)
    seen(world, "b", 990)
    assert moves([*ends(world, "x"), *seen(world, "a", 600), *seen(world, "b", 990)]) == ["b"]


@pytest.mark.parametrize(
    "stays",
    [
        replace(policy(), may_move=False),
        replace(policy(), compute=Compute.PACK),
        replace(policy(), preempt_equals=False),
        replace(policy(), slowdown_bound_milli=4000),
    ],
    ids=["moves nothing", "packs", "leaves busy leases alone", "bears the slowdown"],
)
def test_the_pool_decides_whether_busy_leases_are_moved(stays: PoolSpec) -> None:
    world = Hand(device("d0"), device("d1"), pools=[stays])
    crowded(world)
    assert not world.suspends(relieved(world))


def test_a_pool_that_moves_busy_leases_need_not_preempt_them() -> None:
    world = Hand(device("d0"), device("d1"), pools=[replace(policy(), preempt_equals=False, move_busy=True)])
    crowded(world)
    assert len(moves(relieved(world))) == 1


def test_no_lease_moves_while_a_ticket_waits() -> None:
    world = Hand(
        device("d0"), device("d1"), pools=[replace(policy(), preempt_equals=False, move_busy=True)], host_mib=0
    )
    crowded(world)
    world.start("c", 950)
    world.want("c")
    world.send(PoolConfigured(at_ms=world.now, pool=replace(policy(), preempt_equals=False)))
    effects = seen(world, "a", 900)
    assert not world.suspends(effects)


def test_a_short_rest_of_a_cell_is_not_worth_a_move() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    world.run("x", 1000)
    for name in ("a", "b"):
        world.run(name, SMALL)
    for _ in range(60):  # their cells are known to be short
        world.wait(500)
        for name in ("a", "b"):
            world.rest(name)
            world.work(name)
    world.wait(100)
    assert not world.suspends(relieved(world))


def test_neighbours_that_leave_enough_are_left_where_they_are() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    crowded(world, full=450)
    effects = [*ends(world, "x"), *seen(world, "a", 450), *seen(world, "b", 450)]
    assert not world.suspends(effects)


def test_a_lease_has_its_minimum_residency_first_and_is_looked_at_again_then() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    crowded(world)
    world.send(PoolConfigured(at_ms=world.now, pool=replace(policy(), min_residency_ms=HALF_HOUR_MS)))
    assert not world.suspends(relieved(world))
    assert len(moves(world.wait(HALF_HOUR_MS))) == 1


def test_a_pinned_lease_is_not_moved() -> None:
    world = Hand(device("d0"), device("d1"), pools=[policy()])
    crowded(world)
    for name in ("a", "b"):
        world.send(PinRequested(at_ms=world.now, lease_id=name, duration_ms=HALF_HOUR_MS))
    assert not world.suspends(relieved(world))


@pytest.mark.parametrize("stays", [policy(), PoolSpec(name="p", devices=("d0", "d1"))], ids=["this pool", "default"])
def test_a_busy_kernel_that_uses_nothing_of_its_device_stays_there_and_another_one_moves(stays: PoolSpec) -> None:
    world = Hand(device("d0"), device("d1"), pools=[stays])
    crowded(world)
    world.run("cpu", SMALL)
    assert world.view("cpu").device_id == "d1"
    world.wait(HALF_HOUR_MS)
    seen(world, "cpu", 0)
    effects = [*seen(world, "a", 500), *seen(world, "b", 500), *seen(world, "cpu", 0), *ends(world, "x")]
    assert moves(effects) in (["a"], ["b"])


class Crowd:
    """Kernels that run cells at random on three devices that cannot hold all of them; every step checks the laws."""

    def __init__(self, seed: int) -> None:
        names = ("d0", "d1", "d2")
        spreads = replace(pool(*names, may_move=True, preempt_equals=True), compute=Compute.SPREAD)
        self.random = Random(seed)
        self.world = Hand(*map(device, names), pools=[spreads])
        self.kernels = [f"k{number}" for number in range(9)]
        self.swap: list[Effect] = []
        for name in self.kernels:
            self.world.start(name, self.random.choice((200, 400, 600)))

    def step(self) -> None:
        """Let time pass, finish the swap under way, then let one kernel act."""
        world, random = self.world, self.random
        self.take(world.wait(random.choice((200, 2_000, 20_000))))
        if self.swap:
            effects, self.swap = self.swap, []
            self.take(world.saved(effects) if world.suspends(effects) else world.restored(effects))
        name = random.choice(self.kernels)
        view = world.view(name)
        if view.busy:
            util_milli = random.choice((0, 50, 300, 600, 950))
            self.take(world.rest(name) if random.random() < 0.1 else seen(world, name, util_milli))
        elif view.state is LeaseState.RESIDENT and not view.gate_closed:
            self.take(world.work(name))
        else:
            self.take(world.want(name))

    def take(self, effects: list[Effect]) -> None:
        """Remember a swap that begins, to finish it in the next step."""
        begun = [effect for effect in effects if isinstance(effect, Suspend | Resume)]
        assert not (begun and self.swap)
        self.swap += begun


def test_the_laws_hold_while_kernels_run_at_random() -> None:
    counts = Counter[str]()
    for seed in range(2):
        crowd = Crowd(seed)
        for _ in range(300):
            crowd.step()
        counts += crowd.world.observer.counts
    assert counts["move.compute"] > 3
    assert counts["suspend.compute"] > 3
