"""Keeps backup records of leases and seats outside the ledger, and removes clients' token files.

A broker that has lost its ledger restores live kernels' leases from small files next to its socket. A kernel cannot be trusted to report
its pool, size, priority and seat, because it can write its own environment. A file is used only if it belongs to this user, no other user
can write to it, and it names the process that holds the lease (which `lost_leases` checks). The files are not synced to disk, because no
process survives a reboot.

`remove_token_file` does not trust the path, which comes from the kernel's environment. It removes only `LEASE*.token`, in a folder that
belongs to the lease's user or root and that no other user can write to. It runs in a separate thread, because the client's filesystem may
hang.
"""

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Final, TypeVar

import msgspec

from fractional_gpu.host.files import open_own, write_all
from fractional_gpu.host.threads import StartedThreads
from fractional_gpu.ledger.records import LeaseRecord, SeatRecord
from fractional_gpu.protocol.errors import BrokerUnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T", LeaseRecord, SeatRecord)

_EVERY_S: Final = 2.0
_LONGEST: Final = 1 << 20  # bytes of a file
_SUFFIXES: Final[dict[type[LeaseRecord | SeatRecord], str]] = {LeaseRecord: ".json", SeatRecord: ".seat"}
_SUFFIX: Final = ".token"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}(?:\.json|\.seat)", re.ASCII)
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def lease_folder(socket: str, *, simulated: bool) -> Path:
    return Path(f"{socket}.leases{'-simulated' if simulated else ''}")


class LeaseFiles:
    """Writes backup copies of one broker's lease and seat records to `folder`. For use on the broker's loop.

    `check_above` raises an error if another user could replace a folder above `folder`.
    """

    def __init__(self, folder: Path, check_above: Callable[[], object] = lambda: None) -> None:
        self.folder = folder
        self._check_above = check_above
        self._wanted: dict[str, bytes] = {}  # by name: the contents
        self._failed: set[str] = set()  # names of files that could not be written; used in the thread
        self._logged = ""  # the last failure; used in the thread
        self._thread = StartedThreads(1, "lease-files")

    def put(self, record: LeaseRecord | SeatRecord) -> None:
        name, text = _name_of(record), msgspec.json.encode(record)
        if self._wanted.get(name) != text:
            self._wanted[name] = text
            self._thread.submit(self._write, {name: text})

    def drop(self, record_id: str, kind: type[LeaseRecord | SeatRecord]) -> None:
        name = record_id + _SUFFIXES[kind]
        self._wanted.pop(name, None)
        self._thread.submit(self._write, {name: None})

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.repair()

    async def repair(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._repair, dict(self._wanted))

    async def flushed(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)

    async def close(self) -> None:
        await self.flushed()
        self._thread.shutdown()
        with suppress(OSError):
            self.folder.rmdir()

    def _write(self, batch: Mapping[str, bytes | None]) -> None:
        problem = ""
        for name, text in batch.items():
            try:
                self._check_above()
                if text is None:
                    (self.folder / name).unlink(missing_ok=True)
                else:
                    _replace(self.folder, name, text)
            except (OSError, BrokerUnavailableError) as error:
                self._failed.add(name)
                problem = f"{self.folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
            else:
                self._failed.discard(name)
        if problem and problem != self._logged:
            log.warning("%d backup records are not up to date: %s; retrying", len(self._failed), problem)
        if problem or not self._failed:
            self._logged = problem

    def _repair(self, wanted: Mapping[str, bytes]) -> None:
        try:
            self._check_above()
            there = set(os.listdir(self.folder))  # noqa: PTH208 - names are enough
        except (OSError, BrokerUnavailableError):
            there = set()  # the folder may have been replaced by another user
        self._write({name: wanted.get(name) for name in (wanted.keys() - there) | self._failed})


def _name_of(record: LeaseRecord | SeatRecord) -> str:
    record_id = record.spec.lease_id if isinstance(record, LeaseRecord) else record.seat_id
    return record_id + _SUFFIXES[type(record)]


def write_lease_file(folder: Path, record: LeaseRecord) -> None:
    _replace(folder, _name_of(record), msgspec.json.encode(record))


def _replace(folder: Path, name: str, text: bytes) -> None:
    if not _NAME.fullmatch(name):
        raise OSError(0, f"{name[:80]!r} cannot be used as a file name")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    fresh = folder / f".{name}"
    with suppress(FileNotFoundError):
        fresh.unlink()  # left by a broker that was killed
    descriptor = os.open(fresh, _WRITE, 0o600)
    try:
        write_all(descriptor, text)
    finally:
        os.close(descriptor)
    fresh.rename(folder / name)


def read_records(folder: Path, kind: type[T]) -> list[T]:
    """Return the records of this kind that this user's brokers have left, oldest first.

    Skips files that are unreadable or that other users can write to, and logs a warning.
    """
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or not _is_private(status):
            log.warning(
                "ignoring %s: it must be a folder that belongs to this user and that only its owner can write to",
                folder,
            )
            return []
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("cannot read %s: %s", folder, error.strerror)
        return []
    found = []
    for name in names:
        if not (_NAME.fullmatch(name) and name.endswith(_SUFFIXES[kind])):
            continue
        try:
            record = _read(folder / name, kind)
        except (OSError, ValueError) as error:
            log.warning("ignoring the record %s: %s", folder / name, error)
            continue
        if _name_of(record) == name:
            found.append(record)
    return sorted(found, key=lambda record: (record.created_ms, _name_of(record)))


def remove_lease_file(folder: Path, lease_id: str) -> None:
    """Remove an ended lease's file. If that fails, the next broker to start removes it."""
    with suppress(OSError):
        (folder / f"{lease_id}{_SUFFIXES[LeaseRecord]}").unlink()


def _read(path: Path, kind: type[T]) -> T:
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        if not _is_private(os.fstat(file.fileno())):
            raise ValueError("another user owns it or has permission to write to it")
        text = file.read(_LONGEST)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not a valid record: {error}") from None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def remove_token_file(lease_id: str, path: str, uid: int) -> None:
    """Remove the token file of this user's ended lease, if it is named `LEASE*.token`. Blocks while the filesystem hangs."""
    file = PurePath(path)
    if not (file.name.startswith(lease_id) and file.name.endswith(_SUFFIX)):
        return
    try:
        folder = os.open(file.parent, _FOLDER)
        try:
            status = os.fstat(folder)
            # Remove it only if no one but the user or root can have put it into its folder.
            if status.st_uid in {uid, 0} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                os.unlink(file.name, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        log.debug("cannot remove the token file %s: %s", path, error.strerror)
