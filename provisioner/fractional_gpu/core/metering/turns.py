"""Records leases' turns on their devices: when a cell asked for its device, began running there, and stopped.

A turn starts when the lease begins to work on its device, after any wait and resume. It ends when the cell ends or the lease has to leave.
A preempted cell has two turns: when the first one ends, it asks for its device again, and it continues in the second. Cells that run back
to back can form a single turn. The module does no I/O, and `at_ms` never goes back.
"""

from dataclasses import dataclass

from fractional_gpu.core.metering.meter import Holding


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a lease on its devices.

    `used_mib` is its memory on each device. `use_milli` is how much of a device it uses, in thousandths, or 0 if unknown.
    """

    lease_id: str
    asked_ms: int
    begun_ms: int
    ended_ms: int
    used_mib: int
    use_milli: int
    continues: bool = False  # it continues the cell of an earlier turn, which had to leave


class TurnRecorder:
    """Records leases' turns, based on their state after each event."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._begun: dict[str, tuple[int, int, bool]] = {}  # when it asked and started, and whether it continues a cell
        self._preempted: set[str] = set()  # leases with a cell that waits to continue
        self.turns: list[Turn] = []  # ended turns; the reader empties the list

    def saw(
        self, at_ms: int, lease_id: str, holding: Holding | None, *, asks: bool = False, busy: bool, use_milli: int = 0
    ) -> None:
        """Record the state of a lease after an event.

        `asks` is true if the lease is asking for its device, `busy` if a cell is running or waiting. `use_milli` is as in `Turn`.
        """
        if asks and lease_id not in self._begun:
            self._asked.setdefault(lease_id, at_ms)
        if holding is not None and holding.working:
            if lease_id not in self._begun:
                self._begun[lease_id] = self._asked.pop(lease_id, at_ms), at_ms, lease_id in self._preempted
                self._preempted.discard(lease_id)
            return
        if (begun := self._begun.pop(lease_id, None)) is not None:
            used = holding.device_mib // max(1, holding.count) if holding is not None else 0
            asked_ms, begun_ms, continues = begun
            self.turns.append(Turn(lease_id, asked_ms, begun_ms, at_ms, used, use_milli, continues))
            if busy and holding is not None:
                self._asked[lease_id] = at_ms  # it had to leave and waits again
                self._preempted.add(lease_id)
        if holding is None or not (busy or asks):
            self._asked.pop(lease_id, None)
            self._preempted.discard(lease_id)
