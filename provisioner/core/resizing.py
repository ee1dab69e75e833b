"""Another size for a lease that exists.

Smaller: at once, if what it uses fits. Larger while it is not on a device: at once. Larger while it is: its claim waits in the same line as
tickets and is served where the lease is; idle neighbours step aside for it, and an idle lease that may move goes where there is
room. A claim outlives the lease's own suspend, whose end makes it true at once. A newer request replaces it.
"""

from dataclasses import replace

from provisioner.core.changes import Changes
from provisioner.core.events import ResizeRequested
from provisioner.core.limits import limit_refusal
from provisioner.core.model import LeaseSpec, LeaseState
from provisioner.core.records import Wait
from provisioner.core.requests import size_refusal, too_much
from provisioner.core.state import Lease
from provisioner.core.units import format_fraction, format_memory

__all__ = ["Resizing"]

_UNDER_WAY = frozenset({LeaseState.SUSPENDING, LeaseState.RESUMING, LeaseState.QUARANTINED})


class Resizing:
    """Changes sizes."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def asked(self, lease: Lease, event: ResizeRequested) -> None:
        """Somebody asks for another size."""
        spec = replace(
            lease.spec,
            fraction_milli=event.fraction_milli,
            reserve_mib=event.reserve_mib,
            request_mib=event.request_mib,
        )
        refused = self._refusal(lease, spec)
        if refused is not None:
            self._changes.decline(lease, refused.reason, refused.sentence, about="resize")
            return
        self.forget(lease, "another size was asked")
        if not lease.held_mib:
            self._apply(lease, spec)
        elif self._grows(lease, spec):
            self._claim(lease, spec)
        else:
            self._apply(lease, spec)

    def _refusal(self, lease: Lease, spec: LeaseSpec) -> Wait | None:
        if lease.state in _UNDER_WAY:
            return Wait("in-operation", f"the kernel is {lease.state}: try again in a moment")
        pool = self._books.pools.get(spec.pool)
        if pool is None:
            return Wait("unknown-pool", f"pool {spec.pool!r} is not configured any more: ask the administrator")
        refused = size_refusal(self._books, pool, spec) or limit_refusal(self._books, pool, spec, instead_of=lease.spec)
        refused = refused or too_much(self._books, pool, spec, instead_of=lease.spec)
        if refused is not None:
            return refused
        used_mib = lease.saved_each_mib if lease.saved_mib else lease.used_each_mib
        if used_mib <= spec.reserve_mib or spec.reserve_mib >= lease.spec.reserve_mib:
            return None
        return Wait(
            "in-use",
            f"{format_memory(spec.reserve_mib)} were asked, but the kernel uses {format_memory(used_mib)}: "
            "free memory first (delete variables, empty the framework's cache), or ask for more",
        )

    def _grows(self, lease: Lease, spec: LeaseSpec) -> bool:
        devices = [self._books.devices[one] for one in lease.device_ids if one in self._books.devices]
        if all(device.whole for device in devices):
            return False
        return self._books.reserve_mib(lease, spec) > lease.held_mib or spec.fraction_milli > lease.spec.fraction_milli

    def _claim(self, lease: Lease, spec: LeaseSpec) -> None:
        ticket = self._changes.new_ticket()
        ticket.grow = spec
        ticket.extra_mib = max(0, self._books.reserve_mib(lease, spec) - lease.held_mib)
        self._books.enqueue(lease, ticket)
        self._changes.requeued.add(lease.spec.pool)
        self._changes.record(lease.lease_id, "resize.asked", f"it waits for room to grow to {_size(spec)}")

    def forget(self, lease: Lease, why: str) -> None:
        """Withdraw a claim that still waits."""
        if lease.ticket is not None and lease.ticket.grow is not None:
            self._changes.withdraw(lease)
            self._changes.record(lease.lease_id, "resize.withdrawn", f"it waits no more to grow: {why}")

    def grow(self, lease: Lease) -> None:
        """There is room on the lease's own devices: give it what it waits for."""
        spec = lease.ticket.grow if lease.ticket is not None else None
        if spec is not None:
            self._changes.withdraw(lease)
            self._apply(lease, spec)
            self._changes.touched.update(lease.device_ids)

    def _apply(self, lease: Lease, spec: LeaseSpec) -> None:
        self._books.resize(lease, spec)
        if lease.held_mib:
            self._books.hold(lease, lease.device_ids, self._books.reserve_mib(lease, spec))
        self._changes.tell_size(lease, "resize.done", f"its size is {_size(spec)} now")


def _size(spec: LeaseSpec) -> str:
    return f"{format_fraction(spec.fraction_milli)} GPU with up to {format_memory(spec.reserve_mib)}"
