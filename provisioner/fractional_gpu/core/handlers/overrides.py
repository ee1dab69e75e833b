"""What people set against the policy: pins, drained devices, revoked leases, priorities by budget.

Pins: for a while a lease is not suspended for others, nor for being idle.

A pin costs its owner's budget in the pool, which comes back evenly over a day; what is left of a pin that ends early comes back at once.
The end of a pin is a deadline like others. A request to suspend the lease ends its pin; a drained device ignores it.
"""

from dataclasses import replace
from typing import Final

from fractional_gpu.core.books.records import Account, Device, Lease, Reason
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.effects import EndProcesses, Pinned
from fractional_gpu.core.model import LeaseState, PoolSpec
from fractional_gpu.core.rules.eligibility import lacks_device
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration

# -- drain -------------------------------------------------------------------------------------------------------------
# Draining a device: its leases leave as soon as possible. Pins do not protect from it, nor does minimum residency.
#
# Idle leases are suspended at once. Busy ones follow when they become idle, or at once where the administrator says so. What cannot be
# saved (its process, its device, host memory) stays until it can. Before a deadline `salvaging` decides instead.


class DeviceDrains:
    """Drains devices. `recheck_ms`: when time alone lets another lease leave."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self.recheck_ms: int | None = None

    def begin(self, device_id: str, *, evict_busy: bool, deadline_ms: int | None = None) -> None:
        """Begin to drain a device. `deadline_ms`: it goes away then."""
        device = self._books.devices.get(device_id)
        if device is None:
            return
        device.draining, device.evict_busy, device.deadline_ms = True, evict_busy, deadline_ms
        self._books.draining[device_id] = device
        for lease in list(device.holders.values()):
            self._record_begun(lease, device)

    def end(self, device_id: str) -> None:
        """End the drain of a device."""
        device = self._books.draining.pop(device_id, None)
        if device is not None:
            device.draining, device.evict_busy, device.deadline_ms = False, False, None

    def _record_begun(self, lease: Lease, device: Device) -> None:
        when = "at once" if device.evict_busy or not lease.busy else "when its cell has ended"
        if lease.is_unsuspendable:
            when = f"when it can be: {lease.unsuspendable_reason}"
        device_id = device.spec.device_id
        sentence = f"an administrator empties device {device_id}: the kernel is suspended {when}"
        if device.deadline_ms is not None:
            left = format_duration(max(0, device.deadline_ms - self._changes.now_ms))
            sentence = f"device {device_id} goes away in {left}: what can be saved before is saved in host memory"
        self._changes.record(lease.lease_id, "drain.begun", sentence)

    def suspend_ready(self) -> None:
        """Begin the suspends that can begin now."""
        self.recheck_ms = None
        for device in list(self._books.draining.values()):
            if device.deadline_ms is not None and device.deadline_ms > self._changes.now_ms:
                continue  # `salvaging` decides
            for lease in list(device.holders.values()):
                if not self._changes.channel_free:
                    return
                if lease.host_need_mib > self._books.host_left_mib:
                    self._changes.ask_to_shrink(lease)
                if self._may_leave(lease, device) and not self._books.goes_away(lease, later=True):
                    what = "an administrator empties its device"
                    self._changes.begin_suspend(lease, "suspend.drain", what)

    def _may_leave(self, lease: Lease, device: Device) -> bool:
        if lease.state is not LeaseState.RESIDENT or lease.is_unsuspendable or lacks_device(self._books, lease):
            return False
        if lease.busy and not device.evict_busy:
            return False
        if lease.retries.suspend_after_ms > self._changes.now_ms:
            if self.recheck_ms is None or lease.retries.suspend_after_ms < self.recheck_ms:
                self.recheck_ms = lease.retries.suspend_after_ms
            return False
        return lease.host_need_mib <= self._books.host_left_mib


# -- revocation --------------------------------------------------------------------------------------------------------
# Leases whose seat has ended: the hub server that had the seat is gone, and its kernels still live.
#
# - A revoked lease counts for its owner as before. The pool promises it nothing, it has no ticket and no pin, and it keeps its size.
# - While it is on a device it is suspended as soon as possible, even in the middle of a cell. It does not become resident again before it
#   draws on another seat. A lease that cannot be suspended (its process, its device, host memory) stays until it can.
# - It ends with its process. When the pool's `revoked_ttl_ms` has passed, its processes are ended; that is repeated while they live.


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
        changes.forget_expectation(lease)
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
        """Reinstate a lease that draws on another seat. A kernel that is busy without its device waits for its turn again."""
        changes = self._changes
        if not lease.revoked:
            return
        self._books.reinstate(lease, replace(lease.spec, seat=seat))
        changes.record(lease.lease_id, "seat-renewed", "the next seat of its user's server has taken it over")
        changes.requeued.add(lease.spec.pool)
        if lease.state is not LeaseState.RESIDENT and lease.busy:  # so is one with processes left behind
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


# -- priorities --------------------------------------------------------------------------------------------------------


def set_priority(changes: Changes, lease: Lease, priority: int | None, sentence: str) -> bool:
    """Give the lease another priority for now, or its own one again (None). Returns whether it changed."""
    own = lease.spec.priority if lease.spec.own_priority is None else lease.spec.own_priority
    wanted = own if priority is None else priority
    spec = replace(lease.spec, priority=wanted, own_priority=None if wanted == own else own)
    if spec == lease.spec:
        return False
    changes.books.set_priority(lease, spec)
    changes.requeued.add(spec.pool)
    changes.record(lease.lease_id, "budget.lower-priority" if wanted != own else "budget.own-priority", sentence)
    return True


# -- pins --------------------------------------------------------------------------------------------------------------


_DAY_MS = 86_400_000


class Pins:
    """Pins and their budgets."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def pin(self, lease: Lease, duration_ms: int) -> None:
        """Pin the lease from now on, or decline. Replaces an earlier pin."""
        pool, account = self._books.policy(lease), self._books.accounts.of(lease)
        no_seat = (REVOKED.code, REVOKED.sentence) if lease.revoked else None
        refused = no_seat or self._refusal(lease, pool, account, duration_ms)
        if refused is not None:
            self._changes.decline(lease, *refused, about="pin")
            return
        self._settle(account, pool)
        account.pinned_ms = max(0, account.pinned_ms - self._left_ms(lease)) + duration_ms
        self._set(lease, self._changes.now_ms + duration_ms)
        self._changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=lease.pinned_until_ms))
        self._changes.record(lease.lease_id, "pin.begun", f"pinned for {format_duration(duration_ms)}")

    def _refusal(self, lease: Lease, pool: PoolSpec, account: Account, duration_ms: int) -> tuple[str, str] | None:
        if lease.state is LeaseState.UNATTACHED or lease.left_behind:
            return "not-alive", "the kernel has no process: start it, then pin it"
        if duration_ms < 1:
            return "pin-too-short", "a pin of no time was asked: ask for a second or more"
        if duration_ms > pool.max_pin_ms:
            return "pin-too-long", _too_long(duration_ms, pool)
        if pool.pin_budget_ms is None:
            return None
        left_ms = pool.pin_budget_ms - self._spent_ms(account, pool) + self._left_ms(lease)
        if duration_ms <= left_ms:
            return None
        asked, left, budget = map(format_duration, (duration_ms, max(0, left_ms), pool.pin_budget_ms))
        return "pin-budget", (
            f"a pin of {asked} was asked, {left} are left of the {budget} that {account.name!r} may pin kernels in a day: "
            "ask for less, or unpin another kernel"
        )

    def unpin(self, lease: Lease, reason: str, sentence: str) -> None:
        """End the pin, if there is one; the rest of it goes back to the budget."""
        if lease.pinned_until_ms:
            self.refund(lease)
            self._changes.record(lease.lease_id, reason, sentence)
        self._changes.effects.append(Pinned(lease_id=lease.lease_id, until_ms=0))

    def refund(self, lease: Lease) -> None:
        """End the pin of a lease that ends, without an effect."""
        account = self._books.accounts.of(lease)
        self._settle(account, self._books.policy(lease))
        account.pinned_ms = max(0, account.pinned_ms - self._left_ms(lease))
        self._set(lease, 0)

    def restore(self, lease: Lease, until_ms: int) -> None:
        """Take over a pin that a new broker found in the ledger; the rest of it counts as spent."""
        if until_ms <= self._changes.now_ms or lease.state is LeaseState.UNATTACHED:
            return
        account = self._books.accounts.of(lease)
        self._settle(account, self._books.policy(lease))
        account.pinned_ms += until_ms - self._changes.now_ms
        self._set(lease, until_ms)

    def _set(self, lease: Lease, until_ms: int) -> None:
        lease.pinned_until_ms = until_ms
        self._books.refresh(lease)

    def _left_ms(self, lease: Lease) -> int:
        return max(0, lease.pinned_until_ms - self._changes.now_ms)

    def _spent_ms(self, account: Account, pool: PoolSpec) -> int:
        """Return what is used up of the budget now, as it comes back evenly over a day."""
        passed_ms = self._changes.now_ms - account.pinned_at_ms
        back_ms = passed_ms if pool.pin_budget_ms is None else pool.pin_budget_ms * passed_ms // _DAY_MS
        return max(0, account.pinned_ms - back_ms)

    def _settle(self, account: Account, pool: PoolSpec) -> None:
        account.pinned_ms, account.pinned_at_ms = self._spent_ms(account, pool), self._changes.now_ms


def _too_long(duration_ms: int, pool: PoolSpec) -> str:
    if not pool.max_pin_ms:
        return f"pool {pool.name!r} allows no pins (max_pin is 0): ask the administrator"
    asked, most = format_duration(duration_ms), format_duration(pool.max_pin_ms)
    return f"a pin of {asked} was asked, pool {pool.name!r} allows {most} at a time: ask for that or less"
