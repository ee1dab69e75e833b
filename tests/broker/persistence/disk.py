"""A ledger whose disk can be full, or delay every write."""

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError

__all__ = ["Disk"]

_PATIENCE_S = 30.0


class Disk(Ledger):
    """While it is full, every write fails with `reason`. While `goes_on` is clear, every write waits, up to 30 s."""

    full = False
    reason = "the disk is full"

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        super().__init__(path, connection, lock)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _write(self, statement: str, values: Mapping[str, Any] | tuple[Any, ...]) -> int:
        self.goes_on.wait(_PATIENCE_S)
        if self.full:
            raise LedgerError(self.reason)
        return super()._write(statement, values)
