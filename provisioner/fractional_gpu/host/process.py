"""Identifies processes, finds a kernel's process tree, and recognises ipykernel's command line.

- An identity consists of the boot id, the pid and the start time. Before acting on a process, open its pidfd and then check the identity
  again: a pid can be reused, but a pidfd always refers to the same process. Only thread-group leaders have an identity, although /proc also
  has a folder for each thread id.
- A zombie counts as dead, unless it still has other threads, which keep its memory. Reading without permission raises PermissionError.
- A process controls the size of its environment, command line and mappings, which can reach gigabytes (PR_SET_MM). Read them only with
  `pieces`, which stops after 8 MiB, and never on an event loop.
"""

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_DEAD_STATES: Final = frozenset("ZXx")
_HELD_UP_STATES: Final = frozenset("Tt")
_AT_ONCE: Final = 1 << 16  # bytes
MOST_BYTES: Final = 8 << 20
"""The maximum number of bytes to read from a /proc file whose size is controlled by a process."""
_MOST_BYTES_PER_UID: Final = 8 * MOST_BYTES  # how much of each user's environments a scan reads
_LONGEST_ENTRY: Final = 1 << 17  # bytes; Linux's limit for an argument or variable
_MOST_DESCRIPTORS: Final = 1 << 16
_PF_FORKNOEXEC: Final = 0x00000040
_PF_KTHREAD: Final = 0x00200000


@dataclass(frozen=True, slots=True, order=True)
class ProcessIdentity:
    """A process's identity, unique even if its pid is reused. `start_time` is in clock ticks since boot (field 22 of /proc/PID/stat)."""

    boot_id: str
    pid: int
    start_time: int

    def to_dict(self) -> dict[str, str | int]:
        return {"boot_id": self.boot_id, "pid": self.pid, "start_time": self.start_time}


@dataclass(frozen=True, slots=True)
class ProcessStat:
    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    kernel_thread: bool
    forked: bool  # forked without an exec since then, so it shares its parent's open files
    threads: int
    start_time: int

    @property
    def dead(self) -> bool:
        return self.state in _DEAD_STATES and self.threads <= 1

    @property
    def stopped_or_traced(self) -> bool:
        return self.state in _HELD_UP_STATES


def parse_stat(raw: bytes) -> ProcessStat:
    try:
        # comm may contain spaces and parentheses, so it ends at the last ")".
        start, end = raw.index(b"("), raw.rindex(b")")
        fields = raw[end + 1 :].split()
        return ProcessStat(
            pid=int(raw[:start]),
            comm=raw[start + 1 : end].decode("utf-8", "backslashreplace"),
            state=fields[0].decode("ascii"),
            ppid=int(fields[1]),
            session=int(fields[3]),
            kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
            forked=bool(int(fields[6]) & _PF_FORKNOEXEC),
            threads=int(fields[17]),
            start_time=int(fields[19]),
        )
    except (ValueError, IndexError) as error:
        raise ValueError(f"/proc/PID/stat has an unexpected format: {raw[:200]!r}") from error


def parse_uid(status: bytes) -> int:
    return int(status_field(status, b"Uid").split()[0])


def boot_id(*, proc: Path = PROC) -> str:
    return read_file(f"{proc}/sys/kernel/random/boot_id").decode("ascii").strip()


def read_stat(pid: int, *, proc: Path = PROC) -> ProcessStat:
    return parse_stat(read_of(pid, "stat", proc=proc))


def identify(pid: int, *, proc: Path = PROC) -> ProcessIdentity:
    """Identify a process. Raises ProcessLookupError if it does not exist or is a zombie, and ValueError if the id is a thread's."""
    if pid <= 0:
        raise ProcessLookupError(f"{pid} is not a process id: process ids are positive")
    stat = read_stat(pid, proc=proc)
    if stat.dead:
        raise ProcessLookupError(f"process {pid} ({stat.comm}) has exited")
    group = thread_group(pid, proc=proc)
    if group != pid:
        raise ValueError(f"{pid} is a thread of process {group}, not a process: give the process id {group}")
    return ProcessIdentity(boot_id(proc=proc), pid, stat.start_time)


def is_alive(identity: ProcessIdentity, *, proc: Path = PROC) -> bool:
    """Return whether this exact process still exists and is not a zombie. Raises PermissionError."""
    try:
        stat = read_stat(identity.pid, proc=proc)
    except ProcessLookupError:
        return False
    return stat.start_time == identity.start_time and not stat.dead and boot_id(proc=proc) == identity.boot_id


def owner_uid(pid: int, *, proc: Path = PROC) -> int:
    """Return the process's real uid, even if /proc/PID belongs to root because tracing is forbidden. Raises ProcessLookupError."""
    return parse_uid(read_of(pid, "status", proc=proc))


def owner_and_name(pid: int, *, proc: Path = PROC) -> tuple[int, str]:
    """Return the process's real uid and the name it gave itself, from a single read, because the pid could be reused in between."""
    status = read_of(pid, "status", proc=proc)
    name = status.partition(b"\n")[0].partition(b":")[2]  # this may be empty; the kernel escapes line feeds
    return parse_uid(status), name.strip().decode("utf-8", "backslashreplace")


def read_environment(pid: int, *, proc: Path = PROC) -> dict[str, str]:
    """Return the process's initial environment, which it may have overwritten. Blocks. Raises ProcessLookupError or PermissionError."""
    found: dict[str, str] = {}
    for entry in _of_process(entries(f"{proc}/{pid}/environ"), pid):
        name, separator, value = entry.partition(b"=")
        if separator:
            found.setdefault(os.fsdecode(name), os.fsdecode(value))
    return found


def environment_value(pid: int, name: str, *, proc: Path = PROC) -> str | None:
    return _find_variable(_of_process(pieces(f"{proc}/{pid}/environ"), pid), os.fsencode(name))


def read_command(pid: int, *, proc: Path = PROC) -> list[str]:
    return [os.fsdecode(word) for word in _of_process(entries(f"{proc}/{pid}/cmdline"), pid)]


def open_pidfd(identity: ProcessIdentity) -> int:
    """Return a descriptor that becomes readable when the process exits. The caller must close it. Raises ProcessLookupError."""
    descriptor = os.pidfd_open(identity.pid)
    # The pid could have been reused before the descriptor was open, but not after that.
    try:
        alive = is_alive(identity)
    except OSError:
        os.close(descriptor)
        raise
    if not alive:
        os.close(descriptor)
        raise ProcessLookupError(f"process {identity.pid}, started at tick {identity.start_time}, is gone")
    return descriptor


def kill_marked(name: str, value: str) -> list[int]:
    killed = []
    for pid in [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]:
        with suppress(OSError):  # the process has exited, or it belongs to another user
            # Open the pidfd before reading the environment, so that the signal cannot reach another process with the same pid.
            descriptor = os.pidfd_open(pid)
            try:
                if environment_value(pid, name) == value:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed.append(pid)
            finally:
                os.close(descriptor)
    return killed


def read_file(path: str, folder: int | None = None) -> bytes:
    """Read a file without the overhead of `open`. The path is relative to the descriptor `folder`, if given. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        whole = part = os.read(descriptor, _AT_ONCE)
        while len(part) == _AT_ONCE:  # these reads fill the buffer unless the file ends
            part = os.read(descriptor, _AT_ONCE)
            whole += part
        return whole
    finally:
        os.close(descriptor)


def pieces(path: str, folder: int | None = None) -> Iterator[bytes]:
    """Yield pieces of a /proc file whose size a process controls, up to `MOST_BYTES` in total. Blocks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        left = MOST_BYTES
        while left > 0 and (piece := os.read(descriptor, min(left, _AT_ONCE))):
            left -= len(piece)
            yield piece
    finally:
        os.close(descriptor)


def entries(path: str, separator: bytes = b"\0") -> Iterator[bytes]:
    """Yield the entries of a /proc file whose size a process controls. Long entries are truncated. Blocks. Raises OSError."""
    rest = b""
    for piece in pieces(path):
        *whole, rest = (rest + piece).split(separator)
        yield from whole
        rest = rest[:_LONGEST_ENTRY]
    if rest:
        yield rest


def _find_variable(found: Iterator[bytes], name: bytes) -> str | None:
    marker, kept = b"\0" + name + b"=", b"\0"
    for piece in found:
        _, there, value = (kept + piece).partition(marker)
        if there:
            while b"\0" not in value and len(value) < _LONGEST_ENTRY and (more := next(found, b"")):
                value += more
            return os.fsdecode(value.partition(b"\0")[0])
        kept = (kept + piece)[-len(marker) :]
    return None


def _of_process(found: Iterator[bytes], pid: int) -> Iterator[bytes]:
    try:
        yield from found
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None


def lines_of(content: bytes) -> list[str]:
    """Split at line feeds only, unlike `str.splitlines`, because /proc files contain names chosen by users."""
    return [os.fsdecode(line) for line in content.split(b"\n") if line]


def read_of(pid: int, name: str, *, proc: Path = PROC) -> bytes:
    try:
        return read_file(f"{proc}/{pid}/{name}")
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None


def thread_group(pid: int, *, proc: Path = PROC) -> int:
    return int(status_field(read_of(pid, "status", proc=proc), b"Tgid"))


def status_field(status: bytes, name: bytes) -> bytes:
    # A process chooses its name, and the kernel escapes only line feeds in it. splitlines() also splits at other characters.
    for line in status.split(b"\n"):
        key, _, value = line.partition(b":")
        if key == name and value.strip():
            return value.strip()
    raise ValueError(f"/proc/PID/status has no field {name.decode()}: {status[:200]!r}")


# The tree of a kernel contains the root, its descendants, the members of any session that one of them leads, and the processes of the
# root's user that were started with the marker (the id of the lease) in their environment. The same applies to each of these processes.
# A process that was once seen in a tree always belongs to it, because it still has memory that was reserved for the kernel. A scan may miss
# processes that start during the scan, so scan again to be certain. A process is read through a descriptor of its /proc folder, so the data
# of two processes with the same pid are never mixed.


_DEEPEST = 64  # generations


@dataclass(frozen=True, slots=True)
class _ProcessEntry:
    identity: ProcessIdentity
    ppid: int
    session: int
    uid: int
    marker: str | None
    stopped_or_traced: bool
    forked: bool


class Snapshot:
    def __init__(self, boot: str, seen: Iterable[_ProcessEntry]) -> None:
        self._boot = boot
        self._by_pid: Mapping[int, _ProcessEntry] = {process.identity.pid: process for process in seen}
        self._below: dict[int, list[_ProcessEntry]] = defaultdict(list)
        self._marked: dict[str, list[_ProcessEntry]] = defaultdict(list)
        for process in self._by_pid.values():
            self._below[process.ppid].append(process)
            if process.session not in (process.ppid, process.identity.pid):
                self._below[process.session].append(process)
            if process.marker is not None:
                self._marked[process.marker].append(process)

    def __contains__(self, identity: ProcessIdentity) -> bool:
        found = self._by_pid.get(identity.pid)
        return found is not None and found.identity == identity

    def owner(self, identity: ProcessIdentity) -> int | None:
        return self._by_pid[identity.pid].uid if identity in self else None

    def runs_own_program(self, identity: ProcessIdentity) -> bool:
        """Return whether the process has called exec since its fork and therefore shares no memory with its parent."""
        return identity in self and not self._by_pid[identity.pid].forked

    def stopped_or_traced(self, identity: ProcessIdentity) -> bool:
        return identity in self and self._by_pid[identity.pid].stopped_or_traced

    def forked_from(self, identity: ProcessIdentity) -> list[ProcessIdentity]:
        """Return the ancestors whose memory and files the process inherited through forks, nearest first.

        The list ends before an ancestor that has exited.
        """
        ancestors: list[ProcessIdentity] = []
        process = self._by_pid[identity.pid] if identity in self else None
        while process is not None and process.forked:
            process = self._by_pid.get(process.ppid)
            if process is None or process.identity in ancestors:
                break
            ancestors.append(process.identity)
        return ancestors

    def marker(self, pid: int) -> str | None:
        return self._by_pid[pid].marker if pid in self._by_pid else None

    def marked(self, uid: int | None = None) -> dict[str, list[ProcessIdentity]]:
        """Return the processes grouped by the value of their marker variable, oldest first. If `uid` is given, return only that user's."""
        return {
            value: sorted(
                (process.identity for process in members), key=lambda identity: (identity.start_time, identity.pid)
            )
            for value, processes in self._marked.items()
            if (members := [process for process in processes if uid is None or process.uid == uid])
        }

    def started(self, uid: int, since: int) -> list[ProcessIdentity]:
        return [
            process.identity
            for process in self._by_pid.values()
            if process.uid == uid and process.identity.start_time >= since
        ]

    def tree(
        self,
        root: ProcessIdentity | None,
        marker: str | None = None,
        *,
        uid: int | None = None,
        apart: Collection[ProcessIdentity] = (),
        also: Collection[ProcessIdentity] = (),
    ) -> list[ProcessIdentity]:
        """Return the tree's processes, oldest first. If `root` is None, the tree starts from processes with `marker` and those in `also`.

        If the root has exited, another process might have its pid. Therefore, marked processes and members of the root's session are
        included only if they belong to `uid`, or to the live root's user if `uid` is None. `apart` lists the roots of other trees. They are
        left out, along with any descendants that aren't part of this tree in another way. `also` lists processes seen in this tree before,
        which are always included.
        """
        if root is not None and root.boot_id != self._boot:
            return []
        at_pid = None if root is None else self._by_pid.get(root.pid)
        queue: list[_ProcessEntry] = [self._by_pid[one.pid] for one in also if one in self]
        if at_pid is not None and at_pid.identity == root:
            uid = at_pid.uid if uid is None else uid
            queue.append(at_pid)
        elif at_pid is None and root is not None:
            queue += [process for process in self._below.get(root.pid, []) if process.uid == uid]
        if marker is not None:
            queue += [process for process in self._marked.get(marker, []) if process.uid == uid]
        stop = apart if isinstance(apart, frozenset) else frozenset(apart)  # callers reuse a frozen set for all roots
        found: set[ProcessIdentity] = set()
        while queue:
            process = queue.pop()
            if process.identity not in found and (process.identity == root or process.identity not in stop):
                found.add(process.identity)
                queue += self._below.get(process.identity.pid, [])
        return sorted(found, key=lambda identity: (identity.start_time, identity.pid))


def is_below(pid: int, root: ProcessIdentity, others: Collection[int] = ()) -> bool:
    """Return whether the process is `root` or one of its descendants, with none of `others` in between. Raises PermissionError."""
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


def scan(marker_name: str | None = None, uids: Collection[int] | None = None, *, proc: Path = PROC) -> Snapshot:
    """Take a snapshot of all processes. Read the variable `marker_name` of those owned by `uids` (None for all). Blocks. Raises OSError."""
    boot = boot_id(proc=proc)
    pids = [int(name) for name in os.listdir(proc) if name.isascii() and name.isdigit()]  # noqa: PTH208
    # Every suspend and resume waits for this, so create no objects for paths and files, and read each file only once.
    markers = None if marker_name is None else _Markers(os.fsencode(marker_name), uids)
    seen = (_look(pid, boot, markers, f"{proc}/{pid}") for pid in pids)
    return Snapshot(boot, (process for process in seen if process is not None))


class _Markers:
    """A reader for one variable in processes' environments, used during a single scan. Reads a limited number of bytes per user."""

    def __init__(self, name: bytes, uids: Collection[int] | None) -> None:
        self._name = name
        self._uids = uids
        self._left: dict[int, int] = defaultdict(lambda: _MOST_BYTES_PER_UID)

    def of(self, folder: int, uid: int) -> str | None:
        if (self._uids is not None and uid not in self._uids) or self._left[uid] <= 0:
            return None
        try:
            return _find_variable(self._charged(folder, uid), self._name)
        except PermissionError:
            return None

    def _charged(self, folder: int, uid: int) -> Iterator[bytes]:
        for piece in pieces("environ", folder):
            self._left[uid] -= len(piece)
            yield piece


def _look(pid: int, boot: str, markers: _Markers | None, path: str) -> _ProcessEntry | None:
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        stat = parse_stat(read_file("stat", folder))
        if stat.dead or stat.kernel_thread:
            return None
        uid = parse_uid(read_file("status", folder))
        value = None if markers is None else markers.of(folder, uid)
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has exited
    finally:
        os.close(folder)
    identity = ProcessIdentity(boot, pid, stat.start_time)
    return _ProcessEntry(identity, stat.ppid, stat.session, uid, value, stat.stopped_or_traced, stat.forked)


# The files that a process maps or has open. A file that was removed is shown with its old path. A process that cannot be read has no files.


_DELETED: Final = " (deleted)"


def maps(pid: int, fits: Callable[[str], bool], *, unreadable: bool = False, proc: Path = PROC) -> bool:
    """Return whether the process maps a file whose path satisfies `fits`, or `unreadable` if its maps cannot be read. Blocks."""
    try:
        return any(fits(path) for line in entries(f"{proc}/{pid}/maps", b"\n") if (path := _path(os.fsdecode(line))))
    except PermissionError:
        return unreadable
    except (FileNotFoundError, ProcessLookupError):
        return False


def holds_open(pid: int, fits: Callable[[str], bool], *, proc: Path = PROC) -> bool:
    """Return whether the process has a file open whose path satisfies `fits`, or has 65,536 or more descriptors. Blocks."""
    folder = f"{proc}/{pid}/fd"
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in islice(found, _MOST_DESCRIPTORS)]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    for name in names:
        try:
            path = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - a process may have thousands
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the file has just been closed
        if fits(path.removesuffix(_DELETED)):
            return True
    return len(names) == _MOST_DESCRIPTORS


def _path(line: str) -> str:
    fields = line.rstrip("\n").split(maxsplit=5)
    return fields[5].removesuffix(_DELETED) if len(fields) == 6 else ""


# How a command line starts ipykernel. This is used for kernelspecs, and for live processes if the ledger is lost.


EXTENSION: Final = "fractional_gpu_kernel"  # `-m EXTENSION MODULE` adds our extension to `-m MODULE`
_IPYKERNEL: Final = ("ipykernel_launcher", "ipykernel", EXTENSION)
_OPTIONS_WITH_VALUE: Final = frozenset({"-X", "-W"})


def find_ipykernel(argv: Sequence[str]) -> int | None:
    """Return the position of the `-m` that starts ipykernel, or None if the command runs another program."""
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        if argv[position] == "-m":
            return position if position + 1 < len(argv) and argv[position + 1] in _IPYKERNEL else None
        if argv[position] == "-c":
            return None
        position += 2 if argv[position] in _OPTIONS_WITH_VALUE else 1
    return None


def loads_extension(argv: Sequence[str]) -> bool:
    position = find_ipykernel(argv)
    return position is not None and argv[position + 1] == EXTENSION
