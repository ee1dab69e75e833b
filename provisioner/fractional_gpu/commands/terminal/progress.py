"""How far a long command is, on standard error: nothing in its first two seconds, then a line every two seconds at most."""

import sys
import threading
from collections.abc import Callable
from time import perf_counter

from fractional_gpu.core.units import format_forecast
from fractional_gpu.protocol.messages import WaitLine as Line

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


class WaitLine:
    """Says why a program waits for the GPU, its place and the expected time: when it has waited for two seconds, and at changes.

    `say` gets each line, in a thread of its own: the broker sends nothing while nothing changes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._latest = self._said = ""

    def update(self, line: Line) -> None:
        """Take what the broker says now."""
        with self._lock:
            self._latest = describe_wait(line)
            if self._timer is None and self._latest != self._said:
                self._timer = threading.Timer(_QUIET_S, self._speak)
                self._timer.daemon = True
                self._timer.start()

    def stop(self) -> None:
        """Say no more: the wait is over."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._latest, self._said = None, "", ""

    def _speak(self) -> None:
        with self._lock:
            self._timer, text = None, self._latest
            self._said = text
        if text:
            self._say(text)


def describe_wait(line: Line) -> str:
    """Return the reason of a wait with the place in the queue and the forecast, where they are known."""
    place = f"; place {line.position} in the queue" if line.position is not None else ""
    left = "" if line.expected_ms is None else format_forecast(line.expected_ms, line.low_ms, line.high_ms, more=True)
    return f"{line.sentence}{place}{f'; {left}' if left else ''}"
