"""Advice about shares: from what a notebook used, which of the shares on offer suffices, and how often it would have been short.

**Memory.** A share fits if on every day of the record the peak, with a margin (a twentieth, or the growth of two weeks if that is more), is
within its memory. A day that came to the end of its share's memory counts as short for that share and smaller ones, and as unknown for
larger ones. The next day is short with at most about (short + unknown + 1) / (days + 2), Laplace's rule of succession.

**Compute.** With time slices, beside neighbours that use all the rest of a device, a cell takes longer by the model of `time_slicing`: the
mean over the time in cells bounds the slowdown. A share that bounds it by more than a fifth is not suggested, unless the present one does,
too. With MPS the share is a bound: what a cell uses beyond it takes as many times longer.

**What follows.** Nothing is changed by this. A smaller share is suggested only if it would have been short on no day of at least a week. A
larger one, of at least twice the memory and what `peaks` predicts, where the present share was full on a day, where growth goes beyond it,
or (with MPS) where it slows cells down. Days with a share that was advised are told apart, and those on which it was full rule it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from fractional_gpu.core.forecasts.habits import USE_STEP_MILLI, Share, ShareDay
from fractional_gpu.core.forecasts.peaks import Peak, log2_milli, predicted_log2
from fractional_gpu.core.time_slicing import WHOLE_MILLI, slowed_milli, stretch_milli

LEAST_DAYS = 3
LEAST_DAYS_SMALLER = 7  # before a smaller share is suggested
LEAST_BUSY_MS = 10 * 60_000
"""What a record must have before anything is suggested: days, and time in cells."""
LEAST_DAY_MS = 60_000  # a shorter day is not counted, unless it was full
HORIZON_DAYS = 14  # growth is expected to go on for so long
_MARGIN_MILLI = 50
_SLOWED_MILLI = 1_200
_MOST_GROWTH_MILLI = 1_000


class Verdict(StrEnum):
    """What is suggested. The values are on the wire."""

    SMALLER = "smaller"
    LARGER = "larger"
    KEEP = "keep"
    UNKNOWN = "unknown"  # the record is too short


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """What a share would have meant. `short_milli`: how likely the next day is short of memory at most, thousandths.

    `unknown_days`: days at the end of a smaller share's memory: whether this one would have sufficed was not seen. `slowed_milli`: how many
    times as long as alone cells would have taken beside neighbours that use all the rest, thousandths; 0: no use was measured.
    """

    share: Share
    short_days: int
    unknown_days: int
    days: int
    short_milli: int
    slowed_milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Advice that was given. `day`: when first, days since 1970."""

    day: int
    before_milli: int
    milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """What came of advice that was taken: days with that share since, on how many it was full, and the peak, MiB."""

    given: Given
    days: int
    full_days: int
    peak_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A suggestion with its figures. `risk` is of the share suggested (of the present one: KEEP); `smaller` of the next smaller one."""

    verdict: Verdict
    present: Risk
    risk: Risk
    smaller: Risk | None
    days: int
    peak_mib: int
    busy_ms: int
    held_ms: int
    gaps: int
    use_milli: int  # mean part of a device while it ran cells; 0: not measured
    growth_milli: int  # of the peaks, in `HORIZON_DAYS`
    follow_up: FollowUp | None = None


def advise(
    days: Sequence[ShareDay],
    present: Share,
    offers: Sequence[Share],
    *,
    bounded: bool = False,
    given: Given | None = None,
) -> Advice:
    """Return what the record suggests. `offers`: the pool's shares; `bounded`: a share bounds what cells use (MPS)."""
    counted = [one for one in days if one.held_ms >= LEAST_DAY_MS or one.is_full]
    growth = _growth_milli(counted)
    use = _use(counted)
    known = {present, *(offer for offer in offers if offer.milli != present.milli)}
    risks = [_risk(offer, counted, use, bounded=bounded) for offer in sorted(known)]
    now = next(risk for risk in risks if risk.share == present)
    enough = len({one.day for one in counted}) >= LEAST_DAYS and sum(one.busy_ms for one in counted) >= LEAST_BUSY_MS
    verdict, chosen = _choose(counted, now, risks, growth, bounded=bounded) if enough else (Verdict.UNKNOWN, now)
    below = [risk for risk in risks if risk.share.milli < chosen.share.milli]
    return Advice(
        verdict=verdict,
        present=now,
        risk=chosen,
        smaller=below[-1] if below else None,
        days=len({one.day for one in counted}),
        peak_mib=max((one.peak_mib for one in counted), default=0),
        busy_ms=sum(one.busy_ms for one in counted),
        held_ms=sum(one.held_ms for one in counted),
        gaps=sum(one.gaps for one in counted),
        use_milli=_mean(use),
        growth_milli=growth,
        follow_up=_followed(counted, given),
    )


def _choose(
    days: Sequence[ShareDay], now: Risk, risks: Sequence[Risk], growth: int, *, bounded: bool
) -> tuple[Verdict, Risk]:
    slowest = max(_SLOWED_MILLI, now.slowed_milli)
    fit = [
        risk
        for risk in risks
        if not risk.short_days and fits(risk.share, days, growth) and risk.slowed_milli <= slowest
    ]
    best = fit[0] if fit else risks[-1]
    if best.share.milli < now.share.milli:
        if now.days < LEAST_DAYS_SMALLER:
            return Verdict.UNKNOWN, now
        return (Verdict.SMALLER, best) if fit else (Verdict.KEEP, now)
    full_days = len({one.day for one in days if one.is_full and one.share.memory_mib >= now.share.memory_mib})
    if full_days and best.share.milli > now.share.milli:
        # What was needed is not known: at least twice as much, and what the days to come will need by their distribution so far.
        need = predicted_log2(_peaks(days), HORIZON_DAYS)
        enough = [risk for risk in fit if risk.share.memory_mib >= 2 * now.share.memory_mib]
        enough = [risk for risk in enough if log2_milli(risk.share.memory_mib) >= need]
        return Verdict.LARGER, enough[0] if enough else risks[-1]
    outgrown = growth > _MARGIN_MILLI and not fits(now.share, days, growth)
    # Days of an earlier, larger share may have had more than the present one has.
    if best.share.milli > now.share.milli and (outgrown or now.short_days > full_days):
        return Verdict.LARGER, best
    if bounded and now.slowed_milli > _SLOWED_MILLI:
        faster = [risk for risk in risks if risk.share.milli > now.share.milli and risk.slowed_milli <= _SLOWED_MILLI]
        if faster:
            return Verdict.LARGER, faster[0]
    return Verdict.KEEP, now


def _peaks(days: Sequence[ShareDay]) -> list[Peak]:
    """Return each day's peak. Of two shares on one day that counts with which more was used."""
    found: dict[int, Peak] = {}
    for one in days:
        peak = Peak(one.peak_mib, one.is_full)
        found[one.day] = max(peak, found.get(one.day, peak), key=lambda it: (it.mib, not it.cut_off))
    return list(found.values())


def is_short(share: Share, day: ShareDay) -> bool:
    """Whether the share would have been short of memory on that day, as far as is known."""
    return day.peak_mib > share.memory_mib or (day.is_full and share.memory_mib <= day.share.memory_mib)


def fits(share: Share, days: Sequence[ShareDay], growth_milli: int = 0) -> bool:
    """Whether all days' peaks are within the share's memory with the margin."""
    peak = max((one.peak_mib for one in days), default=0)
    margin = peak * max(_MARGIN_MILLI, growth_milli) // 1000
    return peak + margin <= share.memory_mib and not any(is_short(share, one) for one in days)


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
        slowed_milli=_slowed(share.milli, use, bounded=bounded),
    )


def _use(days: Sequence[ShareDay]) -> list[tuple[int, int]]:
    """Return how long which part of a device was used: (thousandths, ms). A bin counts with its upper end."""
    sums: dict[int, int] = {}
    for one in days:
        for step, ms in one.use.items():
            milli = min(WHOLE_MILLI, (step + 1) * USE_STEP_MILLI)
            sums[milli] = sums.get(milli, 0) + ms
    return sorted(sums.items())


def _mean(use: Sequence[tuple[int, int]]) -> int:
    whole = sum(ms for _, ms in use)
    return sum(milli * ms for milli, ms in use) // whole if whole else 0


def _slowed(share_milli: int, use: Sequence[tuple[int, int]], *, bounded: bool) -> int:
    """Return the mean slowdown over the time in cells, thousandths; 0: no use was measured."""
    whole = sum(ms for _, ms in use)
    if not whole:
        return 0
    others = max(0, WHOLE_MILLI - share_milli)
    total = 0
    for milli, ms in use:
        if bounded:
            slowed = max(WHOLE_MILLI, -(-milli * WHOLE_MILLI // max(1, share_milli)))
        else:
            slowed = slowed_milli(milli, stretch_milli((milli, others)))
        total += slowed * ms
    return total // whole


def _growth_milli(days: Sequence[ShareDay]) -> int:
    """Return by how much the peaks will have grown in `HORIZON_DAYS`, thousandths of the largest; 0: they do not grow, or too few days.

    The median of the slopes between all pairs of days (Theil 1950, Sen 1968), if the test of Mann (1945) and Kendall finds a trend at 1 %.
    """
    peaks: dict[int, int] = {}
    for one in days:
        peaks[one.day] = max(one.peak_mib, peaks.get(one.day, 0))
    count = len(peaks)
    if count < 2 * LEAST_DAYS:
        return 0
    pairs = [(later - day, peaks[later] - peaks[day]) for day, later in combinations(sorted(peaks), 2)]
    trend = sum((more > 0) - (more < 0) for _, more in pairs)
    # The variance of the sum is count * (count - 1) * (2 * count + 5) / 18; 2.326 deviations are the level of 1 % on one side.
    if trend <= 0 or 18_000 * trend * trend <= 5_411 * count * (count - 1) * (2 * count + 5):
        return 0
    slopes = sorted(1000 * more // passed for passed, more in pairs)  # thousandths of a MiB a day
    growth = slopes[len(slopes) // 2] * HORIZON_DAYS // max(1, *peaks.values())
    return min(_MOST_GROWTH_MILLI, max(0, growth))


def _followed(days: Sequence[ShareDay], given: Given | None) -> FollowUp | None:
    """Return what came of the advice; None: it was not taken."""
    if given is None:
        return None
    since = [one for one in days if one.day >= given.day and one.share.milli == given.milli]
    if not since:
        return None
    return FollowUp(
        given=given,
        days=len({one.day for one in since}),
        full_days=len({one.day for one in since if one.is_full}),
        peak_mib=max(one.peak_mib for one in since),
    )
