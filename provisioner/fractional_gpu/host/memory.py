"""Finds how much host memory a process can still allocate, and influences which process the out-of-memory killer chooses first.

- The driver saves device memory in the process's own memory, so it counts towards every control group above the process. If several
  processes share a limit, there must be room below it for the sum of their needs.
- Headroom is the system's available memory or the room left below any limit, whichever is smallest, minus a margin. Without the margin, a
  process at its limit would be killed at its next allocation. Inactive file cache is not counted as used, and swap is not counted as
  available.
- Control groups of versions 1 and 2 are supported, even side by side. If a group's path is hidden, the limit of the mounted part of the
  hierarchy applies. A limit that cannot be read is an error; it never means "no limit".
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from fractional_gpu.host.control_groups import Mount, absolute, mounts
from fractional_gpu.host.process import PROC, ProcessIdentity, is_alive, lines_of, read_of

_MIB: Final = 1024 * 1024
_MARGIN_PARTS: Final = 50  # 2 % for page tables and for allocations during the save
_MARGIN_LEAST_MIB: Final = 64


class _Files(NamedTuple):
    limits: tuple[str, ...]  # the first one is the hard limit
    used: str
    reclaimable: str  # the name of a figure in memory.stat


_FILES: Final = {
    # In version 1, "no limit" is a number near 2^63, which is more than the system's memory.
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    # Above memory.high the kernel throttles a process until it hardly runs, so this counts as a limit, too.
    2: _Files(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True, order=True)
class Headroom:
    mib: int
    limited_by: str


@dataclass(frozen=True, slots=True)
class Shortage:
    need_mib: int
    left_mib: int
    limited_by: str


def system_headroom(*, proc: Path = PROC) -> Headroom:
    return _room(_meminfo("MemTotal", proc), _meminfo("MemAvailable", proc), "the system's memory")


def machine_total_mib(*, proc: Path = PROC) -> int:
    return _meminfo("MemTotal", proc) // _MIB


def _meminfo(name: str, proc: Path) -> int:
    found = re.search(rf"^{name}:[ \t]*(\d+) kB$", (proc / "meminfo").read_text("ascii"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{proc}/meminfo does not report {name} in kB")
    return int(found[1]) * 1024


def shortage(needs: Mapping[int, int], *, proc: Path = PROC) -> Shortage | None:
    """Return the largest amount by which `needs` (MiB by pid) exceed a limit, or None if all fit. Raises the same errors as `headroom`."""
    return LimitReader(proc=proc).shortage(needs)


class LimitReader:
    """A reader for many processes' limits at one point in time. Shared limits are read only once. Discard the reader after use."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc = proc
        self._found: dict[bytes, dict[Path | None, Headroom]] = {}  # the limits, by the content of /proc/PID/cgroup

    @cached_property
    def _system(self) -> Headroom:
        return system_headroom(proc=self._proc)

    @cached_property
    def _mounts(self) -> list[Mount]:
        return mounts(proc=self._proc)

    def headroom(self, pid: int) -> Headroom:
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
        """Return the room left below each limit, by control group folder. The key None stands for the whole system."""
        groups = read_of(pid, "cgroup", proc=self._proc)
        if groups not in self._found:
            found: dict[Path | None, Headroom] = {None: self._system}
            for version, folders in _folders(groups, self._mounts).items():
                found |= {folder: room for folder in folders if (room := _headroom(version, folder)) is not None}
            self._found[groups] = found
        return self._found[groups]


def memory_groups(pid: int, *, proc: Path = PROC) -> dict[int, list[Path]]:
    """Return the folders of the groups that can track the process's memory, from its own group upwards, by control group version.

    Raises ProcessLookupError or OSError.
    """
    return _folders(read_of(pid, "cgroup", proc=proc), mounts(proc=proc))


def smallest_limit(pid: int, *, proc: Path = PROC) -> Headroom:
    """Return the smallest memory limit of the process's control groups, or the machine's memory including swap if that is smaller.

    Raises ProcessLookupError or OSError.
    """
    total = _meminfo("MemTotal", proc) + _meminfo("SwapTotal", proc)
    limits = [Headroom(total // _MIB, "the system's memory")]
    for version, folders in memory_groups(pid, proc=proc).items():
        limits += [limit for folder in folders if (limit := _limit_in(version, folder, total)) is not None]
    return min(limits)


def group_limit(group: str, *, proc: Path = PROC) -> Headroom | None:
    """Return the smallest memory limit of the group and its parents, or None if all exceed the machine's memory. Raises OSError."""
    total = machine_total_mib(proc=proc) * _MIB
    limits = [
        limit
        for mount, own in _folders_of(group, proc)
        for folder in _upwards(mount, own)
        if (limit := _limit_in(mount.version, folder, total)) is not None
    ]
    return min(limits, default=None)


def group_used_mib(group: str, *, proc: Path = PROC) -> int:
    """Return how much memory the group uses, excluding reclaimable caches, or 0 if Linux does not track it. Raises OSError."""
    used = [_used(mount.version, folder) or 0 for mount, folder in _folders_of(group, proc)]
    return max(used, default=0) // _MIB


def _folders_of(group: str, proc: Path) -> Iterator[tuple[Mount, Path]]:
    for mount in mounts(proc=proc):
        folder = mount.folder(PurePosixPath(group))
        if _has_memory(mount) and folder is not None and folder.is_dir():
            yield mount, folder


def _has_memory(mount: Mount) -> bool:
    return mount.version == 2 or "memory" in mount.controllers


def _limit_in(version: int, folder: Path, total: int) -> Headroom | None:
    limit = _bytes(folder / _FILES[version].limits[0])
    return Headroom(limit // _MIB, _limit_of(folder, limit)) if limit is not None and limit < total else None


def _room(limit: int, left: int, name: str) -> Headroom:
    margin = max(_MARGIN_LEAST_MIB * _MIB, limit // _MARGIN_PARTS)
    return Headroom(max(0, left - margin) // _MIB, name)


def _folders(groups: bytes, everywhere: list[Mount]) -> dict[int, list[Path]]:
    """Return the folders of the groups in /proc/PID/cgroup that can track memory, and their parents' folders, by control group version."""
    found: dict[int, list[Path]] = {}
    for line in lines_of(groups):
        number, controllers, seen = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        here = [mount for mount in everywhere if mount.version == version and _has_memory(mount)]
        path = PurePosixPath(seen)
        path = next((absolute(path, mount.own) for mount in here if mount.own is not None), path)
        showing = [mount for mount in here if mount.folder(path) is not None] or here
        if folders := [one for mount in showing for one in _upwards(mount, mount.folder(path))]:
            found[version] = list(dict.fromkeys(folders))
    return found


def _upwards(mount: Mount, folder: Path | None) -> list[Path]:
    """Return the visible folders from the group up to the mount. If the group is not visible, return only the mount."""
    if folder is None:
        return [mount.point]
    return [one for one in (folder, *folder.parents) if one.is_relative_to(mount.point)]


def _headroom(version: int, folder: Path) -> Headroom | None:
    limits = [limit for name in _FILES[version].limits if (limit := _bytes(folder / name)) is not None]
    used = _used(version, folder)
    if not limits or used is None:
        return None
    return _room(min(limits), min(limits) - used, _limit_of(folder, min(limits)))


def _used(version: int, folder: Path) -> int | None:
    files = _FILES[version]
    used = _bytes(folder / files.used)
    return None if used is None else max(0, used - _stat(folder / "memory.stat", files.reclaimable))


def _limit_of(folder: Path, limit: int) -> str:
    # Users choose group names, which appear in messages.
    name = "".join(one if one.isprintable() else "?" for one in str(folder))
    return f"the memory limit of control group {name} ({limit // _MIB} MiB)"


def _bytes(file: Path) -> int | None:
    """Return the number in the file, or None for "max" or if the file is missing because the controller is not enabled here."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if text == "max" else int(text)


def _stat(file: Path, name: str) -> int:
    try:
        return _counted(file, name)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _counted(file: Path, name: str) -> int:
    for line in file.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


# The out-of-memory killer kills the process with the highest score. The score is the process's memory, including swap, plus its adjustment,
# in thousandths of the memory that is full (that of the machine or of a control group). -1000 exempts a process. Users may lower the
# adjustment of their processes to the value that a privileged process last set, or else to 0. This minimum cannot be read, so we find it by
# trying.


KERNEL_MESSAGES: Final = Path("/dev/kmsg")
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # a constant in the kernel
_LONGEST_MESSAGE: Final = 8192

LEAST: Final = -900  # if every process were exempt, a control group would hang instead of losing one
_COUNTER: Final = {1: "memory.oom_control", 2: "memory.events"}


def adjustment(pid: int, *, proc: Path = PROC) -> int:
    return int(read_of(pid, "oom_score_adj", proc=proc))


def lower(identity: ProcessIdentity, target: int) -> int:
    """Lower the process's `oom_score_adj` to the target, or as far as permitted, and return the new value.

    Raises ProcessLookupError or OSError.
    """
    with _opened(identity) as file:
        # The minimum cannot be read, so bisect between the lowest value that was allowed and the highest one that was refused.
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
    """Raise the process's `oom_score_adj` (and its minimum, if permitted) to at least this value. Raises ProcessLookupError or OSError."""
    with _opened(identity) as file:
        os.write(file, b"%d" % max(value, adjustment(identity.pid)))


def kill_counter(pid: int, *, proc: Path = PROC) -> Path:
    """Return the file that counts out-of-memory kills in the process's control group or, if there is none, in the whole system.

    Raises ProcessLookupError or OSError.
    """
    for version, folders in memory_groups(pid, proc=proc).items():
        file = folders[0] / _COUNTER[version]
        if file.exists():
            return file
    return proc / "vmstat"


def kill_count(counter: Path) -> int:
    """Return the number of out-of-memory kills recorded in the file, or 0 if Linux doesn't count them. Raises OSError or ValueError."""
    return _counted(counter, "oom_kill")


def was_killed(identity: ProcessIdentity, *, messages: Path = KERNEL_MESSAGES) -> bool | None:
    """Return whether the out-of-memory killer killed this process, according to the kernel log.

    Return None if we may not read the log or are in a container.
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
    found: list[tuple[int, str]] = []
    log = os.open(messages, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(log, _LONGEST_MESSAGE)
            except BrokenPipeError:  # this record was overwritten, so read the next one
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
