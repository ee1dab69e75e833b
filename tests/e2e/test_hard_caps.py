"""Caps that the driver enforces: what a kernel's children take counts, whatever they ignore, and neighbours always come back."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fractional_gpu.gpu.interface import MemoryLimit
from tests.driver_double.remote import Remote
from tests.support.control_group import unit_group
from tests.support.nvidia_mode import CHECK, GREEDY, NvidiaMode, fill, nvidia_mode
from tests.support.world import Notebook, Server, until

pytestmark = pytest.mark.promise("hard-caps")


@contextmanager
def unit(mode: NvidiaMode) -> Iterator[tuple[Server, str]]:
    """A server in a separate control group, like a systemd unit's or a container's, and the group's path."""
    with unit_group() as (group, folder), Server(mode.world) as server:
        (folder / "cgroup.procs").write_text(str(server.process.pid))
        try:
            yield server, group
        finally:
            server.clear()


@pytest.fixture
def mode() -> Iterator[NvidiaMode]:
    with nvidia_mode(driver="615") as mode:
        mode.world.start_broker()
        yield mode


@pytest.fixture
def driver(mode: NvidiaMode) -> Iterator[Remote]:
    with Remote(mode.double) as remote:
        yield remote


def limit(driver: Remote, mode: NvidiaMode, group: str) -> int | None:
    found: MemoryLimit | None = driver.call("limits", "read", (mode.double.devices[0].device_id, group))
    return None if found is None else found.hard_mib


def held_mib(mode: NvidiaMode, notebook: Notebook) -> int:
    return mode.world.lease(notebook.kernel_id).lease.reserved_mib


def test_a_child_that_ignores_every_limit_takes_no_more_than_its_seat_has_nor_a_neighbours_memory(
    mode: NvidiaMode, driver: Remote
) -> None:
    """Whether its kernel is resident or suspended. A limit ends with the last kernel of its group."""
    with unit(mode) as (greedy_server, greedy), unit(mode) as (server, other):
        neighbour = mode.start(server)
        neighbour.must(fill(1))
        until(lambda: limit(driver, mode, other) == held_mib(mode, neighbour), "the limit is what it holds")
        notebook = mode.start(greedy_server)
        notebook.must(fill(2))
        mode.world.await_state(neighbour.kernel_id, "suspended")
        until(lambda: limit(driver, mode, other) == 0, "what is suspended may hold nothing")
        until(lambda: limit(driver, mode, greedy) == held_mib(mode, notebook) < 900, "the limit is what it holds")
        assert "CUDA_ERROR_OUT_OF_MEMORY" in neighbour.must("%%cpu\n" + GREEDY.format(mib=4, waits=True)).text
        assert "CUDA_ERROR_OUT_OF_MEMORY" in notebook.must(GREEDY.format(mib=900, waits=True)).text
        assert neighbour.must(CHECK).text == "intact\n"
        assert notebook.must(CHECK).text == "intact\n"
        a_broker_that_was_killed_leaves_limits_that_the_next_one_raises(mode, driver, neighbour, notebook, greedy)
        server.clear()
        until(lambda: limit(driver, mode, other) is None, "the limit ends")


def a_broker_that_was_killed_leaves_limits_that_the_next_one_raises(
    mode: NvidiaMode, driver: Remote, first: Notebook, second: Notebook, group: str
) -> None:
    mode.world.await_state(first.kernel_id, "suspended")
    (broker,) = mode.brokers()
    os.kill(broker, signal.SIGKILL)
    mode.world.start_broker()
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"
    until(lambda: limit(driver, mode, group) == held_mib(mode, second), "the limit is what it holds")
