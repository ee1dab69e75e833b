"""Records the sizes of the leases requested in a pool. A size is the memory on each device and the number of devices.

Each time a lease queues for room, its size is recorded, unless its reservation follows its memory use and so has no fixed size.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

Size = tuple[int, int]
"""The memory on each device, in MiB, and the number of devices."""
MOST_REQUESTS = 512  # the last requests of a pool


@dataclass
class RequestedSizes:
    """The sizes in a pool's most recent requests for room."""

    recent: list[Size] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._count()

    def add(self, mib: int, devices: int) -> None:
        """Record a request for this much memory on each of this many devices."""
        self.recent.append((mib, devices))
        self._count()

    def _count(self) -> None:
        del self.recent[:-MOST_REQUESTS]
        self.weights: Mapping[Size, int] = Counter(self.recent)
        sizes = sorted(self.weights.items())
        self._singles = [(max(1, mib), weight) for (mib, devices), weight in sizes if devices == 1]
        self.several = [(mib, devices, weight) for (mib, devices), weight in sizes if devices > 1]

    def usable(self, free_mib: int) -> int:
        """For each recent request for a single device, compute how much of `free_mib` could be filled with copies of it. Return the sum."""
        return sum([free_mib // mib * mib * weight for mib, weight in self._singles if mib <= free_mib])


NO_REQUESTS = RequestedSizes()
"""The value for a pool without any requests."""
