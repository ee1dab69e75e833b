"""Leases whose seat has ended: the hub server that had the seat is gone, and its kernels still live.

- A revoked lease counts for its owner as before. The pool promises it nothing, it has no ticket and no pin, and it keeps its size.
- While it is on a device it is suspended as soon as possible, even in the middle of a cell. It does not become resident again before it
  draws on another seat. A lease that cannot be suspended (its process, its device, host memory) stays until it can.
- It ends with its process. When the pool's `revoked_ttl_ms` has passed, its processes are ended; that is repeated while they live.
"""

from dataclasses import replace
from typing import Final

from fractional_gpu.core.books.books import Lease
from fractional_gpu.core.books.records import Reason
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.effects import EndProcesses
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.eligibility import lacks_device
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration

__all__ = ["REVOKED", "Revocations"]

REVOKED: Final = Reason(
    "seat-ended",
    "the seat of this kernel has ended: it uses no GPU before its user's server is started again with as large a share of the same pool",
)
"""Why a request about a revoked lease is declined."""
_AGAIN_MS: Final = 60_000


class Revocations:
    """Revokes leases, and takes them off their devices. `recheck_ms`: when time alone lets another one leave."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self.recheck_ms: int | None = None

    def revoke(self, lease: Lease, since_ms: int) -> None:
        """Revoke a lease whose seat has ended. The caller has ended its pin."""
        changes, books = self._changes, self._books
        if lease.revoked:
            return
        if lease.state is LeaseState.UNATTACHED:
            changes.end(lease, Cause.RELEASED, "seat-ended")
            return
        if lease.gate.ticket is not None:
            books.set_gate(lease, closed=True)
        if lease.ticket is not None and lease.ticket.resize_to is None:
            changes.forecast_recorder.ticket_given_up(lease)
        changes.withdraw_ticket(lease)
        ends_ms = min(since_ms, changes.now_ms) + books.policy(lease).revoked_ttl_ms
        books.revoke(lease, ends_ms)
        left = format_duration(max(0, ends_ms - changes.now_ms))
        changes.record(
            lease.lease_id,
            "seat-ended",
            f"the seat of its server has ended: it is suspended, and its processes are ended in {left} unless its user's server is "
            "started again",
        )

    def reinstate(self, lease: Lease, seat: str) -> None:
        """Reinstate a lease that draws on another seat. A kernel whose cell was preempted waits for its turn again."""
        changes = self._changes
        if not lease.revoked:
            return
        self._books.reinstate(lease, replace(lease.spec, seat=seat))
        changes.record(lease.lease_id, "seat-renewed", "the next seat of its user's server has taken it over")
        changes.requeued.add(lease.spec.pool)
        if lease.state is LeaseState.SUSPENDED and (lease.busy or lease.left_behind):
            changes.file_ticket(lease, preempted=True)

    def suspend_ready(self) -> None:
        """Begin the suspends that can begin now."""
        self.recheck_ms = None
        for lease in list(self._books.revoked.values()):
            if not self._changes.channel_free:
                return
            if lease.state is not LeaseState.RESIDENT or lease.is_unsuspendable or lacks_device(self._books, lease):
                continue
            retry_ms = lease.retries.suspend_after_ms
            if retry_ms > self._changes.now_ms:
                self.recheck_ms = retry_ms if self.recheck_ms is None else min(self.recheck_ms, retry_ms)
            elif lease.host_need_mib <= self._books.host_left_mib:
                self._changes.begin_suspend(lease, "suspend.seat-ended", "the seat of its server has ended")
            else:
                self._changes.ask_to_shrink(lease)

    def end_processes_if_due(self, lease: Lease) -> None:
        """Have the processes of a revoked lease ended if its time is over."""
        now_ms = self._changes.now_ms
        if lease.ends_ms is None or lease.ends_ms > now_ms:
            return
        lease.ends_ms = now_ms + _AGAIN_MS
        self._books.mark_changed(lease)
        sentence = "its seat ended, and no other one has taken it over in the time that its pool allows: its processes are ended"
        self._changes.record(lease.lease_id, "seat-ended.over", sentence)
        self._changes.effects.append(EndProcesses(lease_id=lease.lease_id))
