"""Implements a simulated process: its gate, context and allocations. This module uses only the standard library.

A device's contexts and allocations never add up to more than its memory, because each is checked in the same transaction that records it.
Before refusing an allocation, the process releases dead processes' memory. A process shares its cap (JUPYTER_GPU_MEMORY_MIB) with all other
processes of its lease (JUPYTER_GPU_LEASE) on the device. Allocations are also refused if the machine has too little real memory for them.
"""

import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.simulated.device_memory import reserve
from fractional_gpu.gpu.simulated.load import WHOLE, Load, Piece
from fractional_gpu.gpu.simulated.processes import (
    CLOSED,
    ON_DEVICE,
    OPEN,
    WANTED,
    WORK,
    Process,
    find_process,
    forget,
    lock_file,
    open_gate,
    opened,
    operation_lock,
    own_key,
    reap,
    settle_if_abandoned,
    write_gate,
)
from fractional_gpu.gpu.simulated.store import MIB, Device, SimulatedHostError, Store

# The gate: while calls are in flight, the process holds a shared lock on the gate's file. A lock operation first sets the byte to WANTED,
# so that no new call begins, and then waits for the exclusive lock. The kernel releases the lock of a killed process. A file lock has no
# counter, so this class keeps the set of threads that are inside a call. If an interrupt prevents a thread from leaving the set, the end of
# its next call removes it.


_FIRST_POLL_S: Final = 0.001
_LAST_POLL_S: Final = 0.02
_LOOK_EVERY_S: Final = 0.1
_GONE: Final = "this process's simulated context is gone: restart the kernel"


class SimulatedCudaError(RuntimeError):
    pass


class SimulatedOutOfMemory(SimulatedCudaError, MemoryError):  # noqa: N818 (named as the frameworks name theirs)
    """The device, the process's cap or the host has run out of memory. The message says which."""


class Gate:
    """This process's gate, which holds back its GPU calls while it is locked or checkpointed."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._file = os.open(store.process_folder(key) / "gate", os.O_RDONLY | os.O_CLOEXEC)
        self._mutex = threading.Lock()
        self._inside: set[int] = set()  # threads with a call in flight; while there are any, we hold the file lock

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run the block as a GPU call. If the process is locked or checkpointed, wait first. A thread must not nest calls.

        Raises SimulatedCudaError if the process has failed, and KeyboardInterrupt if the main thread is interrupted while waiting.
        """
        thread = threading.get_ident()
        try:
            if not self._enter(thread):
                try:
                    self._wait(thread)
                except KeyboardInterrupt:
                    raise _interrupted() from None
            yield
        finally:
            # An interrupt can arrive just as `_leave` begins. A lock that is left behind would block every suspend, so leave again.
            try:
                self._leave(thread)
            except KeyboardInterrupt:
                self._leave(thread)
                raise

    @contextmanager
    def call_now(self) -> Iterator[bool]:
        """Like `call`, but yield False instead of waiting. This is for finalizers, which can run during another call."""
        thread = threading.get_ident()
        if self._mutex.locked() or thread in self._inside:
            yield False
            return
        try:
            yield self._enter(thread)
        finally:
            self._leave(thread)

    def close(self) -> None:
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
                # Look again under the lock, because another process may have closed the gate and released the lock in between.
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
        pause, next_look = _FIRST_POLL_S, time.monotonic()
        while not self._enter(thread):
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _LOOK_EVERY_S
            time.sleep(pause)
            pause = min(_LAST_POLL_S, pause * 1.5)

    def _look(self) -> None:
        """Raise an error if this process has failed. Undo a pending lock operation if the process performing it has died."""
        _living(self._store, self._key)
        if os.pread(self._file, 1, 0) == WANTED:
            settle_if_abandoned(self._store, self._key)


def _living(store: Store, key: str) -> Process:
    process = find_process(store, key)
    if process is None:
        raise SimulatedCudaError(_GONE)
    if process.phase == "failed":
        raise SimulatedCudaError(process.fatal)
    return process


def _interrupted() -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that IPython shows as a single sentence, without a traceback through this module."""
    error = KeyboardInterrupt("interrupted while it waited for the GPU; the cell ended at this call")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]  # type: ignore[attr-defined]
    return error


def shut_gate(store: Store, key: str, timeout_s: float) -> bool:
    """Hold back new calls and wait for those in flight. If they do not finish in time, reopen the gate and return False.

    The caller must hold the operation lock. Raises FileNotFoundError if the process was reaped.
    """
    folder = store.process_folder(key)
    shut = False
    with opened(folder, "gate", os.O_RDONLY) as descriptor:
        try:
            write_gate(folder, WANTED)
            shut = lock_file(descriptor, fcntl.LOCK_EX, timeout_s)
        finally:
            # Write the byte first, because closing the descriptor releases the file lock.
            if shut:
                write_gate(folder, CLOSED)
            else:
                open_gate(store, key)
    return shut


CONTEXT_MIB: Final = 32
HELD: Final = f"SELECT COALESCE(SUM(bytes), 0) FROM processes WHERE {ON_DEVICE}"  # noqa: S608
_UNSET: Final = "start the kernel through a broker with --simulate, or set it yourself"


class _NoRoom(Exception):  # noqa: N818 (this only tells the caller to reap dead processes and try again)
    pass


def memory_cap_bytes() -> int | None:
    """Return this process tree's current memory cap in bytes, or None if it has none. The cap can grow while the process runs."""
    text = os.environ.get("JUPYTER_GPU_MEMORY_MIB", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise SimulatedCudaError(
            f"JUPYTER_GPU_MEMORY_MIB={text!r} is not a memory cap; give a whole number of MiB, 1 or more"
        )
    return int(text) * MIB


def _environment() -> tuple[str, str]:
    directory = os.environ.get("JUPYTER_GPU_SIMULATED_DIR", "")
    device = os.environ.get("JUPYTER_GPU_SIMULATED_DEVICE", "")
    if not directory:
        raise SimulatedCudaError(f"no simulated GPU: JUPYTER_GPU_SIMULATED_DIR is not set; {_UNSET}")
    if not device:
        raise SimulatedCudaError(
            "no simulated GPU yet: JUPYTER_GPU_SIMULATED_DEVICE is not set; it is set when the kernel gets a GPU, before a cell that "
            "may use one"
        )
    return directory, device.split(",")[0]  # as in CUDA, a process starts on the first device


class Context:
    def __init__(self) -> None:
        directory, wanted = _environment()
        self.pid = os.getpid()
        self.lease = os.environ.get("JUPYTER_GPU_LEASE", "")
        try:
            self.store = Store(directory)
        except SimulatedHostError as error:
            raise SimulatedCudaError(str(error)) from error
        self._begun = False
        try:
            self.key = own_key(self.store)
            device = self.store.device(wanted)
            context_bytes = CONTEXT_MIB * MIB
            self._admitted(context_bytes, device.device_id, lambda db: self._begin(db, device, context_bytes))
            self.gate = Gate(self.store, self.key)
            self.load = Load(self.store, self.key)
        except sqlite3.IntegrityError:
            self.store.close()
            raise SimulatedCudaError(
                "this process already has a simulated context, made by another copy of this module or about to end: "
                "restart the kernel"
            ) from None
        except BaseException as error:
            if self._begun:
                forget(self.store, [self.key])
            self.store.close()
            if isinstance(error, SimulatedHostError):
                raise SimulatedCudaError(str(error)) from error
            raise
        self.discarded: deque[int] = deque()  # allocations whose buffers were garbage-collected while the gate was shut

    def _begin(self, db: sqlite3.Connection, device: Device, context_bytes: int) -> None:
        db.execute(
            "INSERT INTO processes (key, pid, lease, device, phase, bytes) VALUES (?, ?, ?, ?, 'device', ?)",
            (self.key, self.pid, self.lease, device.device_id, context_bytes),
        )
        self._begun = True
        folder = self.folder
        folder.mkdir(mode=0o700)
        if self.store.shared:
            folder.chmod(0o711)  # other users' processes read this process's load file
        (folder / "operation").touch(mode=0o600)
        (folder / "gate").touch(mode=0o600)
        (folder / "gate").write_bytes(OPEN)
        (folder / WORK).touch(mode=0o600)
        os.utime(folder / WORK, ns=(0, 0))

    @property
    def folder(self) -> Path:
        return self.store.process_folder(self.key)

    def device(self) -> Device:
        return self.store.device(_living(self.store, self.key).device)

    def memory_info(self) -> tuple[int, int]:
        """Return the device's free and total memory in bytes, ignoring the process's own cap."""
        device = self.device()
        total = device.memory_mib * MIB
        return total - int(self.store.query(HELD, device.device_id)[0][0]), total

    def allocate(self, n_bytes: int) -> int:
        """Allocate memory and return the allocation's number. Raises SimulatedOutOfMemory. Use this only inside `Gate.call`."""
        self._check_host(n_bytes)
        added = 0

        def record(db: sqlite3.Connection) -> None:
            nonlocal added
            cursor = db.execute("INSERT INTO allocations (process, bytes) VALUES (?, ?)", (self.key, n_bytes))
            added = int(cursor.lastrowid or 0)
            db.execute("UPDATE processes SET bytes = bytes + ? WHERE key=?", (n_bytes, self.key))
            self.path(added).touch(mode=0o600, exist_ok=False)
            os.truncate(self.path(added), n_bytes)

        self._admitted(n_bytes, None, record)
        if self.store.shared:
            try:
                reserve(self.store.directory, self.path(added))  # charges the pages to the host
            except OSError as error:
                self.free([added])
                raise SimulatedOutOfMemory(
                    f"this machine cannot hold the contents of the simulated GPU: {error}; allocate less"
                ) from error
        return added

    def free(self, numbers: list[int]) -> None:
        """Free these allocations, ignoring any that are already free. Use this only inside `Gate.call`."""
        for number in numbers:
            with self.store.transaction() as db:
                row = db.execute(
                    "SELECT bytes FROM allocations WHERE id=? AND process=?", (number, self.key)
                ).fetchone()
                if row is not None:
                    db.execute("DELETE FROM allocations WHERE id=?", (number,))
                    db.execute("UPDATE processes SET bytes = bytes - ? WHERE key=?", (row[0], self.key))
            self.path(number).unlink(missing_ok=True)

    def free_discarded(self) -> None:
        while self.discarded:
            self.free([self.discarded.popleft()])

    def path(self, number: int) -> Path:
        return self.folder / f"{number}.device"

    @contextmanager
    def working(self, seconds: float | None = None, milli: int = WHOLE) -> Iterator[Piece]:
        """Mark this process as working on the device during the block. Use this only inside `Gate.call`.

        `seconds` is how long the work takes if no other work slows it down, or None if unknown. `milli` is how much of the device the work
        uses, in thousandths.
        """
        piece = self.load.begin(seconds, milli, _living(self.store, self.key).device)
        try:
            yield piece
        finally:
            self.load.end(piece)

    def share_again(self) -> None:
        self.load.share_again(_living(self.store, self.key).device)

    def destroy(self) -> None:
        """Release the context and all its memory. If an operation on the process is running, leave this to another process (see `reap`)."""
        try:
            self.load.close()  # before `forget` moves the folder away
            with operation_lock(self.folder) as mine:
                if mine:
                    forget(self.store, [self.key])
        except FileNotFoundError:
            return  # the host was removed together with this context
        finally:
            self.gate.close()
            self.store.close()

    def _admitted(self, n_bytes: int, device: str | None, record: Callable[[sqlite3.Connection], None]) -> None:
        cap = memory_cap_bytes()
        for attempt in range(2):
            try:
                with self.store.transaction() as db:
                    self._check_room(db, n_bytes, device, cap)
                    record(db)
            except _NoRoom as refusal:
                if attempt:
                    raise SimulatedOutOfMemory(str(refusal)) from None
                reap(self.store)
            else:
                return

    def _check_room(self, db: sqlite3.Connection, n_bytes: int, device: str | None, cap: int | None) -> None:
        if device is None:
            row = db.execute("SELECT device, phase, fatal FROM processes WHERE key=?", (self.key,)).fetchone()
            if row is None or row[1] != "device":
                raise SimulatedCudaError(row[2] if row else _GONE)
            device = str(row[0])
        name, memory_mib, lost = db.execute(
            "SELECT name, memory_mib, lost FROM devices WHERE id=?", (device,)
        ).fetchone()
        if lost:
            raise SimulatedCudaError(
                f"the device {device} ({name}) is lost: wait until an administrator has returned it"
            )
        if cap is not None:
            self._check_cap(db, n_bytes, device, cap)
        used, total = int(db.execute(HELD, (device,)).fetchone()[0]), memory_mib * MIB
        if used + n_bytes > total:
            raise _NoRoom(
                f"out of memory on {name}: tried to allocate {_mib(n_bytes)}, but {_mib(total - used)} of {_mib(total)} are free; free "
                "some memory, or allocate less"
            )

    def _check_cap(self, db: sqlite3.Connection, n_bytes: int, device: str, cap: int) -> None:
        mine = "SELECT COALESCE(SUM(bytes), 0) FROM processes WHERE phase != 'failed' AND device=? AND "
        by, value = ("lease=?", self.lease) if self.lease else ("key=?", self.key)
        used = int(db.execute(mine + by, (device, value)).fetchone()[0])
        if used + n_bytes > cap:
            raise _NoRoom(
                f"out of memory: tried to allocate {_mib(n_bytes)}, but this kernel holds {_mib(used)} of its cap of {_mib(cap)} "
                "(JUPYTER_GPU_MEMORY_MIB); free some memory, or get a larger share with %gpu resize"
            )

    def _check_host(self, n_bytes: int) -> None:
        available = self.store.available_bytes()
        # Make a quick and overcautious check first, because this runs at every allocation.
        if n_bytes + int(self.store.query("SELECT COALESCE(SUM(bytes), 0) FROM processes")[0][0]) <= available:
            return
        declared = int(self.store.query("SELECT COALESCE(SUM(bytes), 0) FROM allocations")[0][0])
        # Files have holes until they are written, so only the bytes that are not yet written need room.
        written = sum(file.stat().st_blocks * 512 for file in self.store.memory.glob("*/*.device"))
        if n_bytes + max(0, declared - written) > available:
            raise SimulatedOutOfMemory(
                f"this machine has too little memory for the simulated GPU: tried to allocate {_mib(n_bytes)}, but there is room for "
                f"{_mib(max(0, available))} more; allocate less, or start the broker with a smaller --simulate"
            )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.1f}".removesuffix(".0") + " MiB"
