"""Tracks how much of a device each process uses, and how pieces of work slow each other down (see `core.time_slicing`).

Each process publishes how much of the device its pieces of work use. It also publishes running totals of its use in a ring buffer. They
stand in for a driver's utilisation samples. The newest total is overwritten until it is `_STEP_NS` old, so that short pieces do not fill
the buffer. If a piece's published end is in the past, the piece is considered finished, because its process was killed or stopped.
"""

import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from fractional_gpu.core.time_slicing import slowed_milli, stretch_milli
from fractional_gpu.gpu.simulated.processes import WORK, Process, users_of
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.host.clock import since_boot_ns

WHOLE: Final = 1000  # a whole device, in thousandths

_LOAD: Final = "pieces"  # an earlier format of this file had another name
_PIECES: Final = 32
# The number of totals written, the current use of all pieces, and the use of each piece when it is not slowed down, in thousandths.
_HEADER: Final = struct.Struct(f"<QQ{_PIECES}H")
_TOTAL: Final = struct.Struct("<QQ")  # the time since boot, and the use of the whole device until then, in nanoseconds
_TOTALS: Final = 256
_STEP_NS: Final = 25_000_000
_BYTES: Final = _HEADER.size + _TOTALS * _TOTAL.size


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of work done by a process on a device."""

    milli: int  # how much of the device it uses when it is not slowed down, in thousandths
    left_ns: int | None  # how long it would still take if it were not slowed down; None if unknown
    stretch_milli: int = WHOLE  # how much longer it takes than when it is not slowed down, in thousandths

    @property
    def left_s(self) -> float:
        return (self.left_ns or 0) * self.stretch_milli / WHOLE / 1e9

    @property
    def wanted_milli(self) -> int:
        return 0 if self.left_ns == 0 else self.milli

    def advance(self, ns: int) -> int:
        """Advance the piece by `ns` and return its use, as the number of nanoseconds for which it would have used the whole device."""
        done_ns = ns * WHOLE // self.stretch_milli
        if self.left_ns is not None:
            done_ns = min(done_ns, self.left_ns)
            self.left_ns -= done_ns
        return done_ns * self.milli // WHOLE


@dataclass(frozen=True, slots=True)
class _LoadRecord:
    """A process's published load."""

    totals: list[tuple[int, int]]  # the running totals, oldest first
    wants_milli: list[int]  # the use of each piece when it is not slowed down
    rate_milli: int  # the current use of all pieces together
    end_ns: int  # when the last piece ends


class Load:
    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._folder = store.process_folder(key)
        self._file = os.open(self._folder / _LOAD, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if store.shared:  # other users' processes read the file, because this work slows theirs down
            os.fchmod(self._file, 0o644)
        self._mutex = threading.Lock()
        self._pieces: list[Piece] = []
        self._at_ns = since_boot_ns()  # use is counted up to this time
        self._used_ns = 0
        self._number = 0  # the number of the current running total
        self._kept_ns = 0  # when the previous total was last written
        self._write(self._at_ns)

    def begin(self, seconds: float | None, milli: int, device_id: str) -> Piece:
        """Begin a piece of work. `seconds` is how long it takes if nothing slows it down, or None if unknown. Call `end` afterwards."""
        with self._mutex:
            self._count()
            piece = Piece(milli, None if seconds is None else int(seconds * 1e9))
            self._pieces.append(piece)
            self._share(device_id)
        return piece

    def share_again(self, device_id: str) -> None:
        with self._mutex:
            self._count()
            self._share(device_id)

    def end(self, piece: Piece) -> None:
        with self._mutex:
            self._count()
            if piece in self._pieces:  # `close` may have removed it
                self._pieces.remove(piece)
            self._publish()

    def close(self) -> None:
        with self._mutex:
            self._count()
            self._pieces.clear()
            self._publish()
            os.close(self._file)
            self._file = -1

    def _count(self) -> None:
        now_ns = since_boot_ns()
        self._used_ns += sum(piece.advance(now_ns - self._at_ns) for piece in self._pieces)
        self._at_ns = now_ns

    def _share(self, device_id: str) -> None:
        wants_milli = [piece.wanted_milli for piece in self._pieces if piece.wanted_milli]
        if wants_milli:
            others = [one for one in users_of(self._store, device_id) if one.key != self._key]
            found = [_read(self._store, process, totals=False) for process in others]
            wants_milli += [
                milli for one in found if one is not None and one.end_ns > self._at_ns for milli in one.wants_milli
            ]
        k_milli = stretch_milli(wants_milli)
        for piece in self._pieces:
            piece.stretch_milli = slowed_milli(piece.milli, k_milli)
        self._publish()

    def _publish(self) -> None:
        if self._file < 0:
            return
        now_ns = self._at_ns
        end_ns = max([now_ns, *(now_ns + int(piece.left_s * 1e9) for piece in self._pieces)])
        self._write(now_ns)
        with suppress(FileNotFoundError):  # the host was removed
            os.utime(self._folder / WORK, ns=(end_ns, end_ns))

    def _write(self, now_ns: int) -> None:
        if now_ns - self._kept_ns >= _STEP_NS:
            self._number, self._kept_ns = self._number + 1, now_ns
        place = _HEADER.size + (self._number - 1) % _TOTALS * _TOTAL.size
        os.pwrite(self._file, _TOTAL.pack(now_ns, self._used_ns), place)
        used_milli = sum(piece.wanted_milli * WHOLE // piece.stretch_milli for piece in self._pieces)
        wants_milli = [piece.wanted_milli for piece in self._pieces]
        wants_milli[_PIECES - 1 :] = [min(WHOLE, sum(wants_milli[_PIECES - 1 :]))]
        wants_milli += [0] * (_PIECES - len(wants_milli))
        os.pwrite(self._file, _HEADER.pack(self._number, used_milli, *wants_milli), 0)


def used_milli(store: Store, process: Process, since_ns: int, now_ns: int) -> int:
    """Return the process's average use of its device since `since_ns`, in milli-GPU. Return 0 if the process has ended.

    If the ring buffer no longer goes back as far as `since_ns`, the average begins at its oldest total.
    """
    found = _read(store, process)
    if found is None:
        return 0
    last_ns, used_ns = found.totals[-1]
    used_ns += max(0, min(now_ns, found.end_ns) - last_ns) * found.rate_milli // WHOLE
    first_ns, before_ns = found.totals[0]
    if since_ns >= first_ns:
        before_ns = _total_at([*found.totals, (max(now_ns, last_ns), used_ns)], since_ns)
    elif len(found.totals) == _TOTALS:
        since_ns = first_ns
    return max(0, min(WHOLE, (used_ns - before_ns) * WHOLE // max(1, now_ns - since_ns)))


def _total_at(totals: list[tuple[int, int]], at_ns: int) -> int:
    for (from_ns, before_ns), (to_ns, after_ns) in pairwise(totals):
        if from_ns <= at_ns <= to_ns:
            return before_ns + (after_ns - before_ns) * (at_ns - from_ns) // max(1, to_ns - from_ns)
    return totals[-1][1]


def _read(store: Store, process: Process, *, totals: bool = True) -> _LoadRecord | None:
    folder = f"{store.memory}/{process.key}"  # not a Path, because this runs often and for many processes
    try:
        end_ns = os.stat(f"{folder}/{WORK}").st_mtime_ns  # noqa: PTH116
        file = os.open(f"{folder}/{_LOAD}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        data = os.read(file, _BYTES if totals else _HEADER.size)
    finally:
        os.close(file)
    if len(data) < _HEADER.size:  # the file is being created
        return None
    written = list(_TOTAL.iter_unpack(data[_HEADER.size : len(data) - (len(data) - _HEADER.size) % _TOTAL.size]))
    if totals and not written:
        return None
    number, rate_milli, *wants_milli = _HEADER.unpack_from(data)
    oldest = number % _TOTALS if number > _TOTALS else 0
    return _LoadRecord([*written[oldest:], *written[:oldest]], list(filter(None, wants_milli)), rate_milli, end_ns)
