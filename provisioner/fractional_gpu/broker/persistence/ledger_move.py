"""Moves a ledger and its companion files to another folder: from an earlier version's folder to this one's, and back.

- At each moment exactly one file is the ledger, and its name says so. Within a filesystem a rename moves it. Between filesystems a copy
  is completed under another name (fsync); then the old file is renamed to `.moved`, the copy gets its name, and `.moved` is removed. The
  next move finishes a killed one; if neither name exists, `.moved` is the ledger.
- The write-ahead log is merged into the file first, so that one file is everything.
- If both folders have a ledger, as after a downgrade, the one with live leases counts and the other is set aside. If both have live
  leases, nothing changes, and the error names both.

The caller holds the broker's lock on its socket; this module takes the locks of both ledgers.
"""

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fractional_gpu.broker.persistence.audit import FILE_NAME as AUDIT
from fractional_gpu.host import files
from fractional_gpu.host.files import replace_file, sync_folder
from fractional_gpu.ledger import opening
from fractional_gpu.ledger.records import LedgerError

log = logging.getLogger(__name__)

_MOVED = ".moved"


def move_ledger(source: Path, target: Path) -> bool:
    """Move the ledger `source` and its companions to `target`. Return whether there was a ledger to move.

    Raises LedgerError (LedgerInUseError if another process has one of them open) or OSError; then the whole ledger is at `source`, at
    `target`, or at `source` with `.moved` appended.
    """
    beside = source.with_name(source.name + _MOVED)
    if not (opening.exists(source) or os.path.lexists(beside) or _companions(source)):
        _refuse_lone_log(source)
        return False
    if target.parent.exists() and source.parent.samefile(target.parent):
        return False
    with _locked(target), _locked(source):
        moved = _move(source, beside, target)
        _move_companions(source, target)
    with contextlib.suppress(OSError):
        source.with_name(source.name + ".lock").unlink()
    return moved


def _move(source: Path, beside: Path, target: Path) -> bool:
    for path in (source, target):
        if os.path.lexists(path.with_name(path.name + opening.WHOLE)):
            opening.adopt_whole(path)
    if os.path.lexists(target):
        beside.unlink(missing_ok=True)  # left by a move that was killed at its last step
        if not os.path.lexists(source) or not _choose(source, target):
            return False
    if not os.path.lexists(source):
        if not os.path.lexists(beside):
            _refuse_lone_log(source)
            return False
        log.warning("finishing an interrupted move of the ledger %s", source)
    else:
        opening.fold_wal(source)
        files.reach("ledger-move.begin")
        try:
            source.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            sync_folder(target.parent)
            sync_folder(source.parent)
            return _moved(source, target)
    _copy(source, beside, target)
    return _moved(source, target)


def _copy(source: Path, beside: Path, target: Path) -> None:
    """Move the ledger to another filesystem."""
    fresh = target.with_name(f".{target.name}.new")
    origin = source if os.path.lexists(source) else beside
    fresh.unlink(missing_ok=True)
    with origin.open("rb") as reading:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
            writing.flush()
            os.fsync(writing.fileno())
    files.reach("ledger-move.copied")
    if origin is source:
        source.rename(beside)
        sync_folder(source.parent)
        files.reach("ledger-move.beside")
    fresh.rename(target)
    sync_folder(target.parent)
    files.reach("ledger-move.named")
    beside.unlink()


def _moved(source: Path, target: Path) -> bool:
    files.reach("ledger-move.done")
    log.warning("the ledger was moved from %s to %s", source.parent, target.parent)
    return True


def _choose(source: Path, target: Path) -> bool:
    """Set aside the one of two ledgers that has no live leases; return whether `source` remains and is to be moved."""
    try:
        live = opening.count_live(source)
    except LedgerError as error:
        log.warning("a second ledger is left alone: %s", error)
        return False
    if live == 0:
        _set_aside(source, target)
        return False
    others = opening.count_live(target)
    if others:
        raise opening.ledger_error(
            target,
            f"has {others} live leases, and {source} has {live}: both were used",
            "move the one away whose kernels have ended, with its -wal",
        )
    _set_aside(target, source)
    return True


def _set_aside(path: Path, other: Path) -> None:
    opening.fold_wal(path)
    aside = path.with_name(f"{path.name}.unused-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    log.warning(
        "there are two ledgers; %s has no live lease and is set aside as %s, %s counts", path, aside.name, other
    )
    path.rename(aside)


def _refuse_lone_log(source: Path) -> None:
    if os.path.lexists(source.with_name(source.name + "-wal")):
        remedy = "put the database back, or move the -wal file away to begin anew"
        raise opening.ledger_error(source, "is gone but its write-ahead log is still there", remedy)


def _companions(source: Path) -> list[Path]:
    """Return the ledger's companion files: out-of-memory score adjustments, and the audit log."""
    return [
        path
        for path in (source.with_suffix(".oom.json"), *sorted(source.parent.glob(f"{AUDIT}*")))
        if path.is_file() and not path.is_symlink()
    ]


def _move_companions(source: Path, target: Path) -> None:
    for path in _companions(source):
        place = target.with_name(path.name)
        if os.path.lexists(place):
            continue
        try:
            try:
                path.rename(place)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                replace_file(place, path.read_bytes())
                path.unlink()
        except OSError as error:
            log.warning("%s could not be moved to %s: %s", path, place.parent, error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = opening.lock(path)
    try:
        yield
    finally:
        os.close(descriptor)
