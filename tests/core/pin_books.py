"""The model's books of pins: how long each may be, and what it costs its owner."""

from dataclasses import dataclass, field
from fractions import Fraction

from fractional_gpu.core.effects import Declined, Pinned
from fractional_gpu.core.events import Event, PinRequested
from fractional_gpu.core.model import PoolSpec
from tests.core.checked_books import Seen, World, law

__all__ = ["Pins"]

_DAY_MS = 86_400_000
_ROUNDING_MS = 2  # for every pin


@dataclass
class _Purse:
    """What an owner has spent in a pool, in milliseconds. It comes back evenly over a day."""

    budget: int
    spent: Fraction = Fraction(0)
    at_ms: int = 0
    pins: int = 0

    def settle(self, now: int) -> None:
        self.spent = max(Fraction(0), self.spent - Fraction(self.budget * (now - self.at_ms), _DAY_MS))
        self.at_ms = now


def _longest(seen: Seen, pool: PoolSpec) -> int:
    return pool.longest_claim_ms if seen.spec.claim_ms else pool.max_pin_ms


@dataclass
class Pins:
    """Checks every pin. A purse is no longer checked once its budget has changed."""

    world: World
    purses: dict[tuple[str, str], _Purse | None] = field(default_factory=dict)

    def _purse(self, seen: Seen) -> _Purse | None:
        budget = self.world.pool(seen).pin_budget_ms
        key = (seen.spec.owner, seen.spec.pool)
        if budget is None:
            self.purses[key] = None
            return None
        purse = self.purses.setdefault(key, _Purse(budget, at_ms=self.world.now))
        if purse is not None and purse.budget != budget:
            self.purses[key] = purse = None
        if purse is not None:
            purse.settle(self.world.now)
        return purse

    def refund(self, seen: Seen) -> None:
        """Return the unused part of a lease's pin to its owner."""
        purse = self._purse(seen)
        if purse is not None:
            purse.spent = max(Fraction(0), purse.spent - max(0, seen.pinned_until - self.world.now))
        seen.pinned_until = 0

    def distrust(self, seen: Seen) -> None:
        """Stop checking an owner's purse: what a recovered pin or claim has cost is unknown."""
        self.purses[seen.spec.owner, seen.spec.pool] = None

    def pinned(self, event: Event, seen: Seen, effect: Pinned) -> None:
        """A lease was pinned or unpinned."""
        self.refund(seen)
        if effect.until_ms == 0:
            return
        now, pool = self.world.now, self.world.pool(seen)
        is_requested = isinstance(event, PinRequested) and event.lease_id == seen.lease_id
        if seen.spec.claim_ms and not is_requested:  # its grant: the budget was checked when it was admitted
            law(0, effect.until_ms == now + seen.spec.claim_ms, effect, "is not as long as the claim of", seen)
        else:
            law(0, is_requested, effect, "was not requested")
        longest = seen.spec.claim_ms if not is_requested else _longest(seen, pool)
        law(0, now <= effect.until_ms <= now + longest, effect, "is longer than", longest, "from", now)
        purse = self._purse(seen)
        if purse is not None:
            purse.spent += effect.until_ms - now
            purse.pins += 1
            law(0, purse.spent <= purse.budget + _ROUNDING_MS * purse.pins, effect, "costs more than is left:", purse)
        seen.pinned_until = effect.until_ms

    def declined(self, event: PinRequested, seen: Seen, effect: Declined) -> None:
        """A pin was declined: check the reason."""
        if effect.reason in {"pin-too-long", "claim-too-long"}:
            law(0, event.duration_ms > _longest(seen, self.world.pool(seen)), effect, "is not too long:", event)
        purse = self._purse(seen)
        if effect.reason == "pin-budget" and purse is not None:
            key = (seen.spec.owner, seen.spec.pool)
            there = [one for one in self.world.leases.values() if (one.spec.owner, one.spec.pool) == key]
            promised = sum(one.spec.claim_ms for one in there if not one.pinned_until)
            left = purse.budget - purse.spent + max(0, seen.pinned_until - self.world.now) - promised
            law(0, event.duration_ms > left - _ROUNDING_MS * (purse.pins + 1), effect, "could be paid:", purse)
