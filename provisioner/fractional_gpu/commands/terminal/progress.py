"""How far a long command is, on standard error: nothing in its first two seconds, then a line every two seconds at most."""

import sys
from time import perf_counter

_QUIET_S = 2.0


class Progress:
    """Says `WHAT: 3 of 8 THINGS after 5 s`."""

    def __init__(self, what: str, things: str) -> None:
        self._what, self._things = what, things
        self._began = self._spoke = perf_counter()

    def __call__(self, done: int, of: int) -> None:
        """Say that so many of all are done, if it is time to."""
        now = perf_counter()
        if now - self._spoke >= _QUIET_S:
            self._spoke = now
            print(f"{self._what}: {done} of {of} {self._things} after {now - self._began:.0f} s", file=sys.stderr)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return perf_counter() - self._began
