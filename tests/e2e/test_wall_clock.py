"""Setting a wall clock, back or forward, does not change which kernel gets the GPU, or when."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, new_world, until

pytestmark = pytest.mark.promise("wall-clock")

HOUR_S = 3600


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as made:
        # If busy kernels take no turns, one that looks busy keeps the others out.
        made.configure("c.GPUBroker.pools = {'default': {'preempt': 'never'}}")
        (made.folder / "wall").write_text("0")
        made.environment["TEST_WALL_CLOCK"] = str(made.folder / "wall")
        folder = str(Path(__file__).parents[1] / "support" / "set_clock")
        made.environment["PYTHONPATH"] = os.pathsep.join([folder, made.environment["PYTHONPATH"]])
        yield made


def set_by(world: World, seconds: int) -> None:
    fresh = world.folder / "wall.new"
    fresh.write_text(str(seconds))
    fresh.rename(world.folder / "wall")


def test_kernels_take_turns_as_before_and_a_pin_lasts_as_long(world: World, server: Server) -> None:
    (name,) = world.install(1000)
    kernels = server.start(name), server.start(name)
    for step_s in (-HOUR_S, HOUR_S):
        turns_and_a_pin(world, *kernels, step_s)


def turns_and_a_pin(world: World, first: Notebook, second: Notebook, step_s: int) -> None:
    first.must(fill(1))
    set_by(world, step_s)
    second.must(fill(2))  # the first one is idle, whatever the date of its last work
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"

    second.must("%gpu pin 30m")
    before_ms = world.lease(second.kernel_id).pinned_ms
    set_by(world, 0)
    assert 0 < world.lease(second.kernel_id).pinned_ms <= before_ms
    cell = first.send(CHECK)
    until(lambda: world.lease(first.kernel_id).position, "the pin keeps the first one out")
    world.kill_broker()
    world.start_broker()
    pinned_ms = until(lambda: world.lease(second.kernel_id).pinned_ms, "the next broker knows of the pin")
    assert before_ms - HOUR_S * 1000 // 4 < pinned_ms <= before_ms
    second.must("%gpu unpin")
    assert first.wait(cell).text == "intact\n"
