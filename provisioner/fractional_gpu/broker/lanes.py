"""Thread pools for blocking work, one for each kind of work, so that users' requests cannot delay suspends and resumes.

Work not triggered by a request (samples, files, forecasts) runs in the loop's default executor.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, ParamSpec, TypeVar

from fractional_gpu.host.threads import StartedThreads

_SWITCH_S: Final = (
    0.0005  # how long a computing thread may keep the loop from the interpreter; Python's default is 5 ms
)

T = TypeVar("T")
P = ParamSpec("P")

PAYER: Final[ContextVar[Callable[[float], None] | None]] = ContextVar("payer", default=None)
"""Charges the running task for blocking work, in seconds of processor time. None means the work is free."""


class Lane:
    """A pool of `count` threads. Call `start` before the broker serves requests, because the system may be out of threads later."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self.name = name
        self._threads: StartedThreads | None = None

    def start(self) -> StartedThreads:
        if self._threads is None:
            self._threads = StartedThreads(self._count, self.name)
        return self._threads

    async def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in a thread and return its result. `PAYER` is charged for the processor time. Cancellation does not stop `act`."""
        loop, charge = asyncio.get_running_loop(), PAYER.get()

        def work() -> T:
            begun_s = time.thread_time()
            try:
                return act(*args, **kwargs)
            finally:
                if charge is not None:
                    loop.call_soon_threadsafe(charge, time.thread_time() - begun_s)

        return await loop.run_in_executor(self.start(), work)


SWAPS: Final = Lane(4, "swap")
"""Suspends and resumes kernels, and inspects their processes."""
ATTACHING: Final = Lane(4, "attach")
"""Checks processes and connections named by clients."""
QUESTIONS: Final = Lane(1, "question")
"""Computes answers that take a while."""
TOKENS: Final = Lane(1, "token-files")
"""Removes clients' files from filesystems that may hang."""


def start_lanes() -> None:
    sys.setswitchinterval(_SWITCH_S)
    for lane in (SWAPS, ATTACHING, QUESTIONS, TOKENS):
        lane.start()
