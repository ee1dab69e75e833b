"""Rate limits: a bucket of tokens for each key, refilled with time."""

import time
from collections.abc import Callable, Hashable

_KEPT = 1024  # buckets; beyond that full ones are forgotten, which changes nothing


class TokenBucket:
    """Allows `per_s` in the long run and `burst` at once, for each key separately."""

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # key -> (tokens left, at that time)

    def take(self, key: Hashable) -> float:
        """Take a token and return 0; if there is none, return in how many seconds there will be one."""
        now_s = self._clock()
        left = self._left(self._buckets.get(key, (self._burst, now_s)), now_s)
        if left < 1:
            return (1 - left) / self._per_s
        if len(self._buckets) >= _KEPT and key not in self._buckets:
            self._forget(now_s)
        self._buckets[key] = (left - 1, now_s)
        return 0.0

    def _left(self, bucket: tuple[float, float], now_s: float) -> float:
        tokens, at_s = bucket
        return min(self._burst, tokens + (now_s - at_s) * self._per_s)

    def _forget(self, now_s: float) -> None:
        self._buckets = {
            key: bucket for key, bucket in self._buckets.items() if self._left(bucket, now_s) < self._burst
        }
