"""What is suggested to a user about the share of a notebook or of a server, with its figures."""

from msgspec import Struct


class ShareRisk(Struct, frozen=True, kw_only=True):
    """What a share would have meant. Shares and likelihoods in thousandths, memory in MiB."""

    milli: int
    memory_mib: int
    short_days: int  # days on which its memory would not have sufficed, of `days`
    unknown_days: int  # days on which a smaller share was full: whether this one would have sufficed was not seen
    days: int
    short_milli: int  # how likely the next day is short at most
    slowed_milli: int  # at most so many times as long as alone do cells take, beside full neighbours; 0: not known


class ShareAdvice(Struct, frozen=True, kw_only=True):
    """Advice. `verdict`: smaller, larger, keep or unknown; nothing is changed by it. Memory in MiB, times in milliseconds."""

    pool: str
    owner: str
    notebook: str
    verdict: str
    present: ShareRisk
    suggested: ShareRisk  # as `present` where nothing else is suggested
    days: int
    peak_mib: int
    busy_ms: int
    held_ms: int
    gaps: int
    use_milli: int
    growth_milli: int
    smaller: ShareRisk | None = None  # the next smaller share than the one suggested
    taken_days: int = 0  # since advice was taken: days, and those on which the share was full
    taken_full_days: int = 0
    sentence: str = ""  # all of that for people; empty: nothing is suggested
    brief: str = ""
    seated: bool = False  # the owner is a hub's user, not one of the machine
