"""What the auditor knows of sessions, their cells and their swaps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

HOLDING = ("resident", "suspending", "resuming", "quarantined")

Entry = dict[str, Any]
Device = tuple[int, str]  # a host, counted from 0, and the name of a device there


class AuditError(Exception):
    """A file cannot be audited."""


@dataclass(slots=True)
class Cell:
    """A cell of the trace: ms, MiB, percent."""

    start_ms: int
    duration_ms: int
    gpus: int
    gpu_mib: int
    util_percent: int


@dataclass(slots=True)
class Running:
    """A cell that runs: nominal ms done until `since_ms`, and how many times its nominal time it takes since then."""

    util_percent: int
    since_ms: int
    device: Device | None  # whose neighbours slow it down
    done_ms: Fraction = Fraction(0)
    stretch: Fraction = Fraction(1)
    changes: int = 0

    def advance(self, now_ms: int) -> None:
        self.done_ms += (now_ms - self.since_ms) / self.stretch
        self.since_ms = now_ms


@dataclass(slots=True)
class Session:
    """A session and what it has, as the record has it so far."""

    name: str
    user: str
    open_ms: int
    close_ms: int
    gpus: int
    asked_mib: int
    cells: list[Cell]
    host: int | None = None
    devices: int = 1
    cap_mib: int = 0  # of what it may ever use of each
    state: str | None = None
    holds: tuple[str, ...] = ()
    reserved_mib: int = 0  # on each of its devices
    used_mib: dict[str, int] = field(default_factory=dict)  # by device
    host_mib: int = 0
    next_cell: int = 0
    due_ms: int = 0  # when its next cell is asked for, or it closes
    phase: str = "idle"  # asked, short, running, preempted
    asked_ms: int = 0
    short_ms: int = 0
    let_in_ms: int = 0
    late_ms: int = 0  # how late its cell began
    door_ms: int = 0  # waited at the door, and not yet counted in the lateness of a cell
    owed_ms: int = 0  # waited for devices since, and not yet counted as the wait of a cell
    idle_ms: int = 0  # since when it runs nothing
    running: Running | None = None
    to_preempt: bool = False
    comes_early: bool = False  # its resume that is being read is for a cell that is only expected
    early_mib: int = 0  # what that brought back, until a cell asks
    closed: bool = False
    lost: bool = False
    pool: str = ""  # empty: the host's first one

    @property
    def cell(self) -> Cell:
        return self.cells[self.next_cell]

    @property
    def total_mib(self) -> int:
        return sum(self.used_mib.values())

    @property
    def most_gpus(self) -> int:
        return max((cell.gpus for cell in self.cells), default=0)

    def asks(self, host: Entry) -> tuple[int, int] | None:
        """Return the MiB on each device and the number of devices that it asks for on a host; None: the host cannot serve it."""
        pool = next((one for one in host["pools"] if one["name"] == self.pool), host["pools"][0])
        served = leasable(host, pool)
        count = max(1, self.most_gpus)
        offered = [1000] if count > 1 else pool["fractions_milli"]
        device_mib, peak_mib = (
            min(served.values(), default=0),
            max((cell.gpu_mib for cell in self.cells if cell.gpus), default=0),
        )
        most_mib = device_mib * max(offered, default=1000) // 1000
        kinds = [device["name"] for device in host["devices"] if device["device_id"] in served]
        if count > min(pool["max_devices"], max(map(kinds.count, kinds), default=0)) or max(1, peak_mib) > most_mib:
            return None
        wanted_mib = min(self.asked_mib or max(1, peak_mib), most_mib)
        if not offered:
            return device_mib * -(-wanted_mib * 1000 // device_mib) // 1000, count
        return min(mib for milli in offered if (mib := device_mib * milli // 1000) >= wanted_mib), count


@dataclass(slots=True)
class Swap:
    """An operation under way."""

    session: Session
    kind: str  # Suspend, Resume
    began_ms: int
    mib: int
    fails: bool = False


def leasable(host: Entry, pool: Entry | None = None) -> dict[str, int]:
    """Return what leases may have of each device of a pool, MiB; without one, of the host's first one."""
    served = (host["pools"][0] if pool is None else pool)["devices"]
    return {
        device["device_id"]: device["memory_mib"] - device["overhead_mib"]
        for device in host["devices"]
        if device["device_id"] in served
    }


def listed(device_ids: Sequence[str]) -> str:
    return " ".join(device_ids) or "no device"


def names(sessions: Iterable[Session]) -> str:
    return ", ".join(sorted(session.name for session in sessions))
