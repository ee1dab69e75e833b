"""Controls other processes' simulated CUDA state. This is the `Checkpointer` for the simulated host.

It uses the same states and error codes as the driver. Restoring without enough device memory raises OUT_OF_MEMORY and permanently marks the
process as failed: later restores raise OPERATING_SYSTEM, and other operations raise ILLEGAL_STATE. A real failure, such as a full disk,
raises OPERATING_SYSTEM and leaves the process unchanged. Operations copy the bytes, commit, and then empty the source, so `settle` can undo
an operation that was killed.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.simulated.context import HELD, shut_gate
from fractional_gpu.gpu.simulated.device_memory import charge
from fractional_gpu.gpu.simulated.monitor import open_store, translated
from fractional_gpu.gpu.simulated.processes import (
    CLOSED,
    Process,
    current_key,
    find_process,
    open_gate,
    opened,
    operation_lock,
    processes_of,
    read_gate,
    reap,
    settle,
    settle_if_abandoned,
)
from fractional_gpu.gpu.simulated.store import MIB, Device

NEEDS: Final = {
    "lock": ProcessState.RUNNING,
    "checkpoint": ProcessState.LOCKED,
    "restore": ProcessState.CHECKPOINTED,
    "unlock": ProcessState.LOCKED,
}
_TURN_S: Final = 5.0  # how long an operation waits for another one on the same process
_CHUNK: Final = 8 << 20


class SimulatedCheckpointer:
    def __init__(self, directory: str | Path) -> None:
        self._store = open_store(directory)

    def close(self) -> None:
        self._store.close()

    @translated
    def state(self, pid: int) -> ProcessState:
        return self._state(pid)

    def lock(self, pid: int, timeout_ms: int) -> None:
        def act(process: Process) -> None:
            if not shut_gate(self._store, process.key, timeout_ms / 1000):
                raise GPUError(
                    GPUErrorCode.NOT_READY,
                    f"process {pid} is still working on the device after {timeout_ms} ms; it was left running",
                )

        self._run("lock", pid, act, turn_s=timeout_ms / 1000)

    def checkpoint(self, pid: int) -> None:
        self._run("checkpoint", pid, self._save)

    def restore(self, pid: int, moves: Mapping[str, str] | None = None) -> None:
        self._run("restore", pid, lambda process: self._bring_back(process, moves or {}))

    def unlock(self, pid: int) -> None:
        self._run("unlock", pid, lambda process: open_gate(self._store, process.key))

    def _state(self, pid: int) -> ProcessState:
        key = current_key(pid)
        if any(process.pid == pid and process.key != key for process in processes_of(self._store)):
            reap(self._store)
        if key is None:
            return ProcessState.GONE
        settle_if_abandoned(self._store, key)
        return self._state_of(key)

    def _state_of(self, key: str) -> ProcessState:
        process = find_process(self._store, key)
        if process is None:
            return ProcessState.NO_CONTEXT
        if process.phase == "device":
            try:
                gate = read_gate(self._store.process_folder(key))
            except FileNotFoundError:
                return ProcessState.NO_CONTEXT  # the process has just destroyed its context
            return ProcessState.LOCKED if gate == CLOSED else ProcessState.RUNNING
        return {
            "saving": ProcessState.CHECKPOINTING,
            "saved": ProcessState.CHECKPOINTED,
            "restoring": ProcessState.RESTORING,
            "failed": ProcessState.FAILED,
        }[process.phase]

    @translated
    def _run(self, operation: str, pid: int, act: Callable[[Process], None], turn_s: float = _TURN_S) -> None:
        key = current_key(pid) or ""
        if find_process(self._store, key) is None:
            self._refuse(operation, pid, self._state(pid))
        try:
            with operation_lock(self._store.process_folder(key), turn_s) as mine:
                if not mine:
                    code = GPUErrorCode.NOT_READY if operation == "lock" else GPUErrorCode.ILLEGAL_STATE
                    raise GPUError(code, f"another operation on process {pid} is in progress")
                settle(self._store, key)
                process = find_process(self._store, key)
                if process is None:
                    raise GPUError(
                        GPUErrorCode.NO_SUCH_PROCESS, "the process ended its context or died in the meantime"
                    )
                if process.phase != "saved" and self._store.device(process.device).lost:
                    raise GPUError(GPUErrorCode.DEVICE_LOST, f"the simulated device {process.device} is lost")
                self._refuse(operation, pid, self._state_of(key))
                act(process)
        except FileNotFoundError:
            # The folder is gone, so the process has died or destroyed its context.
            self._refuse(operation, pid, self._state(pid))
            raise

    def _refuse(self, operation: str, pid: int, state: ProcessState) -> None:
        if state is (needed := NEEDS[operation]):
            return
        code = GPUErrorCode.ILLEGAL_STATE
        if state is ProcessState.GONE:
            code = GPUErrorCode.NO_SUCH_PROCESS
        elif state is ProcessState.NO_CONTEXT:
            code = GPUErrorCode.NOT_INITIALIZED
        elif state is ProcessState.FAILED and operation == "restore":
            code = GPUErrorCode.OPERATING_SYSTEM
        raise GPUError(code, f"cannot {operation} process {pid}: its state is {state}, but it must be {needed}")

    def _save(self, process: Process) -> None:
        self._change(process.key, "phase='device'", "phase='saving'")
        try:
            self._copy_all(process.key, "device", "saved", charged_to=process.pid if self._store.shared else None)
            self._change(process.key, "phase='saving'", "phase='saved'")
        finally:
            # If the change was committed, this empties the device files. Otherwise, it removes the copies.
            settle(self._store, process.key)

    def _bring_back(self, process: Process, moves: Mapping[str, str]) -> None:
        self._reserve(process, self._target(process, moves))
        try:
            self._copy_all(process.key, "saved", "device")
            self._change(process.key, "phase='restoring'", "phase='device', device=target, target=NULL")
        finally:
            settle(self._store, process.key)

    def _copy_all(self, key: str, source: str, target: str, *, charged_to: int | None = None) -> None:
        folder = self._store.process_folder(key)
        sizes = self._store.query("SELECT id, bytes FROM allocations WHERE process=?", key)
        needed = sum((folder / f"{number}.{source}").stat().st_blocks * 512 for number, _ in sizes)
        available = self._store.available_bytes()
        if needed > available:
            raise OSError(
                f"moving {needed / MIB:.0f} MiB needs that much free memory, but only {available / MIB:.0f} MiB is left"
            )
        for number, size in sizes:
            _copy(folder / f"{number}.{source}", folder / f"{number}.{target}", size, charged_to=charged_to)

    def _target(self, process: Process, moves: Mapping[str, str]) -> Device:
        for old, new in moves.items():
            self._store.device(old)
            self._store.device(new)
        source = self._store.device(process.device)
        target = self._store.device(moves.get(process.device, process.device))
        if target.name != source.name:
            raise GPUError(GPUErrorCode.NOT_SUPPORTED, f"{source.name} and {target.name} are different models")
        if target.lost:
            raise GPUError(GPUErrorCode.DEVICE_LOST, f"the simulated device {target.device_id} is lost")
        return target

    def _reserve(self, process: Process, target: Device) -> None:
        """Reserve memory on the target device. If there isn't enough, mark the process as permanently failed, as the driver does."""
        reap(self._store)
        with self._store.transaction() as db:
            used = int(db.execute(HELD, (target.device_id,)).fetchone()[0])
            fits = used + process.n_bytes <= target.memory_mib * MIB
            if fits:
                done = db.execute(
                    "UPDATE processes SET phase='restoring', target=? WHERE key=? AND phase='saved'",
                    (target.device_id, process.key),
                )
            else:
                fatal = (
                    f"restoring this process's memory failed: {process.n_bytes / MIB:.0f} MiB did not fit onto {target.name}, "
                    f"where {used / MIB:.0f} MiB was in use; its state is lost: restart the kernel"
                )
                done = db.execute("UPDATE processes SET phase='failed', fatal=? WHERE key=?", (fatal, process.key))
            _check_changed(db, process.key, done.rowcount)
        if not fits:
            raise GPUError(GPUErrorCode.OUT_OF_MEMORY, f"process {process.pid}: {fatal}")

    def _change(self, key: str, before: str, after: str) -> None:
        with self._store.transaction() as db:
            done = db.execute(f"UPDATE processes SET {after} WHERE key=? AND {before}", (key,))  # noqa: S608 - constants
            _check_changed(db, key, done.rowcount)


def _check_changed(db: sqlite3.Connection, key: str, rows: int) -> None:
    if rows > 0:
        return
    if db.execute("SELECT 1 FROM processes WHERE key=?", (key,)).fetchone() is None:
        raise GPUError(GPUErrorCode.NO_SUCH_PROCESS, "the process died or ended its context during the operation")
    raise GPUError(GPUErrorCode.DEVICE_LOST, "the process's device was lost during the operation")


def _copy(source: Path, target: Path, size: int, *, charged_to: int | None = None) -> None:
    """Copy a file, preserving its holes. Charge the memory to the control group of process `charged_to`, or to our own if that is None."""
    with (
        opened(source.parent, source.name, os.O_RDONLY) as reading,
        opened(target.parent, target.name, os.O_WRONLY | os.O_CREAT) as writing,
    ):
        os.ftruncate(writing, 0)
        if charged_to is not None:
            charge(charged_to, writing, list(_extents(reading, size)))
        for start, hole in _extents(reading, size):
            position = os.lseek(writing, start, os.SEEK_SET)
            while position < hole:
                moved = os.sendfile(writing, reading, position, min(_CHUNK, hole - position))
                if moved == 0:
                    raise OSError("device memory is shorter than recorded")
                position += moved
        os.ftruncate(writing, size)


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each stretch of data. Searches for each hole only once, because a search visits every page."""
    hole = 0
    while hole < size:
        try:
            start = os.lseek(descriptor, hole, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # the rest of the file is a hole
        if start >= size:
            return
        hole = min(size, os.lseek(descriptor, start, os.SEEK_HOLE))
        yield start, hole
