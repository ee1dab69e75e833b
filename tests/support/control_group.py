"""A real control group with a limit of memory, version 1 or 2 as the machine has it. Making one takes root."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["JOIN", "memory_group", "set_limit", "used_mib"]

MIB = 1 << 20
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
JOIN = "import os; open({group!r} + '/cgroup.procs', 'w').write(str(os.getpid()))"
"""A program's line that moves it into a group, before it allocates anything that counts."""


def set_limit(group: Path, mib: int) -> None:
    """Give the group so much memory, MiB."""
    old = group / "memory.limit_in_bytes"
    (old if old.exists() else group / "memory.max").write_text(str(mib * MIB))


def used_mib(group: Path) -> int:
    """Return what the group's processes use, file cache included."""
    old = group / "memory.usage_in_bytes"
    return int((old if old.exists() else group / "memory.current").read_text()) // MIB


@contextmanager
def memory_group(limit_mib: int) -> Iterator[Path]:
    """A group in which processes have so much memory, no swap, and are killed one by one where it runs out; removed with the block."""
    version_1 = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if version_1 else _V2) / f"jfg-{secrets.token_hex(4)}"
    if not version_1:
        (_V2 / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    try:
        set_limit(group, limit_mib)
        swap = group / ("memory.swappiness" if version_1 else "memory.swap.max")
        if swap.exists():
            swap.write_text("0")
        yield group
    finally:
        group.rmdir()
