"""An auditor of the simulator: recomputes the figures of a run from its record, and checks that the record is possible at all.

    python tests/simulator/audit.py RECORD [--json RESULT]

It shares no code with the simulator and the arbiter: it reads the record that `jupyter gpu simulate --record` wrote (docs/simulator.md
describes the format) and imports the standard library only. With `--json` it compares its figures with those that the run printed.
The exit code is 1 if the record breaks a law or a figure differs, 2 if a file cannot be read.

The laws:

- The effects are those that the digest says; time does not go back; leases go from the state in which they are.
- On each device, memory in use fits the device, and reservations fit what leases may have of it. A lease with several devices has all of
  them, and alone. Memory is used only within the reservation of a lease that is on the device.
- Saved memory fits the host's budget. A swap takes the fixed time and the bytes over the bandwidth; so many run at a time as may.
- A cell is asked for as long after the one before as the trace says, begins when its lease is let in and has its memory, and takes
  1 - u + u * k times its duration: k is the least number of whole thousandths, 1 or more, for which the cells on its (first) device use
  no more than all of it, each u / (1 - u + u * k). Here that is exact, in fractions; the record's whole milliseconds may be later by less
  than one, and by a nanosecond for each change of k.
- A suspend in the middle of a cell stops it, unless it fails; a swap that fails takes the fixed time and moves nothing.
- A cell that waits for more memory fails after the patience of the run, not before, and at once beyond its lease's cap.

Two figures are not in the record: `wall_s` is of the machine, and `forecast_error` is of what the arbiter expected.
"""

import argparse
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

NOT_AUDITED = ("wall_s", "forecast_error", "baselines")
MOST_SHOWN = 40
HOLDING = ("resident", "suspending", "resuming", "quarantined")
HOUR_MS = 3_600_000

Entry = dict[str, Any]


class AuditError(Exception):
    """A file cannot be audited."""


@dataclass(slots=True)
class Cell:
    """A cell of the trace: ms, MiB, percent."""

    start_ms: int
    duration_ms: int
    gpus: int
    gpu_mib: int
    util_percent: int


@dataclass(slots=True)
class Running:
    """A cell that runs: nominal ms done until `since_ms`, and how many times its nominal time it takes since then."""

    util_percent: int
    since_ms: int
    device_id: str  # whose neighbours slow it down; empty: none
    done_ms: Fraction = Fraction(0)
    stretch: Fraction = Fraction(1)
    changes: int = 0

    def advance(self, now_ms: int) -> None:
        self.done_ms += (now_ms - self.since_ms) / self.stretch
        self.since_ms = now_ms


@dataclass(slots=True)
class Session:
    """A session and its lease, as the record has them so far."""

    name: str
    user: str
    open_ms: int
    close_ms: int
    gpus: int
    cells: list[Cell]
    devices: int = 1
    alone: bool = False  # on its devices
    cap_mib: int = 0  # of what it may ever use of each
    state: str | None = None
    holds: tuple[str, ...] = ()
    reserved_mib: int = 0  # on each of its devices
    used_mib: dict[str, int] = field(default_factory=dict)  # by device
    host_mib: int = 0
    next_cell: int = 0
    due_ms: int = 0  # when its next cell is asked for, or it closes
    phase: str = "idle"  # asked, short, running, preempted
    asked_ms: int = 0
    short_ms: int = 0
    let_in_ms: int = 0
    running: Running | None = None
    to_preempt: bool = False
    closed: bool = False
    lost: bool = False

    @property
    def cell(self) -> Cell:
        return self.cells[self.next_cell]

    @property
    def total_mib(self) -> int:
        return sum(self.used_mib.values())


@dataclass(slots=True)
class Swap:
    """An operation under way."""

    session: Session
    kind: str  # Suspend, Resume
    began_ms: int
    mib: int
    fails: bool = False


@dataclass(slots=True)
class Books:
    """What is added up. GPU time in ms of one GPU."""

    busy: int = 0
    held: int = 0
    peak_held: int = 0
    suspends: int = 0
    resumes: int = 0
    failed_swaps: int = 0
    preemptions: int = 0
    moved_mib: int = 0
    host_peak_mib: int = 0
    out_of_memory: int = 0
    last_close_ms: int = 0
    waits: list[int] = field(default_factory=list)
    doors: list[int] = field(default_factory=list)
    late: dict[str, list[int]] = field(default_factory=dict)  # by user


class Audit:
    """Reads a record line by line. `problems` are the laws it breaks; `figures` are those of the run."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.lines = 0
        self._head: Entry = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # memory, and what leases may have of it, MiB
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, Session] = {}
        self._holders: dict[str, dict[str, Session]] = {}  # by device
        self._used: dict[str, int] = {}  # by device
        self._swaps: dict[int, Swap] = {}
        self._now_ms = self._host_mib = 0
        self._books = Books()

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> None:
        """Audit a record. Raises AuditError."""
        for number, entry in _entries(path):
            self.lines = number
            try:
                self._line(entry)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise AuditError(f"{path}, line {number}: cannot be read: {type(error).__name__} {error}") from error
        if not self._head:
            raise AuditError(f"{path} is empty")
        for session in self._sessions.values():
            self._stopped(session)
            if session.running is not None:
                self._wrong(f"cell {session.next_cell} of {session.name} never ends")

    def _wrong(self, what: str) -> None:
        self.problems.append(f"line {self.lines}, {self._now_ms} ms: {what}")

    def _line(self, entry: Entry) -> None:
        if self.lines == 1:
            self._begin(entry)
        elif "event" in entry:
            self._event(entry)
        elif "world" in entry:
            self._advance(entry["at_ms"])
            self._world(entry["world"], self._sessions[entry["session"]], entry)
        else:
            cells = [Cell(*cell) for cell in entry["cells"]]
            first = cells[0].start_ms if cells else entry["close_ms"]
            about = (entry["user"], entry["open_ms"], entry["close_ms"], entry["gpus"])
            self._sessions[entry["session"]] = Session(entry["session"], *about, cells, due_ms=first)

    def _begin(self, head: Entry) -> None:
        if head.get("format") != "jupyter-gpu-events" or head.get("version") != 2:
            raise AuditError("the record is not of version 2; record the run again with --record")
        self._head = head
        for device in head["devices"]:
            name, size = device["device_id"], device["memory_mib"]
            self._sizes[name] = (size, size - device["overhead_mib"])
            self._used[name], self._holders[name] = 0, {}

    def _advance(self, now_ms: int) -> None:
        """Account for the time up to now."""
        passed = now_ms - self._now_ms
        if passed < 0:
            self._wrong(f"time goes back to {now_ms} ms")
        if passed > 0:
            held = sum(bool(holders) for holders in self._holders.values())
            self._books.held += held * passed
            self._books.peak_held = max(self._books.peak_held, held)
            self._books.busy += passed * sum(session.cell.gpus for session in self._running.values())
        self._now_ms = now_ms

    # -- events and effects -------------------------------------------------------------------------------------------

    def _event(self, entry: Entry) -> None:
        kind, fields = entry["event"], entry["fields"]
        self._advance(fields["at_ms"])
        text = json.dumps(entry["effects"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        if hashlib.sha256(text.encode("ascii")).hexdigest()[:16] != entry["digest"]:
            self._wrong(f"the effects of {kind} are not those of the digest")
        name = fields.get("lease_id") or fields.get("spec", {}).get("lease_id")
        if name is not None:
            session = self._sessions[name]
            self._stopped(session)
            self._about(kind, session, fields)
        # all its devices first: a change of state names only the first of them
        devices = {
            effect["lease_id"]: tuple(effect["device_ids"])
            for _, effect in entry["effects"]
            if effect.get("device_ids")
        }
        for effect_kind, effect in entry["effects"]:
            if "lease_id" in effect:
                self._effect(effect_kind, self._sessions[effect["lease_id"]], effect, devices)
        touched = [self._sessions[effect["lease_id"]] for _, effect in entry["effects"] if "lease_id" in effect]
        for device_id in sorted({device_id for session in touched for device_id in session.holds}):
            self._check_holders(device_id)

    def _about(self, kind: str, session: Session, fields: Entry) -> None:
        match kind:
            case "LeaseRequested":
                spec = fields["spec"]
                session.devices, session.cap_mib = spec["devices"], spec["reserve_mib"]
                session.alone = spec["devices"] > 1
                if self._now_ms != session.open_ms:
                    self._wrong(f"{session.name} opens, and its trace says at {session.open_ms} ms")
            case "Attached":
                self._books.doors.append(self._now_ms - session.open_ms)
            case "LeaseMeasured" if fields["used_mib"] != session.total_mib:
                self._wrong(
                    f"{session.name} is measured with {fields['used_mib']} MiB and uses {session.total_mib} MiB"
                )
            case "SuspendFinished" | "ResumeFinished":
                self._finished(kind, session, fields)
            case "ProcessExited":
                for swap in self._swaps.values():
                    swap.kind = "over" if swap.session is session else swap.kind
            case "LeaseReleased":
                self._closes(session)

    def _closes(self, session: Session) -> None:
        self._books.last_close_ms = self._now_ms
        session.closed = True
        if session.phase != "idle" or session.next_cell != len(session.cells) or session.due_ms != self._now_ms:
            self._wrong(f"{session.name} closes after {session.next_cell} cells; its trace says at {session.due_ms} ms")
        if session.total_mib or session.host_mib:
            self._wrong(
                f"{session.name} is closed and still has {session.total_mib} MiB, {session.host_mib} MiB on the host"
            )

    def _effect(self, kind: str, session: Session, effect: Entry, devices: dict[str, tuple[str, ...]]) -> None:
        match kind:
            case "StateChanged":
                self._changed(session, effect, devices)
            case "Granted":
                session.reserved_mib, session.let_in_ms = effect["reserved_mib"], self._now_ms
                if session.state != "resident" or session.holds != tuple(effect["device_ids"]):
                    self._wrong(
                        f"{session.name} is granted {_list(effect['device_ids'])}, and is {session.state} on {_list(session.holds)}"
                    )
            case "Resized":
                session.reserved_mib, session.let_in_ms = effect["reserved_mib"] or session.reserved_mib, self._now_ms
            case "Suspend":
                self._books.suspends += 1
                session.to_preempt = session.phase == "short" or session.name in self._running
                self._swap(kind, session, effect, session.total_mib)
            case "Resume":
                self._books.resumes += 1
                session.reserved_mib = effect["reserve_mib"]
                self._swap(kind, session, effect, session.host_mib)
            case "LeaseRefused":
                session.lost = True
            case "LeaseEnded":
                session.lost |= effect["reason"] != "released"

    def _changed(self, session: Session, change: Entry, devices: dict[str, tuple[str, ...]]) -> None:
        if change["old"] != session.state:
            self._wrong(f"{session.name} goes from {change['old']} to {change['new']}, and was {session.state}")
        was, session.state = session.state, change["new"]
        if was in HOLDING:
            for device_id in session.holds:
                self._holders[device_id].pop(session.name, None)
        if session.state in HOLDING and change["device_id"] is not None:
            known = session.holds if change["device_id"] in session.holds else (change["device_id"],)
            session.holds = devices.get(session.name, known)
            for device_id in session.holds:
                self._holders[device_id][session.name] = session
            if len(session.holds) != session.devices:
                self._wrong(
                    f"{session.name} holds {_list(session.holds)}, and its lease is for {session.devices} devices"
                )

    def _check_holders(self, device_id: str) -> None:
        holders = self._holders[device_id].values()
        reserved, leasable = sum(session.reserved_mib for session in holders), self._sizes[device_id][1]
        if reserved > leasable:
            self._wrong(
                f"leases have {reserved} MiB reserved on {device_id}, which gives them {leasable} MiB: {_names(holders)}"
            )
        if len(holders) > 1 and any(session.alone for session in holders):
            self._wrong(f"a lease of several devices does not have {device_id} alone: {_names(holders)}")

    # -- swaps --------------------------------------------------------------------------------------------------------

    def _swap(self, kind: str, session: Session, effect: Entry, mib: int) -> None:
        self._swaps[effect["operation_id"]] = Swap(session, kind, self._now_ms, mib)
        under_way = sum(swap.kind != "over" for swap in self._swaps.values())
        if under_way > self._head["parallel_swaps"]:
            self._wrong(f"{under_way} swaps run at a time, and {self._head['parallel_swaps']} may")
        wanted = "suspending" if kind == "Suspend" else "resuming"
        if session.state != wanted:
            self._wrong(f"a {kind} of {session.name} begins, and it is {session.state}")

    def _swap_fails(self, session: Session, kind: str) -> None:
        """Expect that the swap of a session changes nothing; a cell goes on."""
        self._books.failed_swaps += 1
        session.to_preempt = False
        for swap in self._swaps.values():
            if swap.session is session and swap.kind.lower() == kind:
                swap.fails = True
                return
        self._wrong(f"a {kind} of {session.name} fails that was not begun")

    def _failed(self, kind: str, swap: Swap, fields: Entry) -> None:
        """A swap that failed ends after the fixed time, or at once if the host lacks the memory, and nothing has moved."""
        session = swap.session
        takes_ms = 0 if fields.get("need_mib") else self._head["swap"]["fixed_ms"]
        if self._now_ms - swap.began_ms != takes_ms:
            self._wrong(f"{kind} of {session.name} failed after {self._now_ms - swap.began_ms} ms, not {takes_ms} ms")
        mib = session.total_mib if swap.kind == "Suspend" else session.host_mib
        if swap.kind != "over" and (mib != swap.mib or fields["outcome"] not in ("aborted", "not-started")):
            self._wrong(f"{kind} of {session.name} failed: {fields['outcome']}, with {mib} of {swap.mib} MiB")

    def _finished(self, kind: str, session: Session, fields: Entry) -> None:
        swap = self._swaps.pop(fields["operation_id"], None)
        if swap is None or swap.session is not session or swap.kind not in ("over", kind.removesuffix("Finished")):
            self._wrong(f"{kind} of {session.name}: operation {fields['operation_id']} was never begun")
            return
        if swap.fails:
            self._failed(kind, swap, fields)
            return
        speeds = self._head["swap"]
        speed = speeds["save_mib_per_s" if kind == "SuspendFinished" else "restore_mib_per_s"]
        takes_ms = speeds["fixed_ms"] + -(-swap.mib * 1000 // speed)
        if self._now_ms - swap.began_ms != takes_ms:
            self._wrong(
                f"{kind} of {session.name} after {self._now_ms - swap.began_ms} ms; {swap.mib} MiB take {takes_ms} ms"
            )
        if swap.kind == "over":
            return
        on_devices, on_host = (0, swap.mib) if swap.kind == "Suspend" else (swap.mib, 0)
        if (session.total_mib, session.host_mib) != (on_devices, on_host):
            has = f"{session.total_mib} MiB on devices and {session.host_mib} MiB on the host"
            self._wrong(f"{kind} of {session.name}, which has {has}; expected {on_devices} and {on_host} MiB")
        if kind == "SuspendFinished" and fields["saved_mib"] != swap.mib:
            self._wrong(f"{session.name} says {fields['saved_mib']} MiB saved, and had {swap.mib} MiB")

    # -- the world ----------------------------------------------------------------------------------------------------

    def _world(self, kind: str, session: Session, entry: Entry) -> None:
        if kind == "memory":
            self._memory(session, tuple(entry["device_ids"]), entry["mib"])
        elif kind in ("saved", "restored", "dropped"):
            self._host(kind, session, entry["mib"])
        elif kind == "preempted":
            self._preempted(session)
        elif kind == "swap-fails":
            self._swap_fails(session, entry["swap"])
        else:
            self._stopped(session)
            self._cell(kind, session, entry)

    def _memory(self, session: Session, device_ids: tuple[str, ...], mib: int) -> None:
        if session.state not in HOLDING or device_ids != session.holds:
            self._wrong(
                f"{session.name} uses memory of {_list(device_ids)}, and is {session.state} on {_list(session.holds)}"
            )
        for device_id in device_ids:
            self._used[device_id] += mib
            now_mib = session.used_mib[device_id] = session.used_mib.get(device_id, 0) + mib
            if mib > 0 and self._used[device_id] > self._sizes[device_id][0]:
                self._books.out_of_memory += 1
                self._wrong(
                    f"{self._used[device_id]} MiB are in use on {device_id}, which has {self._sizes[device_id][0]} MiB"
                )
            if now_mib < 0 or (mib > 0 and now_mib > session.reserved_mib):
                self._wrong(
                    f"{session.name} uses {now_mib} MiB of {device_id}, where {session.reserved_mib} MiB are reserved for it"
                )

    def _host(self, kind: str, session: Session, mib: int) -> None:
        self._books.moved_mib += mib * (kind != "dropped")
        change = mib if kind == "saved" else -mib
        self._host_mib += change
        session.host_mib += change
        self._books.host_peak_mib = max(self._books.host_peak_mib, self._host_mib)
        if session.host_mib < 0:
            self._wrong(f"{session.name} takes {mib} MiB from the host, and has less there")
        if kind == "saved" and self._host_mib > self._head["host_memory_mib"]:
            self._wrong(
                f"{self._host_mib} MiB are saved on the host, and its budget is {self._head['host_memory_mib']} MiB"
            )

    # -- cells --------------------------------------------------------------------------------------------------------

    def _cell(self, kind: str, session: Session, entry: Entry) -> None:
        if entry["cell"] != session.next_cell or session.next_cell >= len(session.cells):
            self._wrong(f"cell {entry['cell']} of {session.name} {kind}, and its next one is {session.next_cell}")
            return
        match kind:
            case "asked":
                self._asked(session)
            case "begins" | "continues":
                self._begins(kind, session, entry)
            case "short":
                self._short(session, entry)
            case "failed":
                self._fails(session)
            case "ends":
                self._ends(session)
            case _:
                self._wrong(f"there is no moment {kind!r}")

    def _in_phase(self, session: Session, kind: str, *phases: str) -> None:
        if session.phase not in phases:
            self._wrong(f"cell {session.next_cell} of {session.name} {kind}, and it is {session.phase}")

    def _asked(self, session: Session) -> None:
        self._in_phase(session, "is asked for", "idle")
        if self._now_ms != session.due_ms:
            self._wrong(
                f"cell {session.next_cell} of {session.name} is asked for; by its trace that is at {session.due_ms} ms"
            )
        session.phase, session.asked_ms = "asked", self._now_ms

    def _short(self, session: Session, entry: Entry) -> None:
        self._in_phase(session, "is short of memory", "asked")
        session.phase, session.short_ms = "short", self._now_ms
        has, needs = entry["mib"], entry["need_mib"]
        if needs != session.cell.gpu_mib or has != session.reserved_mib:
            self._wrong(f"{session.name} is short with {has} of {needs} MiB; {session.reserved_mib} MiB are reserved")

    def _fails(self, session: Session) -> None:
        self._in_phase(session, "fails", "short")
        self._books.out_of_memory += 1
        self._waited(session)
        after_ms = self._now_ms - session.short_ms
        if after_ms != (self._head["patience_ms"] if session.cell.gpu_mib <= session.cap_mib else 0):
            self._wrong(f"cell {session.next_cell} of {session.name} fails after {after_ms} ms without its memory")
        self._over(session)

    def _waited(self, session: Session) -> None:
        if session.cell.gpus:
            self._books.waits.append(self._now_ms - session.asked_ms)

    def _begins(self, kind: str, session: Session, entry: Entry) -> None:
        cell, device_ids = session.cell, tuple(entry["device_ids"])
        self._in_phase(session, kind, *(("asked", "short") if kind == "begins" else ("preempted",)))
        asks = cell.gpus > 0 or self._head["every_cell_asks"]
        if asks and (session.state != "resident" or session.holds != device_ids):
            self._wrong(
                f"cell {session.next_cell} of {session.name} {kind} on {_list(device_ids)}, and its lease is {session.state}"
            )
        elif asks and self._now_ms != max(session.let_in_ms, session.asked_ms):
            let_in = max(session.let_in_ms, session.asked_ms)
            self._wrong(f"cell {session.next_cell} of {session.name} {kind}, and its lease was let in at {let_in} ms")
        if (asks and not device_ids) or entry["util_percent"] != (cell.util_percent if cell.gpus else 0):
            self._wrong(
                f"cell {session.next_cell} of {session.name} {kind} with another device or utilisation than in its trace"
            )
        if cell.gpus and any(session.used_mib.get(device_id) != cell.gpu_mib for device_id in device_ids):
            self._wrong(
                f"cell {session.next_cell} of {session.name} {kind} with {session.used_mib} MiB, and needs {cell.gpu_mib} MiB on each"
            )
        if kind == "begins":
            self._waited(session)
            session.running = Running(entry["util_percent"], self._now_ms, "")
        running = session.running
        if running is None:
            return
        running.since_ms, running.device_id = self._now_ms, device_ids[0] if device_ids else ""
        session.phase = "running"
        if device_ids:  # a cell that does not ask runs beside the GPU, and a suspend does not stop it
            self._running[session.name] = session
            self._stretch(running.device_id)

    def _stretch(self, device_id: str) -> None:
        """Bring the cells of a device up to now, and let each take as long from now on as the model says."""
        cells = [
            session.running
            for session in self._running.values()
            if session.running and session.running.device_id == device_id
        ]
        k = least_k([Fraction(cell.util_percent, 100) for cell in cells]) if self._head["slowdown"] else Fraction(1)
        for cell in cells:
            cell.advance(self._now_ms)
            cell.stretch = 1 + Fraction(cell.util_percent, 100) * (k - 1)
            cell.changes += 1

    def _leaves(self, session: Session) -> Running | None:
        """Take the cell off its device."""
        running = session.running
        if running is not None:
            running.advance(self._now_ms)
            running.changes += 1
            if self._running.pop(session.name, None) is not None:
                self._stretch(running.device_id)
        return running

    def _preempted(self, session: Session) -> None:
        self._in_phase(session, "is preempted", "running", "short")
        if not session.to_preempt:
            self._wrong(f"cell {session.next_cell} of {session.name} is preempted without a suspend")
        session.to_preempt = False
        self._books.preemptions += 1
        session.phase = "asked" if session.phase == "short" else "preempted"
        self._leaves(session)

    def _stopped(self, session: Session) -> None:
        if session.to_preempt:
            session.to_preempt = False
            self._wrong(f"{session.name} is suspended in the middle of cell {session.next_cell}, which is not stopped")

    def _ends(self, session: Session) -> None:
        self._in_phase(session, "ends", "running")
        running, cell = self._leaves(session), session.cell
        if running is not None:
            over_ms = running.done_ms - cell.duration_ms
            most_ms = 1 / running.stretch + Fraction(running.changes, 1_000_000)
            if not 0 <= over_ms < most_ms:
                did = f"{float(running.done_ms):.3f} ms of its {cell.duration_ms} ms"
                self._wrong(f"cell {session.next_cell} of {session.name} ends after {did}, by the model of contention")
        if cell.gpus:
            self._books.late.setdefault(session.user, []).append(self._now_ms - session.asked_ms - cell.duration_ms)
        self._over(session)

    def _over(self, session: Session) -> None:
        """Expect the next cell, or the end, as long after this one as in the trace."""
        cell = session.cell
        session.running, session.phase = None, "idle"
        session.next_cell += 1
        follows = session.cell.start_ms if session.next_cell < len(session.cells) else session.close_ms
        session.due_ms = self._now_ms + max(0, follows - cell.start_ms - cell.duration_ms)

    # -- figures ------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, object]:
        """Return the figures of the run, under the names that `--json` prints."""
        books, sessions = self._books, list(self._sessions.values())
        cells = [cell for session in sessions for cell in session.cells]
        reserved = sum(session.gpus * (session.close_ms - session.open_ms) for session in sessions)
        opened = min((session.open_ms for session in sessions), default=0)
        late = [late for user in books.late.values() for late in user]
        of_users = sorted(percentile(user, 95) for user in books.late.values())
        return {
            "sessions": len(sessions),
            "cells": len(cells),
            "gpu_cells": sum(cell.gpus > 0 for cell in cells),
            "devices": len(self._sizes),
            "reserved_gpu_hours": _hours(reserved),
            "busy_gpu_hours": _hours(books.busy),
            "held_gpu_hours": _hours(books.held),
            "owned_gpu_hours": _hours(len(self._sizes) * max(0, books.last_close_ms - opened)),
            "saved_gpu_hours": _hours(reserved - books.held),
            "peak_devices_held": books.peak_held,
            "wait_s": spread(books.waits),
            "waited_percent": _nonzero_percent(books.waits),
            "nonzero_wait_s": spread([wait for wait in books.waits if wait]),
            "door_wait_s": spread(books.doors),
            "door_waited_percent": _nonzero_percent(books.doors),
            "late_s": spread(late),
            "user_p95_late_s": {
                name: percentile(of_users, at) / 1000 for name, at in (("median", 50), ("p95", 95), ("worst", 100))
            },
            "jain_late": _jain([sum(times) / len(times) for _, times in sorted(books.late.items())]),
            "suspends": books.suspends,
            "resumes": books.resumes,
            "failed_swaps": books.failed_swaps,
            "preemptions": books.preemptions,
            "moved_gib": round(books.moved_mib / 1024, 3),
            "host_peak_mib": books.host_peak_mib,
            "out_of_memory": books.out_of_memory,
            "lost": sum(session.lost or not session.closed for session in sessions),
        }

    def compare(self, result: dict[str, object]) -> list[str]:
        """Return a sentence for each figure of the result that differs, or that the audit does not know."""
        own = self.figures()
        said = []
        for name in dict.fromkeys([*own, *result]):
            value = result.get(name)
            if name in NOT_AUDITED:
                continue
            if name not in own or name not in result:
                said.append(f"{name}: {'the audit' if name in result else 'the run'} has no such figure")
            elif isinstance(value, dict) and isinstance(parts := own[name], dict):
                names = sorted({*value, *parts})
                said += [
                    f"{name} {part}: the run says {value.get(part)}, the record {parts.get(part)}"
                    for part in names
                    if value.get(part) != parts.get(part)
                ]
            elif own[name] != value:
                said.append(f"{name}: the run says {value}, the record {own[name]}")
        return said


def _entries(path: Path) -> Iterator[tuple[int, Entry]]:
    try:
        with gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise AuditError(f"{path}, line {number}: expected an object")
                yield number, entry
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise AuditError(f"{path} cannot be read: {error}") from error


def _hours(gpu_ms: int) -> float:
    return round(gpu_ms / HOUR_MS, 3)


def least_k(wants: Sequence[Fraction]) -> Fraction:
    """Return the least k in whole thousandths, 1 or more, for which kernels that want so much use no more than a device, by halving."""
    low, high = 999, 1000 * max(1, len(wants))
    while high - low > 1:
        middle = (low + high) // 2
        if sum(want / (1 - want + want * Fraction(middle, 1000)) for want in wants) <= 1:
            high = middle
        else:
            low = middle
    return Fraction(high, 1000)


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest of the values that at least `percent` of them do not exceed; 0 of none."""
    return next((value for at, value in enumerate(sorted(values), 1) if at * 100 >= percent * len(values)), 0)


def spread(times_ms: Sequence[int]) -> dict[str, float]:
    """Return percentiles and the largest in seconds."""
    named = {f"p{percent}": percentile(times_ms, percent) / 1000 for percent in (50, 90, 95, 99)}
    return {**named, "max": max(times_ms, default=0) / 1000}


def _nonzero_percent(times_ms: Sequence[int]) -> float:
    return round(100 * sum(time_ms != 0 for time_ms in times_ms) / len(times_ms), 3) if times_ms else 0.0


def _jain(means: Sequence[float]) -> float:
    """Return Jain's index of fairness, (Σx)² / (n · Σx²)."""
    squares = sum(mean * mean for mean in means)
    return round(sum(means) ** 2 / (len(means) * squares), 4) if squares else 1.0


def _list(device_ids: Sequence[str]) -> str:
    return " ".join(device_ids) or "no device"


def _names(sessions: Iterable[Session]) -> str:
    return ", ".join(sorted(session.name for session in sessions))


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a record, print what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description="Recompute a simulated run's figures from its record.")
    parser.add_argument("record", type=Path, metavar="RECORD", help="what `jupyter gpu simulate --record` wrote")
    parser.add_argument("--json", type=Path, metavar="RESULT", help="what the same run printed with --json")
    options = parser.parse_args(arguments)
    audit = Audit()
    try:
        audit.read(options.record)
        result = json.loads(options.json.read_text()) if options.json is not None else {}
    except (AuditError, OSError, ValueError) as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    wrong = [*audit.problems, *(audit.compare(result) if options.json is not None else ())]
    for sentence in wrong[:MOST_SHOWN]:
        sys.stdout.write(f"{sentence}\n")
    if len(wrong) > MOST_SHOWN:
        sys.stdout.write(f"and {len(wrong) - MOST_SHOWN} more\n")
    if options.json is None:
        sys.stdout.write(json.dumps(audit.figures()) + "\n")
    compared = sum(name not in NOT_AUDITED for name in result)
    sys.stdout.write(f"{audit.lines} lines, {compared} figures compared: {len(wrong)} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
