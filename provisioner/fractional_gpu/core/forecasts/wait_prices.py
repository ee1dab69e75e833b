"""What a wait costs: its length, and more where it is one of the pool's long ones.

Users judge a pool by the waits that they remember, and `jupyter gpu simulate` and the goals of a pool by their 95th percentile. So a ms
beyond the 90th percentile q of the pool's last waits counts as 1 / (1 - 0.9) = 10: the mean of

    wait + 9 x max(0, wait - q)

is, up to a constant, the mean of the longest tenth and that of all waits together, each of these counted up to q (Rockafellar and Uryasev,
"Optimization of conditional value-at-risk", 2000). The tail begins below the 95th percentile on purpose: if waits just below that were
cheap, many leases would come back with such waits, and these would raise it. Cells that find room at once count as waits of 0 ms. While 9
of 10 cells do, all waits are long ones: each costs its length then. So it does until `LEAST_WAITS` were seen, as little is known of the
longest tenth before.

A lease that was saved may wait for a swap channel before it comes back: for the leases that leave and come back as soon as it does. What
that adds to the price of a return is learnt as well (`queued_ms`), so that where swaps follow each other fewer leases leave.

Memory is bounded by `MOST_WAITS` and `MOST_POOLS`. Times are ms.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from fractional_gpu.core.forecasts.snapshot import ForecastState, StateReader

LONG_PERCENT = 90
"""So many of 100 waits are not long."""
LEAST_WAITS, MOST_WAITS = 20, 256  # that the limit is taken from
MOST_POOLS = 64
_MORE = 100 // (100 - LONG_PERCENT) - 1  # what a ms beyond the limit costs more than one below
_BITS = 5  # of the limit: it is rounded up to so many, so that it seldom changes
_LONGEST_MS = 7 * 86_400_000
_RETURNS = 64  # that the price of queueing for a channel is a mean of
_FINE = 1024  # parts of a ms, so that little is lost by rounding


class WaitPrice:
    """What a wait costs in one pool. `limit_ms`: what is longer is a long wait; 0: none is, or that is not known yet."""

    __slots__ = ("_ordered", "limit_ms", "queued", "recent", "returns")

    def __init__(self, waits_ms: Iterable[int] = (), *, returns: int = 0, queued: int = 0) -> None:
        self.returns = min(returns, _RETURNS)  # that were seen ...
        # ... and what waiting for a channel added to their price: the mean, in parts of 1 / _FINE ms
        self.queued = queued
        self.recent: deque[int] = deque((min(one, _LONGEST_MS) for one in waits_ms), MOST_WAITS)  # the last one last
        self._ordered = sorted(self.recent)
        self.limit_ms = 0
        self._renew()

    def learn(self, wait_ms: int) -> None:
        """Count how long one more cell waited."""
        if len(self.recent) == MOST_WAITS:
            del self._ordered[bisect_left(self._ordered, self.recent[0])]
        wait_ms = min(wait_ms, _LONGEST_MS)
        self.recent.append(wait_ms)
        insort(self._ordered, wait_ms)
        self._renew()

    def learn_return(self, resume_ms: int, channel_ms: int) -> None:
        """Count that a lease waited `channel_ms` for a swap channel before a resume of `resume_ms`."""
        channel_ms = min(channel_ms, _LONGEST_MS)
        price_ms = self.of(channel_ms + resume_ms) - self.of(resume_ms)
        self.returns = min(self.returns + 1, _RETURNS)
        self.queued += (price_ms * _FINE - self.queued) // self.returns

    @property
    def queued_ms(self) -> int:
        """What waiting for a swap channel adds to the price of a return: the mean of the last returns, in ms as `of` has them."""
        return self.queued // _FINE

    def of(self, wait_ms: int) -> int:
        """Return what such a wait costs, in ms of a wait that is not long."""
        return wait_ms + _MORE * max(0, wait_ms - self.limit_ms) if self.limit_ms else wait_ms

    def _renew(self) -> None:
        known = len(self._ordered)
        if known >= LEAST_WAITS:
            exact_ms = self._ordered[known * LONG_PERCENT // 100]
            low = max(0, exact_ms.bit_length() - _BITS)
            self.limit_ms = -(-exact_ms >> low) << low


class WaitPrices:
    """What a wait costs in each pool."""

    def __init__(self) -> None:
        self._pools: dict[str, WaitPrice] = {}

    def learn(self, pool: str, wait_ms: int) -> None:
        """Count how long one more cell of the pool waited; 0 if it found room at once."""
        self._known(pool).learn(wait_ms)

    def learn_return(self, pool: str, resume_ms: int, channel_ms: int) -> None:
        """Count that a lease of the pool waited `channel_ms` for a swap channel before a resume of `resume_ms`."""
        self._known(pool).learn_return(resume_ms, channel_ms)

    def _known(self, pool: str) -> WaitPrice:
        known = self._pools.get(pool)
        if known is None:
            if len(self._pools) >= MOST_POOLS:
                del self._pools[next(iter(self._pools))]
            known = self._pools[pool] = WaitPrice()
        return known

    def of(self, pool: str) -> WaitPrice:
        """Return what a wait costs in the pool. Cheap."""
        return self._pools.get(pool, LENGTH)

    def state(self) -> ForecastState:
        """Return what was learnt as plain data."""
        return {
            "recent_waits": {pool: [list(one.recent), one.returns, one.queued] for pool, one in self._pools.items()}
        }

    def take_state(self, read: StateReader) -> None:
        """Replace what is known by what was learnt before, if that was written. Raises ValueError for damaged data."""
        for pool, (waits_ms, returns, queued) in read.named("recent_waits", 3):
            self._pools[pool] = WaitPrice(read.wholes(waits_ms), returns=read.whole(returns), queued=read.whole(queued))


LENGTH = WaitPrice()
"""Of every wait its length; nothing may be learnt by it."""
