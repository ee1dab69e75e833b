"""A session's kernel as it stands on its host."""

from collections.abc import Callable
from dataclasses import dataclass

from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.simulator.machine import Running
from fractional_gpu.simulator.traces import Cell, Session


@dataclass(slots=True, eq=False)
class Kernel:
    """One session as it stands. `ended` is called when it is over."""

    session: Session
    spec: LeaseSpec
    ended: Callable[[], None]
    state: LeaseState | None = None
    device_ids: tuple[str, ...] = ()
    reserved_mib: int = 0  # on each of its devices: what it may use there
    memory_mib: int = 0  # what its process holds on each of them, or saved of each on the host
    next_cell: int = 0
    asked_ms: int = 0
    waiting: bool = False
    growing: bool = False  # let in, and short of memory for its cell
    short_ms: int = 0  # since when, if it is
    running: Running | None = None
    unfinished: Running | None = None  # a cell that was preempted
    began_ms: int = 0  # when the cell that runs was let in last
    ran_ms: int = 0  # how long the last cell has run in all, up to when it was stopped
    swaps: int = 0
    resume_fails: bool = False  # the resume under way
    swap_ends_ms: int = 0  # when the swap under way ends
    worked_ms: int = 0  # for how long its cells have run since its process began
    life: int = 0  # how many processes it has had before this one
    early_mib: int = 0  # what it was brought back with before a cell asked, until one does
    overdue: int = 0  # how many limits of the goal the wait of its cell exceeds
    over: bool = False

    @property
    def cell(self) -> Cell:
        """The cell that is asked for or runs."""
        return self.session.cells[self.next_cell]

    @property
    def total_mib(self) -> int:
        """What it holds in all."""
        return self.memory_mib * self.spec.devices
