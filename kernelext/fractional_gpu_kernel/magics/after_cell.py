"""What `%gpu` asks of the broker when its cell is over.

The kernel is busy with the very message that carries the cell, and a broker suspends, or moves, only what is idle. So such a command
leaves a note; when the cell is over and its event loop has gone on, a thread asks the broker (which waits a moment for the kernel to
become idle), and the result takes the note's place. A subshell has a loop of its own: what a command in it asks for does not wait for
the main shell, whose cell may stand at a breakpoint.

Of two commands that contradict each other the later one wins: it withdraws the earlier one, in the same cell or from a later one, for
as long as the broker has not begun.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu_kernel.cells.acquire import explain
from fractional_gpu_kernel.display.display import LiveLine
from fractional_gpu_kernel.settings import Settings

if TYPE_CHECKING:
    from fractional_gpu.client.client import BrokerClient

__all__ = ["AfterCell"]

_AGAIN_S = 0.2

Call = Callable[["BrokerClient"], str]  # returns what to say when it was the last one


class AfterCell:
    """The requests of one shell's cells: the newest of each kind."""

    def __init__(self, shell: Any, settings: Settings) -> None:  # noqa: ANN401 - IPython is untyped
        self._shell = shell
        self._settings = settings
        self._newest: dict[str, _Request] = {}

    def ask(self, kind: str, *calls: Call, note: str, failed: str, command: str) -> None:
        """Show `note` now and make the calls when the cell is over: the last one's sentence, or `failed` and why, takes its place.

        An earlier request of this kind is withdrawn for this `command`.
        """
        self.withdraw(kind, command)
        self._newest[kind] = request = _Request(self._shell, self._settings, calls, failed)
        request.begin(note)

    def withdraw(self, kind: str, command: str) -> None:
        """Ask no more for what the `command` contradicts; what the broker has begun goes on."""
        request = self._newest.pop(kind, None)
        if request is not None:
            request.withdraw(command)


class _Request:
    def __init__(self, shell: Any, settings: Settings, calls: Sequence[Call], failed: str) -> None:  # noqa: ANN401 - as above
        self._shell = shell
        self._settings = settings
        self._calls = calls
        self._failed = failed
        self._line = LiveLine(shell)
        self._context = contextvars.copy_context()  # so that the result lands in this cell
        self._shell_thread: int | None = None  # where the cell runs; None: not in a shell's event loop
        self._lock = threading.Lock()
        self._withdrawn = self._is_over = False
        self._client: BrokerClient | None = None

    def begin(self, note: str) -> None:
        self._line.show(note)
        self._context = contextvars.copy_context()
        self._shell_thread = None if _running_loop() is None else threading.get_ident()
        self._shell.events.register("post_execute", self._after_cell)

    def withdraw(self, command: str) -> None:
        with self._lock:
            if self._is_over or self._withdrawn:
                return
            self._withdrawn = True
            if self._client is not None:
                self._client.close()
                # The thread may just be beginning its call, which `close` then does not find: once more in a moment.
                again = threading.Timer(_AGAIN_S, self._client.close)
                again.daemon = True
                again.start()
        self._context.copy().run(self._line.show, f"{self._failed}{command} came later, and the later command counts.")

    def _after_cell(self) -> None:
        if self._shell_thread not in (None, threading.get_ident()):
            return  # another shell's cell is over
        with suppress(ValueError):  # it stands there once for each request; another one may have taken it away
            self._shell.events.unregister("post_execute", self._after_cell)
        if self._withdrawn:
            return
        thread = threading.Thread(target=self._context.run, args=(self._ask,), name="gpu-after-cell", daemon=True)
        loop = _running_loop()
        if loop is None:
            thread.start()
        else:
            loop.call_soon(thread.start)

    def _ask(self) -> None:
        try:
            self._settings.revive()
            with self._settings.connect() as client:
                for call in self._calls:
                    with self._lock:
                        if self._withdrawn:
                            return
                        self._client = client
                    sentence = call(client)
        except FractionalGPUError as error:
            sentence = f"{self._failed}{explain(error)}"
        with self._lock:
            self._is_over = True
            if self._withdrawn:
                return
        self._line.show(sentence)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return this thread's event loop; None in a terminal's IPython, and in a thread that a cell started."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
