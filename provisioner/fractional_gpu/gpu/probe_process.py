"""A child process with a little device memory, for trying checkpoints (see `checkpoint_trial`).

python -P -m fractional_gpu.gpu.probe_process nvidia|simulated

It prints `ready` when it has filled its memory, or one line that begins with `failed`. For each line on standard input it reads its
memory back and prints `intact` or `changed`; it exits at end of input. In between it makes no CUDA call, so a lock does not block it.
It drops variables that change the driver: the trial is about the machine, not the broker's environment.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from fractional_gpu.gpu import driver_environment

MEMORY_MIB: Final = 64
_BYTES: Final = MEMORY_MIB << 20
_PATTERN: Final = b"\xa5\x5a\x3c\xc3"


def main(arguments: list[str]) -> int:
    """Return 1 if it gets no device memory, 2 for bad arguments."""
    opened = {"nvidia": hold_nvidia, "simulated": hold_simulated}.get(arguments[0] if len(arguments) == 1 else "")
    if opened is None:
        sys.stderr.write("usage: python -P -m fractional_gpu.gpu.probe_process nvidia|simulated\n")
        return 2
    driver_environment.clean(os.environ, keep=("CUDA_VISIBLE_DEVICES",))
    try:
        read = opened()
    except (RuntimeError, ImportError) as error:
        _say(f"failed: {' '.join(str(error).split())}")
        return 1
    _say("ready")
    for _ in sys.stdin:
        _say("intact" if read() == _PATTERN * (_BYTES // len(_PATTERN)) else "changed")
    return 0


def hold_simulated() -> Callable[[], bytes]:
    cuda = importlib.import_module("fractional_gpu.gpu.simulated.cuda")
    buffer = cuda.allocate(_BYTES)
    buffer.fill(_PATTERN)
    return lambda: bytes(buffer.read())


def hold_nvidia(driver: Any = None) -> Callable[[], bytes]:  # noqa: ANN401 - the bindings have no types
    cuda = importlib.import_module("cuda.bindings.driver") if driver is None else driver

    def do(call: str, *given: object) -> Any:  # noqa: ANN401 - whatever this call of the driver gives
        result, *values = getattr(cuda, call)(*given)
        if int(result) != 0:
            raise RuntimeError(f"{call} gave {getattr(result, 'name', result)} ({int(result)})")
        return values[0] if values else None

    do("cuInit", 0)
    do("cuCtxSetCurrent", do("cuDevicePrimaryCtxRetain", do("cuDeviceGet", 0)))
    pointer = do("cuMemAlloc", _BYTES)
    do("cuMemsetD32", pointer, int.from_bytes(_PATTERN, "little"), _BYTES // len(_PATTERN))
    do("cuCtxSynchronize")

    def read() -> bytes:
        host = ctypes.create_string_buffer(_BYTES)
        do("cuMemcpyDtoH", ctypes.addressof(host), pointer, _BYTES)
        return host.raw

    return read


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
