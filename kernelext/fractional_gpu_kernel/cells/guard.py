"""Where the gate meets IPython.

Rules:

- The guard wraps the shell's `run_cell_async`, through which every cell passes: synchronous, asynchronous, silent, nested, with or
  without history. Only there are a cell's beginning and end one exact pair. IPython's events are not: `post_execute` fires for blank
  cells that had no `pre_execute`, and an exception in `pre_execute` does not stop the cell.
- A cell that may not run is handed on as one whose preparation failed: it fails with our message, hooks of others see an ordinary
  failed cell, and "Run all" stops.
- `%%gpu` asks for its larger share before it passes the gate, and gives it back after the cell, however that ended (see `sizes`).
- Messages to widgets do not pass there. For them `pre_execute` waits. Their callbacks cannot be stopped: after a refusal they run
  without the GPU. They are not counted as running; the broker sees them busy on IOPub.
"""

import functools
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from fractional_gpu_kernel.cells.acquire import Acquirer
from fractional_gpu_kernel.cells.first_grant import FirstGrant
from fractional_gpu_kernel.cells.gate import Gate, Mark
from fractional_gpu_kernel.cells.inputs import Cell, request_of, running_cell
from fractional_gpu_kernel.cells.needs_gpu import burst_of, needs_gpu
from fractional_gpu_kernel.cells.wait import RefusedError, wait_for_gpu
from fractional_gpu_kernel.display.display import (
    LiveLine,
    Sentence,
    publish,
    rendered,
)
from fractional_gpu_kernel.memory.limits import MemoryLimits
from fractional_gpu_kernel.registrations import Registrations

__all__ = ["Guard"]

_within: ContextVar[str] = ContextVar("gpu_cell", default="")  # "", or what the cell around us is: "gpu" or "no-gpu"


class Bursts(Protocol):
    """Gives a cell the share that its `%%gpu` asks for (`magics.bursts`, which is imported for the first one)."""

    def begin(self, mark: object, text: str, line: LiveLine | None) -> None: ...
    def end(self, mark: object, *, silent: bool) -> None: ...


class Guard:
    """Guards the cells of one shell. `exempt` is told when a cell that does not use the GPU begins (True) and ends (False)."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        gate: Gate,
        acquirer: Acquirer,
        limits: MemoryLimits,
        first: FirstGrant,
        *,
        exempt: Callable[[bool], None],
        bursts: Callable[[], Bursts],
    ) -> None:
        self._shell = shell
        self._registrations = Registrations(shell)
        self._guards = False
        self._gate = gate
        self._acquirer = acquirer
        self._limits = limits
        self._first = first
        self._exempt = exempt
        self._make_bursts = bursts
        self._bursts: Bursts | None = None  # made for the first `%%gpu`

    def install(self) -> None:
        """Guard from now on."""
        self._guards = True
        self._registrations.method("run_cell_async", self._wrap(self._shell.run_cell_async))
        self._registrations.callback("pre_execute", self._before_message)

    def uninstall(self) -> None:
        """Leave the shell as it was; where another extension has wrapped the guard, cells pass through it."""
        self._guards = False
        self._registrations.undo()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def run_cell_async(raw_cell: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - IPython's signature varies
            transformed = kwargs.get("transformed_cell")
            # A cell whose preparation failed will not run; a forked child's cells and blank ones are not ours to guard.
            unprepared = kwargs.get("preprocessing_exc_tuple") is not None
            if unprepared or not raw_cell or raw_cell.isspace() or self._gate.is_inert or not self._guards:
                return await original(raw_cell, *args, **kwargs)
            if _within.get() == "no-gpu":
                return await original(raw_cell, *args, **kwargs)
            if transformed is not None and not needs_gpu(transformed):
                return await self._run_exempt(original(raw_cell, *args, **kwargs))
            mark = Mark(request_of(self._shell))
            silent = bool(kwargs.get("silent", len(args) > 1 and args[1]))
            try:
                failure = self._prepare(transformed or "", mark, silent=silent)
                if failure is not None:
                    kwargs["preprocessing_exc_tuple"] = (type(failure), failure, None)
                    return await _within_cell("no-gpu", original(raw_cell, *args, **kwargs))
                self._bind(mark, silent=silent)
                return await _within_cell("gpu", original(raw_cell, *args, **kwargs), mark)
            finally:
                try:
                    if self._bursts is not None:
                        self._bursts.end(mark, silent=silent)
                finally:  # an interrupt may strike above: a mark that stays would keep the kernel on the GPU for ever
                    self._gate.leave(mark)

        return run_cell_async

    def _bind(self, mark: object, *, silent: bool) -> None:
        """Before a cell that has the GPU: limits that have changed, and after the first grant a look at the driver."""
        if self._limits.is_stale and not (self._limits.is_lowered and self._gate.runs_beside(mark)):
            self._limits.refresh()
        if self._first.is_due and not silent and (trouble := self._first.check()):
            publish(self._shell, Sentence(trouble))

    async def _run_exempt(self, cell: Any) -> Any:  # noqa: ANN401 - IPython's coroutine and result
        """Run a cell without the GPU, and let the broker know that its being busy does not mean that it needs one."""
        self._exempt(True)
        try:
            return await _within_cell("no-gpu", cell)
        finally:
            self._exempt(False)

    def _prepare(self, transformed: str, mark: object, *, silent: bool) -> BaseException | None:
        """Have what the cell needs, and mark it as running; or return what it fails with."""
        burst = burst_of(transformed)
        if burst is None and self._gate.enter(mark):
            return None
        line = LiveLine(self._shell)
        shown = None if silent else line
        # Above the line of a cell within another stands what the outer one has printed so far: that is not to go with it.
        take_away = line.blank if _within.get() else line.remove
        try:
            if burst is not None:
                self._bursts = self._bursts or self._make_bursts()
                self._bursts.begin(mark, burst, shown)
            if burst is None or not self._gate.enter(mark):
                wait_for_gpu(self._gate, self._acquirer, shown, mark)
        except RefusedError as error:
            return _rejection(str(error))
        except KeyboardInterrupt:
            return rendered(KeyboardInterrupt("interrupted while it waited for the GPU; this cell did not run"))
        finally:
            take_away()
        return None

    def _before_message(self) -> None:
        """`pre_execute`: of a cell, which has passed the gate already, or of a message to a widget."""
        if self._gate.is_open or _within.get():
            return
        try:
            wait_for_gpu(self._gate, self._acquirer, None)
        except RefusedError as error:
            print(f"[gpu] A widget's callback runs without the GPU: {error}", file=sys.stderr)  # noqa: T201 - a kernel's stderr is read
        except KeyboardInterrupt:
            print("[gpu] Interrupted: a widget's callback runs without waiting for the GPU.", file=sys.stderr)  # noqa: T201 - as above


async def _within_cell(kind: str, cell: Any, *marks: object) -> Any:  # noqa: ANN401 - IPython's coroutine and result
    token, outer = _within.set(kind), running_cell.get()
    around = outer.marks if outer is not None and outer.thread_id == threading.get_ident() else ()
    running = running_cell.set(Cell((*around, *marks), threading.get_ident()))
    try:
        return await cell
    finally:
        running_cell.reset(running)
        _within.reset(token)


def _rejection(sentence: str) -> BaseException:
    from IPython.core.error import InputRejected  # noqa: PLC0415 - only in a kernel, only when needed

    return rendered(InputRejected(f"This cell did not run. {sentence}"))
