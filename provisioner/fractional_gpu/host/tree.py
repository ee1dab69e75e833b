"""Which processes belong to a kernel, and which files they have mapped.

The rules:
- A tree is the root, its descendants, the members of the sessions that any of them leads, and processes of the root's
  user with the marker (the lease's id) in the environment they were started with; and the same again for each of these.
- One pass over /proc serves any number of trees. A process that exits during the pass is left out, and one that starts
  may be missed: a caller that needs certainty (a new CUDA process after a lock) scans again.
- A process that was once seen in a tree belongs to it for good: after a double fork, in a session of its own and with
  another environment, it still has the memory that was reserved for its kernel.
- A process is read through a descriptor of its folder in /proc, which stays with that process: facts of two
  processes that had the same pid one after the other are never mixed.
- An environment that may not be read carries no marker.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.host.process import (
    PROC,
    ProcessIdentity,
    boot_id,
    is_alive,
    parse_stat,
    parse_uid,
    read_file,
    read_stat,
)

_DEEPEST = 64  # generations


@dataclass(frozen=True, slots=True)
class _Seen:
    identity: ProcessIdentity
    ppid: int
    session: int
    uid: int
    marker: str | None
    stopped_or_traced: bool
    forked: bool


class Snapshot:
    """All processes at about one moment. `tree` returns the tree of one of them."""

    def __init__(self, boot: str, seen: Iterable[_Seen], marker_name: str | None) -> None:
        self._boot = boot
        self._by_pid: Mapping[int, _Seen] = {process.identity.pid: process for process in seen}
        self._marker_name = marker_name
        self._below: dict[int, list[_Seen]] = defaultdict(list)
        self._marked: dict[str, list[_Seen]] = defaultdict(list)
        for process in self._by_pid.values():
            self._below[process.ppid].append(process)
            if process.session not in (process.ppid, process.identity.pid):
                self._below[process.session].append(process)
            if process.marker is not None:
                self._marked[process.marker].append(process)

    def __len__(self) -> int:
        return len(self._by_pid)

    def __contains__(self, identity: ProcessIdentity) -> bool:
        found = self._by_pid.get(identity.pid)
        return found is not None and found.identity == identity

    def owner(self, identity: ProcessIdentity) -> int | None:
        """Return the process's real uid, None if it was not there."""
        return self._by_pid[identity.pid].uid if identity in self else None

    def runs_own_program(self, identity: ProcessIdentity) -> bool:
        """Return whether the process has executed a program since it was forked, so that it shares no memory with its parent."""
        return identity in self and not self._by_pid[identity.pid].forked

    def stopped_or_traced(self, identity: ProcessIdentity) -> bool:
        """Return whether the process was stopped (SIGSTOP, a terminal) or traced by a debugger."""
        return identity in self and self._by_pid[identity.pid].stopped_or_traced

    def forked_from(self, identity: ProcessIdentity) -> list[ProcessIdentity]:
        """Return the processes whose memory and files this one inherited by forking, nearest first.

        Empty for a process that has executed a program since. An ancestor that has exited ends the list.
        """
        ancestors: list[ProcessIdentity] = []
        process = self._by_pid[identity.pid] if identity in self else None
        while process is not None and process.forked:
            process = self._by_pid.get(process.ppid)
            if process is None or process.identity in ancestors:
                break
            ancestors.append(process.identity)
        return ancestors

    def marked(self, uid: int | None = None) -> dict[str, list[ProcessIdentity]]:
        """Return the processes with a marker by its value, oldest first; of one user only if `uid` is given."""
        return {
            value: sorted(
                (process.identity for process in members), key=lambda identity: (identity.start_time, identity.pid)
            )
            for value, processes in self._marked.items()
            if (members := [process for process in processes if uid is None or process.uid == uid])
        }

    def started(self, uid: int, since: int) -> list[ProcessIdentity]:
        """Return the processes of a user that started at that tick since boot or later."""
        return [
            process.identity
            for process in self._by_pid.values()
            if process.uid == uid and process.identity.start_time >= since
        ]

    def tree(
        self,
        root: ProcessIdentity | None,
        marker: tuple[str, str] | None = None,
        *,
        uid: int | None = None,
        apart: Collection[ProcessIdentity] = (),
        also: Collection[ProcessIdentity] = (),
    ) -> list[ProcessIdentity]:
        """Return the tree of `root` (None: of `marker` and `also` alone), oldest first.

        A root that has exited may leave processes behind: marked ones and members of its session. Its pid may have been reused since, so
        they count only if they belong to `uid` (None: the living root's own user). `apart` are the roots of other trees: neither they nor
        processes that are only below them are part of this one. `also` were seen in this tree before: they and their descendants belong
        to it in any case. Raises ValueError when the snapshot was taken without the marker's variable.
        """
        if marker is not None and marker[0] != self._marker_name:
            raise ValueError(
                f"this snapshot was taken with {self._marker_name}, not for {marker[0]}: scan with that name"
            )
        if root is not None and root.boot_id != self._boot:
            return []
        at_pid = None if root is None else self._by_pid.get(root.pid)
        queue: list[_Seen] = [self._by_pid[one.pid] for one in also if one in self]
        if at_pid is not None and at_pid.identity == root:
            uid = at_pid.uid if uid is None else uid
            queue.append(at_pid)
        elif at_pid is None and root is not None:
            queue += [process for process in self._below.get(root.pid, []) if process.uid == uid]
        if marker is not None:
            queue += [process for process in self._marked.get(marker[1], []) if process.uid == uid]
        stop = {process for process in apart if process != root}
        found: set[ProcessIdentity] = set()
        while queue:
            process = queue.pop()
            if process.identity not in found and process.identity not in stop:
                found.add(process.identity)
                queue += self._below.get(process.identity.pid, [])
        return sorted(found, key=lambda identity: (identity.start_time, identity.pid))


def is_below(pid: int, root: ProcessIdentity, others: Collection[int] = ()) -> bool:
    """Return whether the process is `root` or descends from it, now. `others` are pids of further roots, whose descendants do not count.

    Raises PermissionError where a process may not be read.
    """
    for _ in range(_DEEPEST):
        if pid == root.pid:
            return is_alive(root)
        if pid <= 1 or pid in others:
            return False
        try:
            pid = read_stat(pid).ppid
        except ProcessLookupError:
            return False
    return False


def scan(marker_name: str | None = None, *, proc: Path = PROC) -> Snapshot:
    """Read every process once, and the variable `marker_name` of its environment. Raises OSError."""
    boot = boot_id(proc=proc)
    pids = [int(name) for name in os.listdir(proc) if name.isascii() and name.isdigit()]  # noqa: PTH208
    # Every suspend and resume waits for a pass: no objects for paths and files, and one read per file.
    marker = None if marker_name is None else b"\0" + os.fsencode(marker_name) + b"="
    seen = (_look(pid, boot, marker, f"{proc}/{pid}") for pid in pids)
    return Snapshot(boot, (process for process in seen if process is not None), marker_name)


def _look(pid: int, boot: str, marker: bytes | None, path: str) -> _Seen | None:
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        stat = parse_stat(_read_at(folder, "stat"))
        if stat.dead or stat.kernel_thread:
            return None
        value = None if marker is None else _value(folder, marker)
        uid = parse_uid(_read_at(folder, "status"))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it exited meanwhile
    finally:
        os.close(folder)
    identity = ProcessIdentity(boot, pid, stat.start_time)
    return _Seen(identity, stat.ppid, stat.session, uid, value, stat.stopped_or_traced, stat.forked)


def _value(folder: int, marker: bytes) -> str | None:
    """Return the variable's value; `marker` is NUL, its name and "=". The first of equal names counts, as for getenv()."""
    try:
        raw = b"\0" + _read_at(folder, "environ")
    except PermissionError:
        return None
    _before, found, after = raw.partition(marker)
    return os.fsdecode(after.partition(b"\0")[0]) if found else None


def _read_at(folder: int, name: str) -> bytes:
    return read_file(name, folder)


# -- mappings ----------------------------------------------------------------------------------------------------------
# The files that a process has mapped into its memory or holds open, by path.
#
# A removed file counts under its old path. A process that may not be read, or has exited, has none.


_DELETED: Final = " (deleted)"


def maps(pid: int, fits: Callable[[str], bool], *, proc: Path = PROC) -> bool:
    """Return whether the process has a file mapped whose path fits."""
    try:
        with (proc / str(pid) / "maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            return any(fits(path) for line in lines if (path := _path(line)))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def holds_open(pid: int, fits: Callable[[str], bool], *, proc: Path = PROC) -> bool:
    """Return whether the process has a descriptor of a file whose path fits."""
    folder = proc / str(pid) / "fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - a process may have thousands
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    for name in names:
        try:
            path = str((folder / name).readlink())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # closed meanwhile
        if fits(path.removesuffix(_DELETED)):
            return True
    return False


def _path(line: str) -> str:
    """Return the path of a line of /proc/PID/maps, "" for memory without one."""
    fields = line.rstrip("\n").split(maxsplit=5)
    return fields[5].removesuffix(_DELETED) if len(fields) == 6 else ""
