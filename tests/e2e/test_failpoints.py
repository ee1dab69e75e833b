"""The broker, its worker, a server or a kernel dies, or the disk is full, at a sample of the points where it changes something.

`tests/run failpoints` takes them all.
"""

import importlib
import runpy
import sys
from collections.abc import Iterator
from operator import attrgetter

import pytest

from tests.support.dying import INJECTED, Story
from tests.support.steered import SteeredStory
from tests.support.world import new_world

# Kinds of points at which nothing else here strikes: servers and a second write of the ledger have tests of their own, and
# `test_kills` has the broker and its worker die at each call of the driver (the points `link` and `worker`).
SAMPLE = [
    "ledger.save_lease.unfinished",
    "api.POST.leases.reply",
    "event.ResumeFinished@resuming.after",
    "kernel.Gate.close.after",
]


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with new_world(Story.simulate) as world:
        made = Story(world)
        yield made
        made.close()


def test_every_injected_point_names_a_function_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # what the file adds to it is for other processes
    for module, (_, functions) in runpy.run_path(str(INJECTED / "sitecustomize.py"))["POINTS"].items():
        for name in functions:
            assert callable(attrgetter(name)(importlib.import_module(module))), f"{module}: {name}"


def test_nothing_is_lost_when_somebody_dies_and_every_step_is_a_point(story: Story) -> None:
    assert story.tell(SAMPLE[0]), "somebody was to die there"
    reached = set(story.reached.read_text().split("\n")[:-1])
    assert not set(SAMPLE) - reached, sorted(reached)
    kinds = {point.split(".")[0] for point in reached}
    assert kinds == {"event", "ledger", "link", "worker", "api", "server", "kernel"}


@pytest.mark.parametrize("point", SAMPLE[1:])
def test_nothing_is_lost_when_somebody_dies(story: Story, point: str) -> None:
    assert story.tell(point), "somebody was to die there"


@pytest.fixture(scope="module")
def keeping_story() -> Iterator[Story]:
    with new_world(Story.simulate) as world:
        made = Story(world, keeps=True)
        yield made
        made.close()


def test_nothing_is_lost_when_a_server_dies_that_keeps_its_kernels(keeping_story: Story) -> None:
    """Its kernel's process runs, and only this server knows of it."""
    assert keeping_story.tell("server.KernelLease.attach.before"), "the server was to die there"


@pytest.fixture(scope="module")
def steered_story() -> Iterator[SteeredStory]:
    with new_world(SteeredStory.simulate) as world:
        made = SteeredStory(world)
        yield made
        made.close()


def test_nothing_is_lost_when_the_broker_dies_while_a_device_is_emptied(steered_story: SteeredStory) -> None:
    assert steered_story.tell("ledger.set_drained.after"), "the broker was to die there"


def test_a_suspend_that_a_full_disk_had_refused_is_done_when_it_is_asked_for_again(steered_story: SteeredStory) -> None:
    assert steered_story.tell("ledger.begin.unfinished", action="fail"), "the write was to fail there"


def test_nothing_is_lost_when_the_disk_is_full(story: Story) -> None:
    assert story.tell("ledger.save_lease.unfinished", action="fail"), "the write was to fail there"
