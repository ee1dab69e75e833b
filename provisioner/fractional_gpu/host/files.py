"""Replacing small files atomically, the temporary folder, mounts, and the points where tests make writes fail.

Standard library only. New content is written to another file, synced (fsync), and renamed over the old one; then the folder is synced.
After a kill, a full disk or a power failure the file has the old content or the new, never a mixture.
"""

import errno
import fcntl
import os
import re
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - what callers put there is checked to be theirs
_EVERY_UID = "4294967295"  # the number of uids in the initial user namespace's map
_OCTAL = re.compile(r"\\([0-7]{3})")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class MountLine(NamedTuple):
    root: str
    point: Path
    kind: str
    options: str  # of the filesystem


def mount_table(file: Path) -> list[MountLine]:
    found = []
    for line in os.fsdecode(file.read_bytes()).split("\n"):  # paths may have characters at which `splitlines` splits
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if separator and len(fields) >= 5:
            kind, _source, options = (*after.split(" ", 2), "", "")[:3]
            # Blanks etc. are octal.
            root, point = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), field) for field in fields[3:5])
            found.append(MountLine(root, Path(point), kind, options))
    return found


def temporary_folder() -> Path:
    """Return the folder that `tempfile` uses, without writing: on a full disk `tempfile` would choose another."""
    named = (os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    folders = [Path(folder).absolute() for folder in (*named, *_TEMPORARY) if folder]
    usable = (folder for folder in folders if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
    return next(usable, Path(_TEMPORARY[0]))


def file_identity(file: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a path (not following links) or descriptor; None if it is missing or inaccessible."""
    try:
        status = os.fstat(file) if isinstance(file, int) else file.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def make_private_folder(folder: Path) -> None:
    """Create the folder and missing parents for this user alone (0700), as Jupyter expects. Raises OSError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def foreign_above(folder: Path) -> tuple[Path, int] | None:
    """Return the first parent folder, links resolved, that is neither this user's nor root's, and its owner."""
    trusted = {os.geteuid(), 0}
    with suppress(OSError, ValueError):
        if _EVERY_UID not in Path("/proc/self/uid_map").read_text().split():
            # A user namespace: the machine's root has no uid here. Its files show the overflow uid, which no user has.
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    for one in Path(os.path.realpath(folder)).parents:
        with suppress(OSError):  # missing, or in a folder without access: a parent shows its owner
            if (uid := one.stat().st_uid) not in trusted:
                return one, uid
    return None


def open_own(path: Path | str, flags: int) -> int:
    """Open a private file (0600) of this user; `flags` as for `os.open`, without O_TRUNC.

    Raises OSError, and changes nothing, for a link, another user's file, or a second hard link: writing could change another file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        number, wrong = errno.EINVAL, "is not a regular file"
    elif status.st_uid != os.geteuid():
        number, wrong = errno.EPERM, f"belongs to another user (uid {status.st_uid})"
    elif status.st_nlink > 1:
        number, wrong = (
            errno.EMLINK,
            f"has {status.st_nlink} hard links, so writing to it may change another file",
        )
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(number, f"it {wrong}; move it away", str(path))


def replace_file(
    path: Path, content: bytes, *, prepare: Callable[[int], None] | None = None, keep: bool = False
) -> int:
    """Write a private file (0600) at `path`, replacing any file there; a link there is replaced, not followed.

    `prepare` gets the new file's descriptor before the rename, to lock it or to change its owner. Returns the open descriptor if `keep` is
    set, else -1. Raises OSError and leaves the old file unchanged.
    """
    fresh = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    descriptor = os.open(fresh, _FLAGS, 0o600)
    try:
        write_all(descriptor, content)
        if prepare is not None:
            prepare(descriptor)
        os.fsync(descriptor)  # before the rename: after a power failure the file could be empty
        fresh.rename(path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            fresh.unlink()
        raise
    if not keep:
        os.close(descriptor)
        descriptor = -1
    with suppress(OSError):  # the file is in place; without the sync a power failure may lose it
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


# Points before and after each step that changes the world, the books or the ledger, at which a test may kill this process, block a
# thread, or make a write fail. Off unless `JUPYTER_GPU_FAILPOINTS` names a file at the start; off, `reach` costs one comparison. The file
# has one line: a point, which time it is reached, and `kill`, `hang` or `fail`. It is removed first, so that a restarted process
# survives. Reached points are appended to the path with `.reached`, which counts over all processes.


VARIABLE = "JUPYTER_GPU_FAILPOINTS"
_file = os.environ.get(VARIABLE)


def enabled() -> bool:
    """Return whether a file sets points, for callers to whom building a point's name costs time."""
    return _file is not None


def reach(name: str) -> bool:
    """Exit or hang here if the file says so; return True if this step should fail. Raises OSError for an unusable file."""
    if _file is None:
        return False
    record = os.open(f"{_file}.reached", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX)  # one process at a time, so that each has its own number
        os.write(record, f"{name}\n".encode())
        times = os.pread(record, os.fstat(record).st_size, 0).split(b"\n").count(name.encode())
        path = Path(_file)
        try:
            wanted, time, action = _parsed(path.read_bytes())
        except FileNotFoundError:
            return False
        if wanted != name or time != times:
            return False
        path.unlink()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os.close(record)
    if action == "hang":
        threading.Event().wait()
    return True


def _parsed(line: bytes) -> tuple[str, int, str]:
    """Parse a line. Raises OSError for a malformed one, which would test nothing."""
    words = line.decode("ascii", "replace").split()
    if len(words) != 3 or not re.fullmatch("[0-9]{1,9}", words[1]) or words[2] not in ("kill", "hang", "fail"):
        raise OSError(errno.EINVAL, f"a failpoint is `NAME TIME kill`, `... hang` or `... fail`, not {line[:200]!r}")
    return words[0], int(words[1]), words[2]
