"""What the leases of a pool ask for, learnt on line: the mix of sizes.

A size is the memory that a lease reserves on each of its devices, and on how many devices. Each ticket for room counts, but for leases that
reserve by use, whose sizes change. After `_MEMORY` asks every weight loses a quarter, so that older ones fade. At most `MOST_SIZES` sizes
are known; a new one takes the place of the rarest.

`usable` says how much of some free memory the mix can use: what a device could give to asks of each size, in the mean over the asks.
`place` chooses devices by that. Its table is made anew when a new size came or one ask in `_NEWS_PARTS` is new.
"""

from collections.abc import Iterable, Mapping

_STEP = 1024  # weight of a new ask
_LEAST = 16  # a size with less is forgotten
_MEMORY = 256
MOST_SIZES = 32
"""Of one pool's mix."""
_NEWS_PARTS = 16
_MOST_KNOWN = 1024  # amounts of free memory whose answers are kept

Size = tuple[int, int]
"""MiB on each device, and the number of devices."""


class AskMix:
    """The asks of one pool. Weights are whole numbers; `usable` is in MiB times weight."""

    __slots__ = ("_known", "_left", "_news", "_singles", "only_mib", "several", "total", "version", "weights")

    def __init__(self, weights: Mapping[Size, int] | None = None) -> None:
        self.weights: dict[Size, int] = dict(weights or {})
        self.version = 0  # of the table: grows whenever answers may change
        self._left = _MEMORY
        self._settle()

    def add(self, mib: int, devices: int) -> None:
        """Count an ask for so much memory on each of so many devices."""
        self._left -= 1
        if self._left < 0:
            faded = {size: weight - (weight >> 2) for size, weight in self.weights.items()}
            self.weights = {size: weight for size, weight in faded.items() if weight >= _LEAST}
            self._left = _MEMORY - 1
        size = (mib, devices)
        is_new = size not in self.weights
        if is_new and len(self.weights) >= MOST_SIZES:
            del self.weights[min(self.weights, key=self.weights.__getitem__)]  # of equals the oldest
        self.weights[size] = self.weights.get(size, 0) + _STEP
        self._news += _STEP
        if is_new or self._news * _NEWS_PARTS >= sum(self.weights.values()):
            self._settle()

    def _settle(self) -> None:
        self.version += 1
        sizes = sorted(self.weights.items())
        self._singles = tuple((mib, weight) for (mib, devices), weight in sizes if devices == 1)
        self.several = tuple((mib, devices, weight) for (mib, devices), weight in sizes if devices > 1)
        only = len(self._singles) == 1 and not self.several
        self.only_mib = self._singles[0][0] if only else 0  # all asks are for so much of one device; 0: they differ
        self.total = sum(self.weights.values())  # of the table
        self._news = 0
        self._known: dict[int, int] = {}

    def usable(self, free_mib: int) -> int:
        """Return how much of a device's free memory asks for one device can use, MiB times their weight."""
        known = self._known.get(free_mib)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[free_mib] = sum(
                [free_mib // mib * mib * weight for mib, weight in self._singles if mib <= free_mib]
            )
        return known

    def broken(self) -> Iterable[str]:
        """Yield what cannot be: the mix is bounded, and no ask counts for nothing."""
        if len(self.weights) > MOST_SIZES:
            yield f"{len(self.weights)} sizes are known, at most {MOST_SIZES} may be"
        for (mib, devices), weight in self.weights.items():
            if mib < 1 or devices < 1 or weight < 1:
                yield f"asks for {mib} MiB on {devices} devices have the weight {weight}"


NO_ASKS = AskMix()
"""The mix of a pool for which no lease has asked yet."""
