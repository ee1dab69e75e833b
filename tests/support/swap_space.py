"""Swap space for a test: the machine's own, or a file if this user may add one."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fractional_gpu.host.process import PROC

__all__ = ["swap_space"]


@contextmanager
def swap_space(mib: int) -> Iterator[bool]:
    """Whether there is swap space of this size for the block."""
    free = next(line for line in (PROC / "meminfo").read_text().splitlines() if line.startswith("SwapFree"))
    if int(free.split()[1]) >> 10 >= mib:
        yield True
        return
    with tempfile.TemporaryDirectory(prefix="jgl-swap-", dir="/var/tmp") as folder:  # /tmp may be in memory
        file = Path(folder, "swap")
        file.touch(0o600)
        file.write_bytes(bytes(mib << 20))
        subprocess.run(["/usr/sbin/mkswap", file], check=True, capture_output=True)
        if subprocess.run(["/usr/sbin/swapon", file], check=False, capture_output=True).returncode != 0:
            yield False
            return
        try:
            yield True
        finally:
            subprocess.run(["/usr/sbin/swapoff", file], check=True)
