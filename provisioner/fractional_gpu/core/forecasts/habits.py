"""Keeps daily records of how much of its share each notebook and seat used. Advice about shares is based on them.

A `ShareDay` covers one day of a notebook, or of a hub server's seat, at a given share. It records peak device memory, how long memory was
held on a device, how long cells ran, and how much of the device they used. `UseRecorder.observe` only sees samples, so peaks between them
are missed.

All values are integers: memory in MiB per device, times in ms, shares and use in thousandths of a device, and dates in days since 1970
(UTC).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

USE_STEP_MILLI = 50  # the width of the bins of use
WINDOW_DAYS = 28  # how much of the record advice uses
MOST_LABELS = 200  # limit on notebooks with separate records, per user and pool
_FULL_PERCENT = 95
_LONGEST_SAMPLE_MS = 60_000  # a longer time between samples is ignored


class HabitKind(StrEnum):
    """The kinds of things a usage record can describe. The values are stored in ledgers."""

    NOTEBOOK = "notebook"
    SEAT = "seat"  # all kernels of one hub server together


class HabitKey(NamedTuple):
    """Identifies what a usage record covers. `seated` is true if the owner is a hub user. `label` is the notebook, or empty for a seat."""

    pool: str
    owner: str
    seated: bool
    kind: HabitKind
    label: str


class Share(NamedTuple):
    """A share of a device, in thousandths, and the memory that comes with it, in MiB."""

    milli: int
    memory_mib: int


@dataclass(slots=True)
class ShareDay:
    """How one share was used on one day."""

    day: int
    share: Share
    peak_mib: int = 0
    held_ms: int = 0  # with memory on a device
    busy_ms: int = 0  # the part of that in which it ran cells
    gaps: int = 0  # how often it went idle
    use: dict[int, int] = field(default_factory=dict)  # ms by bin of `USE_STEP_MILLI`

    @property
    def is_full(self) -> bool:
        """Whether memory was full or nearly full. If so, the actual need may have been higher than the peak."""
        return self.peak_mib * 100 >= self.share.memory_mib * _FULL_PERCENT


class Sample(NamedTuple):
    """The state of a notebook or seat at one point in time.

    `use_milli` is how much of the device it uses while running a cell, in thousandths, or None if unknown.
    """

    share: Share
    used_mib: int
    busy: bool
    use_milli: int | None = None


class UseRecorder:
    """Keeps daily usage records of all notebooks and seats, and remembers which ones have changed since the last `take_changed`."""

    def __init__(self) -> None:
        self._days: dict[HabitKey, dict[tuple[int, Share], ShareDay]] = {}
        self._last: dict[str, tuple[int, Sample]] = {}  # by lease or seat: the last sample and its time
        self._changed: dict[tuple[HabitKey, int, Share], ShareDay] = {}

    def load(self, key: HabitKey, day: ShareDay) -> None:
        """Restore a daily record kept by an earlier recorder."""
        self._days.setdefault(key, {})[day.day, day.share] = day

    def key(self, pool: str, owner: str, label: str, *, seated: bool) -> HabitKey:
        """Return the key for a notebook. A user's notebooks beyond the first `MOST_LABELS` share one key with no label."""
        key = HabitKey(pool, owner, seated, HabitKind.NOTEBOOK, label)
        if key in self._days or sum(other[:4] == key[:4] for other in self._days) < MOST_LABELS:
            return key
        return key._replace(label="")

    def observe(self, at_ms: int, day: int, holder: str, key: HabitKey, sample: Sample | None) -> None:
        """Record a sample. `sample` is None if the notebook or seat has ended or has no device memory.

        The time since the previous sample is attributed to that sample's share. It is busy time if that sample was busy.
        """
        last_ms, last = self._last.pop(holder, (at_ms, None))
        if last is not None and 0 < at_ms - last_ms <= _LONGEST_SAMPLE_MS:
            now = last if sample is None or sample.share != last.share else sample
            self._count(self._day(key, day, last.share), last, now, at_ms - last_ms)
        if sample is not None:
            self._last[holder] = at_ms, sample
            one = self._day(key, day, sample.share)
            one.peak_mib = max(one.peak_mib, sample.used_mib)

    def _count(self, one: ShareDay, before: Sample, now: Sample, passed_ms: int) -> None:
        one.held_ms += passed_ms
        if not before.busy:
            return
        one.busy_ms += passed_ms
        one.gaps += not now.busy
        use = before.use_milli if now.use_milli is None else now.use_milli
        if use is not None:
            step = min(use, 1000) // USE_STEP_MILLI
            one.use[step] = one.use.get(step, 0) + passed_ms

    def _day(self, key: HabitKey, day: int, share: Share) -> ShareDay:
        one = self._days.setdefault(key, {}).setdefault((day, share), ShareDay(day, share))
        self._changed[key, day, share] = one
        return one

    def forget(self, before_day: int) -> None:
        """Drop the records of all days before `before_day`."""
        for key, days in list(self._days.items()):
            self._days[key] = {name: one for name, one in days.items() if one.day >= before_day}
            if not self._days[key]:
                del self._days[key]

    def take_changed(self) -> list[tuple[HabitKey, ShareDay]]:
        """Return every daily record that has changed since the last call, with all of its figures."""
        changed, self._changed = self._changed, {}
        return [(key, one) for (key, _, _), one in changed.items()]

    def days(self, key: HabitKey) -> list[ShareDay]:
        """Return the daily records of one notebook or seat, oldest first."""
        return sorted(self._days.get(key, {}).values(), key=lambda one: (one.day, one.share))

    def keys(self) -> Iterator[HabitKey]:
        """Yield the keys of all notebooks and seats that have a record."""
        yield from self._days
