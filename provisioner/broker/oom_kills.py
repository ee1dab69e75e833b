"""Did the system's out-of-memory killer end a kernel? Found out from the counters of control groups, for the sentence that its user gets.

The rules:
- Each group counts its killed processes. A kernel that ends while its group's counter has risen counts as killed; one kill accounts for
  one kernel.
- A kill older than `_WINDOW_S` accounts for none. The window is wider than it takes a process of many GiB to end after it was killed.
- The broker is not the parent of kernels and cannot read how they ended. A process that the killer took beside the kernel, in the same
  seconds and the same group, could be mistaken for it: the sentence says what is known, that the group was full.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from provisioner.host.memory import smallest_limit
from provisioner.host.oom import kill_count, kill_counter

__all__ = ["Counter", "OomKills"]

log = logging.getLogger(__name__)

_WINDOW_S: Final = 15.0


@dataclass(slots=True)
class Counter:
    """One group's counter. `accounted` kills are old, or belong to a kernel that is known to have ended by one."""

    limited_by: str
    accounted: int
    latest: int
    latest_s: float


class OomKills:
    """The counters of the groups in which kernels live."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # by a kernel's pid
        self._counters: dict[Path, Counter] = {}

    def look(self, pids: set[int], now_s: float) -> tuple[dict[int, Path], dict[Path, Counter]]:
        """Read the counters of the groups of these kernels; for a thread, changes nothing. Hand the answer to `see`."""
        files = {pid: file for pid, file in self._files.items() if pid in pids}
        counters: dict[Path, Counter] = {}
        for pid in pids - files.keys():
            try:
                file = files[pid] = kill_counter(pid)
                if file not in self._counters and file not in counters:
                    count = kill_count(file)
                    counters[file] = Counter(smallest_limit(pid).limited_by, count, count, now_s)
            except (OSError, ValueError) as error:
                files.pop(pid, None)
                log.debug("the out-of-memory counter of process %d cannot be read: %s", pid, error)
        for file in set(files.values()) - counters.keys():
            known = self._counters[file]
            if now_s - known.latest_s >= _WINDOW_S:
                count = _count(file, known.latest)
                counters[file] = Counter(known.limited_by, max(known.accounted, known.latest), count, now_s)
        return files, counters

    def see(self, files: dict[int, Path], counters: Mapping[Path, Counter]) -> None:
        """Take in what `look` found."""
        self._files = files
        for file, counter in counters.items():
            known = self._counters.get(file)
            if known is not None:  # a kernel may have ended meanwhile
                counter.accounted = max(counter.accounted, known.accounted)
            self._counters[file] = counter
        self._counters = {file: self._counters[file] for file in set(files.values())}

    def account_for(self, pid: int) -> str:
        """Return what was full, for a kernel that has just ended by the killer, as far as is known; "" for any other."""
        file = self._files.pop(pid, None)
        counter = self._counters.get(file) if file is not None else None
        if file is None or counter is None or _count(file, counter.accounted) <= counter.accounted:
            return ""
        counter.accounted += 1
        return counter.limited_by


def _count(file: Path, otherwise: int) -> int:
    try:
        return kill_count(file)
    except (OSError, ValueError):
        return otherwise  # the group is gone with its last process
