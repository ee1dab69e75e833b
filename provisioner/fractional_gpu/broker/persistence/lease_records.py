"""Writes each lease, as it is, into the ledger and into its second record.

A kernel may use a device only once the ledger has its reservation there: the next broker would give away a reservation that only the kernel
knew of. So the gate opens when the write is done, not when the arbiter decides.
"""

import asyncio
from functools import partial
from typing import Final

from fractional_gpu.broker.clock import DeadlineClock, now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.lease_files import LeaseFiles
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.runtime import Runtime
from fractional_gpu.core.model import HOLDING, LeaseState, LeaseView
from fractional_gpu.ledger.records import LeaseRecord
from fractional_gpu.protocol.messages import GateVerb

__all__ = ["LeaseRecords", "devices_of"]

_WRITE_AGAIN_S: Final = 1.0
_MAY_BE_SAVED: Final = frozenset({LeaseState.SUSPENDING, LeaseState.QUARANTINED})
_MOST_MEMBERS: Final = 256  # of a kernel's processes that the ledger remembers


class LeaseRecords:
    """The records of one broker's leases. `files` holds the second records, if there are any. Everything runs on the broker's loop."""

    def __init__(
        self, broker: Runtime, writer: LedgerWriter, deadlines: DeadlineClock, files: LeaseFiles | None = None
    ) -> None:
        self.files = files
        self._broker = broker
        self._writer = writer
        self._deadlines = deadlines
        self._closed = False

    def save(self, kernel: Kernel, *, limit: bool = False) -> None:
        """Write the lease as it stands; with `limit`, send the kernel its memory limit once that is on the disk. Returns at once."""
        kernel.on_disk.save_due = False
        record = self.save_second_record(kernel)
        if record is None:
            return
        device_ids = _reserved(record)
        if not device_ids:
            kernel.on_disk.reserved = ()
            kernel.on_disk.unreserved_saves += 1
        done = self._writer.submit(partial(self._writer.ledger.save_lease, record))
        done.add_done_callback(partial(self._saved, kernel, device_ids, kernel.on_disk.unreserved_saves, limit))

    def _saved(
        self,
        kernel: Kernel,
        device_ids: tuple[str, ...],
        unreserved_saves: int,
        limit: bool,
        done: asyncio.Future[None],
    ) -> None:
        if done.cancelled() or self._broker.kernels.get(kernel.lease_id) is not kernel:
            return
        if done.exception() is not None:
            if not self._closed and not kernel.on_disk.save_due:  # its cell may be waiting for this
                kernel.on_disk.save_due = True
                asyncio.get_running_loop().call_later(_WRITE_AGAIN_S, partial(self.save, kernel, limit=True))
            return
        # Writes are done in their order. If a save without a reservation followed this one, the reservation is over already.
        is_latest = unreserved_saves == kernel.on_disk.unreserved_saves
        if device_ids and device_ids != kernel.on_disk.reserved and is_latest:
            kernel.on_disk.reserved = device_ids
            self._broker.open_gate(kernel)
            kernel.notify()
        elif limit and kernel.link is not None and (device_ids := self.may_use(kernel)):
            kernel.link.send(GateVerb.LIMIT, environment=self._broker.environment(kernel.lease_id, device_ids))

    def may_use(self, kernel: Kernel) -> tuple[str, ...]:
        """Return the devices that the kernel may use now: it is resident, and the ledger has its reservation. There may be none."""
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or view.state is not LeaseState.RESIDENT or devices_of(view) != kernel.on_disk.reserved:
            return ()
        return kernel.on_disk.reserved

    def save_second_record(self, kernel: Kernel) -> LeaseRecord | None:
        """Have the second record written soon, and return what `record` returns."""
        record = self.record(kernel)
        if record is not None and self.files is not None:
            self.files.put(record)
        return record

    def record(self, kernel: Kernel) -> LeaseRecord | None:
        """Return the lease as the ledger keeps it, or None if the arbiter does not know it."""
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None:
            return None
        identity, launch, checkpoint = kernel.identity, kernel.launch, kernel.checkpoint
        # The arbiter learns what was saved at the suspend's end. A broker that dies before leaves the sizes that it was to save.
        saving_mib = checkpoint.total_mib if view.state in _MAY_BE_SAVED else 0
        pin_left_ms = view.pinned_until_ms - now_ms()
        return LeaseRecord(
            spec=view.spec,
            state=view.state,
            generation=view.generation,
            device_id=view.device_id,
            saved_mib=max(view.saved_mib, saving_mib),
            uid=kernel.uid,
            kernel_id=launch.kernel_id,
            token_sha256=kernel.token_sha256,
            boot_id=identity.boot_id if identity else "",
            pid=identity.pid if identity else None,
            start_time=identity.start_time if identity else None,
            connection=kernel.connection,
            language=launch.language,
            ipykernel=launch.ipykernel,
            created_ms=kernel.created_ms,
            suspends=kernel.suspends,
            resumes=kernel.resumes,
            home_device_id=checkpoint.home,
            device_ids=view.device_ids if len(view.device_ids) > 1 else (),
            home_device_ids=checkpoint.homes if len(checkpoint.homes) > 1 else (),
            members=tuple(one.to_text() for one in sorted(kernel.members)[:_MOST_MEMBERS]),
            released=kernel.ending.released,
            server=launch.server.to_text() if launch.server is not None else "",
            token_file=launch.token_file,
            pinned_until_ms=self._deadlines.now_ms() + pin_left_ms if pin_left_ms > 0 else 0,
        )

    def remove_second_record(self, lease_id: str) -> None:
        """Have the second record of a lease that is over removed soon."""
        if self.files is not None:
            self.files.drop(lease_id)

    def stop_retrying(self) -> None:
        """Try no failed write again: the broker ends."""
        self._closed = True

    async def close(self) -> None:
        """Write the second records that are due."""
        if self.files is not None:
            await self.files.close()


def devices_of(view: LeaseView) -> tuple[str, ...]:
    """Return all devices of a lease, its first one first."""
    return view.device_ids or ((view.device_id,) if view.device_id is not None else ())


def _reserved(record: LeaseRecord) -> tuple[str, ...]:
    """Return the devices on which the record says that the lease holds a reservation."""
    if record.state not in HOLDING or record.device_id is None:
        return ()
    return record.device_ids or (record.device_id,)
