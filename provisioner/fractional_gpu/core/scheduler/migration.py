"""Moving a lease to other devices: it is suspended where it is and resumed at once on its target, where room is kept meanwhile.

There are five cases: an administrator requests it; an idle lease goes where it can grow; an idle lease that makes room for a ticket goes
where it fits now, instead of only being suspended; a busy lease does so where idle leases cannot make room and its pool moves busy ones
(`move_busy`); a busy lease goes where neighbours leave it more compute (`compute_relief`). Only leases on one device are moved for others.

A lease on its way has a ticket from the beginning, before all others of its priority. If its target cannot have it after all (a process
of no lease took the memory, the device was lost), it is a suspended lease with a ticket like any other.

A move that an administrator requests begins at once or is declined. It takes no room that is kept for leases on their way or is being
made for a ticket. While another swap is under way it is declined as `BUSY_CHANNEL`, and the requester tries again.
"""

from collections.abc import Sequence

from fractional_gpu.core.books.records import Lease, OccupancyKind, Reason
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.handlers.overrides import REVOKED
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.core.rules.contention import excess, least_full, spreads
from fractional_gpu.core.rules.eligibility import allowed_of, other_devices
from fractional_gpu.core.rules.fairness import preemptible_from_ms, swap_ms
from fractional_gpu.core.rules.fragmentation import device_choice
from fractional_gpu.core.rules.wait_reasons import name_for
from fractional_gpu.core.scheduler.capacity import Capacity, Plan
from fractional_gpu.core.scheduler.victims import Victims
from fractional_gpu.core.units import format_memory


def kept_mib(lease: Lease) -> int:
    """Return what is kept for a lease on its way, on each of its targets, MiB."""
    grows = lease.ticket.resize_to if lease.ticket is not None else None
    return max(lease.need_mib, grows.reserve_mib if grows is not None else 0)


class Migrations:
    """The moves of one pass over the queue."""

    def __init__(self, changes: Changes, room: Capacity, victims: Victims) -> None:
        self._changes = changes
        self._books = changes.books
        self._capacity = room
        self._victims = victims

    def move_to_grow(self, lease: Lease, spec: LeaseSpec) -> bool:
        """Move an idle lease that cannot grow where it is to a device with room for that. Returns whether it moves."""
        if not self._changes.channel_free or lease.count > 1 or not self._victims.may_leave(lease):
            return False
        need_mib = self._books.reserve_mib(lease, spec)
        targets = self._capacity.pick(lease, other_devices(self._books, lease), need_mib)
        if targets is None or lease.host_need_mib > self._books.host_left_mib:
            return False
        self._begin(lease, targets, "move.grow", f"it goes where {format_memory(need_mib)} are free for it")
        return True

    def move_aside(self, victim: Lease, lease: Lease) -> bool:
        """Move a lease that makes room to a device where it fits now; an idle one only if the beneficiary needs no resume itself."""
        if victim.count > 1 or victim.ticket is not None or victim.revoked:
            return False
        if not self._books.policy(victim).move_busy if victim.busy else lease.state is LeaseState.SUSPENDED:
            return False
        targets = self._capacity.pick(victim, other_devices(self._books, victim), victim.held_mib)
        if targets is None:
            return False
        why = f"it fits there as well, and makes room for {name_for(victim, lease)}"
        self._begin(victim, targets, "move.defragment", why, lease)
        return True

    def plan_busy_move(self, lease: Lease, devices: Sequence[str], need_mib: int) -> Plan | None:
        """Return a plan with one busy lease that fits elsewhere and holds what the ticket lacks; None if there is none."""
        pool = self._books.policy(lease)
        if not (pool.move_busy and pool.may_move) or lease.count > 1 or not self._changes.channel_free:
            return None
        best: tuple[int, int, str, Plan] | None = None
        for device_id in devices:
            short_mib = need_mib - self._capacity.room(device_id).total_mib
            for other in self._books.holders(device_id):
                if other.occupancy is not OccupancyKind.BUSY or other.held_mib < short_mib or not self._may_move(other):
                    continue
                lacking = excess(self._books, self._books.devices[device_id], lease, (other,))
                cost = (lacking, swap_ms(self._books, other), other.lease_id)
                if best is None or cost < best[:3]:
                    best = (*cost, Plan((device_id,), (other,)))
        return None if best is None else best[3]

    def _may_move(self, lease: Lease) -> bool:
        pool, from_ms = self._books.policy(lease), preemptible_from_ms(self._books, lease)
        if not (pool.move_busy and pool.may_move) or from_ms is None or lease.count > 1 or lease.ticket is not None:
            return False
        if lease.revoked:
            return False
        if not any(self._capacity.fits([one], lease.held_mib) for one in other_devices(self._books, lease)):
            return False
        if from_ms > self._books.now_ms:
            self._victims.recheck_at(from_ms)
            return False
        return lease.host_need_mib <= self._books.host_left_mib

    def _begin(
        self, lease: Lease, target_ids: Sequence[str], reason: str, sentence: str, beneficiary: Lease | None = None
    ) -> None:
        begin_move(self._changes, lease, target_ids, reason, sentence, beneficiary=beneficiary)
        for device_id in target_ids:
            self._capacity.keep(lease, device_id, max(kept_mib(lease), lease.held_mib))


def begin_move(
    changes: Changes,
    lease: Lease,
    target_ids: Sequence[str],
    reason: str,
    sentence: str,
    *,
    beneficiary: Lease | None = None,
) -> None:
    """Suspend the lease for the `beneficiary` of its room, if any, with a ticket for its targets before all others."""
    ticket = lease.ticket  # it has one already if it waits to grow
    if ticket is None:
        ticket = changes.new_ticket(first=True)
        ticket.preempted = lease.busy
        changes.books.enqueue(lease, ticket)
        changes.requeued.add(lease.spec.pool)
    ticket.after_suspend = ticket.after_suspend or changes.new_ticket()
    ticket.kept_on = tuple(target_ids)
    changes.books.set_target(lease, target_ids)
    changes.begin_suspend(lease, reason, sentence, beneficiary=beneficiary)


BUSY_CHANNEL = "swap-channel"
"""The code of a refusal that ends with another kernel's swap."""


def move_on_request(changes: Changes, lease: Lease, device_id: str | None) -> Reason | None:
    """Begin a requested move. Returns why the lease stays, or None. The caller has checked that it can be suspended at all."""
    refused = REVOKED if lease.revoked else _not_movable(changes, lease)
    if refused is not None:
        return refused
    there = other_devices(changes.books, lease)
    if device_id is not None and device_id not in there:
        return _not_there(changes, lease, device_id)
    free_mib = _free_and_not_kept(changes, (device_id,) if device_id is not None else there)
    fitting = [place for place in free_mib.items() if place[1] >= lease.held_mib]
    if not fitting:
        most_mib = max(free_mib.values(), default=0)
        left = (
            f"{format_memory(max(0, most_mib))} are free there" if device_id is not None else "no other device has them"
        )
        return Reason(
            "no-room", f"{format_memory(lease.held_mib)} are reserved for the kernel, and {left}: make room first"
        )
    devices = changes.books.devices
    fitting = [place for place in fitting if not devices[place[0]].mib(OccupancyKind.SUSPENDING)]
    if not changes.channel_free or not fitting:
        return Reason(BUSY_CHANNEL, "another kernel is being moved or saved just now: try again in a moment")
    if spreads(changes.books, lease):
        fitting = least_full(changes.books, lease, fitting)
    chosen = device_choice(changes.books, lease, lease.held_mib, free_mib.items).best(fitting) or fitting[0][0]
    begin_move(changes, lease, (chosen,), "move.asked", "an administrator has it go to another device")
    return None


def _not_movable(changes: Changes, lease: Lease) -> Reason | None:
    pool = changes.books.policy(lease)
    if lease.state is not LeaseState.RESIDENT:
        return Reason(
            "not-resident",
            f"the kernel is on no device (it is {lease.state}): only one that is on a device can be moved",
        )
    if lease.busy:
        return Reason("busy", "a cell is running: interrupt it, or try again when it has ended")
    if lease.count > 1:
        return Reason("several-devices", "the kernel has several devices, and only kernels on one are moved")
    here = changes.books.devices.get(lease.device_id or "")
    why_not = here.spec.why_no_move if here is not None else ""
    if not pool.may_move or why_not:
        return Reason("may-not-move", why_not or f"pool {pool.name!r} moves no kernels: its may_move is off")
    if lease.ticket is not None:
        return Reason("grows", "the kernel waits for room to grow where it is: try again when it has it")
    return None


def _not_there(changes: Changes, lease: Lease, device_id: str) -> Reason:
    books = changes.books
    device, pool = books.devices.get(device_id), books.policy(lease)
    if device_id in lease.device_ids:
        return Reason("there-already", "the kernel is on that device already")
    if device is None or device_id not in pool.devices:
        return Reason("other-pool", f"that device is not one of pool {pool.name!r}: choose one of the pool's")
    if device_id not in allowed_of(pool, lease.spec):
        return Reason(
            "not-allowed", "the kernel's job or pod was given other devices: choose one of those (`jupyter gpu seats`)"
        )
    if device.lost or device.draining:
        return Reason("device-closed", "that device is being emptied, or answers nothing: choose another one")
    return Reason("other-kind", "that device is of another kind, and saved state comes back on a like one only")


def _free_and_not_kept(changes: Changes, devices: tuple[str, ...]) -> dict[str, int]:
    """Return how much memory of each device is free and kept for no lease, MiB."""
    kept: dict[str, int] = {}
    for other in changes.books.leases.values():
        for device_id in other.ticket.kept_on if other.ticket is not None else ():
            kept[device_id] = kept.get(device_id, 0) + max(kept_mib(other), other.held_mib)
    return {device_id: changes.books.devices[device_id].free_mib - kept.get(device_id, 0) for device_id in devices}
