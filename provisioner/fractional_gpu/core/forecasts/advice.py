"""Suggests which of the pool's shares is enough for a notebook, and says how often it would have been too small.

**Memory.** A share fits if its memory covers every day's peak plus a margin: a twentieth of the peak, or the growth expected in two weeks
if that is more. A day on which a share was full counts as short of memory for it and all smaller shares, and as unknown for larger ones. By
Laplace's rule of succession, the probability of a share being too small the next day is at most about (short + unknown + 1) / (days + 2).

**Compute.** With time slicing, a cell takes longer if neighbours use the rest of the device, and `time_slicing` computes how much longer. A
share that slows cells down by more than a fifth on average is not suggested, unless the present share is just as slow. With MPS, a share
limits what a cell can use, so a cell that could use n times its share takes n times as long.

**Suggestions.** Nothing is changed automatically. A smaller share is suggested if it would have been enough every day for at least a week.
A larger share is suggested if the present one was full on any day, is too small for the expected growth, or (with MPS) slows cells down. If
the present share was full, the larger one has at least twice its memory and at least `predicted_peak_mib`. Once a suggested share is
adopted, its days are counted separately, and it is ruled out if it is full on even one of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import exp, log
from typing import NamedTuple

from fractional_gpu.core.forecasts.habits import USE_STEP_MILLI, Share, ShareDay
from fractional_gpu.core.time_slicing import WHOLE_MILLI, slowed_milli, stretch_milli
from fractional_gpu.core.units import format_fraction, format_memory, plural

LEAST_DAYS = 3
LEAST_DAYS_SMALLER = 7  # required before a smaller share is suggested
LEAST_BUSY_MS = 10 * 60_000  # run time of cells that is required before anything is suggested
LEAST_DAY_MS = 60_000  # shorter days do not count, unless they were full
HORIZON_DAYS = 14  # how long growth is expected to continue
_MARGIN_MILLI = 50
_SLOWED_MILLI = 1_200
_MOST_GROWTH_MILLI = 1_000


class Verdict(StrEnum):
    """The kinds of suggestion. The values are part of the protocol."""

    SMALLER = "smaller"
    LARGER = "larger"
    KEEP = "keep"
    UNKNOWN = "unknown"  # the record is too short


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """How a share would have performed on the recorded days."""

    share: Share
    short_days: int
    unknown_days: int  # a smaller share was full, so this share may have been too small, too
    days: int
    short_milli: int  # upper bound on the probability that the next day is short of memory, thousandths
    slowed_milli: int  # mean slowdown if neighbours use the rest of the device, thousandths; 0 if not measured


class Peak(NamedTuple):
    """A day's peak memory use."""

    mib: int
    seen: bool  # false if the share was full, because more may then have been needed


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAdvice:
    """A suggestion that the notebook's owner has seen."""

    day: int  # when it was first shown, days since 1970
    before_milli: int
    milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """How a suggested share performed on the days it was used after it was suggested."""

    given: GivenAdvice
    days: int
    full_days: int
    peak_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A suggestion and the figures it is based on.

    `risk` describes the suggested share, or the present share if none is suggested. `smaller` describes the next smaller share.
    """

    verdict: Verdict
    present: Risk
    risk: Risk
    smaller: Risk | None
    days: int
    peak_mib: int
    busy_ms: int
    held_ms: int
    gaps: int
    use_milli: int  # mean use of a device while it ran cells; 0: not measured
    growth_milli: int  # growth of the peaks in `HORIZON_DAYS`
    follow_up: FollowUp | None = None


def advise(
    days: Sequence[ShareDay],
    present: Share,
    offers: Sequence[Share],
    *,
    bounded: bool = False,
    given: GivenAdvice | None = None,
) -> Advice:
    """Return advice based on the recorded days.

    `offers` lists the shares the pool offers. `bounded` is true if a share limits how much of a device cells can use (MPS).
    """
    days = [one for one in days if one.held_ms >= LEAST_DAY_MS or one.is_full]
    peaks, use = _peaks(days), _use(days)
    growth = _growth_milli(peaks)
    shares = {present, *(offer for offer in offers if offer.milli != present.milli)}
    risks = [_risk(share, days, use, bounded=bounded) for share in sorted(shares)]
    now = next(risk for risk in risks if risk.share == present)
    verdict, chosen = Verdict.UNKNOWN, now
    if now.days >= LEAST_DAYS and sum(one.busy_ms for one in days) >= LEAST_BUSY_MS:
        verdict, chosen = _choose(days, now, risks, growth, peaks, bounded=bounded)
    smaller = [risk for risk in risks if risk.share.milli < chosen.share.milli]
    return Advice(
        verdict=verdict,
        present=now,
        risk=chosen,
        smaller=smaller[-1] if smaller else None,
        days=now.days,
        peak_mib=_peak_mib(days),
        busy_ms=sum(one.busy_ms for one in days),
        held_ms=sum(one.held_ms for one in days),
        gaps=sum(one.gaps for one in days),
        use_milli=_mean(use),
        growth_milli=growth,
        follow_up=_followed(days, given),
    )


def _choose(
    days: Sequence[ShareDay], now: Risk, risks: Sequence[Risk], growth: int, peaks: Mapping[int, Peak], *, bounded: bool
) -> tuple[Verdict, Risk]:
    slowest = max(_SLOWED_MILLI, now.slowed_milli)
    fit = [
        risk
        for risk in risks
        if not risk.short_days and fits(risk.share, days, growth) and risk.slowed_milli <= slowest
    ]
    best = fit[0] if fit else risks[-1]
    if best.share.milli < now.share.milli:
        return (Verdict.UNKNOWN, now) if now.days < LEAST_DAYS_SMALLER else (Verdict.SMALLER, best)
    if best.share.milli > now.share.milli:
        if any(one.is_full and one.share.memory_mib >= now.share.memory_mib for one in days):
            # The need is unknown, so take at least twice the memory, and at least what earlier days predict.
            need = max(2 * now.share.memory_mib, predicted_peak_mib(list(peaks.values()), HORIZON_DAYS))
            enough = [risk for risk in fit if risk.share.memory_mib >= need]
            return Verdict.LARGER, enough[0] if enough else risks[-1]
        outgrown = growth > _MARGIN_MILLI and not fits(now.share, days, growth)
        # Days with a larger share may have used more than the present share has.
        if outgrown or now.short_days:
            return Verdict.LARGER, best
    if bounded and now.slowed_milli > _SLOWED_MILLI:
        faster = [risk for risk in risks if risk.share.milli > now.share.milli and risk.slowed_milli <= _SLOWED_MILLI]
        if faster:
            return Verdict.LARGER, faster[0]
    return Verdict.KEEP, now


# -- memory ------------------------------------------------------------------------------------------------------------


def is_short(share: Share, day: ShareDay) -> bool:
    """Return whether the day's record shows that the share was (or would have been) too small."""
    return day.peak_mib > share.memory_mib or (day.is_full and share.memory_mib <= day.share.memory_mib)


def fits(share: Share, days: Sequence[ShareDay], growth_milli: int = 0) -> bool:
    """Return whether the share's memory covers every day's peak plus the margin."""
    peak = _peak_mib(days)
    margin = peak * max(_MARGIN_MILLI, growth_milli) // 1000
    return peak + margin <= share.memory_mib and not any(is_short(share, one) for one in days)


def _peak_mib(days: Sequence[ShareDay]) -> int:
    return max((one.peak_mib for one in days), default=0)


def _risk(share: Share, days: Sequence[ShareDay], use: Sequence[tuple[int, int]], *, bounded: bool) -> Risk:
    all_days = {one.day for one in days}
    short = {one.day for one in days if is_short(share, one)}
    unknown = {one.day for one in days if one.is_full and one.share.memory_mib < share.memory_mib} - short
    return Risk(
        share=share,
        short_days=len(short),
        unknown_days=len(unknown),
        days=len(all_days),
        short_milli=(len(short) + len(unknown) + 1) * 1000 // (len(all_days) + 2),
        slowed_milli=_mean([(_slowed_milli(share, milli, bounded=bounded), ms) for milli, ms in use]),
    )


def _peaks(days: Sequence[ShareDay]) -> dict[int, Peak]:
    """Return each day's highest peak over all shares."""
    found: dict[int, Peak] = {}
    for one in days:
        peak = Peak(one.peak_mib, not one.is_full)
        found[one.day] = max(peak, found.get(one.day, peak))
    return found


_PRIOR_DAYS = 4
_PRIOR_SCALE = 0.5  # a peak e times larger is e squared times rarer


def predicted_peak_mib(peaks: Sequence[Peak], days: int) -> float:
    """Predict the largest peak in the next `days` days (its median), in MiB.

    The model assumes that days are independent, and that the logarithms of peaks above the median are exponentially distributed (a Pareto
    tail). The scale of the tail is the sum of all excesses, divided by the number of peaks at which the share was not full (Hill 1975;
    Beirlant et al. 2007 for censored observations). A short record says little about the tail, so the estimate starts with `_PRIOR_DAYS`
    days of an assumed scale. These constants and the threshold were chosen using seeds 1, 2, 4 and 5 of `tests/benchmarks/share_advice.py`.
    """
    ordered = sorted(peaks)
    median = ordered[(len(ordered) - 1) // 2].mib
    above = [one for one in ordered if one.mib >= median]
    excess = sum(log(max(1, one.mib) / max(1, median)) for one in above)
    scale = (excess + _PRIOR_DAYS * _PRIOR_SCALE) / (sum(one.seen for one in above) + _PRIOR_DAYS)
    rarer = log(len(above) * days / (len(ordered) * log(2)))  # log of how much rarer than a peak above the median
    return median * exp(max(0.0, scale * rarer))


def _growth_milli(peaks: Mapping[int, Peak]) -> int:
    """Return how much peaks are expected to grow in `HORIZON_DAYS`, in thousandths of the largest peak.

    This is computed from the median slope over all pairs of days (Theil 1950, Sen 1968). It is 0 if there are too few days, or if the
    Mann-Kendall test (Mann 1945) finds no upward trend at the 1 % level.
    """
    count = len(peaks)
    if count < 2 * LEAST_DAYS:
        return 0
    pairs = [(later - day, peaks[later].mib - peaks[day].mib) for day, later in combinations(sorted(peaks), 2)]
    trend = sum((more > 0) - (more < 0) for _, more in pairs)
    # The variance of the sum is count * (count - 1) * (2 * count + 5) / 18; 2.326 deviations are the one-sided 1 % level.
    if trend <= 0 or 18_000 * trend * trend <= 5_411 * count * (count - 1) * (2 * count + 5):
        return 0
    slopes = sorted(1000 * more // passed for passed, more in pairs)  # thousandths of a MiB per day
    growth = slopes[len(slopes) // 2] * HORIZON_DAYS // max(1, *(peak.mib for peak in peaks.values()))
    return min(_MOST_GROWTH_MILLI, max(0, growth))


def _followed(days: Sequence[ShareDay], given: GivenAdvice | None) -> FollowUp | None:
    """Return how a suggested share has performed since it was suggested. Return None if it was not used."""
    since = [one for one in days if given is not None and one.day >= given.day and one.share.milli == given.milli]
    if given is None or not since:
        return None
    full_days = {one.day for one in since if one.is_full}
    return FollowUp(
        given=given, days=len({one.day for one in since}), full_days=len(full_days), peak_mib=_peak_mib(since)
    )


# -- compute -----------------------------------------------------------------------------------------------------------


def _use(days: Sequence[ShareDay]) -> list[tuple[int, int]]:
    """Return (utilisation, time) pairs for the device. Utilisation is in thousandths, rounded up, and time is in ms."""
    sums = Counter[int]()
    for one in days:
        sums.update(one.use)
    return [(min(WHOLE_MILLI, (step + 1) * USE_STEP_MILLI), ms) for step, ms in sums.items()]


def _mean(parts: Sequence[tuple[int, int]]) -> int:
    """Return the mean of the values in (value, ms) pairs, weighted by ms, or 0 if there are no pairs."""
    whole_ms = sum(ms for _, ms in parts)
    return sum(value * ms for value, ms in parts) // whole_ms if whole_ms else 0


def _slowed_milli(share: Share, use_milli: int, *, bounded: bool) -> int:
    if bounded:
        return max(WHOLE_MILLI, -(-use_milli * WHOLE_MILLI // max(1, share.milli)))
    return slowed_milli(use_milli, stretch_milli((use_milli, max(0, WHOLE_MILLI - share.milli))))


# -- words -------------------------------------------------------------------------------------------------------------


_WORTH_A_WORD_MILLI = 1_005  # smallest slowdown worth mentioning


def sentence(advice: Advice) -> str:
    """Return the advice as sentences, without the final full stop. Return an empty string if there is nothing to say."""
    parts = []
    if advice.verdict in (Verdict.SMALLER, Verdict.LARGER):
        why = "would suffice" if advice.verdict is Verdict.SMALLER else "is suggested"
        parts.append(f"{_share(advice.risk)} {why}: {_figures(advice)}; {_risk_words(advice.risk)}")
        if advice.verdict is Verdict.SMALLER and advice.smaller is not None and advice.smaller.short_days:
            parts.append(f"{_share(advice.smaller)} {_short(advice.smaller)}")
    followed = advice.follow_up
    if followed is not None:
        before, now = (format_fraction(milli) for milli in (followed.given.before_milli, followed.given.milli))
        full = f"full on {followed.full_days} of them" if followed.full_days else "never full"
        parts.append(
            f"Since the suggested change from {before} to {now} GPU: at most {format_memory(followed.peak_mib)} used over "
            f"{plural(followed.days, 'day')}, {full}"
        )
    return ". ".join(parts)


def brief(advice: Advice) -> str:
    """Return short advice, such as `1/4 GPU would have been enough on 12 of 12 days`. Return an empty string if there is none."""
    risk = advice.risk
    if advice.verdict is Verdict.SMALLER:
        return f"{_share(risk)} would have been enough on {risk.days - risk.short_days} of {plural(risk.days, 'day')}"
    if advice.verdict is Verdict.LARGER:
        present_mib = advice.present.share.memory_mib
        return f"{_share(risk)} is suggested: {format_memory(advice.peak_mib)} of {format_memory(present_mib)} used"
    return ""


def _figures(advice: Advice) -> str:
    present_mib, days = advice.present.share.memory_mib, plural(advice.days, "day")
    used = f"at most {format_memory(advice.peak_mib)} of {format_memory(present_mib)} was used on {days}"
    if advice.growth_milli >= 50:
        used += f" (growing by about {advice.growth_milli // 10} % in two weeks)"
    if advice.use_milli:
        used += f", and cells used {advice.use_milli // 10} % of a GPU"
    if advice.held_ms:
        used += f", for {100 * advice.busy_ms // advice.held_ms} % of the time that it was held"
    return used


def _risk_words(risk: Risk) -> str:
    words = f"it {_short(risk)}"
    if risk.unknown_days:
        words += f"; on {risk.unknown_days} more, a smaller share was full, so this one may also have been too small"
    else:
        words += f", and judging by these, {max(1, risk.short_milli // 10)} % of future days may be short of memory"
    if risk.slowed_milli > _WORTH_A_WORD_MILLI:
        words += f"; if neighbours use all the rest, cells take up to {risk.slowed_milli / 1000:.2f} times as long as they do alone"
    return words


def _short(risk: Risk) -> str:
    return f"would have been short of memory on {risk.short_days} of {plural(risk.days, 'day')}"


def _share(risk: Risk) -> str:
    return f"{format_fraction(risk.share.milli)} GPU ({format_memory(risk.share.memory_mib)})"
