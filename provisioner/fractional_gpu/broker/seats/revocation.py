"""Revokes the leases of a seat that has ended. The same server's next seat can take them over. Otherwise, they are eventually ended.

- A revoked lease is suspended and still counts towards its user's limits (`core.revoke`). A lease without a process ends at once.
- The next seat for the same user and server takes over the revoked leases that fit alongside its other kernels.
- If no seat takes over a lease within its pool's `revoked_ttl`, its processes are ended, as in an eviction.
- The ledger keeps a seat's owner and end time while the seat has leases. If a lease's seat is neither active nor recorded, because the
  ledger was lost, the lease is revoked when the broker starts, and any of its user's servers can take it over.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import msgspec

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.services.residency import end_tree
from fractional_gpu.core.events import SeatEnded, SeatRenewed
from fractional_gpu.core.model import LeaseView
from fractional_gpu.core.units import format_duration
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.errors import ConflictError, ForbiddenError, NoRoomError
from fractional_gpu.protocol.messages import GateVerb

log = logging.getLogger(__name__)

_NAME: Final = "ended-seats"  # the key in the ledger


class _EndedSeat(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    server: str | None
    since_ms: int


class Revocations:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._ended: dict[str, _EndedSeat] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        broker.end_processes = self._end_processes

    def recover(self, ledger: Ledger, live: Collection[str]) -> None:
        self._ended = ledger.kept_as(_NAME, dict[str, _EndedSeat], {})
        for seat_id, leases in self._by_seat().items():
            if seat_id not in live:
                owner = leases[0][1].spec.owner
                self._revoke(seat_id, _EndedSeat(owner=owner, server=None, since_ms=self._broker.deadlines.now_ms()))

    def seat_ended(self, seat: SeatRecord) -> None:
        since_ms = self._broker.deadlines.now_ms()
        self._revoke(seat.seat_id, _EndedSeat(owner=seat.owner, server=seat.server, since_ms=since_ms))

    def end_leases(self, seat_id: str) -> None:
        for kernel, _ in self._by_seat().get(seat_id, []):
            self._end_processes(kernel.lease_id)

    def take_over(self, seat: SeatRecord, check: Callable[[Kernel, LeaseView], None]) -> None:
        """Let a new seat take over its server's revoked leases, oldest first. Skip leases for which `check` raises an error."""
        for kernel, view in self._broker.views():
            ended = self._ended.get(view.spec.seat)
            if (
                not view.revoked
                or ended is None
                or ended.owner != seat.owner
                or ended.server not in {None, seat.server}
            ):
                continue
            try:
                check(kernel, view)
            except (ForbiddenError, NoRoomError) as error:
                log.info("lease %s: seat %s cannot take it over: %s", kernel.lease_id[:8], seat.seat_id[:8], error)
                continue
            self._broker.dispatch(SeatRenewed(at_ms=now_ms(), lease_id=kernel.lease_id, seat=seat.seat_id))
            kernel.cell.ticket_by_broker, kernel.taken_over = False, True
            self._broker.records.save(kernel)
            self._broker.sync_busy_state(kernel)
            kernel.notify()
        self._save()

    def of_user(self, pool: str, owner: str, server: str) -> list[LeaseView]:
        return [
            view
            for _, view in self._broker.views()
            if view.revoked
            and view.spec.pool == pool
            and view.spec.owner == owner
            and (ended := self._ended.get(view.spec.seat)) is not None
            and ended.server not in {None, server}
        ]

    def _by_seat(self) -> dict[str, list[tuple[Kernel, LeaseView]]]:
        found: dict[str, list[tuple[Kernel, LeaseView]]] = {}
        for kernel, view in self._broker.views():
            if view.spec.seat:
                found.setdefault(view.spec.seat, []).append((kernel, view))
        return found

    def _revoke(self, seat_id: str, ended: _EndedSeat) -> None:
        leases = self._by_seat().get(seat_id, [])
        if not leases:
            return
        ended = self._ended.setdefault(seat_id, ended)
        ago_ms = max(0, self._broker.deadlines.now_ms() - ended.since_ms)
        for kernel, view in leases:
            event = SeatEnded(at_ms=now_ms(), lease_id=view.spec.lease_id, since_ms=now_ms() - ago_ms)
            self._broker.dispatch(event)
            self._notify_kernel(kernel)
        self._save()

    def _notify_kernel(self, kernel: Kernel) -> None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is not None and view.ends_ms is not None and kernel.link is not None:
            left = format_duration(max(0, view.ends_ms - now_ms()))
            sentence = (
                "The seat of this kernel's server has ended: the kernel keeps its variables and uses no GPU. It ends in "
                f"{left} unless you start the server again with at least as large a share."
            )
            kernel.link.send(GateVerb.NOTICE, sentence=sentence)
        kernel.notify()

    def _save(self) -> None:
        there = {view.spec.seat for _, view in self._broker.views() if view.revoked}
        self._ended = {seat_id: ended for seat_id, ended in self._ended.items() if seat_id in there}
        text = msgspec.json.encode(self._ended).decode()
        self._broker.writer.submit(partial(self._broker.writer.ledger.keep, _NAME, text))

    def _end_processes(self, lease_id: str) -> None:
        kernel = self._broker.kernels.get(lease_id)
        if kernel is not None and not kernel.requests.evictions:
            task = asyncio.get_running_loop().create_task(self._end(kernel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, kernel: Kernel) -> None:
        log.warning(
            "lease %s: its seat has ended and no other has taken it over; ending its processes", kernel.lease_id[:8]
        )
        try:
            await end_tree(self._broker, kernel)
            await self._broker.survivors.release(kernel)
        except ConflictError as error:  # the arbiter will request this again
            log.error("lease %s: %s", kernel.lease_id[:8], error)  # noqa: TRY400 - the sentence says it

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
