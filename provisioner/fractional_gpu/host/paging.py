"""Moves another process's memory to the machine's swap space (`process_madvise` with MADV_PAGEOUT, available since Linux 5.10).

This needs CAP_SYS_NICE and the right to read the process's memory. The process keeps running: Linux swaps memory back in when it is used.
"""

import ctypes
import os
import re
from typing import Final

from fractional_gpu.host.process import entries, read_of, status_field

_PROCESS_MADVISE: Final = 440  # the number of the system call on every architecture
_PAGEOUT: Final = 21
_LARGE: Final = 16 << 20  # bytes; smaller mappings hold no saved state, but the interpreter's own objects
_STEP: Final = 256 << 20  # bytes for each call, so that the caller can stop in between
_ANONYMOUS: Final = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *")  # its line in /proc/PID/maps


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_size_t), ("length", ctypes.c_size_t))


def large_ranges(pid: int) -> list[tuple[int, int]]:
    """Return a list of (start, length) ranges that cover the process's large anonymous mappings. Raises OSError."""
    found = []
    for line in entries(f"/proc/{pid}/maps", b"\n"):
        if plain := _ANONYMOUS.fullmatch(line):
            start, end = int(plain[1], 16), int(plain[2], 16)
            if end - start >= _LARGE:
                found += [(at, min(_STEP, end - at)) for at in range(start, end, _STEP)]
    return found


def page_out(pidfd: int, start: int, length: int) -> None:
    """Move as much of the memory to swap as there is room for. Blocks. Raises OSError (PermissionError if we lack the rights)."""
    libc = ctypes.CDLL(None, use_errno=True)
    piece = _Range(start, length)
    if libc.syscall(_PROCESS_MADVISE, pidfd, ctypes.byref(piece), ctypes.c_size_t(1), _PAGEOUT, ctypes.c_uint(0)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def swapped_mib(pid: int) -> int:
    """Return how much of the process's memory is in swap space, in MiB. Raises OSError or ValueError."""
    return int(status_field(read_of(pid, "status"), b"VmSwap").split()[0]) >> 10
