"""Carries out the arbiter's time-consuming decisions: suspending, resuming, shrinking, and re-examining leases in an unknown state.

- Each operation first writes its intent to disk (a lease record whose state shows that the lease is being suspended or resumed). Whatever
  happens, each ends by dispatching an event. Without that event, no later operation could begin.
- Before the broker exits, it finishes operations that have begun. Examinations of quarantined leases are abandoned instead, because the
  next broker will repeat them anyway.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from fractional_gpu.broker.clock import now_ms, within
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.effects import LookAgain, Resume, Shrink, Suspend
from fractional_gpu.core.events import (
    HostMemoryNeeded,
    ResumeFinished,
    ResumeOutcome,
    Shrunk,
    SuspendFinished,
    SuspendOutcome,
    TruthFound,
)
from fractional_gpu.core.model import LeaseState
from fractional_gpu.ledger.records import LedgerError

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
_FAILED_RESUME_PAUSE_S = 1.0  # the arbiter tries again at once, so this limits how often a failing driver is called
_BROKEN = "the broker failed during the operation; see its log"


class Operations:
    def __init__(self, broker: "Broker", swaps: Swaps) -> None:
        self._broker = broker
        self._swaps = swaps
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: set[asyncio.Task[None]] = set()
        self._look_now = asyncio.Event()
        self.sample: Callable[[], Awaitable[None]] | None = None  # samples the devices now

    def start(self, effect: Suspend | Resume | LookAgain | Shrink) -> None:
        match effect:
            case Suspend():
                self._spawn(self._suspend(effect), self._tasks)
            case Resume():
                self._spawn(self._resume(effect), self._tasks)
            case LookAgain():
                self._spawn(self._look_again(effect), self._looking)
            case Shrink():
                self._spawn(self._shrink(effect), self._looking)

    def look_now(self) -> None:
        self._look_now.set()
        self._look_now = asyncio.Event()

    def device_returned(self) -> None:
        """Let the next operation start a new worker, and re-examine every quarantined lease."""
        self._swaps.worker.renew()
        self.look_now()

    async def close(self) -> None:
        for task in self._looking:
            task.cancel()
        while self._tasks or self._looking:
            await asyncio.gather(*self._tasks, *self._looking, return_exceptions=True)

    @staticmethod
    def _spawn(work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(partial(_task_done, tasks))

    async def _suspend(self, effect: Suspend) -> None:
        outcome, mib, sentence = SuspendOutcome.UNKNOWN, 0, _BROKEN
        begun_s = time.monotonic()
        try:
            kernel = self._broker.kernels.get(effect.lease_id)
            if kernel is None:
                outcome, sentence = SuspendOutcome.ABORTED, "the lease is gone"
                return
            await self._write_down(kernel, "suspend")
            journal, reserve = partial(self._write_down, kernel), partial(self._reserve, effect)
            outcome, mib, sentence = await self._swaps.suspend(kernel, effect, journal, reserve)
        except LedgerError as error:
            outcome = SuspendOutcome.ABORTED
            sentence = f"nothing was started because the broker could not record it: {error}"
        finally:
            log.info("lease %s: suspend took %.3f s: %s", effect.lease_id[:8], time.monotonic() - begun_s, outcome)
            self._broker.dispatch(
                SuspendFinished(
                    at_ms=now_ms(),
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=outcome,
                    saved_mib=mib if outcome is SuspendOutcome.SAVED else 0,
                    need_mib=0 if outcome is SuspendOutcome.SAVED else mib,
                    sentence=sentence,
                )
            )
            if (kernel := self._broker.kernels.get(effect.lease_id)) is not None:
                self._broker.suspend_finished(kernel)  # the kernel may have become busy

    def _reserve(self, effect: Suspend, need_mib: int) -> int:
        """Ask the arbiter to reserve host memory for the suspend. Return the total MiB reserved afterwards."""
        self._broker.dispatch(
            HostMemoryNeeded(
                at_ms=now_ms(),
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                need_mib=need_mib,
            )
        )
        view = self._broker.arbiter.lease(effect.lease_id)
        return view.host_reserved_mib if view is not None and view.generation == effect.generation else effect.host_mib

    async def _shrink(self, effect: Shrink) -> None:
        used_mib = None
        try:
            kernel = self._broker.kernels.get(effect.lease_id)
            if kernel is not None:
                used_mib = await self._swaps.shrink(kernel)
        finally:
            self._broker.dispatch(
                Shrunk(at_ms=now_ms(), lease_id=effect.lease_id, generation=effect.generation, used_mib=used_mib)
            )

    async def _resume(self, effect: Resume) -> None:
        outcome, sentence = ResumeOutcome.UNKNOWN, _BROKEN
        begun_s = time.monotonic()
        try:
            kernel, view = self._broker.kernels.get(effect.lease_id), self._broker.arbiter.lease(effect.lease_id)
            if kernel is None or view is None:
                outcome, sentence = ResumeOutcome.NOT_STARTED, "the lease is gone"
                return
            # Reading the processes changes nothing, so it need not wait until the intent is written.
            await asyncio.gather(self._write_down(kernel, "resume"), self._swaps.glance())
            if why := await self._broker.hard_caps.apply(kernel):  # a restore beyond the limit would kill the process
                outcome, sentence = ResumeOutcome.NOT_STARTED, f"it cannot be resumed now: {why}"
            else:
                outcome, sentence = await self._swaps.resume(kernel, effect, view.saved_mib)
            if outcome is ResumeOutcome.NOT_STARTED:
                await asyncio.sleep(_FAILED_RESUME_PAUSE_S)
                if self.sample is not None:  # a program without a lease may have taken the room since the last sample
                    await self.sample()
        except LedgerError as error:
            outcome = ResumeOutcome.NOT_STARTED
            sentence = f"nothing was started because the broker could not record it: {error}"
            await asyncio.sleep(_FAILED_RESUME_PAUSE_S)
        finally:
            log.info("lease %s: resume took %.3f s: %s", effect.lease_id[:8], time.monotonic() - begun_s, outcome)
            self._broker.dispatch(
                ResumeFinished(
                    at_ms=now_ms(),
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=outcome,
                    sentence=sentence,
                )
            )

    async def _look_again(self, effect: LookAgain) -> None:
        """Keep examining the lease until its state is determined or changes. If a process has failed, report that once and continue."""
        reported = ""
        for attempt in count():
            await within(_LOOK_AGAIN_S[min(attempt, len(_LOOK_AGAIN_S) - 1)], self._look_now)
            try:
                await self._swaps.worker.wait_for_previous_worker()
                kernel, view = self._broker.kernels.get(effect.lease_id), self._broker.arbiter.lease(effect.lease_id)
                if kernel is None or view is None or view.generation != effect.generation:
                    return
                if kernel.checkpoint.needs_driver and self._swaps.inspector.off:
                    continue  # the devices' counts alone cannot decide this (`recovery`)
                truth = await self._swaps.truth(kernel, view.device_id, view.saved_mib)
            except OSError as error:  # out of descriptors or memory; the next look may succeed
                log.error("cannot examine lease %s: %s", effect.lease_id[:8], error)  # noqa: TRY400 - as it says
                continue
            if truth is None or (truth.state is LeaseState.QUARANTINED and truth.sentence == reported):
                continue
            state, device_id = truth.state, truth.device_id
            if state is LeaseState.NO_CONTEXT and view.device_id is not None:
                # The kernel's gate may be open, and its next cell may create a context, so keep the reservation.
                state, device_id = LeaseState.RESIDENT, view.device_id
            self._broker.dispatch(
                TruthFound(
                    at_ms=now_ms(),
                    lease_id=effect.lease_id,
                    generation=effect.generation,
                    state=state,
                    device_id=device_id,
                    saved_mib=truth.saved_mib,
                    sentence=truth.sentence,
                )
            )
            if state is not LeaseState.QUARANTINED:
                return
            reported = truth.sentence

    async def _write_down(self, kernel: Kernel, phase: str) -> None:
        """Before a phase, record the lease and the size to be saved in the ledger. If this raises LedgerError, the phase must not start."""
        log.debug("lease %s: %s", kernel.lease_id[:8], phase)
        await self._broker.records.write(kernel)


def _task_done(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the broker failed while carrying out a decision", exc_info=error)
