"""How many more real bytes a simulated host's folder can hold. Standard library only: notebooks import it.

A simulated device may be declared larger than the machine's memory; its contents may not be.
"""

import os
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["available_bytes", "in_memory"]

_NO_LIMIT: Final = 1 << 62


def available_bytes(directory: Path) -> int:
    """Return how many more bytes the folder can really hold: its file system, and if that is memory, the machine."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if not in_memory(directory):
        return free
    return min(free, _memory_available(), _cgroup_available())


@cache  # a folder does not change its file system while a program uses it
def in_memory(directory: Path) -> bool:
    """Return whether the folder's file system keeps its files in memory."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _cgroup_available() -> int:
    return min((_room_below(folder) for folder in _cgroups()), default=_NO_LIMIT)


@cache
def _cgroups() -> tuple[Path, ...]:
    """Return this process's cgroup and its ancestors, without the root, which has no limit."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        if line.startswith("0::/"):
            here = root / line[4:]
            return tuple(folder for folder in (here, *here.parents) if folder.is_relative_to(root) and folder != root)
    return ()


def _room_below(cgroup: Path) -> int:
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return _NO_LIMIT
        current = int((cgroup / "memory.current").read_text(encoding="ascii"))
        statistics = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return _NO_LIMIT  # a cgroup that may not be read counts as unlimited
    # The kernel drops cached files under pressure. Files of a memory file system are not in these counters.
    cached = sum(int(line.split()[1]) for line in statistics if line.startswith(("active_file ", "inactive_file ")))
    return max(0, int(limit) - current + cached)
