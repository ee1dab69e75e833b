"""Finds a control group that contains only one user's or seat's processes: a unit, a container, a user's slice, a job or a pod.

Only cgroup v2 groups are considered, because the driver's memory limits do not work with others.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from fractional_gpu.host.control_groups import ROOT, absolute, mounts
from fractional_gpu.host.process import PROC, lines_of, read_of
from fractional_gpu.host.workload import parse_workload

_USER: Final = re.compile(r"/user\.slice/user-(\d+)\.slice(?=/|$)", re.ASCII)
_UNIT: Final = re.compile(r"\.(service|scope)$|^[0-9a-f]{64}$", re.ASCII)  # a unit, or a container without systemd


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """A group's path from the root of the hierarchy. `is_leaf` is set if the process is in this group itself, not in one below it."""

    path: str
    is_leaf: bool


def group_of(pid: int, *, proc: Path = PROC) -> PurePosixPath | None:
    """Return the host path of the process's cgroup (v2), or None. Raises ProcessLookupError or OSError."""
    lines = (line.split(":", 2) for line in lines_of(read_of(pid, "cgroup", proc=proc)))
    path = next((parts[2] for parts in lines if parts[0] == "0"), None)
    mount = next((one for one in mounts(proc=proc) if one.version == 2), None)
    if path is None or mount is None:
        return None
    return absolute(PurePosixPath(path), mount.own or ROOT)


def own_group(pid: int, uid: int, *, proc: Path = PROC) -> OwnGroup | None:
    """Return the group that contains only the user's or seat's processes, or None if there is none. Blocks.

    The group may still turn out to be shared, if other users' kernels appear in it later (see `HardCaps`).
    """
    try:
        leaf = group_of(pid, proc=proc)
    except OSError:  # the process has ended
        return None
    if leaf is None or leaf == ROOT or leaf == group_of_self(proc=proc):
        return None
    workload = parse_workload(b"0::" + str(leaf).encode())
    user = _USER.match(str(leaf))
    if workload is not None and workload.group:
        path = PurePosixPath(workload.group)
    elif user is not None:
        if int(user[1]) != uid:
            return None
        path = PurePosixPath(user[0])
    else:
        # Take the outermost group, because users may have created more groups inside their own unit or container.
        units = [group for group in (*reversed(leaf.parents), leaf) if _UNIT.search(group.name)]
        if not units:
            return None
        path = units[0]
    return OwnGroup(str(path), path == leaf)


def own_path(pid: int, uid: int) -> str:
    """Return the path of the group found by `own_group`, or "" if there is none."""
    found = own_group(pid, uid)
    return "" if found is None else found.path


def group_of_self(*, proc: Path = PROC) -> PurePosixPath | None:
    """Return the host path of this process's own cgroup (v2), or None. Raises OSError."""
    own = (proc / "self").readlink()
    return group_of(int(own.name), proc=proc)
