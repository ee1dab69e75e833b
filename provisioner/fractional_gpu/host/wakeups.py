"""How a main thread that waits notices a signal: a pipe that the system's handler writes to.

A handler in Python runs between two steps, so one that comes just before a blocking call is not seen until that call ends. The pipe is
readable from the moment of the signal on, and `select` returns for it.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handling(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """Have these handlers during the block. For the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signal_pipe() -> Iterator[int]:
    """Yield a descriptor that is readable once a signal with a handler has come. For the main thread."""
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
    """Empty the pipe, so that only the next signal makes it readable."""
    with suppress(BlockingIOError):
        while os.read(source, 4096):
            pass
