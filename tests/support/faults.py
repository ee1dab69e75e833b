"""Faults of the simulated hardware: which operations fail, how often and for which process. Also loses devices.

A fault affects one operation (lock, checkpoint, restore, unlock or state) on one process or on any process. It takes effect `times` times,
or until it is removed if `times` is None. If several faults match, the oldest one takes effect. The faults are:

- `fail:CODE` raises this error instead of performing the operation;
- `slow:MS` waits before the operation, and `late:MS` waits after it;
- `hang` waits before the operation, and `late` after it, until the fault is removed;
- `lie` reports success without performing the operation; for the operation `state`, `lie:STATE` returns this state.

`injected/injections.py` makes them happen, in each process that has this folder in its PYTHONPATH, and in the tests' own.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.interface import GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated.processes import CLOSED, ON_DEVICE, write_gate
from fractional_gpu.gpu.simulated.store import SimulatedHostError, Store

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS faults (
  id INTEGER PRIMARY KEY AUTOINCREMENT, operation TEXT NOT NULL, fault TEXT NOT NULL, left INTEGER, pid INTEGER,
  taken INTEGER NOT NULL DEFAULT 0)
"""
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
    with _faults(directory) as db:
        row = (operation, fault, times, pid)
        return int(
            db.execute("INSERT INTO faults (operation, fault, left, pid) VALUES (?, ?, ?, ?)", row).lastrowid or 0
        )


def remove(directory: str | Path, fault_id: int) -> None:
    with _faults(directory) as db:
        db.execute("DELETE FROM faults WHERE id=?", (fault_id,))


def clear(directory: str | Path) -> None:
    with _faults(directory) as db:
        db.execute("DELETE FROM faults")


def listed(directory: str | Path) -> list[Fault]:
    """Return the faults that were injected and not removed, oldest first, including used-up ones."""
    with _faults(directory) as db:
        return [
            Fault(*row) for row in db.execute("SELECT id, operation, fault, left, pid, taken FROM faults ORDER BY id")
        ]


@contextmanager
def _faults(directory: str | Path) -> Iterator[sqlite3.Connection]:
    with closing(Store(directory)) as store, store.transaction() as db:
        db.execute(_TABLE)
        yield db


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


def lose_device(directory: str | Path, device_id: str) -> None:
    """Make the device fall off the bus. The contents of its memory are lost, and its processes fail permanently."""
    fatal = f"the simulated device {device_id} was lost, and with it this process's memory: restart the kernel"
    with closing(Store(directory)) as store:
        store.device(device_id)
        with store.transaction() as db:
            db.execute("UPDATE devices SET lost=1 WHERE id=?", (device_id,))
            keys = [row[0] for row in db.execute(f"SELECT key FROM processes WHERE {ON_DEVICE}", (device_id,))]  # noqa: S608
            db.executemany("UPDATE processes SET phase='failed', fatal=? WHERE key=?", [(fatal, key) for key in keys])
        for key in keys:
            # Close the gate after the commit, so that a call that finds the gate closed also finds the reason.
            with suppress(FileNotFoundError):
                write_gate(store.process_folder(key), CLOSED)


def return_device(directory: str | Path, device_id: str) -> None:
    """Bring a lost device back with empty memory. Processes that failed when it was lost stay failed."""
    with closing(Store(directory)) as store:
        store.device(device_id)
        with store.transaction() as db:
            db.execute("UPDATE devices SET lost=0 WHERE id=?", (device_id,))


def configure(store: Store, **changes: int) -> None:
    """Change the settings of the hardware (`DEFAULTS` in `injected/injections.py`) for every process, from the next operation on."""
    rows = store.query("SELECT value FROM meta WHERE name='settings'")
    settings = {**(json.loads(rows[0][0]) if rows else {}), **changes}
    with store.transaction() as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('settings', ?)", (json.dumps(settings),))
