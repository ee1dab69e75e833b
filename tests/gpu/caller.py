"""A process that makes the driver's checkpoint calls and says what they gave, undecorated: one JSON object a line.

    python -P -m tests.gpu.caller nvidia|simulated:DIRECTORY

Its first line says how long opening took. `{"call": "state", "pid": N}` (or thread, lock with `timeout_ms`, checkpoint, restore, unlock)
is answered with `{"result": CUDA's number, "name": ..., "value": ..., "seconds": ...}`; on a simulated device the result is 0 or the
error's code. `job_file` is set as the target's job file for the call. The product's checkpoint worker makes the same calls; this one keeps
their raw results and does not know leases.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from tests.gpu.talk import JOB_FILE

__all__ = ["main"]

_MPS: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


class _Calls(Protocol):
    def call(self, name: str, pid: int, timeout_ms: int) -> dict[str, Any]: ...


class _Nvidia:
    def __init__(self) -> None:
        from tests.gpu.driver import Driver  # noqa: PLC0415 - a simulated device has no bindings

        for name in _MPS:  # a client of MPS can do nothing here, and the list of devices must be whole
            os.environ.pop(name, None)
        self._driver = Driver()
        self._driver.do("cuInit", 0)

    def call(self, name: str, pid: int, timeout_ms: int) -> dict[str, Any]:
        calls = {"state": "GetState", "thread": "GetRestoreThreadId"}
        given: list[object] = [pid]
        if name == "lock":
            arguments = self._driver.cuda.CUcheckpointLockArgs()
            arguments.timeoutMs = timeout_ms
            given.append(arguments)
        elif name not in calls:
            given.append(None)
        result, said, values = self._driver.answer(f"cuCheckpointProcess{calls.get(name, name.title())}", *given)
        value = int(values[0]) if values and result == 0 else None
        return {"result": result, "name": said, "value": value}


class _Simulated:
    def __init__(self, backend: str) -> None:
        from fractional_gpu.gpu.open import open_checkpointer  # noqa: PLC0415 - elsewhere only the bindings are there

        self._checkpointer = open_checkpointer(backend)

    def call(self, name: str, pid: int, timeout_ms: int) -> dict[str, Any]:
        from fractional_gpu.gpu.interface import GPUError  # noqa: PLC0415 - as above

        calls: Mapping[str, Callable[[], object]] = {
            "state": lambda: self._checkpointer.state(pid),
            "lock": lambda: self._checkpointer.lock(pid, timeout_ms),
            "checkpoint": lambda: self._checkpointer.checkpoint(pid),
            "restore": lambda: self._checkpointer.restore(pid, None),
            "unlock": lambda: self._checkpointer.unlock(pid),
        }
        if name not in calls:
            return {"result": -1, "name": "a simulated device has no such call", "value": None}
        try:
            value = calls[name]()
        except GPUError as error:
            return {"result": error.code.value, "name": str(error), "value": None}
        return {"result": 0, "name": "success", "value": value}


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; 1 if the driver does not start, 2 for wrong arguments."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -P -m tests.gpu.caller nvidia|simulated:DIRECTORY\n")
        return 2
    begun = time.perf_counter()
    calls: _Calls
    try:
        calls = _Nvidia() if arguments[0] == "nvidia" else _Simulated(arguments[0])
    except (RuntimeError, ImportError) as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        return 1
    _say({"opened_s": round(time.perf_counter() - begun, 4)})
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.pop(JOB_FILE, None)
        if "job_file" in request:
            os.environ[JOB_FILE] = request["job_file"]
        begun = time.perf_counter()
        answer = calls.call(request["call"], request["pid"], request.get("timeout_ms", 10_000))
        _say({**answer, "seconds": round(time.perf_counter() - begun, 5)})
    return 0


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
