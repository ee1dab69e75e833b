"""What the guard keeps to however a cell ends, on a shell that is only as much of IPython's as it needs."""

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernelext.acquisition import Acquirer
from kernelext.bursts import CellBursts
from kernelext.cells import BURST
from kernelext.gate import Gate
from kernelext.guard import Guard
from kernelext.memory import MemoryLimits


class Shell:
    """Notes the cells that it runs."""

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
    """Run what never really waits."""
    with pytest.raises(StopIteration):
        cell.send(None)


def test_an_interrupt_while_a_burst_is_given_back_leaves_no_cell_running() -> None:
    shell, limits = Shell(), MemoryLimits({})
    gate = Gate(limits.bind)
    gate.open({})
    bursts = cast("CellBursts", InterruptedBursts())
    guard = Guard(shell, gate, cast("Acquirer", None), limits, exempt=lambda _: None, bursts=lambda: bursts)
    guard.install()
    with pytest.raises(KeyboardInterrupt):
        finish(shell.run_cell_async("%%gpu 1\n1", transformed_cell=f"{BURST}1\n1"))
    assert (shell.ran, gate.close()) == (["%%gpu 1\n1"], "closed")
