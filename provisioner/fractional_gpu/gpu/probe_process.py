"""Runs as a child process that uses some device memory, to try out checkpoints and memory limits (`checkpoint_trial`, `limit_trial`).

python -P -m fractional_gpu.gpu.probe_process nvidia|simulated [GROUP]

If GROUP (a control group's folder) is given, the process first joins that group. It then allocates and fills device memory and prints
`ready`, or a line that starts with `failed`. It responds to each line on standard input:

- `grow`: allocates the same amount again and prints `grown` or `full`;
- `size`: prints the size of the device memory it sees, in MiB;
- any other line: reads the device memory back and prints `intact` or `changed`.

It exits at the end of the input. It makes no CUDA calls between lines, so a lock does not block it. It drops environment variables that
affect the driver, because the result of the trial should not depend on the broker's environment.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fractional_gpu.gpu import driver_environment

MEMORY_MIB: Final = 64
_BYTES: Final = MEMORY_MIB << 20
_OUT_OF_MEMORY: Final = 2
_PATTERN: Final = b"\xa5\x5a\x3c\xc3"


def main(arguments: list[str]) -> int:
    """Run the probe and return its exit status: 0 at the end of input, 1 if it can't allocate device memory, 2 for invalid arguments."""
    known = {"nvidia": hold_nvidia, "simulated": hold_simulated}
    opened = known.get(arguments[0]) if len(arguments) in (1, 2) else None
    if opened is None:
        sys.stderr.write("usage: python -P -m fractional_gpu.gpu.probe_process nvidia|simulated [GROUP]\n")
        return 2
    for group in arguments[1:]:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    driver_environment.clean(os.environ, keep=("CUDA_VISIBLE_DEVICES",))
    try:
        memory = opened()
    except (RuntimeError, ImportError) as error:
        _say(f"failed: {' '.join(str(error).split())}")
        return 1
    _say("ready")
    for line in sys.stdin:
        _say(_answer(memory, line.strip()))
    return 0


@dataclass(frozen=True)
class Memory:
    """The probe process's device memory. `grow` allocates more and returns whether that worked. `size` returns its size in bytes."""

    read: Callable[[], bytes]
    grow: Callable[[], bool] = lambda: False
    size: Callable[[], int] = lambda: 0


def _answer(memory: Memory, line: str) -> str:
    if line == "grow":
        return "grown" if memory.grow() else "full"
    if line == "size":
        return str(memory.size() >> 20)
    return "intact" if memory.read() == _PATTERN * (_BYTES // len(_PATTERN)) else "changed"


def hold_simulated() -> Memory:
    cuda = importlib.import_module("fractional_gpu.gpu.simulated.cuda")
    buffer = cuda.allocate(_BYTES)
    buffer.fill(_PATTERN)
    return Memory(lambda: bytes(buffer.read()))


def hold_nvidia(driver: Any = None) -> Memory:  # noqa: ANN401 - the bindings have no types
    cuda = importlib.import_module("cuda.bindings.driver") if driver is None else driver

    def do(call: str, *given: object) -> Any:  # noqa: ANN401 - any result of this call
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

    def grow() -> bool:
        result, _ = cuda.cuMemAlloc(_BYTES)
        if int(result) not in (0, _OUT_OF_MEMORY):
            raise RuntimeError(f"cuMemAlloc returned {getattr(result, 'name', result)} ({int(result)})")
        return int(result) == 0

    def size() -> int:
        result, _, total = cuda.cuMemGetInfo()
        return int(total) if int(result) == 0 else 0

    return Memory(read, grow, size)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
