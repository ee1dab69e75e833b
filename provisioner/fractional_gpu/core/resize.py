"""Resizes existing leases, and enforces memory caps.

- **Requested sizes.** A requested size applies at once if it is smaller and the lease's current use fits, or if the lease is not on a
  device. Otherwise the lease claims the new size with a ticket, which waits in the queue like any other. If the lease is suspended in the
  meantime, it gets the new size at its next resume. To make room for the claim, idle neighbours are suspended, or the lease itself moves to
  a device with room if it is idle and movable. A newer request replaces the claim.
- **Reservations that follow use.** Such a reservation exceeds current use by the pool's headroom plus the growth between the last two
  measurements, but by at most twice the headroom. This way, a kernel that grows steadily stays within its reservation even if a measurement
  is missed.
- **Memory caps.** Frameworks limit their own memory, and `MemoryCaps` catches allocations that bypass these limits. After `GRACE_MS` it
  notifies the kernel once each time the cap is exceeded, and applies the pool's policy (`Breach`), regardless of minimum residency.
"""

from dataclasses import dataclass, replace

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import CapBreached
from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.core.limits import share_refusal, size_refusal
from fractional_gpu.core.model import Breach, LeaseSpec, LeaseState
from fractional_gpu.core.revoke import REVOKED
from fractional_gpu.core.state.leases import Lease, Reason, Ticket
from fractional_gpu.core.units import format_fraction, format_memory

_UNDER_WAY = frozenset({LeaseState.SUSPENDING, LeaseState.RESUMING, LeaseState.QUARANTINED})


class Resizer:
    """Changes the sizes of leases.

    While a lease waits to grow, its ticket's `resize_to` is the requested spec, or the lease's own spec if only its reservation grows.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def requested(self, lease: Lease, event: ResizeRequested) -> None:
        """Apply or decline a requested size, or queue the request."""
        spec = replace(
            lease.spec,
            fraction_milli=event.fraction_milli,
            reserve_mib=event.reserve_mib,
            request_mib=event.request_mib,
        )
        refused = self._refusal(lease, spec)
        if refused is not None:
            self._changes.decline(lease, refused.code, refused.sentence, about="resize")
            return
        self._withdraw_claim(lease, "another size was requested")
        is_larger = self._target_mib(lease, spec) > lease.held_mib or spec.fraction_milli > lease.spec.fraction_milli
        if lease.held_mib and is_larger:
            self._claim(lease, spec)
            self._changes.record(lease.lease_id, "resize.asked", f"it is waiting for room to grow to {_size(spec)}")
        else:
            self._apply(lease, spec)

    def _refusal(self, lease: Lease, spec: LeaseSpec) -> Reason | None:
        if lease.revoked:
            return REVOKED
        if lease.state in _UNDER_WAY:
            return Reason("in-operation", f"the kernel is {lease.state}: try again in a moment")
        pool = self._books.pools.get(spec.pool)
        if pool is None:
            return Reason("unknown-pool", f"pool {spec.pool!r} is no longer configured: ask the administrator")
        refused = size_refusal(self._books, pool, spec) or share_refusal(self._books, pool, spec, instead_of=lease.spec)
        used_mib = lease.saved_each_mib if lease.saved_mib else lease.used_each_mib
        if refused is not None or used_mib <= spec.reserve_mib or spec.reserve_mib >= lease.spec.reserve_mib:
            return refused
        return Reason(
            "in-use",
            f"{format_memory(spec.reserve_mib)} was requested, but the kernel uses {format_memory(used_mib)}: "
            "free memory first (delete variables, empty the framework's cache), or ask for more",
        )

    def measured(self, lease: Lease) -> None:
        """Adjust a reservation that follows use, based on the new measurement.

        The reservation grows once half of the headroom is used up, or would be by the next measurement. It shrinks only if that frees at
        least as much as the headroom.
        """
        if self._books.reserves_cap(lease):
            return
        if lease.state is not LeaseState.RESIDENT:
            lease.size_mib = self._books.reserve_mib(lease, lease.spec)
            return
        ticket = lease.ticket
        if ticket is not None and ticket.resize_to is not None and ticket.resize_to is not lease.spec:
            self._update_claim(lease, ticket, ticket.resize_to)  # a requested size waits, too
            return
        headroom_mib, target_mib = self._books.policy(lease).headroom_mib, self._target_mib(lease, lease.spec)
        if lease.held_mib - target_mib >= max(1, headroom_mib):
            self._withdraw_claim(lease, "it uses less")
            self._books.set_reservation(lease, lease.device_ids, target_mib)
            self._changes.report_size(lease, "resize.use", f"it uses less, so {format_memory(target_mib)} is reserved")
            return
        if ticket is not None:
            self._update_claim(lease, ticket, lease.spec)
            return
        soon_mib = lease.used_each_mib + min(lease.growth_mib, headroom_mib) + headroom_mib // 2
        if soon_mib > lease.held_mib and target_mib > lease.held_mib and not lease.revoked:
            self._claim(lease, lease.spec)

    def pool_configured(self, pool: str) -> None:
        """Apply a changed pool policy. Recompute waiting claims, and claim any memory that leases lack under the new policy."""
        for lease in self._books.in_state(LeaseState.RESIDENT, LeaseState.UNATTACHED):
            if lease.spec.pool != pool:
                continue
            if lease.held_mib and lease.ticket is not None and lease.ticket.resize_to is not None:
                self._update_claim(lease, lease.ticket, lease.ticket.resize_to)
            self.claim_missing(lease)

    def claim_missing(self, lease: Lease) -> None:
        """File a ticket for the missing memory if the lease holds less than its pool's policy requires."""
        if lease.held_mib and lease.ticket is None and lease.size_mib > lease.held_mib and not lease.revoked:
            self._claim(lease, lease.spec)

    def grow_in_place(self, lease: Lease) -> None:
        """Grow the lease on its own devices, which have enough room."""
        ticket, spec = lease.ticket, lease.ticket.resize_to if lease.ticket is not None else None
        if ticket is None or spec is None:
            return
        if self._lacking_mib(lease, spec) > ticket.extra_mib:  # its exclusive device has become smaller
            self._update_claim(lease, ticket, spec)
            return
        self._changes.withdraw_ticket(lease)
        if self.is_allowed(lease, spec):
            held_mib = lease.held_mib
            self._apply(lease, spec)
            if lease.held_mib > held_mib:
                self._changes.granted_devices.update(lease.device_ids)
        else:  # its pool may now require it to hold more
            self.claim_missing(lease)

    def is_allowed(self, lease: Lease, spec: LeaseSpec) -> bool:
        """Return whether the limits still allow this size. If they do not, decline the request."""
        pool = self._books.pools.get(spec.pool)
        if pool is None or spec is lease.spec:
            return True
        refused = share_refusal(self._books, pool, spec, instead_of=lease.spec)
        if refused is not None:
            self._changes.decline(lease, refused.code, refused.sentence, about="resize")
        return refused is None

    def _claim(self, lease: Lease, spec: LeaseSpec) -> None:
        ticket = self._changes.new_ticket()
        ticket.resize_to, ticket.extra_mib = spec, self._lacking_mib(lease, spec)
        self._books.enqueue(lease, ticket)
        self._changes.requeued.add(lease.spec.pool)

    def _update_claim(self, lease: Lease, ticket: Ticket, spec: LeaseSpec) -> None:
        ticket.extra_mib = self._lacking_mib(lease, spec)
        if not ticket.extra_mib and spec is lease.spec:
            self._withdraw_claim(lease, "it has enough room")

    def _withdraw_claim(self, lease: Lease, why: str) -> None:
        if lease.ticket is not None and lease.ticket.resize_to is not None:
            is_by_use = lease.ticket.resize_to is lease.spec
            self._changes.withdraw_ticket(lease)
            if not is_by_use:
                self._changes.record(lease.lease_id, "resize.withdrawn", f"it is no longer waiting to grow: {why}")

    def _apply(self, lease: Lease, spec: LeaseSpec) -> None:
        self._books.resize(lease, spec)
        if lease.held_mib:
            self._books.set_reservation(lease, lease.device_ids, self._target_mib(lease, spec))
        self._changes.report_size(
            lease, "resize.done", f"its size is now {_size(spec)}, with {format_memory(lease.held_mib)} reserved"
        )

    def _target_mib(self, lease: Lease, spec: LeaseSpec) -> int:
        """Return the memory that the lease should hold on each of its devices, in MiB."""
        reserve_mib = self._books.reserve_mib(lease, spec)
        if self._books.reserves_cap(lease) or not lease.growth_mib:
            return reserve_mib
        headroom_mib = self._books.policy(lease).headroom_mib
        wanted_mib = lease.used_each_mib + headroom_mib + min(lease.growth_mib, headroom_mib)
        return max(reserve_mib, min(spec.reserve_mib, wanted_mib))

    def _lacking_mib(self, lease: Lease, spec: LeaseSpec) -> int:
        """Return the memory that the lease lacks on each of its devices, in MiB. An exclusive device's free memory counts as held."""
        has_mib = lease.held_mib
        devices = [self._books.devices[one] for one in lease.device_ids if one in self._books.devices]
        if devices and all(device.is_exclusive for device in devices):
            whole_mib = min(device.lease_capacity_mib - device.sums.reserved_mib for device in devices) + has_mib
            has_mib = max(has_mib, whole_mib)
        return max(0, self._target_mib(lease, spec) - has_mib)


def _size(spec: LeaseSpec) -> str:
    return f"{format_fraction(spec.fraction_milli)} GPU with up to {format_memory(spec.reserve_mib)}"


# -- memory caps -------------------------------------------------------------------------------------------------------
GRACE_MS = 5000
"""A lease may exceed its cap for this long before anything happens."""

SLACK_MIB = 16
"""A lease may exceed its cap by this much, because each process's use is rounded up."""

_WHAT_FOLLOWS = {
    Breach.WARN: "free some memory: other kernels might run out of memory because of this",
    Breach.SUSPEND: "it is suspended when idle and resumed only where all its memory fits: free some memory, or ask for a larger share",
    Breach.KILL: "this pool ends the kernel's processes on the device: ask for a larger share",
}


@dataclass(slots=True, eq=False)
class _Excess:
    """A lease that is using more memory than its cap, and since when."""

    lease: Lease
    since_ms: int
    reported: bool = False  # whether its kernel was notified


class MemoryCaps:
    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._over: dict[str, _Excess] = {}

    def measured(self, lease: Lease) -> None:
        """Check a new measurement against the lease's cap."""
        device = self._changes.books.devices.get(lease.device_id or "")
        capped = lease.state is LeaseState.RESIDENT and device is not None and not device.is_exclusive
        is_over = capped and lease.used_mib > _cap_mib(lease) + SLACK_MIB
        if not is_over:
            self._over.pop(lease.lease_id, None)
        elif lease.lease_id not in self._over:
            self._over[lease.lease_id] = _Excess(lease, self._changes.now_ms)

    def enforce(self) -> list[Lease]:
        """Report leases that are still over their cap after the grace period. Return the idle ones that must now be suspended."""
        due = []
        for lease_id, excess in list(self._over.items()):
            lease = excess.lease
            if lease.state is not LeaseState.RESIDENT:
                del self._over[lease_id]
            elif excess.since_ms + GRACE_MS <= self._changes.now_ms:
                action = self._changes.books.policy(lease).breach
                if not excess.reported:
                    self._report(excess, action)
                if action is Breach.SUSPEND and not lease.busy and not lease.is_unsuspendable:
                    due.append(lease)
        return due

    def due_ms(self) -> int | None:
        """Return the time at which the next grace period, or pause after a failed suspend, ends. Return None if neither is pending."""
        times = [excess.since_ms + GRACE_MS for excess in self._over.values()]
        times += [excess.lease.retries.suspend_after_ms for excess in self._over.values() if excess.reported]
        return min((at_ms for at_ms in times if at_ms > self._changes.now_ms), default=None)

    def _report(self, excess: _Excess, action: Breach) -> None:
        lease, excess.reported = excess.lease, True
        used, cap = format_memory(lease.used_mib), format_memory(_cap_mib(lease))
        sentence = f"this kernel uses {used} of device memory, more than its cap of {cap}; {_WHAT_FOLLOWS[action]}"
        self._changes.record(lease.lease_id, f"breach.{action}", sentence)
        self._changes.effects.append(CapBreached(lease_id=lease.lease_id, action=action, sentence=sentence))
        if action is Breach.KILL:  # if its use does not fall, it is reported again after another grace period
            excess.since_ms, excess.reported = self._changes.now_ms, False


def _cap_mib(lease: Lease) -> int:
    return lease.spec.reserve_mib * max(1, lease.spec.devices)
