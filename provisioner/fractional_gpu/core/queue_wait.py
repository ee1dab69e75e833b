"""How long a ticket will still wait: a play-through of the queue ahead of it, on what the devices are expected to give back.

**What a device gives back.** Each device has free memory and a list of returns, one for each lease there: an idle lease gives its memory
back when it may be suspended, a busy one when its cell is expected to end or it may be preempted, one that is being suspended when that
is done; one that cannot be suspended, never.

**The play.** Tickets are served in order: first those that need nothing of a busy lease or that room is kept for, then the others, as the
arbiter lets small tickets pass. Each takes the device where it can be brought in first, waits for the swaps ahead of it and its own, and
gives its memory back after a cell of its own. Swap channels are a heap of the times at which each has nothing more to do.

**Bounds.** The first `MOST_AHEAD` tickets are played, each on the `MOST_DEVICES` devices that have most to give, with `MOST_HOLDERS` leases
each. A ticket further back waits in proportion. What a device gives back is computed anew only after a change there, or a second. What is
left out here (tickets overtake each other) `Forecasts.wait_span` corrects by how such results turned out before.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import islice
from typing import NamedTuple

from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND, Company, Forecasts, WaitSpan
from fractional_gpu.core.model import LeaseState, Span
from fractional_gpu.core.place import allowed_devices, beside, busy_others
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, OccupancyKind, ShownForecast, Ticket
from fractional_gpu.core.suspend import gate_opens_ms, preempts_from_ms, suspendable_from_ms

MOST_AHEAD = 4


MOST_DEVICES = 3


MOST_HOLDERS = 16


_FRESH_MS = 1_000


_NEVER_MS = 1 << 40


_UNPREDICTABLE = frozenset({"wait.user-limit", "wait.group-limit"})  # it is unknown when a user's own kernels make room


class _Wait(NamedTuple):
    """A wait as it is worked out: what decides it, its length, and the kind of device that the ticket gets."""

    kind: str  # "swap" or "busy"
    ms: int
    device_name: str


_LATER = _Wait("", -1, "")


_Return = tuple[int, int, int]
"""What a lease gives back: in how many ms, MiB, and how many ms its suspend takes.

A suspend under way has a negative time, so that it sorts before all others: the arbiter uses such room first.
"""


@dataclass(slots=True)
class _Known:
    """What a device gives back, as computed at `at_ms`, when its books had these `sums`."""

    sums: tuple[int, ...]
    at_ms: int
    returns: list[_Return]


@dataclass(slots=True)
class _Outlook:
    """What is free of a device and what it gives back, soonest first, in one play of the queue."""

    free_mib: int
    returns: list[_Return]
    calm_mib: int  # what is free, and what leases that are not busy give back


@dataclass(frozen=True, slots=True)
class _Way:
    """How a ticket gets in on a device: the returns in the places `taken` make room by `room_ms`, after `swaps`."""

    device_id: str
    room_ms: int
    swaps: tuple[tuple[int, int], ...]  # suspends: from when on, and how long, ms
    taken: tuple[int, ...]
    busy: bool  # some of the room is what cells give back


class QueueWaitForecast:
    """Forecasts the waits of tickets, where `parallel_swaps` operations run at a time."""

    def __init__(self, books: Books, forecasts: Forecasts, *, parallel_swaps: int = 1) -> None:
        self._books, self._forecasts, self._parallel_swaps = books, forecasts, parallel_swaps
        self._known: dict[str, _Known] = {}

    def wait_of(self, lease: Lease) -> WaitSpan | None:
        """Return how long the lease's ticket will still wait; None: it has none, or its wait cannot be forecast."""
        if lease.ticket is None:
            return None
        books = self._books
        line = books.line(lease.spec.pool)
        place = line.index(lease)
        last = line[: place + 1] if place <= MOST_AHEAD else [*line[:MOST_AHEAD], lease]
        found = self._play(last)[-1]
        if found is None:
            return None
        return self._forecasts.wait_span(found.kind, found.ms * (place + 1) // len(last), found.device_name)

    def waits_of_pool(self, pool: str) -> list[WaitSpan | None]:
        """Return the waits of a pool's queue, in order; those far back in proportion to the last one that was played."""
        line = self._books.line(pool)
        played = line[: MOST_AHEAD + 1]
        found = self._play(played)
        waits = [None if one is None else self._forecasts.wait_span(*one) for one in found]
        known = [one for one in found if one is not None]
        for place, lease in enumerate(line[len(played) :], len(played)):
            predictable = bool(known) and _is_predictable(lease)
            basis_ms = known[-1].ms * (place + 1) // len(played) if predictable else 0
            waits.append(self._forecasts.wait_span("busy", basis_ms, known[-1].device_name) if predictable else None)
        return waits

    def gate_wait(self, lease: Lease) -> Span | None:
        """Return how long the lease's next cell waits at its closed gate, at most until that opens; None: it does not wait there."""
        if lease.gate.ticket is None:
            return None
        opens_ms = gate_opens_ms(self._books, lease, lease.gate.ticket.asked_ms) - self._books.now_ms
        left_ms = max(0, opens_ms, _Play(self._books, self._forecasts, self._known, self._parallel_swaps).channel_ms)
        return Span(expected_ms=left_ms, low_ms=0, high_ms=left_ms)

    def _play(self, line: Sequence[Lease]) -> list[_Wait | None]:
        return _Play(self._books, self._forecasts, self._known, self._parallel_swaps).play(line)


class _Play:
    """One play of a pool's queue. Times are ms from now."""

    def __init__(self, books: Books, forecasts: Forecasts, known: dict[str, _Known], parallel_swaps: int) -> None:
        self._books, self._forecasts, self._now_ms = books, forecasts, books.now_ms
        self._known = known
        self._outlooks: dict[str, _Outlook] = {}
        self._rich: dict[tuple[str, ...], Sequence[str]] = {}
        swapping = (LeaseState.SUSPENDING, LeaseState.RESUMING)
        left = [self._swap_left_ms(lease) for lease in books.in_state(*swapping)]
        idle = [0] * (parallel_swaps - len(left))  # of a channel that is in use, only the rest of its swap is known
        self._channels = sorted([*idle, *left])[
            :parallel_swaps
        ]  # a heap: when each swap channel has nothing more to do

    @property
    def channel_ms(self) -> int:
        """When the first swap channel is free."""
        return self._channels[0]

    def play(self, line: Sequence[Lease]) -> list[_Wait | None]:
        """Serve the tickets that need nothing of a busy lease, or have room kept, then the others; return each wait, None: no forecast."""
        found: dict[int, _Wait | None] = {}
        for patient in (False, True):
            for place, lease in enumerate(line):
                if place not in found:
                    served = self._serve(lease, patient=patient)
                    if served is not _LATER:
                        found[place] = served
        return [found[place] for place in range(len(line))]

    def _serve(self, lease: Lease, *, patient: bool) -> _Wait | None:
        """Bring the lease in; return its wait. `_LATER`: it is the turn of patient tickets only."""
        ticket = lease.ticket
        if lease.state is LeaseState.RESUMING:
            return _Wait("swap", self._swap_left_ms(lease), self._name(lease.device_id))
        if ticket is None or not _is_predictable(lease):
            return None
        devices = self._richest(lease)
        need_mib = ticket.extra_mib if ticket.resize_to is not None else lease.need_mib
        if not patient and not ticket.kept_on:  # the first round: from memory that no busy lease has to give back
            devices = [device_id for device_id in devices if self._outlook(device_id, lease).calm_mib >= need_mib]
            if len(devices) < lease.count:
                return _LATER
        # Each device's way of making room, the quickest first; a lease on several devices takes as many.
        possible = (self._way(device_id, need_mib, lease) for device_id in devices)
        ways = sorted(
            (way for way in possible if way is not None),
            key=self._takes_ms,
        )[: lease.count]
        if len(ways) < lease.count:
            return None
        busy = any(way.busy for way in ways)
        if busy and not patient and not ticket.kept_on:
            return _LATER
        ready_ms = self._swap(ways, lease)
        for way in ways:
            self._take(way, lease, need_mib, ready_ms)
        return _Wait("busy" if busy else "swap", ready_ms, self._name(ways[0].device_id))

    def _takes_ms(self, way: _Way) -> tuple[int, int]:
        """Return about when a way lets its ticket in, to choose between several."""
        at_once = min(len(self._channels), max(1, len(way.swaps)))
        return (max(way.room_ms, self._channels[0]) + sum(ms for _, ms in way.swaps) // at_once, way.room_ms)

    def _swap(self, ways: Sequence[_Way], lease: Lease) -> int:
        """Play the suspends and the resume through the channels, none of which waits for a cell's end; return when the lease is in."""
        channels, done_ms = self._channels, max(way.room_ms for way in ways)
        for at_ms, takes_ms in sorted(swap for way in ways for swap in way.swaps):
            free_ms = channels[0]
            heapreplace(channels, free_ms + takes_ms)
            done_ms = max(done_ms, max(free_ms, at_ms) + takes_ms)
        resume_ms = self._resume_ms(lease, ways[0].device_id)
        if resume_ms:
            retry_ms = lease.retries.resume_after_ms - self._now_ms
            free_ms = channels[0]
            heapreplace(channels, free_ms + resume_ms)
            done_ms = max(done_ms, free_ms, retry_ms) + resume_ms
        return done_ms

    def _way(self, device_id: str, need_mib: int, lease: Lease) -> _Way | None:
        """Return how to make room there by the earliest returns, each of them needed; None: there are not enough."""
        outlook = self._outlook(device_id, lease)
        returns, room_mib, last = outlook.returns, outlook.free_mib, 0
        while room_mib < need_mib:
            if last == len(returns):
                return None
            room_mib += returns[last][1]
            last += 1
        # The latest returns first: one whose memory is not needed, because a larger return follows it, is left out.
        taken: list[int] = []
        swaps: list[tuple[int, int]] = []
        room_ms, busy = 0, False
        for place in range(last - 1, -1, -1):
            at_ms, mib, swap_ms = returns[place]
            if room_mib - mib >= need_mib:
                room_mib -= mib
            else:
                taken.append(place)
                room_ms, busy = max(room_ms, abs(at_ms)), busy or at_ms > 0
                if swap_ms:
                    swaps.append((at_ms, swap_ms))
        return _Way(device_id, room_ms, tuple(swaps), tuple(taken), busy)

    def _take(self, way: _Way, lease: Lease, need_mib: int, ready_ms: int) -> None:
        """Give the room to the ticket's lease, which gives it back after a cell of its own."""
        outlook = self._outlooks[way.device_id]
        for place in way.taken:  # from the last to the first, so that the places before stay valid
            outlook.free_mib += outlook.returns.pop(place)[1]
        outlook.free_mib -= need_mib
        outlook.calm_mib -= need_mib
        # The lease is a neighbour like any other from now on: later tickets may count on the end of its cell.
        cell_ms = self._forecasts.next_cell_ms(lease.lease_id)
        save_ms = self._suspend_ms(way.device_id, max(lease.saved_mib, lease.used_mib) // lease.count)
        insort(outlook.returns, (ready_ms + cell_ms, need_mib, save_ms))

    # -- what the devices give back -----------------------------------------------------------------------------------

    def _richest(self, lease: Lease) -> Sequence[str]:
        """Return the allowed devices that have most to give without their busy leases."""
        devices = allowed_devices(self._books, lease)
        most = max(MOST_DEVICES, lease.count)
        if len(devices) <= most:
            return devices
        rich = self._rich.get(devices)
        if rich is None:
            rich = self._rich[devices] = sorted(
                devices, key=lambda device_id: self._books.devices[device_id].free_or_idle_mib, reverse=True
            )
        return rich[:most]

    def _outlook(self, device_id: str, beside: Lease) -> _Outlook:
        """Return what a device gives back to a lease. The lease itself, if it is there to grow, gives nothing."""
        outlook = self._outlooks.get(device_id)
        if outlook is None:
            device = self._books.devices[device_id]
            if not self._is_alike(device_id, beside):
                returns = self._returns(device_id, beside)
            else:
                sums, known = (device.free_mib, *device.sums.mib), self._known.get(device_id)
                if known is None or known.sums != sums or self._now_ms - known.at_ms > _FRESH_MS:
                    known = self._known[device_id] = _Known(sums, self._now_ms, self._returns(device_id, beside))
                returns = _aged(known.returns, self._now_ms - known.at_ms)
            calm_mib = device.free_mib + sum([mib for at_ms, mib, _ in returns if at_ms <= 0])
            outlook = self._outlooks[device_id] = _Outlook(device.free_mib, returns, calm_mib)
        return outlook

    def _returns(self, device_id: str, beside: Lease) -> list[_Return]:
        returns: list[_Return] = []
        suspend_ms = self._forecasts.swaps_ms(SUSPEND, self._name(device_id))
        for lease in islice(self._books.holders(device_id), MOST_HOLDERS):
            at_ms = self._gives_back_ms(lease, beside) if lease is not beside else None
            if at_ms is not None:
                saving = lease.state is LeaseState.SUSPENDING
                returns.append((at_ms, lease.held_mib, 0 if saving else suspend_ms(lease.used_mib)))
        returns.sort()
        return returns

    def _gives_back_ms(self, lease: Lease, beside: Lease) -> int | None:
        """Return in how many ms the lease can give its room to `beside`; None: unknown, or never."""
        needs_more = lease.state is LeaseState.RESIDENT and lease.host_need_mib > self._books.host_left_mib
        if lease.is_unsuspendable or needs_more:
            return None
        match lease.state:
            case LeaseState.SUSPENDING:
                return -self._swap_left_ms(lease)
            case LeaseState.RESUMING:
                return self._swap_left_ms(lease) + self._forecasts.next_cell_ms(lease.lease_id)
            case LeaseState.RESIDENT if lease.is_working:  # a cell that waits at its closed gate has not begun
                # What an ended kernel left behind runs no cell that would end.
                left_ms = _NEVER_MS if lease.left_behind else self._forecasts.cell_left_ms(lease.lease_id, self._now_ms)
                from_ms = preempts_from_ms(self._books, beside, lease) if self._preempts(beside) else None
                room_ms = max(1, left_ms if from_ms is None else min(left_ms, from_ms - self._now_ms))
                return None if room_ms >= _NEVER_MS else room_ms
            case LeaseState.RESIDENT:
                willing_ms = suspendable_from_ms(self._books.policy(lease), lease)
                failed = lease.retries.suspend_after_ms > self._now_ms  # the next attempt may fail, too
                return None if willing_ms is None or failed else max(0, willing_ms - self._now_ms)
            case _:
                return None

    def _is_alike(self, device_id: str, beneficiary: Lease) -> bool:
        """Return whether the device gives this beneficiary what it gives any other: it is not there and can preempt none of the leases."""
        if beneficiary.held_mib or self._books.policy(beneficiary).preempt_equals:
            return False
        if not self._preempts(beneficiary):
            return True
        priority = beneficiary.spec.priority
        return all(lease.spec.priority >= priority for lease in islice(self._books.holders(device_id), MOST_HOLDERS))

    def _preempts(self, lease: Lease) -> bool:
        pool = self._books.policy(lease)
        return pool.preempt_equals or pool.preempt_priorities

    # -- swaps --------------------------------------------------------------------------------------------------------

    def _swap_left_ms(self, lease: Lease) -> int:
        """Return what is left of the lease's suspend or resume, ms; one that is overdue is assumed to end soon."""
        name = self._name(lease.device_id)
        if lease.state is LeaseState.SUSPENDING:
            whole_ms = self._forecasts.swap_ms(SUSPEND, name, lease.used_mib)
        else:
            whole_ms = self._forecasts.swap_ms(RESUME, name, lease.saved_mib)
        return max(whole_ms - (self._now_ms - lease.since_ms), whole_ms // 8)

    def _resume_ms(self, lease: Lease, device_id: str) -> int:
        match lease.state:
            case LeaseState.SUSPENDED:
                return self._forecasts.swap_ms(RESUME, self._name(device_id), lease.saved_mib)
            case LeaseState.SUSPENDING:
                return self._forecasts.swap_ms(RESUME, self._name(device_id), lease.used_mib)
            case _:
                return 0

    def _suspend_ms(self, device_id: str, mib: int) -> int:
        return self._forecasts.swap_ms(SUSPEND, self._name(device_id), mib)

    def _name(self, device_id: str | None) -> str:
        device = self._books.devices.get(device_id or "")
        return "" if device is None else device.spec.name


def _aged(returns: list[_Return], ms: int) -> list[_Return]:
    """Return the returns as seen `ms` later. A return that was still to come stays at least 1 ms ahead: only its event ends it."""
    if ms == 0:
        return returns.copy()
    return [
        (at_ms and (max(1, at_ms - ms) if at_ms > 0 else min(-1, at_ms + ms)), mib, swap)
        for at_ms, mib, swap in returns
    ]


def _is_predictable(lease: Lease) -> bool:
    """Return whether the wait of the lease's ticket can be forecast: not in quarantine, and not before its kernel starts."""
    ticket = lease.ticket
    if ticket is None or lease.state is LeaseState.QUARANTINED or ticket.reason in _UNPREDICTABLE:
        return False
    return lease.state is not LeaseState.UNATTACHED or ticket.before_start


# -- forecast recorder -------------------------------------------------------------------------------------------------
# Feeds the forecasts with what happens to leases, and records what was forecast when a ticket was filed.
#
# There is one method per thing that happens. Work that takes long and changes no effect of its event is deferred until the effects are on
# their way (`run_deferred_work`): swap times are learnt, and a new ticket's wait is forecast once, if it still waits. What people see is
# computed anew whenever it is read.
#
# **Forecasts that turned out too short are shown wider.** A forecast says how long a ticket still waits. If the wait outlasts the upper
# end of what was shown, the basis of that forecast is wrong for this ticket, and the next one on the same basis deserves less trust the
# longer that goes on. From then on:
#
# - the upper end is at least the time waited so far, times n; n is 1, and grows by one whenever the wait has doubled since the miss;
# - the expected value is at least half of the time waited, and the lower end a tenth: a wait of unknown cause that has lasted for t ends
#   within the next t/10 in about one case of ten (as if its length were distributed by Pareto's law with exponent 1).
#
# A resume under way is a wait of its own: the ticket has its room, and only time is needed. If it outlasts its forecast, the same holds.
# All of this is about display and decides nothing.
class _Begun(NamedTuple):
    """A cell that runs on one device: since when, and for how long leases had been busy there until then (`Device.busy_ms`)."""

    device_id: str
    at_ms: int
    busy_ms: int
    company: Company


class ForecastRecorder:
    """The forecasts, and the deferred work on them."""

    def __init__(self, books: Books, forecasts: Forecasts, *, parallel_swaps: int = 1) -> None:
        self.forecasts = forecasts
        self.queue_waits = QueueWaitForecast(books, forecasts, parallel_swaps=parallel_swaps)
        self._books = books
        self._filed: list[Lease] = []
        self._swaps: list[tuple[str, str, int, int]] = []  # arguments of `Forecasts.swap_finished`, deferred
        self._begun: dict[str, _Begun] = {}  # by lease
        self._beginning: list[Lease] = []  # leases whose company is not worked out yet
        self._in_company: list[tuple[str, Company, int, int]] = []  # arguments of `Forecasts.cell_in_company`, deferred

    def busy_changed(self, lease: Lease, *, busy: bool) -> None:
        """Note that the lease began, or ended, to run something."""
        if busy:
            self._cell_began(lease)
        else:
            self.forecasts.cell_ended(lease.lease_id, self._books.now_ms)
            self._company_ended(lease)

    def became_resident(self, lease: Lease) -> None:
        """Note that the lease is resident: a cell that waited for that begins now."""
        if lease.busy:
            self._cell_began(lease)

    def _cell_began(self, lease: Lease) -> None:
        books = self._books
        device = books.devices.get(lease.device_id or "")
        self.forecasts.cell_began(lease.lease_id, books.now_ms, "" if device is None else device.spec.name)
        # A cell that goes on after it was preempted says nothing of slowdowns.
        if self._begun.pop(lease.lease_id, None) is None:
            self._beginning.append(lease)

    def _company_ended(self, lease: Lease) -> None:
        """Note how long a cell took, and how many busy neighbours it had on average."""
        begun = self._begun.pop(lease.lease_id, None)
        device = None if begun is None else self._books.devices.get(begun.device_id)
        if begun is None or device is None:
            return
        lasted_ms = self._books.now_ms - begun.at_ms
        others_ms = device.busy_ms - begun.busy_ms - lasted_ms
        mean_milli = max(0, others_ms) * 1000 // max(1, lasted_ms)
        self._in_company.append((lease.lease_id, begun.company, lasted_ms, mean_milli))

    def _find_company(self, lease: Lease) -> None:
        """Forecast how much the neighbours slow a cell down that has just begun on a device; on several, too much differs."""
        device = self._books.devices.get(lease.device_id or "")
        if device is None or lease.occupancy is not OccupancyKind.BUSY or lease.count > 1:
            return
        name, now_ms, others = device.spec.name, self._books.now_ms, busy_others(device, lease)
        model_milli, stated = beside(lease.busy_milli, others), None
        if others:
            stated = self.forecasts.slowdown_span(lease.lease_id, name, len(others), model_milli)
        company = Company(name, len(others), model_milli, stated)
        self._begun[lease.lease_id] = _Begun(device.spec.device_id, now_ms, device.busy_ms, company)

    def swap_finished(self, kind: str, lease: Lease, mib: int, took_ms: int) -> None:
        """Note that an operation of the lease succeeded, moving `mib` in `took_ms`."""
        device = self._books.devices.get((lease.home_id if kind == "suspend" else lease.device_id) or "")
        if device is not None and mib > 0:
            self._swaps.append((kind, device.spec.name, mib, took_ms))

    def ticket_filed(self, lease: Lease) -> None:
        """Note that the lease has a new ticket."""
        self._filed.append(lease)

    def ticket_served(self, lease: Lease) -> None:
        """Note that the lease got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_ended(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def ticket_given_up(self, lease: Lease) -> None:
        """Note that the lease stopped waiting without having got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_given_up(ticket.expected, self._books.now_ms - ticket.asked_ms)

    @property
    def recheck_ms(self) -> int | None:
        """When to look again because of what is learnt after this event: with other swap times, other swaps are possible."""
        return self._books.now_ms + 1 if self._swaps else None

    def lease_ended(self, lease: Lease) -> None:
        """Forget a lease that is over."""
        self._begun.pop(lease.lease_id, None)
        self.forecasts.forget(lease.lease_id)

    def run_deferred_work(self) -> bool:
        """Learn from the swaps of the last event, and forecast the waits of its new tickets. Returns whether anything was learnt."""
        learns = bool(self._swaps)
        for swap in self._swaps:
            self.forecasts.swap_finished(*swap)
        self._swaps.clear()
        for lease in self._filed:
            if lease.ticket is not None and lease.ticket.expected is None:
                lease.ticket.expected = self.queue_waits.wait_of(lease)
        self._filed.clear()
        for cell in self._in_company:
            self.forecasts.cell_in_company(*cell)
        self._in_company.clear()
        for lease in self._beginning:
            self._find_company(lease)
        self._beginning.clear()
        self.forecasts.settle()
        return learns

    def resume_span(self, lease: Lease) -> Span | None:
        """Return how long the resume of a suspended lease is expected to take; None for any other."""
        device = self._books.devices.get(lease.home_id or "")
        if device is None or not lease.saved_mib:
            return None
        return self.forecasts.swap_span(RESUME, device.spec.name, lease.saved_mib)


_SLACK_MS = 1_000  # a forecast is shown in seconds, and may be a second old


def shown_span(ticket: Ticket, lease: Lease, worked_out: Span, now_ms: int) -> Span:
    """Return the forecast to show now, and note its upper end. `worked_out`: the rest of the wait as the queue stands."""
    since_ms = lease.since_ms if lease.state is LeaseState.RESUMING else ticket.asked_ms
    promise, waited_ms = ticket.shown, max(0, now_ms - since_ms)
    if promise is None or promise.since_ms != since_ms:
        first_ms = now_ms
        if since_ms == ticket.asked_ms and ticket.expected is not None:
            first_ms = since_ms + ticket.expected.high_ms  # as it was foreseen
        promise = ticket.shown = ShownForecast(since_ms=since_ms, until_ms=first_ms)
    if not promise.missed_ms and now_ms > promise.until_ms + _SLACK_MS:
        promise.missed_ms = max(1, waited_ms)
    span = widened_span(worked_out, waited_ms, promise.missed_ms) if promise.missed_ms else worked_out
    promise.until_ms = now_ms + span.high_ms
    return span


def widened_span(span: Span, waited_ms: int, missed_ms: int) -> Span:
    """Return what is shown of a wait of `waited_ms` that first outlasted its forecast after `missed_ms`."""
    times = max(1, (waited_ms // missed_ms).bit_length())
    return replace(
        span,
        low_ms=max(span.low_ms, waited_ms // 10),
        expected_ms=max(span.expected_ms, waited_ms // 2),
        high_ms=max(span.high_ms, waited_ms * times),
    )
