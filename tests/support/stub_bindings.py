"""Replaces the package cuda-bindings in other processes: `install` puts it first on their PYTHONPATH.

The calls are FakeDriver's. `cuInit` answers what the file `cuInit` next to the package says, success without one, and writes down the
environment that the driver's library would read then: the process's own copy, not Python's.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import PYTHONPATH

__all__ = ["answer", "environments", "install"]

_STUB = """\
import ctypes, json, os, pathlib, sys
from tests.gpu_nvidia.fake_driver import FakeDriver

FOLDER = pathlib.Path(__file__).parents[2]


def environment():
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found, index = {}, 0
    while entries[index] is not None:
        name, _, value = entries[index].decode(errors="replace").partition("=")
        found[name] = value
        index += 1
    return found


class Driver(FakeDriver):
    def cuInit(self, flags):
        (FOLDER / f"{os.getpid()}.environment").write_text(json.dumps(environment()))
        said = FOLDER / "cuInit"
        if said.exists():
            self.answers["cuInit"] = (int(said.read_text()),)
        return super().cuInit(flags)


sys.modules[__name__] = Driver()
"""


def install(folder: Path) -> str:
    """Make the package in the folder, and return the PYTHONPATH with which a process imports it."""
    package = folder / "cuda" / "bindings"
    package.mkdir(parents=True)
    for part in (package.parent, package):
        (part / "__init__.py").touch()
    (package / "driver.py").write_text(_STUB)
    return os.pathsep.join([str(folder), PYTHONPATH])


def answer(folder: Path, number: int) -> None:
    """Have `cuInit` answer this number from now on."""
    fresh = folder / "cuInit.new"
    fresh.write_text(str(number))
    fresh.replace(folder / "cuInit")


def environments(folder: Path) -> dict[int, Mapping[str, str]]:
    """Return, by pid, the environment of each process that called `cuInit`."""
    return {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.environment")}
