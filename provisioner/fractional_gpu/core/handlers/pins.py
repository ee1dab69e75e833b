"""Pins: for a while a lease is not suspended for others, nor for being idle.

A pin costs its owner's budget in the pool, which comes back evenly over a day; what is left of a pin that ends early comes back at once.
The end of a pin is a deadline like others. A request to suspend the lease ends its pin; a drained device ignores it.
"""

from fractional_gpu.core.books.books import Lease
from fractional_gpu.core.books.records import Account
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.effects import Pinned
from fractional_gpu.core.handlers.revocation import REVOKED
from fractional_gpu.core.model import LeaseState, PoolSpec
from fractional_gpu.core.units import format_duration

__all__ = ["Pins"]

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
        return f"pool {pool.name!r} lets nobody pin a kernel: ask the administrator"
    asked, most = format_duration(duration_ms), format_duration(pool.max_pin_ms)
    return f"a pin of {asked} was asked, pool {pool.name!r} allows {most} at a time: ask for that or less"
