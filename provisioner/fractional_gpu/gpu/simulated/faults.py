"""Injected faults of the simulated hardware: what goes wrong, how often and for which process.

The rules:
- A fault applies to one operation (lock, checkpoint, restore, unlock, state), of one process or of any.
- It strikes `times` times (None: until it is removed); among several the oldest strikes.
- `fail:CODE` raises that error and does nothing. `slow:MS` waits before the operation, `late:MS` after it. `lie` returns
  success and does nothing; for state, `lie:STATE` returns that state.
  `hang` waits until the fault is removed, then does the operation; `late` does it, then waits until the fault is removed.
"""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated.store import SimulatedHostError, Store

OPERATIONS: Final = ("lock", "checkpoint", "restore", "unlock", "state")
_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault. `left` is how often it will still strike (None: always), `taken` how often it did."""

    fault_id: int
    operation: str
    fault: str
    left: int | None
    pid: int | None
    taken: int


def inject(directory: str | Path, operation: str, fault: str, *, times: int | None = 1, pid: int | None = None) -> int:
    """Inject a fault and return its id. Raises SimulatedHostError for what is not allowed."""
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
    """Remove a fault; an operation that hangs in it goes on. Idempotent."""
    with closing(Store(directory)) as store, store.transaction() as db:
        db.execute("DELETE FROM faults WHERE id=?", (fault_id,))


def clear(directory: str | Path) -> None:
    """Remove all faults."""
    with closing(Store(directory)) as store, store.transaction() as db:
        db.execute("DELETE FROM faults")


def listed(directory: str | Path) -> list[Fault]:
    """Return the faults that were injected and not removed, oldest first; those that are used up too."""
    with closing(Store(directory)) as store:
        return [
            Fault(*row) for row in store.query("SELECT id, operation, fault, left, pid, taken FROM faults ORDER BY id")
        ]


class Strike:
    """One strike of a fault on one operation: `before` it and `after` it. The default strikes nothing."""

    def __init__(self, store: Store, fault_id: int = 0, fault: str = "") -> None:
        self._store = store
        self._fault_id = fault_id
        self._kind, _, self.value = fault.partition(":")

    @property
    def lies(self) -> bool:
        """Whether the operation reports success without being done."""
        return self._kind == "lie"

    def before(self) -> None:
        """Wait or raise GPUError as the fault says."""
        if self._kind == "fail":
            raise GPUError(GPUErrorCode(self.value), f"injected fault: {self.value}")
        if self._kind == "slow":
            time.sleep(int(self.value) / 1000)
        elif self._kind == "hang":
            self._until_removed()

    def after(self) -> None:
        """Wait as the fault says."""
        if self._kind != "late":
            return
        if self.value:
            time.sleep(int(self.value) / 1000)
        else:
            self._until_removed()

    def _until_removed(self) -> None:
        while self._store.query("SELECT 1 FROM faults WHERE id=?", self._fault_id):
            time.sleep(_POLL_S)


def strike(store: Store, operation: str, pid: int) -> Strike:
    """Take the fault that is due for this operation on this process, if any."""
    due = (
        "SELECT id, fault FROM faults WHERE operation=? AND (pid IS NULL OR pid=?) "
        "AND (left IS NULL OR left > 0) ORDER BY id"
    )
    if not store.query(due, operation, pid):
        return Strike(store)
    with store.transaction() as db:
        row = db.execute(due, (operation, pid)).fetchone()
        if row is None:
            return Strike(store)
        db.execute("UPDATE faults SET left = left - 1, taken = taken + 1 WHERE id=?", (row[0],))
    return Strike(store, row[0], row[1])


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
