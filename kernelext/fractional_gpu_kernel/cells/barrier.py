"""A barrier at the first use of the GPU: a running cell that could not have used the GPU so far gives its room back in mid-cell.

A process without a CUDA context cannot be locked. If the broker wants the room of such a kernel while a cell runs there, the extension
examines whether the process has a way to the GPU at all (`GpuLibraries`). If it has none, the running cells are barred: they go on, the
gate is shut, and the broker learns that their requests use no GPU. A thread that is about to open a way to the GPU waits there until the
kernel has its room again, as after an answered `input()`: with a ticket, interruptible, with a line that says why.

What opens a way: an extension module that is loaded and is not Python's own, `ctypes`, a process that is started or forked, another
interpreter, and the simulated device's first use. Python announces each of them by an audit event before it happens.

The order that leaves no gap:

1. The audit hook listens (`_listens`), then the process is examined (`GpuLibraries`), then the cells are barred.
2. A thread that meets an event during the examination goes on and makes its result void (`Gate.pass_barrier`, in one step).
3. A thread between that and the deed itself is on its way (`_on_its_way`), and nothing is barred meanwhile. It stays so until the very
   end of the hook: from there on, as from the first line of a hook that does not listen, Python changes threads only after the deed.
4. Where Python executes further steps between the event and the deed, the deed is guarded, too (`_guarded`). A library that `ctypes`
   loads just then is of no use without the event of finding a function in it. `os.system` gives up the interpreter before it forks: the
   broker sees the child, for it samples the kernel's processes after all this, and takes no room while there is another than the kernel's
   own.
5. An opening of the gate and the end of the bar are one step (`Gate.open`), whatever opens it. When the last barred cell ends, the kernel
   is idle like any other.

What a process has mapped decides about its ways to the GPU: all of CUDA goes through the driver's library, `libcuda.so`. Where that is
not mapped, the process has no context. Code that loads it later names it: a library with none of `_NAMES` in its bytes cannot. What loads
libraries by names that the user gives (cffi) or that lie in files (plugins) is recognised by its module.
"""

import functools
import importlib
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from fractional_gpu_kernel.cells.acquire import Acquirer, RefusedError
from fractional_gpu_kernel.cells.gate import Gate, Mark
from fractional_gpu_kernel.cells.guard import InputRequests, running_cell
from fractional_gpu_kernel.display.lines import LiveLine
from fractional_gpu_kernel.settings import LOCAL_FAILURES, describe

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
    "fractional_gpu.client.http",
    "fractional_gpu.client.client",
    "fractional_gpu.client.discovery",
    "fractional_gpu.core.units",
)
_OWN_THREADS = "gpu-"  # how the names of this extension's threads begin
_SERVICES = ("control_thread", "shell_channel_thread")  # of the kernel; neither runs cells


# -- what the process has mapped ------------------------------------------------------------------------------------------------------

STANDARD_LIBRARY = tuple(
    {
        f"{folder}/lib-dynload/"
        for name in ("stdlib", "platstdlib")
        for folder in (sysconfig.get_path(name), os.path.realpath(sysconfig.get_path(name)))
    }
)
"""Folders of Python's own extension modules: none of them uses a GPU by itself."""

_LIBRARY = re.compile(r"cuda|nvidia|nvrtc|libOpenCL|libvulkan")
"""In the name of a mapped file: a device, the driver, or a library that comes with CUDA."""

_NAMES = (b"libcuda", b"cuda.so", b"libOpenCL", b"libvulkan")
"""What a library has in its bytes that loads one of those when it is called. CUDA's runtime, linked into one, names `libcuda.so`."""

_MODULES = {
    "_cffi_backend": "cffi",
    "_interpreters": "subinterpreters",
    "_xxsubinterpreters": "subinterpreters",
    "cupy": "CuPy",
    "jaxlib": "JAX",
    "mpi4py": "MPI",
    "numba.cuda": "Numba's CUDA target",
    "onnxruntime": "ONNX Runtime",
    "pyopencl": "OpenCL",
    "tensorflow": "TensorFlow",
}
"""Modules that load libraries without Python's knowledge, or run Python that our hooks do not see."""

_SIMULATED = "fractional_gpu.gpu.simulated.cuda"
_CHUNK = 1 << 20
_OVERLAP = max(map(len, _NAMES)) - 1

_File = tuple[int, int, int, int]


class GpuLibraries:
    """Finds this process's ways to the GPU. The result for a file is kept while the file is the same. For one thread."""

    def __init__(self, maps: Path = Path("/proc/self/maps")) -> None:
        self._maps = maps
        self._searched: dict[_File, bool] = {}

    def is_loaded(self) -> bool:
        """Return whether a library or a device of NVIDIA's is mapped, or its mappings cannot be read. Costs about a millisecond."""
        try:
            return any(_LIBRARY.search(Path(path).name) for path, _ in self._mapped())
        except OSError:
            return True

    def way(self) -> str:
        """Return, for people, the means by which the process could reach a GPU without another import; "": there is none.

        The first call reads all mapped libraries: for some tens of MiB that takes some hundredths of a second.
        """
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return "Python without its global lock"  # other threads could change what is found here before the cells are barred
        for name, title in _MODULES.items():
            if name in sys.modules:
                return title
        if (simulated := sys.modules.get(_SIMULATED)) is not None and simulated.is_in_use():
            return "the simulated GPU"
        try:
            for path, runs in self._mapped():
                if _LIBRARY.search(Path(path).name) or (runs and not _is_pythons(path) and self._names_one(path)):
                    return Path(path).name
        except OSError as error:
            return f"a library that cannot be read ({error})"
        return ""

    def _mapped(self) -> Iterator[tuple[str, bool]]:
        """The files that are mapped, and whether there is code in them. Raises OSError."""
        found: dict[str, bool] = {}
        with self._maps.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    found[fields[5]] = found.get(fields[5], False) or "x" in fields[1]
        return iter(found.items())

    def _names_one(self, path: str) -> bool:
        """Return whether the file has one of the names in its bytes. Raises OSError, also for one that was deleted."""
        with Path(path).open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if key not in self._searched:
                self._searched[key] = _has_name(file.read)
            return self._searched[key]


def _is_pythons(path: str) -> bool:
    """Return whether the file is a part of Python itself."""
    return (
        path.startswith(STANDARD_LIBRARY)
        or Path(path).name.startswith("libpython")
        or path == os.path.realpath(sys.executable)
    )


def _has_name(read: Callable[[int], bytes]) -> bool:
    end = b""
    while part := read(_CHUNK):  # piece by piece: the interpreter is held for each one's search only
        if any(name in end + part for name in _NAMES):
            return True
        end = part[-_OVERLAP:]
    return False


# -- the barrier -----------------------------------------------------------------------------------------------------------------------


class Barrier:
    """The barrier of one kernel's process."""

    def __init__(
        self,
        shell: Any,  # noqa: ANN401 - IPython is untyped
        gate: Gate,
        acquirer: Acquirer,
        inputs: InputRequests,
        libraries: GpuLibraries | None = None,
        *,
        examined: Callable[[], None] = lambda: None,
    ) -> None:
        self._shell = shell
        self._gate = gate
        self._acquirer = acquirer
        self._inputs = inputs
        self._libraries = libraries or GpuLibraries()
        self._examined = examined  # called after each examination
        self._way = ""  # to the GPU, once one was found: it stays
        self._listens = False
        self._closed = False
        self._installed = False
        self._guards: list[tuple[Any, str, Any, Any]] = []  # module, function's name, guarded, original
        self._examination: threading.Thread | None = None
        self._is_void = False  # a thread has opened a way while the process was examined
        self._on_its_way: dict[int, int] = {}  # threads that have met an event, and how often, one within another
        gate.watch_bar(self._bar_changed)

    def examine(self) -> bool:
        """Find out in a thread whether the running cells can do without the GPU, and bar them then.

        Returns whether that is under way. Never blocks. Raises RuntimeError if there are no more threads.
        """
        if self._examination is not None:
            return True
        if self._way or self._closed or self._gate.is_inert:
            return False
        self._examination = examination = threading.Thread(target=self._examine, name="gpu-barrier", daemon=True)
        try:
            examination.start()
        except RuntimeError:
            self._examination = None
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
        """In a forked child: it has no lease, and another thread of the parent may have been in the middle of an examination."""
        self._closed, self._listens = True, False

    def _examine(self) -> None:
        try:
            if self._libraries.is_loaded():
                self._way = "CUDA"
                return
            # A barred thread may wait in the middle of an import, with the lock of a module: the wait itself must import nothing then.
            for name in _WAIT_NEEDS:
                importlib.import_module(name)
            self._install()
            self._is_void, self._listens = False, True
            self._way = self._libraries.way()
            if not self._way:
                self._gate.bar(lambda: not (self._closed or self._is_void or self._on_its_way))
        except LOCAL_FAILURES as error:
            self._way = describe(error)
        finally:
            if not self._gate.is_barred:  # no other thread bars cells, so this stays true
                self._listens = False
            self._examination = None
            self._examined()

    def _bar_changed(self, marks: AbstractSet[object]) -> None:
        """Other cells are barred than before. Called with the gate's lock held."""
        self._listens = bool(marks) or self._examination is not None
        self._inputs.replace_barred({mark.request for mark in marks if isinstance(mark, Mark)})

    # -- the guards of the ways --------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        import _posixsubprocess  # noqa: PLC0415 - off the kernel's start
        import subprocess  # noqa: PLC0415 - as above

        if self._installed:
            return
        self._installed = True
        sys.addaudithook(self._hook())
        # Called by multiprocessing and by subprocess, a few steps of Python after the audit event.
        for owner, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
            original = getattr(owner, name, None)
            if original is not None:
                guarded = self._guarded(original)
                setattr(owner, name, guarded)
                self._guards.append((owner, name, guarded, original))

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        """Return the audit hook, which stays for the life of the process and is called for every event.

        It is a plain function, the cheapest callable, and returns at its first line while nothing is barred or examined.
        """

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if not self._listens:
                return
            if event not in _WAYS or (event == "import" and not _is_foreign(arguments[1])):
                return
            on_its_way, thread = self._on_its_way, threading.get_ident()
            on_its_way[thread] = on_its_way.get(thread, 0) + 1
            try:
                if on_its_way[thread] == 1 and not self._is_service():  # a deeper event comes from the wait itself
                    self._pass()
            finally:
                # Python hands the interpreter to another thread after calls and jumps only: there is none between here and the deed.
                if on_its_way[thread] == 1:
                    del on_its_way[thread]
                else:
                    on_its_way[thread] -= 1

        return audit

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
        """Whether this thread is the extension's or the kernel's own and runs no code of the user's."""
        thread, kernel = threading.current_thread(), getattr(self._shell, "kernel", None)
        return thread.name.startswith(_OWN_THREADS) or any(thread is getattr(kernel, name, None) for name in _SERVICES)

    def _pass(self) -> None:
        """Return once no cell is barred. Raises KeyboardInterrupt, or RuntimeError if the GPU will not come."""
        while not self._gate.pass_barrier(self._make_void):
            cell = running_cell.get()
            is_cell = cell is not None and bool(cell.marks) and cell.thread_id == threading.get_ident()
            line = LiveLine(self._shell) if is_cell else None
            try:
                self._acquirer.wait_for_gpu(line)  # without a mark: an opening makes the barred cells run
            except RefusedError as error:
                message = f"the cell ran without the GPU, and cannot go on to use it: {error}"
                raise RuntimeError(message) from None
            finally:
                if line is not None:
                    line.blank()

    def _make_void(self) -> None:
        self._is_void = True


def _is_foreign(path: object) -> bool:
    """Return whether an import loads an extension module that is not Python's own. None: no such module."""
    return bool(path) and not str(path).startswith(STANDARD_LIBRARY)
