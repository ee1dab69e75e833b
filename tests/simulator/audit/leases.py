"""Runs with the arbiter: events and effects, leases on their hosts, swaps."""

import hashlib
import json

from tests.simulator.audit.cells import Audit, held_by
from tests.simulator.audit.sessions import HOLDING, Device, Entry, Session, Swap, leasable, listed, names


class Leases(Audit):
    """A run of the arbiter, on one host or on several."""

    def __init__(self, head: Entry) -> None:
        super().__init__(head)
        self._swaps: dict[tuple[int, int], Swap] = {}  # by host and operation
        self._host_mib = [0 for _ in self.hosts]
        self._door: str = head["door"]
        self._open: list[dict[str, Session]] = [{} for _ in self.hosts]
        self._free_mib = [  # of each pool, less what open leases may use
            {pool["name"]: sum(leasable(host, pool).values()) for pool in host["pools"]} for host in self.hosts
        ]

    def end(self) -> None:
        for session in self.sessions.values():
            self._stopped(session)
        super().end()

    def world(self, kind: str, session: Session, entry: Entry) -> None:
        if kind == "placed":
            self._placed(session, entry["host"])
        elif kind == "memory":
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

    # -- the door -----------------------------------------------------------------------------------------------------

    def _placed(self, session: Session, host: int) -> None:
        """Check that a session that opens is sent where the rule of the door says."""
        asked = {at: asks for at, one in enumerate(self.hosts) if (asks := session.asks(one)) is not None}
        best = min(asked, key=lambda at: (*self._rank(session, at, *asked[at]), at), default=None)
        if host != best:
            room = ", ".join(f"{self._free_mib[at][self._pool(session, at)]} MiB on host {at}" for at in asked)
            self.wrong(f"{session.name} is placed on host {host}, and belongs on host {best}: {room}")
        if self.now_ms != session.open_ms or session.host is not None:
            self.wrong(f"{session.name} is placed, and opens at {session.open_ms} ms")
        session.host = host

    def _pool(self, session: Session, host: int) -> str:
        """Return the name of the pool that a session runs in on a host."""
        name: str = session.pool or self.hosts[host]["pools"][0]["name"]
        return name

    def _rank(self, session: Session, host: int, mib: int, devices: int) -> tuple[int, ...]:
        room_mib, here = self._free_mib[host][self._pool(session, host)], self._open[host]
        match self._door:
            case "most-free":
                return (-room_mib,)
            case "fit" if mib * devices <= room_mib:
                return (0, room_mib)
            case "fit" if devices > 1:
                return (1, len(here) - self._several(host), self._several(host), -room_mib)
            case "fit":
                return (1, self._several(host), -room_mib)
        raise ValueError(f"there is no door {self._door!r}")

    def _several(self, host: int) -> int:
        """Return how many sessions of several GPUs are open on a host."""
        return sum(session.devices > 1 for session in self._open[host].values())

    def _requested(self, session: Session, spec: Entry) -> None:
        host = self.hosts[session.host if session.host is not None else 0]
        session.devices, session.cap_mib = spec["devices"], spec["reserve_mib"]
        if self.now_ms != session.open_ms or session.host is None:
            self.wrong(f"{session.name} asks for its lease, and opens at {session.open_ms} ms on host {session.host}")
        if (session.cap_mib, session.devices) != session.asks(host):
            self.wrong(
                f"{session.name} asks for {session.cap_mib} MiB of {session.devices} devices, not for {session.asks(host)}"
            )
        if session.host is not None:
            self._free_mib[session.host][self._pool(session, session.host)] -= session.cap_mib * session.devices
            self._open[session.host][session.name] = session

    def _is_over(self, session: Session) -> None:
        """Count the session no more, nor what its lease may use."""
        if session.host is not None and self._open[session.host].pop(session.name, None) is not None:
            self._free_mib[session.host][self._pool(session, session.host)] += session.cap_mib * session.devices

    # -- events and effects -------------------------------------------------------------------------------------------

    def event(self, entry: Entry) -> None:
        kind, fields = entry["event"], entry["fields"]
        text = json.dumps(entry["effects"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        if hashlib.sha256(text.encode("ascii")).hexdigest()[:16] != entry["digest"]:
            self.wrong(f"the effects of {kind} are not those of the digest")
        for about in fields.get("measurements") or [fields.get("spec", fields)]:
            if "lease_id" in about:
                session = self.sessions[about["lease_id"]]
                self.on_its_host(session, entry)
                self._stopped(session)
                self._about(kind, session, fields | about)
        # all its devices first: a change of state names only the first of them
        devices = {
            effect["lease_id"]: tuple(effect["device_ids"])
            for _, effect in entry["effects"]
            if effect.get("device_ids")
        }
        for effect_kind, effect in entry["effects"]:
            if "lease_id" in effect:
                self.on_its_host(self.sessions[effect["lease_id"]], entry)
                self._effect(effect_kind, self.sessions[effect["lease_id"]], effect, devices)
        touched = [self.sessions[effect["lease_id"]] for _, effect in entry["effects"] if "lease_id" in effect]
        for device in sorted({device for session in touched for device in self.devices_of(session, session.holds)}):
            self._check_holders(device)

    def _about(self, kind: str, session: Session, fields: Entry) -> None:
        match kind:
            case "LeaseRequested":
                self._requested(session, fields["spec"])
            case "Attached":
                self.books.doors.append(self.now_ms - session.open_ms)
            case "LeasesMeasured" if fields["used_mib"] != session.total_mib:
                self.wrong(f"{session.name} is measured with {fields['used_mib']} MiB and uses {session.total_mib} MiB")
            case "SuspendFinished" | "ResumeFinished":
                self._finished(kind, session, fields)
            case "ProcessExited":
                for swap in self._swaps.values():
                    swap.kind = "over" if swap.session is session else swap.kind
            case "LeaseReleased":
                self._is_over(session)
                self._in_vain(session)
                self.closes(session)
                if session.total_mib or session.host_mib:
                    on_host = f"{session.host_mib} MiB on the host"
                    self.wrong(f"{session.name} is closed and still has {session.total_mib} MiB, {on_host}")

    def _effect(self, kind: str, session: Session, effect: Entry, devices: dict[str, tuple[str, ...]]) -> None:
        match kind:
            case "StateChanged":
                self._changed(session, effect, devices)
            case "Granted":
                session.reserved_mib, session.let_in_ms = effect["reserved_mib"], self.now_ms
                if session.state != "resident" or session.holds != tuple(effect["device_ids"]):
                    self.wrong(f"{session.name} is granted {listed(effect['device_ids'])}, and is {held_by(session)}")
            case "Resized":
                session.reserved_mib, session.let_in_ms = effect["reserved_mib"] or session.reserved_mib, self.now_ms
            case "Recorded":
                session.comes_early = effect["reason"] == "resume.expected"
            case "Suspend":
                self.books.suspends += 1
                self._in_vain(session)
                session.to_preempt = session.phase == "short" or session.name in self.running
                self._swap(kind, session, effect, session.total_mib)
            case "Resume":
                self.books.resumes += 1
                session.early_mib = session.host_mib if session.comes_early else 0
                self.books.early += session.comes_early
                session.comes_early = False
                session.reserved_mib = effect["reserve_mib"]
                self._swap(kind, session, effect, session.host_mib)
            case "LeaseRefused":
                self._is_over(session)
                session.lost = True
            case "LeaseEnded" if effect["reason"] != "released":
                self._is_over(session)
                session.lost = True

    def _changed(self, session: Session, change: Entry, devices: dict[str, tuple[str, ...]]) -> None:
        if change["old"] != session.state:
            self.wrong(f"{session.name} goes from {change['old']} to {change['new']}, and was {session.state}")
        was, session.state = session.state, change["new"]
        if was in HOLDING:
            for device in self.devices_of(session, session.holds):
                self.holders[device].pop(session.name, None)
        if session.state in HOLDING and change["device_id"] is not None:
            known = session.holds if change["device_id"] in session.holds else (change["device_id"],)
            session.holds = devices.get(session.name, known)
            for device in self.devices_of(session, session.holds):
                self.holders[device][session.name] = session
            if len(session.holds) != session.devices:
                self.wrong(
                    f"{session.name} holds {listed(session.holds)}, and its lease is for {session.devices} devices"
                )

    def _check_holders(self, device: Device) -> None:
        holders = self.holders[device].values()
        reserved, leasable = sum(session.reserved_mib for session in holders), self.sizes[device][1]
        if reserved > leasable:
            self.wrong(
                f"leases have {reserved} MiB reserved on {device[1]}, which gives them {leasable} MiB: {names(holders)}"
            )
        if len(holders) > 1 and any(session.devices > 1 and session.cap_mib >= leasable for session in holders):
            self.wrong(f"a lease of several devices does not have {device[1]} alone: {names(holders)}")

    # -- swaps --------------------------------------------------------------------------------------------------------

    def _swap(self, kind: str, session: Session, effect: Entry, mib: int) -> None:
        host = session.host if session.host is not None else 0
        self._swaps[host, effect["operation_id"]] = Swap(session, kind, self.now_ms, mib)
        under_way = sum(swap.kind != "over" for (at, _), swap in self._swaps.items() if at == host)
        if under_way > self.hosts[host]["parallel_swaps"]:
            self.wrong(f"{under_way} swaps run at a time, and {self.hosts[host]['parallel_swaps']} may")
        wanted = "suspending" if kind == "Suspend" else "resuming"
        if session.state != wanted:
            self.wrong(f"a {kind} of {session.name} begins, and it is {session.state}")

    def _in_vain(self, session: Session) -> None:
        """Count what a session was brought back with if no cell of it has asked since."""
        self.books.vain_mib += session.early_mib
        session.early_mib = 0

    def _swap_fails(self, session: Session, kind: str) -> None:
        """Expect that the swap of a session changes nothing; a cell goes on."""
        self.books.failed_swaps += 1
        self.books.early -= kind == "resume" and session.early_mib > 0
        session.early_mib = 0
        session.to_preempt = False
        for swap in self._swaps.values():
            if swap.session is session and swap.kind.lower() == kind:
                swap.fails = True
                return
        self.wrong(f"a {kind} of {session.name} fails that was not begun")

    def _failed(self, kind: str, swap: Swap, fields: Entry) -> None:
        """A swap that failed ends after the fixed time, or at once if the host lacks the memory, and nothing has moved."""
        session = swap.session
        takes_ms = 0 if fields.get("need_mib") else self._machine(session)["swap"]["fixed_ms"]
        if self.now_ms - swap.began_ms != takes_ms:
            self.wrong(f"{kind} of {session.name} failed after {self.now_ms - swap.began_ms} ms, not {takes_ms} ms")
        mib = session.total_mib if swap.kind == "Suspend" else session.host_mib
        if swap.kind != "over" and (mib != swap.mib or fields["outcome"] not in ("aborted", "not-started")):
            self.wrong(f"{kind} of {session.name} failed: {fields['outcome']}, with {mib} of {swap.mib} MiB")

    def _finished(self, kind: str, session: Session, fields: Entry) -> None:
        swap = self._swaps.pop((session.host if session.host is not None else 0, fields["operation_id"]), None)
        if swap is None or swap.session is not session or swap.kind not in ("over", kind.removesuffix("Finished")):
            self.wrong(f"{kind} of {session.name}: operation {fields['operation_id']} was never begun")
            return
        if swap.fails:
            self._failed(kind, swap, fields)
            return
        speeds = self._machine(session)["swap"]
        speed = speeds["save_mib_per_s" if kind == "SuspendFinished" else "restore_mib_per_s"]
        takes_ms = speeds["fixed_ms"] + -(-swap.mib * 1000 // speed)
        if self.now_ms - swap.began_ms != takes_ms:
            self.wrong(
                f"{kind} of {session.name} after {self.now_ms - swap.began_ms} ms; {swap.mib} MiB take {takes_ms} ms"
            )
        if swap.kind == "over":
            return
        on_devices, on_host = (0, swap.mib) if swap.kind == "Suspend" else (swap.mib, 0)
        if (session.total_mib, session.host_mib) != (on_devices, on_host):
            has = f"{session.total_mib} MiB on devices and {session.host_mib} MiB on the host"
            self.wrong(f"{kind} of {session.name}, which has {has}; expected {on_devices} and {on_host} MiB")
        if kind == "SuspendFinished" and fields["saved_mib"] != swap.mib:
            self.wrong(f"{session.name} says {fields['saved_mib']} MiB saved, and had {swap.mib} MiB")

    def _machine(self, session: Session) -> Entry:
        return self.hosts[session.host if session.host is not None else 0]

    # -- memory -------------------------------------------------------------------------------------------------------

    def _memory(self, session: Session, device_ids: tuple[str, ...], mib: int) -> None:
        if session.state not in HOLDING or device_ids != session.holds:
            self.wrong(f"{session.name} uses memory of {listed(device_ids)}, and is {held_by(session)}")
        self.memory(session, device_ids, mib)

    def too_much(self, device: Device) -> None:
        self.books.out_of_memory += 1
        super().too_much(device)

    def _host(self, kind: str, session: Session, mib: int) -> None:
        self.books.moved_mib += mib * (kind != "dropped")
        change = mib if kind == "saved" else -mib
        host, saved = self._machine(session), self._host_mib[session.host or 0] + change
        self._host_mib[session.host or 0] = saved
        session.host_mib += change
        self.books.host_peak_mib = max(self.books.host_peak_mib, saved)
        if session.host_mib < 0:
            self.wrong(f"{session.name} takes {mib} MiB from the host, and has less there")
        if kind == "saved" and saved > host["host_memory_mib"]:
            self.wrong(f"{saved} MiB are saved on the host, and its budget is {host['host_memory_mib']} MiB")

    # -- cells --------------------------------------------------------------------------------------------------------

    def _cell(self, kind: str, session: Session, entry: Entry) -> None:
        if not self.is_next(kind, session, entry):
            return
        match kind:
            case "asked":
                self.asked(session)
                if session.cell.gpus or self._machine(session)["every_cell_asks"]:
                    session.early_mib = 0
            case "begins" | "continues":
                self._begins(kind, session, entry)
            case "short":
                self._short(session, entry)
            case "failed":
                self._fails(session)
            case "ends":
                self.ends(session, self.now_ms - session.asked_ms - session.cell.duration_ms)
            case _:
                self.wrong(f"there is no moment {kind!r}")

    def _short(self, session: Session, entry: Entry) -> None:
        self.in_phase(session, "is short of memory", "asked")
        session.phase, session.short_ms = "short", self.now_ms
        has, needs = entry["mib"], entry["need_mib"]
        if needs != session.cell.gpu_mib or has != session.reserved_mib:
            self.wrong(f"{session.name} is short with {has} of {needs} MiB; {session.reserved_mib} MiB are reserved")

    def _fails(self, session: Session) -> None:
        self.in_phase(session, "fails", "short")
        self.books.out_of_memory += 1
        self._waited(session)
        after_ms = self.now_ms - session.short_ms
        if after_ms != (self._machine(session)["patience_ms"] if session.cell.gpu_mib <= session.cap_mib else 0):
            self.wrong(f"cell {session.next_cell} of {session.name} fails after {after_ms} ms without its memory")
        self.over(session)

    def _waited(self, session: Session) -> None:
        if session.cell.gpus:
            self.books.waited(session.host, self.now_ms - session.asked_ms)

    def _begins(self, kind: str, session: Session, entry: Entry) -> None:
        cell, device_ids = session.cell, tuple(entry["device_ids"])
        self.in_phase(session, kind, *(("asked", "short") if kind == "begins" else ("preempted",)))
        asks = cell.gpus > 0 or self._machine(session)["every_cell_asks"]
        if asks and (session.state != "resident" or session.holds != device_ids):
            self.wrong(
                f"cell {session.next_cell} of {session.name} {kind} on {listed(device_ids)}, and its lease is {session.state}"
            )
        elif asks and self.now_ms != max(session.let_in_ms, session.asked_ms):
            let_in = max(session.let_in_ms, session.asked_ms)
            self.wrong(f"cell {session.next_cell} of {session.name} {kind}, and its lease was let in at {let_in} ms")
        if kind == "begins":
            self._waited(session)
        self.begins(kind, session, entry, asks=asks)

    def _preempted(self, session: Session) -> None:
        self.in_phase(session, "is preempted", "running", "short")
        if not session.to_preempt:
            self.wrong(f"cell {session.next_cell} of {session.name} is preempted without a suspend")
        session.to_preempt = False
        self.books.preemptions += 1
        session.phase = "asked" if session.phase == "short" else "preempted"
        self.leaves(session)

    def _stopped(self, session: Session) -> None:
        if session.to_preempt:
            session.to_preempt = False
            self.wrong(f"{session.name} is suspended in the middle of cell {session.next_cell}, which is not stopped")
