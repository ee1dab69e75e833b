"""Moves leases to other devices. A move suspends the lease and immediately resumes it on its target device, where room is kept for it.

A lease moves if

- an administrator requests it, in which case it moves at once or not at all (`move_on_request`);
- it is idle and can grow on another device (`move_to_grow`);
- it must make room for a ticket and fits on another device (`move_aside`). In a pool with `move_busy`, this includes a busy lease if idle
  ones cannot make room (`plan_busy_move`);
- it is busy and would get more compute on another device (`relieve_compute`);
- it is idle and moving it helps to empty its device (`empty_devices`).

A moving lease has a ticket from the start, ahead of all others of the same priority. If its target can no longer take it, because a process
without a lease took the memory or the device was lost, it becomes an ordinary suspended lease with a ticket.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.core.place import DeviceChoice, allowed_of, device_choice, excess, other_devices, spreads
from fractional_gpu.core.revoke import REVOKED
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease, OccupancyKind, Reason
from fractional_gpu.core.suspend import (
    Capacity,
    Plan,
    Victims,
    is_expected,
    may_leave,
    preemptible_from_ms,
    suspendable_from_ms,
    swap_ms,
)
from fractional_gpu.core.time_slicing import WHOLE_MILLI, stretch_milli
from fractional_gpu.core.units import format_memory
from fractional_gpu.core.words import name_for


def kept_mib(lease: Lease) -> int:
    """Return how much memory to keep for a moving lease on each of its target devices, in MiB."""
    grows = lease.ticket.resize_to if lease.ticket is not None else None
    return max(lease.need_mib, grows.reserve_mib if grows is not None else 0)


def _may_go(books: Books, lease: Lease) -> bool:
    """Return whether a lease can be moved: it has one device and no ticket, is not revoked, and its state fits in host memory."""
    stays = lease.count > 1 or lease.ticket is not None or lease.revoked
    return not stays and lease.host_need_mib <= books.host_left_mib


class Migrations:
    """Moves leases to other devices during one pass over the queue, to make room for tickets."""

    def __init__(self, changes: Changes, capacity: Capacity) -> None:
        self._changes = changes
        self._books = changes.books
        self._capacity = capacity

    def move_to_grow(self, lease: Lease, spec: LeaseSpec) -> bool:
        """Move an idle lease to a device where it can grow, if there is one. Return whether it moves."""
        books = self._books
        if not self._changes.channel_free or lease.count > 1 or not may_leave(books, lease):
            return False
        if lease.host_need_mib > books.host_left_mib:
            return False
        need_mib = books.reserve_mib(lease, spec)
        return self._move(lease, need_mib, "move.grow", f"it moves to a device with {format_memory(need_mib)} free")

    def move_aside(self, victim: Lease, lease: Lease) -> bool:
        """Move `victim` to another device instead of suspending it for `lease`, if it fits there. Return whether it moves.

        An idle victim is not moved for a suspended lease.
        """
        if not _may_go(self._books, victim):
            return False
        if not self._books.policy(victim).move_busy if victim.busy else lease.state is LeaseState.SUSPENDED:
            return False
        why = f"it also fits on another device, and moving it makes room for {name_for(victim, lease)}"
        return self._move(victim, victim.held_mib, "move.defragment", why, lease)

    def _move(self, lease: Lease, need_mib: int, reason: str, sentence: str, beneficiary: Lease | None = None) -> bool:
        """Move the lease to a device that has `need_mib` free now. Return whether there is such a device."""
        targets = self._capacity.pick(lease, other_devices(self._books, lease), need_mib)
        if targets is None:
            return False
        begin_move(self._changes, lease, targets, reason, sentence, beneficiary=beneficiary)
        for device_id in targets:
            self._capacity.keep(lease, device_id, max(kept_mib(lease), lease.held_mib))
        return True

    def plan_busy_move(self, lease: Lease, devices: Sequence[str], need_mib: int) -> Plan | None:
        """Return a plan to move one busy lease that holds enough memory and fits on another device. If there is none, return None."""
        pool = self._books.policy(lease)
        if not (pool.move_busy and pool.may_move) or lease.count > 1 or not self._changes.channel_free:
            return None
        found = list[tuple[int, int, str, Plan]]()
        for device_id in devices:
            short_mib = need_mib - self._capacity.total_mib(device_id)
            for other in self._books.holders(device_id):
                if other.occupancy is OccupancyKind.BUSY and other.held_mib >= short_mib and self._may_move(other):
                    lacking = excess(self._books, self._books.devices[device_id], lease, (other,))
                    plan = Plan((device_id,), (other,))
                    found.append((lacking, swap_ms(self._books, other), other.lease_id, plan))
        return min(found, key=lambda one: one[:3])[3] if found else None

    def _may_move(self, lease: Lease) -> bool:
        if not self._books.policy(lease).move_busy or not _may_go(self._books, lease):
            return False
        if not any(self._capacity.fits([one], lease.held_mib) for one in other_devices(self._books, lease)):
            return False
        return self._books.is_time(preemptible_from_ms(self._books, lease))


def begin_move(
    changes: Changes,
    lease: Lease,
    target_ids: Sequence[str],
    reason: str,
    sentence: str,
    *,
    beneficiary: Lease | None = None,
) -> None:
    """Suspend the lease, and file a ticket for its targets ahead of all others. `beneficiary` is the lease that gets its room, if any."""
    ticket = lease.ticket  # it already has one if it waits to grow
    if ticket is None:
        ticket = changes.new_ticket(first=True)
        ticket.preempted = lease.busy
        changes.books.enqueue(lease, ticket)
        changes.requeued.add(lease.spec.pool)
    ticket.after_suspend = ticket.after_suspend or changes.new_ticket()
    ticket.kept_on = tuple(target_ids)
    lease.target_ids = tuple(target_ids)
    changes.begin_suspend(lease, reason, sentence, beneficiary=beneficiary)


BUSY_CHANNEL = "swap-channel"
"""The refusal code for requests that can be retried once another kernel's suspend or resume has ended."""


def move_on_request(changes: Changes, lease: Lease, device_id: str | None) -> Reason | None:
    """Begin a requested move, or return the reason for refusing it. The caller must have checked that the lease can be suspended.

    The move does not use room that is kept for other moving leases or being freed for a ticket.
    """
    refused = REVOKED if lease.revoked else _not_movable(changes, lease)
    if refused is not None:
        return refused
    books, there = changes.books, other_devices(changes.books, lease)
    if device_id is not None and device_id not in there:
        return _not_there(changes, lease, device_id)
    capacity = Capacity(books)
    for other in books.waiting.values():
        for kept_on in other.ticket.kept_on if other.ticket is not None else ():
            capacity.keep(other, kept_on, max(kept_mib(other), other.held_mib))
    asked = (device_id,) if device_id is not None else there
    fitting = [one for one in asked if capacity.fits([one], lease.held_mib)]
    if not fitting:
        left = "no other device has that much free"
        if device_id is not None:
            left = f"only {format_memory(max(0, capacity.free_mib(device_id)))} is free there"
        return Reason(
            "no-room", f"the kernel has {format_memory(lease.held_mib)} reserved, but {left}: make room first"
        )
    targets = capacity.pick(
        lease, [one for one in fitting if not books.devices[one].mib(OccupancyKind.SUSPENDING)], lease.held_mib
    )
    if not changes.channel_free or targets is None:
        return Reason(BUSY_CHANNEL, "another kernel is being moved or saved: try again in a moment")
    begin_move(changes, lease, targets, "move.asked", "an administrator is moving it to another device")
    return None


def _not_movable(changes: Changes, lease: Lease) -> Reason | None:
    pool = changes.books.policy(lease)
    if lease.state is not LeaseState.RESIDENT:
        return Reason(
            "not-resident",
            f"the kernel is not on a device (it is {lease.state}): only a kernel on a device can be moved",
        )
    if lease.busy:
        return Reason("busy", "a cell is running: interrupt it, or try again when it has ended")
    if lease.count > 1:
        return Reason("several-devices", "the kernel has several devices: only kernels on one device can be moved")
    here = changes.books.devices.get(lease.device_id or "")
    why_not = here.spec.why_no_move if here is not None else ""
    if not pool.may_move or why_not:
        return Reason("may-not-move", why_not or f"pool {pool.name!r} does not move kernels: its may_move is off")
    if lease.ticket is not None:
        return Reason("grows", "the kernel is waiting to grow on its device: try again when it has grown")
    return None


def _not_there(changes: Changes, lease: Lease, device_id: str) -> Reason:
    books = changes.books
    device, pool = books.devices.get(device_id), books.policy(lease)
    if device_id in lease.device_ids:
        return Reason("there-already", "the kernel is already on that device")
    if device is None or device_id not in pool.devices:
        return Reason("other-pool", f"that device is not in pool {pool.name!r}: choose one that is")
    if device_id not in allowed_of(pool, lease.spec):
        return Reason(
            "not-allowed", "the kernel's job or pod was given other devices: choose one of them (`jupyter gpu seats`)"
        )
    if device.lost or device.draining:
        return Reason("device-closed", "that device is being drained or is not responding: choose another")
    return Reason("other-kind", "that device is of another kind: saved state can only be restored on the same kind")


# -- compute -----------------------------------------------------------------------------------------------------------
# When a kernel is placed, it is unknown which cells will run at the same time and how much of a device each will need. So the arbiter
# reconsiders the placement when busy leases need more of a device than their pool's bound.
#
# Each busy lease loses u * (k - 1) of its cell's remaining time, where u is its own demand (`time_slicing`). The gain of a move is what the
# leases on both devices lose now, minus what they would lose after the move. Its cost is the time of the lease's suspend and resume, during
# which its cell does not run, and of the swaps of idle leases that make room on the other device. The gain must be twice the cost.


_TIMES_COST = 2  # a move must gain this many times its cost
_MOST_FULL_DEVICES = 8  # devices without enough memory to consider per lease, least busy first


_Needs = dict[str, tuple[int, int]]
"""Maps each lease to two numbers: the thousandths of a device it needs, and these multiplied by its cell's remaining time in ms."""


@dataclass(frozen=True, slots=True)
class _Move:
    gain_ms: int
    lease: Lease
    device_id: str
    victims: tuple[Lease, ...]
    fragmentation: int  # of the other device's free memory after the move (`place`)

    @property
    def rank(self) -> tuple[int, int, int]:
        """A sort key, with the best move highest. It prefers low-priority leases, then large gains, then little fragmentation."""
        return -self.lease.spec.priority, self.gain_ms, -self.fragmentation


def relieve_compute(changes: Changes) -> None:
    """If no ticket is waiting and swap channels are free, move busy leases off devices where they slow each other down.

    Begin the best move, or the first suspend that makes room for it. In the second case, the move itself follows once the idle leases have
    left, if it is still worthwhile.
    """
    books = changes.books
    while not books.waiting and changes.channel_free:
        crowded = [device for device in books.devices.values() if device.sums.demand_milli > WHOLE_MILLI]
        if not crowded:
            return
        needs = {device_id: _needs_on(books, device) for device_id, device in books.devices.items()}
        moves = [move for device in crowded for move in _moves_from(books, device, needs)]
        best = max(moves, key=lambda move: move.rank, default=None)  # the first of equals
        if best is None:
            return
        if best.victims:
            sentence = "idle, and a busy kernel slowed down by its neighbours is moving to its device"
            changes.begin_suspend(best.victims[0], "suspend.compute", sentence, beneficiary=best.lease)
        else:
            percent = books.devices[best.lease.device_ids[0]].sums.demand_milli // 10
            sentence = f"busy kernels together need {percent} % of its device, and another device has more to spare"
            begin_move(changes, best.lease, (best.device_id,), "move.compute", sentence)


def _needs_on(books: Books, device: Device) -> _Needs:
    needs = _Needs()
    for lease_id, lease in device.holders.items():
        is_busy = lease.occupancy is OccupancyKind.BUSY
        left_ms = books.forecasts.cell_left_ms(lease_id, books.now_ms) if is_busy else 0
        needs[lease_id] = lease.counted_milli, lease.counted_milli * left_ms
    return needs


def _lost_ms(needs: Iterable[tuple[int, int]]) -> int:
    """Return the total time, in ms, that cells with these needs lose by sharing one device."""
    needs = list(needs)
    longer_milli = stretch_milli(milli for milli, _ in needs) - WHOLE_MILLI
    return sum(work for _, work in needs) * longer_milli // (WHOLE_MILLI * WHOLE_MILLI)


def _moves_from(books: Books, here: Device, needs: dict[str, _Needs]) -> Iterable[_Move]:
    """Yield the moves from this device to other devices that would save enough time to be worthwhile."""
    busy = [lease for lease in here.holders.values() if lease.occupancy is OccupancyKind.BUSY]
    known = [lease for lease in busy if lease.cell_milli is not None]
    if sum(lease.busy_milli for lease in known) <= WHOLE_MILLI:
        return  # the needs of the others are not known yet
    for lease in known:
        if _may_be_relieved(books, lease):
            yield from _moves_of(books, lease, needs)


def _may_be_relieved(books: Books, lease: Lease) -> bool:
    pool = books.policy(lease)
    wants_moves = pool.may_move and (pool.preempt_equals or pool.move_busy) and spreads(books, lease)
    if not wants_moves or lease.left_behind or not _may_go(books, lease):
        return False
    if books.devices[lease.device_ids[0]].sums.demand_milli <= pool.slowdown_bound_milli:
        return False
    return books.is_time(preemptible_from_ms(books, lease))


def _moves_of(books: Books, lease: Lease, needs: dict[str, _Needs]) -> Iterable[_Move]:
    here, others = needs[lease.device_ids[0]], other_devices(books, lease)
    stay = [need for lease_id, need in here.items() if lease_id != lease.lease_id]
    saved_ms = _lost_ms(here.values()) - _lost_ms(stay) - _TIMES_COST * swap_ms(books, lease)
    if saved_ms <= 0:
        return
    choice = device_choice(books, lease, lease.held_mib, [(one, books.devices[one].free_mib) for one in others])
    lacking = list[tuple[int, str, int]]()
    for device_id in others:
        device, there = books.devices[device_id], needs[device_id].values()
        gain_ms = saved_ms + _lost_ms(there) - _lost_ms([*there, here[lease.lease_id]])
        if gain_ms <= 0 or device.lease_capacity_mib < lease.held_mib:
            continue
        if device.free_mib >= lease.held_mib:
            yield _Move(gain_ms, lease, device_id, (), choice.fragmentation([(device_id, device.free_mib)]))
        else:
            lacking.append((sum(milli for milli, _ in there), device_id, gain_ms))
    for _, device_id, gain_ms in sorted(lacking)[:_MOST_FULL_DEVICES]:
        yield from _with_room_made(books, lease, device_id, gain_ms, choice)


def _with_room_made(books: Books, lease: Lease, device_id: str, gain_ms: int, choice: DeviceChoice) -> Iterable[_Move]:
    """Yield the move to a device on which idle leases must be suspended first, if the gain makes up for the time these suspends take."""
    there, host_mib = books.devices[device_id], books.host_left_mib - lease.host_need_mib
    short_mib = lease.held_mib - there.free_mib - there.mib(OccupancyKind.SUSPENDING)
    if short_mib <= 0:
        return  # leases that are already leaving free enough, so the move follows later
    victims = Victims(books).choose(device_id, short_mib, lease, (), host_mib=host_mib)
    if not victims or sum(victim.host_need_mib for victim in victims) > host_mib:
        return
    gain_ms -= _TIMES_COST * sum(swap_ms(books, victim) for victim in victims)
    if gain_ms > 0:
        then_mib = lease.held_mib - short_mib + sum(victim.held_mib for victim in victims)
        yield _Move(gain_ms, lease, device_id, victims, choice.fragmentation([(device_id, then_mib)]))


# -- packing -----------------------------------------------------------------------------------------------------------


QUIET_MS = 60_000
"""How long a lease must have been idle before it is moved to empty its device."""


def empty_devices(changes: Changes) -> None:
    """In each pool with `empty_devices`, begin the next move that helps to empty a device, while swap channels are free.

    A device's leases move to fuller devices of the same kind, so none of them ever moves back. They move only if all of them can, because
    there is no point in half emptying a device. They must have been idle for a while and not be expected to run soon, and none of their
    swaps may take longer than the pool's limit for early swaps.
    """
    books = changes.books
    for pool in books.pools.values():
        if not pool.empty_devices or not pool.may_move or pool.name in books.waiting_pools:
            continue
        devices = [books.devices[device_id] for device_id in pool.devices if device_id in books.devices]
        for device in sorted(devices, key=_fullness):
            if not changes.channel_free:
                return
            leases = list(device.holders.values())
            if not leases or not all(_may_be_packed(books, lease, pool) for lease in leases):
                continue
            move = _first_move(books, leases, device)
            if move is not None:
                sentence = "idle; moving it to a fuller device empties its own"
                begin_move(changes, move[0], (move[1],), "move.pack", sentence)
                break


def _may_be_packed(books: Books, lease: Lease, pool: PoolSpec) -> bool:
    from_ms = suspendable_from_ms(pool, lease)
    if lease.occupancy is not OccupancyKind.IDLE or from_ms is None or not _may_go(books, lease):
        return False
    if lease.spec.pool != pool.name:
        return False  # it was here before the device joined this pool, and its own pool may not want moves
    if lease.let_in or lease.gate.closed or is_expected(books, lease):
        return False
    if swap_ms(books, lease) > pool.foresight_swap_ms:
        return False
    return books.is_time(max(from_ms, lease.last_active_ms + QUIET_MS))


def _first_move(books: Books, leases: Iterable[Lease], device: Device) -> tuple[Lease, str] | None:
    """Return the first move of a series that would empty the device. Return None if any of its leases fits on no fuller device."""
    free_mib, moves = dict[str, int](), list[tuple[Lease, str]]()
    for lease in sorted(leases, key=lambda one: (-one.held_mib, one.number)):
        for device_id in other_devices(books, lease):
            if _fullness(books.devices[device_id]) > _fullness(device):
                free_mib.setdefault(device_id, books.devices[device_id].free_mib)
        fitting = [(one, left) for one, left in free_mib.items() if left >= lease.held_mib]
        if not fitting:
            return None
        # A device with only idle leases may be emptied next. So prefer devices in use, then the fullest, so that leases move only once.
        in_use = [place for place in fitting if _is_in_use(books.devices[place[0]])]
        choice = device_choice(books, lease, lease.held_mib, list(free_mib.items()))
        target = choice.best(in_use) or min(fitting, key=lambda place: place[1])[0]
        free_mib[target] -= lease.held_mib
        moves.append((lease, target))
    return moves[0]


def _is_in_use(device: Device) -> bool:
    return device.mib(OccupancyKind.IDLE) < device.sums.reserved_mib


def _fullness(device: Device) -> tuple[int, str]:
    return device.sums.reserved_mib, device.spec.device_id
