"""How the node agent notices that it is to end."""

import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fractional_gpu.host.wakeups import signal_pipe


class Ending:
    """Whether SIGTERM or SIGINT has come. For the main thread.

    The handler runs in the thread that waits, so it takes no lock: that of an Event could be that thread's own. The wait is for a pipe
    that the system's handler writes to: a signal that comes just before the wait ends it, too.
    """

    def __init__(self, wakes: int) -> None:
        """`wakes`: the end of the pipe that can be read once a signal has come."""
        self._wakes = wakes
        self._come = False

    def note(self, _number: int, _frame: FrameType | None) -> None:
        self._come = True

    def is_set(self) -> bool:
        return self._come

    def wait(self, seconds: float) -> None:
        """Return when one comes, or after so many seconds."""
        select.select([self._wakes], [], [], seconds)


@contextmanager
def ending() -> Iterator[Ending]:
    with signal_pipe() as wakes:
        end = Ending(wakes)
        before = {number: signal.signal(number, end.note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield end
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
