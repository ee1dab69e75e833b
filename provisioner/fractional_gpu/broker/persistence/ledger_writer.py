"""Writes the ledger in a thread, in order. Writes that are submitted during one transaction form the next one.

A commit waits for the disk, so grouping keeps a burst of events from waiting once for each.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fractional_gpu.host import failpoints
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError, RecordError

__all__ = ["LedgerWriter"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class _Write:
    act: Callable[[], None]
    done: asyncio.Future[None]


class LedgerWriter:
    """The only user of an open ledger: one thread, one writer."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._pending: list[_Write] = []
        self._flushing: asyncio.Task[None] | None = None
        self.trouble = ""  # why nothing can be written now, and what to do: a sentence without its full stop
        self._wrote: Callable[[float], None] = lambda _took_s: None
        self._trouble_changed: Callable[[], None] = _nothing
        self._again: asyncio.TimerHandle | None = None

    def connect(self, *, wrote: Callable[[float], None], trouble_changed: Callable[[], None]) -> None:
        """Set what is called, on the loop, after each transaction (with the seconds that it took) and when `trouble` changes."""
        self._wrote, self._trouble_changed = wrote, trouble_changed

    def submit(self, act: Callable[[], None], unwritten: Callable[[], None] | None = None) -> asyncio.Future[None]:
        """Write soon, after everything submitted before. Returns a future that is done when the write is on the disk.

        A failure is logged; a restarted broker queries the driver for the truth anyway. `unwritten` is called, on the loop, if another
        attempt may succeed: the disk was full, and the record itself is valid.
        """
        done = self._enqueue(act)
        done.add_done_callback(_log_failure)
        if unwritten is not None:
            done.add_done_callback(partial(_call_if_unwritten, unwritten))
        return done

    async def run(self, act: Callable[[], None]) -> None:
        """Write and return when it is on the disk. Raises LedgerError. Cancellation does not take the write back."""
        await asyncio.shield(self._enqueue(act))

    async def flushed(self) -> None:
        """Return when everything submitted before is on the disk. Raises LedgerError if nothing can be written."""
        await self.run(_nothing)

    async def read(self, act: Callable[[], T]) -> T:
        """Return what `act` reads, after everything submitted before is on the disk. Raises LedgerError."""
        await self.flushed()
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    async def put_back(self) -> None:
        """Write the whole ledger again after its files were deleted. Raises LedgerError. Cancellation does not stop it."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.ledger.put_back)

    async def close(self) -> None:
        """Write what is pending and close the ledger."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        while self._flushing is not None:
            await self._flushing
        await asyncio.get_running_loop().run_in_executor(self._thread, self.ledger.close)
        self._thread.shutdown()

    def _enqueue(self, act: Callable[[], None]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Write(act, done))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return done

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        # Let the caller submit the rest of the same decision, such as an operation's intent, for the same transaction.
        await asyncio.sleep(0)
        while self._pending:
            group, self._pending = self._pending, []
            begun_s = time.monotonic()
            try:
                failures = await loop.run_in_executor(self._thread, self._write, [write.act for write in group])
            except LedgerError as error:
                failures = [error] * len(group)
            except Exception as error:  # the waiting callers need the error, and the next group must be written
                log.critical("the broker failed while it wrote the ledger", exc_info=error)
                failures = [LedgerError(f"the broker failed while it wrote the ledger: {error!r}")] * len(group)
            self._wrote(time.monotonic() - begun_s)
            self._note_trouble(group, failures)
            for write, failure in zip(group, failures, strict=True):
                if write.done.cancelled():
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
                log.info("the ledger can be written again")
            self._trouble_changed()

    def _look_again(self) -> None:
        """Write something, to find out whether writing works again."""
        self._again = None
        if self.trouble:
            self._enqueue(partial(self.ledger.keep, "last-look", "")).add_done_callback(_seen)

    def _write(self, acts: list[Callable[[], None]]) -> list[LedgerError | None]:
        failures: list[LedgerError | None] = []
        points = sorted({_name(act) for act in acts}) if failpoints.enabled() else []
        _reach(points, "before")
        with self.ledger.transaction():
            for act in acts:
                try:
                    act()
                except RecordError as error:  # this record was invalid and changed nothing; the others stand
                    failures.append(error)
                else:
                    failures.append(None)
            _reach(points, "unfinished")
        _reach(points, "after")
        return failures


def _name(act: Callable[[], None]) -> str:
    return str(getattr(getattr(act, "func", act), "__name__", "write"))


def _reach(points: list[str], moment: str) -> None:
    for point in points:
        if failpoints.reach(f"ledger.{point}.{moment}"):
            raise LedgerError("the ledger cannot be used: a test says that the disk is full")


def _explained(folder: Path, error: LedgerError) -> str:
    if "full" in str(error):
        return (
            f"the broker's state folder {folder} is full; free some room there (`df -h {folder}`), and everything goes on by itself, "
            "within seconds"
        )
    return f"the broker cannot write its state: {error}; everything goes on by itself once it can"


def _seen(done: asyncio.Future[None]) -> None:
    """Retrieve the result of the probe, so that asyncio does not log it; `trouble` has it."""
    if not done.cancelled():
        done.exception()


def _nothing() -> None:
    """Do nothing, in the order of the writes."""


def _log_failure(done: asyncio.Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.error("the ledger was not written: %s", error)


def _call_if_unwritten(unwritten: Callable[[], None], done: asyncio.Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, LedgerError) and not isinstance(error, RecordError):
        unwritten()
