"""The books of the independent model: what a driver knows of leases and devices, from events and effects alone."""

from collections import Counter
from dataclasses import dataclass, field

from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, Limits, PoolSpec, ReserveBy

__all__ = ["LawBrokenError", "Seen", "World", "law"]

S = LeaseState


class LawBrokenError(AssertionError):
    """The arbiter did what the design forbids. The message names the law."""


def law(number: int, holds: object, *what: object) -> None:
    """Raise LawBrokenError unless it holds."""
    if not holds:
        raise LawBrokenError(f"law {number}: " + " ".join(map(str, what)))


@dataclass(slots=True, eq=False)
class Seen:
    """A lease as its driver knows it. Memory is in MiB on each of its devices."""

    spec: LeaseSpec
    state: LeaseState | None = None
    generation: int = 0
    devices: tuple[str, ...] = ()
    home: tuple[str, ...] = ()  # where its saved state came from
    held: int = 0
    saved: int = 0
    host: int = 0
    used: int = 0
    measured: bool = False  # since it came to its devices
    shrinking: int = -1  # the generation in which it was asked to give caches back, and has not answered
    shrunk: bool | None = None  # what it answered since it became idle: whether it did; None: nothing
    why_not: str = ""  # why its process cannot be checkpointed
    alone_until: int = 0  # it is left alone after a suspend that failed, at least until then
    pauses_until: int = 0  # and no longer than until then, by whatever should take it off its device
    floor: int = 0  # what its last suspend would have had to save, if that was more than was reserved
    busy: bool = False
    closed: bool = False  # its gate, for others
    at_gate: int = -1  # its next cell waits there: when it asked, a running number as of those who wait; -1: none does
    ran: bool = False  # since it was let in
    left: str = ""  # its kernel is gone, and this of its processes is not
    since: int = 0  # in this state
    kept_for: int = 0  # ms that its room is kept before its process comes
    pinned_until: int = 0
    asked: int = -1  # when it asked for the GPU: a running number; -1: it does not wait
    revoked: bool = False  # its seat has ended
    ends: int = 0  # its processes are ended then, if it is revoked
    then: int = -1  # the same for one that waited to grow when its suspend began: when it asked for the GPU since
    claimed: bool = False  # it did
    urgent: bool = False
    expected_until: int = 0  # signs say that its next cell comes before this
    sent_away: bool = False  # its last suspend was asked for
    moves: bool = False  # its last suspend was the first half of a move
    early: bool = False  # it came back for an expected cell, and none has run
    passed: int = 0
    told: str = ""  # reason of what its user was told of its device, as long as it is there
    resizes: list[ResizeRequested] = field(default_factory=list)  # asked for and perhaps not answered yet

    @property
    def lease_id(self) -> str:
        """The lease's id."""
        return self.spec.lease_id

    @property
    def used_each(self) -> int:
        """What it uses of each of its devices, evenly."""
        return -(-self.used // max(1, self.spec.devices))

    @property
    def save_at_least(self) -> int:
        """What must be reserved on the host for a suspend: what it uses as far as is known, else all it holds."""
        unknown = 0 if self.measured else self.held * len(self.devices)
        return max(1, self.floor, self.used or unknown)

    @property
    def save_at_most(self) -> int:
        """What may be reserved for it beside: no more than it holds, as far as it is known to use no more than that."""
        return max(self.save_at_least, self.held * len(self.devices))

    def forget_idleness(self) -> None:
        """What was found out while it was idle is true no more."""
        self.shrinking, self.shrunk, self.floor = -1, None, 0

    @property
    def waits(self) -> bool:
        """Whether room is all it waits for."""
        return self.asked >= 0 and (
            self.state in {S.NO_CONTEXT, S.SUSPENDED}
            or (self.state is S.UNATTACHED and not self.spec.gated and not self.held)
        )

    @property
    def works(self) -> bool:
        """Whether a cell runs, or something else that counts as use."""
        return self.busy and self.at_gate < 0

    @property
    def here(self) -> bool:
        """Whether it has room on its devices to use: what it may wait for is more of it there. Before its start it may have it, too."""
        return self.state is S.RESIDENT or (self.state is S.UNATTACHED and self.held > 0)


@dataclass(slots=True)
class World:
    """Devices, pools and leases, and sums over them."""

    pools: dict[str, PoolSpec] = field(default_factory=dict)
    leasable: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)  # devices whose saved state comes back on themselves only
    strangers: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    draining: dict[str, bool] = field(default_factory=dict)  # busy ones too?
    deadlines: dict[str, int] = field(default_factory=dict)  # when devices go away
    whole: set[str] = field(default_factory=set)  # one lease has all of it
    budget: int = 0
    leases: dict[str, Seen] = field(default_factory=dict)
    held_on: Counter[str] = field(default_factory=Counter)
    now: int = 0

    def pool(self, seen: Seen) -> PoolSpec:
        """Return the policy for a lease, that without devices if its pool is gone."""
        return self.pools.get(seen.spec.pool) or PoolSpec(name=seen.spec.pool, devices=())

    def saved_each(self, seen: Seen) -> int:
        """What is reserved for what was saved of each of its devices, evenly."""
        return self.fitting(seen, -(-seen.saved // max(1, seen.spec.devices)))

    def fitting(self, seen: Seen, each: int) -> int:
        """What is reserved for so much on each device: all a device leases, if it lies in the overhead, too."""
        if not seen.saved:
            return each
        kinds = {self.names[one] for one in seen.home if one in self.names}
        alike = [one for one, name in self.names.items() if not kinds or name in kinds]
        leasable = max((self.leasable[one] for one in alike), default=0)
        return leasable if leasable < each <= max((self.memory[one] for one in alike), default=0) else each

    def reserves_cap(self, seen: Seen) -> bool:
        """Return whether all that it may use is reserved: always of a lease on several devices, which are whole ones."""
        return seen.spec.devices > 1 or self.pool(seen).reserve_by is ReserveBy.CAP

    def least(self, seen: Seen) -> int:
        """Return what must be reserved for it at least, on each of its devices."""
        guaranteed = seen.spec.request_mib
        if guaranteed is None or self.reserves_cap(seen):
            guaranteed = seen.spec.reserve_mib
        return max(min(guaranteed, seen.spec.reserve_mib), self.saved_each(seen))

    def due(self, seen: Seen) -> int:
        """Return what is to be reserved for one that comes onto a device: its cap, or what it uses and some headroom."""
        if self.reserves_cap(seen):
            return self.most(seen)
        uses = (self.saved_each(seen) or seen.used_each) + self.pool(seen).headroom_mib
        return max(self.least(seen), min(uses, seen.spec.reserve_mib))

    def most(self, seen: Seen) -> int:
        """Return what may be reserved for it at most."""
        return max(self.fitting(seen, seen.spec.reserve_mib), self.saved_each(seen))

    def hold(self, seen: Seen, devices: tuple[str, ...], mib: int) -> None:
        """Say what a lease holds, and where."""
        for device in seen.devices:
            self.held_on[device] -= seen.held
        seen.devices, seen.held = devices, mib if devices else 0
        for device in devices:
            self.held_on[device] += seen.held

    def free(self, device: str) -> int:
        """Return what is left on a device, negative if too much was taken. A MIG instance is one lease's."""
        if self.held_on[device] and device in self.whole:
            return 0
        return self.leasable.get(device, 0) - self.strangers.get(device, 0) - self.held_on[device]

    def on(self, device: str) -> list[Seen]:
        """Return who holds something on a device."""
        return [seen for seen in self.leases.values() if seen.held and device in seen.devices]

    def open(self, device: str) -> bool:
        """Whether a device admits anybody."""
        return device in self.leasable and device not in self.lost and device not in self.draining

    def deadline(self, seen: Seen) -> int | None:
        """Return when the first device of a lease goes away, if that is still to come."""
        times = [self.deadlines[one] for one in seen.devices if self.deadlines.get(one, 0) > self.now]
        return min(times, default=None) if seen.held else None

    def unreserved(self, seen: Seen) -> int:
        """Return what a lease that gave its room up uses on each of its devices: it counts as a stranger's there."""
        if not seen.devices:
            return 0
        return min([seen.used_each, *(self.strangers.get(device, 0) for device in seen.devices)])

    def allowed(self, seen: Seen) -> list[str]:
        """Return the devices that the lease may go to now, each by itself."""
        pool = self.pool(seen)
        only = seen.spec.allowed_devices
        devices = [device for device in pool.devices if self.open(device) and (not only or device in only)]
        if seen.state is not S.SUSPENDED:
            bound = seen.state is S.NO_CONTEXT and self.unreserved(seen)
            return [device for device in devices if not bound or device in seen.devices]
        homes = [home for home in seen.home if self.open(home) and (not only or home in only)]
        kinds = {self.names.get(home) for home in seen.home}
        moves = self.moves(seen) and len(kinds) == 1  # nothing is like devices of several kinds
        like = [d for d in devices if moves and d not in seen.home and self.names[d] in kinds]
        there = [home for home in homes if home in devices] + like
        return there if like and len(there) >= seen.spec.devices else homes

    def note_kind(self, device: DeviceSpec) -> None:
        """Take the name of a device, and whether the driver moves what was saved there."""
        self.names[device.device_id] = device.name
        self.fixed = (self.fixed - {device.device_id}) | ({device.device_id} if device.why_no_move else set())

    def moves(self, seen: Seen) -> bool:
        """Whether its saved state may come back elsewhere: its pool and the driver allow it."""
        return self.pool(seen).may_move and self.fixed.isdisjoint(seen.home)

    def fits(self, seen: Seen, need: int, kept: dict[str, int] | None = None) -> bool:
        """Whether it could be let in: as many devices as it wants have the room, kept room left out."""
        kept = kept or {}
        roomy = [
            device
            for device in self.allowed(seen)
            if self.free(device) - kept.get(device, 0) >= need and not (kept.get(device) and device in self.whole)
        ]
        if seen.spec.devices == 1:
            return bool(roomy)
        kinds = {self.names.get(home) for home in seen.home}
        if seen.state is S.SUSPENDED and (len(kinds) > 1 or not self.moves(seen)):
            return set(seen.home) <= set(roomy)
        return any(count >= seen.spec.devices for count in Counter(self.names[device] for device in roomy).values())

    def limits(self, seen: Seen) -> dict[str, Limits]:
        """Return the limits that hold for the lease's user, and for its group."""
        pool = self.pool(seen)
        found = {"user": pool.user_limits}
        groups = dict(pool.group_limits)
        if seen.spec.group in groups:
            found["group"] = groups[seen.spec.group]
        return found

    def fellows(self, seen: Seen, what: str) -> list[Seen]:
        """Return the other leases of its user, or of its group, in its pool."""
        spec = seen.spec
        return [
            other
            for other in self.leases.values()
            if other is not seen
            and other.state is not None
            and other.spec.pool == spec.pool
            and (other.spec.owner == spec.owner if what == "user" else other.spec.group == spec.group)
        ]

    def within_limits(self, seen: Seen) -> bool:
        """Whether its user and group may hold as much more on devices; if it waits to grow, what it asked for."""
        asked = [one.fraction_milli for one in seen.resizes] if seen.held else []
        grown = max([seen.spec.fraction_milli, *asked])
        for what, limits in self.limits(seen).items():
            if limits.resident_milli is None:
                continue
            held = [other for other in self.fellows(seen, what) if other.held]
            others = sum(other.spec.fraction_milli * other.spec.devices for other in held)
            if others + grown * seen.spec.devices > limits.resident_milli:
                return False
        return True
