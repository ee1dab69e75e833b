"""The gate of a simulated process: its calls pass, or wait while it is locked or checkpointed.

Standard library only: notebooks import it.

The rules:
- A call in flight holds a shared lock on the gate's file. A lock operation first sets the byte to WANTED, so that no new
  call begins, then waits for the exclusive lock. The kernel drops the shared lock of a killed process.
- The file lock belongs to the process and has no count, so threads inside are counted here. If an interrupt takes a
  thread out of a call uncounted, its next call corrects the count.
- Waiting is interruptible in the main thread, unless the process is set to behave as with the driver, where SIGINT is
  delivered only after the call.
"""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from fractional_gpu.gpu.simulated.processes import (
    CLOSED,
    OPEN,
    WANTED,
    find_process,
    lock_file,
    open_gate,
    settle_if_abandoned,
    write_gate,
)
from fractional_gpu.gpu.simulated.store import Store

__all__ = ["Gate", "SimulatedCudaError", "SimulatedOutOfMemory", "shut_gate"]

_FIRST_POLL_S: Final = 0.001
_LAST_POLL_S: Final = 0.02
_LOOK_EVERY_S: Final = 0.1


class SimulatedCudaError(RuntimeError):
    """A call of the simulated GPU failed."""


class SimulatedOutOfMemory(SimulatedCudaError, MemoryError):  # noqa: N818 (named as the frameworks name theirs)
    """The device, the process's cap or the host has no room for the allocation; the message says which."""


class Gate:
    """The caller's side, one for each process with a context."""

    def __init__(self, store: Store, key: str, *, uninterruptible: bool) -> None:
        self._store = store
        self._key = key
        self._uninterruptible = uninterruptible
        self._file = os.open(store.process_folder(key) / "gate", os.O_RDONLY | os.O_CLOEXEC)
        self._mutex = threading.Lock()
        self._inside: set[int] = set()  # threads with a call in flight; the file lock is held while there is one

    @contextmanager
    def call(self) -> Iterator[None]:
        """Be a call in flight; waits while the process is locked or checkpointed. Not nested in one thread.

        Raises SimulatedCudaError when the process failed, KeyboardInterrupt while waiting in the main thread.
        """
        thread = threading.get_ident()
        try:
            if not self._enter(thread):
                self._wait(thread)
            yield
        finally:
            # An interrupt can come at the very entry of `_leave`. A lock that stays by mistake would block every suspend: leave again.
            try:
                self._leave(thread)
            except KeyboardInterrupt:
                self._leave(thread)
                raise

    @contextmanager
    def call_now(self) -> Iterator[bool]:
        """Be a call in flight if that needs no waiting (for finalizers, which may run in the middle of a call)."""
        thread = threading.get_ident()
        if self._mutex.locked() or thread in self._inside:
            yield False
            return
        try:
            yield self._enter(thread)
        finally:
            self._leave(thread)

    def close(self) -> None:
        """Close the file; the context has ended."""
        os.close(self._file)

    def _enter(self, thread: int) -> bool:
        with self._mutex:
            if os.pread(self._file, 1, 0) != OPEN:
                return False
            if not self._inside:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                if os.pread(self._file, 1, 0) != OPEN:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                    return False
            self._inside.add(thread)
            return True

    def _leave(self, thread: int) -> None:
        with self._mutex:
            self._inside.discard(thread)
            if not self._inside:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _wait(self, thread: int) -> None:
        hold_back = self._uninterruptible and threading.current_thread() is threading.main_thread()
        if not hold_back:
            self._wait_for_entry(thread)
            return
        held: list[int] = []

        def remember(number: int, _frame: FrameType | None) -> None:
            held.append(number)

        before = signal.signal(signal.SIGINT, remember)
        try:
            self._wait_for_entry(thread)
        finally:
            signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)

    def _wait_for_entry(self, thread: int) -> None:
        pause, next_look = _FIRST_POLL_S, time.monotonic()
        while not self._enter(thread):
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _LOOK_EVERY_S
            time.sleep(pause)
            pause = min(_LAST_POLL_S, pause * 1.5)

    def _look(self) -> None:
        """Raise if the process failed; undo a lock operation whose process died."""
        process = find_process(self._store, self._key)
        if process is None:
            raise SimulatedCudaError("this process's simulated context is gone: restart the kernel")
        if process.phase == "failed":
            raise SimulatedCudaError(process.fatal)
        if os.pread(self._file, 1, 0) == WANTED:
            settle_if_abandoned(self._store, self._key)


def shut_gate(store: Store, key: str, timeout_s: float) -> bool:
    """Hold new calls and wait for those in flight; False leaves the gate open. The caller holds the operation lock.

    Raises FileNotFoundError when the process was reaped.
    """
    folder = store.process_folder(key)
    descriptor = os.open(folder / "gate", os.O_RDONLY | os.O_CLOEXEC)
    shut = False
    try:
        write_gate(folder, WANTED)
        shut = lock_file(descriptor, fcntl.LOCK_EX, timeout_s)
    finally:
        # The byte first: closing the descriptor releases the file lock.
        if shut:
            write_gate(folder, CLOSED)
        else:
            open_gate(store, key)
        os.close(descriptor)
    return shut
