"""Baselines without an arbiter: sessions that take devices and keep them, or share all of them."""

from tests.simulator.audit.cells import Audit
from tests.simulator.audit.sessions import AuditError, Device, Entry, Session, leasable, listed, names

Taken = tuple[int, tuple[str, ...], int]  # a host, devices there, and MiB of each


class Baseline(Audit):
    """What all of them have: a door, devices that are taken and given back, and cells that begin when they are asked for."""

    def __init__(self, head: Entry) -> None:
        super().__init__(head)
        facts = head["baseline"]
        self.fill_percent = facts["fill_percent"]
        self.clients: int | None = facts["clients"]
        self.cull_after_ms: int | None = facts["cull_after_ms"]
        self.door: list[Session] = []  # and culled kernels whose cells wait, in the order in which they came
        self._since_ms: dict[str, int] = {}  # when each of them came
        self._changed = False
        self._shut_down: set[str] = set()  # culled, and without devices
        self._began: set[str] = set()  # let in once

    # -- the rules of each baseline -----------------------------------------------------------------------------------

    def chosen(self, session: Session) -> Taken | None:
        """Return what a session at the door must take now; None: it must wait."""
        raise NotImplementedError

    def first_only(self) -> bool:
        """Return whether only the first at the door may be let in."""
        return False

    def room(self, device: Device) -> int:
        """Return what may be taken of a device, MiB."""
        return self.sizes[device][1]

    def free_mib(self, device: Device) -> int:
        """Return what is not taken of a device, MiB."""
        return self.room(device) - sum(session.reserved_mib for session in self.holders[device].values())

    # -- moments ------------------------------------------------------------------------------------------------------

    def event(self, entry: Entry) -> None:
        self.wrong(f"{entry['event']} is an event, and no arbiter runs")

    def on_its_host(self, session: Session, entry: Entry) -> None:
        if session.holds:  # without devices it is nowhere
            super().on_its_host(session, entry)

    def world(self, kind: str, session: Session, entry: Entry) -> None:
        match kind:
            case "comes":
                self._comes(session)
            case "takes":
                self._takes(session, entry)
            case "memory":
                if tuple(entry["device_ids"]) != session.holds:
                    self.wrong(f"{session.name} uses {listed(entry['device_ids'])}, and has {listed(session.holds)}")
                self.memory(session, tuple(entry["device_ids"]), entry["mib"])
            case "culled":
                self._culled(session)
            case "closes":
                self._keeps_no_idle_kernel(session)
                self.closes(session)
            case "gives":
                self._gives(session)
            case _:
                if self.is_next(kind, session, entry):
                    self._cell(kind, session, entry)

    def _comes(self, session: Session) -> None:
        if self.now_ms != session.open_ms or session.name in self._since_ms:
            self.wrong(f"{session.name} comes to the door; its trace says at {session.open_ms} ms")
        self._waits(session)

    def _waits(self, session: Session) -> None:
        self.door.append(session)
        self._since_ms[session.name] = self.now_ms
        self._changed = True

    def _takes(self, session: Session, entry: Entry) -> None:
        taken: Taken = (entry["host"], tuple(entry["device_ids"]), entry["mib"])
        if session not in self.door or (self.first_only() and self.door[0] is not session):
            self.wrong(f"{session.name} takes {listed(taken[1])}, and it is not its turn: {names(self.door)} wait")
            return
        if (must := self.chosen(session)) != taken:
            self.wrong(f"{session.name} takes {_shown(taken)}; the rule says {_shown(must)}")
        self.door.remove(session)
        self._changed = True
        waited_ms = self.now_ms - self._since_ms[session.name]
        session.host, session.holds, session.reserved_mib = taken
        for device in self.devices_of(session, session.holds):
            self.holders[device][session.name] = session
            self._check(device)
        session.idle_ms = self.now_ms
        if session.name in self._began:
            session.owed_ms += waited_ms
            self._shut_down.discard(session.name)
        else:
            self._began.add(session.name)
            self.books.doors.append(waited_ms)
            session.door_ms = waited_ms
            session.due_ms += waited_ms

    def _check(self, device: Device) -> None:
        holders = self.holders[device].values()
        if self.free_mib(device) < 0:
            self.wrong(f"more than {self.room(device)} MiB of {device[1]} are taken: {names(holders)}")
        if self.clients is not None and len(holders) > self.clients:
            self.wrong(f"{device[1]} has {len(holders)} clients, and {self.clients} are allowed")

    def _gives(self, session: Session) -> None:
        if not session.closed and session.name not in self._shut_down:
            self.wrong(f"{session.name} gives {listed(session.holds)} back, and is neither closed nor culled")
        if session.total_mib:
            self.wrong(f"{session.name} gives {listed(session.holds)} back and still uses {session.total_mib} MiB")
        for device in self.devices_of(session, session.holds):
            self.holders[device].pop(session.name, None)
        session.holds = ()
        self._changed = True

    def _culled(self, session: Session) -> None:
        self.books.culled += 1
        self._shut_down.add(session.name)
        idle_ms = self.now_ms - session.idle_ms
        if session.phase != "idle" or idle_ms != self.cull_after_ms or not session.holds:
            self.wrong(
                f"{session.name} is culled, and is {session.phase} for {idle_ms} ms with {listed(session.holds)}"
            )

    def _keeps_no_idle_kernel(self, session: Session) -> None:
        idle_ms = self.now_ms - session.idle_ms
        if self.cull_after_ms is not None and session.holds and idle_ms >= self.cull_after_ms:
            self.wrong(f"{session.name} was idle for {idle_ms} ms, and was not culled")

    def _cell(self, kind: str, session: Session, entry: Entry) -> None:
        match kind:
            case "asked":
                self._keeps_no_idle_kernel(session)
                self.asked(session)
                if session.name in self._shut_down:
                    self._waits(session)
            case "begins":
                self._begins(session, entry)
            case "failed":
                self._fails(session)
            case "ends":
                late_ms = session.late_ms + self.now_ms - session.let_in_ms - session.cell.duration_ms
                self.ends(session, late_ms)
                session.idle_ms = self.now_ms
            case _:
                self.wrong(f"there is no moment {kind!r}")

    def _begins(self, session: Session, entry: Entry) -> None:
        self.in_phase(session, "begins", "asked")
        in_time = self.now_ms == max(session.asked_ms, session.idle_ms) and session not in self.door
        if not in_time or (session.cell.gpus and tuple(entry["device_ids"]) != session.holds):
            since = f"asked for at {session.asked_ms} ms and has {listed(session.holds)} since {session.idle_ms} ms"
            self.wrong(f"cell {session.next_cell} of {session.name} begins, and was {since}")
        if session.cell.gpus:
            self.books.waited(session.host, session.owed_ms)
            session.late_ms, session.door_ms, session.owed_ms = session.door_ms + session.owed_ms, 0, 0
        session.let_in_ms = self.now_ms
        self.begins("begins", session, entry, asks=session.cell.gpus > 0)

    def _fails(self, session: Session) -> None:
        self.in_phase(session, "fails", "asked")
        self.books.out_of_memory += 1
        self.books.waited(session.host, session.owed_ms)
        has = self.could_have(session)
        if self.now_ms != session.asked_ms or session.cell.gpu_mib <= has:
            self.wrong(
                f"cell {session.next_cell} of {session.name} fails, needs {session.cell.gpu_mib} MiB and may have {has} MiB"
            )
        self.over(session)

    def could_have(self, session: Session) -> int:
        """Return how much memory a cell of the session could have on each device now, MiB."""
        return session.reserved_mib

    def before_time_passes(self) -> None:
        """Find those who wait for what they could have."""
        if not self._changed:
            return
        self._changed = False
        seen: set[tuple[tuple[int, int] | None, ...]] = set()
        for session in self.door[:1] if self.first_only() else self.door:
            size = tuple(session.asks(host) for host in self.hosts)
            if self.first_only() or size not in seen:
                seen.add(size)
                if (could := self.chosen(session)) is not None:
                    self.wrong(f"{session.name} waits, and could have {_shown(could)}")

    def lost(self) -> int:
        return self.books.culled


class WholeDevices(Baseline):
    """`reservation` and `cull`: the first at the door gets whole GPUs of the host with the fewest free ones that are enough."""

    def first_only(self) -> bool:
        return True

    def chosen(self, session: Session) -> Taken | None:
        free: dict[int, list[str]] = {at: [] for at in range(len(self.hosts))}
        for device, holders in self.holders.items():
            if not holders:
                free[device[0]].append(device[1])
        enough = [at for at, ids in free.items() if len(ids) >= session.gpus]
        if not enough:
            return None
        host = min(enough, key=lambda at: (len(free[at]), at))
        return host, tuple(free[host][: session.gpus]), min(leasable(self.hosts[host]).values(), default=0)


class Fractions(Baseline):
    """`static-fraction` and `mps-pack`: the devices with the least room that is enough, all of one host."""

    def chosen(self, session: Session) -> Taken | None:
        best: tuple[tuple[int, int, int], Taken] | None = None
        for at, host in enumerate(self.hosts):
            if (asks := session.asks(host)) is None:
                continue
            mib, count = asks
            fitting = []
            for order, device in enumerate(host["devices"]):
                key = (at, device["device_id"])
                room = self.free_mib(key) if key[1] in host["pools"][0]["devices"] else 0
                if room >= mib and (self.clients is None or len(self.holders[key]) < self.clients):
                    fitting.append((room, order, key[1]))
            if len(fitting) < count:
                continue
            taken = sorted(fitting)[:count]
            rank = (sum(room for room, _, _ in taken), len(fitting), at)
            if best is None or rank < best[0]:
                best = (rank, (at, tuple(name for _, _, name in taken), mib))
        return best[1] if best is not None else None


class TimeSlices(Baseline):
    """`time-slice`: each session shares the device with the fewest sessions; none waits."""

    def chosen(self, session: Session) -> Taken | None:
        del session  # all are equal
        counts = [(len(holders), at, device) for at, (device, holders) in enumerate(self.holders.items())]
        _, _, (host, device_id) = min(counts)
        return host, (device_id,), self.sizes[host, device_id][0]

    def free_mib(self, device: Device) -> int:
        del device
        return 0  # nothing is taken from the others

    def held(self) -> int:
        return sum(mib > 0 for mib in self.used.values())

    def could_have(self, session: Session) -> int:
        (device,) = self.devices_of(session, session.holds)
        return self.sizes[device][0] - self.used[device] + session.total_mib


KINDS: dict[str, type[Baseline]] = {
    "reservation": WholeDevices,
    "cull": WholeDevices,
    "static-fraction": Fractions,
    "mps-pack": Fractions,
    "time-slice": TimeSlices,
}


def baseline(head: Entry) -> Baseline:
    """Return the auditor of the baseline that a record is of. Raises AuditError."""
    kind = KINDS.get(head["name"])
    if kind is None:
        raise AuditError(f"there is no baseline {head['name']!r}")
    return kind(head)


def _shown(taken: Taken | None) -> str:
    return "nothing" if taken is None else f"{taken[2]} MiB of {listed(taken[1])} on host {taken[0]}"
