"""The sizes that a pool's leases ask for: the memory on each device, and the number of devices.

Each ticket for room counts, except for leases that reserve by use, whose sizes change.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

Size = tuple[int, int]
"""MiB on each device, and the number of devices."""
MOST_ASKS = 512  # the last ones of one pool


@dataclass
class AskMix:
    """The last asks of one pool. `usable` is in MiB times asks."""

    recent: list[Size] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._count()

    def add(self, mib: int, devices: int) -> None:
        """Count an ask for this much memory on each of this many devices."""
        self.recent.append((mib, devices))
        self._count()

    def _count(self) -> None:
        del self.recent[:-MOST_ASKS]
        self.weights: Mapping[Size, int] = Counter(self.recent)
        sizes = sorted(self.weights.items())
        self._singles = [(max(1, mib), weight) for (mib, devices), weight in sizes if devices == 1]
        self.several = [(mib, devices, weight) for (mib, devices), weight in sizes if devices > 1]

    def usable(self, free_mib: int) -> int:
        """Return how much of a device's free memory asks for one device can use, in MiB times asks."""
        return sum([free_mib // mib * mib * weight for mib, weight in self._singles if mib <= free_mib])


NO_ASKS = AskMix()
"""The asks of a pool before its first lease."""
