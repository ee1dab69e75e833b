"""Resumes suspended leases before a cell needs them, either because a cell is expected or because host memory is short.

**Expectations.** Front ends and the kernel send signs that a cell is about to run. The rhythm of the lease's earlier cells is another sign.
If a cell runs in time, all signs of it count as right. If not, they count as wrong. This is how the arbiter learns how reliable each kind
of sign is for each lease. A lease suspended on request is resumed only when a cell needs it, never because of a sign.

**Early resumes** use only room and swap channels that no ticket needs. An early resume begins if no ticket is waiting in the pool, a swap
channel is free, and the resume is predicted to take at most `foresight_swap_ms`. A lease resumed early makes room as soon as a ticket needs
it. If no room is free, a pool with `Foresight.DISPLACE` suspends idle leases whose cells are expected later, if this saves more waiting
than it costs. Wasted early swaps are limited per device and hour (`foresight_vain_mib`), which bounds the cost of misleading signs.

**Relief.** While host memory is short and no ticket is waiting, saved leases are resumed until enough host memory is free.
"""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.forecasts.outcomes import RESUME
from fractional_gpu.core.limits import over_limit
from fractional_gpu.core.model import Foresight, LeaseState, Sign
from fractional_gpu.core.place import eligible_devices
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import EarlySwap, Expectation, Lease
from fractional_gpu.core.suspend import Capacity, is_expected, likelihood_milli, next_cell_in_ms, swap_ms
from fractional_gpu.core.units import format_memory

LONGEST_MS = 600_000
"""The longest time for which a cell remains expected after the last sign of it."""
_HOUR_MS = 3_600_000
_SIGNS = {
    Sign.FOCUS: "its notebook came to the front",
    Sign.SCROLL: "its notebook is being read",
    Sign.TYPING: "a cell is being edited",
    Sign.HOVER: "the pointer is on a button that runs a cell",
    Sign.COMPLETION: "a completion was requested",
    Sign.INSPECTION: "a tooltip was requested",
    Sign.WIDGET: "a widget is being used",
    Sign.RHYTHM: "its cells usually run at this interval",
    Sign.OTHER: "a program said so",
}


class Expectations:
    """Records signs that a cell is about to run, and whether a cell then ran."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def seen(self, lease: Lease, sign: Sign, until_ms: int, confidence_milli: int) -> None:
        """Record a sign that a cell will run before `until_ms`."""
        books, now_ms = self._books, self._changes.now_ms
        until_ms = min(until_ms, now_ms + LONGEST_MS)
        if until_ms <= now_ms or not self._may_expect(lease):
            return
        known = lease.expectation
        if known is None:
            known = lease.expectation = Expectation(until_ms=until_ms, best=sign)
        known.until_ms = max(known.until_ms, until_ms)
        known.signs[sign] = max(0, min(1000, confidence_milli))
        # The best sign is used. No sign counts for more than its success rate so far.
        forecasts = books.forecasts
        milli = {one: min(sure, forecasts.sign_milli(lease.lease_id, one)) for one, sure in known.signs.items()}
        known.best = max(milli, key=lambda one: milli[one])
        known.milli = milli[known.best]

    def _may_expect(self, lease: Lease) -> bool:
        """Return whether to act on signs of a cell. They are ignored if a cell is running or waiting, or if they may not cause a resume."""
        runs = lease.busy and lease.state is not LeaseState.SUSPENDED
        if runs or lease.ticket is not None or lease.left_behind or lease.revoked or lease.sent_away:
            return False
        return self._books.policy(lease).foresight is not Foresight.OFF

    def came_true(self, lease: Lease) -> None:
        """Record that the prediction was right: a cell is running or waiting to run, so any early suspend or resume was worthwhile."""
        if lease.came_early:
            lease.came_early = False
            for device in self._books.devices.values():
                device.early_swaps = [swap for swap in device.early_swaps if swap.lease_id != lease.lease_id]
        self._settle(lease, true=True)

    def take_due(self, lease: Lease) -> None:
        """Stop expecting a cell that did not run in time. If the lease's rhythm says that a cell is due now, start expecting that cell."""
        now_ms, known = self._changes.now_ms, lease.expectation
        if known is not None and known.until_ms <= now_ms:
            self._settle(lease, true=False)
            self.await_rhythm(lease)
        if lease.rhythm_ms is not None and lease.rhythm_ms <= now_ms:
            lease.rhythm_ms = None
            rhythm = self._books.forecasts.rhythm(lease.lease_id, now_ms)
            if rhythm is not None and rhythm.from_ms <= now_ms:
                self.seen(lease, Sign.RHYTHM, rhythm.until_ms, rhythm.chance_milli)

    def await_rhythm(self, lease: Lease) -> None:
        """Predict when the lease's next cell becomes likely, based on the rhythm of its earlier ones."""
        if lease.state is not LeaseState.SUSPENDED or self._books.policy(lease).foresight is Foresight.OFF:
            return
        rhythm = self._books.forecasts.rhythm(lease.lease_id, self._changes.now_ms)
        lease.rhythm_ms = None if rhythm is None else max(rhythm.from_ms, self._changes.now_ms + 1)

    def _settle(self, lease: Lease, *, true: bool) -> None:
        known = lease.expectation
        if known is None:
            return
        for sign in known.signs:
            self._books.forecasts.sign_settled(lease.lease_id, sign, true=true)
        self._changes.forget_expectation(lease)


def resume_expected(changes: Changes) -> None:
    """Resume leases that are expected to run a cell soon, the most likely ones first, while swap channels are free."""
    books = changes.books
    able = [lease for lease in books.in_state(LeaseState.SUSPENDED) if _may_resume_early(books, lease)]
    if not able:
        return
    capacity = Capacity(books)
    for lease in sorted(able, key=_rank):
        if not changes.channel_free:
            return
        if _may_resume_early(books, lease):
            _resume_or_displace(changes, lease, capacity)


def _rank(lease: Lease) -> tuple[int, int, int]:
    until_ms = lease.expectation.until_ms if lease.expectation is not None else 0
    return -likelihood_milli(lease), until_ms, lease.number


def _may_resume_early(books: Books, lease: Lease) -> bool:
    pool = books.policy(lease)
    if lease.state is not LeaseState.SUSPENDED or pool.foresight is Foresight.OFF:
        return False
    if lease.revoked or not is_expected(books, lease) or lease.spec.pool in books.waiting_pools:
        return False
    if not books.is_time(lease.retries.resume_after_ms):
        return False
    return over_limit(books, lease, lease.milli) is None and _resume_ms(books, lease) <= pool.foresight_swap_ms


def _resume_or_displace(changes: Changes, lease: Lease, capacity: Capacity) -> None:
    """Begin resuming the lease. If it doesn't fit anywhere, begin suspending an idle lease to make room, if the pool allows this."""
    books, need_mib = changes.books, lease.need_mib
    devices = tuple(
        one for one in eligible_devices(books, books.policy(lease), lease) if _may_swap_early(books, one, lease, ())
    )
    chosen = capacity.pick_for(lease, devices, need_mib)
    if chosen is not None:
        _record_early_swap(books, lease, chosen, 2 * lease.saved_mib)
        lease.came_early = True
        sign = lease.expectation.best if lease.expectation is not None else Sign.OTHER
        changes.resume_early(lease, chosen, "resume.expected", f"a cell is expected ({_SIGNS[sign]})")
    elif books.policy(lease).foresight is Foresight.DISPLACE and lease.count == 1:
        _displace(changes, lease, devices, capacity)


# -- idle leases that make room ------------------------------------------------------------------------------------


def _displace(changes: Changes, lease: Lease, devices: tuple[str, ...], capacity: Capacity) -> None:
    books = changes.books
    best: tuple[int, int, str, tuple[Lease, ...]] | None = None
    choice = capacity.choice(lease, devices, lease.need_mib)
    saved = likelihood_milli(lease) * _resume_ms(books, lease)
    for device_id in devices:
        chosen = _victims_on(books, lease, device_id, capacity)
        if chosen is None:
            continue
        regret = sum(_regret(books, victim, lease) for victim in chosen)
        then_mib = capacity.total_mib(device_id) + sum(victim.held_mib for victim in chosen)
        rank = regret, choice.fragmentation([(device_id, then_mib)])
        if regret < saved and (best is None or rank < best[:2]):
            best = *rank, device_id, chosen
    if best is None:
        return
    *_, device_id, chosen = best
    victim = chosen[0]  # the others are reconsidered once this one has left
    _record_early_swap(books, lease, (device_id,), 2 * victim.host_need_mib)
    sentence = "idle, and another kernel is expected to need its room sooner"
    changes.begin_suspend(victim, "suspend.expected", sentence, beneficiary=lease)


def _victims_on(books: Books, lease: Lease, device_id: str, capacity: Capacity) -> tuple[Lease, ...] | None:
    """Return the idle leases to suspend on the device. Return None if suspending them is unnecessary, not enough or not allowed."""
    short_mib = lease.need_mib - capacity.total_mib(device_id)
    if short_mib <= 0:
        return None  # leases that are already leaving free enough, so the resume follows later
    stays = {one.lease_id for one in books.devices[device_id].holders.values() if _stays(books, one, lease)}
    host_mib = books.host_left_mib
    chosen = capacity.victims.choose(device_id, short_mib, lease, stays, host_mib=host_mib)
    if not chosen or sum(one.host_need_mib for one in chosen) > host_mib:
        return None
    return chosen if _may_swap_early(books, device_id, lease, chosen) else None


def _stays(books: Books, other: Lease, lease: Lease) -> bool:
    """Return whether `other` must not be suspended to make room for `lease`. The two may belong to different pools."""
    pool = books.policy(other)
    if pool.foresight is not Foresight.DISPLACE or _is_sooner(books, other, lease):
        return True
    return swap_ms(books, other) > books.policy(lease).foresight_swap_ms


def _is_sooner(books: Books, other: Lease, lease: Lease) -> bool:
    """Return whether `other` is expected to run its next cell before the time by which `lease` should have run one."""
    until_ms = lease.expectation.until_ms if lease.expectation is not None else books.now_ms
    return is_expected(books, other) or books.now_ms + next_cell_in_ms(books, other) <= until_ms


def _regret(books: Books, victim: Lease, lease: Lease) -> int:
    """Return the expected cost of suspending `victim`: its swap time in ms, times the chance (in thousandths) that it runs a cell first."""
    until_ms = lease.expectation.until_ms if lease.expectation is not None else books.now_ms
    milli = books.forecasts.chance_milli(victim.lease_id, books.now_ms, until_ms - books.now_ms)
    return milli * swap_ms(books, victim)


# -- bounds --------------------------------------------------------------------------------------------------------


def _resume_ms(books: Books, lease: Lease) -> int:
    return books.forecasts.swap_ms(RESUME, books.kind_of(lease.home_id), lease.saved_mib)


def _may_swap_early(books: Books, device_id: str, lease: Lease, victims: tuple[Lease, ...]) -> bool:
    """Return whether suspending `victims` and resuming `lease` early would stay within the device's limit on wasted swaps."""
    device, from_ms = books.devices[device_id], books.now_ms - _HOUR_MS
    while device.early_swaps and device.early_swaps[0].at_ms <= from_ms:
        del device.early_swaps[0]
    mib = 2 * (lease.saved_mib + sum(victim.host_need_mib for victim in victims))
    may = sum(swap.mib for swap in device.early_swaps) + mib <= books.policy(lease).foresight_vain_mib
    if not may and device.early_swaps:
        books.recheck_at(device.early_swaps[0].at_ms + _HOUR_MS)
    return may


def _record_early_swap(books: Books, lease: Lease, device_ids: tuple[str, ...], mib: int) -> None:
    for device_id in device_ids:
        books.devices[device_id].early_swaps.append(EarlySwap(lease.lease_id, books.now_ms, mib))


def relieve_host_memory(changes: Changes) -> None:
    """Resume saved leases early while host memory is short, swap channels are free and a lease fits on a device.

    Leases whose own control group is short of memory come first, followed by the most recently active ones, which are likely to run next. A
    lease that was resumed early is not saved again until there is enough host memory.
    """
    books = changes.books
    while not books.waiting and changes.channel_free:
        excess_mib = books.host_saved_mib - books.host_budget_mib
        if excess_mib > 0:  # leases being resumed will soon free host memory
            excess_mib -= sum(lease.saved_mib for lease in books.in_state(LeaseState.RESUMING))
        if not _begin_relief(changes, excess_mib):
            return


def _begin_relief(changes: Changes, excess_mib: int) -> bool:
    """Begin resuming one saved lease early to free host memory. Return whether a resume has begun."""
    books, saved = changes.books, _saved_in_order(changes.books, any_lease=excess_mib > 0)
    if not saved:
        return False
    capacity = Capacity(books)
    for lease in saved:
        device_ids = capacity.pick_for(lease, eligible_devices(books, books.policy(lease), lease), lease.need_mib)
        if device_ids is not None and over_limit(books, lease, lease.milli) is None:
            why = "where its state is saved" if lease.under_host_pressure else f"by {format_memory(excess_mib)}"
            sentence = f"host memory is short {why} and a device has room, so it is resumed early"
            changes.resume_early(lease, device_ids, "resume.host-memory", sentence)
            return True
    return False


def _saved_in_order(books: Books, *, any_lease: bool) -> list[Lease]:
    saved = [
        lease
        for lease in books.in_state(LeaseState.SUSPENDED)
        if (any_lease or lease.under_host_pressure)
        and lease.retries.resume_after_ms <= books.now_ms
        and not lease.revoked
    ]
    return sorted(saved, key=lambda lease: (not lease.under_host_pressure, -lease.last_active_ms, lease.lease_id))
