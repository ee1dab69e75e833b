"""The gate's laws, step by step and in any order."""

from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fractional_gpu_kernel.cells.gate import Gate

pytestmark = pytest.mark.promise("race-gate")


def ignore(_: Mapping[str, str]) -> None:
    pass


def ignore_opening() -> None:
    pass


def test_it_is_shut_until_it_is_opened_and_binds_the_device_before_that() -> None:
    bound: list[tuple[Mapping[str, str], bool]] = []
    gate = Gate(lambda environment: bound.append((environment, gate.is_open)))
    assert not gate.enter("cell")
    gate.open({"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert bound == [({"CUDA_VISIBLE_DEVICES": "GPU-1"}, False)]
    assert gate.enter("cell")


def test_an_opening_gate_lets_in_all_waiting_cells_and_a_late_one() -> None:
    told: list[str] = []
    gate = Gate(ignore)
    gate.start_waiting(lambda: told.append("first"))
    gate.open({})
    gate.start_waiting(lambda: told.append("second"))
    assert told == ["first", "second"]


@pytest.mark.promise("race-cell")
def test_a_cell_passes_from_waiting_to_running_in_one_step() -> None:
    gate = Gate(ignore)
    note: list[None] = []

    def on_open() -> None:
        note.append(None)

    gate.start_waiting(on_open)
    gate.open({})
    assert gate.close() == "busy"
    gate.stop_waiting(on_open, "cell")
    assert gate.close() == "busy"
    gate.leave("cell")
    gate.leave("cell")
    assert gate.close() == "closed"


def test_a_cell_that_waits_for_input_does_not_hold_the_gate_and_enters_again() -> None:
    gate = Gate(ignore)
    gate.open({})
    for mark in ("outer", "inner", "beside"):
        assert gate.enter(mark)
    gate.pause(("outer", "inner", "unknown"))
    assert gate.close() == "busy", "another cell runs"
    gate.leave("beside")
    assert gate.close() == "closed"
    assert not gate.go_on(("outer", "inner"), if_open=True)
    assert not gate.is_running
    gate.open({})
    assert gate.go_on(("outer", "inner", "unknown"), if_open=True)
    assert gate.close() == "busy"
    for mark in ("outer", "inner"):
        gate.leave(mark)
    assert gate.close() == "closed", "a mark that never ran is not running"


def test_a_cell_that_ends_instead_of_having_its_input_goes_on_at_a_shut_gate() -> None:
    gate = Gate(ignore)
    gate.open({})
    gate.enter("cell")
    gate.pause(("cell",))
    assert gate.close() == "closed"
    gate.go_on(("cell",))
    assert gate.is_running
    assert not gate.is_open
    gate.leave("cell")
    gate.go_on(("cell",))
    assert not gate.is_running, "it is over"


def test_a_grant_without_a_waiting_cell_does_not_open() -> None:
    gate = Gate(ignore)
    assert not gate.open({}, lambda: False)
    assert not gate.is_open


def test_a_preemption_shuts_beneath_a_running_cell_and_its_end_does_not_open() -> None:
    gate = Gate(ignore)
    gate.open({})
    assert gate.enter("cell")
    assert gate.preempt() == "closed"
    assert not gate.enter("next cell")
    assert gate.close() == "busy"
    gate.leave("cell")
    assert not gate.is_open
    gate.open({})
    assert gate.enter("next cell")


def test_a_preemption_between_opening_and_passing_makes_the_cell_wait_again() -> None:
    gate = Gate(ignore)
    note: list[None] = []

    def on_open() -> None:
        note.append(None)

    gate.start_waiting(on_open)
    gate.open({})
    gate.preempt()
    assert not gate.stop_waiting(on_open, "cell")
    assert not gate.is_running


def test_a_cell_that_may_overlap_enters_a_shut_gate_which_opens_beneath_it() -> None:
    gate = Gate(ignore)
    gate.start_waiting(ignore_opening)
    assert gate.stop_waiting(ignore_opening, "cell", overlap=True)
    assert (gate.is_open, gate.is_running, gate.close()) == (False, True, "busy")
    gate.open({})
    gate.leave("cell")
    assert gate.close() == "closed"


def test_a_changed_limit_binds_without_opening() -> None:
    bound: list[Mapping[str, str]] = []
    gate = Gate(bound.append)
    gate.bind({"JUPYTER_GPU_MEMORY_MIB": "1"})
    gate.become_inert()
    gate.bind({"JUPYTER_GPU_MEMORY_MIB": "2"})
    assert (bound, gate.preempt(), gate.is_open) == ([{"JUPYTER_GPU_MEMORY_MIB": "1"}], "closed", True)


def test_a_forked_child_is_not_told_and_not_bound() -> None:
    def fail(_: Mapping[str, str]) -> None:
        pytest.fail("bound")

    gate = Gate(fail)
    gate.become_inert()
    assert not gate.open({"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert gate.enter("cell")


class GateMachine(RuleBasedStateMachine):
    """Any order of cells, waits, opens and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(ignore)
        self.running: list[object] = []
        self.waiting: list[object] = []

    @rule()
    def enter(self) -> None:
        mark = object()
        assert self.gate.enter(mark) == self.gate.is_open
        if self.gate.is_open:
            self.running.append(mark)

    @precondition(lambda self: self.running)
    @rule()
    def leave(self) -> None:
        self.gate.leave(self.running.pop())

    @rule()
    def wait(self) -> None:
        def on_open() -> None:
            pass

        self.gate.start_waiting(on_open)
        self.waiting.append(on_open)

    @precondition(lambda self: self.waiting)
    @rule()
    def stop_waiting(self) -> None:
        mark = object()
        self.gate.stop_waiting(self.waiting.pop(), mark)  # type: ignore[arg-type]
        if self.gate.is_open:
            self.running.append(mark)

    @rule()
    def open(self) -> None:
        assert self.gate.open({})

    @rule()
    def close(self) -> None:
        in_use = bool(self.running or self.waiting)
        was_open = self.gate.is_open
        assert self.gate.close() == ("busy" if in_use else "closed")
        assert self.gate.is_open == (was_open and in_use)

    @rule()
    def preempt(self) -> None:
        assert self.gate.preempt() == "closed"
        assert not self.gate.is_open

    @invariant()
    def knows_who_is_there(self) -> None:
        assert self.gate.is_running == bool(self.running)
        assert self.gate.is_busy == bool(self.running or self.waiting)


GateMachine.TestCase.settings = settings(stateful_step_count=20)
TestGateInAnyOrder = GateMachine.TestCase
