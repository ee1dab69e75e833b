"""What is learnt on line, in integers: swap times, cell times, compute demands, context sizes, and how accurate forecasts were.

The ground for all of them are decayed histograms over buckets that grow with the value, like floating point numbers.

A `Scale` cuts the numbers from 0 up into buckets: each power of two into 2**bits equal ones, so that a bucket is never wider than
a 2**bits-th of its values. A `Histogram` counts what was seen; old observations fade as new ones come. Quantiles are
read from its running totals (`array` of sums from the first bucket on); within a bucket the values count as spread evenly.
Nothing here calls exp, log or pow, and nothing divides floats: the same observations give the same answers on every machine.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from fractional_gpu.core.model import Span

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
    """Return weights, about `total` together, of a distribution by points (value, permille that is less); the last bucket has the rest."""
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


# -- swap times --------------------------------------------------------------------------------------------------------
# How long a suspend or resume takes: a fixed time plus the bytes over the bandwidth, learnt from past swaps.
#
# The line through the last swaps of a kind minimizes relative errors by least squares. Swaps far off the line weigh less, so one outlier
# does not spoil the forecast, and a change is believed once it has been seen about as often as the old times. A prior line stands beside
# the swaps, scaled to how quick they are: a prior that is ten times too slow is corrected by the first swap whatever its size, and the
# ratio of the two parts is that of the prior until swaps of different sizes were seen. Floats, with only + - * / and comparisons, so every
# machine learns the same.


RATIOS = Scale(bits=3, shift=0, most=1 << 20)
"""Ratios of what was to what was expected."""
ONE = 1088
"""The ratio of what was just as expected: the middle of its bucket, so that the half below and the half above of it are alike."""
KEPT = 12  # swaps that the line is fitted to
_ANCHORS = (0, 8192)  # MiB at which the prior counts ...
_ANCHOR_WEIGHT = 0.25  # ... as this many swaps
_ROUNDS = 3
_FEW = 4  # swaps
_FAR = 0.5  # relative errors beyond this weigh less
# Ratios that 10, 50 and 90 % of swaps stay under, before any was seen.
_PRIOR = tuple(shaped_weights(RATIOS, ((400, 0), (700, 100), (ONE, 500), (1500, 900), (4000, 1000)), 8 * 1024))


def ratio(was: int, expected: int) -> int:
    """Return how the one compares with the other, on the scale `RATIOS`."""
    return was * ONE // max(1, expected)


class SwapTimes:
    """One kind of swap on one kind of device. The prior: `fixed_ms` and MiB a second."""

    def __init__(
        self,
        *,
        fixed_ms: int,
        mib_per_s: int,
        swaps: Iterable[tuple[int, int]] = (),
        ratios: Sequence[int] = (),
        line: tuple[float, float] | None = None,
    ) -> None:
        self._prior = (float(fixed_ms), 1000 / mib_per_s)
        self.swaps = list(swaps)[-KEPT:]  # (MiB, ms), the last ones; the constructor takes them
        self.ratios = Histogram(RATIOS, memory=32, weights=ratios or _PRIOR)
        self._totals = self.ratios.totals()
        self.fixed_ms, self.ms_per_mib = line or self._prior

    def expected_ms(self, mib: int) -> int:
        """Return how long a swap of so many MiB is expected to take, ms."""
        return int(self.fixed_ms + self.ms_per_mib * mib + 0.5)

    def bounds_ms(self, mib: int) -> tuple[int, int]:
        """Return the bounds that four of five such swaps lie between, ms."""
        expected, total = self.expected_ms(mib), self._totals[-1]
        low = value_at(RATIOS, self._totals, total // 10)
        high = value_at(RATIOS, self._totals, total * 9 // 10)
        return min(expected, expected * low // ONE), max(expected, expected * high // ONE)

    def learn(self, mib: int, took_ms: int) -> None:
        """Learn from a swap."""
        mib, took_ms = max(0, mib), max(0, took_ms)
        surprising = _off(took_ms, self.fixed_ms + self.ms_per_mib * mib) > _FAR
        self.ratios.add(ratio(took_ms, self.expected_ms(mib)))
        self._totals = self.ratios.totals()
        self.swaps = [*self.swaps[1 - KEPT :], (mib, took_ms)]
        self._fit(anew=surprising or len(self.swaps) <= _FEW)

    def _fit(self, *, anew: bool) -> None:
        """Fit the line; `anew`: starting from the prior scaled to the median swap, else from the present line."""
        fixed, slope = self._prior
        levels = sorted(took / max(1.0, fixed + slope * mib) for mib, took in self.swaps)
        level = (levels[(len(levels) - 1) // 2] + levels[len(levels) // 2]) / 2
        fixed, slope = fixed * level, slope * level
        anchors = [(mib, max(1.0, fixed + slope * mib)) for mib in _ANCHORS]
        if not anew:
            fixed, slope = self.fixed_ms, self.ms_per_mib
        for _ in range(_ROUNDS if anew else 1):
            fixed, slope = _line(self.swaps, anchors, fixed, slope)
        self.fixed_ms, self.ms_per_mib = fixed, slope


def _off(took: float, expected: float) -> float:
    """Return how far the two are apart, as a share of the smaller."""
    return abs(took - expected) / max(1.0, min(took, expected))


def _line(
    swaps: Sequence[tuple[int, int]], anchors: Sequence[tuple[int, float]], fixed: float, slope: float
) -> tuple[float, float]:
    """Return the best line, with each swap weighted by its distance from the present one; neither part of it is negative."""
    aa = ab = bb = ay = by = 0.0
    scale = _ANCHOR_WEIGHT
    for points in (anchors, swaps):
        for mib, took in points:
            expected = fixed + slope * mib
            expected = max(expected, 1.0)
            less, more = (took, expected) if took < expected else (expected, took)
            far = less * (1 + _FAR)  # further than that it weighs less
            weight = scale / (expected * expected)
            if more > far:
                weight *= _FAR * max(1.0, less) / (more - less)
            size = weight * mib
            aa, ab, bb, ay, by = aa + weight, ab + size, bb + size * mib, ay + weight * took, by + size * took
        scale = 1.0
    det = aa * bb - ab * ab
    fixed, slope = (ay * bb - by * ab) / det, (aa * by - ab * ay) / det
    if fixed < 0:
        return 0.0, by / bb
    return (fixed, slope) if slope >= 0 else (ay / aa, 0.0)


# -- cell times --------------------------------------------------------------------------------------------------------
# How long a lease's cells, and the gaps between them, last: for one lease and for all together.
#
# A lease's own observations are mixed with those of all leases, which count for a few: a new lease is like all others, a lease with a
# history is like itself. Both fade, so habits may change.


DURATIONS = Scale(bits=2, shift=6, most=1 << 30)
"""Durations in ms, from 64 ms to 12 days."""
_PRIOR_WEIGHT = 64  # observations that the published distribution counts for
_COMMON_WEIGHT = 6  # observations that all leases together count for in a lease's own distribution
_REFRESH = 32  # the common distribution is brought up to date after so many observations


class CommonDurations:
    """Durations of all leases. Starts from `points`: (ms, permille of durations that are shorter)."""

    __slots__ = ("_due", "histogram", "totals", "weights")

    def __init__(self, points: Sequence[tuple[int, int]], *, weights: Iterable[int] = ()) -> None:
        start = list(weights) or shaped_weights(DURATIONS, points, _PRIOR_WEIGHT * STEP)
        self.histogram = Histogram(DURATIONS, memory=1024, weights=start)
        self._due = 0
        self._refresh()

    def add(self, duration_ms: int) -> None:
        """Count a duration of one of the leases."""
        self.histogram.add(duration_ms)
        self._due -= 1
        if self._due <= 0:
            self._refresh()

    def _refresh(self) -> None:
        self._due = _REFRESH
        self.weights = self.histogram.scaled(_COMMON_WEIGHT * STEP)
        self.totals = array("q", accumulate(self.weights))


class LeaseDurations:
    """Durations of one lease. `totals`: of its own observations and the common ones."""

    __slots__ = ("_common", "histogram", "totals")

    def __init__(self, common: CommonDurations, *, weights: Iterable[int] = ()) -> None:
        self._common = common
        self.histogram = Histogram(DURATIONS, memory=12, weights=weights)
        self._mix()

    def add(self, duration_ms: int) -> None:
        """Count one more."""
        self._common.add(duration_ms)
        self.histogram.add(duration_ms)
        self._mix()

    def _mix(self) -> None:
        self.totals = array("q", accumulate(map(add, self.histogram.weights, self._common.weights)))


def rest_ms(totals: Sequence[int], elapsed_ms: int, permille: int) -> int:
    """Return the quantile of the remaining time of what has lasted `elapsed_ms`; beyond anything known, about as long again."""
    total = totals[-1]
    gone = weight_below(DURATIONS, totals, elapsed_ms)
    left = total - gone
    if left * 2048 <= total:
        return elapsed_ms * permille // (1000 - permille)
    return max(0, value_at(DURATIONS, totals, gone + left * permille // 1000) - elapsed_ms)


# -- rhythm ------------------------------------------------------------------------------------------------------------
# When the next cell of a lease is likely by its own gaps. Kernels that run something every so often (a dashboard, a poll, a person who
# looks in each morning) have most of their gaps in one or two buckets; those of others are spread over many.


_RHYTHM_SAMPLES = 6  # gaps of its own that a lease's rhythm is read from, at least
_RHYTHM_MILLI = 500  # of its gaps that reach so far, those that end in the window
_SHORTEST_WINDOW_MS = 20_000


class Rhythm(NamedTuple):
    """When a cell is likely, in ms since the gap began, and how likely it is, thousandths."""

    from_ms: int
    until_ms: int
    chance_milli: int


def chance_milli(totals: Sequence[int], elapsed_ms: int, within_ms: int) -> int:
    """Return how likely something that has lasted `elapsed_ms` ends within so many ms more, thousandths."""
    gone = weight_below(DURATIONS, totals, elapsed_ms)
    left = totals[-1] - gone
    if left <= 0:
        return 0
    return 1000 * (weight_below(DURATIONS, totals, elapsed_ms + within_ms) - gone) // left


def rhythm_of(gaps: LeaseDurations, elapsed_ms: int) -> Rhythm | None:
    """Return the first time, from now on, at which the lease's next cell is likely; None if its gaps show none."""
    if sum(gaps.histogram.weights) < _RHYTHM_SAMPLES * STEP:
        return None
    lows = DURATIONS.lows
    for place in range(DURATIONS.bucket(elapsed_ms), DURATIONS.size - 1):
        if not gaps.histogram.weights[place]:
            continue
        from_ms = max(elapsed_ms, lows[place])
        window_ms = max(_SHORTEST_WINDOW_MS, lows[place + 1] - lows[place])
        milli = chance_milli(gaps.totals, from_ms, window_ms)
        if milli >= _RHYTHM_MILLI:
            return Rhythm(from_ms, from_ms + window_ms, milli)
    return None


# -- means -------------------------------------------------------------------------------------------------------------
# Shares that are learnt as decayed means: what a lease uses of a device while it is busy, and how often a sign of its next cell was right.


FIRST_DEMAND_MILLI = 300
"""What a lease is expected to use of a device before anything was seen, thousandths."""
FIRST_SIGN_MILLI = 700
"""How often a sign of a cell is expected to be right before any was followed, thousandths."""
LEASE_SAMPLES, POOL_SAMPLES = 16, 256  # samples that a mean remembers, about
# HoldCosts: cells that it remembers, about, and MiB times ms that it takes as held without any loss before the first: 40,000 MiB for an
# hour, so that one loss says little.
HOLD_SAMPLES, _PRIOR_HELD = 64, 40_000 * 3_600_000
RATE_BITS = 40
_FINE = 1024  # means are kept in so many parts of a thousandth
_PRIOR_SAMPLES = 2  # samples that the prior counts for


class DecayedMean:
    """A mean of shares, thousandths: of all samples at first, then one that decays with the last `memory` ones."""

    __slots__ = ("count", "fine", "memory")

    def __init__(self, *, memory: int, prior_milli: int = FIRST_DEMAND_MILLI) -> None:
        self.memory, self.count, self.fine = memory, _PRIOR_SAMPLES, prior_milli * _FINE

    @property
    def milli(self) -> int:
        """The mean, thousandths."""
        return self.fine // _FINE

    def learn(self, milli: int) -> None:
        """Learn from a sample."""
        self.count = min(self.count + 1, self.memory)
        self.fine += (milli * _FINE - self.fine) // self.count

    def restore(self, count: int, fine: int) -> "DecayedMean":
        """Take over what was learnt before, as far as it can be; return the mean."""
        self.count, self.fine = max(_PRIOR_SAMPLES, min(count, self.memory)), min(fine, 1000 * _FINE)
        return self


class HoldCosts:
    """What cells lose because idle leases hold memory that they need: ms per MiB and ms held. It fades with cells, not with time."""

    __slots__ = ("held", "lost")

    def __init__(self, lost: int = 0, held: int = _PRIOR_HELD) -> None:
        self.lost = lost  # ms, in steps of STEP
        self.held = held  # MiB times ms

    def learn(self, lost_ms: int, held: int) -> None:
        """Learn what a cell lost, and the MiB times ms that idle leases held since the cell before it."""
        self.lost += lost_ms * STEP - -(-self.lost // HOLD_SAMPLES)  # rounded up: in the end nothing is left
        self.held += held - self.held // HOLD_SAMPLES

    @property
    def rate(self) -> int:
        """The loss for each MiB and ms, in parts of 1 << RATE_BITS; rounded down to its three highest bits, so that it seldom changes."""
        rate = (self.lost << RATE_BITS) // (STEP * self.held) if self.held else 0
        return rate >> (low := max(0, rate.bit_length() - 3)) << low


# -- context sizes -----------------------------------------------------------------------------------------------------
# What a CUDA context takes beside a framework's allocator, learnt for each kind of device.
#
# The size of one kernel's context is what the device charges to its process less what its framework's allocator holds: the context, the
# modules of cuBLAS, cuDNN and compiled kernels, NCCL's buffers. It differs between kernels, and allocations past the allocator add to it.
# A framework's limit needs an upper estimate that a few odd kernels, or those of one user, cannot raise for all users. So it is the larger
# of
#
# - the third quartile of the sizes of the last `KERNELS` kernels, of all users, and
# - the largest size among these that is the user's own.
#
# Sizes that cannot be a context (larger than `MOST_MIB`, or than three quarters of the kernel's cap) are left out.


FLOOR_MIB = 512
"""The estimate until larger contexts were seen."""
MOST_MIB = 4096
KERNELS = 32
_STEP_MIB = 32  # estimates are rounded up to multiples, so that they seldom change
_DEVICES = 64  # names that are remembered
_VERSION = 1


class ContextSize(NamedTuple):
    """What one kernel's context took, MiB, and whose kernel it was."""

    uid: int
    mib: int


class ContextSizes:
    """Estimates by the device's name, MiB. Each kernel counts once, with the largest size that was seen of it."""

    def __init__(self, seen: Mapping[str, Mapping[str, ContextSize]] | None = None) -> None:
        self._seen = {
            name: dict(sizes) for name, sizes in (seen or {}).items()
        }  # by device and kernel, the last ones last

    def saw(self, device_name: str, kernel: str, size: ContextSize, cap_mib: int) -> bool:
        """Take in a kernel's size; return whether the estimate for its user has changed."""
        if not 0 <= size.mib <= min(MOST_MIB, cap_mib * 3 // 4):
            return False
        before = self.estimate_mib(device_name, size.uid)
        sizes = self._seen.pop(device_name, {})
        self._seen[device_name] = sizes  # the last device is the last one
        earlier = sizes.pop(kernel, size)
        sizes[kernel] = ContextSize(size.uid, max(size.mib, earlier.mib))
        while len(sizes) > KERNELS:
            del sizes[next(iter(sizes))]
        while len(self._seen) > _DEVICES:
            del self._seen[next(iter(self._seen))]
        return self.estimate_mib(device_name, size.uid) != before

    def estimate_mib(self, device_name: str, uid: int) -> int:
        """Return what a context takes in a kernel of this user on a device of this name, MiB; at least `FLOOR_MIB`."""
        sizes = list(self._seen.get(device_name, {}).values())
        all_users = sorted(size.mib for size in sizes)
        quartile = all_users[-(-len(all_users) * 3 // 4) - 1] if all_users else 0
        own = max((size.mib for size in sizes if size.uid == uid), default=0)
        return max(FLOOR_MIB, -(-max(quartile, own) // _STEP_MIB) * _STEP_MIB)

    def state(self) -> dict[str, Any]:
        """Return what was learnt, for JSON."""
        devices = {name: [[kernel, *one] for kernel, one in sizes.items()] for name, sizes in self._seen.items()}
        return {"version": _VERSION, "devices": devices}

    @staticmethod
    def from_state(state: object) -> "ContextSizes":
        """Return what `state` gave. Raises ValueError for anything else."""
        if (
            not isinstance(state, dict)
            or state.get("version") != _VERSION
            or not isinstance(state.get("devices"), dict)
        ):
            raise ValueError(f"{str(state)[:80]!r} are no context sizes of version {_VERSION}")
        seen: dict[str, dict[str, ContextSize]] = {}
        for name, sizes in state["devices"].items():
            if not isinstance(sizes, list) or not all(_is_size(one) for one in sizes):
                raise ValueError(f"the context sizes of {name[:80]!r} are not lists of a kernel, a uid and MiB")
            seen[name] = {kernel: ContextSize(uid, mib) for kernel, uid, mib in sizes[-KERNELS:]}
        return ContextSizes(seen)


def _is_size(value: object) -> bool:
    match value:
        case [str(), int(), int(mib)]:
            return 0 <= mib <= MOST_MIB
        case _:
            return False


# -- accuracy ----------------------------------------------------------------------------------------------------------
# The accuracy of forecasts: the last few hundred of a kind, compared with what happened.


_KEPT = 256
_LEAST_MS = 100  # errors are relative to what happened, or to this
_MOST_PERMILLE = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorView:
    """The error of one kind of forecast over the last 256 of them, thousandths."""

    what: str  # wait, suspend, resume or cell
    count: int  # forecasts that were compared, ever
    median_error_permille: int  # median of |expected - happened| / happened
    covered_permille: int  # lay between their bounds; 800 is what the bounds promise


class Accuracy:
    """Compares one kind of forecast with what happened."""

    __slots__ = ("count", "recent", "what")

    def __init__(self, what: str, *, count: int = 0, recent: Iterable[int] = ()) -> None:
        self.what, self.count = what, count
        self.recent = list(recent)[-_KEPT:]  # a ring: twice the error in thousandths, and 1 if between the bounds

    def compare(self, expected: Span, happened_ms: int) -> None:
        """Record a forecast and what happened."""
        off = abs(expected.expected_ms - happened_ms) * 1000 // max(_LEAST_MS, happened_ms)
        entry = 2 * min(off, _MOST_PERMILLE) + (expected.low_ms <= happened_ms <= expected.high_ms)
        if len(self.recent) < _KEPT:
            self.recent.append(entry)
        else:
            self.recent[self.count % _KEPT] = entry
        self.count += 1

    def view(self) -> ErrorView:
        """Return the figures."""
        errors = sorted(entry // 2 for entry in self.recent)
        inside = sum(entry % 2 for entry in self.recent)
        return ErrorView(
            what=self.what,
            count=self.count,
            median_error_permille=errors[len(errors) // 2] if errors else 0,
            covered_permille=inside * 1000 // len(errors) if errors else 0,
        )
