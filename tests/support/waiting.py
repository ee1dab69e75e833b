"""Waiting in tests for what nothing signals. It imports nothing of ours: programs of tests that start often import it."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

__all__ = ["DEADLINE_S", "until"]

DEADLINE_S = 60.0


def until(ask: Callable[[], T | None], what: str, *, deadline_s: float = DEADLINE_S, pause_s: float = 0.005) -> T:
    """Poll another process until the answer is true. Only for facts that nothing signals. `pause_s`: the first pause."""
    end = time.monotonic() + deadline_s
    pause = pause_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
