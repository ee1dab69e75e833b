"""Notices: sentences for the user of this kernel, from the broker and from the extension.

Before the first cell a notice is kept and shown once above that cell's output; while a cell runs, it is kept and shown beneath it. While
the kernel idles, it is shown at once beneath the last cell (a warning before an idle suspension would come too late otherwise) and
blanked when the next cell begins. A notice is output, not a request: it does not make the kernel busy.

Only cells that go into the history count here. Others run within another cell (`%%capture`, `run_cell`) or for a client's own use, and
their output is not on the user's screen.
"""

import contextvars
import sys
import threading
from typing import Any

from fractional_gpu_kernel.display.lines import LiveLine, Sentence, publish
from fractional_gpu_kernel.registrations import Registrations

__all__ = ["Notices"]


class Notices:
    """The notices of one shell. `add` may be called from any thread."""

    def __init__(self, shell: Any, first: str = "") -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._registrations = Registrations(shell)
        self._lock = threading.Lock()
        self._kept = [first] if first else []
        self._last_cell: contextvars.Context | None = None  # while the kernel idles: the cell to show it beneath
        self._shown: list[LiveLine] = []

    def install(self) -> None:
        """Show from now on."""
        self._registrations.callback("pre_run_cell", self._before_cell)
        self._registrations.callback("post_run_cell", self._after_cell)

    def uninstall(self) -> None:
        """Leave the shell as it was."""
        self._registrations.undo()

    def add(self, sentence: str) -> None:
        """Show a sentence now beneath the last cell, or keep it until the running one ends or the first one begins."""
        if not sentence:
            return
        with self._lock:
            cell = self._last_cell
            if cell is None:
                if sentence not in self._kept:
                    self._kept.append(sentence)
                return
            line = LiveLine(self._shell)
            try:
                cell.copy().run(line.show, sentence)
            except _failures():  # this thread can open no socket of its own: the main thread shows it later
                self._kept.append(sentence)
            else:
                self._shown.append(line)

    def _before_cell(self, info: Any) -> None:  # noqa: ANN401 - IPython is untyped
        """`pre_run_cell`, which IPython does not fire for silent requests."""
        if not info.store_history or (self._last_cell is None and not self._kept):
            return
        with self._lock:
            cell, self._last_cell = self._last_cell, None
            shown, self._shown = self._shown, []
            kept, self._kept = self._kept, []
        if cell is not None:
            for line in shown:
                cell.copy().run(line.blank)
        if kept:
            self._publish(kept)

    def _after_cell(self, result: Any) -> None:  # noqa: ANN401 - as above
        """`post_run_cell`; without a result for a cell that was cancelled."""
        if result is not None and not result.info.store_history:
            return
        with self._lock:
            self._last_cell = contextvars.copy_context()
            kept, self._kept = self._kept, []
        if kept:
            self._publish(kept)

    def _publish(self, sentences: list[str]) -> None:
        """Show them in the cell that begins or ends now, where they stay."""
        for sentence in sentences:
            publish(self._shell, Sentence(sentence))


def _failures() -> tuple[type[Exception], ...]:
    """Errors of publishing from a thread in a process without descriptors. ZeroMQ is loaded in every Jupyter kernel."""
    zmq = sys.modules.get("zmq")
    return (OSError, RuntimeError) if zmq is None else (OSError, RuntimeError, zmq.ZMQError)
