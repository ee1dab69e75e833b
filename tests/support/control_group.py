"""A real control group with a limit of memory, version 1 or 2 like the machine. Creating one needs root."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from fractional_gpu.host.control_groups import mounts

__all__ = ["JOIN", "job_group", "memory_group", "pod_group", "set_limit", "unit_group", "used_mib"]

MIB = 1 << 20
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
JOIN = "import os; open({group!r} + '/cgroup.procs', 'w').write(str(os.getpid()))"
"""A program's line that moves it into a group, before it allocates anything that counts."""


def set_limit(group: Path, mib: int) -> None:
    old = group / "memory.limit_in_bytes"
    (old if old.exists() else group / "memory.max").write_text(str(mib * MIB))


def used_mib(group: Path) -> int:
    old = group / "memory.usage_in_bytes"
    return int((old if old.exists() else group / "memory.current").read_text()) // MIB


@contextmanager
def memory_group(limit_mib: int) -> Iterator[Path]:
    """A group with this much memory and no swap, in which processes are killed one by one if it runs out; removed with the block."""
    version_1, top = _hierarchy()
    group = top / f"jfg-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        set_limit(group, limit_mib)
        swap = group / ("memory.swappiness" if version_1 else "memory.swap.max")
        if swap.exists():
            swap.write_text("0")
        yield group
    finally:
        group.rmdir()


@contextmanager
def job_group(limit_mib: int | None = None) -> Iterator[tuple[str, Path]]:
    """A job's number and its control group, where Slurm creates it; removed with the block."""
    version_1, top = _hierarchy()
    number = str(secrets.randbelow(10**9) + 10**9)
    user = top / f"slurm_jfg{number}" / f"uid_{os.getuid()}"
    group = user / f"job_{number}"
    group.mkdir(parents=True)
    if not version_1:
        for above in (user.parent, user):
            (above / "cgroup.subtree_control").write_text("+memory")
    try:
        if limit_mib is not None:
            set_limit(group, limit_mib)
        yield number, group
    finally:
        for folder in (group, user, user.parent):
            if folder.exists():
                folder.rmdir()


@contextmanager
def pod_group(uid: str) -> Iterator[Path]:
    """A pod's control group, where a kubelet with the driver cgroupfs creates it; removed with the block.

    The group above it stays while another test has a pod there.
    """
    _, top = _hierarchy()
    group = top / "kubepods" / f"pod{uid}"
    group.mkdir(parents=True)
    try:
        yield group
    finally:
        _remove(group)
        with suppress(OSError):
            group.parent.rmdir()


@contextmanager
def unit_group() -> Iterator[tuple[str, Path]]:
    """A control group of version 2 like a systemd unit's: its path in the hierarchy and its folder; removed with the block."""
    (mount,) = [one for one in mounts() if one.version == 2]
    path = PurePosixPath(f"/jfg-{secrets.token_hex(4)}.service")
    group = mount.folder(mount.root / path.name)
    assert group is not None
    group.mkdir()
    try:
        yield str(mount.root / path.name), group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a group when its last process, which was killed, has left it; nothing signals that."""
    end = time.monotonic() + 60
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def _hierarchy() -> tuple[bool, Path]:
    """Whether memory is accounted by version 1, and the root of its hierarchy."""
    if (_V1 / "memory.limit_in_bytes").exists():
        return True, _V1
    (_V2 / "cgroup.subtree_control").write_text("+memory")
    return False, _V2
