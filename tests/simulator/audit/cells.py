"""What holds in every run: time, memory on devices, and cells with the model of contention."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from tests.simulator.audit.figures import Books
from tests.simulator.audit.sessions import Cell, Device, Entry, Running, Session, listed


class Audit:
    """Takes a record line by line. `problems` are the laws that it breaks; `figures` are those of the run."""

    fill_percent = 100  # of a device that a cell fills while it uses it

    def __init__(self, head: Entry) -> None:
        self.problems: list[str] = []
        self.lines = 1
        self.name: str = head["name"]
        self.hosts: list[Entry] = head["hosts"]
        self.sizes: dict[Device, tuple[int, int]] = {}  # memory, and what leases may have of it, MiB
        for at, host in enumerate(self.hosts):
            for device in host["devices"]:
                size = device["memory_mib"]
                self.sizes[at, device["device_id"]] = (size, size - device["overhead_mib"])
        self.used = dict.fromkeys(self.sizes, 0)
        self.holders: dict[Device, dict[str, Session]] = {device: {} for device in self.sizes}
        self.sessions: dict[str, Session] = {}
        self.running: dict[str, Session] = {}
        self.now_ms = 0
        self.books = Books()

    # -- lines --------------------------------------------------------------------------------------------------------

    def line(self, number: int, entry: Entry) -> None:
        """Take the next line of the record."""
        self.lines = number
        if "event" in entry:
            self.advance(entry["fields"]["at_ms"])
            self.event(entry)
        elif "world" in entry:
            self.advance(entry["at_ms"])
            session = self.sessions[entry["session"]]
            self.on_its_host(session, entry)
            self.world(entry["world"], session, entry)
        else:
            cells = [Cell(*cell) for cell in entry["cells"]]
            first = cells[0].start_ms if cells else entry["close_ms"]
            about = (entry["user"], entry["open_ms"], entry["close_ms"], entry["gpus"], entry["asked_mib"])
            self.sessions[entry["session"]] = Session(
                entry["session"], *about, cells, due_ms=first, pool=entry.get("pool", "")
            )

    def end(self) -> None:
        """Check what must be over when the record is."""
        for session in self.sessions.values():
            if session.running is not None:
                self.wrong(f"cell {session.next_cell} of {session.name} never ends")

    def wrong(self, what: str) -> None:
        self.problems.append(f"line {self.lines}, {self.now_ms} ms: {what}")

    def on_its_host(self, session: Session, entry: Entry) -> None:
        if session.host is not None and entry["host"] != session.host:
            self.wrong(f"{session.name} is on host {session.host}, and the line is of host {entry['host']}")

    def event(self, entry: Entry) -> None:
        raise NotImplementedError

    def world(self, kind: str, session: Session, entry: Entry) -> None:
        raise NotImplementedError

    # -- time ---------------------------------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Account for the time up to now."""
        passed = now_ms - self.now_ms
        if passed < 0:
            self.wrong(f"time goes back to {now_ms} ms")
        if passed > 0:
            self.before_time_passes()
            held = self.held()
            self.books.held += held * passed
            self.books.peak_held = max(self.books.peak_held, held)
            self.books.busy += passed * sum(session.cell.gpus for session in self.running.values())
        self.now_ms = now_ms

    def before_time_passes(self) -> None:
        """Check what must hold whenever all that happens at one time has happened."""

    def held(self) -> int:
        """Return on how many devices memory is held."""
        return sum(bool(holders) for holders in self.holders.values())

    # -- devices ------------------------------------------------------------------------------------------------------

    def devices_of(self, session: Session, device_ids: Iterable[str]) -> list[Device]:
        return [(session.host if session.host is not None else -1, device_id) for device_id in device_ids]

    def memory(self, session: Session, device_ids: tuple[str, ...], mib: int) -> None:
        """Count `mib` more used on each of the devices."""
        for device in self.devices_of(session, device_ids):
            self.used[device] += mib
            now_mib = session.used_mib[device[1]] = session.used_mib.get(device[1], 0) + mib
            if mib > 0 and self.used[device] > self.sizes[device][0]:
                self.too_much(device)
            if now_mib < 0 or (mib > 0 and now_mib > session.reserved_mib):
                self.wrong(
                    f"{session.name} uses {now_mib} MiB of {device[1]}, where {session.reserved_mib} MiB are reserved for it"
                )

    def too_much(self, device: Device) -> None:
        """Say that more of a device is used than it has."""
        self.wrong(f"{self.used[device]} MiB are in use on {device[1]}, which has {self.sizes[device][0]} MiB")

    # -- cells --------------------------------------------------------------------------------------------------------

    def is_next(self, kind: str, session: Session, entry: Entry) -> bool:
        """Return whether a moment is of the session's next cell."""
        if entry["cell"] == session.next_cell < len(session.cells):
            return True
        self.wrong(f"cell {entry['cell']} of {session.name} {kind}, and its next one is {session.next_cell}")
        return False

    def in_phase(self, session: Session, kind: str, *phases: str) -> None:
        if session.phase not in phases:
            self.wrong(f"cell {session.next_cell} of {session.name} {kind}, and it is {session.phase}")

    def asked(self, session: Session) -> None:
        self.in_phase(session, "is asked for", "idle")
        if self.now_ms != session.due_ms:
            self.wrong(
                f"cell {session.next_cell} of {session.name} is asked for; by its trace that is at {session.due_ms} ms"
            )
        session.phase, session.asked_ms = "asked", self.now_ms

    def begins(self, kind: str, session: Session, entry: Entry, *, asks: bool) -> None:
        """Let a cell run, for the first time or again, on devices if it asks for the GPU."""
        cell, device_ids = session.cell, tuple(entry["device_ids"])
        if (asks and not device_ids) or entry["util_percent"] != (cell.util_percent if cell.gpus else 0):
            self.wrong(
                f"cell {session.next_cell} of {session.name} {kind} with another device or utilisation than in its trace"
            )
        if cell.gpus and any(session.used_mib.get(device_id) != cell.gpu_mib for device_id in device_ids):
            self.wrong(
                f"cell {session.next_cell} of {session.name} {kind} with {session.used_mib} MiB, and needs {cell.gpu_mib} MiB on each"
            )
        if session.running is None:
            session.running = Running(entry["util_percent"], self.now_ms, None)
        running = session.running
        running.since_ms = self.now_ms
        running.device = self.devices_of(session, device_ids)[0] if device_ids else None
        session.phase = "running"
        if device_ids:  # a cell that does not ask runs beside the GPU, and a suspend does not stop it
            self.running[session.name] = session
            self._stretch(running.device)

    def _stretch(self, device: Device | None) -> None:
        """Bring the cells of a device up to now, and let each take as long from now on as the model says."""
        if device is None:
            return
        cells = [
            session.running for session in self.running.values() if session.running and session.running.device == device
        ]
        k = Fraction(1)
        if self.hosts[device[0]]["slowdown"]:
            k = least_k(
                [Fraction(cell.util_percent, 100) for cell in cells], Fraction(100_000 // self.fill_percent, 1000)
            )
        for cell in cells:
            cell.advance(self.now_ms)
            cell.stretch = 1 + Fraction(cell.util_percent, 100) * (k - 1)
            cell.changes += 1

    def leaves(self, session: Session) -> Running | None:
        """Take the cell off its device."""
        running = session.running
        if running is not None:
            running.advance(self.now_ms)
            running.changes += 1
            if self.running.pop(session.name, None) is not None:
                self._stretch(running.device)
        return running

    def ends(self, session: Session, late_ms: int) -> None:
        """End a cell that has run, so much later than alone."""
        self.in_phase(session, "ends", "running")
        running, cell = self.leaves(session), session.cell
        if running is not None:
            over_ms = running.done_ms - cell.duration_ms
            most_ms = 1 / running.stretch + Fraction(running.changes, 1_000_000)
            if not 0 <= over_ms < most_ms:
                did = f"{float(running.done_ms):.3f} ms of its {cell.duration_ms} ms"
                self.wrong(f"cell {session.next_cell} of {session.name} ends after {did}, by the model of contention")
        if cell.gpus:
            self.books.late.setdefault(session.user, []).append(late_ms)
            stretch = max(Fraction(1), Fraction(cell.duration_ms + late_ms, max(cell.duration_ms, 10_000)))
            self.books.stretch.setdefault(session.user, []).append(int(stretch * 1000))
        self.over(session)

    def over(self, session: Session) -> None:
        """Expect the next cell, or the end, as long after this one as in the trace."""
        cell = session.cell
        session.running, session.phase = None, "idle"
        session.next_cell += 1
        follows = session.cell.start_ms if session.next_cell < len(session.cells) else session.close_ms
        session.due_ms = self.now_ms + max(0, follows - cell.start_ms - cell.duration_ms)

    def closes(self, session: Session) -> None:
        """Close the notebook."""
        self.books.last_close_ms = self.now_ms
        session.closed = True
        if session.phase != "idle" or session.next_cell != len(session.cells) or session.due_ms != self.now_ms:
            self.wrong(f"{session.name} closes after {session.next_cell} cells; its trace says at {session.due_ms} ms")

    # -- figures ------------------------------------------------------------------------------------------------------

    def lost(self) -> int:
        """Return how many sessions were lost."""
        return sum(session.lost or not session.closed for session in self.sessions.values())

    def figures(self) -> dict[str, object]:
        """Return the figures of the run, under the names that `--json` prints."""
        return self.books.figures(list(self.sessions.values()), len(self.hosts), len(self.sizes), self.lost())


def least_k(wants: Sequence[Fraction], capacity: Fraction) -> Fraction:
    """Return the least k in whole thousandths, 1 or more, for which kernels that want so much use no more than that, by halving."""
    low, high = 999, 1000 * max(1, len(wants))
    while high - low > 1:
        middle = (low + high) // 2
        if sum(want / (1 - want + want * Fraction(middle, 1000)) for want in wants) <= capacity:
            high = middle
        else:
            low = middle
    return Fraction(high, 1000)


def held_by(session: Session) -> str:
    return f"{session.state} on {listed(session.holds)}"
