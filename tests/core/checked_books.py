"""The books of the independent model: what a driver knows about leases and devices, from events and effects alone."""

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
    measured: bool = False  # when it came to its devices
    shrinking: int = -1  # the generation in which it was asked to give caches back and has not answered
    shrunk: bool | None = None  # whether it gave its caches back since it became idle; None: no answer yet
    why_not: str = ""  # why its process cannot be checkpointed
    alone_until: int = 0  # left alone after a failed suspend, at least until then
    pauses_until: int = 0  # but no longer than this, whatever else would take it off its device
    floor: int = 0  # what its last suspend would have had to save, if that exceeded the reservation
    busy: bool = False
    closed: bool = False  # its gate is closed so that others get the GPU
    at_gate: int = (
        -1
    )  # when its next cell reached the gate, as a running number like those of waiting leases; -1: none is waiting
    ran: bool = False  # since it was let in
    left: str = ""  # its kernel is gone, but this much of its processes is not
    since: int = 0  # when it entered this state
    arrived: int = 0  # when it became resident
    kept_for: int = 0  # for how many ms its room is kept before its process comes
    pinned_until: int = 0
    asked: int = -1  # when it asked for the GPU: a running number; -1: it does not wait
    revoked: bool = False  # its seat has ended
    ends: int = 0  # when its processes are ended, if it is revoked
    then: int = -1  # the same for a lease that waited to grow when its suspend began: when it first asked for the GPU
    claimed: bool = False  # it did
    urgent: bool = False
    expected_until: int = 0  # its next cell is expected before this time
    sent_away: bool = False  # its user asked for its last suspend
    moves: bool = False  # its last suspend was the first half of a move
    early: bool = False  # it came back for an expected cell that has not run yet
    passed: int = 0
    told: str = ""  # the last revocation notice its user got, while the device is still there
    resizes: list[ResizeRequested] = field(default_factory=list)  # asked for, perhaps not answered yet

    @property
    def lease_id(self) -> str:
        return self.spec.lease_id

    @property
    def used_each(self) -> int:
        """What it uses on each of its devices, evenly divided."""
        return -(-self.used // max(1, self.spec.devices))

    @property
    def save_at_least(self) -> int:
        """The least that a suspend must reserve on the host: the known use, or everything it holds if its use is unknown."""
        unknown = 0 if self.measured else self.held * len(self.devices)
        return max(1, self.floor, self.used or unknown)

    @property
    def save_at_most(self) -> int:
        """The most that a suspend may reserve on the host: no more than it holds, if its use is known to be below that."""
        return max(self.save_at_least, self.held * len(self.devices))

    def forget_idleness(self) -> None:
        """Drop what was learnt while it was idle."""
        self.shrinking, self.shrunk, self.floor = -1, None, 0

    @property
    def waits(self) -> bool:
        """Whether it waits only for room."""
        return self.asked >= 0 and (
            self.state in {S.NO_CONTEXT, S.SUSPENDED}
            or (self.state is S.UNATTACHED and not self.spec.gated and not self.held)
        )

    @property
    def works(self) -> bool:
        """Whether a cell runs, or anything else that counts as use."""
        return self.busy and self.at_gate < 0

    @property
    def here(self) -> bool:
        """Whether it already has room on its devices and can only wait for more there. This can be true before its process starts."""
        return self.state is S.RESIDENT or (self.state is S.UNATTACHED and self.held > 0)


@dataclass(slots=True)
class World:
    """Devices, pools and leases, and sums over them."""

    pools: dict[str, PoolSpec] = field(default_factory=dict)
    leasable: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)  # devices whose saved state can only come back to themselves
    strangers: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    draining: dict[str, bool] = field(default_factory=dict)  # whether busy leases leave, too
    deadlines: dict[str, int] = field(default_factory=dict)  # when devices go away
    whole: set[str] = field(default_factory=set)  # one lease gets all of it
    budget: int = 0
    leases: dict[str, Seen] = field(default_factory=dict)
    held_on: Counter[str] = field(default_factory=Counter)
    now: int = 0

    def pool(self, seen: Seen) -> PoolSpec:
        """Return the pool's policy for a lease, or a policy without devices if its pool is gone."""
        return self.pools.get(seen.spec.pool) or PoolSpec(name=seen.spec.pool, devices=())

    def saved_each(self, seen: Seen) -> int:
        """What is reserved for its saved state on each of its devices, evenly divided."""
        return self.fitting(seen, -(-seen.saved // max(1, seen.spec.devices)))

    def fitting(self, seen: Seen, each: int) -> int:
        """Limit a reservation per device to what the device leases, if the excess fits in the device's overhead."""
        if not seen.saved:
            return each
        kinds = {self.names[one] for one in seen.home if one in self.names}
        alike = [one for one, name in self.names.items() if not kinds or name in kinds]
        leasable = max((self.leasable[one] for one in alike), default=0)
        return leasable if leasable < each <= max((self.memory[one] for one in alike), default=0) else each

    def reserves_cap(self, seen: Seen) -> bool:
        """Return whether its whole cap is reserved, which is always so for leases on several devices."""
        return seen.spec.devices > 1 or self.pool(seen).reserve_by is ReserveBy.CAP

    def least(self, seen: Seen) -> int:
        """Return the least that must be reserved for it on each of its devices."""
        guaranteed = seen.spec.request_mib
        if guaranteed is None or self.reserves_cap(seen):
            guaranteed = seen.spec.reserve_mib
        return max(min(guaranteed, seen.spec.reserve_mib), self.saved_each(seen))

    def due(self, seen: Seen) -> int:
        """Return what must be reserved when it comes to a device: its cap, or its use and some headroom."""
        if self.reserves_cap(seen):
            return self.most(seen)
        uses = (self.saved_each(seen) or seen.used_each) + self.pool(seen).headroom_mib
        return max(self.least(seen), min(uses, seen.spec.reserve_mib))

    def most(self, seen: Seen) -> int:
        """Return the most that may be reserved for it on each of its devices."""
        return max(self.fitting(seen, seen.spec.reserve_mib), self.saved_each(seen))

    def hold(self, seen: Seen, devices: tuple[str, ...], mib: int) -> None:
        """Record what a lease holds, and on which devices."""
        for device in seen.devices:
            self.held_on[device] -= seen.held
        seen.devices, seen.held = devices, mib if devices else 0
        for device in devices:
            self.held_on[device] += seen.held

    def free(self, device: str) -> int:
        """Return the free memory of a device; negative if it is over-committed. A MIG instance holds one lease."""
        return 0 if self.held_on[device] and device in self.whole else self.unused(device)

    def unused(self, device: str) -> int:
        """Return the memory of a device that is neither reserved nor used by strangers; negative if it is over-committed."""
        return self.leasable.get(device, 0) - self.strangers.get(device, 0) - self.held_on[device]

    def on(self, device: str) -> list[Seen]:
        """Return the leases that hold room on a device."""
        return [seen for seen in self.leases.values() if seen.held and device in seen.devices]

    def open(self, device: str) -> bool:
        """Whether a device admits leases."""
        return device in self.leasable and device not in self.lost and device not in self.draining

    def deadline(self, seen: Seen) -> int | None:
        """Return when the first device of a lease goes away, if that is still ahead."""
        times = [self.deadlines[one] for one in seen.devices if self.deadlines.get(one, 0) > self.now]
        return min(times, default=None) if seen.held else None

    def unreserved(self, seen: Seen) -> int:
        """Return what a lease that gave its room up still uses on each of its devices. It counts as unleased memory there."""
        if not seen.devices:
            return 0
        return min([seen.used_each, *(self.strangers.get(device, 0) for device in seen.devices)])

    def allowed(self, seen: Seen) -> list[str]:
        """Return the devices that the lease may go to now, each considered alone."""
        pool = self.pool(seen)
        only = seen.spec.allowed_devices
        devices = [device for device in pool.devices if self.open(device) and (not only or device in only)]
        if seen.state is not S.SUSPENDED:
            bound = seen.state is S.NO_CONTEXT and self.unreserved(seen)
            return [device for device in devices if not bound or device in seen.devices]
        homes = [home for home in seen.home if self.open(home) and (not only or home in only)]
        kinds = {self.names.get(home) for home in seen.home}
        moves = self.moves(seen) and len(kinds) == 1  # devices of several kinds have no equivalent
        like = [d for d in devices if moves and d not in seen.home and self.names[d] in kinds]
        there = [home for home in homes if home in devices] + like
        return there if like and len(there) >= seen.spec.devices else homes

    def note_kind(self, device: DeviceSpec) -> None:
        """Record a device's name, and whether the driver can move state saved on it."""
        self.names[device.device_id] = device.name
        self.fixed = (self.fixed - {device.device_id}) | ({device.device_id} if device.why_no_move else set())

    def moves(self, seen: Seen) -> bool:
        """Whether its saved state may come back on another device: both pool and driver must allow it."""
        return self.pool(seen).may_move and self.fixed.isdisjoint(seen.home)

    def fits(self, seen: Seen, need: int, kept: dict[str, int] | None = None) -> bool:
        """Whether it could be let in: enough devices have the room, not counting room kept for others."""
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
        """Return the limits of the lease's user and of its group."""
        pool = self.pool(seen)
        found = {"user": pool.user_limits}
        groups = dict(pool.group_limits)
        if seen.spec.group in groups:
            found["group"] = groups[seen.spec.group]
        return found

    def fellows(self, seen: Seen, what: str) -> list[Seen]:
        """Return the other leases of its user or group in its pool."""
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
        """Whether its user and group may hold that much more on devices. If it waits to grow, the larger size counts."""
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
