"""Emptying whole devices: idle leases that are spread over several devices are moved together.

In a pool that says so (`empty_devices`), the idle leases of a device move to fuller ones of its kind, so that none moves back, if all of
them can: a partly emptied device is worth nothing. Among fuller devices with busy leases, `fragmentation` chooses. Only leases move that
have been idle for a while, are not expected, and take no longer than the pool allows for early swaps; and while no ticket of it waits.
"""

from collections.abc import Iterable

from fractional_gpu.core.books.records import Device, Lease, OccupancyKind
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.model import PoolSpec
from fractional_gpu.core.rules.eligibility import other_devices, suspendable_from_ms
from fractional_gpu.core.rules.fairness import swap_ms
from fractional_gpu.core.rules.fragmentation import device_choice
from fractional_gpu.core.rules.likelihood import is_expected
from fractional_gpu.core.scheduler.migration import begin_move

QUIET_MS = 60_000
"""A lease moves together with others after it has been idle for so long."""


class IdlePacking:
    """Begins such moves. `recheck_ms`: when time alone allows one."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self.recheck_ms: int | None = None

    def pack(self) -> None:
        """Begin the next move of each pool that empties devices, as long as swap channels are free."""
        self.recheck_ms = None
        for pool in self._books.pools.values():
            if pool.empty_devices and pool.may_move and pool.name not in self._books.waiting_pools:
                self._pack(pool)

    def _pack(self, pool: PoolSpec) -> None:
        books = self._books
        devices = [books.devices[device_id] for device_id in pool.devices if device_id in books.devices]
        for device in sorted(devices, key=_fullness):
            if not self._changes.channel_free:
                return
            leases = list(device.holders.values())
            if not leases or not all(self._may_move(lease, pool) for lease in leases):
                continue
            plan = self._plan(leases, device)
            if plan is not None:
                lease, target = plan
                sentence = "idle; with it on a fuller device, its own becomes empty"
                begin_move(self._changes, lease, (target,), "move.pack", sentence)
                return

    def _may_move(self, lease: Lease, pool: PoolSpec) -> bool:
        books = self._books
        from_ms = suspendable_from_ms(pool, lease)
        if lease.occupancy is not OccupancyKind.IDLE or from_ms is None or lease.count > 1 or lease.ticket is not None:
            return False
        if lease.let_in or lease.revoked or lease.gate.closed or is_expected(books, lease):
            return False
        if lease.host_need_mib > books.host_left_mib or swap_ms(books, lease) > pool.foresight_swap_ms:
            return False
        from_ms = max(from_ms, lease.last_active_ms + QUIET_MS)
        if from_ms > books.now_ms:
            self.recheck_ms = from_ms if self.recheck_ms is None else min(self.recheck_ms, from_ms)
        return from_ms <= books.now_ms

    def _plan(self, leases: Iterable[Lease], device: Device) -> tuple[Lease, str] | None:
        """Return the first move of those that empty a device; None if not all of its leases have a place elsewhere."""
        books, free_mib = self._books, dict[str, int]()
        first: tuple[Lease, str] | None = None
        for lease in sorted(leases, key=lambda one: (-one.held_mib, one.number)):
            for device_id in other_devices(books, lease):
                if _fullness(books.devices[device_id]) > _fullness(device):
                    free_mib.setdefault(device_id, books.devices[device_id].free_mib)
            fitting = [(one, left) for one, left in free_mib.items() if left >= lease.held_mib]
            if not fitting:
                return None
            # Where only idle leases are, the device may be emptied next: they come together on the fullest one, and move once.
            in_use = [place for place in fitting if _is_in_use(books.devices[place[0]])]
            choice = device_choice(books, lease, lease.held_mib, free_mib.items)
            target = choice.best(in_use) or min(fitting, key=lambda place: place[1])[0]
            free_mib[target] -= lease.held_mib
            first = first or (lease, target)
        return first


def _is_in_use(device: Device) -> bool:
    """Return whether a lease is on the device that does not idle."""
    return device.mib(OccupancyKind.IDLE) < device.sums.reserved_mib


def _fullness(device: Device) -> tuple[int, str]:
    return device.sums.reserved_mib, device.spec.device_id
