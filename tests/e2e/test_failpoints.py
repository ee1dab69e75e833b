"""The broker, its worker, a server or a kernel dies, or the disk is full, at a sample of the points where it changes something.

`tests/run failpoints` takes them all.
"""

import importlib
import runpy
from contextlib import closing
from operator import attrgetter

import pytest

from tests.support.dying import Story, Strike
from tests.support.paths import INJECTED
from tests.support.steered import SteeredStory
from tests.support.world import new_world

pytestmark = pytest.mark.promise("failpoints", "full-disk")

# Points that no other test here strikes: servers and a second ledger write have separate tests, and `test_kills`
# kills the broker and its worker at each driver call (the points `link` and `worker`). In the story's order.
SAMPLE = [
    Strike("ledger.save_lease.unfinished"),
    Strike("api.create.reply"),
    Strike("event.ResumeFinished@resuming.after"),
    Strike("kernel.Gate.close.after"),
]
KINDS = {"event", "ledger", "link", "worker", "api", "server", "kernel"}


def struck(story: Story, *strikes: Strike) -> None:
    assert story.tell(*strikes) == list(strikes)


def test_every_injected_point_names_a_function_that_is_there() -> None:
    for module, (_, functions) in runpy.run_path(str(INJECTED / "injections.py"))["POINTS"].items():
        for name in functions:
            assert callable(attrgetter(name)(importlib.import_module(module))), f"{module}: {name}"


def test_nothing_is_lost_when_somebody_dies_and_every_step_is_a_point() -> None:
    with new_world(Story.simulate) as world, closing(Story(world)) as story:
        struck(story, *SAMPLE)
        reached = set(story.reached.read_text().split("\n")[:-1])
        assert {strike.point for strike in SAMPLE} <= reached, sorted(reached)
        assert {point.split(".")[0] for point in reached} == KINDS


class Birth(Story):
    """Of one kernel, and its end."""

    def plot(self) -> None:
        (life,) = self.cast(1)
        life.live()
        life.end()


def test_nothing_is_lost_when_a_server_dies_that_keeps_its_kernels() -> None:
    """Its kernel's process runs, and only this server knows about it."""
    with new_world(Birth.simulate) as world, closing(Birth(world, keeps=True)) as story:
        struck(story, Strike("server.KernelLease.attach.before"))


class SizesAndMoves(SteeredStory):
    """Only these: `tests/run failpoints` tells the rest, too."""

    def plot(self) -> None:
        (life,) = self.cast(1)
        life.live()
        self.sizes_and_pins(life)
        self.moves(life)
        life.end()


def test_nothing_is_lost_when_a_full_disk_refuses_and_the_broker_dies_while_a_device_is_emptied() -> None:
    with new_world(SizesAndMoves.simulate) as world, closing(SizesAndMoves(world)) as story:
        refused = (Strike("ledger.save_lease.unfinished", time=time, action="fail") for time in (1, 4))
        struck(story, *refused, Strike("ledger.set_drained.after"))
