"""A second record of each lease and each confirmed seat, outside the ledger: one small file each, in a folder beside the broker's socket.

A broker whose ledger is lost takes the leases of living kernels back from these files: pool, size, priority and seat are not told by the
kernels' processes, whose environment is their own to write.

Rules:

- A thread writes; no decision and no grant waits for it. A lease that changes several times meanwhile is written once.
- A file is replaced in one step and not synchronised: it matters only while its process lives, and no process survives the machine.
- What is missing, or could not be written, is written again by `run` within seconds. The file of an ended lease is removed.
- A file counts only if this user wrote it and nobody else can, and only for the process that it names (`lost_leases` checks that).
"""

import asyncio
import logging
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fractional_gpu.ledger.records import LeaseRecord, SeatRecord

__all__ = ["LeaseFiles", "lease_folder", "read_lease_files", "read_seat_files", "remove_lease_file"]

log = logging.getLogger(__name__)
T = TypeVar("T", LeaseRecord, SeatRecord)

_EVERY_S: Final = 2.0
_LONGEST: Final = 1 << 20  # bytes of a file
_LEASE: Final = ".json"
_SEAT: Final = ".seat"
_NAME: Final = re.compile(r"([0-9a-zA-Z_-]{1,64})(\.json|\.seat)", re.ASCII)
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def lease_folder(socket: str, *, simulated: bool) -> Path:
    """Return where the broker on this socket keeps its second records; simulated devices have a folder of their own, as their ledger."""
    return Path(f"{socket}.leases{'-simulated' if simulated else ''}")


class LeaseFiles:
    """Writes the records of one broker. All methods are for the broker's event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wanted: dict[str, bytes] = {}  # by name: what the file is to say
        self._changed: set[str] = set()  # names of files that may say something else
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lease-files")
        self._writing: asyncio.Task[None] | None = None
        self._said = ""  # the last failure in the log

    def put(self, record: LeaseRecord) -> None:
        """Have the lease's record written soon."""
        self._put(record.spec.lease_id + _LEASE, msgspec.json.encode(record))

    def drop(self, lease_id: str) -> None:
        """Have the file of a lease that has ended removed soon."""
        self._drop(lease_id + _LEASE)

    def put_seat(self, seat: SeatRecord) -> None:
        """Have the seat's record written soon."""
        self._put(seat.seat_id + _SEAT, msgspec.json.encode(seat))

    def drop_seat(self, seat_id: str) -> None:
        """Have the file of a seat that has ended removed soon."""
        self._drop(seat_id + _SEAT)

    async def run(self) -> None:
        """Write again what is missing, every two seconds, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_EVERY_S)
            self._changed |= await loop.run_in_executor(self._thread, self._missing, set(self._wanted))
            self._begin()

    async def flushed(self) -> None:
        """Return when everything handed over before was written, or failed. Cancellation stops the waiting only."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write what is due and stop. The folder goes with its last file."""
        await self.flushed()
        self._thread.shutdown()
        with suppress(OSError):
            self.folder.rmdir()

    def _put(self, name: str, text: bytes) -> None:
        if self._wanted.get(name) != text:
            self._wanted[name] = text
            self._changed.add(name)
            self._begin()

    def _drop(self, name: str) -> None:
        self._wanted.pop(name, None)
        self._changed.add(name)
        self._begin()

    def _begin(self) -> None:
        if self._changed and self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_changed())

    async def _write_changed(self) -> None:
        loop = asyncio.get_running_loop()
        failed: set[str] = set()
        try:
            await asyncio.sleep(0)  # what else the same decision changes goes with it
            while self._changed:
                batch = {name: self._wanted.get(name) for name in self._changed}
                self._changed.clear()
                failed |= await loop.run_in_executor(self._thread, self._write, batch)
        finally:
            self._writing = None
            self._changed |= failed  # tried again by `run`

    # -- in the thread -----------------------------------------------------------------------------------------------------

    def _write(self, batch: dict[str, bytes | None]) -> set[str]:
        """Write, or remove, the files; return the names for which that failed."""
        failed: set[str] = set()
        problem = ""
        for name, text in batch.items():
            try:
                if text is None:
                    (self.folder / name).unlink(missing_ok=True)
                else:
                    self._replace(name, text)
            except OSError as error:
                failed.add(name)
                problem = f"{self.folder}: {error.strerror}"
        if problem and problem != self._said:
            log.warning("%d second records are not up to date: %s; trying again", len(failed), problem)
        self._said = problem
        return failed

    def _replace(self, name: str, text: bytes) -> None:
        if not _NAME.fullmatch(name):
            raise OSError(0, f"the id of {name[:80]!r} cannot name a file")
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        fresh = self.folder / f".{name}"
        with suppress(FileNotFoundError):
            fresh.unlink()  # what a broker left that was killed
        descriptor = os.open(fresh, _WRITE, 0o600)
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
        fresh.rename(self.folder / name)

    def _missing(self, wanted: set[str]) -> set[str]:
        try:
            names = set(os.listdir(self.folder))  # noqa: PTH208 - names are enough
        except OSError:
            names = set()
        return wanted - names


def read_lease_files(folder: Path) -> list[LeaseRecord]:
    """Return the leases' records that a broker of this user left in the folder, oldest lease first.

    Left out with a warning: what others could have written, and what cannot be read. A folder that is not there holds none.
    """
    records = [record for name, record in _read_all(folder, _LEASE, LeaseRecord) if record.spec.lease_id == name]
    return sorted(records, key=lambda record: (record.created_ms, record.spec.lease_id))


def read_seat_files(folder: Path) -> list[SeatRecord]:
    """Return the seats' records likewise."""
    records = [record for name, record in _read_all(folder, _SEAT, SeatRecord) if record.seat_id == name]
    return sorted(records, key=lambda record: (record.created_ms, record.seat_id))


def _read_all(folder: Path, suffix: str, kind: type[T]) -> list[tuple[str, T]]:
    """Return what each file with the suffix holds, with the id that its name says."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or not _is_private(status):
            log.warning("%s is not read: it must be a folder of this user that only its owner may write to", folder)
            return []
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s cannot be read: %s", folder, error.strerror)
        return []
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or match[2] != suffix:
            continue
        try:
            found.append((match[1], _read(folder / name, kind)))
        except (OSError, ValueError) as error:
            log.warning("the record %s is not used: %s", folder / name, error)
    return found


def remove_lease_file(folder: Path, lease_id: str) -> None:
    """Remove the record of a lease that is over; one that cannot be removed is met again at the next start."""
    with suppress(OSError):
        (folder / f"{lease_id}{_LEASE}").unlink()


def _read(path: Path, kind: type[T]) -> T:
    """Raises OSError, ValueError."""
    descriptor = os.open(path, _READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status) or status.st_nlink > 1:
            raise ValueError("it must be a plain file of this user, with one name, that only its owner may write to")
        text = os.read(descriptor, _LONGEST)
    finally:
        os.close(descriptor)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it holds no record: {error}") from None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
