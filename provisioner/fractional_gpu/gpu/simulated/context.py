"""The context and the allocations of a simulated process, admitted exactly. Standard library only.

The rules:
- Contexts and allocations on a device together never exceed its memory: each is admitted in the transaction that
  records it, so two processes cannot both take the last room.
- A process under a cap (JUPYTER_GPU_MEMORY_MIB) shares it with all processes of its lease (JUPYTER_GPU_LEASE) on its device;
  a process without a lease has it for itself.
- A process is on one device, the first of those it is bound to. A lease of several devices has processes on each.
- Before a refusal, the memory of dead processes is released and the request is checked again.
- Contents must fit into the machine: an allocation that could not be filled with real bytes is refused at once.
"""

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.simulated.capacity import available_bytes
from fractional_gpu.gpu.simulated.gate import Gate, SimulatedCudaError, SimulatedOutOfMemory
from fractional_gpu.gpu.simulated.processes import (
    ON_DEVICE,
    OPEN,
    WORK,
    current_key,
    find_process,
    forget,
    operation_lock,
    reap,
)
from fractional_gpu.gpu.simulated.store import (
    MIB,
    Device,
    SimulatedHostError,
    Store,
)

__all__ = ["HELD", "Context", "memory_cap_bytes"]

HELD: Final = f"SELECT COALESCE(SUM(bytes), 0) FROM processes WHERE {ON_DEVICE}"  # noqa: S608
_HEADROOM: Final = 128 * MIB  # left to the machine
_UNSET: Final = "start the kernel through a broker with --simulate, or set it yourself"


class _NoRoom(Exception):  # noqa: N818 (a signal between two functions here: reap dead processes, then try again)
    """A request does not fit; the text says where."""


def memory_cap_bytes() -> int | None:
    """Return the cap of this process's tree now (it may grow while the process runs), None without one."""
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
            "no simulated GPU yet: JUPYTER_GPU_SIMULATED_DEVICE is not set; it comes with the grant of a GPU, "
            "before a cell that may use one"
        )
    return directory, device.split(",")[0]  # as in CUDA, a process begins on the first of several


class Context:
    """This process's context. Created at the first use of the device; ends with the process or `destroy`."""

    def __init__(self) -> None:
        directory, wanted = _environment()
        self.pid = os.getpid()
        key = current_key(self.pid)
        if key is None:
            raise SimulatedCudaError("this process cannot be found in /proc: the simulated GPU needs it mounted")
        self.key = key
        self.lease = os.environ.get("JUPYTER_GPU_LEASE", "")
        try:
            self.store = Store(directory)
        except SimulatedHostError as error:
            raise SimulatedCudaError(str(error)) from error
        self._begun = False
        try:
            device = self._find(wanted)
            context_bytes = self.store.settings().context_mib * MIB
            self._admitted(context_bytes, device.device_id, lambda db: self._begin(db, device, context_bytes))
            uninterruptible = os.environ.get("JUPYTER_GPU_SIMULATED_UNINTERRUPTIBLE", "") not in ("", "0")
            self.gate = Gate(self.store, key, uninterruptible=uninterruptible)
        except sqlite3.IntegrityError:
            self.store.close()
            raise SimulatedCudaError(
                "this process has a simulated context already, made by another copy of this module or about to end: "
                "restart the kernel"
            ) from None
        except BaseException:
            if self._begun:
                forget(self.store, [key])
            self.store.close()
            raise
        self._work = threading.Lock()
        self._ends: list[int] = []  # when the work of each thread ends, nanoseconds since the epoch
        self.discarded: deque[int] = deque()  # allocations whose buffer was collected while the process was held

    def _find(self, wanted: str) -> Device:
        devices = self.store.devices()
        for device in devices:
            if wanted in (device.device_id, str(device.index)):
                return device
        known = ", ".join(device.device_id for device in devices)
        raise SimulatedCudaError(
            f"there is no simulated device {wanted!r} in {self.store.directory}; there are: {known}"
        )

    def _begin(self, db: sqlite3.Connection, device: Device, context_bytes: int) -> None:
        db.execute(
            "INSERT INTO processes (key, pid, lease, device, phase, bytes) VALUES (?, ?, ?, ?, 'device', ?)",
            (self.key, self.pid, self.lease, device.device_id, context_bytes),
        )
        self._begun = True
        folder = self.folder
        folder.mkdir(mode=0o700)
        (folder / "operation").touch(mode=0o600)
        (folder / "gate").write_bytes(OPEN)
        (folder / WORK).touch(mode=0o600)
        os.utime(folder / WORK, ns=(0, 0))

    @property
    def folder(self) -> Path:
        """Where this process's memory lies."""
        return self.store.process_folder(self.key)

    def device(self) -> Device:
        """Return the device the process is on now; a restore may have moved it."""
        process = find_process(self.store, self.key)
        if process is None:
            raise SimulatedCudaError("this process's simulated context is gone: restart the kernel")
        return self._find(process.device)

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes of the device, without regard to the process's own cap."""
        device = self.device()
        total = device.memory_mib * MIB
        return total - int(self.store.query(HELD, device.device_id)[0][0]), total

    def allocate(self, n_bytes: int) -> int:
        """Admit an allocation and return its number. Raises SimulatedOutOfMemory. The caller is inside the gate."""
        self._check_host(n_bytes)
        added = 0

        def record(db: sqlite3.Connection) -> None:
            nonlocal added
            cursor = db.execute("INSERT INTO allocations (process, bytes) VALUES (?, ?)", (self.key, n_bytes))
            added = int(cursor.lastrowid or 0)
            db.execute("UPDATE processes SET bytes = bytes + ? WHERE key=?", (n_bytes, self.key))
            with self.path(added).open("xb") as file:
                file.truncate(n_bytes)

        self._admitted(n_bytes, None, record)
        return added

    def free(self, numbers: list[int]) -> None:
        """Free allocations; numbers that are freed already are ignored. The caller is inside the gate."""
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
        """Free the allocations of collected buffers. The caller is inside the gate."""
        while self.discarded:
            self.free([self.discarded.popleft()])

    def path(self, number: int) -> Path:
        """Return the file with the bytes of an allocation while it is on the device."""
        return self.folder / f"{number}.device"

    @contextmanager
    def working(self, seconds: float = 0.0) -> Iterator[None]:
        """Count as working on the device during the block, and for `seconds` if known. The caller is inside the gate."""
        end_ns = _since_boot_ns() + int(seconds * 1e9)
        with self._work:
            self._ends.append(end_ns)
            self._note_work()
        try:
            yield
        finally:
            with self._work:
                self._ends.remove(end_ns)
                self._note_work()

    def _note_work(self) -> None:
        end_ns = max(_since_boot_ns(), *self._ends, 0)
        with suppress(FileNotFoundError):  # the host was removed
            os.utime(self.folder / WORK, ns=(end_ns, end_ns))

    def destroy(self) -> None:
        """End the context and release everything, unless an operation moves it now (then it is reaped later)."""
        try:
            with operation_lock(self.folder) as mine:
                if mine:
                    forget(self.store, [self.key])
        except FileNotFoundError:
            return  # the whole host was removed, and with it this context
        finally:
            self.gate.close()
            self.store.close()

    def _admitted(self, n_bytes: int, device: str | None, record: Callable[[sqlite3.Connection], None]) -> None:
        """Check the room and `record`, in one transaction; after a refusal reap dead processes and try once more."""
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
                raise SimulatedCudaError(
                    row[2] if row else "this process's simulated context is gone: restart the kernel"
                )
            device = str(row[0])
        name, memory_mib, lost = db.execute(
            "SELECT name, memory_mib, lost FROM devices WHERE id=?", (device,)
        ).fetchone()
        if lost:
            raise SimulatedCudaError(f"the device {device} ({name}) is lost: wait until an administrator returned it")
        if cap is not None:
            self._check_cap(db, n_bytes, device, cap)
        used, total = int(db.execute(HELD, (device,)).fetchone()[0]), memory_mib * MIB
        if used + n_bytes > total:
            raise _NoRoom(
                f"out of memory on {name}: asked for {_mib(n_bytes)}, {_mib(total - used)} of {_mib(total)} are free; "
                "free something, or ask for less"
            )

    def _check_cap(self, db: sqlite3.Connection, n_bytes: int, device: str, cap: int) -> None:
        mine = "SELECT COALESCE(SUM(bytes), 0) FROM processes WHERE phase != 'failed' AND device=? AND "
        by, value = ("lease=?", self.lease) if self.lease else ("key=?", self.key)
        used = int(db.execute(mine + by, (device, value)).fetchone()[0])
        if used + n_bytes > cap:
            raise _NoRoom(
                f"out of memory: asked for {_mib(n_bytes)}, this kernel holds {_mib(used)} of its cap of {_mib(cap)} "
                "(JUPYTER_GPU_MEMORY_MIB); free something, or ask for a larger share with %gpu resize"
            )

    def _check_host(self, n_bytes: int) -> None:
        available = available_bytes(self.store.directory) - _HEADROOM
        # A quick and too cautious check first, because every allocation makes it.
        if n_bytes + int(self.store.query("SELECT COALESCE(SUM(bytes), 0) FROM processes")[0][0]) <= available:
            return
        declared = int(self.store.query("SELECT COALESCE(SUM(bytes), 0) FROM allocations")[0][0])
        # Files have holes until they are written: only what is declared and not yet written still needs room.
        written = sum(file.stat().st_blocks * 512 for file in self.store.memory.glob("*/*.device"))
        if n_bytes + max(0, declared - written) > available:
            raise SimulatedOutOfMemory(
                f"this machine cannot hold the contents of the simulated GPU: asked for {_mib(n_bytes)}, "
                f"it has room for {_mib(max(0, available))} more; allocate less, or start the broker with a smaller --simulate"
            )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.1f}".removesuffix(".0") + " MiB"


def _since_boot_ns() -> int:
    """Return nanoseconds since boot, on a clock that cannot be set."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
