"""The wait itself: in the thread that would run the cell, interruptible, with a line that says why.

Rules:

- The thread blocks on a queue, never on the socket. On the main thread SIGINT leaves a note in that queue (`SimpleQueue.put` may be
  called from a signal handler); the handler that was there before is back when the wait is over. So an interrupt works within an
  async cell too, whose own handler would only be looked at when the event loop runs again, and it cannot strike between two steps
  that belong together. In a subshell's thread there are no signals: such a wait ends with the broker's answer.
- A grant within `QUIET_S` shows nothing. Later, one line says why the cell waits, and is gone before the cell's own output.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

from fractional_gpu_kernel.cells.acquire import (
    INTERRUPTED,
    OPENED,
    Acquirer,
    Refusal,
    Waiter,
)
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.display.display import LiveLine

if TYPE_CHECKING:
    from fractional_gpu_kernel.display.wait_line import WaitLine

__all__ = ["LOOK_UP_S", "QUIET_S", "RefusedError", "interrupts_to", "wait_for_gpu"]

QUIET_S = 0.15
LOOK_UP_S = 0.5


class RefusedError(Exception):
    """The GPU will not come; the text says why and what to do."""


def wait_for_gpu(gate: Gate, acquirer: Acquirer, line: LiveLine | None, mark: object | None = None) -> None:
    """Wait until the gate is open; a `mark` that is given is marked as running in the same step.

    `line` None: say nothing. Raises RefusedError, or KeyboardInterrupt when interrupted; both withdraw the ticket if nobody else waits.
    """
    waiter: Waiter = SimpleQueue()

    def on_open() -> None:
        waiter.put(OPENED)

    entered = False
    with interrupts_to(waiter):
        while not entered:  # again, if it was shut for a preemption between its opening and our passing
            opened = overlaps = False
            gate.start_waiting(on_open)
            try:
                acquirer.join(waiter)
                overlaps = _listen(waiter, line, may_overlap=mark is not None)
                opened = True
            finally:
                acquirer.leave(waiter, keep=overlaps)
                entered = gate.stop_waiting(on_open, mark if opened else None, overlap=overlaps) or mark is None


def _listen(waiter: Waiter, line: LiveLine | None, *, may_overlap: bool) -> bool:
    """Show what is told until the gate opens (False), or the cell may run although it is shut (True).

    Raises RefusedError and KeyboardInterrupt.
    """
    begun_s = time.monotonic()
    words: WaitLine | None = None  # made when there is something to say
    while True:
        now_s = time.monotonic()
        quiet_s = begun_s + QUIET_S - now_s
        if line is not None and words is not None and quiet_s <= 0:
            line.show(words.text(now_s))
        # A signal that the system delivers to another thread does not wake this one: look for it, and at the clock, now and then.
        patience_s = min(quiet_s, LOOK_UP_S) if words is not None and quiet_s > 0 else LOOK_UP_S
        try:
            note = waiter.get(timeout=patience_s)
        except Empty:
            continue
        if note == OPENED:
            return False
        if note == INTERRUPTED:
            raise KeyboardInterrupt
        if isinstance(note, Refusal):
            raise RefusedError(note.sentence)
        if not isinstance(note, str):
            if note.overlap and may_overlap:
                return True
            words = words or _wait_line(begun_s)
            words.tell(note)


def _wait_line(begun_s: float) -> "WaitLine":
    from fractional_gpu_kernel.display.wait_line import WaitLine  # noqa: PLC0415 - off the kernel's start

    return WaitLine(begun_s)


@contextlib.contextmanager
def interrupts_to(waiter: "SimpleQueue[Any]") -> Iterator[None]:
    """Let SIGINT leave INTERRUPTED in the queue meanwhile. Does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        waiter.put(INTERRUPTED)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
