"""How many functions something calls: what it costs, on any machine, however busy."""

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["calls_of"]


def calls_of(work: Callable[[], object]) -> int:
    """Run the work in this thread; return how many functions it called, including C functions."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
