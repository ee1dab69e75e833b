"""The checkpoint worker: the only process that drives other processes' CUDA state.

    python -P -m fractional_gpu.gpu.worker --backend nvidia
    python -P -m fractional_gpu.gpu.worker --backend simulated:DIRECTORY

The rules:
- One JSON object a line, requests on standard input, replies on standard output, one operation at a time, in order.
- The first line is `{"hello": ...}`, or `{"fatal": {code, message}}` when the backend cannot be opened.
- A request is `{id, op, target: {boot_id, pid, start_time}, ...}`; `lock` has `timeout_ms`, `restore` may have `moves`. A
  reply is `{id, ok, state, elapsed_us, error}`, error being null or `{code, message}`.
- The target's identity is checked immediately before the operation: a pid alone may belong to another process by now.
- A request may have `deadline_s`: a worker that is still busy with it by then ends itself. A living broker kills the worker before
  that; the deadline is for a worker whose broker was killed.
- It ends when its standard input does, after the current operation. SIGINT and SIGTERM are ignored, because a terminal or a service
  manager sends them to a whole group and they must not stop an operation half way. SIGKILL is for emergencies.
- It imports little: a call that waits for a restart of the worker waits for its imports.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import IO, Any, Final

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.open import open_checkpointer
from fractional_gpu.host import files
from fractional_gpu.host.process import ProcessIdentity, identify

PROTOCOL: Final = 1
MAX_LINE: Final = 1 << 20
OPERATIONS: Final = ("ping", "state", "lock", "checkpoint", "restore", "unlock")


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; 1 when the backend cannot be opened, 2 for arguments that are not understood."""
    if len(arguments) != 2 or arguments[0] != "--backend":
        sys.stderr.write("usage: python -P -m fractional_gpu.gpu.worker --backend nvidia|simulated:DIRECTORY\n")
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even within a call of the driver
    replies = _private_output()
    try:
        backend = open_checkpointer(arguments[1])
    except GPUError as error:
        sys.stderr.write(f"the checkpoint worker cannot start: {error}\n")
        _send(replies, {"fatal": error_fields(error)})
        return 1
    try:
        _send(replies, {"hello": {"protocol": PROTOCOL, "backend": arguments[1], "pid": os.getpid()}})
        while line := sys.stdin.buffer.readline(MAX_LINE):
            _send(replies, _answer(backend, line))
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the broker has ended; the operation is done. A pipe breaks, a socket (a service's worker has one) is reset
    return 0


def error_fields(error: GPUError) -> dict[str, str]:
    return {"code": error.code.value, "message": str(error)}


def read_error(fields: object) -> GPUError:
    """Return the error that a worker or its service sent; a code of another version is UNKNOWN."""
    if not isinstance(fields, dict):
        return GPUError(
            GPUErrorCode.UNKNOWN, f"the checkpoint worker failed without an explanation: {str(fields)[:200]}"
        )
    code = str(fields.get("code"))
    known = code in {one.value for one in GPUErrorCode}
    return GPUError(GPUErrorCode(code) if known else GPUErrorCode.UNKNOWN, str(fields.get("message")))


def _private_output() -> IO[bytes]:
    """Return a private copy of standard output, for replies only: what a driver's library prints goes to standard error."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return private


def _send(replies: IO[bytes], message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    replies.flush()


def _answer(backend: Checkpointer, line: bytes) -> dict[str, Any]:
    request: object = None
    began = time.monotonic_ns()
    try:
        request = json.loads(line)
        state, elapsed_us = _perform(backend, request)
    except GPUError as error:
        return _reply(request, error=error, elapsed_us=(time.monotonic_ns() - began) // 1000)
    except (ValueError, TypeError, RecursionError) as error:
        # A defect of the broker, not of the driver: reply with it, and serve the next request.
        problem = GPUError(GPUErrorCode.UNKNOWN, f"the checkpoint worker does not understand the request: {error}")
        return _reply(request, error=problem, elapsed_us=(time.monotonic_ns() - began) // 1000)
    return _reply(request, state=state, elapsed_us=elapsed_us)


def _reply(
    request: object, *, elapsed_us: int, state: ProcessState | None = None, error: GPUError | None = None
) -> dict[str, Any]:
    return {
        "id": request.get("id") if isinstance(request, dict) else None,
        "ok": error is None,
        "state": state.value if state is not None else None,
        "elapsed_us": elapsed_us,
        "error": error_fields(error) if error is not None else None,
    }


def _perform(backend: Checkpointer, request: object) -> tuple[ProcessState | None, int]:
    if not isinstance(request, dict):
        raise TypeError("a request is a JSON object")
    operation = request.get("op")
    if operation not in OPERATIONS:
        raise ValueError(f"there is no operation {operation!r}; there are {', '.join(OPERATIONS)}")
    if operation == "ping":
        return None, 0
    timeout_ms, moves, deadline_s = _parameters(operation, request)
    named = request.get("target")
    if not isinstance(named, dict):
        raise TypeError(f"{operation} needs target, an object with boot_id, pid and start_time; got {named!r}")
    target = ProcessIdentity.from_dict(named)
    if _checked(target) is None:
        if operation == "state":
            return ProcessState.GONE, 0
        raise GPUError(GPUErrorCode.NO_SUCH_PROCESS, f"process {target.pid} is gone")
    began = time.monotonic_ns()
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        files.reach(f"worker.{operation}.before")
        state = _act(backend, operation, target.pid, timeout_ms, moves)
        files.reach(f"worker.{operation}.after")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return state, (time.monotonic_ns() - began) // 1000


def _act(
    backend: Checkpointer, operation: str, pid: int, timeout_ms: int, moves: Mapping[str, str] | None
) -> ProcessState | None:
    if operation == "state":
        return backend.state(pid)
    if operation == "lock":
        backend.lock(pid, timeout_ms)
    elif operation == "checkpoint":
        backend.checkpoint(pid)
    elif operation == "restore":
        backend.restore(pid, moves)
    else:
        backend.unlock(pid)
    return None


def _parameters(operation: str, request: dict[str, Any]) -> tuple[int, dict[str, str] | None, float]:
    """Return a lock's timeout, a restore's moves and the deadline in seconds (0: none)."""
    timeout_ms, moves, deadline_s = request.get("timeout_ms", 0), request.get("moves"), request.get("deadline_s", 0)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 <= deadline_s < 1e9:
        raise ValueError(f"deadline_s is a number of seconds; got {deadline_s!r}")
    if operation == "lock" and (not isinstance(timeout_ms, int) or isinstance(timeout_ms, bool) or timeout_ms < 0):
        raise ValueError(f"a lock needs timeout_ms, a whole number of milliseconds; got {timeout_ms!r}")
    if moves is not None and not (
        isinstance(moves, dict) and all(isinstance(text, str) for pair in moves.items() for text in pair)
    ):
        raise ValueError(f"moves map old device ids to new ones; got {moves!r}")
    return timeout_ms, moves, deadline_s


def _checked(target: ProcessIdentity) -> ProcessIdentity | None:
    """Return the identity if exactly this process lives, None if no process has the pid. Raises GPUError WRONG_IDENTITY."""
    try:
        found = identify(target.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise GPUError(GPUErrorCode.OPERATING_SYSTEM, f"process {target.pid} cannot be identified: {error}") from error
    if found != target:
        raise GPUError(
            GPUErrorCode.WRONG_IDENTITY,
            f"process {target.pid} is not the one that was meant: it started at tick {found.start_time} of boot "
            f"{found.boot_id}, meant was tick {target.start_time} of boot {target.boot_id}",
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
