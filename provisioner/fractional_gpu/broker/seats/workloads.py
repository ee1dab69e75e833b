"""Tracks the jobs and pods that own seats: who may use a seat, when it ends, and whether its kernels' saved state fits in memory.

- Only processes in a workload's control group may use its seat, because a user's jobs share a uid and can read each other's files.
- A seat ends when its workload's control group disappears, or when the machine reboots. A job has no control group before its first step,
  so a seat whose group has never been seen is left for the engine's epilog or node agent to release.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import structs

from fractional_gpu.broker.broker import Broker
from fractional_gpu.host.process import boot_id
from fractional_gpu.host.workload import (
    KUBERNETES,
    find_group,
    group_exists,
    memory_warning,
    workload_name,
    workload_of,
)
from fractional_gpu.ledger.records import SeatRecord
from fractional_gpu.protocol.errors import ForbiddenError
from fractional_gpu.protocol.messages import Workload

log = logging.getLogger(__name__)

_EVERY_S: Final = 2.0


class Workloads:
    """The jobs and pods that own `seats`, which maps ids to current seats. Use only on the event loop's thread.

    `gone(seat)` ends a seat, and `changed(seat)` saves a seat whose control group has just become known.
    """

    def __init__(
        self,
        broker: Broker,
        seats: Mapping[str, SeatRecord],
        *,
        gone: Callable[[SeatRecord], None],
        changed: Callable[[SeatRecord], None],
    ) -> None:
        self._broker = broker
        self._seats = seats
        self._gone = gone
        self._changed = changed
        self._boot_id = boot_id()  # read now, because the broker may be out of descriptors later
        self.warnings: dict[str, str] = {}  # by seat: a sentence that explains why its kernels may not be saved
        self._examined: set[str] = set()  # seats whose memory limit has been read

    def check(self, seat: SeatRecord, pid: int, what: str) -> None:
        workload = seat.workload
        if workload is None:
            return
        name = workload_name(workload.engine, workload.id)
        try:
            found = workload_of(pid) if pid > 0 else None
        except (ProcessLookupError, PermissionError):
            found = None
        if found is None or (found.engine, found.id) != (workload.engine, workload.id):
            where = f"runs in {found.name}" if found is not None else "is not in the control group of any job or pod"
            raise ForbiddenError(
                f"this seat belongs to {name}, and {what} {where}; use the seat only inside {name} (JUPYTER_GPU_SEAT_FILE must be "
                "the one that the engine set for this job or pod)",
                reason="other-workload",
            )
        if found.group and not seat.group_seen:
            self._changed(_with_group(seat, found.group))

    def of_pod(self, pid: int) -> SeatRecord | None:
        """Return the seat of the pod the process runs in. This needs no token, because a process can't change its control group."""
        pods = {
            seat.workload.id: seat
            for seat in self._seats.values()
            if seat.workload is not None and seat.workload.engine == KUBERNETES
        }
        if not pods or pid <= 0:
            return None
        try:
            found = workload_of(pid)
        except (ProcessLookupError, PermissionError):
            return None
        return pods.get(found.id) if found is not None and found.engine == KUBERNETES else None

    async def warning(self, seat: SeatRecord) -> str:
        """Return why suspending the seat's idle kernels might fail, or "" if no obstacle is known."""
        if seat.workload is None:
            return ""
        found = await asyncio.to_thread(_warning_of, seat, seat.workload)
        if found is None or seat.seat_id not in self._seats:
            return ""
        self._examined.add(seat.seat_id)
        if found and self.warnings.get(seat.seat_id) != found:
            self.warnings[seat.seat_id] = found
            log.warning("seat %s of %r: %s", seat.seat_id[:8], seat.owner, found)
            for kernel, view in self._broker.views():
                if view.spec.seat == seat.seat_id:
                    self.tell(kernel.lease_id, seat.seat_id)
        return found

    def tell(self, lease_id: str, seat_id: str) -> None:
        if (found := self.warnings.get(seat_id)) is not None:
            self._broker.record_line(lease_id, "seat.memory", found)

    async def run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        seats = [seat for seat in self._seats.values() if seat.workload is not None]
        for seat, group, there in await asyncio.to_thread(_states, seats, self._boot_id) if seats else ():
            if self._seats.get(seat.seat_id) is not seat:
                continue  # the seat changed or ended
            if there is False:
                self._gone(seat)
                continue
            if there and not seat.group_seen:
                self._changed(_with_group(seat, group))
            if there and seat.seat_id not in self._examined:
                await self.warning(self._seats[seat.seat_id])
        self.warnings = {seat_id: text for seat_id, text in self.warnings.items() if seat_id in self._seats}
        self._examined &= self._seats.keys()


def _with_group(seat: SeatRecord, group: str) -> SeatRecord:
    workload = None if seat.workload is None else structs.replace(seat.workload, control_group=group)
    return structs.replace(seat, workload=workload, group_seen=True)


def _states(seats: list[SeatRecord], boot: str) -> list[tuple[SeatRecord, str, bool | None]]:
    found: list[tuple[SeatRecord, str, bool | None]] = []
    for seat in seats:
        workload = seat.workload
        if workload is None:
            continue
        if seat.boot_id and seat.boot_id != boot:
            found.append((seat, workload.control_group, False))
            continue
        try:
            if seat.group_seen:
                found.append((seat, workload.control_group, group_exists(workload.control_group)))
                continue
            group = _group_of(workload)
        except OSError as error:
            log.warning("cannot read the control groups: %s", error)
            continue
        found.append((seat, group, True if group else None))
    return found


def _group_of(workload: Workload) -> str:
    given = workload.control_group
    return given if given and group_exists(given) else find_group(workload.engine, workload.id)


def _warning_of(seat: SeatRecord, workload: Workload) -> str | None:
    """Return the seat's warning, or "" if there is none. Return None if the seat's control group is unknown or its limit can't be read."""
    try:
        group = _group_of(workload)
        return memory_warning(workload.engine, group, seat.memory_mib) if group else None
    except (OSError, ValueError) as error:
        log.warning("cannot read the memory limit of %s: %s", workload_name(workload.engine, workload.id), error)
        return None
