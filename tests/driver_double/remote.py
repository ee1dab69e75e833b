"""The product's NVIDIA classes in a process of its own, over the double: python -P -m tests.driver_double.remote

A library is found when a program starts, so the test's own process cannot load the doubles. `Remote` starts a process that does, and calls
methods there: `remote.checkpointer.lock(pid, 1000)` returns or raises what NvidiaCheckpointer's does.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from provisioner.gpu.interface import GPUError, ProcessState
from provisioner.gpu.nvidia import NvidiaCheckpointer, NvidiaMonitor
from tests.driver_double.double import DriverDouble
from tests.driver_double.releases import newest, python_path

__all__ = ["Remote", "RemoteCheckpointer", "RemoteMonitor"]

ROOT: Final = Path(__file__).resolve().parents[2]
_MADE: Final[dict[str, Callable[[], object]]] = {"checkpointer": NvidiaCheckpointer, "monitor": NvidiaMonitor}


class Remote:
    """A process with a checkpointer and a monitor, each made at its first call. `pid` is the caller that the driver sees."""

    def __init__(
        self, double: DriverDouble, *, bindings: str = "newest", nvml: str = "newest", **environment: str
    ) -> None:
        given = double.environment(bindings)
        nvml_path = python_path("nvidia-ml-py", newest("nvidia-ml-py") if nvml == "newest" else nvml)
        given["PYTHONPATH"] = os.pathsep.join((given["PYTHONPATH"], str(nvml_path), str(ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.driver_double.remote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **given, **environment},
        )
        self.pid = self._process.pid
        self.checkpointer = RemoteCheckpointer(self, "checkpointer")
        self.monitor = RemoteMonitor(self, "monitor")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def call(self, on: str, name: str, *arguments: object) -> Any:  # noqa: ANN401 (what the method gives)
        """Call a method there and return its value, or raise its exception."""
        self.begin(on, name, *arguments)
        return self.result()

    def begin(self, on: str, name: str, *arguments: object) -> None:
        """Start a call."""
        assert self._process.stdin is not None
        pickle.dump((on, name, arguments), self._process.stdin)
        self._process.stdin.flush()

    def result(self) -> Any:  # noqa: ANN401 (what the method gives)
        """Wait for the call that was begun. Raises EOFError when the process is dead."""
        assert self._process.stdout is not None
        kind, value = pickle.load(self._process.stdout)  # noqa: S301 (what our own process wrote)
        if kind == "GPUError":
            raise GPUError(*value)
        if kind == "ValueError":
            raise ValueError(value)
        return value

    def kill(self) -> None:
        """Kill it and wait until it is reaped. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


class _Part:
    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name = remote, name

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (a method, or a value)
        found = self._remote.call(self._name, name)
        if found == "a method":
            return lambda *arguments: self._remote.call(self._name, name, arguments)
        return found


class RemoteMonitor(_Part):
    """An NvidiaMonitor."""


class RemoteCheckpointer(_Part):
    """An NvidiaCheckpointer."""

    def state(self, pid: int) -> ProcessState:
        state = self._remote.call(self._name, "state", (pid,))
        assert isinstance(state, ProcessState)
        return state


def serve() -> None:
    """Answer calls until standard input ends."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    objects: dict[str, object] = {}
    while True:
        try:
            on, name, arguments = pickle.load(requests)  # noqa: S301 (what the test wrote)
        except EOFError:
            return
        try:
            if on not in objects:
                objects[on] = _MADE[on]()
            found = getattr(objects[on], name)
            if arguments:
                found = found(*arguments[0])
            answer: tuple[str, object] = ("value", "a method" if callable(found) else found)
        except GPUError as error:
            answer = ("GPUError", (error.code, str(error)))
        except ValueError as error:
            answer = ("ValueError", str(error))
        pickle.dump(answer, replies)
        replies.flush()


if __name__ == "__main__":
    serve()
