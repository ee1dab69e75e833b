"""A pipe that wakes a waiting main thread on a signal: the C-level handler writes to it.

A Python handler runs between two instructions, so a signal just before a blocking call is not seen until the call ends. The pipe becomes
readable as soon as the signal comes, so `select` returns.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handling(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """Install these signal handlers during the block. Main thread only."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signal_pipe() -> Iterator[int]:
    """Yield a descriptor that becomes readable on a handled signal. Main thread only."""
    source, sink = os.pipe()
    for descriptor in (source, sink):
        os.set_blocking(descriptor, False)
    before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    try:
        yield source
    finally:
        signal.set_wakeup_fd(before)
        os.close(source)
        os.close(sink)


def drain(source: int) -> None:
    """Empty the pipe, so that only a new signal makes it readable."""
    with suppress(BlockingIOError):
        while os.read(source, 4096):
            pass
