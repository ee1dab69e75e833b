"""The laws over the whole state, checked by the independent model."""

from collections.abc import Iterable, Sequence

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import (
    Declined,
    Effect,
    Granted,
    Pinned,
    Recorded,
    Resized,
    Suspend,
    SuspendAnnounced,
    UserNotice,
)
from fractional_gpu.core.events import Event, PinRequested
from fractional_gpu.core.model import Compute, LeaseSpec, LeaseState, Strangers, TicketView
from tests.core.checked_books import Seen, World, law
from tests.core.expected_books import ExpectedCells
from tests.core.moves import ELIGIBLE
from tests.core.pin_books import Pins

__all__ = ["Laws"]

S = LeaseState
OF_ITS_OWN = frozenset({"suspend.asked", "suspend.breach", "move.grow", "move.asked"})
"""Reasons to suspend a lease that have nothing to do with other leases."""
_KEEPING = frozenset({"wait.making-room", "wait.swap-channel"})


class Laws:
    """Checks the laws against the model's books and the arbiter's view of its queue."""

    def __init__(self, world: World, arbiter: Arbiter) -> None:
        self._world = world
        self._arbiter = arbiter
        self.most_k = 0
        self.pins = Pins(world)
        self.expected = ExpectedCells(world, arbiter)

    def check(self, lines: Iterable[list[TicketView]], *, channel_free: bool) -> None:
        """Check the laws that hold at a single moment, given each pool's queue. Raises LawBrokenError."""
        self._law_7(lines, channel_free=channel_free)
        if channel_free and self._world.draining:
            self._drains()
        self._revoked(channel_free=channel_free)

    def _drains(self) -> None:
        """A lease leaves a draining device as soon as its state fits in host memory."""
        world = self._world
        left = world.budget - sum(seen.saved + seen.host for seen in world.leases.values())
        for device, evict in world.draining.items():
            for seen in world.on(device):
                if any(one in world.lost or one not in world.leasable for one in seen.devices):
                    continue  # nothing can be saved from it
                view = self._arbiter.lease(seen.lease_id)
                if (
                    seen.state is not S.RESIDENT
                    or (seen.busy and not evict)
                    or view is None
                    or view.unsuspendable_reason
                ):
                    continue
                fits = seen.save_at_least <= left
                if world.deadline(seen) is not None:
                    fits = fits and seen.told != "revocation.lost" and not seen.busy
                law(
                    0,
                    seen.pauses_until > world.now or not fits,
                    seen.lease_id,
                    "stays on",
                    device,
                    "which is emptied:",
                    view.sentence,
                )

    def _leaves_drained(self, seen: Seen) -> None:
        """A lease leaves a draining device; a busy one only if the administrator asked for that, or before a deadline."""
        evict = [self._world.draining[device] for device in seen.devices if device in self._world.draining]
        law(5, evict, seen.lease_id, "is suspended, but no device is emptied for that")
        if seen.works and not any(evict):
            self._interrupts(seen)

    def _interrupts(self, seen: Seen) -> None:
        """A cell is interrupted before a deadline as late as the saves allow: when everything on the device just fits before it."""
        deadline = self._world.deadline(seen)
        law(5, deadline is not None, seen.lease_id, "is busy and leaves, and its device stays")
        there = [one for one in self._world.leases.values() if self._world.deadline(one) is not None]
        most = sum(self._most_ms(one) for one in there)
        law(5, deadline is None or self._world.now >= deadline - 2 * most - 2_000, seen, "is interrupted too soon")

    def _most_ms(self, seen: Seen) -> int:
        """Return how long saving it may take, according to the forecast."""
        mib = max(seen.save_at_least, seen.used, seen.held * len(seen.devices))
        name = self._world.names.get(seen.devices[0], "")
        return self._arbiter.forecasts.widest_swap_span("suspend", name, mib).high_ms

    def told(self, seen: Seen, effect: UserNotice) -> None:
        """A user learns that the device goes away only while that is so and the kernel is on it, and that it stays only if it does."""
        goes = self._world.deadline(seen) is not None
        if effect.reason == "revocation.withdrawn":
            law(0, seen.told and not goes, effect, "is told to one whose device goes away, or who was told nothing")
            seen.told = ""
            return
        law(0, goes and seen.state is S.RESIDENT, effect, "is told to one whose device stays")
        law(0, seen.told not in {effect.reason, "revocation.lost"}, effect, "is told again:", seen.told)
        seen.told = effect.reason

    def keeps_channels(self, kept: int) -> None:
        """Swap channels are kept only for leases on a device that goes away."""
        there = [one for one in self._world.leases.values() if self._world.deadline(one) is not None]
        law(7, kept <= sum(one.state is S.RESIDENT for one in there), kept, "swap channels are kept for", there)

    # -- seats -------------------------------------------------------------------------------------------------------------------

    def moved(self, seen: Seen, old: LeaseState | None, new: LeaseState, *, by_release: bool) -> None:
        """A revoked lease gets no device and ends with its process; no other lease ends with its process."""
        comes = new is S.RESUMING or (old is S.NO_CONTEXT and new is S.RESIDENT)
        law(0, not (seen.revoked and comes), seen.lease_id, "has no seat, and comes onto a device:", old, new)
        law(0, not (seen.revoked and new is S.UNATTACHED), seen.lease_id, "has neither a seat nor a process")
        alone = new is S.ENDED and old is not S.UNATTACHED and not by_release
        law(0, seen.revoked or not alone, seen.lease_id, "ended with its process")

    def ends_processes(self, seen: Seen) -> None:
        """Only the processes of a revoked lease are ended, and only after its time is over."""
        law(0, seen.revoked and self._world.now >= seen.ends, seen, "has its processes ended at", self._world.now)

    def _revoked(self, *, channel_free: bool) -> None:
        """A revoked lease has no ticket, and leaves its device even in mid-cell as soon as its state can be saved."""
        world = self._world
        left = world.budget - sum(seen.saved + seen.host for seen in world.leases.values())
        for seen in [one for one in world.leases.values() if one.revoked]:
            law(0, not self._arbiter.waits(seen.lease_id), seen.lease_id, "has no seat and waits for a device")
            view = self._arbiter.lease(seen.lease_id)
            lost = any(one in world.lost or one not in world.leasable for one in seen.devices)
            if seen.state is not S.RESIDENT or not channel_free or lost or view is None or view.unsuspendable_reason:
                continue
            pauses = seen.pauses_until > world.now
            law(0, pauses or seen.save_at_least > left, seen.lease_id, "has no seat and stays on its device:", view)

    # -- limits ------------------------------------------------------------------------------------------------------------------

    def admitted(self, seen: Seen) -> None:
        """A lease was admitted: check that nothing forbade it."""
        for what in ("user", "group"):
            law(0, not self._exceeds(seen, what), seen.lease_id, "was admitted beyond the limits of its", what)

    def resized(self, seen: Seen, old: LeaseSpec) -> None:
        """A lease changed its size: if it is larger, check the limits of its user and group."""
        for what in ("user", "group") if seen.spec.fraction_milli > old.fraction_milli else ():
            law(0, not self._exceeds(seen, what, count=False), seen, "is larger than may be")

    def refused(self, event: Event, lease_id: str, reason: str) -> None:
        """A lease was refused: check the reason."""
        seen = self._world.leases[lease_id]
        if seen.state is None and reason in {"user-limit", "group-limit"}:
            law(0, self._exceeds(seen, reason.removesuffix("-limit")), event, "was refused within its limits")

    def _exceeds(self, seen: Seen, what: str, *, count: bool = True) -> bool:
        """Whether all leases of the user or group, including this one, exceed the limit."""
        limits = self._world.limits(seen).get(what)
        if limits is None:
            return False
        others = self._world.fellows(seen, what)
        too_many = count and limits.leases is not None and 1 + len(others) > limits.leases
        milli = seen.spec.fraction_milli * seen.spec.devices
        milli += sum(other.spec.fraction_milli * other.spec.devices for other in others)
        return too_many or (limits.milli is not None and milli > limits.milli)

    # -- pins --------------------------------------------------------------------------------------------------------------------

    def see(self, event: Event, effect: Effect) -> None:
        """Check any other effect."""
        if isinstance(effect, UserNotice):
            self.told(self._world.leases[effect.lease_id], effect)
        elif isinstance(effect, SuspendAnnounced):
            law(0, effect.at_ms >= self._world.now, effect, "announces the past")
        elif isinstance(effect, Pinned):
            self.pins.pinned(event, self._world.leases[effect.lease_id], effect)
        elif isinstance(effect, Declined) and isinstance(event, PinRequested) and effect.lease_id == event.lease_id:
            self.pins.declined(event, self._world.leases[effect.lease_id], effect)

    def ended(self, seen: Seen) -> None:
        self.pins.refund(seen)

    # -- law 3, law 5 --------------------------------------------------------------------------------------------------------------

    def suspending(self, seen: Seen, suspend: Suspend, why: Recorded, later: Sequence[Effect]) -> None:
        """A lease is suspended. Check that it was not busy, had a chance to run, and that it helps. `later`: the effects that follow."""
        pool, stayed = self._world.pool(seen), self._world.now - seen.arrived
        seen.sent_away = why.reason == "suspend.asked"
        seen.moves = why.reason.startswith("move.")
        if seen.sent_away:
            seen.expected_until = 0
        law(
            5,
            seen.works == suspend.preempt,
            seen.lease_id,
            "is suspended: busy",
            seen.works,
            "preempted",
            suspend.preempt,
        )
        law(5, suspend.between_cells == (seen.at_gate >= 0), seen, "is suspended between two cells:", suspend)
        lost = [device for device in seen.devices if device in self._world.lost or device not in self._world.leasable]
        law(2, not lost, seen.lease_id, "is suspended, but nothing can be saved from", lost, why)
        if why.reason == "suspend.drain":
            self._leaves_drained(seen)
            return
        if why.reason == "suspend.seat-ended":
            law(0, seen.revoked, seen.lease_id, "is suspended for the end of its seat, which has not ended")
            return
        if why.reason == "suspend.stranger":
            self._yields(seen, why)
        elif seen.works:
            self._preempts(seen, suspend, why)
        if seen.at_gate >= 0 and why.reason == "suspend.needed-by":
            self._is_behind(seen, suspend, why)
        at_once = {"suspend.idle", "suspend.needed-by", "suspend.expected"}
        if seen.works or why.reason == "suspend.stranger" or (why.reason in at_once and not seen.ran):
            law(5, stayed >= pool.min_residency_ms, seen.lease_id, "has stayed for", stayed, "ms only")
        pinned = seen.pinned_until > self._world.now
        law(5, not pinned or why.reason in OF_ITS_OWN, seen.lease_id, "is pinned and is suspended:", why)
        alone = seen.alone_until > self._world.now and why.reason not in {"suspend.asked", "move.asked"}
        law(5, not alone, seen.lease_id, "is suspended, and its last suspend failed just now:", why)
        law(6, not why.reason.startswith("move.") or pool.may_move, seen.lease_id, "may not move, but:", why)
        if why.reason in {"suspend.needed-by", "suspend.preempted"}:
            self._law_3(seen, suspend, why, later)
        if why.reason == "move.pack":
            law(5, pool.empty_devices and not seen.works, seen.lease_id, "is moved to empty its device:", why)
        if why.reason == "suspend.expected":
            self.expected.suspending(seen, suspend, why)

    def closing(self, seen: Seen, later: Sequence[Effect]) -> None:
        """A gate closes for an earlier ticket, after the minimum residency. `later`: the effects that follow."""
        law(5, seen.state is S.RESIDENT and not seen.closed, seen, "has its gate closed")
        opened = any(isinstance(one, Granted) and one.lease_id == seen.lease_id for one in later)
        law(5, not opened, seen, "has its gate closed and opened in one event")
        stayed = self._world.now - seen.arrived
        law(5, stayed >= self._world.pool(seen).min_residency_ms, seen.lease_id, "has stayed for", stayed, "ms only")
        law(5, seen.pinned_until <= self._world.now, seen, "is pinned and has its gate closed")
        others = [one for one in self._world.leases.values() if one is not seen and self._arbiter.waits(one.lease_id)]
        law(5, any(one.spec.priority >= seen.spec.priority for one in others), seen, "has its gate closed for nothing")
        seen.closed = True

    def _is_behind(self, victim: Seen, suspend: Suspend, why: Recorded) -> None:
        """A lease whose next cell waits at its gate leaves after its minimum residency, for a ticket that goes before that cell."""
        stayed = self._world.now - victim.arrived
        law(
            5, stayed >= self._world.pool(victim).min_residency_ms, victim.lease_id, "has stayed for", stayed, "ms only"
        )
        before = [
            seen
            for seen in self._beneficiaries(suspend)
            if seen.spec.priority > victim.spec.priority
            or (seen.spec.priority == victim.spec.priority and 0 <= seen.asked < victim.at_gate)
        ]
        law(5, before, victim.lease_id, "came before", why.sentence)

    def _preempts(self, victim: Seen, suspend: Suspend, why: Recorded) -> None:
        """A busy lease is preempted only by a lease that goes before it, and only if the pool allows that."""
        pool = self._world.pool(victim)
        if why.reason == "move.compute":
            may = pool.may_move and (pool.move_busy or pool.preempt_equals) and pool.compute is Compute.SPREAD
            law(5, may, victim.lease_id, "is busy and is moved:", why)
            return
        if why.reason == "move.defragment":
            law(5, pool.move_busy and pool.may_move, victim.lease_id, "is busy and is moved:", why)
            return
        law(5, why.reason == "suspend.preempted", victim.lease_id, "is busy and is suspended:", why)
        above = [
            seen
            for seen in self._beneficiaries(suspend)
            if (pool.preempt_priorities and seen.spec.priority > victim.spec.priority)
            or (pool.preempt_equals and seen.spec.priority == victim.spec.priority)
        ]
        law(5, above, victim.lease_id, "may not be preempted for", why.sentence)

    def _yields(self, seen: Seen, why: Recorded) -> None:
        """A lease leaves for a stranger that needs its room, a busy one only if its pool says so and the reservations do not fit."""
        world, policy = self._world, self._world.pool(seen).strangers
        law(5, policy is Strangers.YIELD_BUSY or (policy is Strangers.YIELD and not seen.works), seen, "yields:", why)
        law(5, seen.at_gate < 0, seen, "yields, and its next cell waits at its gate")
        lacking = [
            device
            for device in seen.devices
            if world.strangers[device] and world.unused(device) < (0 if seen.works else world.leasable[device] // 16)
        ]
        law(3, lacking, seen.lease_id, "yields, and there was room:", why)

    def _beneficiaries(self, suspend: Suspend) -> list[Seen]:
        seen = self._world.leases.get(suspend.for_lease_id)
        return [seen] if seen is not None else []

    def _law_3(self, victim: Seen, suspend: Suspend, why: Recorded, later: Sequence[Effect]) -> None:
        """A lease is suspended only for a waiting ticket that would fit if all idle leases left.

        For a ticket that was passed over too often, room is collected as neighbours become idle: it must fit if every
        lease left that may leave.
        """
        fits = False
        for seen in self._beneficiaries(suspend):
            # What it uses without a reservation is already there.
            needs = self._world.due(seen) - (self._world.unreserved(seen) if seen.state is S.NO_CONTEXT else 0)
            for device in victim.devices:
                could_come = seen.state in ELIGIBLE and device in self._world.allowed(seen)
                fits |= could_come and needs <= self._room(seen, device)
                fits |= self._could_grow(seen, device, later)
        law(3, fits, victim, "is suspended where the other would not fit:", why.sentence)

    def _could_grow(self, seen: Seen, device: str, later: Sequence[Effect]) -> bool:
        """Whether a lease waiting to grow in place could do so if all idle leases left, or does so in this very event.

        Room kept for the lease that leaves is free at once.
        """
        if not seen.here or device not in seen.devices:
            return False
        grown = [one.reserved_mib for one in later if isinstance(one, Resized) and one.lease_id == seen.lease_id]
        ticket = self._arbiter.ticket(seen.lease_id)
        need = grown[0] - seen.held if grown else ticket.need_mib if ticket is not None else 0
        return need > 0 and need + seen.held <= self._room(seen, device)

    def _room(self, beneficiary: Seen, device: str) -> int:
        """The room a ticket would have on a device if every lease left that may leave for it."""
        lease = self._arbiter._books.leases.get(beneficiary.lease_id)  # a view of its ticket would forecast every wait
        ticket = lease.ticket if lease is not None else None
        # If it is served later in this event, its ticket is gone, and may have been passed over too often or waited too long.
        owed = ticket is None or ticket.passed_over >= self._world.pool(beneficiary).max_passed_over
        stays = sum(
            seen.held
            for seen in self._world.on(device)
            if seen is not beneficiary
            and (
                seen.state in {S.RESUMING, S.QUARANTINED, S.UNATTACHED}
                or (seen.state is S.RESIDENT and seen.pinned_until > self._world.now)
                or (seen.state is S.RESIDENT and seen.works and not owed and not self._may_preempt(beneficiary, seen))
            )
        )
        return self._world.leasable.get(device, 0) - self._world.strangers.get(device, 0) - stays

    def _may_preempt(self, beneficiary: Seen, seen: Seen) -> bool:
        pool, more = self._world.pool(seen), beneficiary.spec.priority - seen.spec.priority
        stayed = self._world.now - seen.arrived
        if stayed < pool.min_residency_ms or more < 0:
            return False
        return pool.preempt_priorities if more else pool.preempt_equals

    # -- law 4 ---------------------------------------------------------------------------------------------------------------------

    def giving(self, seen: Seen, places: tuple[str, ...]) -> None:
        """A lease is about to get room: check the device and the limits."""
        before = seen.state
        if before is S.RESUMING:
            seen.state = S.SUSPENDED
        allowed = self._world.allowed(seen)
        seen.state = before
        law(6, all(place in allowed for place in places), seen.lease_id, "may not go to", places, "but to", allowed)
        law(7, self._world.within_limits(seen), seen.lease_id, "has more than its user or group may hold")

    def count_passes(self, winner: Seen, places: tuple[str, ...], asked_last: int, mine: int) -> None:
        """Law 4, recounted: which tickets waited longer, could have used this room, and were passed over. A moved lease passes none."""
        world = self._world
        if winner.moves:
            return
        asked = winner.asked if winner.asked >= 0 else asked_last + 1  # asked and served in one event
        for seen in world.leases.values():
            if seen is winner or not seen.waits or seen.spec.pool != winner.spec.pool or not world.within_limits(seen):
                continue
            ahead = (-seen.spec.priority, seen.asked) < (-winner.spec.priority, asked)
            if world.pool(seen).preempt_equals and seen.spec.priority == winner.spec.priority:
                continue  # the lease furthest below its share goes first
            if not ahead or not self._missed(seen, places, mine):
                continue
            seen.passed += 1
            most = max(self.most_k, 1) * len(world.leasable)
            law(4, seen.passed <= most, seen.lease_id, "was passed over", seen.passed, "times; most:", most)

    def _missed(self, seen: Seen, places: tuple[str, ...], mine: int) -> bool:
        """Whether the room just given away on these devices could have served it and now cannot. `mine` was not free before."""
        world, need = self._world, self._world.due(seen)
        usable = [
            device
            for device in places
            if world.leasable[device] - world.strangers[device] - mine >= need and world.free(device) < need
        ]
        if not any(device in world.allowed(seen) for device in usable):
            return False
        roomy = [d for d in world.allowed(seen) if world.leasable[d] - world.strangers[d] >= need]
        free = [d for d in roomy if world.free(d) >= need]
        # With too few roomy devices it waits for a device. With enough free ones it waits for a swap channel.
        return len(roomy) >= seen.spec.devices > len(free)

    # -- law 7 ---------------------------------------------------------------------------------------------------------------------

    def _law_7(self, lines: Iterable[list[TicketView]], *, channel_free: bool) -> None:
        """A ticket that fits in free memory does not wait, unless the memory is kept for an earlier ticket or no swap channel is free."""
        world = self._world
        roomiest = max((world.free(device) for device in world.leasable), default=0)
        line: list[tuple[tuple[int, bool, int], Seen, TicketView]] = []
        for views in lines:
            resuming = [world.leases[view.lease_id].state is S.RESUMING for view in views]
            expected = [None if served else 1 + place - sum(resuming[:place]) for place, served in enumerate(resuming)]
            law(4, [view.position for view in views] == expected, "positions are wrong:", views)
            for view in views:
                seen = world.leases[view.lease_id]
                line.append(((-seen.spec.priority, not view.urgent, seen.asked), seen, view))
        line.sort(key=lambda item: item[0])
        for place, (_, seen, view) in enumerate(line):
            places = set(world.allowed(seen)) - world.whole
            grows = seen.here and set(seen.devices) <= places
            if view.need_mib > roomiest or not (seen.waits or grows):
                continue
            if seen.state is S.SUSPENDED and (not channel_free or view.reason == "wait.retry"):
                continue
            ahead = [other for _, _, other in line[:place]]
            fair = any(pool.preempt_equals for pool in world.pools.values())  # the queue is ordered by past use
            if fair or any(
                other.urgent for _, _, other in line
            ):  # a ticket that was passed over too often goes before urgent ones
                ahead += [other for _, _, other in line[place + 1 :]]
            else:  # a lease being moved keeps its room, also while its saved state waits for a swap channel
                on_its_way = [
                    other
                    for _, mover, other in line[place + 1 :]
                    if mover.state is S.SUSPENDING or (mover.state is S.SUSPENDED and mover.moves)
                ]
                ahead += on_its_way
            self._fits_and_waits(seen, view, ahead)
        if channel_free:
            self._nobody_blocks_each_other([(seen, view) for _, seen, view in line])

    def _nobody_blocks_each_other(self, line: list[tuple[Seen, TicketView]]) -> None:
        """Room is kept only for tickets that do not fit: if each waiting ticket would fit alone, one of them must be served."""
        kept = [(seen, view) for seen, view in line if view.kept_on or view.reason in _KEEPING]
        if any(view.reason == "wait.retry" or seen.here or seen.state is S.SUSPENDING for seen, view in kept):
            return  # room is kept for a lease that pauses, waits to grow, or is being moved
        waiting = [(seen, view) for seen, view in line if view.reason != "wait.retry" and seen.waits]
        fits = [self._world.fits(seen, view.need_mib) and self._world.within_limits(seen) for seen, view in waiting]
        law(7, not waiting or not all(fits), "they keep room from each other:", line)

    def _fits_and_waits(self, seen: Seen, view: TicketView, ahead: list[TicketView]) -> None:
        world, kept = self._world, dict[str, int]()
        for other in ahead:
            holder = world.leases[other.lease_id]
            for device in holder.devices if holder.here else world.allowed(holder):
                if device in other.kept_on or other.reason in _KEEPING:
                    kept[device] = kept.get(device, 0) + other.need_mib
        fits = world.fits(seen, view.need_mib, kept)
        if seen.here:
            fits = all(world.free(device) - kept.get(device, 0) >= view.need_mib for device in seen.devices)
        broken = fits and world.within_limits(seen)
        law(7, not broken, view, "fits where this is kept:", kept, "of", {d: world.free(d) for d in world.leasable})
