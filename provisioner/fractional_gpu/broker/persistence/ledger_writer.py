"""Writes to the ledger (leases, their histories, forecasts) in order, in a separate thread.

Each commit waits for the disk. Writes submitted during a transaction are therefore grouped into the next one, so that a burst of events
does not wait for one commit per event.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.kernels.context_sizes import ContextSizes
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.lease_files import LeaseFiles
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.model import HOLDING, LeaseState, LeaseView
from fractional_gpu.core.units import format_memory
from fractional_gpu.host.threads import StartedThreads
from fractional_gpu.ledger.ledger import ACCOUNTS_MS, HISTORY_MS, Ledger
from fractional_gpu.ledger.records import LeaseRecord, LedgerError, RecordError
from fractional_gpu.protocol.messages import GateVerb
from fractional_gpu.protocol.status import UsagePoint

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK_AGAIN_S = 2.0
_LEAST_KEPT_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class _Write:
    act: Callable[[], None]
    done: asyncio.Future[None]
    again: bool  # whether to repeat it until it succeeds


class _ActError(Exception):
    """A failed write in a transaction, which is then rolled back."""

    def __init__(self, number: int, error: LedgerError) -> None:
        super().__init__(str(error))
        self.number, self.error = number, error


class LedgerWriter:
    """The sole user of an open ledger. One thread does all writes, and another does long reads, so that these do not hold up writes."""

    def __init__(self, ledger: Ledger, *, limit_bytes: int = 2**32) -> None:
        self.ledger = ledger
        self.limit_bytes = limit_bytes
        self.size_bytes = ledger.size_bytes()  # after the last transaction
        self.over_limit = ""  # why history is deleted early; a sentence like `trouble`, but everything can be written
        self._thread = StartedThreads(1, "ledger")
        self._aside = StartedThreads(1, "ledger-reports")
        self._pending: list[_Write] = []
        self._failed: list[_Write] = []  # writes to repeat before all others
        self._flushing: asyncio.Task[None] | None = None
        self.trouble = ""  # why nothing can be written now, and what to do, as a sentence without its full stop
        self._wrote: Callable[[float], None] = lambda _took_s: None
        self._trouble_changed: Callable[[], None] = _nothing
        self._again: asyncio.TimerHandle | None = None

    def connect(self, *, wrote: Callable[[float], None], trouble_changed: Callable[[], None]) -> None:
        self._wrote, self._trouble_changed = wrote, trouble_changed

    def submit(self, act: Callable[[], None], *, again: bool = False) -> asyncio.Future[None]:
        """Call `act` to perform a write once all earlier writes have finished. Failures are logged.

        The future is done when the write is on disk. If `again` is true, a failed write (for example because the disk is full) is retried
        before later ones. It is abandoned only if it fails while other writes succeed. The future fails on the first failure.
        """
        done = self._enqueue(act, again=again)
        done.add_done_callback(_log_failure)
        return done

    async def run(self, act: Callable[[], None]) -> None:
        """Call `act` to perform a write, and wait until it is on disk. Raises LedgerError. Cancelling this call does not stop the write."""
        await asyncio.shield(self._enqueue(act))

    async def flushed(self) -> None:
        """Wait until all earlier writes are on disk. Raises LedgerError if nothing can be written."""
        await self.run(_nothing)

    async def read(self, act: Callable[[], T]) -> T:
        """Return the result of `act`, which runs once all earlier writes are on disk. Raises LedgerError."""
        await self.flushed()
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    async def read_aside(self, act: Callable[[], T]) -> T:
        """Return the result of `act` as `read` does, but in parallel with writes. Only one such read runs at a time.

        `act` must use `Ledger.metered`.
        """
        await self.flushed()
        return await asyncio.get_running_loop().run_in_executor(self._aside, act)

    async def prune(self, now_ms: int) -> None:
        """Delete old rows, and more history if the ledger exceeds `limit_bytes`. Uses small transactions to avoid delaying other writes."""
        more = True

        def prune(history_ms: int, accounts_ms: int) -> None:
            nonlocal more
            more = self.ledger.prune(now_ms - history_ms, now_ms - accounts_ms)

        while more:
            await self.run(partial(prune, HISTORY_MS, ACCOUNTS_MS))
        self._note_size()
        for kept_ms in _retentions():
            more = True
            while more and self.size_bytes > self.limit_bytes:
                await self.run(partial(prune, *kept_ms))

    def _note_size(self) -> None:
        """Update `over_limit`, and log it when it is first set. Once set, it is cleared only when the ledger is well below its limit."""
        if self.size_bytes > self.limit_bytes and not self.over_limit:
            self.over_limit = (
                f"the ledger {self.ledger.path} has reached its limit of {format_memory(self.limit_bytes // 2**20)}, so its oldest history "
                "is deleted early; no kernel is affected; find out what fills it (docs/operating.md), or raise c.GPUBroker.ledger_limit"
            )
            log.warning("%s", self.over_limit)
        elif self.size_bytes <= self.limit_bytes * 9 // 10 and self.over_limit:
            self.over_limit = ""
        else:
            return
        self._trouble_changed()

    async def write_out(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.ledger.write_out)

    async def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        while self._flushing is not None:
            await self._flushing
        if self._failed:
            with suppress(LedgerError):
                await self.flushed()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._aside, _nothing)  # wait for the reads under way
        await loop.run_in_executor(self._thread, self.ledger.close)
        self._aside.shutdown()
        self._thread.shutdown()

    def _enqueue(self, act: Callable[[], None], *, again: bool = False) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Write(act, done, again))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return done

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        # Let the caller submit the other writes of the same decision, such as an operation's intent, for the same transaction.
        await asyncio.sleep(0)
        while self._pending:
            group, self._pending, self._failed = [*self._failed, *self._pending], [], []
            begun_s, repeat = time.monotonic(), True
            try:
                failures = await loop.run_in_executor(self._thread, self._write, [write.act for write in group])
            except LedgerError as error:
                failures = [error] * len(group)
            except Exception as error:  # the callers need the error, and the next group must be written
                repeat = False  # one of these writes is the cause, and would make each later group fail
                log.critical("the broker failed while it wrote the ledger", exc_info=error)
                failures = [LedgerError(f"the broker failed while it wrote the ledger: {error!r}")] * len(group)
            self._wrote(time.monotonic() - begun_s)
            self._note_trouble(group, failures)
            for write, failure in zip(group, failures, strict=True):
                if write.again and repeat and failure is not None and not isinstance(failure, RecordError):
                    self._failed.append(write)
                if write.done.done():  # it was cancelled, or is a repeated write
                    continue
                if failure is None:
                    write.done.set_result(None)
                else:
                    write.done.set_exception(failure)
        self._flushing = None

    def _note_trouble(self, group: list[_Write], failures: Sequence[LedgerError | None]) -> None:
        """Update `trouble` after a transaction. Only a write that changes the file shows that writing works again."""
        first = next((one for one in failures if one is not None and not isinstance(one, RecordError)), None)
        before = self.trouble
        if first is not None:
            self.trouble = _explained(self.ledger.path.parent, first)
            if self._again is None:
                self._again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)
        elif any(write.act is not _nothing for write in group):
            self.trouble = ""
        if self.trouble != before:
            if not self.trouble:
                log.info("the ledger is writable again")
            self._trouble_changed()

    def _look_again(self) -> None:
        self._again = None
        if self.trouble:
            self._enqueue(partial(self.ledger.keep, "last-look", "")).add_done_callback(_seen)

    def _write(self, acts: list[Callable[[], None]]) -> list[LedgerError | None]:
        """Do all writes in one transaction, and return their errors. Raises LedgerError if nothing can be written.

        If a write fails, the transaction is retried without it, so that the other writes can succeed.
        """
        failures: list[LedgerError | None] = [None] * len(acts)
        first: LedgerError | None = None
        while True:
            try:
                with self.ledger.transaction():
                    _run(acts, failures)
                break
            except _ActError as failed:
                if _is_full(failed.error):
                    raise failed.error from failed
                first = first or failed.error
                failures[failed.number] = RecordError(str(failed.error))
        if first is not None and not any(
            failure is None and act is not _nothing for act, failure in zip(acts, failures, strict=True)
        ):
            raise first  # the disk may be the cause
        self.size_bytes = self.ledger.size_bytes()
        return failures


def _run(acts: list[Callable[[], None]], failures: list[LedgerError | None]) -> None:
    for number, act in enumerate(acts):
        if failures[number] is not None:
            continue
        try:
            act()
        except RecordError as error:  # this record was invalid and changed nothing; the other writes are kept
            failures[number] = error
        except LedgerError as error:
            raise _ActError(number, error) from error


def _retentions() -> Iterator[tuple[int, int]]:
    """Yield shorter and shorter retention times in ms, as pairs: one for the history and one for leases' usage.

    The history is cut down to an hour before the usage is cut at all.
    """
    history_ms, accounts_ms = HISTORY_MS, ACCOUNTS_MS
    while history_ms > _LEAST_KEPT_MS:
        history_ms = history_ms * 3 // 4
        yield history_ms, accounts_ms
    while accounts_ms > _LEAST_KEPT_MS:
        accounts_ms = accounts_ms * 3 // 4
        yield history_ms, accounts_ms


def _is_full(error: LedgerError) -> bool:
    return "disk is full" in str(error)  # SQLite's wording; the error also contains the path, in which "full" may occur


def _explained(folder: Path, error: LedgerError) -> str:
    if _is_full(error):
        return (
            f"the broker's state folder {folder} is full; free some space there (`df -h {folder}`), and everything continues "
            "within seconds"
        )
    return f"the broker cannot write its state: {error}; everything continues once it can"


def _seen(done: asyncio.Future[None]) -> None:
    """Retrieve the test write's error, so that asyncio does not log it. `trouble` already reports it."""
    if not done.cancelled():
        done.exception()


def _nothing() -> None:
    """Do nothing. When submitted as a write, this finishes once all earlier writes have finished."""


def _log_failure(done: asyncio.Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.error("cannot write the ledger: %s", error)


# Writes the current state of each lease into the ledger and into its backup record.
#
# A kernel may use a device only once the ledger contains its reservation there. If only the kernel knew of a reservation, the next broker
# would give it away. So the gate opens when the write is done, not when the arbiter decides.


_MAY_BE_SAVED: Final = frozenset({LeaseState.SUSPENDING, LeaseState.QUARANTINED})
_MOST_MEMBERS: Final = 256  # processes of a kernel that the ledger remembers


class LeaseRecords:
    """Writes one broker's lease records to the ledger and, if given, backup copies to `files`. All methods run on the broker's loop."""

    def __init__(self, broker: "Broker", files: LeaseFiles | None = None) -> None:
        self.files = files
        self._broker = broker
        self._writer = broker.writer

    def save(self, kernel: Kernel, *, limit: bool = False) -> None:
        """Start writing the lease's current state, and return at once. With `limit`, send the kernel its memory limit after the write."""
        record = self.save_backup_record(kernel)
        if record is None:
            return
        device_ids = record.device_ids if record.state in HOLDING else ()
        if not device_ids:
            kernel.on_disk.reserved = ()
            kernel.on_disk.unreserved_saves += 1
        done = self._writer.submit(partial(self._writer.ledger.save_lease, record))
        done.add_done_callback(partial(self._saved, kernel, device_ids, kernel.on_disk.unreserved_saves, limit))

    async def write(self, kernel: Kernel) -> None:
        """Write the lease's current state, and return when it is on disk. Raises LedgerError."""
        if (record := self.save_backup_record(kernel)) is not None:
            await self._writer.run(partial(self._writer.ledger.save_lease, record))

    def _saved(
        self,
        kernel: Kernel,
        device_ids: tuple[str, ...],
        unreserved_saves: int,
        limit: bool,
        done: asyncio.Future[None],
    ) -> None:
        if done.cancelled() or done.exception() or self._broker.kernels.get(kernel.lease_id) is not kernel:
            return  # `Broker._trouble_changed` saves it again once writing works
        # Writes keep their order, so if a later save recorded no reservation, this reservation has already ended.
        is_latest = unreserved_saves == kernel.on_disk.unreserved_saves
        if device_ids and device_ids != kernel.on_disk.reserved and is_latest:
            kernel.on_disk.reserved = device_ids
            self._broker.open_gate(kernel)
            kernel.notify()
        elif limit and kernel.link is not None and (device_ids := self.may_use(kernel)):
            kernel.link.send(GateVerb.LIMIT, environment=self._broker.environment(kernel.lease_id, device_ids))

    def may_use(self, kernel: Kernel) -> tuple[str, ...]:
        """Return the devices a resident kernel may use now, or an empty tuple.

        The ledger must contain the kernel's reservation, and the driver's memory limit must be high enough for the kernel.
        """
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None or view.state is not LeaseState.RESIDENT or view.device_ids != kernel.on_disk.reserved:
            return ()
        if not self._broker.hard_caps.allows(kernel):
            return ()
        return kernel.on_disk.reserved

    def save_backup_record(self, kernel: Kernel) -> LeaseRecord | None:
        record = self.record(kernel)
        if record is not None and self.files is not None:
            self.files.put(record)
        return record

    def record(self, kernel: Kernel) -> LeaseRecord | None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        if view is None:
            return None
        # The arbiter learns what was saved when the suspend ends. A broker that dies earlier leaves the planned sizes.
        saving_mib = kernel.checkpoint.total_mib if view.state in _MAY_BE_SAVED else 0
        pin_left_ms = view.pinned_until_ms - now_ms()
        return LeaseRecord(
            spec=view.spec,
            state=view.state,
            generation=view.generation,
            device_ids=view.device_ids,
            saved_mib=max(view.saved_mib, saving_mib),
            uid=kernel.uid,
            token_sha256=kernel.token_sha256,
            connection=kernel.connection,
            created_ms=kernel.created_ms,
            launch=replace(kernel.launch),
            identity=kernel.identity,
            facts=kernel.facts,
            home_ids=kernel.checkpoint.homes,
            pinned_until_ms=self._broker.deadlines.now_ms() + pin_left_ms if pin_left_ms > 0 else 0,
            members=tuple(sorted(kernel.members)[:_MOST_MEMBERS]),
            released=kernel.ending.released,
            taken_over=kernel.taken_over,
            own_size=kernel.requests.size_before_burst,
        )

    def remove_backup_record(self, lease_id: str) -> None:
        if self.files is not None:
            self.files.drop(lease_id, LeaseRecord)

    async def close(self) -> None:
        if self.files is not None:
            await self.files.close()


# Records a lease over time for `%gpu history`, with a point for each change of its state and for larger changes of its memory.
#
# A change of memory becomes a point if it exceeds `_STEP_MIB` and a twentieth of the last value. The last point must also be older than two
# seconds, and older than a 200th of the time since this broker's first point. These pauses grow with the age of the lease, so that the
# number of points is limited to about a thousand a day.


_STEP_MIB = 32
_PAUSE_MS = 2000
_PARTS = 200


class _Point(NamedTuple):
    first_ms: int
    last_ms: int
    state: str
    used_mib: int


class History:
    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._points: dict[str, _Point] = {}

    def note(self, view: LeaseView) -> None:
        lease_id, at_ms = view.spec.lease_id, now_ms()
        last = self._points.get(lease_id)
        if last is not None and not _is_worth_a_point(last, view, at_ms):
            return
        first_ms = at_ms if last is None else last.first_ms
        self._points[lease_id] = _Point(first_ms, at_ms, view.state.value, view.used_mib)
        point = UsagePoint(at_ms=wall_ms(), state=view.state.value, used_mib=view.used_mib, saved_mib=view.saved_mib)
        self._writer.submit(partial(self._writer.ledger.add_point, lease_id, point))

    def forget(self, lease_id: str) -> None:
        self._points.pop(lease_id, None)


def _is_worth_a_point(last: _Point, view: LeaseView, at_ms: int) -> bool:
    if last.state != view.state.value:
        return True
    if at_ms - last.last_ms < max(_PAUSE_MS, (at_ms - last.first_ms) // _PARTS):
        return False
    return abs(view.used_mib - last.used_mib) >= max(_STEP_MIB, last.used_mib // 20)


# Saves forecasts and the sizes of CUDA contexts in the ledger every few minutes and when the broker ends. Loads them when it starts.
#
# They are only estimates. If they cannot be read, the broker logs this and starts with its priors.


_FORECASTS, _CONTEXTS = "forecasts", "contexts"
_INTERVAL_S = 300.0
_LARGEST = 1 << 53  # JSON readers in other languages represent whole numbers exactly up to here


def load_forecasts(ledger: Ledger) -> Forecasts:
    return _read(ledger, _FORECASTS, Forecasts) or Forecasts()


def load_context_sizes(ledger: Ledger) -> ContextSizes:
    return _read(ledger, _CONTEXTS, ContextSizes) or ContextSizes()


def save_forecasts(arbiter: Arbiter, contexts: ContextSizes, writer: LedgerWriter) -> None:
    for name, learnt in ((_FORECASTS, arbiter.forecasts), (_CONTEXTS, contexts)):
        writer.submit(partial(writer.ledger.keep, name, msgspec.json.encode(learnt).decode()))


async def save_forecasts_periodically(arbiter: Arbiter, contexts: ContextSizes, writer: LedgerWriter) -> None:
    while True:
        await asyncio.sleep(_INTERVAL_S)
        save_forecasts(arbiter, contexts, writer)


def _read(ledger: Ledger, name: str, kind: type[T]) -> T | None:
    text = ledger.kept(name)
    if text is None:
        return None
    try:
        return read_learnt(text, kind)
    except ValueError as error:
        log.warning("cannot use saved forecasts: %s", error)
        return None


def read_learnt(text: str, kind: type[T]) -> T:
    """Return the saved forecasts. Raises ValueError if they are invalid, because a damaged file must not influence decisions."""
    value = json.loads(text)
    _check_numbers(value)
    return msgspec.convert(value, kind)


def _check_numbers(value: object) -> None:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_numbers(one)
    elif isinstance(value, int | float) and not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.60} is out of range; expected 0 to {_LARGEST}")
