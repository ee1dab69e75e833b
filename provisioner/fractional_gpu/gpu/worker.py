"""The checkpoint worker: the only process that controls other processes' CUDA state.

    python -P -m fractional_gpu.gpu.worker --backend nvidia
    python -P -m fractional_gpu.gpu.worker --backend simulated:DIRECTORY

Standard input is a SEQPACKET socket with one JSON object per packet. The worker performs one operation at a time. Its first message is
`{protocol}`, or `{error: {code, message}}` if the backend cannot be opened. A request is `{op, target: {boot_id, pid, start_time}, ...}`.
`lock` requests also include `timeout_ms`, and `restore` requests can include `moves`. `set_limit` and `read_limit` requests contain
`{device_id, group, mib}` instead of a target. A reply is `{state, elapsed_us, limit}` or `{error: {code, message}}`.

Right before each operation, the worker checks the target's identity, because another process might have its pid by now. When the socket
closes, the worker finishes the current operation and exits. If the broker has been killed, the worker dies when the request's `deadline_s`
runs out. The worker ignores SIGINT and SIGTERM, because terminals and service managers send them to whole process groups. It imports as few
modules as possible, because requests to a new worker have to wait for its imports.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, MemoryLimits, ProcessState
from fractional_gpu.gpu.open import open_checkpointer, open_memory_limits
from fractional_gpu.host.process import ProcessIdentity, identify

PROTOCOL: Final = 1
MAX_MESSAGE: Final = 1 << 16
OPERATIONS: Final = ("ping", "state", "lock", "checkpoint", "restore", "unlock")
LIMIT_OPERATIONS: Final = ("set_limit", "read_limit")


def main(arguments: list[str]) -> int:
    """Run the worker and return its exit status: 0 when the broker closes the socket, 1 if the backend can't be opened, 2 for bad usage."""
    if len(arguments) != 2 or arguments[0] != "--backend":
        sys.stderr.write("usage: python -P -m fractional_gpu.gpu.worker --backend nvidia|simulated:DIRECTORY\n")
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even within a driver call
    os.dup2(2, 1)  # driver libraries may print
    try:
        backend = open_checkpointer(arguments[1])
        limits = cache(
            partial(open_memory_limits, arguments[1])
        )  # opened on first use, because few drivers support them
    except GPUError as error:
        sys.stderr.write(f"the checkpoint worker cannot start: {error}\n")
        _send(error_fields(error))
        return 1
    try:
        _send({"protocol": PROTOCOL})
        while packet := os.read(0, MAX_MESSAGE):
            _send(_answer(backend, limits, packet))
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the broker has ended, and the operation is complete
    return 0


def error_fields(error: GPUError) -> dict[str, Any]:
    return {"error": {"code": error.code.value, "message": str(error)[:4000]}}


def _send(message: Mapping[str, Any]) -> None:
    os.write(0, json.dumps(message).encode())


def _limit(limits: MemoryLimits, request: Mapping[str, Any]) -> dict[str, Any]:
    device_id, group, mib = str(request["device_id"]), str(request["group"]), request.get("mib")
    if request["op"] == "set_limit":
        limits.set(device_id, group, None if mib is None else int(mib))
        return {}
    found = limits.read(device_id, group)
    return {} if found is None else {"limit": {"hard_mib": found.hard_mib, "used_mib": found.used_mib}}


def _answer(backend: Checkpointer, limits: Callable[[], MemoryLimits], packet: bytes) -> dict[str, Any]:
    try:
        request = json.loads(packet)
        if request["op"] in LIMIT_OPERATIONS:
            return _limit(limits(), request)
        state, elapsed_us = _perform(backend, request)
    except GPUError as error:
        return error_fields(error)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # This is a bug in the broker, not in the driver. Report it and serve the next request.
        sentence = f"the checkpoint worker cannot serve the request: {error!r}"
        return error_fields(GPUError(GPUErrorCode.UNKNOWN, sentence))
    return {"state": state, "elapsed_us": elapsed_us}


def _perform(backend: Checkpointer, request: dict[str, Any]) -> tuple[ProcessState | None, int]:
    operation = request["op"]
    if operation not in OPERATIONS:
        raise ValueError(f"there is no operation {operation!r}; expected one of: {', '.join(OPERATIONS)}")
    if operation == "ping":
        return None, 0
    target = ProcessIdentity(**request["target"])
    timeout_ms, deadline_s = int(request.get("timeout_ms", 0)), float(request.get("deadline_s", 0))
    if not _lives(target):
        if operation == "state":
            return ProcessState.GONE, 0
        raise GPUError(GPUErrorCode.NO_SUCH_PROCESS, f"process {target.pid} is gone")
    state = None
    began = time.monotonic_ns()
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        if operation == "state":
            state = backend.state(target.pid)
        elif operation == "lock":
            backend.lock(target.pid, timeout_ms)
        elif operation == "checkpoint":
            backend.checkpoint(target.pid)
        elif operation == "restore":
            backend.restore(target.pid, request.get("moves"))
        else:
            backend.unlock(target.pid)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return state, (time.monotonic_ns() - began) // 1000


def _lives(target: ProcessIdentity) -> bool:
    """Return whether the process is alive. Raises GPUError WRONG_IDENTITY if another process now has its pid."""
    try:
        found = identify(target.pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise GPUError(GPUErrorCode.OPERATING_SYSTEM, f"process {target.pid} cannot be identified: {error}") from error
    if found != target:
        raise GPUError(
            GPUErrorCode.WRONG_IDENTITY,
            f"process {target.pid} is not the expected one: it started at tick {found.start_time} of boot {found.boot_id}, but expected "
            f"tick {target.start_time} of boot {target.boot_id}",
        )
    return True


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
