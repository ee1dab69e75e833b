"""Provides a small CUDA-like API for the simulated GPU, for use in notebooks. It uses only the standard library.

from fractional_gpu.gpu.simulated import cuda
with cuda.allocate(64 << 20) as buffer:
    buffer.fill(b"abc")
    cuda.launch(0.5, utilisation=0.3)
    print(buffer.read(6), cuda.memory_info())

The first use creates the process's context on device JUPYTER_GPU_SIMULATED_DEVICE of the host in JUPYTER_GPU_SIMULATED_DIR. A forked child
has its own context and cannot use its parent's buffers. Every call blocks while the process is locked or checkpointed. Unlike with the real
driver, KeyboardInterrupt ends this wait in the main thread. Calls raise SimulatedCudaError if the device or the process has failed, and
SimulatedOutOfMemory if there is not enough memory.
"""

import atexit
import errno
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Final, Self

from fractional_gpu.gpu.simulated.context import Context, SimulatedCudaError, SimulatedOutOfMemory
from fractional_gpu.gpu.simulated.load import WHOLE
from fractional_gpu.gpu.simulated.store import Device

__all__ = [
    "Buffer",
    "Device",
    "SimulatedCudaError",
    "SimulatedOutOfMemory",
    "allocate",
    "device",
    "is_available",
    "launch",
    "memory_info",
    "reset",
]


_CHUNK: Final = 4 << 20
_SLICE_S: Final = 0.05

_lock = threading.Lock()
_context: Context | None = None
# The contexts of the parent process. After a fork we must not even close their databases.
_parents: list[Context] = []


class Buffer:
    """Device memory owned by this process. It is freed by `free`, at the end of a `with` block, or when no references to it are left."""

    def __init__(self, context: Context, number: int, n_bytes: int) -> None:
        self._context = context
        self._number: int | None = number
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"<Buffer of {self.n_bytes} bytes{'' if self._number is not None else ', freed'}>"

    def __len__(self) -> int:
        return self.n_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.free()

    def __del__(self) -> None:
        context, number = self._context, self._number
        if number is None or context is not _context:
            return  # already freed, or the context has ended, or the buffer belongs to the parent process
        # Never wait, because garbage collection may run at any point, even during another call.
        context.discarded.append(number)
        with context.gate.call_now() as inside:
            if inside and context.store.free_for_finalizer():
                context.free_discarded()

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy `data`, which must support the buffer protocol, to the device. Raises ValueError if it does not fit."""
        view = memoryview(data).cast("B")
        self._check_range(len(view), offset)
        with self._mine().gate.call():
            self._write(view, offset)

    def read(self, n_bytes: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes from the device. By default, copy everything from `offset` on. Raises ValueError if the range exceeds the buffer."""
        length = self.n_bytes - offset if n_bytes is None else n_bytes
        self._check_range(length, offset)
        with self._mine().gate.call(), self._path().open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:
            raise SimulatedCudaError("device memory is shorter than the buffer: this is a bug")
        return data

    def fill(self, pattern: bytes) -> None:
        """Fill the whole buffer by repeating `pattern`, in a single call."""
        if not pattern:
            raise ValueError("cannot fill with an empty pattern; give at least one byte")
        block = pattern * max(1, min(_CHUNK, self.n_bytes) // len(pattern))
        with self._mine().gate.call(), self._context.working():
            for offset in range(0, self.n_bytes, len(block)):
                self._write(memoryview(block)[: self.n_bytes - offset], offset)

    def sha256(self) -> str:
        with self._mine().gate.call(), self._path().open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def free(self) -> None:
        if self._number is None:
            return
        context = self._mine()
        with context.gate.call():
            context.free([self._number])
            self._number = None

    def _mine(self) -> Context:
        if self._number is None:
            raise SimulatedCudaError("this buffer has been freed")
        if self._context is not _context:
            raise SimulatedCudaError(
                f"this buffer belongs to another context, of process {self._context.pid}: allocate a new one "
                "(device memory is not shared with forked children and does not outlive reset())"
            )
        return self._context

    def _path(self) -> Path:
        return self._context.path(self._number or 0)

    def _check_range(self, length: int, offset: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.n_bytes:
            raise ValueError(f"bytes {offset} to {offset + length} are outside this buffer of {self.n_bytes} bytes")

    def _write(self, view: memoryview, offset: int) -> None:
        try:
            with self._path().open("r+b") as file:
                file.seek(offset)
                file.write(view)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise SimulatedCudaError(
                f"not enough space in {self._context.store.directory} for the simulated GPU's memory: "
                "free some space there, or start the broker with a smaller --simulate"
            ) from error


def is_available() -> bool:
    """Return whether this process is bound to a simulated device. This only reads the environment and creates no context."""
    return bool(os.environ.get("JUPYTER_GPU_SIMULATED_DIR") and os.environ.get("JUPYTER_GPU_SIMULATED_DEVICE"))


def device() -> Device:
    """Return the device the process is currently using. A resume can move the process to another one."""
    context = _current()
    with context.gate.call():
        return context.device()


def allocate(n_bytes: int) -> Buffer:
    """Allocate zeroed device memory. Raises SimulatedOutOfMemory; its message says whether the device, the cap or the machine is full."""
    if not isinstance(n_bytes, int) or isinstance(n_bytes, bool) or n_bytes < 1:
        raise ValueError(f"cannot allocate {n_bytes!r} bytes; give a whole number, 1 or more")
    context = _current()
    with context.gate.call():
        context.free_discarded()
        return Buffer(context, context.allocate(n_bytes), n_bytes)


def launch(seconds: float, utilisation: float = 1.0) -> None:
    """Keep the device busy and wait for the work to finish, which takes `seconds`, or longer if other work slows it down.

    `utilisation` is the fraction of the device that the work uses. If the fractions of all work on a device add up to more than 1, all work
    slows down (see `load`). The process cannot be locked until its work has finished.
    """
    if not seconds >= 0:
        raise ValueError(f"cannot launch work for {seconds!r} seconds; give a number, 0 or more")
    if not 0 < utilisation <= 1:
        raise ValueError(
            f"cannot launch work that uses {utilisation!r} of the device; give a number above 0 and at most 1"
        )
    context = _current()
    with context.gate.call(), context.working(seconds, max(1, round(utilisation * WHOLE))) as work:
        while (left_s := work.left_s) > 0:
            time.sleep(min(left_s, _SLICE_S))
            context.share_again()


def memory_info() -> tuple[int, int]:
    """Return the device's free and total memory in bytes. As in CUDA, this counts all processes' memory and ignores our cap."""
    context = _current()
    with context.gate.call():
        context.free_discarded()
        return context.memory_info()


def reset() -> None:
    """Destroy this process's context and buffers, if it has a context."""
    global _context
    with _lock:
        context, _context = _context, None
    if context is not None:
        context.destroy()


def _current() -> Context:
    global _context  # noqa: PLW0603 (a process has one context, as in CUDA)
    context = _context
    if context is not None:
        return context
    with _lock:
        if _context is None:
            _context = Context()
        return _context


def _after_fork() -> None:
    global _context, _lock  # noqa: PLW0603 (the parent's context is not usable here, and its lock may be held by a thread that does not exist here)
    _lock = threading.Lock()
    if _context is not None:
        _parents.append(_context)
        _context = None


os.register_at_fork(after_in_child=_after_fork)
atexit.register(reset)
