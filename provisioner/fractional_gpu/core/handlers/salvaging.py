"""Saving what can be saved before a device goes away: a drain with a deadline.

`rules.salvage` says what is saved, in which order and from when on; the plan is made anew in every event, so a cell that ends, a swap that
takes longer than predicted or a second device changes it at once. Pins do not protect from it, nor does minimum residency.

- Swap channels are for leases on such devices first: another swap begins only if the next planned suspend can wait for its end.
- A user is told once (`UserTold`) that the kernel cannot be saved in time, or that its cell will be interrupted for the save.
- A suspend that failed is tried again after a second, twice as long each time, but never after more than half of the time in which the
  save can still begin: the last attempt comes when there is just time for it. The pool's `retry_refused` does not delay it.
- From the deadline on the device is drained like any other.
"""

from collections.abc import Iterator

from fractional_gpu.core.books.records import Lease
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.effects import UserTold
from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState, Span
from fractional_gpu.core.rules.eligibility import lacks_device
from fractional_gpu.core.rules.salvage import Candidate, Plan, plan_saving, value_of
from fractional_gpu.core.units import format_duration, format_forecast, format_memory

MARGIN_MS = 500
"""Kept free before each deadline: what is between the end of a suspend and the news of it, and the like."""

LEAST_RETRY_MS = 250
"""The shortest pause between a suspend that failed and the next attempt."""
_FIRST_RETRY_MS = 1_000
_MOST_DOUBLINGS = 16

_LOST = "revocation.lost"
_LATER = "revocation.interrupts"
_SAVE_TO_DISK = (
    "Save to disk now what must not be lost: results, models, tables; the notebook itself is safe. "
    "What is only in the kernel's memory may be gone then"
)


class Salvage:
    """Begins suspends before deadlines. `recheck_ms`: when time alone lets, or makes, another one begin."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._told: dict[str, str] = {}  # reason of what the lease's user was told last
        self.recheck_ms: int | None = None

    def save(self) -> None:
        """Begin the suspends that are to begin now, keep channels for those that are to begin soon, and tell users what is lost."""
        self.recheck_ms, self._changes.kept_channels = None, 0
        self._books.unsaved.clear()
        if not self._books.draining and not self._told:
            return
        leases = {lease.lease_id: lease for lease in self._leases()}
        self._withdraw(leases)
        while leases:
            plan = self._plan(leases)
            begun = self._begin_next(plan, leases)
            if begun is None:
                self._tell(plan, leases)
                self._keep_channels(plan)
                return
            del leases[begun]

    # -- which leases ----------------------------------------------------------------------------------------------------------

    def _leases(self) -> Iterator[Lease]:
        """Yield resident leases whose device goes away, each once, and note the next deadline."""
        found = set[str]()
        for device in self._books.draining.values():
            if device.deadline_ms is None or device.deadline_ms <= self._changes.now_ms:
                continue
            self._recheck(device.deadline_ms)
            for lease in device.holders.values():
                if lease.state is LeaseState.RESIDENT and lease.lease_id not in found:
                    found.add(lease.lease_id)
                    self._hasten_retry(lease)
                    yield lease

    def _hasten_retry(self, lease: Lease) -> None:
        """Shorten the pause after a failed suspend, so that the next attempt can end before the deadline. Repeated, it changes nothing."""
        retries, now_ms = lease.retries, self._changes.now_ms
        if retries.suspend_after_ms <= now_ms:
            return
        spare_ms = (self._books.deadline_ms(lease) or now_ms) - MARGIN_MS - self._swap_ms(lease, SUSPEND) - now_ms
        step_ms = _FIRST_RETRY_MS << min(max(0, retries.failed_suspends - 1), _MOST_DOUBLINGS)
        after_ms = now_ms + max(LEAST_RETRY_MS, min(step_ms, spare_ms // 2))
        if after_ms < retries.suspend_after_ms:
            retries.suspend_after_ms = after_ms
            self._books.mark_changed(lease)

    def _can_be_saved(self, lease: Lease) -> bool:
        return not lease.is_unsuspendable and not lacks_device(self._books, lease)

    def _plan(self, leases: dict[str, Lease]) -> Plan:
        changes = self._changes
        candidates = [self._candidate(lease) for lease in leases.values() if self._can_be_saved(lease)]
        free_ms = [
            self._ends_ms(operation.lease_id, operation.kind, operation.began_ms)
            for operation in changes.operations.values()
        ]
        free_ms += [changes.now_ms] * max(0, changes.parallel_swaps - len(free_ms))
        return plan_saving(candidates, free_ms=free_ms, host_left_mib=self._books.host_left_mib)

    def _candidate(self, lease: Lease) -> Candidate:
        return Candidate(
            lease_id=lease.lease_id,
            value=value_of(lease.worked_ms, lease.spec.priority),
            swap_ms=self._swap_ms(lease, SUSPEND),
            cautious_ms=self._cautious_ms(lease),
            deadline_ms=(self._books.deadline_ms(lease) or 0) - MARGIN_MS,
            from_ms=lease.retries.suspend_after_ms,
            host_mib=lease.host_need_mib,
            busy=lease.is_working,
        )

    def _swap_ms(self, lease: Lease, kind: str) -> int:
        """Return how long a swap of the lease is predicted to take: half way from the expected value to the upper bound."""
        span = self._span(lease, kind)
        return max(1, span.expected_ms + max(0, span.high_ms - span.expected_ms) // 2)

    def _cautious_ms(self, lease: Lease) -> int:
        """Return what its suspend hardly ever takes longer than: twice as far up as the bound that one of ten exceeds, and more."""
        span = self._span(lease, SUSPEND)
        return span.expected_ms + 2 * max(0, span.high_ms - span.expected_ms) + span.expected_ms // 4

    def _span(self, lease: Lease, kind: str) -> Span:
        device = self._books.devices.get(lease.device_id or lease.home_id or "")
        mib = lease.saved_mib if kind == RESUME else lease.host_need_mib
        return self._books.forecasts.widest_swap_span(kind, device.spec.name if device is not None else "", mib)

    def _ends_ms(self, lease_id: str, kind: str, began_ms: int) -> int:
        lease, now_ms = self._books.leases.get(lease_id), self._changes.now_ms
        return now_ms if lease is None else max(now_ms, began_ms + self._swap_ms(lease, kind))

    # -- what begins -----------------------------------------------------------------------------------------------------------

    def _begin_next(self, plan: Plan, leases: dict[str, Lease]) -> str | None:
        """Begin the next suspend that is to begin now, if a channel is free; return its lease."""
        if not self._changes.channel_free:
            return None
        now_ms, soonest_ms = self._changes.now_ms, None
        for one in plan.saved:
            lease, latest_ms = leases[one.lease_id], plan.latest_ms[one.lease_id]
            if lease.retries.suspend_after_ms > now_ms:
                self._recheck(lease.retries.suspend_after_ms)
            elif one.busy and latest_ms > now_ms and not self._evicts(lease):
                self._recheck(latest_ms)
                soonest_ms = latest_ms if soonest_ms is None else min(soonest_ms, latest_ms)
            elif one.busy or soonest_ms is None or now_ms + one.swap_ms <= soonest_ms:
                left = format_duration(max(0, one.deadline_ms + MARGIN_MS - now_ms))
                self._changes.begin_suspend(lease, "suspend.drain", f"its device goes away in {left}")
                return lease.lease_id
        return None

    def _evicts(self, lease: Lease) -> bool:
        """Return whether an administrator said not to wait for its cell."""
        draining = self._books.draining
        return any(draining[one].evict_busy for one in lease.device_ids if one in draining)

    def _keep_channels(self, plan: Plan) -> None:
        """Keep a channel for each whose next planned suspend could not wait for the end of the longest other swap."""
        if not any(plan.channels):
            return
        others = [
            self._swap_ms(lease, kind)
            for state, kind in ((LeaseState.SUSPENDED, RESUME), (LeaseState.RESIDENT, SUSPEND))
            for lease in self._books.by_state[state].values()
            if lease.lease_id not in plan.latest_ms
        ]
        longest_ms = max(others, default=0)
        for channel in plan.channels:
            if channel:
                keep_from_ms = min(plan.latest_ms[one.lease_id] for one in channel) - longest_ms
                self._changes.kept_channels += keep_from_ms <= self._changes.now_ms
                self._recheck(keep_from_ms)

    def _recheck(self, at_ms: int) -> None:
        if at_ms > self._changes.now_ms and (self.recheck_ms is None or at_ms < self.recheck_ms):
            self.recheck_ms = at_ms

    # -- what users are told ---------------------------------------------------------------------------------------------------

    def _tell(self, plan: Plan, leases: dict[str, Lease]) -> None:
        saved = {one.lease_id for one in plan.saved}
        for lease in leases.values():
            left = format_duration(max(0, (self._books.deadline_ms(lease) or 0) - self._changes.now_ms))
            if lease.lease_id not in saved:
                if plan.lost.get(lease.lease_id) == "host-memory":
                    self._changes.ask_to_shrink(lease)
                self._books.unsaved[lease.lease_id] = why_not = self._why_not(lease, plan)
                sentence = (
                    f"The GPU of this kernel goes away in {left}, and its state cannot be saved before: {why_not}. "
                    f"{_SAVE_TO_DISK}."
                )
                self._tell_once(lease, _LOST, sentence)
            elif lease.is_working:
                sentence = (
                    f"The GPU of this kernel goes away in {left}. If its cell has not ended shortly before, the cell is interrupted: its "
                    "state moves to host memory, and it goes on when this kernel gets a GPU again."
                )
                self._tell_once(lease, _LATER, sentence)

    def _why_not(self, lease: Lease, plan: Plan) -> str:
        if lease.is_unsuspendable:
            return lease.unsuspendable_reason
        if lacks_device(self._books, lease):
            return "its device answers nothing"
        need = format_memory(lease.host_need_mib)
        if plan.lost.get(lease.lease_id) == "host-memory":
            left = format_memory(max(0, self._books.host_left_mib))
            return f"it takes {need} of host memory, of which {left} are left, and what is worth more is saved first"
        span = self._span(lease, SUSPEND)
        took = format_forecast(span.expected_ms, span.low_ms, span.high_ms)
        if failed := lease.retries.failed_suspends:
            times = "once" if failed == 1 else f"{failed} times"
            return f"saving it failed {times}, and the time is too short for another attempt, which is expected to take {took}"
        return (
            f"saving {need} is expected to take {took}, and the time is needed for what is worth more, or is too short"
        )

    def _tell_once(self, lease: Lease, reason: str, sentence: str) -> None:
        if self._told.get(lease.lease_id) in {reason, _LOST}:
            return
        self._told[lease.lease_id] = reason
        self._tell_now(lease, reason, sentence)

    def _tell_now(self, lease: Lease, reason: str, sentence: str) -> None:
        self._changes.effects.append(UserTold(lease_id=lease.lease_id, reason=reason, sentence=sentence))
        self._changes.record(lease.lease_id, reason, sentence)

    def _withdraw(self, leases: dict[str, Lease]) -> None:
        """Tell those whose device stays after all; forget those that have left it."""
        for lease_id in [one for one in self._told if one not in leases]:
            lease = self._books.leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.SUSPENDING:
                continue  # that may fail
            if lease is not None and lease.state is LeaseState.RESIDENT:
                if self._books.goes_away(lease):
                    continue  # the deadline has passed, and the device is still there
                sentence = "The GPU of this kernel does not go away after all: the notice was withdrawn."
                self._tell_now(lease, "revocation.withdrawn", sentence)
            del self._told[lease_id]
