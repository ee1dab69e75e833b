"""Passes cells through the gate when they start, when they end, and when they wait for input.

The guard wraps the shell's `run_cell_async`, which runs once for every cell. IPython's events are not sufficient: for blank cells,
`post_execute` fires without `pre_execute`, and an exception in `pre_execute` does not stop the cell. Widget messages bypass the wrapper, so
they wait in `pre_execute`. Their callbacks cannot be stopped, so after a refusal they run without the GPU.

While a cell waits for input (`InputRequests`), its kernel counts as idle and may be suspended. If the gate is shut when the input arrives,
the cell waits again. After an interrupt, the cell continues at once, because it is about to end. Its GPU calls block until the broker
notices the cell and resumes the kernel. A prompt in a thread started by the user does not pause the cell.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from fractional_gpu_kernel.cells.acquire import RefusedError
from fractional_gpu_kernel.cells.gate import burst_of, needs_gpu
from fractional_gpu_kernel.display.lines import LiveLine, Sentence, publish, rendered

if TYPE_CHECKING:
    from fractional_gpu_kernel.extension import LeasedKernel
    from fractional_gpu_kernel.magics.actions import Resizer


class RunningCell(NamedTuple):
    """A running cell and its thread. `marks` identify it and its outer cells to the gate. A cell that skips the GPU adds no marks."""

    marks: tuple[object, ...]
    thread_id: int
    uses_gpu: bool = True


running_cell: ContextVar[RunningCell | None] = ContextVar("gpu_running_cell", default=None)


class CellGuard:
    def __init__(self, kernel: "LeasedKernel") -> None:
        self._kernel = kernel
        self._shell = kernel.shell
        self._gate = kernel.gate
        self._is_installed = False
        self._bursts: Resizer | None = None  # created at the first `%%gpu`

    def install(self) -> None:
        self._is_installed = True
        self._kernel.registrations.method(self._shell, "run_cell_async", self._wrap(self._shell.run_cell_async))
        self._kernel.registrations.callback("pre_execute", self._before_message)

    def uninstall(self) -> None:
        self._is_installed = False  # another extension may have wrapped the guard, so let cells pass

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def run_cell_async(raw_cell: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - IPython's signature varies
            # These cells do not get the GPU: cells that will not run, blank cells, cells in a forked child or in a cell without the GPU.
            unprepared = kwargs.get("preprocessing_exc_tuple") is not None
            if unprepared or not raw_cell or raw_cell.isspace() or self._gate.is_inert or not self._is_installed:
                return await original(raw_cell, *args, **kwargs)
            around = running_cell.get()
            if around is not None and not around.uses_gpu:
                return await original(raw_cell, *args, **kwargs)
            mark, transformed = object(), kwargs.get("transformed_cell")
            silent = bool(kwargs.get("silent", len(args) > 1 and args[1]))
            # Start-up code that IPython runs as cells (exec_lines, .ipy files) must not wait, because the kernel does not answer yet.
            starts = not self._gate.is_open and self._is_starting()
            exempt = not starts and transformed is not None and not needs_gpu(transformed)
            uses_gpu, token = not starts and not exempt, None
            try:
                if exempt:
                    self._gate.exempt(mark)
                    self._kernel.channel.report_exempt(True)
                elif uses_gpu and (failure := self._prepare(transformed or "", mark, silent=silent)) is not None:
                    # Report this as a failed preparation, so that other extensions see an ordinary failed cell, and "Run all" stops.
                    kwargs["preprocessing_exc_tuple"] = (type(failure), failure, None)
                    uses_gpu = False
                outer = around.marks if around is not None and around.thread_id == threading.get_ident() else ()
                marks = (*outer, mark) if uses_gpu else outer
                token = running_cell.set(RunningCell(marks, threading.get_ident(), uses_gpu))
                return await original(raw_cell, *args, **kwargs)
            finally:
                # An interrupt may arrive during any call, and a mark that is left behind would keep the kernel on the GPU forever. So
                # leave twice if needed.
                try:
                    if token is not None:
                        running_cell.reset(token)
                    if self._bursts is not None and not exempt:
                        self._bursts.end(mark, silent=silent)
                finally:
                    try:
                        self._gate.leave(mark)
                    finally:
                        self._gate.leave(mark)
                        if exempt:
                            self._kernel.channel.report_exempt(False)

        return run_cell_async

    def _prepare(self, transformed: str, mark: object, *, silent: bool) -> BaseException | None:
        burst = burst_of(transformed)
        if burst is not None or not self._gate.enter(mark):
            failure = self._wait(burst, mark, silent=silent)
            if failure is not None:
                return failure
        # Do not lower the limit while another cell is running, because the next allocation of that cell could fail.
        limits, first_grant = self._kernel.limits, self._kernel.first_grant
        if limits.is_stale and not (limits.is_lowered and self._gate.runs_beside(mark)):
            limits.refresh()
        if first_grant.is_due and not silent and (trouble := first_grant.check()):
            publish(self._shell, Sentence(trouble))
        return None

    def _wait(self, burst: str | None, mark: object, *, silent: bool) -> BaseException | None:
        line = LiveLine(self._shell)
        shown = None if silent else line
        try:
            if burst is not None:
                self._bursts = self._kernel.magics.resizer
                self._bursts.begin(mark, burst, shown)
            if burst is None or not self._gate.enter(mark):
                self._kernel.acquirer.wait_for_gpu(shown, mark)
        except RefusedError as error:
            from IPython.core.error import InputRejected  # noqa: PLC0415 - only in a kernel, only when needed

            return rendered(InputRejected(f"This cell did not run. {error}"))
        except KeyboardInterrupt:
            return rendered(KeyboardInterrupt("interrupted while waiting for the GPU; this cell did not run"))
        finally:
            # In a nested cell, clearing the output would also remove the outer cell's output.
            if running_cell.get() is None:
                line.remove()
            else:
                line.blank()
        return None

    def _is_starting(self) -> bool:
        with suppress(AttributeError):  # in a terminal or another kind of kernel
            return bool(self._shell.kernel.get_parent("shell") == {})
        return False

    def _before_message(self) -> None:
        if self._gate.is_open or running_cell.get() is not None:
            return
        try:
            self._kernel.acquirer.wait_for_gpu(None)
        except RefusedError as error:
            print(f"[gpu] A widget's callback is running without the GPU: {error}", file=sys.stderr)  # noqa: T201 - users read the kernel's stderr
        except KeyboardInterrupt:
            print("[gpu] Interrupted: a widget's callback runs without waiting for the GPU.", file=sys.stderr)  # noqa: T201 - as above


class InputRequests:
    def __init__(self, kernel: "LeasedKernel") -> None:
        self._kernel = kernel
        self._shell = kernel.shell
        self._gate = kernel.gate
        self._lock = threading.Lock()
        self._asking: dict[object, str] = {}  # the requests, by wait, since cells can be nested

    @property
    def waiting(self) -> list[str]:
        return list(dict.fromkeys(self._asking.values()))

    def install(self) -> None:
        """Wrap the kernel's input functions. Does nothing in a terminal, where IPython has no kernel or input messages."""
        kernel = getattr(self._shell, "kernel", None)
        for name in ("raw_input", "getpass"):
            original = getattr(kernel, name, None)
            if original is not None:
                self._kernel.registrations.method(kernel, name, self._wrap(original))

    def become_inert(self) -> None:
        self._lock = threading.Lock()
        self._asking = {}

    def _wrap(self, original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def prompt(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - as in the kernel
            cell = running_cell.get()
            if cell is None or cell.thread_id != threading.get_ident() or self._gate.is_inert:
                return original(*args, **kwargs)
            request = ""  # in another kind of kernel, which then counts as busy
            with suppress(AttributeError, KeyError, TypeError):
                request = str(self._shell.kernel.get_parent("shell")["header"]["msg_id"])
            # Pause before reporting, because the broker's next command must find a gate that may be shut.
            # Use `marks` and not `cell.marks`, because the cell of a task may have ended, and its mark must not enter the gate again.
            wait = object()
            try:
                marks = self._gate.pause(cell.marks)
                self._change(lambda: self._asking.__setitem__(wait, request))
                answer = original(*args, **kwargs)
                self._wait_again(marks)
                return answer
            finally:  # even after an interrupt, which ends the cell
                try:
                    self._end(wait, cell.marks)
                except BaseException:
                    self._end(wait, cell.marks)  # another interrupt came above
                    raise

        return prompt

    def _end(self, wait: object, marks: Sequence[object]) -> None:
        """Record that the wait for input is over. This can be called again if an interrupt cuts it short."""
        self._gate.go_on(marks)
        self._change(lambda: self._asking.pop(wait, None))

    def _wait_again(self, marks: Sequence[object]) -> None:
        """Wait for the GPU before these cells continue. Raises KeyboardInterrupt, or RuntimeError if the GPU is refused."""
        if not marks or self._gate.go_on(marks, if_open=True):
            return
        line = LiveLine(self._shell)
        try:
            self._kernel.acquirer.wait_for_gpu(line, marks[-1])
        except RefusedError as error:
            message = f"the input was read, but the cell cannot continue: {error}"
            raise RuntimeError(message) from None
        finally:
            line.blank()

    def _change(self, change: Callable[[], object]) -> None:
        with self._lock:
            change()
            self._kernel.channel.report_inputs(self.waiting)
