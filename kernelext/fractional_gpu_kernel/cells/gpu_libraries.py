"""Whether this process has a way to the GPU that needs no further import: asked of its mappings and its modules.

All of CUDA goes through the driver's library, `libcuda.so`. Where that is not mapped, the process has no context. Code that loads it later
names it: a library with none of the names below in its bytes cannot. What loads libraries by names that the user gives (cffi) or that lie
in files (plugins) is recognised by its module.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["STANDARD_LIBRARY", "GpuLibraries"]

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
    """Looks at this process. What was found of a file is kept while the file is the same. For one thread."""

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
        """Return by what the process could reach a GPU without another import, for people; "": by nothing.

        The first look reads all mapped libraries: for some tens of MiB it takes some hundredths of a second.
        """
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return (
                "Python without its global lock"  # what is found here, and by the barrier, may have changed meanwhile
            )
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
