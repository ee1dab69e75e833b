"""Expectations of cells: signs that a suspended kernel's next cell is near, and how much they are worth.

A front end that sees a person come back to a notebook tells so, and the kernel when a completion or a widget's message reaches it; the
lease's own rhythm is a sign, too. An expectation is what the signs of one lease say together, until its time is over, when all were wrong,
or a cell comes, when all were right. That is learnt for each lease and kind of sign, whatever was done for it. A suspend that was asked for
is taken at its word: no sign brings the lease back, only a cell.

What is done for an expected lease is in `foresight`: it comes back early. On its device, it is a dear victim, and not suspended for idling.
"""

from fractional_gpu.core.books.records import Expectation, Lease
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.events import Expected
from fractional_gpu.core.model import Foresight, LeaseState, Sign
from fractional_gpu.core.rules.likelihood import is_expected

LONGEST_MS = 600_000
"""An expectation lasts no longer than this from its last sign on."""


class Expectations:
    """Takes signs, and what became of them."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def seen(self, lease: Lease, event: Expected) -> bool:
        """Take a sign. Returns whether any decision depends on it."""
        return self._take(lease, event.sign, event.until_ms, event.confidence_milli)

    def _take(self, lease: Lease, sign: Sign, until_ms: int, confidence_milli: int) -> bool:
        books, now_ms = self._books, self._changes.now_ms
        until_ms = min(until_ms, now_ms + LONGEST_MS)
        if until_ms <= now_ms or not self._may_expect(lease):
            return False
        known, was_expected = lease.expectation, is_expected(books, lease)
        if known is None:
            known = lease.expectation = Expectation(until_ms=until_ms, best=sign)
        known.until_ms = max(known.until_ms, until_ms)
        known.signs[sign] = max(0, min(1000, confidence_milli))
        # By the best of its signs, none trusted beyond what it has shown.
        forecasts = books.forecasts
        milli = {one: min(sure, forecasts.sign_milli(lease.lease_id, one)) for one, sure in known.signs.items()}
        known.best = max(milli, key=lambda one: milli[one])
        known.milli = milli[known.best]
        books.expected[lease.lease_id] = lease
        books.mark_changed(lease)
        expected = is_expected(books, lease)
        return (expected and lease.state is LeaseState.SUSPENDED) or (was_expected and not expected)

    def _may_expect(self, lease: Lease) -> bool:
        """Return whether a sign means anything now. A suspended kernel that is busy without a ticket handles a completion or the like."""
        runs = lease.busy and lease.state is not LeaseState.SUSPENDED
        if runs or lease.ticket is not None or lease.left_behind or lease.revoked or lease.sent_away:
            return False
        return self._books.policy(lease).foresight is not Foresight.OFF

    def came_true(self, lease: Lease) -> None:
        """Note that a cell of the lease came, or asks to: what was moved for it was not in vain."""
        if lease.came_early:
            lease.came_early = False
            for device in self._books.devices.values():
                device.stakes = [stake for stake in device.stakes if stake.lease_id != lease.lease_id]
        self._settle(lease, true=True)

    def take_due(self, lease: Lease) -> None:
        """End an expectation whose time is over, or begin one whose time has come."""
        now_ms, known = self._changes.now_ms, lease.expectation
        if known is not None and known.until_ms <= now_ms:
            self._settle(lease, true=False)
            self.await_rhythm(lease)
        if lease.rhythm_ms is not None and lease.rhythm_ms <= now_ms:
            lease.rhythm_ms = None
            rhythm = self._books.forecasts.rhythm(lease.lease_id, now_ms)
            if rhythm is not None and rhythm.from_ms <= now_ms:
                self._take(lease, Sign.RHYTHM, rhythm.until_ms, rhythm.chance_milli)
            self._books.mark_changed(lease)

    def await_rhythm(self, lease: Lease) -> None:
        """Find when the lease's own rhythm makes its next cell likely."""
        if lease.state is not LeaseState.SUSPENDED or self._books.policy(lease).foresight is Foresight.OFF:
            return
        rhythm = self._books.forecasts.rhythm(lease.lease_id, self._changes.now_ms)
        lease.rhythm_ms = None if rhythm is None else max(rhythm.from_ms, self._changes.now_ms + 1)
        self._books.mark_changed(lease)

    def _settle(self, lease: Lease, *, true: bool) -> None:
        known = lease.expectation
        if known is None:
            return
        for sign in known.signs:
            self._books.forecasts.sign_settled(lease.lease_id, sign, true=true)
        self._changes.forget_expectation(lease)
