"""How cells that run on one device at the same time slow each other down.

The model: a cell with a GPU utilisation of u on an unshared device leaves the device idle for 1 - u of its time. While the busy cells
of a device want no more than the device has (their utilisations add up to 100 % or less), they fit into each other's pauses and nobody
is slowed. Past that, time-slicing shares the device out evenly by demand: the GPU's part of every cell takes as many times longer as
the demand exceeds the device, the rest of the cell is not affected. A cell thus takes 1 - u + u * max(1, U) times as long, where U is
the sum of the utilisations. Costs of switching contexts and of contended caches are left out; the model can be switched off.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["UNSHARED", "Running", "SharedDevice"]

UNSHARED = 1_000_000  # the pace of a cell alone: nominal nanoseconds per millisecond


@dataclass(slots=True, eq=False)
class Running:
    """A cell that runs: nominal time left, in ns, as of `at_ms`. `version` grows whenever its end moves."""

    session_id: str
    util_percent: int
    left_ns: int
    at_ms: int
    version: int = 0


@dataclass(slots=True)
class SharedDevice:
    """The cells that run on one device."""

    slowdown: bool
    running: dict[str, Running] = field(default_factory=dict)

    def begin(self, cell: Running) -> list[tuple[int, Running]]:
        """Let a cell run. Returns when each cell of the device ends now, for those whose end moved."""
        self._advance(cell.at_ms)
        before = self._demand()
        self.running[cell.session_id] = cell
        return self._ends(self.running.values() if self._demand() != before else [cell])

    def finish(self, session_id: str, now_ms: int) -> tuple[Running, list[tuple[int, Running]]]:
        """Take a cell off the device. Returns it, and when the others end now, for those whose end moved."""
        self._advance(now_ms)
        before = self._demand()
        cell = self.running.pop(session_id)
        cell.version += 1
        return cell, self._ends(self.running.values() if self._demand() != before else [])

    def _demand(self) -> int:
        """Return the utilisations' sum in percent, 100 where nobody is slowed."""
        return max(100, sum(cell.util_percent for cell in self.running.values())) if self.slowdown else 100

    def _stretch(self, cell: Running, demand: int) -> int:
        """Return how many ten-thousandths of its nominal time the cell takes."""
        return (100 - cell.util_percent) * 100 + cell.util_percent * demand

    def _advance(self, now_ms: int) -> None:
        demand = self._demand()
        for cell in self.running.values():
            done_ns = (now_ms - cell.at_ms) * UNSHARED * 10_000 // self._stretch(cell, demand)
            cell.left_ns, cell.at_ms = max(0, cell.left_ns - done_ns), now_ms

    def _ends(self, cells: Iterable[Running]) -> list[tuple[int, Running]]:
        demand = self._demand()
        ends = []
        for cell in cells:
            cell.version += 1
            takes_ms = -(-cell.left_ns * self._stretch(cell, demand) // (UNSHARED * 10_000))
            ends.append((cell.at_ms + takes_ms, cell))
        return ends
