"""Debuggers, such as JupyterLab's, on a suspended kernel: their requests are answered, and nothing else resumes the kernel."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.kept import Kept
from tests.support.pair import NO_TURNS, Pair
from tests.support.paths import DEBUGGER_PYTHONPATH
from tests.support.stories import CHECK
from tests.support.world import Notebook, Server, new_world, until

pytestmark = pytest.mark.promise("race-requests")

TOUCHING = """
class Touching:
    def __repr__(self):
        return f"its digest is {buffer.sha256()[:8]}"
touching = Touching()
"""
START = {
    "clientID": "test",
    "adapterID": "python",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
    "supportsVariableType": True,
    "supportsVariablePaging": True,
    "supportsRunInTerminalRequest": True,
    "locale": "en-us",
}


@contextmanager
def new_pair() -> Iterator[Pair]:
    with new_world() as world:
        world.environment["PYTHONPATH"] = DEBUGGER_PYTHONPATH
        world.configure(NO_TURNS)
        with Server(world) as server:
            yield Pair(world, server)


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    with Kept(new_pair) as kept:
        yield kept


def attach(notebook: Notebook) -> None:
    if notebook.debug("debugInfo")["body"]["isStarted"]:
        return
    assert notebook.debug("initialize", START)["success"]
    assert notebook.debug("attach")["success"]


def inspects(notebook: Notebook) -> str:
    variables = notebook.debug("inspectVariables")["body"]["variables"]
    (value,) = [one["value"] for one in variables if one["name"] == "touching"]
    return str(value)


def suspended_with_debugger(pair: Pair) -> Notebook:
    first, second = pair.ready(TOUCHING)
    attach(first)  # ipykernel runs a cell for it
    assert second.must(CHECK).text == "intact\n"
    pair.world.await_state(first.kernel_id, "suspended")
    return first


def test_variables_that_touch_the_gpu_are_shown_and_bring_the_memory_back(pair: Pair) -> None:
    first = suspended_with_debugger(pair)
    assert first.debug("debugInfo")["success"]
    assert pair.world.lease(first.kernel_id).state == "suspended", "what needs no GPU brings nothing back"
    assert inspects(first).startswith("its digest is")
    # The process continues shortly before the broker records that it is back.
    pair.world.await_state(first.kernel_id, "resident")
    assert first.must(CHECK).text == "intact\n"


def test_an_interrupt_brings_a_kernel_back_whose_debugger_is_blocked(pair: Pair) -> None:
    first = suspended_with_debugger(pair)
    asked = first.send_debug("inspectVariables")
    until(lambda: pair.world.lease(first.kernel_id).busy, "the debugger looks")
    first.interrupt()
    assert first.await_message("debug_reply", asked)["success"]
    assert first.must(CHECK).text == "intact\n"


def test_a_suspend_that_was_asked_for_stays_though_the_debugger_looks_at_each_message_of_a_cell(pair: Pair) -> None:
    first, _ = pair.ready(TOUCHING)
    attach(first)
    looking = pair.server.connect(first.kernel_id)
    first.must(CHECK)
    asked, shown = first.send("%gpu suspend"), ""
    while "Suspended" not in shown:
        message = json.loads(first.socket.recv())
        about = message["parent_header"]
        if about.get("msg_id") == asked:
            shown = str(message["content"].get("data", ""))
            if about["msg_type"] == "execute_request" and message["channel"] == "iopub":  # as JupyterLab does
                assert inspects(looking)
    assert pair.world.lease(first.kernel_id).state == "suspended"
