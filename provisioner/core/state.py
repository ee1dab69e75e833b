"""The arbiter's books: leases, devices, tickets, and running totals that every change keeps exact.

Nobody writes `device_id`, `held_mib`, `saved_mib` or `host_mib` of a lease but `Books.hold` and `Books.save_on_host`, so the totals
per device and of the host are always the sums that `invariants` recomputes. The queue is kept sorted: `Books.enqueue` and
`Books.dequeue` alone touch it.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import merge

from provisioner.core.model import DeviceSpec, DeviceView, LeaseSpec, LeaseState, LeaseView, PoolSpec, TicketView

__all__ = ["Books", "Device", "Lease", "Operation", "Ticket"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A suspend or resume under way: what its answer must say to be believed."""

    lease_id: str
    kind: str
    generation: int


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A lease's place in the queue: by priority, then the urgent, then first come first served."""

    order: int
    asked_ms: int
    before_start: bool = False  # may be served before a process stands behind the lease
    urgent: bool = False
    passed_over: int = 0  # at most the pool's K; from then on room is kept
    passed_elsewhere: int = 0  # passed over since, on devices where no room is kept
    kept_on: tuple[str, ...] = ()  # devices where room is kept
    reason: str = "wait.new"
    sentence: str = "the request has just been made"
    blockers: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One lease. See `Books` for who may write what."""

    spec: LeaseSpec
    state: LeaseState = LeaseState.UNATTACHED
    generation: int = 0
    device_id: str | None = None
    held_mib: int = 0  # reserved on its device; 0: `device_id` says only where it was last
    home_id: str | None = None  # the device whose memory was, or may have been, saved
    saved_mib: int = 0  # lies in host memory
    host_mib: int = 0  # reserved in host memory for a suspend under way
    used_mib: int = 0
    busy: bool = False
    since_ms: int = 0
    last_active_ms: int = 0
    operation_id: int | None = None
    reason: str = ""
    sentence: str = ""
    ran: bool = False  # has been busy since it became resident
    retry_ms: int = 0  # not chosen for a suspend before this
    aborted_suspends: int = 0  # in a row
    failed_resumes: int = 0  # in a row
    resume_after_ms: int = 0  # a resume that could not start is not tried again before this
    expires_ms: int | None = None
    asked_to_suspend: bool = False
    ticket: Ticket | None = None
    why_not: str = ""  # why its process cannot be checkpointed, a sentence
    stays: str = ""  # that, or what its pool or device say; written by `staying` alone
    over_since_ms: int | None = None  # more than its cap since then
    over_told: bool = False
    pressed: bool = False  # host memory is short where its saved state lies

    @property
    def staying(self) -> bool:
        """Whether it cannot be suspended: it has something that cannot be saved, or may have it at any moment."""
        return bool(self.stays) and (self.used_mib > 0 or not self.spec.gated)

    @property
    def lease_id(self) -> str:
        """The lease's id."""
        return self.spec.lease_id

    @property
    def reserved(self) -> bool:
        """Whether it counts against its device."""
        return self.held_mib > 0

    @property
    def need_mib(self) -> int:
        """What must be reserved on a device for it: its cap, or what was saved of one that had gone past its cap."""
        return max(self.spec.reserve_mib, self.saved_mib) if self.saved_mib else self.spec.reserve_mib

    @property
    def host_need_mib(self) -> int:
        """What must be reserved on the host before it is suspended."""
        return max(self.held_mib, self.used_mib)

    def view(self) -> LeaseView:
        """Return the lease as others see it."""
        return LeaseView(
            spec=self.spec,
            state=self.state,
            generation=self.generation,
            device_id=self.device_id,
            saved_mib=self.saved_mib,
            used_mib=self.used_mib,
            busy=self.busy,
            since_ms=self.since_ms,
            last_active_ms=self.last_active_ms,
            operation_id=self.operation_id,
            reason=self.reason,
            sentence=self.sentence,
            reserved_mib=self.held_mib,
            host_reserved_mib=self.host_mib,
            suspend_asked=self.asked_to_suspend,
            stays=self.stays,
        )


@dataclass(slots=True, kw_only=True)
class Device:
    """One device and the running total of its reservations, MiB."""

    spec: DeviceSpec
    stranger_mib: int = 0
    lost: bool = False
    reserved_mib: int = 0
    whole: bool = False  # one lease has all of it

    @property
    def free_mib(self) -> int:
        """What is left for leases; negative when over-committed, nothing when lost."""
        return min(0, self._left) if self.lost else self._left

    @property
    def _left(self) -> int:
        left_mib = self.spec.leasable_mib - self.reserved_mib - self.stranger_mib
        return min(0, left_mib) if self.whole and self.reserved_mib else left_mib


@dataclass(slots=True)
class Books:
    """Everything the arbiter knows."""

    pools: dict[str, PoolSpec] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    by_state: dict[LeaseState, dict[str, Lease]] = field(default_factory=lambda: {state: {} for state in LeaseState})
    lines: dict[str, list[Lease]] = field(default_factory=dict)  # leases with a ticket by pool, in order
    waiting: int = 0  # how many
    host_budget_mib: int = 0
    host_saved_mib: int = 0
    host_reserved_mib: int = 0
    pressed: dict[str, Lease] = field(default_factory=dict)  # whose saved state lies where host memory is short

    def add(self, lease: Lease) -> None:
        """Take a new lease in."""
        self.leases[lease.lease_id] = lease
        self.by_state[lease.state][lease.lease_id] = lease

    def drop(self, lease: Lease) -> None:
        """Forget a lease that holds nothing."""
        del self.leases[lease.lease_id]
        del self.by_state[lease.state][lease.lease_id]

    def move(self, lease: Lease, new: LeaseState) -> None:
        """Change the state."""
        del self.by_state[lease.state][lease.lease_id]
        lease.state = new
        self.by_state[new][lease.lease_id] = lease

    def hold(self, lease: Lease, device_id: str | None, held_mib: int = 0) -> None:
        """Say where the lease's reservation is and how large, or (0) where it was."""
        if lease.device_id in self.devices:
            self.devices[lease.device_id].reserved_mib -= lease.held_mib
        lease.device_id, lease.held_mib = device_id, held_mib if device_id is not None else 0
        if lease.device_id in self.devices:
            self.devices[lease.device_id].reserved_mib += lease.held_mib

    def save_on_host(self, lease: Lease, *, saved_mib: int = 0, reserved_mib: int = 0) -> None:
        """Say what the lease has in host memory, and what is reserved there for it."""
        self.host_saved_mib += saved_mib - lease.saved_mib
        self.host_reserved_mib += reserved_mib - lease.host_mib
        lease.saved_mib, lease.host_mib = saved_mib, reserved_mib

    @property
    def host_left_mib(self) -> int:
        """Host memory that a further suspend may reserve."""
        return self.host_budget_mib - self.host_saved_mib - self.host_reserved_mib

    def pool_of(self, device_id: str) -> str | None:
        """Return the pool that has the device."""
        return next((pool.name for pool in self.pools.values() if device_id in pool.devices), None)

    def policy(self, lease: Lease) -> PoolSpec:
        """Return the pool's policy; for a lease whose pool is not configured (any more) the usual one, without devices."""
        return self.pools.get(lease.spec.pool) or PoolSpec(name=lease.spec.pool, devices=())

    def enqueue(self, lease: Lease, ticket: Ticket) -> None:
        """Put a lease without a ticket in its place in the queue."""
        lease.ticket = ticket
        insort(self.lines.setdefault(lease.spec.pool, []), lease, key=_rank)
        self.waiting += 1

    def dequeue(self, lease: Lease) -> Ticket | None:
        """Take the lease out of the queue; return its ticket, if it had one."""
        ticket = lease.ticket
        if ticket is not None:
            del self.lines[lease.spec.pool][self._place(lease)]
            lease.ticket = None
            self.waiting -= 1
        return ticket

    def _place(self, lease: Lease) -> int:
        return bisect_left(self.lines[lease.spec.pool], _rank(lease), key=_rank)

    def line(self) -> list[Lease]:
        """Return the leases with tickets, in the order in which they are served."""
        return list(merge(*self.lines.values(), key=_rank))

    def ticket_view(self, lease: Lease) -> TicketView | None:
        """Return the lease's place in its pool's queue, or None."""
        return None if lease.ticket is None else _ticket_view(lease, lease.ticket, self._place(lease) + 1)

    def ticket_views(self, pool: str) -> list[TicketView]:
        """Return the pool's queue."""
        return [
            _ticket_view(lease, lease.ticket, position)
            for position, lease in enumerate(self.lines.get(pool, ()), 1)
            if lease.ticket is not None
        ]

    def device_views(self) -> list[DeviceView]:
        """Return every device."""
        return [
            DeviceView(
                device_id=device.spec.device_id,
                name=device.spec.name,
                pool=self.pool_of(device.spec.device_id),
                memory_mib=device.spec.memory_mib,
                leasable_mib=device.spec.leasable_mib,
                reserved_mib=device.reserved_mib,
                stranger_mib=device.stranger_mib,
                over_committed=device.reserved_mib + device.stranger_mib > device.spec.leasable_mib,
                lost=device.lost,
                why_not=device.spec.why_not,
            )
            for device in self.devices.values()
        ]


def _ticket_view(lease: Lease, ticket: Ticket, position: int) -> TicketView:
    return TicketView(
        lease_id=lease.lease_id,
        position=position,
        asked_ms=ticket.asked_ms,
        passed_over=ticket.passed_over,
        reason=ticket.reason,
        sentence=ticket.sentence,
        blockers=ticket.blockers,
        urgent=ticket.urgent,
        need_mib=lease.need_mib,
        kept_on=ticket.kept_on,
    )


def _rank(lease: Lease) -> tuple[int, bool, int]:
    if lease.ticket is None:
        raise ValueError(f"lease {lease.lease_id} has no ticket")
    return (-lease.spec.priority, not lease.ticket.urgent, lease.ticket.order)
