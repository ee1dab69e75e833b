"""The laws over the whole state, checked by the independent model."""

import re

from provisioner.core.arbiter import Arbiter
from provisioner.core.effects import Effect, Recorded, Suspend
from provisioner.core.events import Event
from provisioner.core.model import LeaseState, TicketView
from tests.core.books import Seen, World, law
from tests.core.moves import ELIGIBLE

__all__ = ["Laws"]

S = LeaseState
_BENEFICIARY = re.compile(r"lease (\S+)")
_KEEPING = frozenset({"wait.making-room", "wait.swap-channel"})


class Laws:
    """Asks of the books of the model, and of what the arbiter says of its queue, whether the laws hold."""

    def __init__(self, world: World, arbiter: Arbiter) -> None:
        self._world = world
        self._arbiter = arbiter
        self.most_k = 0

    def check(self, *, channel_free: bool) -> None:
        """Check what can be seen in one moment. Raises LawBrokenError."""
        self._law_7(channel_free=channel_free)

    def admitted(self, seen: Seen) -> None:
        """A lease was admitted: there must have been no reason to refuse it."""

    def refused(self, event: Event, lease_id: str, reason: str) -> None:
        """A lease was refused: the reason must be true."""

    def see(self, event: Event, effect: Effect) -> None:
        """Any other effect."""

    # -- law 3, law 5 --------------------------------------------------------------------------------------------------------------

    def suspending(self, seen: Seen, suspend: Suspend, why: Recorded) -> None:
        """Somebody is suspended: not while it is busy, not before it had a chance to run, and not in vain."""
        law(5, not seen.busy or suspend.preempt, seen.lease_id, "is busy and is suspended")
        pool = self._world.pool(seen)
        if why.reason in {"suspend.idle", "suspend.needed-by"} and not seen.ran:
            stayed = self._world.now - seen.since
            law(5, stayed >= pool.min_residency_ms, seen.lease_id, "ran nothing and is suspended after", stayed, "ms")
        if why.reason == "suspend.needed-by":
            self._law_3(seen, why)

    def _law_3(self, victim: Seen, why: Recorded) -> None:
        """Somebody is suspended for a beneficiary who waits and would fit if all the idle went.

        For one that was passed over too often room is gathered as neighbours become idle: it would fit if all went who may go at all.
        """
        match = _BENEFICIARY.search(why.sentence)
        name = match[1] if match else "?"
        there = [s for i, s in self._world.leases.items() if i.startswith(name) and s.state in ELIGIBLE]
        device = victim.devices[0]
        fits = [s for s in there if device in self._world.allowed(s) and self._world.least(s) <= self._room(s, device)]
        law(3, fits, victim.lease_id, "is suspended for", name, "who would not fit on", device)

    def _room(self, beneficiary: Seen, device: str) -> int:
        """What there would be on a device for a ticket if all went who may go for it."""
        ticket = self._arbiter.ticket(beneficiary.lease_id)
        owed = ticket is not None and ticket.passed_over >= self._world.pool(beneficiary).max_passed_over
        stays = sum(
            seen.held
            for seen in self._world.on(device)
            if seen.state in {S.RESUMING, S.QUARANTINED, S.UNATTACHED}
            or (seen.state is S.RESIDENT and ((seen.busy and not owed) or seen.pinned_until > self._world.now))
        )
        return self._world.leasable.get(device, 0) - self._world.strangers.get(device, 0) - stays

    # -- law 4 ---------------------------------------------------------------------------------------------------------------------

    def giving(self, seen: Seen, places: tuple[str, ...]) -> None:
        """Somebody is about to get room: where it may go, and within its limits."""
        before = seen.state
        if before is S.RESUMING:
            seen.state = S.SUSPENDED
        allowed = self._world.allowed(seen)
        seen.state = before
        law(6, all(place in allowed for place in places), seen.lease_id, "may not go to", places, "but to", allowed)
        law(7, self._world.within_limits(seen), seen.lease_id, "has more than its user or group may hold")

    def count_passes(self, winner: Seen, places: tuple[str, ...], asked_last: int) -> None:
        """Law 4, counted anew: who waited longer, could have used this room, and saw it go to somebody else."""
        world = self._world
        asked = winner.asked if winner.asked >= 0 else asked_last + 1  # asked and served in one event
        for seen in world.leases.values():
            if seen is winner or not seen.waits or seen.spec.pool != winner.spec.pool:
                continue
            ahead = (-seen.spec.priority, seen.asked) < (-winner.spec.priority, asked)
            if not ahead or not self._missed(seen, places):
                continue
            seen.passed += 1
            most = max(self.most_k, 1) * len(world.leasable)
            law(4, seen.passed <= most, seen.lease_id, "was passed over", seen.passed, "times; most:", most)

    def _missed(self, seen: Seen, places: tuple[str, ...]) -> bool:
        """Whether the room that was just given away on these devices could have served it, and now cannot."""
        world, need = self._world, self._world.least(seen)
        usable = [
            device
            for device in places
            if world.leasable[device] - world.strangers[device] >= need and world.free(device) < need
        ]
        return bool(usable) and any(device in world.allowed(seen) for device in usable)

    # -- law 7 ---------------------------------------------------------------------------------------------------------------------

    def _law_7(self, *, channel_free: bool) -> None:
        """Who fits in free memory is not kept waiting, unless it is kept for somebody ahead or the swap channel is taken."""
        world = self._world
        roomiest = max((world.free(device) for device in world.leasable), default=0)
        line: list[tuple[tuple[int, bool, int], Seen, TicketView]] = []
        for pool in {seen.spec.pool: None for seen in world.leases.values()}:
            views = self._arbiter.tickets(pool)
            law(4, [v.position for v in views] == list(range(1, len(views) + 1)), "positions are wrong:", views)
            for view in views:
                seen = world.leases[view.lease_id]
                line.append(((-seen.spec.priority, not view.urgent, seen.asked), seen, view))
        line.sort(key=lambda item: item[0])
        for place, (_, seen, view) in enumerate(line):
            if view.need_mib > roomiest or not seen.waits:
                continue
            if seen.state is S.SUSPENDED and (not channel_free or view.reason == "wait.retry"):
                continue
            ahead = [other for _, _, other in line[:place]]
            if any(other.urgent for _, _, other in line):  # who was passed over too often goes before the urgent
                ahead += [other for _, _, other in line[place + 1 :]]
            self._fits_and_waits(seen, view, ahead)
        if channel_free:
            self._nobody_blocks_each_other([(seen, view) for _, seen, view in line])

    def _nobody_blocks_each_other(self, line: list[tuple[Seen, TicketView]]) -> None:
        """Room is kept for those who do not fit: if everybody who waits would fit by himself, somebody must have been served."""
        if any(view.reason == "wait.retry" and view.kept_on for _, view in line):
            return
        waiting = [(seen, view) for seen, view in line if view.reason != "wait.retry" and seen.waits]
        fits = [self._world.fits(seen, view.need_mib) and self._world.within_limits(seen) for seen, view in waiting]
        law(7, not waiting or not all(fits), "they keep room from each other:", line)

    def _fits_and_waits(self, seen: Seen, view: TicketView, ahead: list[TicketView]) -> None:
        world, kept = self._world, dict[str, int]()
        for other in ahead:
            allowed = world.allowed(world.leases[other.lease_id])
            for device in allowed:
                if device in other.kept_on or other.reason in _KEEPING:
                    kept[device] = kept.get(device, 0) + other.need_mib
        broken = world.fits(seen, view.need_mib, kept) and world.within_limits(seen)
        law(7, not broken, view, "fits where this is kept:", kept, "of", {d: world.free(d) for d in world.leasable})
