"""Simulates the queue to forecast how long tickets will wait, and learns from completed waits, cells and swaps.

**The simulation.** Each device has free memory, and each lease on it frees its memory at some point: an idle lease once it can be
suspended, a busy lease when its cell is expected to end or can be preempted, and a suspending lease when it is saved. Tickets that have
room kept for them or need no busy lease to leave are served first, in order. The rest follow, because the arbiter lets small tickets pass
large ones. Each takes the device it can get soonest, waits for earlier swaps and its own, and frees its memory after one cell.

Only the first `MOST_AHEAD + 1` tickets are simulated, on `MOST_DEVICES` devices with `MOST_HOLDERS` leases each. The waits of tickets
further back are extrapolated. `Forecasts.wait_span` corrects the result based on earlier errors.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapreplace
from itertools import islice
from typing import NamedTuple

from fractional_gpu.core.forecasts.forecasts import Forecasts, Neighbours, WaitSpan
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState, Span
from fractional_gpu.core.place import allowed_devices, beside, busy_others
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, OccupancyKind, ShownForecast, Ticket
from fractional_gpu.core.suspend import gate_opens_ms, preempts_from_ms, suspendable_from_ms

MOST_AHEAD = 4
MOST_DEVICES = 3
MOST_HOLDERS = 16
_UNPREDICTABLE = frozenset({"wait.user-limit", "wait.group-limit"})  # users free their limits at unknown times


class _FreedMemory(NamedTuple):
    """Memory that a lease will free. Times are in ms from now.

    As in the arbiter, suspends in progress sort first, followed by the memory that is freed earliest.
    """

    order: int
    at_ms: int
    mib: int
    save_ms: int  # duration of the suspend, which starts at `at_ms`
    busy: bool
    lease_id: str


class _QueueSimulation:
    """A simulation of a pool's queue. Times are in ms from now."""

    def __init__(self, books: Books, forecasts: Forecasts, parallel_swaps: int) -> None:
        self._books, self._forecasts, self._now_ms = books, forecasts, books.now_ms
        self._free_mib = {device_id: device.free_mib for device_id, device in books.devices.items()}
        self._given: set[tuple[str, str]] = set()  # devices and leases whose memory a ticket has taken
        self._later: dict[str, list[_FreedMemory]] = defaultdict(list)  # by device: memory of served tickets
        left = [self._swap_left_ms(lease) for lease in books.in_state(LeaseState.SUSPENDING, LeaseState.RESUMING)]
        # A heap of the times when the swap channels become free.
        self.channels = sorted([*[0] * (parallel_swaps - len(left)), *left])[:parallel_swaps]

    def serve_all(self, line: Sequence[Lease]) -> list[WaitSpan | None]:
        """Serve the tickets in the simulation, and return their waits. A wait is None if it is unknown."""
        found: dict[str, WaitSpan | None] = {}
        for patient in (False, True):
            for lease in line:
                if found.get(lease.lease_id) is None:
                    found[lease.lease_id] = self._serve(lease, patient=patient)
        return [found[lease.lease_id] for lease in line]

    def _serve(self, lease: Lease, *, patient: bool) -> WaitSpan | None:
        """Serve a ticket and return its wait, or None if there is not enough memory. Busy leases make room only if `patient` is set."""
        ticket, forecasts = lease.ticket, self._forecasts
        if lease.state is LeaseState.RESUMING:
            return forecasts.wait_span("swap", self._swap_left_ms(lease))
        if ticket is None or not _is_predictable(lease):
            return None
        need_mib = ticket.extra_mib if ticket.resize_to is not None else lease.need_mib
        busy_too = patient or bool(ticket.kept_on)
        possible = {one: self._room(one, need_mib, lease, busy_too=busy_too) for one in self._devices(lease)}
        ways = {device_id: returns for device_id, returns in possible.items() if returns is not None}
        chosen = sorted(ways, key=lambda device_id: self._saved_ms(ways[device_id]))[: lease.count]
        if len(chosen) < lease.count:
            return None
        resume_ms = 0
        if lease.state in (LeaseState.SUSPENDED, LeaseState.SUSPENDING):
            saved_mib = lease.saved_mib if lease.state is LeaseState.SUSPENDED else lease.used_mib
            resume_ms = forecasts.swap_ms(RESUME, _device_name(self._books, chosen[0]), saved_mib)
        saved_ms = max(self._saved_ms(ways[device_id]) for device_id in chosen)
        ready_ms = max(saved_ms, lease.retries.resume_after_ms - self._now_ms) + resume_ms
        given = [one for device_id in chosen for one in ways[device_id]]
        # The swaps occupy a channel, but no channel waits for a cell to end.
        heapreplace(self.channels, self.channels[0] + sum(one.save_ms for one in given) + resume_ms)
        cell_ends_ms = ready_ms + forecasts.next_cell_ms(lease.lease_id)
        mib = max(lease.saved_mib, lease.used_mib) // lease.count
        for device_id in chosen:
            returns, later = ways[device_id], self._later[device_id]
            self._free_mib[device_id] += sum(one.mib for one in returns) - need_mib
            self._given.update((device_id, one.lease_id) for one in returns)
            later[:] = [one for one in later if one not in returns]
            save_ms = forecasts.swap_ms(SUSPEND, _device_name(self._books, device_id), mib)
            later.append(_FreedMemory(cell_ends_ms, cell_ends_ms, need_mib, save_ms, True, ""))
        return forecasts.wait_span("busy" if any(one.busy for one in given) else "swap", ready_ms)

    def _devices(self, lease: Lease) -> Sequence[str]:
        """Return the allowed devices with the most memory that is free or held by idle leases."""
        devices = self._books.devices
        most = sorted(allowed_devices(self._books, lease), key=lambda one: -devices[one].free_or_idle_mib)
        return most[: max(MOST_DEVICES, lease.count)]

    def _room(self, device_id: str, need_mib: int, lease: Lease, *, busy_too: bool) -> list[_FreedMemory] | None:
        """Return the memory to free so that there is enough room on the device as soon as possible. Return None if there never will be."""
        room_mib, taken = self._free_mib[device_id], list[_FreedMemory]()
        for one in sorted(self._returns(device_id, lease)) if room_mib < need_mib else ():
            if room_mib < need_mib and (busy_too or not one.busy):
                room_mib += one.mib
                taken.append(one)
        for one in reversed(taken[:-1]):  # drop those that are not needed because a later one is larger
            if room_mib - one.mib >= need_mib:
                room_mib -= one.mib
                taken.remove(one)
        return taken if room_mib >= need_mib else None

    def _saved_ms(self, returns: Sequence[_FreedMemory]) -> int:
        """Return how many ms from now the last of these leases will be saved. Suspends and resumes already in progress delay this."""
        room_ms = max((one.at_ms + one.save_ms for one in returns), default=0)
        saves_ms = sum(one.save_ms for one in returns)
        return max(self.channels[0] + saves_ms, room_ms) if saves_ms else room_ms

    def _returns(self, device_id: str, beneficiary: Lease) -> Iterator[_FreedMemory]:
        """Yield the memory that the device's other leases will free for the beneficiary."""
        yield from self._later[device_id]
        for lease in islice(self._books.holders(device_id), MOST_HOLDERS):
            if lease is beneficiary or (device_id, lease.lease_id) in self._given:
                continue
            at_ms = self._gives_back_ms(lease, beneficiary)
            if at_ms is not None:
                leaves = lease.state is LeaseState.SUSPENDING
                name = _device_name(self._books, device_id)
                save_ms = 0 if leaves else self._forecasts.swap_ms(SUSPEND, name, lease.used_mib)
                busy = not leaves and (lease.is_working or lease.state is LeaseState.RESUMING)
                yield _FreedMemory(-1 if leaves else at_ms, at_ms, lease.held_mib, save_ms, busy, lease.lease_id)

    def _gives_back_ms(self, lease: Lease, beneficiary: Lease) -> int | None:
        """Return how many ms from now the lease can free its memory. Return None if it never can, or if the time is unknown."""
        books, forecasts = self._books, self._forecasts
        if lease.state is LeaseState.SUSPENDING:
            return self._swap_left_ms(lease)
        if lease.state is LeaseState.RESUMING:
            return self._swap_left_ms(lease) + forecasts.next_cell_ms(lease.lease_id)
        unable = lease.is_unsuspendable or lease.host_need_mib > books.host_left_mib
        if lease.state is not LeaseState.RESIDENT or unable:
            return None
        if not lease.is_working:  # a cell that waits at its closed gate has not started
            willing_ms = suspendable_from_ms(books.policy(lease), lease)
            failed = lease.retries.suspend_after_ms > self._now_ms  # the next attempt may fail, too
            return None if willing_ms is None or failed else max(0, willing_ms - self._now_ms)
        preempts_ms = preempts_from_ms(books, beneficiary, lease)
        # Processes that an ended kernel left behind run no cell that could end.
        ends = [] if lease.left_behind else [forecasts.cell_left_ms(lease.lease_id, self._now_ms)]
        if preempts_ms is not None:
            ends.append(preempts_ms - self._now_ms)
        return max(1, min(ends)) if ends else None

    def _swap_left_ms(self, lease: Lease) -> int:
        """Return the remaining time of the lease's suspend or resume, in ms. A swap that is overdue is expected to end soon."""
        kind, mib = (SUSPEND, lease.used_mib) if lease.state is LeaseState.SUSPENDING else (RESUME, lease.saved_mib)
        whole_ms = self._forecasts.swap_ms(kind, _device_name(self._books, lease.device_id), mib)
        return max(whole_ms - (self._now_ms - lease.since_ms), whole_ms // 8)


def _device_name(books: Books, device_id: str | None) -> str:
    device = books.devices.get(device_id or "")
    return "" if device is None else device.spec.name


def _is_predictable(lease: Lease) -> bool:
    """Return whether the ticket's wait can be forecast. It has no forecast in quarantine, at a limit, or if the kernel must start first."""
    ticket = lease.ticket
    if ticket is None or lease.state is LeaseState.QUARANTINED or ticket.reason in _UNPREDICTABLE:
        return False
    return lease.state is not LeaseState.UNATTACHED or ticket.before_start


# -- recorder ----------------------------------------------------------------------------------------------------------


class ForecastRecorder:
    """Forecasts how long tickets will wait, and learns from what happens to leases.

    Call `run_deferred_work` after each event. It forecasts the waits of new tickets that are still waiting, and the slowdowns of new cells.
    """

    def __init__(self, books: Books, forecasts: Forecasts, *, parallel_swaps: int = 1) -> None:
        self.forecasts = forecasts
        self._books, self._parallel_swaps = books, parallel_swaps
        self._filed: list[Lease] = []
        self._beginning: list[Lease] = []  # leases whose cell started in the last event
        self._begun: dict[str, tuple[int, Neighbours]] = {}  # by lease, when its cell started, and its neighbours

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait_of(self, lease: Lease) -> WaitSpan | None:
        """Return the remaining wait of the lease's ticket. Return None if it has no ticket, or if the wait cannot be forecast."""
        if lease.ticket is None:
            return None
        pool = lease.spec.pool
        return self.waits_of_pool(pool)[self._books.line(pool).index(lease)]

    def waits_of_pool(self, pool: str) -> list[WaitSpan | None]:
        """Return the remaining waits of a pool's tickets, in the order of the queue."""
        line = self._books.line(pool)
        waits = self._simulation().serve_all(line[: MOST_AHEAD + 1])
        simulated, last = len(waits), next((wait for wait in reversed(waits) if wait is not None), None)
        for place, lease in enumerate(line[simulated:], simulated + 1):
            further = None
            if last is not None and _is_predictable(lease):
                further = self.forecasts.wait_span("busy", last.basis_ms * place // simulated)
            waits.append(further)
        return waits

    def _simulation(self) -> _QueueSimulation:
        return _QueueSimulation(self._books, self.forecasts, self._parallel_swaps)

    def gate_wait(self, lease: Lease) -> Span | None:
        """Return how much longer the lease's next cell will be held back for other leases. Return None if no cell is held back."""
        if lease.gate.ticket is None:
            return None
        opens_ms = gate_opens_ms(self._books, lease, lease.gate.ticket.asked_ms) - self._books.now_ms
        left_ms = max(0, opens_ms, self._simulation().channels[0])
        return Span(expected_ms=left_ms, low_ms=0, high_ms=left_ms)

    def resume_span(self, lease: Lease) -> Span | None:
        """Return how long the resume of a suspended lease is expected to take, or None if the lease is not suspended."""
        if lease.home_id not in self._books.devices or not lease.saved_mib:
            return None
        return self.forecasts.swap_span(RESUME, _device_name(self._books, lease.home_id), lease.saved_mib)

    # -- learning ------------------------------------------------------------------------------------------------------

    def ticket_filed(self, lease: Lease) -> None:
        self._filed.append(lease)

    def ticket_ended(self, lease: Lease, *, given_up: bool = False) -> None:
        """Update the forecasts with how long a ticket actually waited until it was served or withdrawn."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_ended(ticket.expected, self._books.now_ms - ticket.asked_ms, given_up=given_up)

    def swap_finished(self, kind: str, lease: Lease, mib: int, took_ms: int) -> None:
        """Update the forecasts with how long a successful suspend or resume took."""
        device_id = lease.home_id if kind == SUSPEND else lease.device_id
        if device_id in self._books.devices and mib > 0:
            self.forecasts.swap_finished(kind, _device_name(self._books, device_id), mib, took_ms)

    def busy_changed(self, lease: Lease, *, busy: bool) -> None:
        """Record that the lease became idle or busy. Also call this when a busy lease gets the room it was waiting for."""
        if not busy:
            self.forecasts.cell_ended(lease.lease_id, self._books.now_ms)
            begun, device = self._begun.pop(lease.lease_id, None), self._books.devices.get(lease.device_id or "")
            if begun is not None:
                began_ms, neighbours = begun
                alone = device is not None and not busy_others(device, lease)
                self.forecasts.learn_slowdown(
                    lease.lease_id, neighbours, self._books.now_ms - began_ms, ended_alone=alone
                )
            return
        device_name = _device_name(self._books, lease.device_id)
        self.forecasts.cell_began(lease.lease_id, self._books.now_ms, device_name)
        # A preempted cell that continues says nothing about slowdowns.
        if self._begun.pop(lease.lease_id, None) is None:
            self._beginning.append(lease)

    def lease_ended(self, lease: Lease) -> None:
        self._begun.pop(lease.lease_id, None)
        self.forecasts.forget(lease.lease_id)

    def run_deferred_work(self) -> None:
        """Forecast the waits of tickets filed and the slowdowns of cells started in the last event."""
        for lease in self._filed:
            if lease.ticket is not None and lease.ticket.expected is None:
                lease.ticket.expected = self.wait_of(lease)
        for lease in self._beginning:
            self._forecast_slowdown(lease)
        self._filed.clear()
        self._beginning.clear()

    def _forecast_slowdown(self, lease: Lease) -> None:
        """Forecast how much neighbours will slow down a new cell. Cells that use several devices get no forecast."""
        device = self._books.devices.get(lease.device_id or "")
        if device is None or lease.occupancy is not OccupancyKind.BUSY or lease.count > 1:
            return
        name, others = device.spec.name, busy_others(device, lease)
        model_milli = beside(lease.busy_milli, others)
        stated = self.forecasts.slowdown_span(name, len(others), model_milli) if others else None
        self._begun[lease.lease_id] = self._books.now_ms, Neighbours(name, len(others), model_milli, stated)


# -- what is shown -----------------------------------------------------------------------------------------------------
# If a wait exceeds the upper bound that was shown, the forecast rested on a wrong assumption. Later forecasts on the same basis become less
# credible the longer the wait lasts. From then on
#
# - the upper bound is at least n times the time waited; n starts at 1, and grows by one whenever the wait has doubled since the miss;
# - the expected value is at least half of the time waited, and the lower bound at least a tenth: a wait of unknown cause that has lasted
#   for t ends within the next t/10 in about one case of ten (as for a Pareto distribution with exponent 1).
#
# A resume in progress counts as a separate wait, because the ticket has its room and only needs time.


_SLACK_MS = 1_000  # forecasts are shown in seconds, and can be a second old


def shown_span(ticket: Ticket, lease: Lease, worked_out: Span, now_ms: int) -> Span:
    """Return the forecast to show now, and remember its upper bound. `worked_out` is the remaining wait according to the simulation."""
    resumes = lease.state is LeaseState.RESUMING
    since_ms = lease.since_ms if resumes else ticket.asked_ms
    promise, waited_ms = ticket.shown, max(0, now_ms - since_ms)
    if promise is None or promise.since_ms != since_ms:
        foreseen_ms = now_ms if resumes or ticket.expected is None else since_ms + ticket.expected.high_ms
        promise = ticket.shown = ShownForecast(since_ms=since_ms, until_ms=foreseen_ms)
    if not promise.missed_ms and now_ms > promise.until_ms + _SLACK_MS:
        promise.missed_ms = max(1, waited_ms)
    span = worked_out
    if promise.missed_ms:
        times = max(1, (waited_ms // promise.missed_ms).bit_length())
        low_ms, high_ms = max(span.low_ms, waited_ms // 10), max(span.high_ms, waited_ms * times)
        span = Span(expected_ms=max(span.expected_ms, waited_ms // 2), low_ms=low_ms, high_ms=high_ms)
    promise.until_ms = now_ms + span.high_ms
    return span
