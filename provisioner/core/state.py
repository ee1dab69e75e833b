"""The arbiter's books: leases, devices, tickets, and running totals that every change keeps exact.

Nobody writes `device_id`, `reserved`, `saved_mib` or `host_mib` of a lease but `Books.hold` and `Books.save_on_host`, so the totals
per device and of the host are always the sums that `invariants` recomputes.
"""

from dataclasses import dataclass, field

from provisioner.core.model import DeviceSpec, LeaseSpec, LeaseState, LeaseView, PoolSpec, TicketView

__all__ = ["Books", "Device", "DeviceView", "Lease", "Ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A read-only picture of one device, MiB. Over-committed: reservations and strangers exceed what may be leased."""

    device_id: str
    name: str
    pool: str | None
    memory_mib: int
    leasable_mib: int
    reserved_mib: int
    stranger_mib: int
    over_committed: bool
    lost: bool


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A lease's place in the queue: by priority, then first come first served."""

    order: int
    asked_ms: int
    passed_over: int = 0
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
    reserved: bool = False  # counts against its device
    saved_mib: int = 0  # lies in host memory
    host_mib: int = 0  # reserved in host memory for a suspend under way
    used_mib: int = 0
    busy: bool = False
    since_ms: int = 0
    last_active_ms: int = 0
    operation_id: int | None = None
    reason: str = ""
    sentence: str = ""
    retry_ms: int = 0  # not chosen for a suspend before this
    expires_ms: int | None = None
    asked_to_suspend: bool = False
    ticket: Ticket | None = None

    @property
    def lease_id(self) -> str:
        """The lease's id."""
        return self.spec.lease_id

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
        )


@dataclass(slots=True, kw_only=True)
class Device:
    """One device and the running total of its reservations, MiB."""

    spec: DeviceSpec
    stranger_mib: int = 0
    lost: bool = False
    reserved_mib: int = 0

    @property
    def free_mib(self) -> int:
        """What is left for leases; negative when over-committed, nothing when lost."""
        return min(0, self._left) if self.lost else self._left

    @property
    def _left(self) -> int:
        return self.spec.leasable_mib - self.reserved_mib - self.stranger_mib


@dataclass(slots=True)
class Books:
    """Everything the arbiter knows."""

    pools: dict[str, PoolSpec] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    by_state: dict[LeaseState, dict[str, Lease]] = field(default_factory=lambda: {state: {} for state in LeaseState})
    queue: dict[str, Lease] = field(default_factory=dict)  # leases with a ticket
    host_budget_mib: int = 0
    host_saved_mib: int = 0
    host_reserved_mib: int = 0

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

    def hold(self, lease: Lease, device_id: str | None, *, reserved: bool) -> None:
        """Say where the lease's reservation is, or was (`reserved` False)."""
        if lease.reserved and lease.device_id in self.devices:
            self.devices[lease.device_id].reserved_mib -= lease.spec.reserve_mib
        lease.device_id, lease.reserved = device_id, reserved and device_id is not None
        if lease.reserved and lease.device_id in self.devices:
            self.devices[lease.device_id].reserved_mib += lease.spec.reserve_mib

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

    def line(self) -> list[Lease]:
        """Return the leases with tickets, in the order in which they are served."""
        return sorted(self.queue.values(), key=_rank)

    def ticket_views(self, pool: str) -> list[TicketView]:
        """Return the pool's queue."""
        line = [lease for lease in self.line() if lease.spec.pool == pool]
        return [
            TicketView(
                lease_id=lease.lease_id,
                position=position,
                asked_ms=lease.ticket.asked_ms,
                passed_over=lease.ticket.passed_over,
                reason=lease.ticket.reason,
                sentence=lease.ticket.sentence,
                blockers=lease.ticket.blockers,
            )
            for position, lease in enumerate(line, 1)
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
            )
            for device in self.devices.values()
        ]


def _rank(lease: Lease) -> tuple[int, int]:
    return (-lease.spec.priority, lease.ticket.order if lease.ticket is not None else 0)
