"""What the independent model knows about expected cells, and what the arbiter may do for them."""

from collections import defaultdict

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Recorded, Suspend
from fractional_gpu.core.events import Expected
from fractional_gpu.core.model import Foresight, LeaseState, Sign
from tests.core.checked_books import Seen, World, law

__all__ = ["ExpectedCells"]

HOUR_MS = 3_600_000
_LONGEST_MS = 600_000


class ExpectedCells:
    """The signs received, and the swaps made for them that no cell has justified yet."""

    def __init__(self, world: World, arbiter: Arbiter) -> None:
        self._world = world
        self._arbiter = arbiter
        self._early_swaps: dict[str, list[tuple[str, int, int]]] = defaultdict(list)  # by device: lease, time, MiB

    def sign(self, seen: Seen, event: Expected) -> None:
        """A sign announced a cell. It counts while no cell runs or waits."""
        if (seen.busy and seen.state is not LeaseState.SUSPENDED) or seen.asked >= 0 or seen.left or seen.revoked:
            return
        if seen.sent_away:
            return  # its user's own request is undone only by a cell
        if self._world.pool(seen).foresight is not Foresight.OFF:
            seen.expected_until = max(seen.expected_until, min(event.until_ms, self._world.now + _LONGEST_MS))

    def cell(self, seen: Seen) -> None:
        """A cell began, or waits to."""
        seen.expected_until = 0
        if seen.early:
            for device, early_swaps in self._early_swaps.items():
                self._early_swaps[device] = [swap for swap in early_swaps if swap[0] != seen.lease_id]
        seen.early = False

    def resuming(self, seen: Seen, why: Recorded) -> None:
        """A lease comes back. If early: it is expected, the swap is short, no ticket waits, and few such swaps were wasted."""
        if why.reason != "resume.expected":
            return
        pool, view = self._world.pool(seen), self._arbiter.lease(seen.lease_id)
        self._is_expected(seen, why)
        kinds = {self._world.names[device] for device in seen.home if device in self._world.names}
        taking = [self._arbiter.forecasts.swap_ms("resume", kind, seen.saved) for kind in kinds]
        law(8, min(taking, default=0) <= pool.foresight_swap_ms, seen.lease_id, "comes back early within", taking)
        law(8, view is None or view.came_early, seen.lease_id, "came early, and the arbiter says", view)
        seen.early = True
        self._record_early_swap(seen, 2 * seen.saved, seen.devices)

    def suspending(self, victim: Seen, suspend: Suspend, why: Recorded) -> None:
        """An idle lease makes room for an expected one, if the pool allows it and the idle one is not expected itself."""
        pool, other = self._world.pool(victim), self._world.leases.get(suspend.for_lease_id)
        law(8, pool.foresight is Foresight.DISPLACE, victim.lease_id, "makes room for an expected lease")
        law(8, not victim.works, victim.lease_id, "is busy and makes room for an expected lease")
        if other is None:
            law(8, False, victim.lease_id, "makes room for no lease:", why)
            return
        law(8, other.state is LeaseState.SUSPENDED, other.lease_id, "is expected, and is", other.state)
        self._is_expected(other, why)
        self._record_early_swap(other, 2 * victim.save_at_least, victim.devices)

    def _is_expected(self, seen: Seen, why: Recorded) -> None:
        world, known = self._world, self._arbiter._books.leases[seen.lease_id].expectation
        by_rhythm = known is not None and known.until_ms > world.now and Sign.RHYTHM in known.signs
        by_rhythm &= not seen.sent_away
        law(8, seen.expected_until > world.now or by_rhythm, seen.lease_id, "is not expected:", why)
        # A lease whose move began later in this event has its room.
        waiting = [one.lease_id for one in self._arbiter._books.line(seen.spec.pool) if not one.target_ids]
        law(8, not waiting, seen.lease_id, "is brought back before its cell asks, and these wait:", waiting)

    def _record_early_swap(self, seen: Seen, mib: int, devices: tuple[str, ...]) -> None:
        now, most = self._world.now, self._world.pool(seen).foresight_vain_mib
        for device in devices:
            early_swaps = [swap for swap in self._early_swaps[device] if swap[1] > now - HOUR_MS]
            early_swaps.append((seen.lease_id, now, mib))
            self._early_swaps[device] = early_swaps
            law(
                8,
                sum(one for _, _, one in early_swaps) <= most,
                device,
                "early swaps may have wasted too much:",
                early_swaps,
            )
