"""Prediction of the largest peak of the days to come, from days of which some were cut off by the end of a share.

Days' peaks are taken as exchangeable draws. Above their median their logarithms are taken to fall off exponentially, as most tails do on a
short stretch (Pareto). The tail's scale is the time-honoured estimate for observations of which some are censored: the sum of all
excesses over the number of those that were seen to their end (Hill 1975; Beirlant et al. 2007 for censoring). A short record says little of
a tail, so the estimate begins with `_PRIOR_DAYS` days of an assumed scale. The level that the largest of m further draws stays below with
probability one half is u + scale * ln(p * m / ln 2), with p the part of the days above u.

The prior's weight and scale, and the threshold, were chosen on the seeds 1, 2, 4 and 5 of `tests/benchmarks/share_advice.py`.

Pure, integers only. Logarithms are to the base 2, in thousandths.
"""

from collections.abc import Sequence
from typing import NamedTuple

_PRIOR_DAYS = 4
_PRIOR_SCALE = 721  # half a unit of the natural logarithm: a peak e times as large is e squared times as rare
_LN2_MILLION = 693_147
_FRACTION_BITS = 12


class Peak(NamedTuple):
    """The peak of a day, MiB. `cut_off`: the share was full, so that more may have been needed."""

    mib: int
    cut_off: bool


def log2_milli(numerator: int, denominator: int = 1) -> int:
    """Return the logarithm of a ratio of positive integers to the base 2, in thousandths, rounded down to a 4096th of a unit first."""
    # The ratio as 2**whole * rest, 1 <= rest < 2, with 60 bits after the point; each squaring of the rest gives one more bit.
    whole = numerator.bit_length() - denominator.bit_length()
    scaled = (numerator << max(0, -whole)) * (1 << 60) // (denominator << max(0, whole))
    if scaled < 1 << 60:
        scaled, whole = scaled * 2, whole - 1
    bits = whole
    for _ in range(_FRACTION_BITS):
        scaled = scaled * scaled >> 60
        bits *= 2
        if scaled >> 61:
            scaled >>= 1
            bits += 1
    return bits * 1000 >> _FRACTION_BITS


def predicted_log2(peaks: Sequence[Peak], days: int) -> int:
    """Return the logarithm of the MiB that the peaks of the next `days` days stay below with probability one half; no peaks: 0."""
    ordered = sorted(peaks)
    if not ordered:
        return 0
    level = ordered[(len(ordered) - 1) // 2]
    threshold = log2_milli(max(1, level.mib))
    above = [one for one in ordered if one.mib >= level.mib]
    excess = sum(log2_milli(max(1, one.mib)) - threshold for one in above)
    seen = sum(not one.cut_off for one in above)
    scale = (excess + _PRIOR_DAYS * _PRIOR_SCALE) // (seen + _PRIOR_DAYS)
    rarer = log2_milli(
        len(above) * days * 1_000_000, len(ordered) * _LN2_MILLION
    )  # how much rarer than above the level
    return threshold + max(0, scale * rarer * _LN2_MILLION // 1_000_000_000)
