"""Interrupting, restarting and shutting down waiting or suspended kernels is as fast as with any kernel, and loses nothing."""

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.protocol.status import LeaseStatus
from tests.support import faults
from tests.support.kept import Kept
from tests.support.pair import NO_TURNS, Pair, new_pair
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("race-interrupt", "race-shutdown")

PROMPT_S = 15.0  # even on the slowest machine; the holder does not give up earlier
INTERRUPTED = "KeyboardInterrupt"


class Holder:
    def __init__(self, world: World, notebook: Notebook) -> None:
        self._pipe = world.folder / f"pipe-{notebook.kernel_id}"
        os.mkfifo(self._pipe)
        self.notebook = notebook
        self._cell = notebook.send(f"import pathlib\npathlib.Path({str(self._pipe)!r}).read_text()")
        with self._pipe.open("w"):  # opens once the cell reads
            pass
        self.notebook.wait(self._cell)
        self._cell = notebook.send(f"pathlib.Path({str(self._pipe)!r}).read_text()")
        self._writer = self._pipe.open("w")

    def close(self) -> None:
        self._writer.close()
        self._pipe.unlink(missing_ok=True)

    def let_go(self) -> None:
        self.close()
        assert self.notebook.wait(self._cell).status == "ok"


def waiting(notebook: Notebook, cell: str) -> Iterator[dict[str, Any]]:
    messages = notebook.messages(cell)
    for message in messages:
        content = message["content"]
        if "is waiting for the GPU" in str(content.get("data", {}).get("text/plain", "")):
            return messages
    raise AssertionError("the cell ended without having waited")


def interrupted_after_s(notebook: Notebook, messages: Iterator[dict[str, Any]]) -> float:
    begun = time.monotonic()
    notebook.interrupt()
    for message in messages:
        header, content = message["header"], message["content"]
        if header["msg_type"] == "execute_reply":
            took = time.monotonic() - begun
            assert content["status"] == "error"
            assert content["ename"] == INTERRUPTED
    return took


def without_ticket(world: World, notebook: Notebook) -> LeaseStatus:
    """Return the kernel's lease once its ticket is withdrawn: the broker may notice the cell's end after its reply is read."""

    def ask() -> LeaseStatus | None:
        lease = world.lease(notebook.kernel_id)
        return lease if lease.position is None else None

    return until(ask, "the ticket is withdrawn")


def seconds(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    with Kept(partial(new_pair, NO_TURNS)) as kept:
        yield kept


@pytest.fixture
def world(pair: Pair) -> World:
    return pair.world


@pytest.fixture
def server(pair: Pair) -> Server:
    return pair.server


@pytest.fixture
def held(pair: Pair) -> Iterator[tuple[Holder, Notebook]]:
    suspended, resident = pair.ready()
    holder = Holder(pair.world, resident)
    yield holder, suspended
    holder.close()


def test_an_interrupt_ends_a_waiting_cell_within_a_second_and_withdraws_its_ticket(
    world: World, held: tuple[Holder, Notebook]
) -> None:
    holder, second = held
    messages = waiting(second, second.send(CHECK))
    assert world.lease(second.kernel_id).position == 1
    assert interrupted_after_s(second, messages) < PROMPT_S
    assert without_ticket(world, second).state == "suspended"
    assert "stopped waiting (interrupted)" in second.must("%gpu explain").data[0]["text/plain"]
    assert second.must("%%cpu\nprint(6 * 7)").text == "42\n"  # usable at once, without the GPU
    holder.let_go()
    assert second.must(CHECK).text == "intact\n"
    assert holder.notebook.must(CHECK).text == "intact\n"


def test_an_interrupt_of_a_cell_that_waits_for_its_first_admission_leaves_no_ticket(
    world: World, server: Server, held: tuple[Holder, Notebook]
) -> None:
    holder, second = held
    third = server.start("fractional-gpu-default-750")
    messages = waiting(third, third.send("from fractional_gpu.gpu.simulated import cuda"))
    assert interrupted_after_s(third, messages) < PROMPT_S
    assert without_ticket(world, third).state == "unarmed"
    holder.let_go()
    third.must(fill(3))
    assert second.must(CHECK).text == "intact\n"


def test_after_an_interrupt_the_cells_behind_it_do_not_run(held: tuple[Holder, Notebook]) -> None:
    holder, second = held
    cells = [second.send("ran = 1"), second.send("ran = 2")]
    waiting(second, cells[0])
    second.interrupt()
    statuses: dict[str, str] = {}
    while len(statuses) < len(cells):
        message = json.loads(second.socket.recv())
        if message["header"]["msg_type"] == "execute_reply":
            statuses[message["parent_header"]["msg_id"]] = message["content"]["status"]
    assert [statuses[cell] for cell in cells] == ["error", "aborted"]
    assert second.must("%%cpu\nprint('ran' in globals())").text == "False\n"
    holder.let_go()


def test_an_interrupt_while_the_memory_comes_back_is_prompt_and_the_memory_still_comes_back(
    world: World, held: tuple[Holder, Notebook]
) -> None:
    holder, second = held
    holder.let_go()
    fault = faults.inject(world.simulated_folder, "restore", "hang")
    messages = waiting(second, second.send(CHECK))
    world.await_state(second.kernel_id, "resuming")
    assert interrupted_after_s(second, messages) < PROMPT_S
    faults.remove(world.simulated_folder, fault)
    world.await_state(second.kernel_id, "resident")
    assert second.must(CHECK).text == "intact\n"
    assert world.lease(second.kernel_id).position is None


def test_a_suspended_kernel_whose_exit_blocks_on_the_gpu_is_restarted_and_shut_down_as_soon_as_any(
    world: World, server: Server, held: tuple[Holder, Notebook]
) -> None:
    holder, second = held
    plain = server.start("python3")
    for action in ("restart", "shut_down"):
        before = world.await_state(second.kernel_id, "suspended")
        second.must("%%cpu\nimport atexit\natexit.register(lambda: buffer.read(1))")
        ordinary_s = seconds(getattr(plain, action))
        assert seconds(getattr(second, action)) < 3 * ordinary_s + 4
        assert not Path(f"/proc/{before.pid}").exists()
        assert world.status().host_saved_mib == 0
        if action == "restart":
            after = world.lease(second.kernel_id)
            assert (after.lease_id, after.state, after.lease.saved_mib) == (before.lease_id, "unarmed", 0)
            holder.let_go()
            second = server.connect(second.kernel_id)  # the old connection may not have subscribed again yet
            assert second.must("print('buffer' in globals())").text == "False\n"
            second.must(fill(4))
            assert holder.notebook.must(CHECK).text == "intact\n"
    assert [lease.kernel_id for lease in world.status().leases] == [holder.notebook.kernel_id]


def test_what_a_restarted_kernel_held_is_free_at_once(world: World, held: tuple[Holder, Notebook]) -> None:
    holder, second = held
    before = world.lease(holder.notebook.kernel_id)
    messages = waiting(second, second.send(CHECK))
    holder.notebook.restart()
    statuses = [
        message["content"]["status"] for message in messages if message["header"]["msg_type"] == "execute_reply"
    ]
    assert statuses == ["ok"]
    assert world.await_restart(holder.notebook.kernel_id, before.pid).lease_id == before.lease_id


def test_shutting_a_waiting_kernel_down_withdraws_its_ticket(world: World, held: tuple[Holder, Notebook]) -> None:
    holder, second = held
    waiting(second, second.send(CHECK))
    second.shut_down()
    assert [lease.kernel_id for lease in world.status().leases] == [holder.notebook.kernel_id]
    holder.let_go()
    assert holder.notebook.must(CHECK).text == "intact\n"
