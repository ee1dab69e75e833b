"""A barrier at the first use of the GPU: a cell that runs, and could not have used the GPU so far, gives its room back in mid-cell.

A process without a CUDA context cannot be locked. If the broker wants the room of such a kernel while a cell runs there, this extension
looks whether the process has a way to the GPU at all. If it has none, the cells that run are barred: they go on, the gate is shut, and the
broker is told that their requests use no GPU. A thread that is about to open a way to the GPU waits there until the kernel has its room
again, as an answered `input()` does: with a ticket, interruptible, with a line that says why.

What opens a way: an extension module that is loaded and is not Python's own, `ctypes`, a process that is started or forked, another
interpreter, and the simulated device's first use. Python announces all of them by audit events before they happen.

The order that leaves no gap:

1. The audit hook listens (`_listens`), then the process is looked at (`gpu_libraries`), then the cells are barred.
2. A thread that meets an event while the process is looked at goes on, and the look is worth nothing (`Gate.pass_barrier`, in one step).
3. A thread between that and the event itself is on its way (`_on_its_way`), and nothing is barred meanwhile. It is until the very end of
   the hook: from there on, as from the first line of a hook that does not listen, Python changes threads only after the event.
4. Where steps of Python lie between the event and the deed, the deed is guarded, too (`_guarded`). A library that `ctypes` loads just then
   is of no use without the event of finding a function in it. `os.system` gives up the interpreter before it forks: the broker sees the
   child, for it looks at the kernel's processes after all this, and takes no room while there is another than the kernel's own.
5. An opening of the gate and the end of the bar are one step, whoever opens it. When the last barred cell ends, the kernel is idle like any
   other.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from fractional_gpu_kernel.cells.acquire import LOCAL_FAILURES, Acquirer, describe
from fractional_gpu_kernel.cells.gate import Gate, Mark
from fractional_gpu_kernel.cells.gpu_libraries import STANDARD_LIBRARY, GpuLibraries
from fractional_gpu_kernel.cells.inputs import Inputs, running_cell
from fractional_gpu_kernel.cells.wait import RefusedError, wait_for_gpu
from fractional_gpu_kernel.display.display import LiveLine

__all__ = ["FIRST_USE", "Barrier"]

FIRST_USE = "fractional_gpu.gpu.simulated.first_use"
"""The audit event of the simulated device (see `fractional_gpu.gpu.simulated.cuda`)."""

_WAYS = frozenset(
    {
        FIRST_USE,
        "cpython.PyInterpreterState_New",
        "ctypes.dlopen",
        "ctypes.dlsym",
        "ctypes.dlsym/handle",
        "import",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "subprocess.Popen",
    }
)
_WAIT_NEEDS = (
    "fractional_gpu_kernel.display.wait_line",
    "fractional_gpu.client.broker_process",
    "fractional_gpu.client.client",
    "fractional_gpu.client.discovery",
    "fractional_gpu.client.silence",
)
_OWN_THREADS = "gpu-"  # how the names of this extension's threads begin
_SERVICES = ("control_thread", "shell_channel_thread")  # of the kernel; neither runs cells


class Barrier:
    """The barrier of one kernel's process."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        gate: Gate,
        acquirer: Acquirer,
        inputs: Inputs,
        libraries: GpuLibraries | None = None,
    ) -> None:
        self._shell = shell
        self._gate = gate
        self._acquirer = acquirer
        self._inputs = inputs
        self._libraries = libraries or GpuLibraries()
        self._way = ""  # to the GPU, that was found: it stays
        self._listens = False
        self._closed = False
        self._installed = False
        self._guards: list[tuple[Any, str, Any, Any]] = []  # where, its name, what stands in, the original
        self._looking: threading.Thread | None = None
        self._spoilt = False  # the look that is under way is worth nothing
        self._on_its_way: dict[int, int] = {}  # threads that have met an event, and how often, one within another
        self._requests: frozenset[str] = frozenset()
        gate.on_bar = self._bar_changed

    def look(self) -> bool:
        """The broker wants the room while a cell runs: find out in a thread whether the cell can do without, and bar it then.

        Returns whether that is under way. Never blocks. Raises RuntimeError if there are no more threads.
        """
        if self._looking is not None:
            return True
        if self._way or self._closed or self._gate.is_inert:
            return False
        self._looking = looking = threading.Thread(target=self._look, name="gpu-barrier", daemon=True)
        try:
            looking.start()
        except RuntimeError:
            self._looking = None
            raise
        return True

    def close(self) -> None:
        """Bar nothing more. Cells that are barred have their room again first: raises as `input()` does where it will not come."""
        self._closed = True
        try:
            self._pass()
        except BaseException:
            self._closed = False
            raise
        self._listens = False
        for owner, name, guarded, original in self._guards:
            if getattr(owner, name) is guarded:
                setattr(owner, name, original)
        self._guards = []

    def become_inert(self) -> None:
        """For a forked child: it has no lease, and another thread of the parent may have been in the middle of something."""
        self._closed, self._listens = True, False

    def _look(self) -> None:
        try:
            if self._libraries.is_loaded():
                self._way = "CUDA"
                return
            for name in _WAIT_NEEDS:  # a thread that waits in the middle of an import may hold the lock of a module
                importlib.import_module(name)
            self._install()
            self._spoilt, self._listens = False, True
            self._way = self._libraries.way()
            if not self._way:
                self._gate.bar(lambda: not (self._closed or self._spoilt or self._on_its_way))
        except LOCAL_FAILURES as error:
            self._way = describe(error)
        finally:
            if not self._gate.is_barred:  # and nothing else bars
                self._listens = False
            self._looking = None

    def _bar_changed(self, marks: AbstractSet[object]) -> None:
        """Other cells are barred than before. Called with the gate's lock held."""
        self._listens = bool(marks) or self._looking is not None
        before = self._requests
        self._requests = frozenset(mark.request for mark in marks if isinstance(mark, Mark))
        self._inputs.replace(before, self._requests)

    # -- what is announced ------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        import _posixsubprocess  # noqa: PLC0415 - off the kernel's start
        import subprocess  # noqa: PLC0415 - as above

        if self._installed:
            return
        self._installed = True
        sys.addaudithook(self._hook())
        # Multiprocessing's and subprocess's.
        for owner, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
            original = getattr(owner, name, None)
            if original is not None:
                guarded = self._guarded(original)
                setattr(owner, name, guarded)
                self._guards.append((owner, name, guarded, original))

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        """Return what Python calls for each of its events for as long as the process lives: a function, the cheapest to call."""

        def announced(event: str, arguments: tuple[Any, ...]) -> None:
            if not self._listens:
                return
            if event not in _WAYS or (event == "import" and not _is_foreign(arguments[1])):
                return
            on_its_way, thread = self._on_its_way, threading.get_ident()
            on_its_way[thread] = on_its_way.get(thread, 0) + 1
            try:
                if on_its_way[thread] == 1 and not self._is_service():  # else: what the wait itself needs
                    self._pass()
            finally:
                # Python looks for other threads that want to run after calls and jumps: there is none between here and the event.
                if on_its_way[thread] == 1:
                    del on_its_way[thread]
                else:
                    on_its_way[thread] -= 1

        return announced

    def _guarded(self, deed: Callable[..., Any]) -> Callable[..., Any]:
        """A function that starts a process, behind the barrier."""

        @functools.wraps(deed)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function's own
            thread = threading.get_ident()
            self._on_its_way[thread] = self._on_its_way.get(thread, 0) + 1
            try:
                if self._listens and self._on_its_way[thread] == 1 and not self._is_service():
                    self._pass()
                return deed(*args, **kwargs)
            finally:
                left = self._on_its_way.pop(thread) - 1
                if left:
                    self._on_its_way[thread] = left

        return guarded

    def _is_service(self) -> bool:
        """Whether this thread runs no code of the user's."""
        thread, kernel = threading.current_thread(), getattr(self._shell, "kernel", None)
        return thread.name.startswith(_OWN_THREADS) or any(thread is getattr(kernel, name, None) for name in _SERVICES)

    def _pass(self) -> None:
        """Go on if nothing is barred, or when the room is there. Raises KeyboardInterrupt, or RuntimeError if the GPU will not come."""
        while not self._gate.pass_barrier(self._spoil):
            cell = running_cell.get()
            is_cell = cell is not None and bool(cell.marks) and cell.thread_id == threading.get_ident()
            line = LiveLine(self._shell) if is_cell else None
            try:
                wait_for_gpu(self._gate, self._acquirer, line)  # without a mark: an opening makes the barred cells run
            except RefusedError as error:
                message = f"the cell ran without the GPU, and cannot go on to use it: {error}"
                raise RuntimeError(message) from None
            finally:
                if line is not None:
                    line.blank()

    def _spoil(self) -> None:
        self._spoilt = True


def _is_foreign(path: object) -> bool:
    """Return whether an import loads an extension module that is not Python's own. None: no such module."""
    return bool(path) and not str(path).startswith(STANDARD_LIBRARY)
