"""Callbacks of the main loop run although a GUI event loop (`%gui`) holds the main thread of a kernel between cells."""

import os
from pathlib import Path

import pytest

from fractional_gpu.protocol.messages import GateCommand, GateVerb
from tests.kernelext.kernels import RunningKernel
from tests.kernelext.scripted_broker import ScriptedBroker
from tests.support.waiting import until

pytestmark = pytest.mark.promise("race-main-loop")

GUI = """
import time
from ipykernel.eventloops import get_shell_stream, register_integration
on_tick = []
@register_integration("polled")
def run(kernel):
    stream = get_shell_stream(kernel)
    while not stream.flush(limit=1):
        while on_tick:
            on_tick.pop()()
        time.sleep(0.01)
%gui polled
"""
TORCH = """
import pathlib, sys, threading, types
def note(*about): notes.open("a").write(str(threading.current_thread() is threading.main_thread()))
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    _lazy_call=None, is_initialized=lambda: True, device_count=lambda: 1, empty_cache=note,
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=100 * 2**30),
    set_per_process_memory_fraction=note)
"""


@pytest.fixture
def notes(kernel: RunningKernel, broker: ScriptedBroker, folder: Path) -> Path:
    notes = folder / "notes"
    broker.stream("gate").command(GateVerb.LIMIT, 1, JUPYTER_GPU_MEMORY_MIB="4096")
    assert broker.answer_to(1) == "done"  # a limit that comes after torch is set, and noted, between cells
    broker.grant_at_once = True
    assert kernel.run(f"import pathlib\nnotes = pathlib.Path({str(notes)!r})\n{TORCH}").status == "ok"
    assert kernel.run(GUI + "on_tick.append(note)").status == "ok"
    until(notes.exists, "the loop runs")
    notes.unlink()
    return notes


def removed(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def begin(kernel: RunningKernel, code: str, begun: Path, **options: bool) -> str:
    """Send a cell that creates the file `begun`, and return its request once it has.

    ipykernel may leave a message that comes just before its GUI event loop runs again until another one comes.
    """
    request = kernel.send(code, **options)

    def has_begun() -> bool:
        kernel.client.kernel_info()
        return begun.exists()

    until(has_begun, "the cell begins")
    return request


def test_caches_are_given_back(broker: ScriptedBroker, notes: Path) -> None:
    gate = broker.stream("gate")
    gate.command(GateVerb.CLOSE, 5)
    gate.command(GateVerb.SHRINK, 6)
    assert (broker.answer_to(5), broker.answer_to(6)) == ("closed", "done")
    assert notes.read_text() == "True"


def test_a_new_limit_counts_at_once_and_the_cells_behind_a_failed_one_do_not_run(
    kernel: RunningKernel, broker: ScriptedBroker, notes: Path
) -> None:
    gate = broker.stream("gate")
    gate.command(GateVerb.LIMIT, 5, JUPYTER_GPU_MEMORY_MIB=str(51712))
    until(notes.exists, "the limit is set while the loop runs")
    subshell = kernel.create_subshell()
    failing = begin(kernel, "notes.touch()\ninput()\n1/0", removed(notes), allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=60)
    gate.command(GateVerb.LIMIT, 6, JUPYTER_GPU_MEMORY_MIB=str(26112))
    assert broker.answer_to(6) == "done"
    kernel.send("behind = True")
    kernel.finish(kernel.send_with_header("%%cpu\npass", subshell_id=subshell))  # so the kernel has both
    kernel.client.input("")
    assert kernel.finish(failing).status == "error"
    begin(kernel, "notes.write_text(str('behind' in globals()))", removed(notes))
    until(lambda: notes.read_text() == "False", "the cell behind the failed one has not run")


def test_a_suspended_kernel_asks_for_nothing_unless_its_loop_is_blocked(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path, notes: Path
) -> None:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    gate = broker.stream("gate")
    gate.command(GateVerb.CLOSE, 5)
    assert broker.answer_to(5) == "closed"
    broker.grant_at_once = False
    asked = broker.count("acquire")
    for number in (6, 7, 8):
        gate.send(GateCommand(verb=""))
        gate.command(GateVerb.SHRINK, number)  # answered by the callback after the watch's
        assert broker.answer_to(number) == "done"
    assert broker.count("acquire") == asked
    begin(kernel, f"%%cpu\non_tick.append(lambda: open({str(fifo)!r}).read())\nnotes.touch()", removed(notes))
    with fifo.open("w"):  # opens once the GUI event loop reads
        for _ in range(2):
            gate.send(GateCommand(verb=""))
        broker.stream("acquire", asked + 1)
    broker.wait_for(lambda: broker.hung_up == ["acquire"])
