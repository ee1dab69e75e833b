"""Where cells meet the gate: at their beginning, at their end, and where they wait for input.

The way of a cell (`CellGuard`):

1. IPython calls the shell's `run_cell_async`, which is wrapped: every cell passes there, synchronous, asynchronous, silent, nested, with
   or without history. Only there are a cell's beginning and end one exact pair: IPython's events are not (`post_execute` fires for blank
   cells that had no `pre_execute`, and an exception in `pre_execute` does not stop the cell).
2. A cell that does not need the GPU (`needs_gpu`) runs at once, and the broker learns that this busy kernel wants no ticket. Start-up code
   that IPython runs as cells (exec_lines, .ipy files) runs at once, too, without the GPU: a kernel that waits there answers nothing.
3. `%%gpu` gets its larger share before the cell passes the gate, and gives it back after the cell, however that ended (`magics.resize`).
4. The cell enters the open gate, or waits for it (`Acquirer.wait_for_gpu`).
5. A cell that may not run is handed on as one whose preparation failed: it fails with our message, hooks of other extensions see an
   ordinary failed cell, and "Run all" stops.
6. Memory limits that have changed are applied, and the cell runs. It leaves the gate at its end.

Messages to widgets do not pass `run_cell_async`: for them `pre_execute` waits. Their callbacks cannot be stopped; after a refusal they
run without the GPU. They do not count as running; the broker sees them busy on IOPub.

A cell that waits for input (`InputRequests`) needs no GPU meanwhile: its kernel counts as idle and may be suspended.

- `input()`, `getpass` and the prompts of debuggers all end in the kernel's `raw_input` or `getpass`, which are wrapped on the instance.
- The marks of the cell, and of the cells around it, do not keep the gate open then, and the broker learns which requests wait. Only the
  thread that runs the cell counts: a prompt in a thread of the user's does not pause the cell. Cells of other subshells go on.
- With the answer, where the gate was shut meanwhile, the cell waits as at its beginning. An interrupt instead of an answer lets the cell
  go on at once, for it is to end: its further calls of the GPU block until the broker has seen it.
- Work on the GPU besides (threads, children) is seen by the devices' counters, as in any idle kernel.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from fractional_gpu_kernel.cells.acquire import Acquirer, FirstGrant, RefusedError
from fractional_gpu_kernel.cells.gate import Gate, burst_of, needs_gpu
from fractional_gpu_kernel.display.lines import LiveLine, Sentence, publish, rendered
from fractional_gpu_kernel.memory.limits import MemoryLimits
from fractional_gpu_kernel.registrations import Registrations


class RunningCell(NamedTuple):
    """The cell around a piece of code: the marks of it and of the cells around it (none: it does not use the GPU), and its thread."""

    marks: tuple[object, ...]
    thread_id: int
    uses_gpu: bool = True


running_cell: ContextVar[RunningCell | None] = ContextVar("gpu_running_cell", default=None)


class Bursts(Protocol):
    """Gives a cell the share that its `%%gpu` asks for (`magics.resize`, which is imported for the first one)."""

    def begin(self, mark: object, text: str, line: LiveLine | None) -> None:
        """Ask for the cell's share; `line` shows what happens."""

    def end(self, mark: object, *, silent: bool) -> None:
        """Give the share back; silently if the cell did not run."""


class CellGuard:
    """Guards the cells of one shell. `report_exempt` is called when a cell that does not use the GPU begins (True) and ends (False)."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        gate: Gate,
        acquirer: Acquirer,
        limits: MemoryLimits,
        first_grant: FirstGrant,
        *,
        report_exempt: Callable[[bool], None],
        make_bursts: Callable[[], Bursts],
    ) -> None:
        self._shell = shell
        self._registrations = Registrations(shell)
        self._is_installed = False
        self._gate = gate
        self._acquirer = acquirer
        self._limits = limits
        self._first_grant = first_grant
        self._report_exempt = report_exempt
        self._make_bursts = make_bursts
        self._bursts: Bursts | None = None  # made for the first `%%gpu`

    def install(self) -> None:
        """Guard from now on."""
        self._is_installed = True
        self._registrations.method("run_cell_async", self._wrap(self._shell.run_cell_async))
        self._registrations.callback("pre_execute", self._before_message)

    def uninstall(self) -> None:
        """Leave the shell as it was; where another extension has wrapped the guard, cells pass through it."""
        self._is_installed = False
        self._registrations.undo()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def run_cell_async(raw_cell: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - IPython's signature varies
            # A cell whose preparation failed will not run; blank cells, a forked child's, and cells within one without the GPU need none.
            unprepared = kwargs.get("preprocessing_exc_tuple") is not None
            if unprepared or not raw_cell or raw_cell.isspace() or self._gate.is_inert or not self._is_installed:
                return await original(raw_cell, *args, **kwargs)
            around = running_cell.get()
            if around is not None and not around.uses_gpu:
                return await original(raw_cell, *args, **kwargs)
            transformed = kwargs.get("transformed_cell")
            if transformed is not None and not needs_gpu(transformed):
                return await self._run_exempt(original(raw_cell, *args, **kwargs))
            if not self._gate.is_open and _is_starting(self._shell):
                return await _run_within(original(raw_cell, *args, **kwargs), uses_gpu=False)
            mark = object()
            silent = bool(kwargs.get("silent", len(args) > 1 and args[1]))
            try:
                failure = self._prepare(transformed or "", mark, silent=silent)
                if failure is not None:
                    kwargs["preprocessing_exc_tuple"] = (type(failure), failure, None)
                    return await _run_within(original(raw_cell, *args, **kwargs), uses_gpu=False)
                self._before_gpu_cell(mark, silent=silent)
                return await _run_within(original(raw_cell, *args, **kwargs), mark, uses_gpu=True)
            finally:
                try:
                    if self._bursts is not None:
                        self._bursts.end(mark, silent=silent)
                finally:
                    try:
                        self._gate.leave(mark)
                    finally:  # again: an interrupt may strike at any call, and a mark that stays would keep the kernel on the GPU for ever
                        self._gate.leave(mark)

        return run_cell_async

    def _prepare(self, transformed: str, mark: object, *, silent: bool) -> BaseException | None:
        """Wait for what the cell needs, and mark it as running; or return the error that it fails with."""
        burst = burst_of(transformed)
        if burst is None and self._gate.enter(mark):
            return None
        line = LiveLine(self._shell)
        shown = None if silent else line
        # Clearing the output of a cell within another would also clear what the outer cell has printed.
        take_away = line.remove if running_cell.get() is None else line.blank
        try:
            if burst is not None:
                self._bursts = self._bursts or self._make_bursts()
                self._bursts.begin(mark, burst, shown)
            if burst is None or not self._gate.enter(mark):
                self._acquirer.wait_for_gpu(shown, mark)
        except RefusedError as error:
            return _rejection(str(error))
        except KeyboardInterrupt:
            return rendered(KeyboardInterrupt("interrupted while it waited for the GPU; this cell did not run"))
        finally:
            take_away()
        return None

    def _before_gpu_cell(self, mark: object, *, silent: bool) -> None:
        """Apply limits that have changed; after the first grant, check that the driver finds devices."""
        # A lower limit is kept back while another cell runs: it could fail that cell's next allocation.
        if self._limits.is_stale and not (self._limits.is_lowered and self._gate.runs_beside(mark)):
            self._limits.refresh()
        if self._first_grant.is_due and not silent and (trouble := self._first_grant.check()):
            publish(self._shell, Sentence(trouble))

    async def _run_exempt(self, cell: Any) -> Any:  # noqa: ANN401 - IPython's coroutine and result
        """Run a cell without the GPU; the broker learns that the busy kernel wants none."""
        mark = object()
        try:
            self._gate.exempt(mark)
            self._report_exempt(True)
            return await _run_within(cell, uses_gpu=False)
        finally:
            try:
                self._gate.leave(mark)
            finally:  # again, as above
                self._gate.leave(mark)
                self._report_exempt(False)

    def _before_message(self) -> None:
        """`pre_execute`: of a cell, which has passed the gate already, or of a message to a widget."""
        if self._gate.is_open or running_cell.get() is not None:
            return
        try:
            self._acquirer.wait_for_gpu(None)
        except RefusedError as error:
            print(f"[gpu] A widget's callback runs without the GPU: {error}", file=sys.stderr)  # noqa: T201 - a kernel's stderr is read
        except KeyboardInterrupt:
            print("[gpu] Interrupted: a widget's callback runs without waiting for the GPU.", file=sys.stderr)  # noqa: T201 - as above


async def _run_within(cell: Any, *marks: object, uses_gpu: bool) -> Any:  # noqa: ANN401 - IPython's coroutine and result
    """Run the cell with `running_cell` set for its code."""
    thread_id, outer = threading.get_ident(), running_cell.get()
    around = outer.marks if outer is not None and outer.thread_id == thread_id else ()
    token = running_cell.set(RunningCell((*around, *marks), thread_id, uses_gpu))
    try:
        return await cell
    finally:
        running_cell.reset(token)


def _rejection(sentence: str) -> BaseException:
    from IPython.core.error import InputRejected  # noqa: PLC0415 - only in a kernel, only when needed

    return rendered(InputRejected(f"This cell did not run. {sentence}"))


def _request_of(shell: Any) -> str:  # noqa: ANN401 - IPython is untyped
    """Return the id of the request that this thread handles."""
    try:
        return str(shell.kernel.get_parent("shell")["header"]["msg_id"])
    except (AttributeError, KeyError, TypeError):
        return ""  # a kernel of another make: the broker does not know this id, and takes the kernel for busy


def _is_starting(shell: Any) -> bool:  # noqa: ANN401 - IPython is untyped
    """Return whether the kernel still runs its start-up code: it has not handled a request yet."""
    try:
        return bool(shell.kernel.get_parent("shell") == {})
    except AttributeError:
        return False  # a terminal, or a kernel of another make


# -- input ----------------------------------------------------------------------------------------------------------------------------

_PROMPTS = ("raw_input", "getpass")


class InputRequests:
    """The input requests of one kernel. `report` is called with the ids of the requests that wait for input, at each change."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        gate: Gate,
        acquirer: Acquirer,
        report: Callable[[Sequence[str]], None],
    ) -> None:
        self._shell = shell
        self._gate = gate
        self._acquirer = acquirer
        self._report = report
        self._lock = threading.Lock()
        self._asking: dict[object, str] = {}  # the request of each wait for input: cells nest
        self._wrapped: list[str] = []

    @property
    def waiting(self) -> list[str]:
        """The ids of the requests that wait for input."""
        return list(dict.fromkeys(self._asking.values()))

    def install(self) -> None:
        """Watch from now on, in a Jupyter kernel; a terminal has no neighbours that wait for its input."""
        kernel = getattr(self._shell, "kernel", None)
        for name in _PROMPTS:
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
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._asking = {}

    def _wrap(self, original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def prompt(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - as the kernel's
            cell = running_cell.get()
            if cell is None or cell.thread_id != threading.get_ident() or self._gate.is_inert:
                return original(*args, **kwargs)
            request = _request_of(self._shell)
            # Paused first, reported then: the broker's next command already meets a gate that may be shut.
            # A task may ask when the cell that made it has ended: the mark of that cell must not enter the gate again.
            wait = object()
            try:
                marks = self._gate.pause(cell.marks)
                self._change(lambda: self._asking.__setitem__(wait, request))
                answer = original(*args, **kwargs)
                self._wait_again(marks)
                return answer
            finally:  # also after an interrupt: the cell runs on, to its end
                is_over = False
                try:
                    self._end(wait, cell.marks)
                    is_over = True
                finally:
                    if not is_over:  # another interrupt has struck above
                        self._end(wait, cell.marks)

        return prompt

    def _end(self, wait: object, marks: Sequence[object]) -> None:
        """The wait for input is over. May be called again where it was broken off."""
        self._gate.go_on(marks)
        self._change(lambda: self._asking.pop(wait, None))

    def _wait_again(self, marks: Sequence[object]) -> None:
        """Have the GPU again before these cells go on. Raises KeyboardInterrupt, or RuntimeError if the GPU will not come."""
        if not marks or self._gate.try_to_go_on(marks):
            return
        line = LiveLine(self._shell)
        try:
            self._acquirer.wait_for_gpu(line, marks[-1])
        except RefusedError as error:
            message = f"the input was read, but the cell cannot go on: {error}"
            raise RuntimeError(message) from None
        finally:
            line.blank()

    def _change(self, change: Callable[[], object]) -> None:
        with self._lock:
            change()
            self._report(self.waiting)
