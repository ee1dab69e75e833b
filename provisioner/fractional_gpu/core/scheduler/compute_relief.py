"""Moving busy leases off devices whose busy leases slow each other down.

Where kernels start says little about which cells will run there at the same time, and how much of a device a cell needs is known only once
it runs. So the arbiter looks again: where the busy leases of a device, by what their cells have shown, need more than the bound of their
pool, it weighs moving one of them to a device that leaves it more.

**Gain.** Busy leases that need more than a device lose u * (k - 1) of the time that their cells still take, each for its own u
(`time_slicing`). The gain of a move is what both devices lose now, less what they would lose then. How long cells still take is forecast.

**Cost.** The suspend and resume of the lease, while which its cell does not run. Where the other device lacks memory, idle leases there
make room, and their suspends and resumes are added. A move must gain twice what it costs.

Only what tickets leave is used: nothing is begun while one waits, or while no swap channel is free. A lease is moved only where its pool
moves leases (`may_move`), weighs compute, and lets busy ones be preempted or moved at all, and only after its minimum residency. Idle
leases that make room are suspended first; the move follows when they have left, if it still gains enough.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fractional_gpu.core.books.records import Device, Lease, OccupancyKind
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.rules.contention import spreads
from fractional_gpu.core.rules.eligibility import other_devices
from fractional_gpu.core.rules.fairness import preemptible_from_ms, swap_ms
from fractional_gpu.core.rules.fragmentation import DeviceChoice, device_choice
from fractional_gpu.core.scheduler.migration import begin_move
from fractional_gpu.core.scheduler.victims import Victims
from fractional_gpu.core.time_slicing import WHOLE_MILLI, stretch_milli

_TIMES_COST = 2  # that a move must gain
_MOST_MADE_ROOM = 8  # devices that lack memory and are looked at for one lease, those that are least busy


@dataclass(frozen=True, slots=True)
class _Load:
    """What busy leases need of a device, thousandths of it, and the sum of their thousandths times the ms that their cells still take."""

    wants_milli: tuple[int, ...]
    weight: int

    @property
    def milli(self) -> int:
        return sum(self.wants_milli)

    def lost_ms(self) -> int:
        """Return what the cells of these leases lose in all, ms."""
        return self.weight * (stretch_milli(self.wants_milli) - WHOLE_MILLI) // (WHOLE_MILLI * WHOLE_MILLI)

    def with_one(self, milli: int, weight: int) -> "_Load":
        return _Load((*self.wants_milli, milli), self.weight + weight)

    def without(self, milli: int, weight: int) -> "_Load":
        at = self.wants_milli.index(milli)
        return _Load(self.wants_milli[:at] + self.wants_milli[at + 1 :], self.weight - weight)


@dataclass(frozen=True, slots=True)
class _Move:
    gain_ms: int
    lease: Lease
    device_id: str
    victims: tuple[Lease, ...]
    spoilt: int  # of the memory that is free on the other device then (`fragmentation`)


def _rank(move: _Move) -> tuple[int, int, int]:
    """Return what orders moves: a cell of a low priority stops for its neighbours, then comes the gain, then the memory."""
    return -move.lease.spec.priority, move.gain_ms, -move.spoilt


class ComputeRelief:
    """Begins such moves. `recheck_ms`: when time alone allows one."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._victims = Victims(changes.books)

    @property
    def recheck_ms(self) -> int | None:
        """When to look again, or None."""
        return self._victims.recheck_ms

    def relieve(self) -> None:
        """Begin the move that gains most, or the first suspend that makes room for it, as long as swap channels are free."""
        books = self._books
        self._victims = Victims(books)
        while not books.waiting and self._changes.channel_free:
            crowded = [device for device in books.devices.values() if device.sums.demand_milli > WHOLE_MILLI]
            if not crowded:
                return
            loads: dict[str, _Load] = {}
            moves = [move for device in crowded for move in self._moves_from(device, loads)]
            best = max(moves, key=_rank, default=None)  # the first of equals
            if best is None:
                return
            self._begin(best)

    def _begin(self, move: _Move) -> None:
        lease, victims = move.lease, move.victims
        if victims:
            sentence = "idle, and its device is to take a busy kernel whose neighbours slow it down"
            self._changes.begin_suspend(victims[0], "suspend.compute", sentence, beneficiary=lease)
            return
        here = self._books.devices[lease.occupied_ids[0]]
        sentence = (
            f"busy kernels need {here.sums.demand_milli // 10} % of its device together, and another one leaves it more"
        )
        begin_move(self._changes, lease, (move.device_id,), "move.compute", sentence)

    # -- what a move gains ---------------------------------------------------------------------------------------------

    def _moves_from(self, here: Device, loads: dict[str, _Load]) -> Iterable[_Move]:
        """Yield the moves of leases off a device that gain enough."""
        known = [lease for lease in _busy_on(here) if lease.cell_milli is not None]
        if sum(lease.busy_milli for lease in known) <= WHOLE_MILLI:
            return  # the rest has shown nothing yet
        for lease in known:
            if self._may_move(lease):
                yield from self._moves_of(lease, here, loads)

    def _moves_of(self, lease: Lease, here: Device, loads: dict[str, _Load]) -> Iterable[_Move]:
        books, cost_ms = self._books, swap_ms(self._books, lease)
        milli, weight = lease.busy_milli, self._weight(lease)
        now, lacking = self._load(here, loads), list[tuple[int, str, int]]()
        saved_ms = now.lost_ms() - now.without(milli, weight).lost_ms() - _TIMES_COST * cost_ms
        if saved_ms <= 0:
            return
        others = other_devices(books, lease)
        choice = device_choice(
            books, lease, lease.held_mib, lambda: [(one, books.devices[one].free_mib) for one in others]
        )
        for device_id in others:
            there, load = books.devices[device_id], self._load(books.devices[device_id], loads)
            gain_ms = saved_ms + load.lost_ms() - load.with_one(milli, weight).lost_ms()
            if gain_ms <= 0 or there.lease_capacity_mib < lease.held_mib:
                continue
            if there.free_mib >= lease.held_mib:
                yield _Move(gain_ms, lease, device_id, (), choice.spoilt([(device_id, there.free_mib)]))
            else:
                lacking.append((load.milli, device_id, gain_ms))
        for _, device_id, gain_ms in sorted(lacking)[:_MOST_MADE_ROOM]:
            yield from self._with_room_made(lease, device_id, gain_ms, choice)

    def _with_room_made(self, lease: Lease, device_id: str, gain_ms: int, choice: DeviceChoice) -> Iterable[_Move]:
        """Yield the move to a device where idle leases leave first, if what it gains is enough for their swaps as well."""
        books, there = self._books, self._books.devices[device_id]
        host_mib = books.host_left_mib - lease.host_need_mib
        short_mib = lease.held_mib - there.free_mib - there.mib(OccupancyKind.SUSPENDING)
        if short_mib <= 0:
            return  # what leaves already suffices: the move follows
        victims = self._victims.choose(device_id, short_mib, lease, set(), busy=False, host_mib=host_mib)
        if not victims or sum(victim.host_need_mib for victim in victims) > host_mib:
            return
        gain_ms -= _TIMES_COST * sum(swap_ms(books, victim) for victim in victims)
        if gain_ms > 0:
            then_mib = lease.held_mib - short_mib + sum(victim.held_mib for victim in victims)
            yield _Move(gain_ms, lease, device_id, victims, choice.spoilt([(device_id, then_mib)]))

    def _may_move(self, lease: Lease) -> bool:
        books, pool = self._books, self._books.policy(lease)
        if not pool.may_move or not (pool.preempt_equals or pool.move_busy) or not spreads(books, lease):
            return False
        if lease.count > 1 or lease.ticket is not None or lease.revoked or lease.left_behind:
            return False
        if books.devices[lease.occupied_ids[0]].sums.demand_milli <= pool.slowdown_bound_milli:
            return False
        from_ms = preemptible_from_ms(books, lease)
        if from_ms is None or lease.host_need_mib > books.host_left_mib:
            return False
        if from_ms > books.now_ms:
            self._victims.recheck_at(from_ms)
        return from_ms <= books.now_ms

    def _load(self, device: Device, loads: dict[str, _Load]) -> _Load:
        device_id = device.spec.device_id
        if device_id not in loads:
            weight = sum(self._weight(lease) for lease in _busy_on(device))
            wants_milli = tuple(lease.counted_milli for lease in device.holders.values())
            loads[device_id] = _Load(wants_milli, weight)
        return loads[device_id]

    def _weight(self, lease: Lease) -> int:
        return lease.busy_milli * self._books.forecasts.cell_left_ms(lease.lease_id, self._books.now_ms)


def _busy_on(device: Device) -> list[Lease]:
    return [lease for lease in device.holders.values() if lease.occupancy is OccupancyKind.BUSY]
