"""Did the system's out-of-memory killer end a kernel? Decided by the counters of control groups, for the sentence that its user gets.

- Each group counts its killed processes. A kernel that ends while its group's counter has risen counts as killed; one kill accounts for
  one kernel.
- A kill older than `_WINDOW_S` accounts for none. The window is wider than it takes a process of many GiB to end after it was killed.
- The broker is not the parent of kernels and cannot read how they ended. Where it may read the system's log, that decides. Otherwise a
  process that the killer took beside the kernel, in the same seconds and the same group, can be mistaken for it.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.host.memory import kill_count, kill_counter, smallest_limit, was_killed
from fractional_gpu.host.process import ProcessIdentity

log = logging.getLogger(__name__)

_WINDOW_S: Final = 15.0


@dataclass(slots=True)
class Counter:
    """One group's counter. `accounted` kills are old, or belong to a kernel that is known to have ended by one."""

    limited_by: str
    accounted: int
    latest: int
    latest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillsSeen:
    """What one look found: counters by group, groups by kernel's pid, and pids of which there are none any more."""

    files: Mapping[int, Path]
    counters: Mapping[Path, Counter]
    gone: frozenset[int]


class OomKills:
    """The counters of the groups in which kernels live."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # by a kernel's pid
        self._counters: dict[Path, Counter] = {}

    def follow(self, pid: int, now_s: float) -> None:
        """Count kills in a new kernel's group from now on: the kernel may be killed before the next look."""
        self.see(self.look({*self._files, pid}, now_s))

    def look(self, pids: Collection[int], now_s: float) -> KillsSeen:
        """Read the counters of the groups of these kernels; changes nothing, and may run in a thread. Hand the answer to `see`."""
        known = dict(self._files)
        files = {pid: file for pid, file in known.items() if pid in pids}
        counters: dict[Path, Counter] = {}
        for pid in set(pids) - files.keys():
            try:
                file = files[pid] = kill_counter(pid)
                if file not in self._counters and file not in counters:
                    count = kill_count(file)
                    counters[file] = Counter(smallest_limit(pid).limited_by, count, count, now_s)
            except (OSError, ValueError) as error:
                files.pop(pid, None)
                log.debug("the out-of-memory counter of process %d cannot be read: %s", pid, error)
        for file in set(files.values()) - counters.keys():
            counter = self._counters.get(file)
            if counter is not None and now_s - counter.latest_s >= _WINDOW_S:
                count = _count(file, counter.latest)
                counters[file] = Counter(counter.limited_by, max(counter.accounted, counter.latest), count, now_s)
        return KillsSeen(files=files, counters=counters, gone=frozenset(known.keys() - set(pids)))

    def see(self, seen: KillsSeen) -> None:
        """Apply what `look` found. Kernels that came or ended since it began stay as they are."""
        self._files = {pid: file for pid, file in {**seen.files, **self._files}.items() if pid not in seen.gone}
        for file, counter in seen.counters.items():
            known = self._counters.get(file)
            if known is not None:  # a kernel may have ended meanwhile
                counter.accounted = max(counter.accounted, known.accounted)
            self._counters[file] = counter
        self._counters = {file: self._counters[file] for file in set(self._files.values()) if file in self._counters}

    def account_for(self, identity: ProcessIdentity) -> str:
        """Return what was full, for a kernel that has just ended by the killer, as far as is known; "" for any other."""
        file = self._files.pop(identity.pid, None)
        counter = self._counters.get(file) if file is not None else None
        if file is None or counter is None or _count(file, counter.accounted) <= counter.accounted:
            return ""
        try:
            if was_killed(identity) is False:
                return ""
        except (OSError, ValueError) as error:
            log.debug("the system's log cannot be read: %s", error)
        counter.accounted += 1
        return counter.limited_by


def _count(file: Path, otherwise: int) -> int:
    try:
        return kill_count(file)
    except (OSError, ValueError):
        return otherwise  # the group is gone with its last process
