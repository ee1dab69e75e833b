"""Host memory: how much a process may still take, and which process the system's killer takes first.

The rules:
- Saved device memory lands in the process's own memory: it counts against every control group above that process.
- The headroom is the minimum of the system's available memory and of the room below each limit on the way to the root,
  each less a margin: a process that fills its limit to the last byte is killed by its next allocation.
- Memory that the kernel reclaims without writing (inactive file cache) does not count as used. Swap does not count as
  room.
- Version 1 and version 2 of control groups are read, also side by side. If the group's path is not visible below
  the mount (a container shows only a part of the hierarchy), the limit of the mounted part counts.
- Within a control group namespace (a container's) the hierarchy is read whole where it is mounted whole, too (`control_groups`).
- A limit that exists but cannot be read is an error, never "no limit".
- Processes that take memory together share the room of each limit above them: their needs are added up, limit by limit.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from fractional_gpu.host.control_groups import ROOT, absolute, levels_up, own_group
from fractional_gpu.host.process import PROC, ProcessIdentity, is_alive, lines_of

_MIB: Final = 1024 * 1024
_MARGIN_PARTS: Final = 50  # 2 %: page tables, and allocations of the process meanwhile
_MARGIN_LEAST_MIB: Final = 64
_TOLD: Final = re.compile(rb"^(MemTotal|MemAvailable):[ \t]*(\d+) kB$", re.MULTILINE)
_TOLD_TOTAL: Final = re.compile(rb"^(MemTotal|SwapTotal):[ \t]*(\d+) kB$", re.MULTILINE)
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, order=True)
class Headroom:
    mib: int
    limited_by: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limit leaves `left_mib` where `need_mib` are needed."""

    need_mib: int
    left_mib: int
    limited_by: str


class _Mount(NamedTuple):
    version: int
    root: PurePosixPath
    point: Path
    own: PurePosixPath | None = None  # the host's path of this process's group, where a namespace hides it


def system_headroom(*, proc: Path = PROC) -> Headroom:
    """Return the room in the system's memory. Raises OSError, and ValueError for an unexpected /proc/meminfo."""
    found = dict(_TOLD.findall((proc / "meminfo").read_bytes()))
    try:
        total, available = (int(found[name]) * 1024 for name in (b"MemTotal", b"MemAvailable"))
    except KeyError as error:
        raise ValueError(f"{proc}/meminfo does not tell MemTotal and MemAvailable in kB") from error
    return _room(total, available, "the system's memory")


def machine_total_mib(*, proc: Path = PROC) -> int:
    """Return the machine's memory, MiB. Raises OSError, and ValueError for an unexpected /proc/meminfo."""
    told = dict(_TOLD.findall((proc / "meminfo").read_bytes()))
    if b"MemTotal" not in told:
        raise ValueError(f"{proc}/meminfo does not tell MemTotal in kB")
    return int(told[b"MemTotal"]) // 1024


def shortage(needs: Mapping[int, int], *, proc: Path = PROC) -> Shortage | None:
    """Return the limit that is short by most, for needs in MiB by pid; None if every limit has the room. Raises as `headroom`."""
    return LimitReader(proc=proc).shortage(needs)


class LimitReader:
    """Reads the limits of many processes at one moment: a limit that several share is read once. Short-lived: its figures age."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc = proc
        self._system: Headroom | None = None
        self._mounts: list[_Mount] | None = None
        self._found: dict[bytes, dict[Path | None, Headroom]] = {}  # the limits, by the content of /proc/PID/cgroup

    def headroom(self, pid: int) -> Headroom:
        """Return how much more memory the process may take, MiB.

        Raises ProcessLookupError when there is no such process, OSError and ValueError for what cannot be read.
        """
        return min(self._limits(pid).values())

    def shortage(self, needs: Mapping[int, int]) -> Shortage | None:
        rooms: dict[Path | None, Headroom] = {}
        need_mib: Counter[Path | None] = Counter()
        for pid, mib in needs.items():
            limits = self._limits(pid)
            rooms.update(limits)
            need_mib.update(dict.fromkeys(limits, mib))
        short = [Shortage(need_mib[where], room.mib, room.limited_by) for where, room in rooms.items()]
        worst = max(short, key=lambda one: one.need_mib - one.left_mib, default=None)
        return worst if worst is not None and worst.need_mib > worst.left_mib else None

    def _limits(self, pid: int) -> dict[Path | None, Headroom]:
        """Return the room below each limit by the folder of its control group; None is the system itself."""
        try:
            groups = (self._proc / str(pid) / "cgroup").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(f"no process has the id {pid}") from None
        found = self._found.get(groups)
        if found is None:
            if self._system is None:
                self._system = system_headroom(proc=self._proc)
            if self._mounts is None:
                self._mounts = _mounts(self._proc)
            found = {None: self._system, **dict(_group_headrooms(_group_paths(groups), self._mounts))}
            self._found[groups] = found
        return found


def memory_groups(pid: int, *, proc: Path = PROC) -> dict[int, list[Path]]:
    """Return the folders of the process's control groups that may account its memory, by version: its own first, then its ancestors.

    Raises ProcessLookupError when there is no such process, OSError and ValueError for what cannot be read.
    """
    try:
        groups = (proc / str(pid) / "cgroup").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None
    found: dict[int, list[Path]] = {}
    for version, folder in _group_folders(_group_paths(groups), _mounts(proc)):
        found.setdefault(version, []).append(folder)
    return found


def smallest_limit(pid: int, *, proc: Path = PROC) -> Headroom:
    """Return the most memory that the process may ever use, MiB: the smallest limit of its control groups, else the machine's with swap.

    Raises as `memory_groups`.
    """
    told = dict(_TOLD_TOTAL.findall((proc / "meminfo").read_bytes()))
    total = sum(int(told.get(name, 0)) for name in (b"MemTotal", b"SwapTotal")) * 1024
    if not total:
        raise ValueError(f"{proc}/meminfo does not tell MemTotal in kB")
    limits = [Headroom(total // _MIB, "the system's memory")]
    for version, folders in memory_groups(pid, proc=proc).items():
        limits += [limit for folder in folders if (limit := _limit_in(version, folder, total)) is not None]
    return min(limits)


def group_limit(group: str, *, proc: Path = PROC) -> Headroom | None:
    """Return the smallest memory limit of the control group and those above it, MiB; None if none is less than the machine's memory.

    `group`: its path below the root of its hierarchy. Raises OSError and ValueError for what cannot be read.
    """
    total = machine_total_mib(proc=proc) * _MIB
    limits = [
        limit
        for version, own in _folders_of(group, proc)
        for folder in (own, *own.parents)
        if (limit := _limit_in(version, folder, total)) is not None
    ]
    return min(limits, default=None)


def group_used_mib(group: str, *, proc: Path = PROC) -> int:
    """Return what the control group's processes use, without caches that can be reclaimed, MiB; 0 where it has no such count.

    Raises OSError and ValueError for what cannot be read.
    """
    used = 0
    for version, folder in _folders_of(group, proc):
        name, inactive = (
            ("memory.current", "inactive_file") if version == 2 else ("memory.usage_in_bytes", "total_inactive_file")
        )
        used = max(used, (_bytes(folder / name) or 0) - _stat(folder / "memory.stat", inactive))
    return used // _MIB


def _folders_of(group: str, proc: Path) -> Iterator[tuple[int, Path]]:
    path = PurePosixPath(group)
    for mount in _mounts(proc):
        if _shows(mount, path) and (folder := mount.point / path.relative_to(mount.root)).is_dir():
            yield mount.version, folder


def _limit_in(version: int, folder: Path, total: int) -> Headroom | None:
    limit = _bytes(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    return Headroom(limit // _MIB, _limit_of(folder, limit)) if limit is not None and limit < total else None


def _room(limit: int, left: int, name: str) -> Headroom:
    margin = max(_MARGIN_LEAST_MIB * _MIB, limit // _MARGIN_PARTS)
    return Headroom(max(0, left - margin) // _MIB, name)


def _group_headrooms(paths: dict[int, PurePosixPath], mounts: list[_Mount]) -> Iterator[tuple[Path, Headroom]]:
    for version, folder in _group_folders(paths, mounts):
        for room in _limits_v2(folder) if version == 2 else _limits_v1(folder):
            yield folder, room


def _group_folders(paths: dict[int, PurePosixPath], mounts: list[_Mount]) -> Iterator[tuple[int, Path]]:
    """Yield each folder once, with its version, from the groups themselves upwards."""
    for version, seen in paths.items():
        here = [mount for mount in mounts if mount.version == version]
        path = next((absolute(seen, mount.own) for mount in here if mount.own is not None), seen)
        showing = [mount for mount in here if _shows(mount, path)]
        for folder in dict.fromkeys(folder for mount in showing or here for folder in _ancestors(mount, path)):
            yield version, folder


def _group_paths(groups: bytes) -> dict[int, PurePosixPath]:
    paths: dict[int, PurePosixPath] = {}
    for line in lines_of(groups):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[1] = PurePosixPath(path)
    return paths


def _mounts(proc: Path) -> list[_Mount]:
    """Return where the hierarchies are mounted in this mount namespace; one mount of each root is enough."""
    found: dict[tuple[int, PurePosixPath], _Mount] = {}
    for line in lines_of((proc / "self/mountinfo").read_bytes()):
        before, separator, after = line.partition(" - ")
        kind, _source, options = (*after.split(" ", 2), "", "")[:3]
        version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0) if separator else 0
        if version == 2 or (version == 1 and "memory" in options.split(",")):
            root, point = (unescape(field) for field in before.split(" ")[3:5])
            mount = _Mount(version, PurePosixPath(root), Path(point))
            found.setdefault((version, mount.root), mount)
    return _of_host(list(found.values()))


def _of_host(mounts: list[_Mount]) -> list[_Mount]:
    """Return the mounts with the host's paths, where a control group namespace hides these and the whole hierarchy is mounted, too."""
    owns = _own_groups(mounts)
    return [
        mount if (own := owns.get(mount.version)) is None else mount._replace(root=absolute(mount.root, own), own=own)
        for mount in mounts
    ]


def _own_groups(mounts: list[_Mount]) -> dict[int, PurePosixPath]:
    """Return the host's path of this process's own group by version, for those where its namespace hides it."""
    found: dict[int, PurePosixPath] = {}
    for whole in mounts:
        for inside in mounts:
            if (levels := levels_up(whole.root)) and (inside.version, inside.root) == (whole.version, ROOT):
                own = own_group(whole.point, levels, inside.point)
                if own is not None:
                    found[whole.version] = own
    return found


def unescape(field: str) -> str:
    """Return a path of mountinfo as it is: blanks and the like are octal there."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _shows(mount: _Mount, path: PurePosixPath) -> bool:
    return ".." not in path.parts and path.is_relative_to(mount.root)


def _ancestors(mount: _Mount, path: PurePosixPath) -> list[Path]:
    """Return the visible folders from the group up to the mount; always at least the mount itself."""
    if not _shows(mount, path):
        return [mount.point]
    below = path.relative_to(mount.root)
    return [mount.point / part for part in (below, *below.parents)]


def _limits_v2(folder: Path) -> Iterator[Headroom]:
    # Past memory.high a process is throttled until it hardly moves: for saving gigabytes that is a limit too.
    limits = [limit for limit in (_bytes(folder / "memory.max"), _bytes(folder / "memory.high")) if limit is not None]
    used = _bytes(folder / "memory.current")
    if limits and used is not None:
        yield _left(folder, min(limits), used, "inactive_file")


def _limits_v1(folder: Path) -> Iterator[Headroom]:
    limit, used = _bytes(folder / "memory.limit_in_bytes"), _bytes(folder / "memory.usage_in_bytes")
    # Version 1 writes "no limit" as a number near 2^63; it never binds before the system does.
    if limit is not None and used is not None:
        yield _left(folder, limit, used, "total_inactive_file")


def _left(folder: Path, limit: int, used: int, reclaimable: str) -> Headroom:
    used -= min(used, _stat(folder / "memory.stat", reclaimable))
    return _room(limit, limit - used, _limit_of(folder, limit))


def _limit_of(folder: Path, limit: int) -> str:
    # Users choose the names of groups: no control characters of theirs get into messages.
    name = "".join(one if one.isprintable() else "?" for one in str(folder))
    return f"the memory limit of control group {name} ({limit // _MIB} MiB)"


def _bytes(file: Path) -> int | None:
    """Return the number in the file; None for "max" and where the file does not exist (no such controller here)."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if text == "max" else int(text)


def _stat(file: Path, name: str) -> int:
    try:
        text = file.read_text(encoding="ascii")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


# The system's out-of-memory killer: which process it takes first, and whether it has killed one.
#
# The rules:
# - The killer takes the process with the most memory, including swapped-out memory. A process's adjustment is added, in thousandths of the
#   memory that is full: the machine's, or a control group's. -1000 exempts a process; nothing here goes below `LEAST`.
# - A user may raise the adjustment of own processes, and lower it again down to the value that a privileged process set last (else 0).
#   Below that floor it takes CAP_SYS_RESOURCE. The floor cannot be read, only found by trying.
# - A child inherits the adjustment, and the floor.
# - An adjustment is written through a descriptor of the process's file in /proc, after its identity was checked: never to another process
#   with that pid.


KERNEL_MESSAGES: Final = Path("/dev/kmsg")
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # a constant of the kernel
_LONGEST_MESSAGE: Final = 8192

LEAST: Final = -900  # a control group in which every process is exempt would hang instead of losing one
_COUNTER: Final = {1: "memory.oom_control", 2: "memory.events"}


def adjustment(pid: int, *, proc: Path = PROC) -> int:
    try:
        return int((proc / str(pid) / "oom_score_adj").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None


def lower(identity: ProcessIdentity, target: int) -> int:
    """Lower the process's adjustment to the target, or as far towards it as is permitted; return the new value.

    It never raises the adjustment. Raises ProcessLookupError, and OSError for what is not a matter of permission.
    """
    with _opened(identity) as file:
        # The floor cannot be read: bisect between the lowest value that was allowed and the highest that was refused.
        allowed = adjustment(identity.pid)
        refused = target - 1  # the target itself has not been tried
        while allowed - refused > 1:
            value = target if refused < target else (allowed + refused) // 2
            if _permitted(file, value):
                allowed = value
            else:
                refused = value
        return allowed


def put_back(identity: ProcessIdentity, value: int) -> None:
    """Raise the process's adjustment to the value, unless it is higher already, and the floor with it where that is permitted.

    Raises ProcessLookupError and OSError.
    """
    with _opened(identity) as file:
        os.write(file, b"%d" % max(value, adjustment(identity.pid)))


def kill_counter(pid: int, *, proc: Path = PROC) -> Path:
    """Return the file that counts the kills among the processes of this one's control group; without one, in the whole system.

    Raises ProcessLookupError, OSError and ValueError for what cannot be read.
    """
    for version, folders in memory_groups(pid, proc=proc).items():
        file = folders[0] / _COUNTER[version]
        if file.exists():
            return file
    return proc / "vmstat"


def kill_count(counter: Path) -> int:
    """Return how many processes the killer has ended so far, 0 where the kernel is too old to count. Raises OSError, ValueError."""
    for line in counter.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def was_killed(identity: ProcessIdentity, *, messages: Path = KERNEL_MESSAGES) -> bool | None:
    """Return whether the system's log says that the killer ended this process; None if this user may not read the log.

    The log has the pids of the first pid namespace: within a container it cannot be used.
    """
    if (PROC / "self/ns/pid").readlink().name != _FIRST_PID_NAMESPACE:
        return None
    try:
        lines = _messages(messages)
    except PermissionError:
        return None
    since_us = identity.start_time * 1_000_000 // os.sysconf("SC_CLK_TCK")
    said = f"Killed process {identity.pid} ("
    return any(said in text for at_us, text in lines if at_us >= since_us)


def _messages(messages: Path) -> list[tuple[int, str]]:
    """Return the system's log, oldest first: microseconds since boot, and the text. Raises OSError."""
    found: list[tuple[int, str]] = []
    log = os.open(messages, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(log, _LONGEST_MESSAGE)
            except BrokenPipeError:  # it was overwritten meanwhile: the next one is read
                continue
            except BlockingIOError:
                return found
            head, _, text = record.decode(errors="replace").partition(";")
            found.append((int(head.split(",")[2]), text))
    finally:
        os.close(log)


@contextmanager
def _opened(identity: ProcessIdentity) -> Iterator[int]:
    try:
        file = os.open(PROC / str(identity.pid) / "oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {identity.pid}") from None
    try:
        if not is_alive(identity):
            raise ProcessLookupError(f"process {identity.pid}, started at tick {identity.start_time}, is gone")
        yield file
    finally:
        os.close(file)


def _permitted(file: int, value: int) -> bool:
    try:
        os.write(file, b"%d" % value)
    except PermissionError:
        return False
    return True
