"""A waiting ticket names the kernels in its way, what they do, and until when; it hides the names of other users' kernels."""

from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Suspend
from fractional_gpu.core.events import (
    Attached,
    Checkpointable,
    DeviceSeen,
    LeaseReleased,
    LeaseRequested,
    PinRequested,
    SuspendFinished,
    SuspendOutcome,
)
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, lease_measured, pool, spec


def start(hand: Hand, name: str, *, owner: str = "ann", label: str = "", mib: int = 600) -> None:
    what = replace(spec(name, mib), owner=owner, label=label)
    hand.send(LeaseRequested(at_ms=hand.now, spec=what))
    hand.send(Attached(at_ms=hand.now, lease_id=name, gated=True))


def run(hand: Hand, name: str, *, owner: str = "ann", label: str = "", mib: int = 600) -> None:
    start(hand, name, owner=owner, label=label, mib=mib)
    hand.want(name)
    hand.work(name)


def waits(hand: Hand, name: str = "b") -> str:
    """Make another kernel of ann's want the device; return why it waits."""
    if hand.arbiter.lease(name) is None:
        start(hand, name, label=f"{name}.ipynb")
        hand.want(name)
    return hand.ticket(name).sentence.partition("device; ")[2]


def test_a_running_cell_is_named_with_how_long_it_has_run() -> None:
    hand = Hand()
    run(hand, "a", label="analysis.ipynb")
    assert waits(hand) == "analysis.ipynb is running a cell"
    hand.wait(12 * 60_000)
    assert waits(hand) == "analysis.ipynb has been running a cell for 12 min"
    assert hand.ticket("b").reason == "wait.busy-neighbour"


@pytest.mark.parametrize("owner", ["ann", "bob"])
def test_a_cell_that_has_not_used_the_gpu_is_told_with_what_helps(owner: str) -> None:
    hand = Hand()
    run(hand, "a", owner=owner, label="slow.ipynb")
    hand.send(lease_measured(0, "a", 0))
    remedies = {"ann": "interrupt it and start it with %%cpu, or have an", "bob": "its user can interrupt it, or an"}
    told = "is running a cell that has not used the GPU, and keeps its room until the cell ends"
    assert waits(hand).endswith(f"{told}: {remedies[owner]} administrator evict the kernel")
    hand.send(lease_measured(0, "a", 100))
    assert waits(hand).endswith("is running a cell")


def test_a_notebook_is_named_without_the_folders_it_is_in() -> None:
    hand = Hand()
    run(hand, "a", label="/home/ann/a-project-with-a-long-name/and-a-long-folder/in-it/analysis.ipynb")
    assert waits(hand) == "analysis.ipynb is running a cell"


def test_a_kernel_without_a_notebook_has_its_whole_name() -> None:
    hand = Hand()
    run(hand, "a", label="Python 3 · 1/4 GPU")
    assert waits(hand) == "Python 3 · 1/4 GPU is running a cell"


def test_another_users_kernel_has_no_name() -> None:
    hand = Hand()
    run(hand, "a", owner="bob", label="secret.ipynb")
    hand.wait(60_000)
    assert waits(hand) == "another user's kernel has been running a cell for 1 min"
    hand.rest("a")


@pytest.mark.parametrize("owner", ["ann", "bob"])
def test_the_busy_kernel_in_the_way_is_preempted_when_its_turn_was_said_to_end(owner: str) -> None:
    hand = Hand(pools=[pool(preempt_equals=True, min_residency_ms=30_000)])
    run(hand, "a", owner=owner)
    hand.wait(4_000)
    waits(hand)
    hand.work("b")
    assert hand.arbiter.turns_end_ms("b") == 30_000
    assert not hand.suspends(hand.wait(25_999))
    assert hand.suspends(hand.wait(1)) == ["a"]


def test_the_turn_ends_when_enough_kernels_have_had_theirs() -> None:
    hand = Hand(pools=[pool(preempt_equals=True, min_residency_ms=30_000)])
    for name in ("a", "c"):
        run(hand, name, mib=500)
        hand.wait(10_000)
    waits(hand)
    assert hand.arbiter.turns_end_ms("b") == 40_000


def test_no_turn_ends_where_busy_kernels_are_not_preempted() -> None:
    hand = Hand()
    run(hand, "a")
    waits(hand)
    assert hand.arbiter.turns_end_ms("b") is None


def test_a_pin_is_told_with_its_end() -> None:
    hand = Hand()
    run(hand, "a", label="tenant-b.ipynb")
    hand.rest("a")
    hand.wait(600_000)
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=1_800_000))
    assert waits(hand) == "tenant-b.ipynb is pinned for 30 min more (`jupyter gpu unpin a` ends it)"
    hand.work("a")
    assert (
        waits(hand) == "tenant-b.ipynb is running a cell and is pinned for 30 min more (`jupyter gpu unpin a` ends it)"
    )


def test_a_kernel_that_cannot_be_saved_says_why() -> None:
    hand = Hand()
    run(hand, "a", label="managed.ipynb")
    hand.send(lease_measured(0, "a", 100))
    hand.send(Checkpointable(at_ms=0, lease_id="a", why_not="it has managed memory"))
    hand.rest("a")
    told = "managed.ipynb cannot be suspended: it has managed memory; this kernel waits until one of them ends"
    assert waits(hand) == told


@pytest.mark.parametrize("owner", ["ann", "bob"])
def test_a_suspend_that_was_refused_is_told_with_its_reason_to_its_own_user(owner: str) -> None:
    hand = Hand()
    run(hand, "a", owner=owner, label="halted.ipynb")
    hand.rest("a")
    start(hand, "b")
    effects = hand.want("b")
    suspend = next(one for one in effects if type(one).__name__ == "Suspend")
    hand.send(_refused(hand, suspend))
    assert hand.state("a") is LeaseState.RESIDENT
    name = "halted.ipynb" if owner == "ann" else "another user's kernel"
    why = " (process 7 is stopped)" if owner == "ann" else ""
    assert waits(hand) == f"{name} could not be suspended{why}; the next attempt follows within a minute"


def _refused(hand: Hand, suspend: object, outcome: SuspendOutcome = SuspendOutcome.REFUSED) -> SuspendFinished:
    assert isinstance(suspend, Suspend)
    return SuspendFinished(
        at_ms=hand.now,
        lease_id=suspend.lease_id,
        operation_id=suspend.operation_id,
        generation=suspend.generation,
        outcome=outcome,
        sentence="process 7 is stopped",
    )


def test_a_kernel_that_came_a_moment_ago_may_run_first() -> None:
    hand = Hand()
    start(hand, "a", label="new.ipynb")
    hand.want("a")
    assert waits(hand) == "new.ipynb got its room a moment ago and may keep it for 10 s more"


def test_many_kernels_in_the_way_are_told_in_one_sentence() -> None:
    hand = Hand(device(memory_mib=1000), pools=[pool()])
    for number in range(3):
        run(hand, f"o{number}", owner="bob", mib=100)
    for number in range(4):
        run(hand, f"m{number}", label=f"m{number}.ipynb", mib=100)
    start(hand, "b", mib=1000)
    hand.want("b")
    assert waits(hand) == (
        "another user's kernel is running a cell (and 2 more); m0.ipynb is running a cell; 3 more kernels are in the way"
    )
    assert len(hand.ticket("b").blockers) == 7


def test_a_kernel_that_is_brought_back_is_in_the_way_and_says_so() -> None:
    hand = Hand()
    hand.idle("a")
    hand.start("c")
    hand.saved(hand.want("c"))
    hand.work("c")
    hand.want("a")
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="c"))
    assert hand.state("a") is LeaseState.RESUMING
    assert waits(hand) == "kernel a is being resumed"


def test_devices_are_named_where_processes_without_a_lease_have_the_room_that_is_missing() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    run(hand, "a")
    run(hand, "b")
    start(hand, "c")
    hand.want("c")
    assert (hand.ticket("c").reason, hand.arbiter.stranger_devices("c")) == ("wait.busy-neighbour", [])
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="c"))
    hand.send(DeviceSeen(at_ms=hand.now, device=device("d1"), stranger_mib=300))
    run(hand, "d", mib=350)
    start(hand, "e", mib=350)
    hand.want("e")
    assert (hand.ticket("e").reason, hand.arbiter.stranger_devices("e")) == ("wait.busy-neighbour", ["d1"])
    start(hand, "f", mib=800)
    hand.want("f")
    assert hand.arbiter.stranger_devices("f") == [], "it does not fit even without them"


def test_a_kernel_that_only_processes_without_a_lease_keep_out_names_their_devices() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    for name, mib in (("d0", 700), ("d1", 500)):
        hand.send(DeviceSeen(at_ms=hand.now, device=device(name), stranger_mib=mib))
    start(hand, "a")
    hand.want("a")
    assert (hand.ticket("a").reason, hand.arbiter.stranger_devices("a")) == ("wait.stranger", ["d0", "d1"])


def test_a_device_on_which_an_idle_kernel_makes_room_is_not_named() -> None:
    hand = Hand(pools=[pool(min_residency_ms=0)])
    hand.send(DeviceSeen(at_ms=hand.now, device=device(), stranger_mib=300))
    hand.idle("a", 600)
    start(hand, "b")
    hand.want("b")
    assert (hand.ticket("b").reason, hand.arbiter.stranger_devices("b")) == ("wait.making-room", [])
