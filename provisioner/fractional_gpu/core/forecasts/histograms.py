"""Distributions learnt on line, in integers: decayed histograms over buckets that grow with the value, like floating point numbers.

A `Scale` cuts the numbers from 0 up into buckets: each power of two into 2**bits equal ones, so that a bucket is never wider than
a 2**bits-th of its values. A `Histogram` counts what was seen; old observations fade as new ones come. Quantiles are
read from its running totals (`array` of sums from the first bucket on); within a bucket the values count as spread evenly.
Nothing here calls exp, log or pow, and nothing divides floats: the same observations give the same answers on every machine.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

__all__ = ["STEP", "Histogram", "Scale", "shaped_weights", "value_at", "weight_below"]

STEP = 1024  # weight of a new observation


class Scale:
    """Buckets of 2**bits to the power of two over values in units of 2**shift; the last one takes all that is larger."""

    __slots__ = ("bits", "lows", "shift", "size")

    def __init__(self, *, bits: int, shift: int, most: int) -> None:
        self.bits, self.shift = bits, shift
        self.size = self._index(most) + 1
        self.lows = tuple(self._low(index) for index in range(self.size + 1))

    def bucket(self, value: int) -> int:
        """Return the bucket of a value; negative ones are in the first."""
        return min(self.size - 1, self._index(value)) if value > 0 else 0

    def _index(self, value: int) -> int:
        units = value >> self.shift
        past = units.bit_length() - self.bits - 1
        return units if past <= 0 else (past << self.bits) + (units >> past)

    def _low(self, index: int) -> int:
        past = max(0, (index >> self.bits) - 1)
        return (index - (past << self.bits)) << past << self.shift


class Histogram:
    """Weights by bucket. After `memory` observations all weights lose a quarter: about 4 * `memory` of them count."""

    __slots__ = ("_left", "_memory", "scale", "weights")

    def __init__(self, scale: Scale, *, memory: int, weights: Iterable[int] = ()) -> None:
        self.scale = scale
        self.weights = list(weights) or [0] * scale.size
        self._memory = self._left = memory

    def add(self, value: int) -> None:
        """Count a value."""
        self._left -= 1
        if self._left < 0:
            self.weights = [weight - (weight >> 2) for weight in self.weights]
            self._left = self._memory - 1
        self.weights[self.scale.bucket(value)] += STEP

    def totals(self) -> "array[int]":
        """Return the running totals."""
        return array("q", accumulate(self.weights))

    def scaled(self, total: int) -> list[int]:
        """Return the weights, together at most `total`."""
        have = max(1, sum(self.weights))
        return [weight * total // have for weight in self.weights]


def shaped_weights(scale: Scale, points: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Return weights (together about `total`) of a distribution given by points (value, permille that is less), both growing.

    Between two points the share grows evenly over the buckets. What the last point leaves of the 1000 is in the last bucket.
    """
    places = [_place(scale, value) for value, _ in points]
    shares = [share for _, share in points]
    sums = [total * _between(places, shares, index << 10) // 1000 for index in range(scale.size)]
    return [after - before for before, after in zip(sums, [*sums[1:], total], strict=True)]


def _place(scale: Scale, value: int) -> int:
    """Return where a value is among the buckets, in 1024ths of a bucket."""
    index = scale.bucket(value)
    low, high = scale.lows[index], scale.lows[index + 1]
    return (index << 10) + ((value - low) << 10) // (high - low)


def _between(places: Sequence[int], shares: Sequence[int], place: int) -> int:
    right = bisect_left(places, place)
    if right == 0:
        return shares[0]
    if right == len(places):
        return shares[-1]
    left, span = places[right - 1], places[right] - places[right - 1]
    return shares[right - 1] + (shares[right] - shares[right - 1]) * (place - left) // span


def weight_below(scale: Scale, totals: Sequence[int], value: int) -> int:
    """Return the weight of all that is less than the value."""
    index = scale.bucket(value)
    before = totals[index - 1] if index else 0
    if index == scale.size - 1:
        return before
    low, high = scale.lows[index], scale.lows[index + 1]
    return before + (totals[index] - before) * max(0, value - low) // (high - low)


def value_at(scale: Scale, totals: Sequence[int], weight: int) -> int:
    """Return the value that so much weight is less than; what lies in the last bucket counts as the least value there."""
    index = bisect_left(totals, max(1, weight))
    if index >= scale.size - 1:
        return scale.lows[scale.size - 1]
    before = totals[index - 1] if index else 0
    low, high = scale.lows[index], scale.lows[index + 1]
    return low + (high - low) * (weight - before) // (totals[index] - before)
