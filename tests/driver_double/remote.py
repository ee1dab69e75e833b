"""The product's NVIDIA classes in a separate process, over the double: python -P -m tests.driver_double.remote

A library is found when a program starts, so the test's own process cannot load the doubles. `Remote` starts a process that does, and calls
methods there: `remote.checkpointer.lock(pid, 1000)` returns or raises what NvidiaCheckpointer's does.
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from fractional_gpu.gpu.interface import (
    DeviceActivity,
    DeviceInfo,
    DeviceSensors,
    DeviceUse,
    DeviceUtilisation,
    GPUError,
    ProcessState,
)
from fractional_gpu.gpu.nvidia.checkpointer import NvidiaCheckpointer
from fractional_gpu.gpu.nvidia.limits import NvidiaMemoryLimits
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from tests.driver_double.double import DriverDouble
from tests.driver_double.releases import newest, python_path
from tests.support.paths import PYTHONPATH

__all__ = ["Remote", "RemoteCheckpointer", "RemoteMonitor"]


class _Bindings:
    """What the loaded bindings know."""

    @property
    def states(self) -> list[str]:
        return [state.name for state in importlib.import_module("cuda.bindings.driver").CUprocessState]


_MADE: Final[dict[str, Callable[[], object]]] = {
    "checkpointer": NvidiaCheckpointer,
    "monitor": NvidiaMonitor,
    "limits": NvidiaMemoryLimits,
    "bindings": _Bindings,
}


class Remote:
    """A process with a checkpointer and a monitor, each made at its first call. `pid` is the caller that the driver sees."""

    def __init__(
        self, double: DriverDouble, *, bindings: str = "newest", nvml: str = "newest", **environment: str
    ) -> None:
        self.bindings = newest() if bindings == "newest" else bindings
        given = double.environment(self.bindings)
        nvml_path = python_path("nvidia-ml-py", newest("nvidia-ml-py") if nvml == "newest" else nvml)
        given["PYTHONPATH"] = os.pathsep.join((given["PYTHONPATH"], str(nvml_path), PYTHONPATH))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.driver_double.remote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **given, **environment},
        )
        self.pid = self._process.pid
        self.checkpointer = RemoteCheckpointer(self)
        self.monitor = RemoteMonitor(self)

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
        assert kind == "value", f"no error that the product promises: {value}"
        return value

    def known_states(self) -> list[str]:
        """Return the names of the states that its bindings know."""
        found: list[str] = self.call("bindings", "states")
        return found

    def use(self, double: DriverDouble) -> None:
        """Let its calls go to another host from now on; it counts as initialised there."""
        self.call("host", str(double.folder))

    def kill(self) -> None:
        """Kill it and wait until it is reaped. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


class RemoteMonitor:
    """An NvidiaMonitor."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 (what the method gives)
        return self._remote.call("monitor", name, arguments)

    @property
    def kind(self) -> str:
        return str(self._remote.call("monitor", "kind"))

    @property
    def why_none(self) -> str:
        return str(self._remote.call("monitor", "why_none"))

    def devices(self) -> list[DeviceInfo]:
        found: list[DeviceInfo] = self._call("devices")
        return found

    def use(self, device_id: str) -> DeviceUse:
        found: DeviceUse = self._call("use", device_id)
        return found

    def activity(self, device_id: str, since_us: int) -> DeviceActivity | None:
        found: DeviceActivity | None = self._call("activity", device_id, since_us)
        return found

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        found: DeviceUtilisation | None = self._call("utilisation", device_id, since_us)
        return found

    def sensors(self, device_id: str) -> DeviceSensors:
        found: DeviceSensors = self._call("sensors", device_id)
        return found

    def kernel_environment(self, device_id: str | None) -> dict[str, str]:
        found: dict[str, str] = self._call("kernel_environment", device_id)
        return found

    def close(self) -> None:
        self._call("close")


class RemoteCheckpointer:
    """An NvidiaCheckpointer."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 (what the method gives)
        return self._remote.call("checkpointer", name, arguments)

    @property
    def why_cannot_move(self) -> str:
        return str(self._remote.call("checkpointer", "why_cannot_move"))

    def state(self, pid: int) -> ProcessState:
        found: ProcessState = self._call("state", pid)
        return found

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._call("lock", pid, timeout_ms)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int, moves: Mapping[str, str] | None = None) -> None:
        self._call("restore", pid, moves)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)


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
            if on == "host":
                os.environ["DRIVER_DOUBLE"] = name
                pickle.dump(("value", None), replies)
                replies.flush()
                continue
            if on not in objects:
                objects[on] = _MADE[on]()
            found = getattr(objects[on], name)
            if arguments:
                found = found(*arguments[0])
            answer: tuple[str, object] = ("value", found)
        except GPUError as error:
            answer = ("GPUError", (error.code, str(error)))
        except ValueError as error:
            answer = ("ValueError", str(error))
        except Exception as error:  # noqa: BLE001 (the test fails of it, and the next one has a process)
            answer = (type(error).__name__, str(error))
        pickle.dump(answer, replies)
        replies.flush()


if __name__ == "__main__":
    serve()
