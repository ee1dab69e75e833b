"""Early resumes: a suspended lease comes back before its expected cell asks for it.

Only what tickets leave is used. An early swap begins only while no ticket waits in the lease's pool and a swap channel is free, so it
displaces no ticket and no busy lease. A ticket that comes while one is under way waits at most for the rest of it, which is bounded:
none is begun that is predicted to take longer than the pool allows (`foresight_swap_ms`). A lease that came back early and has not run
yet is protected by no minimum residency, so it leaves for a ticket at once.

**Free room** is taken where there is some. In a pool that displaces, idle leases make room if they are expected later and that is
expected to save more waiting than it costs: an expected lease saves its resume with its own likelihood; each that leaves loses the time
of its swaps with the likelihood that it is wanted before the expectation lapses.

**In vain.** What an early swap moves is at stake until a cell of the lease comes. What is at stake on one device within an hour is
bounded (`foresight_vain_mib`), so signs that deceive cost no more than that.
"""

from fractional_gpu.core.books.records import Lease, Stake
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.forecasts.forecasts import RESUME
from fractional_gpu.core.model import Foresight, LeaseState, Sign
from fractional_gpu.core.rules.admission import over_limit
from fractional_gpu.core.rules.eligibility import eligible_devices
from fractional_gpu.core.rules.fairness import swap_ms
from fractional_gpu.core.rules.likelihood import is_expected, likelihood_milli, next_cell_in_ms
from fractional_gpu.core.scheduler.capacity import Capacity
from fractional_gpu.core.scheduler.victims import Victims

_HOUR_MS = 3_600_000
_SIGNS = {
    Sign.FOCUS: "its notebook came to the front",
    Sign.SCROLL: "its notebook is being read",
    Sign.TYPING: "a cell is being edited",
    Sign.HOVER: "the pointer is on a button that runs a cell",
    Sign.COMPLETION: "a completion was asked for",
    Sign.INSPECTION: "a tooltip was asked for",
    Sign.WIDGET: "a widget is being used",
    Sign.RHYTHM: "its cells come at such intervals",
    Sign.OTHER: "a program says so",
}


class EarlyResumes:
    """Begins early resumes, and the suspends that make room for them. `recheck_ms`: when time alone allows one."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self.recheck_ms: int | None = None

    def begin(self) -> None:
        """Bring expected leases back, the likeliest first, as long as swap channels are free."""
        books, self.recheck_ms = self._books, None
        able = [lease for lease in books.expected.values() if self._may_come(lease)]
        if not able:
            return
        victims = Victims(books)
        capacity = Capacity(books, victims)
        for lease in sorted(able, key=self._rank):
            if not self._changes.channel_free:
                return
            if self._may_come(lease):
                self._bring_back(lease, capacity, victims)
        self._recheck_at(victims.recheck_ms)

    def _rank(self, lease: Lease) -> tuple[int, int, int]:
        until_ms = lease.expectation.until_ms if lease.expectation is not None else 0
        return -likelihood_milli(lease), until_ms, lease.number

    def _may_come(self, lease: Lease) -> bool:
        books, pool = self._books, self._books.policy(lease)
        if lease.state is not LeaseState.SUSPENDED or pool.foresight is Foresight.OFF:
            return False
        if lease.spec.pool in books.waiting_pools:
            return False
        if lease.revoked or not is_expected(books, lease):
            return False
        if lease.retries.resume_after_ms > books.now_ms:
            self._recheck_at(lease.retries.resume_after_ms)
            return False
        return over_limit(books, lease, lease.milli) is None and self._resume_ms(lease) <= pool.foresight_swap_ms

    def _bring_back(self, lease: Lease, capacity: Capacity, victims: Victims) -> None:
        """Begin the lease's resume, or the first suspend that makes room for it."""
        books, need_mib = self._books, lease.need_mib
        devices = tuple(
            one for one in eligible_devices(books, books.policy(lease), lease) if self._may_stake(one, lease, ())
        )
        chosen = capacity.pick_for(lease, devices, need_mib)
        if chosen is not None:
            self._stake(lease, chosen, 2 * lease.saved_mib)
            lease.came_early = True
            sign = lease.expectation.best if lease.expectation is not None else Sign.OTHER
            self._changes.resume_early(lease, chosen, "resume.expected", f"a cell is expected ({_SIGNS[sign]})")
        elif books.policy(lease).foresight is Foresight.DISPLACE and lease.count == 1:
            self._displace(lease, devices, capacity, victims)

    # -- idle leases that make room ------------------------------------------------------------------------------------

    def _displace(self, lease: Lease, devices: tuple[str, ...], capacity: Capacity, victims: Victims) -> None:
        best: tuple[int, int, str, tuple[Lease, ...]] | None = None
        choice = capacity.choice(lease, devices, lease.need_mib)
        saved = likelihood_milli(lease) * self._resume_ms(lease)
        for device_id in devices:
            chosen = self._leaving(lease, device_id, capacity, victims)
            if chosen is None:
                continue
            regret = sum(self._regret(victim, lease) for victim in chosen)
            then_mib = capacity.room(device_id).total_mib + sum(victim.held_mib for victim in chosen)
            rank = regret, choice.spoilt([(device_id, then_mib)])
            if regret < saved and (best is None or rank < best[:2]):
                best = *rank, device_id, chosen
        if best is None:
            return
        *_, device_id, chosen = best
        victim = chosen[0]  # the next one is looked at anew when this one has left
        self._stake(lease, (device_id,), 2 * victim.host_need_mib)
        sentence = "idle, and another kernel is expected to need its room sooner"
        self._changes.begin_suspend(victim, "suspend.expected", sentence, beneficiary=lease)

    def _leaving(self, lease: Lease, device_id: str, capacity: Capacity, victims: Victims) -> tuple[Lease, ...] | None:
        """Return the idle leases of a device that would make room; None where there are not enough, or one of them may not."""
        books, short_mib = self._books, lease.need_mib - capacity.room(device_id).total_mib
        if short_mib <= 0:
            return None  # what leaves already suffices: the resume follows
        stays = {one.lease_id for one in books.devices[device_id].holders.values() if self._stays(one, lease)}
        host_mib = books.host_left_mib
        chosen = victims.choose(device_id, short_mib, lease, stays, busy=False, host_mib=host_mib)
        if not chosen or sum(one.host_need_mib for one in chosen) > host_mib:
            return None
        return chosen if self._may_stake(device_id, lease, chosen) else None

    def _stays(self, other: Lease, lease: Lease) -> bool:
        """Return whether another lease makes no room for this one; its pool may be another one, whose device was this one's home before."""
        books, pool = self._books, self._books.policy(other)
        if pool.foresight is not Foresight.DISPLACE or self._is_sooner(other, lease):
            return True
        return swap_ms(books, other) > books.policy(lease).foresight_swap_ms

    def _is_sooner(self, other: Lease, lease: Lease) -> bool:
        """Return whether the other lease is expected to run before the expectation of this one lapses."""
        books = self._books
        until_ms = lease.expectation.until_ms if lease.expectation is not None else books.now_ms
        return is_expected(books, other) or books.now_ms + next_cell_in_ms(books, other) <= until_ms

    def _regret(self, victim: Lease, lease: Lease) -> int:
        """Return what the victim is expected to lose: the ms of its swaps times the thousandths of their likelihood."""
        books = self._books
        until_ms = lease.expectation.until_ms if lease.expectation is not None else books.now_ms
        milli = books.forecasts.chance_milli(victim.lease_id, books.now_ms, until_ms - books.now_ms)
        return milli * swap_ms(books, victim)

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _resume_ms(self, lease: Lease) -> int:
        books = self._books
        device = books.devices.get(lease.home_id or "")
        name = device.spec.name if device is not None else ""
        return books.forecasts.swap_ms(RESUME, name, lease.saved_mib)

    def _may_stake(self, device_id: str, lease: Lease, victims: tuple[Lease, ...]) -> bool:
        """Return whether the swaps for the lease stay within what may be moved in vain to and from the device."""
        device, from_ms = self._books.devices[device_id], self._books.now_ms - _HOUR_MS
        while device.stakes and device.stakes[0].at_ms <= from_ms:
            del device.stakes[0]
        mib = 2 * (lease.saved_mib + sum(victim.host_need_mib for victim in victims))
        may = sum(stake.mib for stake in device.stakes) + mib <= self._books.policy(lease).foresight_vain_mib
        if not may and device.stakes:
            self._recheck_at(device.stakes[0].at_ms + _HOUR_MS)
        return may

    def _recheck_at(self, at_ms: int | None) -> None:
        if at_ms is not None:
            self.recheck_ms = at_ms if self.recheck_ms is None else min(self.recheck_ms, at_ms)

    def _stake(self, lease: Lease, device_ids: tuple[str, ...], mib: int) -> None:
        for device_id in device_ids:
            self._books.devices[device_id].stakes.append(Stake(lease.lease_id, self._books.now_ms, mib))
