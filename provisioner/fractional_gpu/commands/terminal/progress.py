"""Shows the progress of long-running commands on standard error.

After two seconds, it draws a bar on a terminal, or prints a few lines to any other output.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final, Self, TextIO

from fractional_gpu.commands.terminal.text import Style, line, say
from fractional_gpu.core.units import format_forecast
from fractional_gpu.protocol.messages import WaitLine as Line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_QUIET_S = 2.0
_DRAWN_S: Final = 0.1  # between redraws of a bar
_BAR_CELLS: Final = 24
_NOT_DRAWABLE: Final = ("dumb", "unknown")  # values of TERM


class Progress(AbstractContextManager["Progress"]):
    """A display of what a command is doing and how far it has got. It appears after two seconds and lasts until the `with` block ends.

    On a terminal, a thread draws a bar and erases it at the end. On any other output, the thread prints `what` whenever it changes or, once
    the counter is called, lines such as `WHAT: 3 of 8 THINGS after 5 s`. It prints at most one line every two seconds, and none if `silent`
    is set. If `within_s` (the command's time limit) is given, the bar shows time instead of a count.
    """

    def __init__(
        self,
        what: str,
        *,
        silent: bool = False,
        within_s: float | None = None,
        out: TextIO | None = None,
    ) -> None:
        self.what = what
        self._silent, self._within_s = silent, within_s
        self._out = sys.stderr if out is None else out
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._show, name="gpu-progress", daemon=True)
        self._live: Live | None = None
        self._done, self._of, self._things = 0, 0, ""
        self._began = perf_counter()

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        self._erase()

    def counter(self, things: str) -> Callable[[int, int], None]:
        def count(done: int, of: int) -> None:
            self._done, self._of, self._things = done, of, things

        return count

    def say(self, sentence: str) -> None:
        with self._lock:
            is_drawn = self._live is not None
            self._erase()
            say(sentence, self._out, flush=True)
            if is_drawn:
                self._draw()

    @property
    def seconds(self) -> float:
        return perf_counter() - self._began

    def _show(self) -> None:
        said = ""
        while not self._over.wait(_QUIET_S):
            if is_drawable(self._out):
                with self._lock:
                    self._draw()
                return
            text = f"{self.what}: {self._counted()}" if self._of else self.what
            if text != said and not self._silent:
                said = text
                self.say(said)

    def _counted(self) -> str:
        return f"{self._done} of {self._of} {self._things} after {self.seconds:.0f} s"

    def _erase(self) -> None:
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                with suppress(OSError):  # the terminal is gone, which must not change how the command ends
                    live.stop()

    def _draw(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - heavy, and for a terminal after two seconds only
        from rich.live import Live  # noqa: PLC0415 - as above

        class VisibleCursor(Console):
            """A console that keeps the cursor visible, because a command that is killed could not restore it."""

            def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002 - rich's signature
                return False

        self._live = Live(
            console=VisibleCursor(file=self._out, force_jupyter=False),
            get_renderable=self._picture,
            refresh_per_second=1 / _DRAWN_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _picture(self) -> "Table":
        from rich.progress_bar import ProgressBar  # noqa: PLC0415 - as in _draw
        from rich.table import Table  # noqa: PLC0415 - as above

        seconds = self.seconds
        if self._within_s is not None:
            total, done, said = self._within_s, seconds, f"{seconds:.0f} s of at most {self._within_s:.0f} s"
        elif self._of:
            total, done, said = self._of, self._done, self._counted()
        else:
            total, done, said = None, 0, f"{seconds:.0f} s"
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(
            total=total,
            completed=done,
            width=_BAR_CELLS,
            pulse=total is None,
            complete_style=Style.GOOD,
            finished_style=Style.GOOD,
            pulse_style=Style.GOOD,
        )
        row.add_row(line(self.what), bar, line(said))
        return row


def is_drawable(out: TextIO) -> bool:
    return out.isatty() and os.environ.get("TERM", "").lower() not in _NOT_DRAWABLE


class WaitLine:
    """A notice that says why a program is waiting for the GPU, its place in the queue and the expected wait.

    It appears after two seconds, and again when something changes. A separate thread calls `say`, because the broker only sends changes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._latest = self._said = ""

    def update(self, line: Line) -> None:
        with self._lock:
            place = f"; place {line.position} in the queue" if line.position is not None else ""
            left = (
                ""
                if line.expected_ms is None
                else format_forecast(line.expected_ms, line.low_ms, line.high_ms, more=True)
            )
            self._latest = f"{line.sentence}{place}{f'; {left}' if left else ''}"
            if self._timer is None and self._latest != self._said:
                self._timer = threading.Timer(_QUIET_S, self._speak)
                self._timer.daemon = True
                self._timer.start()

    def stop(self) -> None:
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
