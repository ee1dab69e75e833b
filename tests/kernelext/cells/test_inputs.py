"""A cell that waits for input is paused and reported, and enters the gate again, from any thread, however the wait ends."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fractional_gpu_kernel.cells.acquire import RefusedError
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.cells.guard import InputRequests, RunningCell, running_cell
from fractional_gpu_kernel.registrations import Registrations
from tests.kernelext.interrupting import interrupt_at
from tests.kernelext.parts import a_kernel

pytestmark = pytest.mark.promise("input")


class Kernel:
    def __init__(self) -> None:
        self.types: Callable[[], str] = lambda: "typed"

    def raw_input(self, prompt: str = "") -> str:
        return prompt + self.types()

    def getpass(self, prompt: str = "") -> str:
        return prompt + self.types()

    @staticmethod
    def get_parent(_channel: str) -> dict[str, dict[str, str]]:
        return {"header": {"msg_id": "request"}}


class Side:
    def __init__(self) -> None:
        self.kernel = Kernel()
        self.gate = Gate(lambda _: None)
        self.gate.open({})
        self.told: list[Sequence[str]] = []
        shell = SimpleNamespace(kernel=self.kernel, display_pub=None)
        self.acquirer = SimpleNamespace(wait_for_gpu=None)
        channel = SimpleNamespace(report_inputs=self.told.append)
        self.registrations = Registrations(shell)
        parts: dict[str, Any] = {"shell": shell, "registrations": self.registrations, "channel": channel}
        self.inputs = InputRequests(a_kernel(gate=self.gate, acquirer=self.acquirer, **parts))
        self.inputs.install()

    def within(self, *marks: str) -> None:
        for mark in marks:
            self.gate.enter(mark)
        running_cell.set(RunningCell(marks, threading.get_ident()))


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.mark.parametrize("name", ["raw_input", "getpass"])
def test_a_cell_is_paused_while_it_waits_and_runs_when_it_is_answered(side: Side, name: str) -> None:
    side.within("outer", "inner")
    seen: list[bool] = []

    def types() -> str:
        seen.append(side.gate.is_running)
        return "yes"

    side.kernel.types = types
    assert getattr(side.kernel, name)("sure? ") == "sure? yes"
    assert seen == [False]
    assert side.gate.is_running
    assert side.told == [["request"], []]
    side.registrations.undo()
    getattr(side.kernel, name)()
    assert len(side.told) == 2


def test_an_answer_at_a_shut_gate_waits_with_the_inner_mark_and_all_run_then(side: Side) -> None:
    side.within("outer", "inner")
    waited: list[object] = []

    def wait(_line: object, mark: object) -> None:
        waited.append(mark)
        side.gate.open({})

    side.acquirer.wait_for_gpu = wait
    side.kernel.types = side.gate.close
    assert side.kernel.raw_input() == "closed"
    assert waited == ["inner"]
    side.gate.leave("inner")
    assert side.gate.close() == "busy", "the cell around it runs, too"


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_a_wait_that_ends_without_an_answer_lets_the_cell_go_on_at_once(side: Side, error: type[BaseException]) -> None:
    side.within("cell")

    def types() -> str:
        side.gate.close()
        raise error

    side.kernel.types = types
    with pytest.raises(error):
        side.kernel.raw_input()
    assert side.gate.is_running
    assert side.told[-1] == []


@pytest.mark.parametrize("step", [Gate.pause, Gate.go_on, InputRequests._change])
def test_an_interrupt_at_any_step_of_a_prompt_leaves_the_cell_running_and_nothing_waiting(
    side: Side, step: Callable[..., object]
) -> None:
    side.within("cell")
    with interrupt_at(step), pytest.raises(KeyboardInterrupt):
        side.kernel.raw_input()
    assert side.gate.is_running
    assert side.inputs.waiting == []
    assert side.told in ([], [[]], [["request"], []])


def test_a_second_interrupt_while_the_first_ends_a_prompt_leaves_nothing_waiting(side: Side) -> None:
    side.within("cell")

    def types() -> str:
        raise KeyboardInterrupt

    side.kernel.types = types
    with interrupt_at(Gate.go_on), pytest.raises(KeyboardInterrupt):
        side.kernel.raw_input()
    assert side.gate.is_running
    assert side.told == [["request"], []]


def test_a_refusal_of_the_gpu_fails_the_cell_and_says_that_the_input_was_read(side: Side) -> None:
    side.within("cell")

    def refuse(*_: object) -> None:
        raise RefusedError("the lease is over")

    side.acquirer.wait_for_gpu = refuse
    side.kernel.types = side.gate.close
    with pytest.raises(RuntimeError, match="the input was read, but the cell cannot continue: the lease is over"):
        side.kernel.raw_input()
    assert side.told[-1] == []


def test_a_thread_that_asks_says_nothing_about_the_cell(side: Side) -> None:
    side.within("cell")
    cell = running_cell.get()
    seen: list[bool] = []

    def types() -> str:
        seen.append(side.gate.is_running)
        return ""

    def ask() -> None:
        running_cell.set(cell)  # as `asyncio.to_thread` does
        side.kernel.raw_input()

    side.kernel.types = types
    for target in (ask, side.kernel.raw_input):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert seen == [True, True]
    assert side.told == []


def test_a_cell_without_the_gpu_is_told_of_and_never_waits(side: Side) -> None:
    side.within()
    side.kernel.types = side.gate.close
    assert side.kernel.raw_input() == "closed"
    assert side.told == [["request"], []]


def test_a_request_that_is_refused_at_once_leaves_nothing_behind(side: Side) -> None:
    side.within("cell")

    def types() -> str:
        raise RuntimeError("this frontend does not support input requests")

    side.kernel.types = types
    with pytest.raises(RuntimeError, match="does not support"):
        side.kernel.raw_input()
    assert side.inputs.waiting == []
    assert side.gate.is_running
