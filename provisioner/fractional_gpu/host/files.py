"""Replaces small files atomically, finds the temporary folder, and lists mounts.

This module uses only the standard library. To replace a file, the new content is written to another file, synced (fsync) and renamed over
the old file; then the folder is synced. Even if the process is killed, the disk is full or the power fails, the file contains either the
old or the new content, never a mixture.
"""

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - callers check who owns their files there
_EVERY_UID = "4294967295"  # the number of uids that are mapped in the initial user namespace
_OCTAL = re.compile(r"\\([0-7]{3})")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class MountLine(NamedTuple):
    root: str
    point: Path
    kind: str
    options: str  # the options of the filesystem


def mount_table(file: Path) -> list[MountLine]:
    found = []
    for line in os.fsdecode(file.read_bytes()).split("\n"):  # paths may have characters at which `splitlines` splits
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if separator and len(fields) >= 5:
            kind, _source, options = (*after.split(" ", 2), "", "")[:3]
            # Blanks and some other characters are encoded in octal.
            root, point = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), field) for field in fields[3:5])
            found.append(MountLine(root, Path(point), kind, options))
    return found


def temporary_folder() -> Path:
    """Return the folder `tempfile` would use, but without a trial write, because on a full disk `tempfile` chooses another one."""
    named = (os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    folders = [Path(folder).absolute() for folder in (*named, *_TEMPORARY) if folder]
    usable = (folder for folder in folders if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
    return next(usable, Path(_TEMPORARY[0]))


def file_identity(file: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a descriptor or a path, without following links, or None if the file is missing or inaccessible."""
    try:
        status = os.fstat(file) if isinstance(file, int) else file.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def make_private_folder(folder: Path) -> None:
    """Create the folder and any missing parents, accessible only to this user (mode 0700), as Jupyter expects. Raises OSError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def foreign_above(folder: Path) -> tuple[Path, int] | None:
    """Return the nearest parent folder owned by neither this user nor root, and its owner's uid, or None. Links are resolved first."""
    trusted = {os.geteuid(), 0}
    with suppress(OSError, ValueError):
        if _EVERY_UID not in Path("/proc/self/uid_map").read_text().split():
            # In a user namespace, the machine's root has no uid. Its files have the overflow uid, which belongs to no user.
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    for one in Path(os.path.realpath(folder)).parents:
        with suppress(OSError):  # the folder is missing or inaccessible, so look at its parent
            if (uid := one.stat().st_uid) not in trusted:
                return one, uid
    return None


def open_own(path: Path | str, flags: int) -> int:
    """Open a private file (mode 0600) owned by this user. `flags` are passed to `os.open` and must not include O_TRUNC.

    Raises OSError, without changing anything, if the path is a link, belongs to another user or has a second hard link, because writing
    could then change another file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        number, wrong = errno.EINVAL, "the path is not a regular file"
    elif status.st_uid != os.geteuid():
        number, wrong = errno.EPERM, f"the file belongs to another user (uid {status.st_uid})"
    elif status.st_nlink > 1:
        number, wrong = errno.EMLINK, f"the file has {status.st_nlink} hard links, so a write may change another file"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(number, f"{wrong}; move it away", str(path))


def replace_file(
    path: Path, content: bytes, *, prepare: Callable[[int], None] | None = None, keep: bool = False
) -> int:
    """Write a private file (mode 0600) at `path`. Replace any existing file. If `path` is a link, replace the link itself.

    `prepare` is called with the new file's descriptor before the rename, for example to lock the file or change its owner. Return the open
    descriptor if `keep` is set, otherwise -1. On failure, leaves the old file unchanged and raises OSError.
    """
    fresh = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    descriptor = os.open(fresh, _FLAGS, 0o600)
    try:
        write_all(descriptor, content)
        if prepare is not None:
            prepare(descriptor)
        os.fsync(descriptor)  # before the rename, because the file could otherwise be empty after a power failure
        fresh.rename(path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            fresh.unlink()
        raise
    if not keep:
        os.close(descriptor)
        descriptor = -1
    with suppress(OSError):  # the file is in place, but without the sync a power failure may undo the rename
        sync_folder(path.parent)
    return descriptor


def write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
