"""Advice about shares in words: a sentence with its figures and its risk, and a few words for a page."""

from fractional_gpu.core.forecasts.advice import Advice, Risk, Verdict
from fractional_gpu.core.units import format_fraction, format_memory, plural

_SLOWED_MILLI = 1_005


def sentence(advice: Advice) -> str:
    """Return the advice as sentences, without the last full stop; empty: there is none, and nothing to follow up."""
    parts = []
    if advice.verdict in (Verdict.SMALLER, Verdict.LARGER):
        parts.append(f"{_share(advice.risk)} {_why(advice)}: {_figures(advice)}; {_risk(advice.risk)}")
        if advice.verdict is Verdict.SMALLER and advice.smaller is not None and advice.smaller.short_days:
            parts.append(f"{_share(advice.smaller)} {_short(advice.smaller)}")
    followed = advice.follow_up
    if followed is not None:
        before, now = (format_fraction(milli) for milli in (followed.given.before_milli, followed.given.milli))
        full = f"full on {followed.full_days}" if followed.full_days else "never full"
        parts.append(
            f"since {now} GPU was taken as advised (instead of {before}): at most {format_memory(followed.peak_mib)} on "
            f"{plural(followed.days, 'day')}, {full}"
        )
    return ". ".join(_begun(part) for part in parts)


def brief(advice: Advice) -> str:
    """Return the advice in few words, such as `1/4 GPU would have been enough on 12 of 12 days`; empty: there is none."""
    risk = advice.risk
    match advice.verdict:
        case Verdict.SMALLER:
            return (
                f"{_share(risk)} would have been enough on {risk.days - risk.short_days} of {plural(risk.days, 'day')}"
            )
        case Verdict.LARGER:
            return f"{_share(risk)} is suggested: {format_memory(advice.peak_mib)} of {format_memory(advice.present.share.memory_mib)} used"
        case _:
            return ""


def _why(advice: Advice) -> str:
    if advice.verdict is Verdict.SMALLER:
        return "would suffice"
    return "is suggested"


def _figures(advice: Advice) -> str:
    present_mib, days = advice.present.share.memory_mib, plural(advice.days, "day")
    used = f"at most {format_memory(advice.peak_mib)} of {format_memory(present_mib)} was used on {days}"
    if advice.growth_milli >= 50:
        used += f" (growing, by about {advice.growth_milli // 10} % in two weeks)"
    if advice.use_milli:
        used += f", and cells used {advice.use_milli // 10} % of a GPU"
    if advice.held_ms:
        used += f", for {100 * advice.busy_ms // advice.held_ms} % of the time that it was held"
    return used


def _risk(risk: Risk) -> str:
    short = f"it {_short(risk)}"
    if risk.unknown_days:
        short += f"; on {risk.unknown_days} all of a smaller share was used, so whether it suffices was not seen"
    else:
        short += f", and by that record {max(1, risk.short_milli // 10)} % of the days to come may be short"
    if risk.slowed_milli > _SLOWED_MILLI:
        short += f"; beside neighbours that use all the rest, cells take {risk.slowed_milli / 1000:.2f} times as long as alone at most"
    return short


def _short(risk: Risk) -> str:
    return f"would have been short of memory on {risk.short_days} of {plural(risk.days, 'day')}"


def _share(risk: Risk) -> str:
    return f"{format_fraction(risk.share.milli)} GPU ({format_memory(risk.share.memory_mib)})"


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]
