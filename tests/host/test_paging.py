"""Another process's memory is moved to swap space, and comes back byte for byte."""

import os
import subprocess
import sys
from contextlib import closing

import pytest

from fractional_gpu.host.paging import large_ranges, page_out, swapped_mib
from tests.support.swap_space import swap_space

pytestmark = pytest.mark.promise("paging")

HOLDS_MIB = 48
PROGRAM = f"""
held = bytes(range(256)) * ({HOLDS_MIB} << 12)
print(flush=True)
input()
print(held == bytes(range(256)) * ({HOLDS_MIB} << 12), flush=True)
"""


def test_large_memory_goes_to_swap_space_and_returns_whole() -> None:
    with (
        swap_space(2 * HOLDS_MIB) as there_is_swap,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        ranges = large_ranges(child.pid)
        assert HOLDS_MIB <= sum(length for _, length in ranges) >> 20 < HOLDS_MIB + 16, (
            "and not the interpreter's own memory"
        )
        with closing(os.fdopen(os.pidfd_open(child.pid))) as process:
            for start, length in ranges:
                page_out(process.fileno(), start, length)
        assert (swapped_mib(child.pid) >= HOLDS_MIB) == there_is_swap
        assert child.communicate("\n")[0] == "True\n"


def test_a_process_that_ended_or_is_not_ours_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pidfd = os.pidfd_open(child.pid)
        child.wait()
    with closing(os.fdopen(pidfd)) as process, pytest.raises(ProcessLookupError):
        page_out(process.fileno(), 0, 1 << 20)
    with pytest.raises(FileNotFoundError):
        large_ranges(child.pid)
