"""What the simulated devices draw, and whose work draws it. Standard library only: notebooks import it.

The rules:
- A device draws its idle power at all times, and up to its peak power by how much of it is used:
  energy = idle * time + (peak - idle) * device time used. The counter is exact; it begins with the host, and anew with each boot.
- A process says in a file how much of devices it has used in its life, how fast that grows, and until when it is sure of that: `PROMISE_NS`
  at most. Longer than that a process that says nothing more counts for nothing: what a killed one drew does not depend on when that is
  noticed. One that is late, because it was stopped, makes up for it when it goes on.
- What a process has used is booked to its device when it ends or moves on to another one. Booking again what was booked changes nothing.
  What it has used beyond what was booked, on all devices, counts on the device that it is on.
- Noise moves the idle draw up for a second and down by as much in the next one, or the other way round: by device and time, so that all
  readers agree. The counter has it too, and over each two seconds nothing is left of it.
"""

import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meters (
  device TEXT PRIMARY KEY, boot TEXT NOT NULL, since_ns INTEGER NOT NULL, idle_mw INTEGER NOT NULL, peak_mw INTEGER NOT NULL,
  noise_milli INTEGER NOT NULL, drawn_uj INTEGER NOT NULL DEFAULT 0, counted_ns INTEGER NOT NULL DEFAULT 0,
  booked_ns INTEGER NOT NULL DEFAULT 0, shift_mj INTEGER NOT NULL DEFAULT 0, shows_power INTEGER NOT NULL DEFAULT 1,
  shows_counter INTEGER NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS spent (
  process TEXT NOT NULL, device TEXT NOT NULL, pid INTEGER NOT NULL, lease TEXT NOT NULL, ns INTEGER NOT NULL,
  PRIMARY KEY (process, device));
"""
PROMISE_NS: Final = 60_000_000  # `cuda.launch` says every 50 ms how far it is

_USED: Final = "used"
_RECORD: Final = struct.Struct("<5Q")  # the fields of `Used`, and their check
_SLOT_NS: Final = 1_000_000_000
_REMEMBERED: Final = 10_000  # processes that have ended
_READS: Final = 8

Query = Callable[..., list[Any]]
"""Runs a reading statement with its values, and returns all rows."""


def since_boot_ns() -> int:
    """Return nanoseconds since boot, on a clock that cannot be set."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@cache
def boot() -> str:
    """Return what names this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]


# -- what a process says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used of devices in its life. Times in nanoseconds, since boot or of a whole device."""

    at_ns: int
    used_ns: int
    rate_ppm: int  # from then on: millionths of a device
    until_ns: int  # up to when that is sure

    def by(self, now_ns: int) -> int:
        """Return what it has used until then as far as is known."""
        return self.used_ns + max(0, min(now_ns, self.until_ns) - self.at_ns) * self.rate_ppm // 1_000_000

    @property
    def final_ns(self) -> int:
        """What it has used if it says nothing more."""
        return self.by(self.until_ns)


def open_used(folder: Path) -> int:
    """Open the file in which a process says what it has used."""
    return os.open(folder / _USED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def write_used(file: int, used: Used) -> None:
    """Say it."""
    fields = (used.at_ns, used.used_ns, used.rate_ppm, used.until_ns)
    os.pwrite(file, _RECORD.pack(*fields, _check(fields)), 0)


def _check(fields: tuple[int, ...]) -> int:
    """Return the number that a reader compares: a reader in the middle of a write finds another one."""
    return zlib.crc32(struct.pack("<4Q", *fields))


def read_used(folder: str) -> Used | None:
    """Return what a process said last; None if its folder is gone."""
    try:
        file = os.open(f"{folder}/{_USED}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        for _ in range(_READS):
            data = os.pread(file, _RECORD.size, 0)
            if len(data) < _RECORD.size:
                return None  # it is being made
            *fields, check = _RECORD.unpack(data)
            if check == _check(tuple(fields)):
                return Used(*fields)
    finally:
        os.close(file)
    return None


# -- booking -------------------------------------------------------------------------------------------------------------


def begin_meters(db: sqlite3.Connection, idle_mw: int, peak_mw: int, noise_milli: int) -> None:
    """Begin to count the energy of devices that have no meter yet, and forget devices that are gone."""
    for table in ("meters", "spent"):
        db.execute(f"DELETE FROM {table} WHERE device NOT IN (SELECT id FROM devices)")  # noqa: S608
    now_ns = since_boot_ns()
    for (device_id,) in db.execute("SELECT id FROM devices WHERE id NOT IN (SELECT device FROM meters)").fetchall():
        begun = Meter(device_id, boot(), now_ns, idle_mw, peak_mw, noise_milli, 0, 0, 0, 0, 1, 1)
        db.execute(
            "INSERT INTO meters (device, boot, since_ns, idle_mw, peak_mw, noise_milli, drawn_uj) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (device_id, boot(), now_ns, idle_mw, peak_mw, noise_milli, -begun.drawn(0, now_ns)),
        )


def booked_ns(query: Query, key: str) -> int:
    """Return what was booked of a process so far, on all devices."""
    return int(query("SELECT COALESCE(SUM(ns), 0) FROM spent WHERE process=?", key)[0][0])


def book(db: sqlite3.Connection, memory: Path, keys: Iterable[str]) -> None:
    """Book what these processes have used to the devices that they are on. They work no more, or not before the transaction ends."""
    for key in keys:
        row = db.execute("SELECT device, pid, lease FROM processes WHERE key=?", (key,)).fetchone()
        used = read_used(f"{memory}/{key}")
        if row is None or used is None:
            continue
        device_id, pid, lease = row
        more_ns = min(used.final_ns, since_boot_ns()) - booked_ns(_on(db), key)
        if more_ns <= 0:
            continue
        db.execute(
            "INSERT INTO spent VALUES (?, ?, ?, ?, ?) ON CONFLICT (process, device) DO UPDATE SET ns = ns + excluded.ns",
            (key, device_id, pid, lease, more_ns),
        )
        db.execute("UPDATE meters SET booked_ns = booked_ns + ? WHERE device=?", (more_ns, device_id))
    db.execute(
        "DELETE FROM spent WHERE rowid <= (SELECT MAX(rowid) FROM spent) - ? AND process NOT IN (SELECT key FROM processes)",
        (_REMEMBERED,),
    )


def begin_boot(db: sqlite3.Connection, memory: Path) -> None:
    """Begin anew, at 0, if the machine was booted: what ran before has ended."""
    if not db.execute("SELECT 1 FROM meters WHERE boot != ?", (boot(),)).fetchone():
        return
    ended = [row[0] for row in db.execute("SELECT key FROM processes") if not row[0].endswith(f"-{boot()}")]
    book(db, memory, ended)
    db.execute(
        "UPDATE meters SET boot=?, since_ns=0, drawn_uj=0, shift_mj=0, counted_ns=booked_ns WHERE boot != ?",
        (boot(), boot()),
    )


# -- reading -------------------------------------------------------------------------------------------------------------


_METER: Final = (
    "SELECT m.device, m.boot, m.since_ns, m.idle_mw, m.peak_mw, m.noise_milli, m.drawn_uj, m.counted_ns, m.booked_ns, m.shift_mj, "
    "m.shows_power, m.shows_counter"
)
_SNAPSHOT: Final = (
    f"{_METER}, p.key, (SELECT COALESCE(SUM(ns), 0) FROM spent WHERE process=p.key) "  # noqa: S608
    "FROM meters m LEFT JOIN processes p ON p.device = m.device WHERE m.device=?"
)


@dataclass(frozen=True, slots=True)
class Meter:
    """A device's meter as the database has it. Times in nanoseconds, power in mW, energy in mJ or (`..._uj`) microjoules."""

    device_id: str
    boot: str
    since_ns: int  # since boot: from then on it draws as follows
    idle_mw: int
    peak_mw: int
    noise_milli: int
    drawn_uj: int  # before that
    counted_ns: int  # device time used before that
    booked_ns: int  # device time that was booked, before that and since
    shift_mj: int  # by how much the counter shows more
    shows_power: int
    shows_counter: int

    def drawn(self, used_ns: int, now_ns: int) -> int:
        """Return what the device has drawn until now, microjoules; `used_ns`: device time used in all."""
        work = (self.peak_mw - self.idle_mw) * (used_ns - self.counted_ns)
        idle = self.idle_mw * (now_ns - self.since_ns)
        return self.drawn_uj + (work + idle) // 1_000_000 + self._ripple_uj(now_ns)

    def draws(self, use_milli: int, now_ns: int) -> int:
        """Return what the device draws now, mW; `use_milli`: what is used of it, thousandths."""
        noise_mw = self.idle_mw * self._noise(now_ns) // 1000
        return self.idle_mw + noise_mw + (self.peak_mw - self.idle_mw) * use_milli // 1000

    def _noise(self, now_ns: int) -> int:
        """Return by how many thousandths the idle draw is higher now."""
        slot = now_ns // _SLOT_NS
        if not self.noise_milli:
            return 0
        noise = zlib.crc32(f"{self.device_id}:{slot // 2}".encode()) % (2 * self.noise_milli + 1) - self.noise_milli
        return -noise if slot % 2 else noise

    def _ripple_uj(self, now_ns: int) -> int:
        """Return by how much the noise so far has raised what was drawn: up in one second of two and down in the other one."""
        into_ns = now_ns % _SLOT_NS
        if now_ns // _SLOT_NS % 2:
            into_ns -= _SLOT_NS
        return self._noise(now_ns) * self.idle_mw * into_ns // 1_000_000_000


def read_meter(query: Query, memory: Path, device_id: str, now_ns: int) -> tuple[Meter, int] | None:
    """Return a device's meter and the device time used there in all, nanoseconds; None where the device has none."""
    for _ in range(_READS):
        rows = query(_SNAPSHOT, device_id)
        if not rows:
            return None
        meter = Meter(*rows[0][:-2])
        used_ns = meter.booked_ns + sum(_unbooked_ns(memory, key, booked, now_ns) for *_, key, booked in rows if key)
        if query(_SNAPSHOT, device_id) == rows:  # otherwise a process has ended or moved meanwhile
            break
    return meter, used_ns


def _unbooked_ns(memory: Path, key: str, booked: int, now_ns: int) -> int:
    used = read_used(f"{memory}/{key}")
    return 0 if used is None else max(0, used.by(now_ns) - booked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process has used of one device so far, and what that has drawn beyond the idle draw, as the device draws now."""

    pid: int
    lease: str
    device_id: str
    used_ns: int
    drawn_uj: int


def works(query: Query, memory: Path, now_ns: int) -> list[Work]:
    """Return the work of living processes and of the last ones that ended."""
    statements = (
        "SELECT process, device, pid, lease, ns FROM spent",
        "SELECT key, device, pid, lease, (SELECT COALESCE(SUM(ns), 0) FROM spent WHERE process=key) FROM processes",
        "SELECT device, peak_mw - idle_mw FROM meters",
    )
    both = f"SELECT 0, * FROM ({statements[0]}) UNION ALL SELECT 1, * FROM ({statements[1]})"  # noqa: S608
    for _ in range(_READS):
        rows = query(both)
        found: dict[tuple[str, str, int, str], int] = {}
        for living, key, device_id, pid, lease, ns in rows:
            used_ns = _unbooked_ns(memory, key, ns, now_ns) if living else ns
            found[key, device_id, pid, lease] = found.get((key, device_id, pid, lease), 0) + used_ns
        if query(both) == rows:
            break
    range_mw = dict(query(statements[2]))
    return [
        Work(pid=pid, lease=lease, device_id=device, used_ns=ns, drawn_uj=range_mw.get(device, 0) * ns // 1_000_000)
        for (_, device, pid, lease), ns in found.items()
    ]


# -- changing ------------------------------------------------------------------------------------------------------------


def set_draw(db: sqlite3.Connection, memory: Path, idle_mw: int, peak_mw: int, noise_milli: int) -> None:
    """Have all devices draw so from now on."""
    begin_boot(db, memory)
    now_ns = since_boot_ns()
    for (device_id,) in db.execute("SELECT device FROM meters").fetchall():
        found = read_meter(_on(db), memory, device_id, now_ns)
        if found is not None:
            _change_draw(db, device_id, now_ns, found[1], (idle_mw, peak_mw, noise_milli))


def _change_draw(db: sqlite3.Connection, device_id: str, now_ns: int, used_ns: int, draw: tuple[int, int, int]) -> None:
    """Go on from what the counter shows now."""
    before = Meter(*db.execute(f"{_METER} FROM meters m WHERE m.device=?", (device_id,)).fetchone())
    begun = Meter(device_id, before.boot, now_ns, *draw, 0, used_ns, before.booked_ns, 0, 1, 1)
    db.execute(
        "UPDATE meters SET since_ns=?, idle_mw=?, peak_mw=?, noise_milli=?, drawn_uj=?, counted_ns=? WHERE device=?",
        (now_ns, *draw, before.drawn(used_ns, now_ns) - begun.drawn(used_ns, now_ns), used_ns, device_id),
    )


def set_counter(db: sqlite3.Connection, memory: Path, device_id: str, energy_mj: int) -> None:
    """Have the counter of a device show so much now, mJ, and go on from there."""
    begin_boot(db, memory)
    now_ns = since_boot_ns()
    found = read_meter(_on(db), memory, device_id, now_ns)
    if found is not None:
        shift_mj = energy_mj - found[0].drawn(found[1], now_ns) // 1000
        db.execute("UPDATE meters SET shift_mj=? WHERE device=?", (shift_mj, device_id))


def _on(db: sqlite3.Connection) -> Query:
    return lambda sql, *values: db.execute(sql, values).fetchall()
