"""Wakes a waiting main thread when a signal arrives, through a pipe that the C-level signal handler writes to.

Python signal handlers run between bytecode instructions, so a signal that arrives just before a blocking call is not handled until the call
ends. The pipe becomes readable as soon as the signal arrives, so `select` returns.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handling(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """Install these signal handlers for the duration of the block. Use this only in the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signal_pipe() -> Iterator[int]:
    """Yield a descriptor that becomes readable when a handled signal arrives. Use this only in the main thread."""
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
    """Empty the pipe, so that it becomes readable again only when a new signal arrives."""
    with suppress(BlockingIOError):
        while os.read(source, 4096):
            pass
