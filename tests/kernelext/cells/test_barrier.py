"""A running cell that cannot reach the GPU is barred, and whatever would open a way there waits for the kernel's turn."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.gpu.simulated import cuda
from fractional_gpu.protocol.messages import CELL_BARRED, CELL_EXAMINED, GateVerb
from fractional_gpu_kernel.cells.acquire import Acquirer, RefusedError
from fractional_gpu_kernel.cells.barrier import FIRST_USE, STANDARD_LIBRARY, Barrier, GpuLibraries
from fractional_gpu_kernel.cells.gate import Gate, Mark
from fractional_gpu_kernel.cells.guard import InputRequests
from tests.kernelext.kernels import RunningKernel
from tests.kernelext.scripted_broker import ScriptedBroker

FOREIGN = ("numpy._core", "/somewhere/numpy/_core.so", None, None, None)
WAYS: list[tuple[str, tuple[object, ...]]] = [
    ("import", FOREIGN),
    ("ctypes.dlopen", ("libcuda.so.1",)),
    ("ctypes.dlsym", (None, "cuInit")),
    ("subprocess.Popen", ("nvidia-smi", [], None, None)),
    ("os.fork", ()),
    (FIRST_USE, ()),
]
HARMLESS: list[tuple[str, tuple[object, ...]]] = [
    ("import", ("json.tool", None, [], [], [])),
    ("import", ("_json", f"{STANDARD_LIBRARY[0]}_json.so", None, None, None)),
    ("open", ("file", "r", 0)),
]


class Side:
    """A kernel with a cell, its barrier, and what the broker is told. The hook is called, not installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hooks: list[Callable[[str, tuple[object, ...]], None]] = []
        monkeypatch.setattr(sys, "addaudithook", self.hooks.append)
        acquirer = cast("Acquirer", SimpleNamespace(wait_for_gpu=self.wait))
        self.waits: list[str] = []  # the threads that waited
        self.on_wait: Callable[[], object] = self.open
        self.on_look: Callable[[], str] = str
        self.told: list[Sequence[str]] = []
        self.gate = Gate(lambda _: None)
        shell = SimpleNamespace(kernel=None, display_pub=None)
        self.inputs = InputRequests(shell, self.gate, acquirer, self.told.append)
        libraries = SimpleNamespace(is_loaded=lambda: False, way=self.way)
        self.barrier = Barrier(shell, self.gate, acquirer, self.inputs, libraries=cast("GpuLibraries", libraries))
        self.mark = Mark("request")
        self.open()
        self.gate.enter(self.mark)

    def wait(self, *_: object) -> None:
        self.waits.append(threading.current_thread().name)
        self.on_wait()

    def way(self) -> str:
        return self.on_look()

    def open(self) -> None:
        self.gate.open({})

    def look(self) -> bool:
        """The broker asks for the room; return whether the cell was barred."""
        self.gate.preempt()
        begun = self.barrier.examine()
        for thread in threading.enumerate():
            if thread.name == "gpu-barrier":
                thread.join()
        assert begun or not self.gate.is_barred
        return self.gate.is_barred

    def meet(self, event: str, arguments: tuple[object, ...] = ()) -> None:
        for hook in self.hooks:
            hook(event, arguments)

    def in_thread(self, name: str) -> None:
        thread = threading.Thread(target=self.meet, args=("os.fork",), name=name)
        thread.start()
        thread.join()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    side = Side(monkeypatch)
    yield side
    side.open()
    side.barrier.close()


@pytest.mark.parametrize(("event", "arguments"), WAYS)
def test_a_barred_cell_uses_no_gpu_and_waits_before_it_opens_a_way_there(
    side: Side, event: str, arguments: tuple[object, ...]
) -> None:
    assert side.look()
    assert side.told == [["request"]]
    assert repr(side.gate) == "<Gate shut, running 0, waiting 0>"
    assert side.waits == []
    side.meet(event, arguments)
    assert len(side.waits) == 1
    assert side.gate.is_running
    assert side.told == [["request"], []]
    side.meet(event, arguments)
    assert len(side.waits) == 1, "it has its room"


@pytest.mark.parametrize(("event", "arguments"), HARMLESS)
def test_what_cannot_reach_the_gpu_goes_on(side: Side, event: str, arguments: tuple[object, ...]) -> None:
    assert side.look()
    side.meet(event, arguments)
    assert side.waits == []


def test_what_starts_a_process_is_guarded_though_its_event_came_before(side: Side) -> None:
    """`subprocess` announces itself some steps before it forks."""
    assert side.look()
    subprocess.run(["true"], check=True)
    assert len(side.waits) == 1


def test_a_thread_that_opens_a_way_while_the_process_is_looked_at_makes_the_look_worthless(side: Side) -> None:
    def way() -> str:
        side.in_thread("mine")
        return ""

    side.on_look = way
    assert not side.look()
    assert side.waits == []
    side.on_look = str
    assert side.look(), "the next one may find nothing"


def test_nothing_is_barred_while_a_thread_is_on_its_way_to_the_gpu(side: Side) -> None:
    """It passed when nothing was barred, and the room was asked for before it arrived."""
    assert side.look()
    again: list[bool] = []

    def opened() -> None:
        side.open()
        again.append(side.look())

    side.on_wait = opened
    side.meet("os.fork")
    assert again == [False]
    assert side.gate.is_running


def test_a_gate_that_was_opened_while_the_process_is_looked_at_stays_open(side: Side) -> None:
    def way() -> str:
        side.open()
        return ""

    side.on_look = way
    assert not side.look()
    assert side.gate.is_open
    assert side.gate.is_running
    assert side.told == []


def test_a_way_that_was_found_is_remembered(side: Side) -> None:
    side.on_look = lambda: "libcuda.so.1"
    assert not side.look()
    side.on_look = str
    assert not side.look()


def test_the_bar_ends_with_the_last_cell(side: Side) -> None:
    other = Mark("other")
    side.gate.enter(other)
    assert side.look()
    assert sorted(side.told[-1]) == ["other", "request"]
    side.gate.leave(side.mark)
    assert side.told[-1] == ["other"]
    side.gate.leave(other)
    assert side.told[-1] == []
    side.meet("os.fork")
    assert side.waits == [], "an idle kernel's threads wait for nothing"


def test_a_barred_cell_that_asks_for_input_is_paused_like_any_other(side: Side) -> None:
    assert side.look()
    side.gate.pause([side.mark])
    assert not side.gate.is_barred
    side.open()
    assert not side.gate.is_running, "it still waits for its user"
    assert side.gate.close() == "closed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RefusedError("the lease is over")])
def test_a_wait_that_ends_without_the_gpu_fails_what_would_use_it_and_the_cell_stays_barred(
    side: Side, error: BaseException | type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    assert side.look()
    side.on_wait = fail
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError):
            side.meet("import", FOREIGN)
    assert side.gate.is_barred
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError):
        side.barrier.close()
    assert side.gate.is_barred, "so the extension stays, too"
    side.on_wait = side.open


def test_every_thread_of_the_users_waits_but_none_of_the_extensions(side: Side) -> None:
    assert side.look()
    side.in_thread("gpu-acquire")
    assert side.waits == []
    side.in_thread("mine")
    assert side.waits == ["mine"]


def test_what_a_wait_needs_itself_does_not_wait(side: Side) -> None:
    assert side.look()

    def load_something() -> None:
        side.meet("import", FOREIGN)
        side.open()

    side.on_wait = load_something
    side.meet("os.fork")
    assert len(side.waits) == 1


def test_an_extension_that_is_unloaded_bars_nothing_more(side: Side) -> None:
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    assert side.look()
    assert subprocess._fork_exec is not before  # type: ignore[attr-defined]
    side.barrier.close()
    assert len(side.waits) == 1, "the cell has its room before"
    assert subprocess._fork_exec is before  # type: ignore[attr-defined]
    assert not side.look()


def test_the_simulated_device_announces_its_first_use() -> None:
    assert cuda.FIRST_USE == FIRST_USE


# -- a real kernel -----------------------------------------------------------------------------------------------------------------------

STARTS = {
    "an extension module": "import markupsafe._speedups",
    "ctypes": "ctypes.CDLL(None)",
    "a program": "subprocess.run(['true'], check=True)",
    "a shell": "os.system('true')",
    "a child": "warnings.simplefilter('ignore'); os.fork() or os._exit(0); os.wait()",  # Python 3.12 warns of forks
    "multiprocessing": "p = multiprocessing.get_context('spawn').Process(target=int); p.start(); p.join()",
    "asyncio": "p = await asyncio.create_subprocess_exec('true'); await p.wait()",
    "a thread": "t = threading.Thread(target=os.system, args=('true',)); t.start(); t.join()",
}


def bar(kernel: RunningKernel, broker: ScriptedBroker, code: str, numbers: Iterator[int], fifo: Path) -> str:
    """Run a cell with an open gate, have it barred, and let it go on to the code; return its request."""
    gate = broker.stream("gate")
    gate.command(GateVerb.OPEN, number := next(numbers))
    broker.answer_to(number)
    request = kernel.send(f"print('on'); open(fifo).close()\n{code}\nprint('over')")
    kernel.until_published(request, lambda messages: any(each["msg_type"] == "stream" for each in messages))
    gate.command(GateVerb.PREEMPT, number := next(numbers))
    assert detail(broker, number) == CELL_EXAMINED
    broker.wait_for(lambda: any(one["word"] == "input" and one["detail"] == request for one in broker.bodies("answer")))
    gate.command(GateVerb.PREEMPT, number := next(numbers))
    assert detail(broker, number) == CELL_BARRED
    fifo.write_text("")
    return request


def detail(broker: ScriptedBroker, number: int) -> str:
    broker.answer_to(number)
    return str(next(one["detail"] for one in broker.bodies("answer") if one["number"] == number))


def test_in_a_kernel_every_way_to_the_gpu_waits_and_can_be_interrupted(
    kernel: RunningKernel, broker: ScriptedBroker, folder: Path
) -> None:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    broker.grant_at_once = True
    kernel.run(f"import asyncio, ctypes, multiprocessing, os, subprocess, threading, warnings; fifo = {str(fifo)!r}")
    broker.grant_at_once = False
    numbers, streams = iter(range(1, 1000)), broker.count("acquire")
    request = bar(kernel, broker, STARTS["an extension module"], numbers, fifo)
    broker.stream("acquire", streams + 1).waiting("another kernel works")
    kernel.until_shown(request, "another kernel works")
    kernel.interrupt()
    assert kernel.finish(request).error[0] == "KeyboardInterrupt"
    for attempt, code in enumerate(STARTS.values(), streams + 2):
        request = bar(kernel, broker, code, numbers, fifo)
        broker.stream("acquire", attempt).granted()
        outcome = kernel.finish(request)
        assert outcome.status == "ok", (code, outcome.error)
        assert outcome.printed == "on\nover\n"
    request = bar(kernel, broker, "import json.tool", numbers, fifo)
    assert kernel.finish(request).printed == "on\nover\n"
    assert broker.count("acquire") == streams + 1 + len(STARTS)
