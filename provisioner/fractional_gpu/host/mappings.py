"""The files that a process has mapped into its memory or holds open, by path.

A removed file counts under its old path. A process that may not be read, or has exited, has none.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fractional_gpu.host.process import PROC

__all__ = ["holds_open", "maps"]

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
