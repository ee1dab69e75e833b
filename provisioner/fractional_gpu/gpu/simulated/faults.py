"""Faults to inject into the simulated hardware: which operations fail, how often and for which process.

A fault affects one operation (lock, checkpoint, restore, unlock or state) on one process or on any process. It takes effect `times` times,
or until it is removed if `times` is None. If several faults match, the oldest one takes effect. The faults are:

- `fail:CODE` raises this error instead of performing the operation;
- `slow:MS` waits before the operation, and `late:MS` waits after it;
- `hang` waits before the operation, and `late` after it, until the fault is removed;
- `lie` reports success without performing the operation; for the operation `state`, `lie:STATE` returns this state.
"""

import time
from typing import Final

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.simulated.store import Store

_POLL_S: Final = 0.005


class Strike:
    def __init__(self, store: Store, fault_id: int = 0, fault: str = "") -> None:
        self._store = store
        self._fault_id = fault_id
        self._kind, _, self.value = fault.partition(":")

    @property
    def lies(self) -> bool:
        return self._kind == "lie"

    def before(self) -> None:
        if self._kind == "fail":
            raise GPUError(GPUErrorCode(self.value), f"injected fault: {self.value}")
        if self._kind == "slow":
            time.sleep(int(self.value) / 1000)
        elif self._kind == "hang":
            self._until_removed()

    def after(self) -> None:
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
