"""What the kernels of a random world really use on their devices, and the measurements of it, which may be too low or too high."""

from dataclasses import dataclass, field
from random import Random

from tests.core.checked_books import Seen

__all__ = ["RealMemory"]

_FACTORS_MILLI = (0, 10, 10, 300, 300, 900, 1_100, 1_500, 4_000)


@dataclass
class RealMemory:
    """What each lease uses on all its devices together, in MiB."""

    random: Random
    used: dict[str, int] = field(default_factory=dict)

    def run(self, seen: Seen) -> None:
        """Run a cell: it allocates (perhaps beyond its cap), frees memory, or does neither."""
        random, cap = self.random, seen.spec.reserve_mib * seen.spec.devices
        used = self.used.get(seen.lease_id, 0)
        grown = min(used + random.choice((1, 40, 200)), 2 * cap)
        self.used[seen.lease_id] = random.choice(
            (used, grown, grown, random.randrange(cap + 1), cap, random.randrange(cap, 2 * cap), 1)
        )

    def shrink(self, seen: Seen) -> None:
        """Make a kernel give its caches back."""
        self.used[seen.lease_id] = self.random.randrange(self.holds(seen) + 1)

    def holds(self, seen: Seen) -> int:
        """Return what a suspend would save: at least the context."""
        return max(1, self.used.get(seen.lease_id, 0))

    def said(self, seen: Seen) -> int:
        """Return a measurement. Half of them are wrong, in either direction."""
        factor_milli = self.random.choice(_FACTORS_MILLI) if self.random.random() < 0.5 else 1_000
        return self.holds(seen) * factor_milli // 1_000
