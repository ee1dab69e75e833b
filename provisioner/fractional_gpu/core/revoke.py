"""Suspends leases that must leave their devices because a device is drained or becomes unavailable, or because their seat has ended.

Pins and minimum residency do not protect a lease from this. A lease that cannot be suspended, because of its process, its device or host
memory, stays until it can be.

**Drained devices.** Idle leases are suspended at once. Busy leases are suspended when they become idle, or at once if the administrator
asks for this.

**Ended seats.** The hub server is gone, but its kernels are still alive. A lease without a seat still counts toward its owner's limits, but
loses its guarantee, ticket and pin. It is suspended even in the middle of a cell, and is not resumed until it has another seat. After the
pool's `revoked_ttl_ms`, its processes are killed, which ends the lease.

**Devices that become unavailable at a deadline** (`Salvage`, `plan_saving`). The arbiter saves the most valuable leases it can. Idle leases
are saved at once, and busy leases as late as their swaps allow. Users are notified of what cannot be saved. After the deadline, the device
is drained like any other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import EndProcesses, UserNotice
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState, Span
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease, Reason, pause_ms
from fractional_gpu.core.suspend import lacks_device
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration, format_forecast, format_memory

REVOKED: Final = Reason(
    "seat-ended",
    "the seat of this kernel has ended: it cannot use a GPU until its user's "
    "server is started again with at least as large a share of the same pool",
)
"""The reason given when a request about a revoked lease is declined."""

_END_AGAIN_MS = 60_000  # after this, processes that are still alive are ended again


def drain(changes: Changes, device_id: str, *, evict_busy: bool, deadline_ms: int | None) -> None:
    """Begin to drain a device. `deadline_ms` is when the device becomes unavailable, or None if it stays available."""
    device = changes.books.devices.get(device_id)
    if device is None:
        return
    device.draining, device.evict_busy, device.deadline_ms = True, evict_busy, deadline_ms
    for lease in device.holders.values():
        _record_drain(changes, lease, device)


def undrain(books: Books, device_id: str) -> None:
    """Stop draining a device, so that leases can use it again."""
    device = books.devices.get(device_id)
    if device is not None:
        device.draining, device.evict_busy, device.deadline_ms = False, False, None


def _record_drain(changes: Changes, lease: Lease, device: Device) -> None:
    device_id = device.spec.device_id
    if device.deadline_ms is not None:
        left = format_duration(max(0, device.deadline_ms - changes.now_ms))
        sentence = f"device {device_id} goes away in {left}: kernels that can be saved in time are saved to host memory"
    else:
        when = "at once" if device.evict_busy or not lease.busy else "when its cell has ended"
        if lease.is_unsuspendable:
            when = f"as soon as it can be: {lease.unsuspendable_reason}"
        sentence = f"an administrator is emptying device {device_id}: the kernel is suspended {when}"
    changes.record(lease.lease_id, "drain.begun", sentence)


def revoke(changes: Changes, lease: Lease, since_ms: int) -> None:
    """Revoke a lease whose seat has ended. The caller must end the lease's pin first."""
    books = changes.books
    if lease.revoked:
        return
    if lease.state is LeaseState.UNATTACHED:
        changes.end(lease, Cause.RELEASED, "seat-ended")
        return
    if lease.gate.ticket is not None:
        books.set_gate(lease, closed=True)
    if lease.ticket is not None and lease.ticket.resize_to is None:
        changes.forecast_recorder.ticket_ended(lease, given_up=True)
    changes.withdraw_ticket(lease)
    changes.forget_expectation(lease)
    ends_ms = min(since_ms, changes.now_ms) + books.policy(lease).revoked_ttl_ms
    books.revoke(lease, ends_ms)
    left = format_duration(max(0, ends_ms - changes.now_ms))
    changes.record(
        lease.lease_id,
        "seat-ended",
        f"the seat of its server has ended: it is suspended, and its processes will be ended in {left} unless its user's server "
        "is started again",
    )


def reinstate(changes: Changes, lease: Lease, seat: str) -> None:
    """Reinstate a revoked lease that has a new seat. If its kernel is busy without a device, file a ticket for it."""
    if not lease.revoked:
        return
    changes.books.reinstate(lease, replace(lease.spec, seat=seat))
    changes.record(lease.lease_id, "seat-renewed", "the next seat of its user's server has taken it over")
    changes.requeued.add(lease.spec.pool)
    if lease.state is not LeaseState.RESIDENT and lease.busy:  # including a lease with processes left behind
        changes.file_ticket(lease, preempted=True)


def suspend_leaving(changes: Changes) -> None:
    for device in changes.books.draining:
        if device.deadline_ms is not None and device.deadline_ms > changes.now_ms:
            continue  # `Salvage` decides
        for lease in list(device.holders.values()):
            may_interrupt = device.evict_busy or not lease.busy
            if may_interrupt and not changes.books.goes_away(lease, later=True):
                _suspend_if_ready(changes, lease, "suspend.drain", "an administrator is emptying its device")
    for lease in [one for one in changes.books.leases.values() if one.revoked]:
        _suspend_if_ready(changes, lease, "suspend.seat-ended", "the seat of its server has ended")


def _suspend_if_ready(changes: Changes, lease: Lease, reason: str, sentence: str) -> None:
    if not changes.channel_free or not _can_be_saved(changes, lease):
        return
    if not changes.books.is_time(lease.retries.suspend_after_ms):
        return
    if lease.host_need_mib <= changes.books.host_left_mib:
        changes.begin_suspend(lease, reason, sentence)
    else:
        changes.ask_to_shrink(lease)


def end_processes_if_due(changes: Changes, lease: Lease) -> None:
    """End the processes of a revoked lease once the pool's `revoked_ttl_ms` has passed."""
    now_ms = changes.now_ms
    if lease.ends_ms is None or lease.ends_ms > now_ms:
        return
    lease.ends_ms = now_ms + _END_AGAIN_MS
    sentence = "its seat has ended and no new one took it over in the time its pool allows: its processes are ended"
    changes.record(lease.lease_id, "seat-ended.over", sentence)
    changes.effects.append(EndProcesses(lease_id=lease.lease_id))


def _can_be_saved(changes: Changes, lease: Lease) -> bool:
    is_resident = lease.state is LeaseState.RESIDENT
    return is_resident and not lease.is_unsuspendable and not lacks_device(changes.books, lease)


# -- saving before a deadline ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A lease to save before its device becomes unavailable. Times are in ms on the arbiter's clock."""

    lease_id: str
    value: int  # 1 or more
    swap_ms: int  # predicted duration of its suspend
    deadline_ms: int  # when it must be saved
    from_ms: int = 0  # when its suspend may begin; later than now if one has failed
    cautious_ms: int = 0  # upper bound of its suspend; it begins this early if there is time
    host_mib: int = 0
    busy: bool = False  # its suspend interrupts a cell

    @property
    def density(self) -> tuple[int, str]:
        """A sort key that puts the highest value per ms first, so that little is lost if suspends take longer than predicted."""
        return -(self.value << 20) // max(1, self.swap_ms), self.lease_id

    @property
    def urgency(self) -> tuple[int, bool, int, str]:
        """A sort key for ordering by deadline, then idle leases before busy ones, then by value per ms."""
        return self.deadline_ms, self.busy, *self.density


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for saving leases: their order on each swap channel, their latest start times, and the leases that will be lost."""

    channels: list[list[Candidate]] = field(default_factory=list)
    latest_ms: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # by lease, what is too short: "time" or "host-memory"

    @property
    def saved(self) -> list[Candidate]:
        return _in_order(one for channel in self.channels for one in channel)


MARGIN_MS = 500
"""The margin left before each deadline, so that the report of a finished suspend arrives in time."""

LEAST_RETRY_MS = 250
"""The shortest pause between a failed suspend and the next attempt."""

_LOST = "revocation.lost"
_INTERRUPTED = "revocation.interrupts"

_SAVE_TO_DISK = (
    "Save what you need to disk now: results, models, tables. The notebook itself is safe; "
    "anything that is only in the kernel's memory may be lost"
)


class Salvage:
    """Suspends leases before their devices become unavailable.

    The plan is recomputed at every event, so it adapts at once when a cell ends or a swap takes longer than predicted. Planned suspends
    take precedence: another swap begins only if it will end before the next planned suspend has to begin.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._told: dict[str, str] = {}  # by lease, the reason code of the last notice to its user

    def save(self) -> None:
        """Begin suspends that are due, keep channels free for those due soon, and tell users what will be lost."""
        self._changes.kept_channels = 0
        self._books.unsaved.clear()
        if not self._books.draining and not self._told:
            return
        leases = {lease.lease_id: lease for lease in self._leases_to_save()}
        self._withdraw_notices(leases)
        while leases:
            plan = self._plan(leases)
            begun = self._begin_next(plan, leases)
            if begun is None:
                self._tell_users(plan, leases)
                self._keep_channels(plan)
                return
            del leases[begun]

    def _leases_to_save(self) -> Iterator[Lease]:
        """Yield the resident leases on devices with a drain deadline, and schedule a recheck at each deadline."""
        for device in self._books.draining:
            if device.deadline_ms is None or device.deadline_ms <= self._changes.now_ms:
                continue
            self._books.recheck_at(device.deadline_ms)
            for lease in device.holders.values():
                if lease.state is LeaseState.RESIDENT:
                    self._hasten_retry(lease)
                    yield lease

    def _hasten_retry(self, lease: Lease) -> None:
        """Make sure that a failed suspend is retried before the deadline, even if `retry_refused_ms` is longer. This is idempotent.

        The pause doubles with each failure, up to half of the time left to begin the suspend, so that there is time for a last attempt.
        """
        retries, now_ms = lease.retries, self._changes.now_ms
        if retries.suspend_after_ms <= now_ms:
            return
        spare_ms = (self._books.deadline_ms(lease) or now_ms) - MARGIN_MS - self._swap_ms(lease, SUSPEND) - now_ms
        after_ms = now_ms + max(LEAST_RETRY_MS, pause_ms(max(0, retries.failed_suspends - 1), spare_ms // 2))
        retries.suspend_after_ms = min(retries.suspend_after_ms, after_ms)

    def _plan(self, leases: dict[str, Lease]) -> Plan:
        changes = self._changes
        candidates = [self._candidate(lease) for lease in leases.values() if _can_be_saved(changes, lease)]
        free_ms = [changes.now_ms] * max(0, changes.parallel_swaps - len(changes.operations))
        for operation in changes.operations.values():
            lease = self._books.leases.get(operation.lease_id)
            ends_ms = 0 if lease is None else operation.began_ms + self._swap_ms(lease, operation.kind)
            free_ms.append(max(changes.now_ms, ends_ms))
        return plan_saving(candidates, free_ms=free_ms, host_left_mib=self._books.host_left_mib)

    def _candidate(self, lease: Lease) -> Candidate:
        span = self._span(lease, SUSPEND)
        return Candidate(
            lease_id=lease.lease_id,
            value=value_of(lease.worked_ms, lease.spec.priority),
            swap_ms=self._swap_ms(lease, SUSPEND),
            # This is well above the bound that one in ten exceeds. An interrupted cell continues later, but a late lease is lost.
            cautious_ms=span.expected_ms + 2 * max(0, span.high_ms - span.expected_ms) + span.expected_ms // 4,
            deadline_ms=(self._books.deadline_ms(lease) or 0) - MARGIN_MS,
            from_ms=lease.retries.suspend_after_ms,
            host_mib=lease.host_need_mib,
            busy=lease.is_working,
        )

    def _swap_ms(self, lease: Lease, kind: str) -> int:
        """Return the predicted duration of a suspend or resume in ms, halfway between the expected value and the upper bound."""
        span = self._span(lease, kind)
        return max(1, span.expected_ms + max(0, span.high_ms - span.expected_ms) // 2)

    def _span(self, lease: Lease, kind: str) -> Span:
        device_kind = self._books.kind_of(lease.device_id or lease.home_id)
        mib = lease.saved_mib if kind == RESUME else lease.host_need_mib
        return self._books.forecasts.widest_swap_span(kind, device_kind, mib)

    def _begin_next(self, plan: Plan, leases: dict[str, Lease]) -> str | None:
        """Begin the next suspend that is due, if a channel is free. Return the id of its lease, or None if no suspend began."""
        if not self._changes.channel_free:
            return None
        now_ms, soonest_ms = self._changes.now_ms, None
        for one in plan.saved:
            lease, latest_ms = leases[one.lease_id], plan.latest_ms[one.lease_id]
            if one.from_ms > now_ms:
                self._books.recheck_at(one.from_ms)
            elif one.busy and latest_ms > now_ms and not self._evicts(lease):
                self._books.recheck_at(latest_ms)
                soonest_ms = latest_ms if soonest_ms is None else min(soonest_ms, latest_ms)
            elif one.busy or soonest_ms is None or now_ms + one.swap_ms <= soonest_ms:
                left = format_duration(max(0, one.deadline_ms + MARGIN_MS - now_ms))
                self._changes.begin_suspend(lease, "suspend.drain", f"its device goes away in {left}")
                return lease.lease_id
        return None

    def _evicts(self, lease: Lease) -> bool:
        """Return whether an administrator asked for one of the lease's devices to be emptied without waiting for cells to end."""
        devices = self._books.devices
        return any(devices[one].evict_busy for one in lease.device_ids if one in devices)

    def _keep_channels(self, plan: Plan) -> None:
        """Keep a swap channel free if another suspend or resume there could delay the channel's next planned suspend too long."""
        others = [
            self._swap_ms(lease, kind)
            for state, kind in ((LeaseState.SUSPENDED, RESUME), (LeaseState.RESIDENT, SUSPEND))
            for lease in self._books.in_state(state)
            if lease.lease_id not in plan.latest_ms
        ]
        longest_ms = max(others, default=0)
        for channel in plan.channels:
            if channel:
                keep_from_ms = min(plan.latest_ms[one.lease_id] for one in channel) - longest_ms
                self._changes.kept_channels += keep_from_ms <= self._changes.now_ms
                self._books.recheck_at(keep_from_ms)

    def _tell_users(self, plan: Plan, leases: dict[str, Lease]) -> None:
        """Notify each user once if a kernel's state cannot be saved in time, or if its cell may be paused."""
        saved = {one.lease_id for one in plan.saved}
        for lease in leases.values():
            left = format_duration(max(0, (self._books.deadline_ms(lease) or 0) - self._changes.now_ms))
            told = self._told.get(lease.lease_id)
            if lease.lease_id not in saved:
                if plan.lost.get(lease.lease_id) == "host-memory":
                    self._changes.ask_to_shrink(lease)
                self._books.unsaved[lease.lease_id] = why_not = self._why_not(lease, plan)
                if told != _LOST:
                    sentence = (
                        f"This kernel's GPU goes away in {left}, and its state cannot be saved by then: {why_not}. "
                        f"{_SAVE_TO_DISK}."
                    )
                    self._tell(lease, _LOST, sentence)
            elif lease.is_working and told is None:
                sentence = (
                    f"This kernel's GPU goes away in {left}. If its cell is still running shortly before that, it will be paused: its "
                    "state moves to host memory, and it continues when this kernel gets a GPU again."
                )
                self._tell(lease, _INTERRUPTED, sentence)

    def _why_not(self, lease: Lease, plan: Plan) -> str:
        if lease.is_unsuspendable:
            return lease.unsuspendable_reason
        if lacks_device(self._books, lease):
            return "its GPU is not responding"
        need = format_memory(lease.host_need_mib)
        if plan.lost.get(lease.lease_id) == "host-memory":
            left = format_memory(max(0, self._books.host_left_mib))
            return f"saving it takes {need} of host memory, but only {left} is left, and more valuable kernels are saved first"
        span = self._span(lease, SUSPEND)
        took = format_forecast(span.expected_ms, span.low_ms, span.high_ms)
        if failed := lease.retries.failed_suspends:
            times = "once" if failed == 1 else f"{failed} times"
            return f"saving it failed {times}, and there is not enough time for another attempt, which is expected to take {took}"
        return (
            f"saving {need} is expected to take {took}, and there is too little time, or more valuable kernels need it"
        )

    def _tell(self, lease: Lease, reason: str, sentence: str) -> None:
        self._told[lease.lease_id] = reason
        self._changes.effects.append(UserNotice(lease_id=lease.lease_id, reason=reason, sentence=sentence))
        self._changes.record(lease.lease_id, reason, sentence)

    def _withdraw_notices(self, leases: dict[str, Lease]) -> None:
        """Notify users if their device stays available after all, and forget notices about leases that have left their device."""
        for lease_id in [one for one in self._told if one not in leases]:
            lease = self._books.leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.SUSPENDING:
                continue  # the suspend may still fail
            if lease is not None and lease.state is LeaseState.RESIDENT:
                if self._books.goes_away(lease):
                    continue  # the deadline has passed, and the device is still there
                sentence = "This kernel's GPU will not go away after all: the notice was withdrawn."
                self._tell(lease, "revocation.withdrawn", sentence)
            del self._told[lease_id]


# -- what is saved, and when -------------------------------------------------------------------------------------------
# A swap channel saves one lease after another. So a set of leases can be saved if each suspend ends in time, in the order of their
# deadlines. Dynamic programming over time finds the most valuable set (Lawler and Moore 1969; with a single deadline this is the knapsack
# problem). With several channels, each takes the best set of the leases that the previous channels left. A suspend that cannot end in time
# never begins, because the user could not save anything to disk while it lasts.
#
# The work is bounded. With many leases, time is divided into coarser slots, and durations are rounded up to whole slots. Leases that this
# leaves out are then added wherever they fit. If the set needs more host memory than is left, only the most valuable subset that fits is
# kept.

_MOST_STEPS = 100_000  # per decision, about 20 ms
_LEAST_WORKED_MS = 60_000  # gives a value to a lease that has only loaded data, too
_MOST_PRIORITY_STEPS = 10


def value_of(worked_ms: int, priority: int) -> int:
    """Return a lease's value: one minute plus the time its cells have run on a device.

    The value doubles with each step of priority above 0, and halves with each step below 0.
    """
    steps = max(-_MOST_PRIORITY_STEPS, min(_MOST_PRIORITY_STEPS, priority))
    return max(1, (max(0, worked_ms) + _LEAST_WORKED_MS) << (_MOST_PRIORITY_STEPS + steps))


def plan_saving(candidates: Sequence[Candidate], *, free_ms: Sequence[int], host_left_mib: int) -> Plan:
    """Plan which leases to save. `free_ms` lists when each swap channel becomes free."""
    rest, channels, starts = _in_order(candidates), list[list[Candidate]](), sorted(free_ms)
    for start_ms in starts:
        chosen = _best_in_time(rest, start_ms)
        channels.append(chosen)
        rest = [one for one in rest if one not in chosen]
    # First drop leases that do not fit in host memory, then use the time that becomes free for leases that do fit.
    channels = _within_host_memory(channels, host_left_mib)
    _fill(channels, starts, candidates, host_left_mib)
    plan = Plan(channels)
    left_mib = host_left_mib - sum(one.host_mib for one in plan.saved)
    for channel in channels:
        plan.latest_ms.update(_latest_ms(channel))
    for one in candidates:
        if one.lease_id not in plan.latest_ms:
            lacks_memory = one.host_mib > left_mib and _ends_in_time([one], min(starts, default=0))
            plan.lost[one.lease_id] = "host-memory" if lacks_memory else "time"
    return plan


def _in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda one: one.urgency)


def _ends_in_time(ordered: Sequence[Candidate], start_ms: int) -> bool:
    """Return whether all these leases would meet their deadlines if saved one by one in this order."""
    for one in ordered:
        start_ms = max(start_ms, one.from_ms) + one.swap_ms
        if start_ms > one.deadline_ms:
            return False
    return True


def _best_in_time(ordered: Sequence[Candidate], start_ms: int) -> list[Candidate]:
    """Return the most valuable set of leases that one channel can save in time, in the order to save them."""
    if _ends_in_time(ordered, start_ms):
        return list(ordered)
    able = [one for one in ordered if _ends_in_time([one], start_ms)]
    if not able:
        return []
    dense: list[list[Candidate]] = [[]]
    _fill(dense, [start_ms], able, sum(one.host_mib for one in able))
    # The greedy fill can win only if the slots are coarse.
    return max(_best_in_slots(able, start_ms), dense[0], key=lambda chosen: sum(one.value for one in chosen))


def _best_in_slots(able: Sequence[Candidate], start_ms: int) -> list[Candidate]:
    """Return the most valuable set of leases that can be saved in time, with time divided into slots.

    `best[t]` is the highest value of leases that fill exactly t slots, or -1 if no leases do.
    """
    horizon_ms = able[-1].deadline_ms - start_ms
    slot_ms = max(1, -(-horizon_ms * len(able) // _MOST_STEPS))
    slots = horizon_ms // slot_ms
    best, taken = [0] + [-1] * slots, list[list[bool]]()
    # If the suspend of a lease may only begin later, the wait of its channel counts as part of the suspend.
    lengths = [-(-(max(0, one.from_ms - start_ms) + one.swap_ms) // slot_ms) for one in able]
    for one, length in zip(able, lengths, strict=True):
        took, value = [False] * (slots + 1), one.value
        until = (one.deadline_ms - start_ms) // slot_ms
        for place, before in enumerate(best[: max(0, until - length + 1)], start=length):
            if before >= 0 and before + value > best[place]:
                best[place], took[place] = before + value, True
        taken.append(took)
    place = max(range(slots + 1), key=lambda place: (best[place], -place))
    chosen = list[Candidate]()
    for one, length, took in zip(reversed(able), reversed(lengths), reversed(taken), strict=True):
        if took[place]:
            chosen.append(one)
            place -= length
    return chosen[::-1]


def _within_host_memory(channels: list[list[Candidate]], left_mib: int) -> list[list[Candidate]]:
    """Drop leases so that the rest fit in host memory and are worth as much as possible.

    This uses `_best_in_time` with memory instead of time.
    """
    chosen = [one for channel in channels for one in channel]
    if sum(one.host_mib for one in chosen) <= left_mib:
        return channels
    as_time = [
        Candidate(lease_id=one.lease_id, value=one.value, swap_ms=max(1, one.host_mib), deadline_ms=max(0, left_mib))
        for one in chosen
    ]
    kept = {one.lease_id for one in _best_in_time(_in_order(as_time), 0)}
    return [[one for one in channel if one.lease_id in kept] for channel in channels]


def _fill(
    channels: list[list[Candidate]], starts: Sequence[int], candidates: Sequence[Candidate], left_mib: int
) -> None:
    """Add candidates that have been left out, if time and host memory allow. Candidates with the highest value per ms come first."""
    kept = {one.lease_id for channel in channels for one in channel}
    left_mib -= sum(one.host_mib for channel in channels for one in channel)
    for one in sorted(candidates, key=lambda one: one.density):
        if one.lease_id in kept or one.host_mib > left_mib:
            continue
        for place, start_ms in enumerate(starts):
            longer = _in_order([*channels[place], one])
            if _ends_in_time(longer, start_ms):
                channels[place] = longer
                left_mib -= one.host_mib
                break


def _latest_ms(channel: Sequence[Candidate]) -> dict[str, int]:
    """Return the latest time at which each of the channel's suspends can start, by lease."""
    found, after_ms = dict[str, int](), None
    for one in reversed(channel):
        ends_ms = one.deadline_ms if after_ms is None else min(one.deadline_ms, after_ms)
        found[one.lease_id] = after_ms = ends_ms - max(one.swap_ms, one.cautious_ms)
    return found
