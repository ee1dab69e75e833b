"""What the guard restores, however a cell ends, on a shell with only the parts of IPython's that it needs."""

import sys
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fractional_gpu_kernel.cells.acquire import FirstGrant
from fractional_gpu_kernel.cells.gate import BURST, Gate
from fractional_gpu_kernel.cells.guard import CellGuard
from fractional_gpu_kernel.memory import ImportHooks, MemoryLimits
from fractional_gpu_kernel.registrations import Registrations
from tests.kernelext.interrupting import interrupt_at
from tests.kernelext.parts import a_kernel


class Shell:
    def __init__(self) -> None:
        self.ran: list[str] = []
        self.events = SimpleNamespace(register=lambda *_: None)

    async def run_cell_async(self, raw_cell: str, **_: object) -> None:
        self.ran.append(raw_cell)


class InterruptedBursts:
    """A Ctrl-C strikes while the larger share is given back."""

    def begin(self, *_: object) -> None:
        pass

    def end(self, *_: object, **__: object) -> None:
        raise KeyboardInterrupt


def finish(cell: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(StopIteration):
        cell.send(None)


def guarded(bursts: object) -> tuple[Shell, Gate]:
    """Return a shell whose cells pass a guard, and its gate, which is open."""
    shell, limits = Shell(), MemoryLimits({})
    gate = Gate(limits.bind)
    gate.open({})
    guard(shell, gate, limits, bursts)
    return shell, gate


def guard(shell: Shell, gate: Gate, limits: MemoryLimits, bursts: object) -> None:
    parts: dict[str, Any] = {"registrations": Registrations(shell), "first_grant": FirstGrant(ImportHooks(), {})}
    magics = SimpleNamespace(resizer=bursts)
    CellGuard(a_kernel(shell=shell, gate=gate, limits=limits, magics=magics, **parts)).install()


def test_an_interrupt_while_a_burst_is_given_back_leaves_no_cell_running() -> None:
    shell, gate = guarded(InterruptedBursts())
    with pytest.raises(KeyboardInterrupt):
        finish(shell.run_cell_async("%%gpu 1\n1", transformed_cell=f"{BURST}1\n1"))
    assert (shell.ran, gate.close()) == (["%%gpu 1\n1"], "closed")


def test_an_interrupt_just_when_a_cell_leaves_leaves_no_cell_running() -> None:
    shell, gate = guarded(None)
    with interrupt_at(Gate.leave), pytest.raises(KeyboardInterrupt):
        finish(shell.run_cell_async("1", transformed_cell="1"))
    assert (shell.ran, gate.close()) == (["1"], "closed")


@pytest.mark.parametrize("beside", [True, False])
def test_a_limit_is_not_lowered_while_another_cell_runs(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    told: list[int] = []
    pool = SimpleNamespace(set_limit=lambda size: told.append(size >> 20))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool))
    shell, limits = Shell(), MemoryLimits({"JUPYTER_GPU_MEMORY_MIB": "20480"})
    gate = Gate(limits.bind)
    gate.open({"JUPYTER_GPU_MEMORY_MIB": "10240"})
    if beside:
        gate.enter("a cell of another subshell")
    guard(shell, gate, limits, None)
    finish(shell.run_cell_async("1", transformed_cell="1"))
    assert (shell.ran, limits.is_stale) == (["1"], beside)
    assert told == ([] if beside else [10240 - 512])
    gate.open({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    finish(shell.run_cell_async("2", transformed_cell="2"))
    assert told[-1] == 40960 - 512, "a larger one does no harm"
