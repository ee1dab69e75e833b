"""Which leases are saved before their device goes away, in which order, and from when on.

Each lease has a value, the predicted time of its suspend, and the time when its device goes. One swap channel saves one lease after the
other, so that a set can be saved if, in the order of their deadlines, each ends in time. The most valuable such set is found by dynamic
programming over time (Lawler and Moore 1969, which for one common deadline is the knapsack problem). With several channels, each takes
the best set of what the ones before it have left.

**Value.** What is lost with a lease is the work that made its state: the time that its cells ran on a device since its process began
(`Lease.worked_ms`), and a minute beside, so that a lease that has only loaded something counts, too. Each step of priority doubles it, up
to ten steps. Whether a user has written results to a disk meanwhile is not known, so it does not count.

**Order.** Idle leases go first, at once: that interrupts nothing. Busy ones follow as late as their swaps allow, since a cell that ends
before needs no interruption; but a cell that is interrupted goes on later, while a lease that is late is lost, so that the latest time
counts with durations that are hardly ever exceeded. Among equals the most value for each millisecond goes first: if swaps take longer than
predicted, the least is lost. A lease that cannot be saved in time is not begun: under a suspend its user could not save anything to a
disk either.

**Exactness.** The work is bounded: with many leases the time is divided into coarser slots, durations are rounded up to them, and what the
rounding left out is added where it fits. Host memory is a second limit. Where the chosen set needs more of it than there is left, the
most valuable part that fits is kept, and others are added where both allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_WORK = 100_000  # steps of one decision, about: some 20 ms
_LEAST_MS = 60_000
_MOST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A lease on a device that goes away. Times are the arbiter's, ms."""

    lease_id: str
    value: int  # 1 or more
    swap_ms: int  # how long its suspend is predicted to take
    deadline_ms: int  # when it has to be saved
    from_ms: int = 0  # when its suspend may begin: later than now after one that failed
    cautious_ms: int = (
        0  # what its suspend hardly ever takes longer than: how early it begins at the latest, where there is time
    )
    host_mib: int = 0
    busy: bool = False  # its suspend interrupts a cell

    @property
    def urgency(self) -> tuple[int, bool, int, str]:
        """Sorts leases as they are saved: by deadline, idle ones before busy ones, then by value for each millisecond."""
        return self.deadline_ms, self.busy, -(self.value << 20) // max(1, self.swap_ms), self.lease_id


@dataclass(frozen=True, slots=True)
class Plan:
    """What is saved, in order, by channel, with the latest time at which each suspend may begin; and what cannot be saved, with why."""

    channels: tuple[tuple[Candidate, ...], ...] = ()
    latest_ms: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # "time" or "host-memory", by lease

    @property
    def saved(self) -> list[Candidate]:
        """All that is saved, in order."""
        return sorted((one for channel in self.channels for one in channel), key=lambda one: one.urgency)


def value_of(worked_ms: int, priority: int) -> int:
    """Return what a lease is worth: the time its cells have run, ms, and a minute, doubled or halved by each step of priority."""
    steps = max(-_MOST_STEPS, min(_MOST_STEPS, priority))
    return max(1, (max(0, worked_ms) + _LEAST_MS) << (_MOST_STEPS + steps))


def plan_saving(candidates: Sequence[Candidate], *, free_ms: Sequence[int], host_left_mib: int) -> Plan:
    """Return what to save. `free_ms`: when each swap channel is free, at the earliest now."""
    rest, channels = sorted(candidates, key=lambda one: one.urgency), list[list[Candidate]]()
    starts = sorted(free_ms)
    for start_ms in starts:
        chosen = _best_by_time(rest, start_ms)
        channels.append(chosen)
        names = {one.lease_id for one in chosen}
        rest = [one for one in rest if one.lease_id not in names]
    # What does not fit into host memory leaves the plan first; the time that it leaves is filled with what does.
    channels = _within_host_memory(channels, host_left_mib)
    channels = _filled(channels, starts, candidates, host_left_mib)
    kept = {one.lease_id for channel in channels for one in channel}
    left_mib = host_left_mib - sum(one.host_mib for channel in channels for one in channel)
    lost = {
        one.lease_id: "host-memory" if one.host_mib > left_mib and _fits_time([one], min(starts, default=0)) else "time"
        for one in sorted(candidates, key=lambda one: one.urgency)
        if one.lease_id not in kept
    }
    latest = {name: at_ms for channel in channels for name, at_ms in _latest(channel).items()}
    return Plan(tuple(map(tuple, channels)), latest, lost)


def _fits_time(ordered: Sequence[Candidate], start_ms: int) -> bool:
    """Return whether all end in time, one after the other in this order."""
    for one in ordered:
        start_ms = max(start_ms, one.from_ms) + one.swap_ms
        if start_ms > one.deadline_ms:
            return False
    return True


def _best_by_time(ordered: Sequence[Candidate], start_ms: int) -> list[Candidate]:
    """Return the most valuable set that one channel saves in time, in order."""
    if _fits_time(ordered, start_ms):
        return list(ordered)
    able = [one for one in ordered if _fits_time([one], start_ms)]
    if not able:
        return []
    exact = _best_in_slots(able, start_ms)
    dense = list[Candidate]()
    for one in sorted(able, key=lambda one: (one.urgency[2], one.lease_id)):
        trial = sorted([*dense, one], key=lambda one: one.urgency)
        if _fits_time(trial, start_ms):
            dense = trial
    return max(exact, dense, key=_value)  # the second is better only where the slots are coarse


def _best_in_slots(able: Sequence[Candidate], start_ms: int) -> list[Candidate]:
    """Return the most valuable set with durations in slots: `best[t]` is the most whose suspends take t slots together; -1: none does."""
    horizon_ms = able[-1].deadline_ms - start_ms
    slot_ms = max(1, -(-horizon_ms * len(able) // _WORK))
    slots = horizon_ms // slot_ms
    best, taken = [0] + [-1] * slots, list[list[bool]]()
    # A channel waits for one that may begin only later: that counts as a part of its suspend.
    lengths = [-(-(max(0, one.from_ms - start_ms) + one.swap_ms) // slot_ms) for one in able]
    for one, length in zip(able, lengths, strict=True):
        took, value = [False] * (slots + 1), one.value
        until = (one.deadline_ms - start_ms) // slot_ms
        for place, before in enumerate(best[: max(0, until - length + 1)], start=length):
            if before >= 0 and before + value > best[place]:
                best[place], took[place] = before + value, True
        taken.append(took)
    place = max(range(slots + 1), key=lambda place: (best[place], -place))
    chosen = list[Candidate]()
    for one, length, took in zip(reversed(able), reversed(lengths), reversed(taken), strict=True):
        if took[place]:
            chosen.append(one)
            place -= length
    return chosen[::-1]


def _within_host_memory(channels: list[list[Candidate]], left_mib: int) -> list[list[Candidate]]:
    """Return the most valuable part that fits in host memory."""
    chosen = [one for channel in channels for one in channel]
    if sum(one.host_mib for one in chosen) <= left_mib:
        return channels
    as_time = [
        Candidate(lease_id=one.lease_id, value=one.value, swap_ms=max(1, one.host_mib), deadline_ms=max(0, left_mib))
        for one in chosen
    ]
    kept = {one.lease_id for one in _best_by_time(sorted(as_time, key=lambda one: one.urgency), 0)}
    return [[one for one in channel if one.lease_id in kept] for channel in channels]


def _filled(
    channels: list[list[Candidate]], starts: Sequence[int], candidates: Sequence[Candidate], left_mib: int
) -> list[list[Candidate]]:
    """Add what was left out and fits in time and host memory, the most valuable for its time first."""
    kept = {one.lease_id for channel in channels for one in channel}
    left_mib -= sum(one.host_mib for channel in channels for one in channel)
    for one in sorted(candidates, key=lambda one: (one.urgency[2], one.lease_id)):
        if one.lease_id in kept or one.host_mib > left_mib:
            continue
        for place, start_ms in enumerate(starts):
            trial = sorted([*channels[place], one], key=lambda one: one.urgency)
            if _fits_time(trial, start_ms):
                channels[place] = trial
                left_mib -= one.host_mib
                break
    return channels


def _latest(channel: Sequence[Candidate]) -> dict[str, int]:
    """Return when each suspend of a channel has to begin at the latest."""
    found, after_ms = dict[str, int](), None
    for one in reversed(channel):
        ends_ms = one.deadline_ms if after_ms is None else min(one.deadline_ms, after_ms)
        found[one.lease_id] = after_ms = ends_ms - max(one.swap_ms, one.cautious_ms)
    return found


def _value(chosen: Sequence[Candidate]) -> int:
    return sum(one.value for one in chosen)
