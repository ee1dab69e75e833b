"""Injects faults into simulated hardware: what goes wrong, how often and for which process; the product's `faults` has the kinds."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.interface import GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated.store import SimulatedHostError, Store

OPERATIONS: Final = ("lock", "checkpoint", "restore", "unlock", "state")


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault. `left`: how often it will still strike (None: always); `taken`: how often it did."""

    fault_id: int
    operation: str
    fault: str
    left: int | None
    pid: int | None
    taken: int


def inject(directory: str | Path, operation: str, fault: str, *, times: int | None = 1, pid: int | None = None) -> int:
    """Inject a fault and return its id. Raises SimulatedHostError if it is not allowed."""
    if operation not in OPERATIONS:
        raise SimulatedHostError(f"there is no operation {operation!r}; there are {', '.join(OPERATIONS)}")
    _check(operation, fault)
    if times is not None and times < 1:
        raise SimulatedHostError(f"a fault cannot strike {times} times; give 1 or more, or None for always")
    with closing(Store(directory)) as store, store.transaction() as db:
        row = (operation, fault, times, pid)
        return int(
            db.execute("INSERT INTO faults (operation, fault, left, pid) VALUES (?, ?, ?, ?)", row).lastrowid or 0
        )


def remove(directory: str | Path, fault_id: int) -> None:
    with closing(Store(directory)) as store, store.transaction() as db:
        db.execute("DELETE FROM faults WHERE id=?", (fault_id,))


def clear(directory: str | Path) -> None:
    with closing(Store(directory)) as store, store.transaction() as db:
        db.execute("DELETE FROM faults")


def listed(directory: str | Path) -> list[Fault]:
    """Return the faults that were injected and not removed, oldest first, including used-up ones."""
    with closing(Store(directory)) as store:
        return [
            Fault(*row) for row in store.query("SELECT id, operation, fault, left, pid, taken FROM faults ORDER BY id")
        ]


def _check(operation: str, fault: str) -> None:
    kind, colon, value = fault.partition(":")
    milliseconds = value.isascii() and value.isdigit()
    allowed = {
        "fail": value in {*GPUErrorCode},
        "slow": milliseconds,
        "late": milliseconds or not colon,
        "hang": not colon,
        "lie": value in {*ProcessState} if operation == "state" else not colon,
    }
    if not allowed.get(kind, False):
        raise SimulatedHostError(
            f"fault {fault!r} is not allowed for {operation}; allowed: fail:CODE, slow:MS, late, late:MS, hang, lie (for state: lie:STATE)"
        )
