"""A cell that waits in `input()` needs no GPU meanwhile: its kernel counts as idle, and waits for the GPU again before the cell goes on.

Rules:

- `input()`, `getpass` and the prompts of debuggers all end in the kernel's `raw_input` or `getpass`, which are wrapped on the instance.
- While a cell waits there, its marks do not keep the gate open, and the broker is told which requests wait. Only the thread that runs the
  cell counts: what a thread of the user's asks says nothing about the cell. Cells around it wait, too; those of other subshells do not.
- When the answer is there and the gate was shut meanwhile, the cell waits as at its beginning: interruptible, with a line that says why.
  An interrupt instead of an answer lets the cell go on at once, for it is to end: what it still asks of the GPU blocks until the broker
  has seen it.
- What works on the GPU besides (threads, children) is seen by the devices' counters, as in any idle kernel.
"""

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from fractional_gpu_kernel.cells.acquire import Acquirer
from fractional_gpu_kernel.cells.gate import Gate
from fractional_gpu_kernel.cells.wait import RefusedError, wait_for_gpu
from fractional_gpu_kernel.display.display import LiveLine

__all__ = ["Cell", "Inputs", "request_of", "running_cell"]

_NAMES = ("raw_input", "getpass")


class Cell(NamedTuple):
    """A cell that runs: the marks of it and of the cells around it (none: it does not use the GPU), and its thread."""

    marks: tuple[object, ...]
    thread_id: int


running_cell: ContextVar[Cell | None] = ContextVar("gpu_running_cell", default=None)


def request_of(shell: Any) -> str:  # noqa: ANN401 - IPython is untyped
    """Return the id of the request that this thread handles."""
    try:
        return str(shell.kernel.get_parent("shell")["header"]["msg_id"])
    except (AttributeError, KeyError, TypeError):
        return ""  # a kernel of another make: the broker does not know this id, and takes the kernel for busy


class Inputs:
    """Watches the input requests of one kernel. `tell` takes the ids of the requests that wait for input, at each change."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        gate: Gate,
        acquirer: Acquirer,
        tell: Callable[[Sequence[str]], None],
    ) -> None:
        self._shell = shell
        self._gate = gate
        self._acquirer = acquirer
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: list[str] = []  # with an id for each wait: cells nest
        self._wrapped: list[str] = []

    @property
    def waiting(self) -> list[str]:
        """The ids of the requests that use no GPU: they wait for input, or are barred."""
        return list(dict.fromkeys(self._waiting))

    def replace(self, before: Collection[str], now: Collection[str]) -> None:
        """Requests are barred from the GPU `now`, and others were `before` (see `barrier`)."""

        def change() -> None:
            for request in before:
                self._waiting.remove(request)
            self._waiting.extend(now)

        self._change(change)

    def install(self) -> None:
        """Watch from now on, in a Jupyter kernel; a terminal has no neighbours that wait for its input."""
        kernel = getattr(self._shell, "kernel", None)
        for name in _NAMES:
            original = getattr(kernel, name, None)
            if original is not None:
                setattr(kernel, name, self._wrap(original))
                self._wrapped.append(name)

    def uninstall(self) -> None:
        """Leave the kernel as it was."""
        for name in self._wrapped:
            delattr(self._shell.kernel, name)  # the instance's attribute: the class's method shows again
        self._wrapped.clear()

    def become_inert(self) -> None:
        """For a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._waiting = []

    def _wrap(self, original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - as the kernel's
            cell = running_cell.get()
            if cell is None or cell.thread_id != threading.get_ident() or self._gate.is_inert:
                return original(*args, **kwargs)
            request = request_of(self._shell)
            self._gate.pause(cell.marks)
            self._change(lambda: self._waiting.append(request))
            try:
                answer = original(*args, **kwargs)
                self._wait(cell)
                return answer
            finally:
                self._gate.go_on(cell.marks)
                self._change(lambda: self._waiting.remove(request))

        return ask

    def _wait(self, cell: Cell) -> None:
        """Have the GPU again before the cell goes on. Raises KeyboardInterrupt, or RuntimeError if the GPU will not come."""
        if not cell.marks or self._gate.try_to_go_on(cell.marks):
            return
        line = LiveLine(self._shell)
        try:
            wait_for_gpu(self._gate, self._acquirer, line, cell.marks[-1])
        except RefusedError as error:
            message = f"the input was read, but the cell cannot go on: {error}"
            raise RuntimeError(message) from None
        finally:
            line.blank()

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            change()
            self._tell(self.waiting)
