"""A ledger whose disk can be full."""

from collections.abc import Mapping
from typing import Any

from provisioner.ledger.ledger import Ledger
from provisioner.ledger.records import LedgerError

__all__ = ["Disk"]


class Disk(Ledger):
    """While it is full every write fails."""

    full = False

    def _write(self, statement: str, values: Mapping[str, Any] | tuple[Any, ...]) -> int:
        if self.full:
            raise LedgerError("the disk is full")
        return super()._write(statement, values)
