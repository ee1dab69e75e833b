"""What a pool says of kernels that work, and of pins, holds on two that do not fit together: nothing it does loses a byte, or a cell."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from fractional_gpu.protocol.messages import LeaseStatus
from tests.e2e.test_policies import WORK, begin_work, respecified
from tests.support.kept import Kept
from tests.support.pair import Pair, new_pair
from tests.support.stories import CHECK, fill
from tests.support.world import World, until

PREEMPT = ("preempt=priorities", "min_residency=0", "min_residency_swaps=0")
POOL = "c.GPUBroker.pools = {'default': {'preempt': 'priorities', 'min_residency': 0, 'min_residency_swaps': 0}}"


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    with Kept(partial(new_pair, POOL)) as kept:
        yield kept


@contextmanager
def pool(world: World, *keys: str) -> Iterator[None]:
    """The pool has these keys while the block lasts."""
    assert world.command("pool", "default", *keys).returncode == 0
    yield
    assert world.command("pool", "default", *PREEMPT).returncode == 0


def moves(before: LeaseStatus, after: LeaseStatus) -> tuple[int, int]:
    """How many times a kernel was suspended and resumed between two looks at it."""
    return after.suspends - before.suspends, after.resumes - before.resumes


def test_a_pin_ends_by_itself(pair: Pair) -> None:
    world = pair.world
    waits, pinned = pair.ready()
    before = world.lease(pinned.kernel_id)
    assert world.command("pin", pinned.kernel_id, "2s").returncode == 0
    assert waits.must(CHECK).text == "intact\n"
    lease = world.lease(pinned.kernel_id)
    assert (moves(before, lease), lease.pinned_ms) == ((1, 0), 0)
    told = world.command("explain", pinned.kernel_id).stdout
    assert told.rindex("pin.begun") < told.rindex("suspend.")
    assert pinned.must(CHECK).text == "intact\n"


def test_equals_that_are_busy_take_turns_and_both_finish_with_their_bytes(pair: Pair) -> None:
    world = pair.world
    notebooks = pair.ready()
    before = [world.lease(notebook.kernel_id) for notebook in notebooks]
    end = world.notebooks / "end"

    def both_took_turns() -> bool:
        now = [world.lease(notebook.kernel_id) for notebook in notebooks]
        return all(min(moves(was, one)) >= 2 for was, one in zip(before, now, strict=True))

    with pool(world, "preempt=fair", "min_residency=500ms", "min_residency_swaps=0"):
        cells = [notebook.send(WORK.format(end=str(end))) for notebook in notebooks]
        until(both_took_turns, "both were suspended and resumed twice in the middle of their cells")
        end.touch()
        for notebook, cell in zip(notebooks, cells, strict=True):
            reply = notebook.wait(cell)
            assert (reply.status, reply.text) == ("ok", "intact\n"), reply.error
        for notebook in notebooks:
            assert notebook.must(CHECK).text == "intact\n"
    told = world.command("explain", notebooks[0].kernel_id).stdout
    assert "suspend.preempted" in told
    assert "wait.preempted" in told


def test_a_kernel_of_a_higher_priority_takes_the_place_of_a_busy_one(pair: Pair) -> None:
    world = pair.world
    urgent = respecified(world, pair.spec, priority=10)
    _, works = pair.ready()
    before = world.lease(works.kernel_id)
    end = world.notebooks / "end"
    cell = begin_work(world, works, end)
    comes = pair.server.start(urgent)
    assert comes.must(fill(3) + CHECK).text == "intact\n"
    lease = world.await_state(works.kernel_id, "resident")  # again, now that the other one is idle
    assert moves(before, lease) == (1, 1)
    assert lease.busy
    end.touch()
    reply = works.wait(cell)
    assert (reply.status, reply.text) == ("ok", "intact\n"), reply.error
    assert comes.must(CHECK).text == "intact\n"


def test_a_busy_kernel_of_the_same_priority_is_waited_for(pair: Pair) -> None:
    world = pair.world
    waits, works = pair.ready()
    before = world.lease(works.kernel_id)
    end = world.notebooks / "end"
    cell = begin_work(world, works, end)
    waiting = waits.send(CHECK)
    until(lambda: world.lease(waits.kernel_id).reason == "wait.busy-neighbour", "the other kernel waits")
    lease = world.lease(waits.kernel_id)
    assert lease.expected_ms is not None, "how long is told"
    assert (lease.low_ms or 0) <= lease.expected_ms <= (lease.high_ms or 0)
    end.touch()
    assert works.wait(cell).text == "intact\n"
    assert waits.wait(waiting).text == "intact\n"
    assert moves(before, world.await_state(works.kernel_id, "suspended")) == (1, 0)
    assert world.lease(works.kernel_id).resume_ms is not None
