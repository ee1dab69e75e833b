"""A pool's rules for busy kernels and for pins hold for two kernels that do not fit together, and no byte or cell is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from fractional_gpu.protocol.status import LeaseStatus
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
    assert world.command("pool", "default", *keys).returncode == 0
    yield
    assert world.command("pool", "default", *PREEMPT).returncode == 0


def moves(before: LeaseStatus, after: LeaseStatus) -> tuple[int, int]:
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


def line_with(messages: Iterator[dict[str, Any]], text: str) -> str:
    lines = (str(message["content"].get("data", {}).get("text/plain", "")) for message in messages)
    return next(line for line in lines if text in line)


def test_a_cell_whose_turn_is_over_says_so_below_itself_and_an_interrupt_there_is_one_sentence(pair: Pair) -> None:
    world = pair.world
    waits, works = pair.ready()
    ends = world.notebooks / "end", world.notebooks / "other"
    with pool(world, "preempt=fair", "min_residency=1m", "min_residency_swaps=0"):
        cell = begin_work(world, works, ends[0])
        other = waits.send(WORK.format(end=str(ends[1])))
        line_with(waits.messages(other), "or when its turn ends, in about")
        assert world.command("pool", "default", "min_residency=3s").returncode == 0
        world.await_state(works.kernel_id, "suspended")
        assert world.command("pool", "default", "preempt=never").returncode == 0  # the other keeps the GPU
        messages = works.messages(cell)
        line = line_with(messages, "is running a cell")
        assert "This cell gave the GPU to another kernel and will get it back, place 1 in the queue" in line
        works.interrupt()
        rest = list(messages)
        (error,) = [one["content"] for one in rest if one["header"]["msg_type"] == "error"]
        assert error["ename"] == "KeyboardInterrupt"
        assert error["traceback"] == [f"KeyboardInterrupt: {error['evalue']}"]
        assert "while it waited for the GPU" in error["evalue"]
        shown = [one["content"]["data"] for one in rest if one["header"]["msg_type"].endswith("display_data")]
        assert shown[-1]["text/plain"] == ""
        ends[1].touch()
        assert waits.wait(other).text == "intact\n"
    assert works.must(CHECK).text == "intact\n"


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
